"""Examples as people want to see them: text as text, expressions with their value, pictures as pictures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from tcnca.data.store import Dataset
from tcnca.errors import DataError

_SHADES = " ░▒▓█"
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = 1000
_END = 40
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """An example for people."""

    title: str
    """Which it is, and its label."""
    body: str
    """What it looks like in a terminal."""
    picture: NDArray[np.uint8] | None = None
    """What it looks like."""


def shown(data: Dataset, split: str, index: int, width: int = 80, whole: bool = False) -> Shown:
    """Example `index` of a split, for a terminal of `width` characters; long texts are cut unless `whole`."""
    example = data.example(split, index)
    title = _plain(f"{data.name}, {split} {index:,}{_label(data, example)}")
    limit = None if whole else _SHOWN
    if "bytes" in example:
        stream = data.columns(split)["bytes"]
        piece = np.asarray(stream[index : index + (limit or 100 * _SHOWN)])  # type: ignore[index]
        return Shown(title=title.replace(f" {index:,}", f" from byte {index:,}"), body=_text(piece, None))
    if "pixels" in example:
        pixels = np.asarray(example["pixels"])
        return Shown(title=title, body=blocks(pixels, width), picture=pixels)
    if "values" in example:
        return Shown(title=title, body=_bars(np.asarray(example["values"]), width))
    if "first" in example:
        both = (f"{which}: {_tokens(data, example[which], limit)}" for which in ("first", "second"))
        return Shown(title=title, body="\n".join(both))
    return Shown(title=title, body=_tokens(data, example["tokens"], limit))


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
    # The end belongs to it: there, recall asks its question.
    begin, end = (_text(np.asarray(part), symbols) for part in (tokens[: limit - _END], tokens[-_END:]))
    return f"{begin} … {end} ({len(tokens):,} in all)"


def _text(tokens: NDArray[np.uint8], symbols: Sequence[str] | None) -> str:
    if symbols is not None:
        return " ".join(symbols[token] for token in tokens)
    return _plain(tokens.tobytes().decode("utf-8", errors="replace"))


def _plain(text: str) -> str:
    """A text without what a terminal would obey."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def blocks(pixels: NDArray[np.uint8], width: int) -> str:
    """A picture in shades of characters, each of which is one pixel wide and two high.

    A picture that is too wide is made smaller; a thin bright line stays visible, since the brightest pixel counts.
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
    """Each feature as a row of bars, from its least to its greatest value."""
    lines = []
    for feature in range(values.shape[1]):
        series = values[:, feature]
        pieces = np.array_split(series, min(max(width - 24, 1), len(series)))
        means = np.array([piece.mean() for piece in pieces])
        span = float(means.max() - means.min()) or 1.0
        heights = ((means - means.min()) / span * (len(_BARS) - 1)).round().astype(int)
        lines.append(f"{series.min():>10.4g} {''.join(_BARS[height] for height in heights)} {series.max():<10.4g}")
    return "\n".join(lines)


def save_pictures(path: Path, examples: Sequence[Shown]) -> None:
    """Write the pictures of some examples into one file, side by side, each under its title."""
    pictures = [(example.title, example.picture) for example in examples if example.picture is not None]
    size = max(picture.shape[1] for _, picture in pictures)
    # About 256 pixels each, whatever the size of the originals.
    factor = max(1, 256 // size)
    side, caption = size * factor, 16
    columns = min(4, len(pictures))
    rows = -(-len(pictures) // columns)
    sheet = Image.new("L", (columns * (side + 8), rows * (side + caption + 8)), 64)
    draw = ImageDraw.Draw(sheet)
    for place, (title, picture) in enumerate(pictures):
        left, top = place % columns * (side + 8) + 4, place // columns * (side + caption + 8) + 4
        large = Image.fromarray(picture).resize((side, side), Image.Resampling.NEAREST)
        draw.text((left, top), title, fill=255)
        sheet.paste(large, (left, top + caption))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        sheet.save(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: cannot be written ({error}); give a file that ends in .png") from error
