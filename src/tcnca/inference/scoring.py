"""Scoring: how many bits a language model needs for each byte of a text, in total, along it, and where most."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tcnca.errors import InputError, plot_text
from tcnca.inference.streaming import Bits, Stream
from tcnca.models import SequenceModel
from tcnca.models.prediction import check_language_model
from tcnca.models.preprocessing import ADD_BYTE_MAP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NEWLINE = 10
MAX_POINTS = 4096
"""Points of the curve along a text, at most."""
WINDOW = 32
"""Bytes of a place."""
CONTEXT = 80
"""Bytes of its line that are kept before a place, and after it."""
UNKNOWN_BITS = 16.0
"""Bits of a byte that does not occur in the training data, which the model does not read."""
MAX_LINE_TEXT = 200
"""Bytes of a line that are kept for its score."""


def score(model: SequenceModel, text: str | bytes) -> Bits:
    """Return the bits that a language model needs for each byte of a text, `[bytes]`; their mean is bits per byte.

    `tcnca.Stream(model).score(piece)` reads a text in pieces, for files that are larger than the memory.
    """
    check_bytes(model)
    return Stream(model).score(text)


def check_bytes(model: SequenceModel, name: str = "model") -> None:
    """Raise an InputError unless a model is a language model of bytes; `name` is named in it."""
    check_language_model(model, name)
    if model.preprocessing.byte_map is None:
        found = f"without a byte map; {ADD_BYTE_MAP}" if model.preprocessing.symbols is None else "of words"
        raise InputError(f"{name}: expected a language model of bytes, got one {found}")


def known_bytes(model: SequenceModel, data: bytes) -> NDArray[np.bool_]:
    """Return which bytes of a text the model knows, `[bytes]`."""
    return np.isin(np.arange(256), model.preprocessing.byte_map or ())[np.frombuffer(data, np.uint8)]


def score_bytes(stream: Stream, data: bytes) -> Bits:
    """Return the bits of each byte of the next piece of a text; the model skips bytes that it does not know."""
    known = known_bytes(stream.model, data)
    bits = np.full(len(data), UNKNOWN_BITS)
    bits[known] = stream.score(np.frombuffer(data, np.uint8)[known].tobytes())
    return bits


@dataclasses.dataclass(frozen=True)
class Place:
    """A part of a text, with the bits that it takes."""

    bits: float
    """Its bits."""
    offset: int
    """Where it begins, in bytes from the start of the text."""
    line: int
    """The line of its first byte, from 1."""
    length: int
    """Number of bytes."""
    text: bytes
    """Its bytes; only the first ones of a long line."""
    before: bytes = b""
    """Bytes before it in the same line."""
    after: bytes = b""
    """Bytes after it in the same line."""

    def to_dict(self) -> dict[str, int | float | str]:
        """Return what is written to files; bytes that are not UTF-8 become the replacement character."""
        return {
            "line": self.line,
            "offset": self.offset,
            "bytes": self.length,
            "bits": round(self.bits, 4),
            "bits_per_byte": round(self.bits / self.length, 4),
            "text": self.text.decode("utf-8", "replace"),
        }


class Curve:
    """Mean bits per byte along a text of unknown length, at no more than `MAX_POINTS` points."""

    def __init__(self) -> None:
        self.width, self._count = 1, 0
        self._sums = np.zeros(MAX_POINTS)

    def add(self, bits: Bits) -> None:
        """Continue the curve."""
        while self._count + len(bits) > MAX_POINTS * self.width:
            self._sums = np.concatenate([self._sums[::2] + self._sums[1::2], np.zeros(MAX_POINTS // 2)])
            self.width *= 2
        index = np.arange(self._count, self._count + len(bits)) // self.width
        self._sums += np.bincount(index, bits, MAX_POINTS)
        self._count += len(bits)

    def values(self) -> Bits:
        """Return the mean of each `width` bytes; of fewer at the end."""
        ends = np.minimum(np.arange(0, self._count, self.width) + self.width, self._count)
        return self._sums[: len(ends)] / np.diff(ends, prepend=0)


class Places:
    """Finds the parts of a text, `WINDOW` bytes each and without overlap, that take the most bits."""

    def __init__(self, count: int) -> None:
        # Of each group of `WINDOW` positions the best is a candidate. It can overlap those of both neighbors: among so
        # many, `count` remain.
        self._count, self._keep = count, 3 * count
        self._heap: list[tuple[float, int, Place]] = []  # bits, minus the offset, place
        # Where the next group begins, the bits from there on, and the bytes from its context on.
        self._offset, self._line = 0, 1
        self._bits, self._data = np.zeros(0), b""

    def add(self, data: bytes, bits: Bits) -> None:
        """Search the next piece of the text."""
        if not self._count:
            return
        self._data += data
        self._bits = np.concatenate([self._bits, bits])
        # Whole groups, so that the pieces do not matter, and only those whose context is known.
        done = (len(self._bits) - CONTEXT - WINDOW + 1) // WINDOW * WINDOW
        if done <= 0:
            return
        self._heap = self._search(done)
        shift = len(self._data) - len(self._bits)
        self._line += self._data.count(b"\n", shift, shift + done)
        self._offset += done
        self._bits = self._bits[done:]
        self._data = self._data[max(shift + done - CONTEXT, 0) :]

    def _search(self, size: int) -> list[tuple[float, int, Place]]:
        """Return the heap with the places that begin in the next `size` bytes."""
        heap = self._heap.copy()
        sums = np.convolve(self._bits[: size + WINDOW - 1], np.ones(WINDOW), "valid")
        padded = np.full(-(-size // WINDOW) * WINDOW, -np.inf)
        padded[:size] = sums
        starts = padded.reshape(-1, WINDOW).argmax(1) + np.arange(0, size, WINDOW)
        # Those of the data, which begins before the first window.
        shift = len(self._data) - len(self._bits)
        newlines = np.flatnonzero(np.frombuffer(self._data, np.uint8)[shift:] == _NEWLINE)
        for start in starts[np.argsort(-sums[starts], kind="stable")[: self._keep]].tolist():
            key = float(sums[start]), -(self._offset + start)
            if len(heap) == self._keep and key < heap[0][:2]:
                break
            line = self._line + int(np.searchsorted(newlines, start))
            entry = *key, self._place(key[0], start, line, shift + start)
            if len(heap) < self._keep:
                heapq.heappush(heap, entry)
            else:
                heapq.heapreplace(heap, entry)
        return heap

    def _place(self, bits: float, start: int, line: int, begin: int) -> Place:
        """Return the place `start` bytes after the next one, which begins at `begin` in the data, with its line."""
        data, end = self._data, begin + WINDOW
        first = max(data.rfind(b"\n", 0, begin) + 1, begin - CONTEXT, 0)
        newline = data.find(b"\n", end - 1, end + CONTEXT)
        last = max(newline, end) if newline >= 0 else end + CONTEXT
        return Place(
            bits, self._offset + start, line, WINDOW, data[begin:end], data[first:begin], data[end:last].rstrip(b"\r")
        )

    def best(self) -> list[Place]:
        """Return the places found so far, those with the most bits first."""
        if self._count and 0 < len(self._data) < WINDOW:
            return [Place(float(self._bits.sum()), 0, 1, len(self._data), self._data)]
        rest = len(self._bits) - WINDOW + 1
        found: list[Place] = []
        offsets = [-math.inf, math.inf]
        for _, _, place in sorted(self._search(rest) if self._count and rest > 0 else self._heap, reverse=True):
            index = bisect.bisect(offsets, place.offset)
            if place.offset - offsets[index - 1] >= WINDOW and offsets[index] - place.offset >= WINDOW:
                offsets.insert(index, place.offset)
                found.append(place)
            if len(found) == self._count:
                break
        return found


class Lines:
    """Adds up the bits of each line of a text, its newline included."""

    def __init__(self) -> None:
        self._line, self._offset, self._bits, self._length, self._text = 1, 0, 0.0, 0, b""

    def add(self, data: bytes, bits: Bits) -> Iterator[Place]:
        """Continue the text, and yield the lines that end in it."""
        begin = 0
        ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
        for end in [*ends.tolist(), len(data)]:
            self._bits += float(bits[begin:end].sum())
            self._length += end - begin
            self._text += data[begin : min(end, begin + MAX_LINE_TEXT - len(self._text))]
            begin = end
            if end and data[end - 1] == _NEWLINE and self._length:
                yield from self.finish()

    def finish(self) -> Iterator[Place]:
        """Yield the last line, if it has no newline."""
        if self._length:
            yield Place(self._bits, self._offset, self._line, self._length, self._text.rstrip(b"\r\n"))
        self._line, self._offset = self._line + 1, self._offset + self._length
        self._bits, self._length, self._text = 0.0, 0, b""


class TextProfile:
    """What is known about the bits of a text that comes in pieces.

    Args:
        places: how many of the most surprising places to find.
    """

    def __init__(self, places: int = 10) -> None:
        self.count, self.bits, self.unknown = 0, 0.0, 0
        self.curve, self._places = Curve(), Places(places)
        self._best: list[Place] | None = None

    def add(self, data: bytes, bits: Bits, unknown: int = 0) -> None:
        """Continue the text, of which the model does not know some bytes."""
        self._best = None
        self.count += len(data)
        self.unknown += unknown
        self.bits += float(bits.sum())
        self.curve.add(bits)
        self._places.add(data, bits)

    @property
    def bits_per_byte(self) -> float:
        """Mean over the text; NaN if it is empty."""
        return self.bits / self.count if self.count else math.nan

    def places(self) -> list[Place]:
        """Return the most surprising places, the first one first."""
        if self._best is None:
            self._best = self._places.best()
        return self._best


_COLORS = ("#1f4e79", "#c8553d", "#3a7d44", "#7b5ea7")
_LIGHT, _ACCENT = "#a9c4de", "#c8553d"


def draw_profiles(path: Path, texts: Mapping[str, Mapping[str, TextProfile]]) -> None:
    """Draw the bits per byte along texts, in the format of the file's suffix: a panel for each text.

    One model is drawn with its mean and the most surprising places, several models with a curve each.

    Args:
        path: the file.
        texts: the profiles, by the name of the text and that of the model.
    """
    # Slow to import, and needed only here.
    from tcnca.training.report import save_figure

    save_figure(functools.partial(_draw_panels, texts), path)


def _draw_panels(texts: Mapping[str, Mapping[str, TextProfile]]) -> Figure:
    from matplotlib.figure import Figure

    from tcnca.training.report import GRAY, format_ticks

    models = list(dict.fromkeys(model for profiles in texts.values() for model in profiles))
    title = next(iter(texts)) if len(texts) == 1 else f"{len(texts)} texts"
    title = f"Bits per byte of {title}" + (f" by {models[0]}" if len(models) == 1 else " (moving mean over 2%)")
    figure = Figure(figsize=(7.2, min(1.4 + 1.8 * len(texts), 100)), layout="constrained")
    panels = figure.subplots(len(texts), squeeze=False, sharey=True)[:, 0]
    for axis, (text, profiles) in zip(panels, texts.items(), strict=True):
        if len(models) == 1:
            _draw_profile(axis, profiles[models[0]], alone=len(texts) == 1)
        else:
            _draw_models(axis, profiles, models, alone=len(texts) == 1)
        if len(texts) > 1:
            axis.set_title(plot_text(text), loc="left", fontsize=9)
            means = [
                f"{f'{model} ' if len(models) > 1 else ''}{profile.bits_per_byte:.4f}"
                for model, profile in profiles.items()
            ]
            axis.set_title(plot_text(f"mean: {', '.join(means)}"), loc="right", fontsize=8, color=GRAY)
        axis.set_ylabel("bits per byte", color=GRAY)
        format_ticks(axis)
    panels[0].set_ylim(bottom=0)  # of all panels, after all curves are drawn
    panels[-1].set_xlabel("offset in the text (bytes)", color=GRAY)
    lines = {str(line.get_label()): line for axis in panels for line in axis.lines}
    legend = figure.legend(
        handles=list(lines.values()),
        loc="outside upper left",
        ncols=2,
        frameon=False,
        fontsize=8,
        title=plot_text(title),
    )
    # It is the title of the figure: `suptitle` and a legend above the panels would overlap.
    legend.set_alignment("left")
    legend.get_title().set(fontsize=11, fontweight="bold")
    return figure


def _draw_profile(axis: Axes, profile: TextProfile, alone: bool) -> None:
    """Draw a text by one model: all points, their moving mean, the mean of the text and the most surprising places."""
    from tcnca.training.report import GRAY

    offsets, values, means = _points(profile)
    width = profile.curve.width
    every = "each byte" if width == 1 else f"means of {width:,} bytes"
    every = every if alone else "each byte (in long texts, means of several)"
    axis.plot(offsets, values, color=_LIGHT, linewidth=0.6, label=every)
    axis.plot(offsets, means, color=_COLORS[0], linewidth=1.3, label="moving mean (2% of the text)")
    mean = f"mean: {profile.bits_per_byte:.4f} bits per byte" if alone else "mean of the text"
    axis.axhline(profile.bits_per_byte, color=GRAY, linewidth=0.8, linestyle="--", label=mean)
    if places := profile.places():
        middles = [place.offset + place.length / 2 for place in places]
        bits = [place.bits / place.length for place in places]
        label = f"most surprising places (means of {WINDOW} bytes)"
        axis.plot(middles, bits, "o", color=_ACCENT, markersize=3.5, clip_on=False, label=label)


def _draw_models(axis: Axes, profiles: Mapping[str, TextProfile], models: Sequence[str], alone: bool) -> None:
    """Draw a text by several models: their moving means, since all points would hide each other."""
    for model, profile in profiles.items():
        offsets, _, means = _points(profile)
        color = _COLORS[models.index(model) % len(_COLORS)]
        label = plot_text(f"{model}: {profile.bits_per_byte:.4f} bits per byte" if alone else model)
        axis.plot(offsets, means, color=color, linewidth=1.3, label=label)


def _points(profile: TextProfile) -> tuple[Bits, Bits, Bits]:
    """Return the offsets of the curve, its values and their moving means."""
    from tcnca.training.report import smooth

    values = profile.curve.values()
    offsets = (np.arange(len(values), dtype=np.float64) + 0.5) * profile.curve.width
    return offsets, values, smooth(values, max(len(values) // 100, 1))
