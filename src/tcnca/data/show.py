"""Display examples and statistics of a data set."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnca.data.schema import BLOCK, Column, Columns, Ragged, num_examples
from tcnca.data.store import Dataset
from tcnca.errors import DataError
from tcnca.extras import require

_SHADES = " ░▒▓█"
_BARS = "▁▂▃▄▅▆▇█"
_MAX_TEXT = 1000
_TAIL = 40
_MAX_FEATURES = 32
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenderedExample:
    """An example as text, and as an image if it is one."""

    title: str
    body: str
    image: NDArray[np.uint8] | None = None


def render_example(data: Dataset, split: str, index: int, width: int = 80, full: bool = False) -> RenderedExample:
    """Render example `index` of a split for a terminal of `width` characters; truncate long texts unless `full`."""
    example = data.example(split, index)
    title = plain_text(f"{data.name}, {split} {index:,}{_label(data, example)}")
    limit = None if full else _MAX_TEXT
    if "bytes" in example:
        stream = data.columns(split)["bytes"]
        piece = np.asarray(stream[index : index + (limit or 100 * _MAX_TEXT)])  # type: ignore[index]
        return RenderedExample(title=title.replace(f" {index:,}", f" from byte {index:,}"), body=_text(piece, None))
    if "pixels" in example:
        pixels = np.asarray(example["pixels"])
        return RenderedExample(title=title, body=render_pixels(pixels, width), image=pixels)
    if "values" in example:
        return RenderedExample(title=title, body=_bars(np.asarray(example["values"]), width))
    if "first" in example:
        both = (f"{which}: {_tokens(data, example[which], limit)}" for which in ("first", "second"))
        return RenderedExample(title=title, body="\n".join(both))
    return RenderedExample(title=title, body=_tokens(data, example["tokens"], limit))


def _label(data: Dataset, example: dict[str, Any]) -> str:
    if "labels" in example:
        return f": {data.manifest['class_names'][int(example['labels'])]}"
    if "targets" in example:
        return ": " + ", ".join(f"{target:.6g}" for target in np.ravel(example["targets"]))
    return ""


def _tokens(data: Dataset, tokens: NDArray[np.uint8], limit: int | None) -> str:
    symbols = data.manifest.get("symbols")
    if limit is None or len(tokens) <= limit:
        return _text(np.asarray(tokens), symbols)
    # Keep the end, which holds the query of associative recall.
    begin, end = (_text(np.asarray(part), symbols) for part in (tokens[: limit - _TAIL], tokens[-_TAIL:]))
    return f"{begin} … {end} ({len(tokens):,} tokens)"


def _text(tokens: NDArray[np.uint8], symbols: Sequence[str] | None) -> str:
    if symbols is not None:
        return " ".join(symbols[token] if token < len(symbols) else "?" for token in tokens)
    return plain_text(tokens.tobytes().decode("utf-8", errors="replace"))


def plain_text(text: str) -> str:
    """Replace control characters."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def render_pixels(pixels: NDArray[np.uint8], width: int) -> str:
    """Render an image with block characters, each one pixel wide and two pixels high.

    An image that is too wide is reduced to the maximum of each block, so that thin bright lines stay visible.
    """
    factor = -(-pixels.shape[1] // width)
    rows = -(-pixels.shape[0] // (2 * factor))
    columns = -(-pixels.shape[1] // factor)
    canvas = np.zeros((rows * 2 * factor, columns * factor), np.uint8)
    canvas[: pixels.shape[0], : pixels.shape[1]] = pixels
    peaks = canvas.reshape(rows, 2 * factor, columns, factor).max(axis=(1, 3))
    shades = np.rint(peaks / 255 * (len(_SHADES) - 1)).astype(int)
    return "\n".join("".join(_SHADES[shade] for shade in row).rstrip() for row in shades)


def _bars(values: NDArray[np.float32], width: int) -> str:
    """Render each feature as a row of bars from its minimum to its maximum."""
    lines = []
    for feature in range(min(values.shape[1], _MAX_FEATURES)):
        series = values[:, feature]
        pieces = np.array_split(series, min(max(width - 24, 1), len(series)))
        means = np.array([piece.mean() for piece in pieces])
        span = float(means.max() - means.min()) or 1.0
        heights = ((means - means.min()) / span * (len(_BARS) - 1)).round().astype(int)
        lines.append(f"{series.min():>10.4g} {''.join(_BARS[height] for height in heights)} {series.max():<10.4g}")
    if values.shape[1] > _MAX_FEATURES:
        lines.append(f"and {values.shape[1] - _MAX_FEATURES:,} more features")
    return "\n".join(lines)


def save_images(path: Path, examples: Sequence[RenderedExample]) -> None:
    """Write the images of examples to one file, in a grid with their titles."""
    require("plots", str(path))
    # Imported here: `tcnca.data` is imported for training, which does not need it.
    from PIL import Image, ImageDraw

    images = [(example.title, example.image) for example in examples if example.image is not None]
    size = max(image.shape[1] for _, image in images)
    # Scale each image to about 256 pixels.
    factor = max(1, 256 // size)
    side, caption = size * factor, 16
    columns = min(4, len(images))
    rows = -(-len(images) // columns)
    sheet = Image.new("L", (columns * (side + 8), rows * (side + caption + 8)), 64)
    draw = ImageDraw.Draw(sheet)
    for index, (title, image) in enumerate(images):
        left, top = index % columns * (side + 8) + 4, index // columns * (side + caption + 8) + 4
        large = Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST)
        draw.text((left, top), title, fill=255)
        sheet.paste(large, (left, top + caption))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        sheet.save(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: cannot be written ({error}); give a file name that ends in .png") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """Statistics of a split: examples (bytes for a language model), and the lengths of sequences in time steps."""

    examples: int
    shortest: int
    mean: float
    longest: int
    symbols: int | None
    """Number of distinct tokens; None for real-valued sequences."""
    class_counts: dict[str, int]


def summarize_data(data: Dataset) -> dict[str, SplitSummary]:
    """Return statistics of the splits of a data set."""
    names = data.manifest.get("class_names", [])
    return {split: _summarize(columns, names) for split, columns in data.splits.items()}


def _summarize(columns: Columns, names: list[str]) -> SplitSummary:
    if "bytes" in columns:
        lengths = np.array([num_examples(columns)])
    else:
        inputs = [column for name, column in columns.items() if name not in ("labels", "targets")]
        lengths = np.concatenate([_lengths(column) for column in inputs])
    labels = np.asarray(columns.get("labels", np.zeros(0, np.int64)))
    counts = np.bincount(labels, minlength=len(names))
    return SplitSummary(
        examples=num_examples(columns),
        shortest=int(lengths.min()) if len(lengths) else 0,
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        longest=int(lengths.max()) if len(lengths) else 0,
        symbols=_symbols(columns),
        class_counts={name: int(number) for name, number in zip(names, counts, strict=True) if number},
    )


def _lengths(column: Column) -> NDArray[np.int64]:
    if isinstance(column, Ragged):
        return column.lengths
    steps = int(np.prod(column.shape[1:])) if column.dtype == np.uint8 else column.shape[1]
    return np.full(len(column), steps)


def _symbols(columns: Columns) -> int | None:
    tokens = [columns[name] for name in ("bytes", "tokens", "first", "second") if name in columns]
    if not tokens:
        return None
    occurs = np.zeros(256, np.int64)
    for column in tokens:
        values = column.values if isinstance(column, Ragged) else column.reshape(-1)
        # In blocks, since NumPy converts tokens to int64 to count them.
        for begin in range(0, len(values), BLOCK):
            occurs += np.bincount(values[begin : begin + BLOCK], minlength=256)
    return int((occurs > 0).sum())
