"""Pathfinder and Path-X: pictures of dashed curves and two dots; do the dots lie on the same curve?

After Linsley et al., Learning long-range spatial dependencies with horizontal gated recurrent units (2018), with the
parameters that Long-Range Arena (2021) used.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tcnca.data.columns import Column
from tcnca.data.generators.pathfinder_growth import Board, grow_distractors, grow_pairs, stamp
from tcnca.data.generators.pathfinder_stamps import Bytes, Ints, dashes, disc
from tcnca.data.rng import CounterRNG
from tcnca.errors import ConfigError

Floats = NDArray[np.float32]

_SCALE = 2
"""How much finer things are drawn than seen."""
_BLOCK = 1 << 22
"""Pixels made at a time, to bound memory."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Scenes:
    """Pictures, and what they are made of: each is the brightest of its layers and of the dots."""

    pixels: Bytes
    """`[count, size, size]`."""
    labels: Ints
    """`[count]`: 1 where both dots lie on the same curve, 0 where they lie on different ones."""
    curves: Bytes
    """`[count, 2, size, size]`: the two long curves, each alone."""
    distractors: Bytes
    """`[count, size, size]`: the short curves alone."""
    dots: Ints
    """`[count, 2, 2]`: middle of each dot (row, column)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pathfinder:
    """The parameters of a picture. Lengths are in pixels, contrasts relative to the dots."""

    version: ClassVar[int] = 1
    """Raised whenever the same key comes to give other pictures."""

    size: int
    """Side of the picture."""
    dash: int
    """Length of a dash."""
    thickness: float
    """Thickness of a dash, in halves."""
    margins: tuple[int, ...]
    """Room about a dash; each picture takes one of these."""
    radius: float
    """Radius of a dot."""
    seed_distance: int
    """Distance between the starts of the two long curves."""
    continuity: float
    """How straight curves are: 1.0 lets them turn by up to 90 degrees, 2.0 by up to 45."""
    distractors: int
    """Number of short curves, where there is room for them."""
    curve_contrast: float
    """Contrast of the dashes of the long curves."""
    distractor_contrast: float
    """Contrast of the dashes of the short curves."""
    curve_dashes: int = 14
    """Dashes of a long curve."""
    distractor_dashes: int = 4
    """Dashes of a short curve."""
    padding: int = 1
    """Width of the border that stays empty."""
    distractor_attempts: int = 5
    """How often to try to place a short curve before it is left out."""

    def __post_init__(self) -> None:
        if self.thickness * _SCALE % 1 or self.thickness <= 0:
            raise ConfigError(f"thickness: got {self.thickness}, allowed are positive multiples of 0.5")
        if self.curve_dashes < 2 or self.distractor_dashes < 2:
            got = f"{self.curve_dashes} and {self.distractor_dashes}"
            raise ConfigError(f"curve_dashes, distractor_dashes: got {got}, allowed are two or more")

    def examples(self, draw: CounterRNG, count: int) -> dict[str, Column]:
        """`count` pictures: `pixels`, uint8 `[count, size, size]`, and `labels`, int64 `[count]`.

        They depend on the key of `draw` and on `count` alone.
        """
        scenes = self._scenes(draw, count, layers=False)
        return {"pixels": scenes.pixels, "labels": scenes.labels}

    def scenes(self, draw: CounterRNG, count: int) -> Scenes:
        """The same pictures as `examples`, with what they are made of."""
        return self._scenes(draw, count, layers=True)

    def _scenes(self, draw: CounterRNG, count: int, layers: bool) -> Scenes:
        """Pictures in blocks of one margin; without `num_layers`, those are left empty."""
        depth = count if layers else 0
        scenes = Scenes(
            pixels=np.zeros((count, self.size, self.size), np.uint8),
            # Drawn before anything else: the label decides where the dots go, and nothing else.
            labels=draw.integers(0, 2, count),
            curves=np.zeros((depth, 2, self.size, self.size), np.uint8),
            distractors=np.zeros((depth, self.size, self.size), np.uint8),
            dots=np.zeros((count, 2, 2), np.int64),
        )
        origins, margins = draw.integers(0, 2, count), draw.integers(0, len(self.margins), count)
        size = max(1, _BLOCK // self.size**2)
        for block in np.split(np.arange(count), range(size, count, size)):
            for choice, margin in enumerate(self.margins):
                rows = block[margins[block] == choice]
                self._fill(scenes, rows, origins[rows], margin, draw, layers)
        return scenes

    def _fill(self, scenes: Scenes, rows: Ints, origins: Ints, margin: int, draw: CounterRNG, layers: bool) -> None:
        """Make the pictures `rows`."""
        if not len(rows):
            return
        stamps = dashes(self.dash, self.thickness, margin, self.continuity, _SCALE)
        dot = disc(self.radius, _SCALE)
        rim = max(stamps.reach, len(dot) // 2)
        board = Board.empty(len(rows), self.size, rim, self.padding, margin, stamps)
        pairs = grow_pairs(board, draw, self.curve_dashes, self.seed_distance)
        short = grow_distractors(board, draw, self.distractors, self.distractor_dashes, self.distractor_attempts)

        each = np.arange(len(rows))
        ends = np.where(scenes.labels[rows] == 1, origins, 1 - origins)
        dots = np.stack([pairs.starts[each, origins, 0], pairs.starts[each, ends, -1]], 1)
        marks = _drawn(board, dots, np.zeros_like(dots), dot[None])
        others = self.distractor_contrast * _drawn(board, _flat(short.starts), _flat(short.kinds), stamps.ink)
        if layers:
            curves = [_drawn(board, pairs.starts[:, i], pairs.kinds[:, i], stamps.ink) for i in range(2)]
        else:
            curves = [_drawn(board, _flat(pairs.starts), _flat(pairs.kinds), stamps.ink)]
        curves = [self.curve_contrast * curve for curve in curves]

        picture = functools.reduce(np.maximum, [*curves, others, marks])
        factor = 255 / picture.max((1, 2), keepdims=True)
        scenes.pixels[rows] = _to_bytes(picture * factor)
        scenes.dots[rows] = board.point(dots)
        if layers:
            scenes.distractors[rows] = _to_bytes(others * factor)
            for i, curve in enumerate(curves):
                scenes.curves[rows, i] = _to_bytes(curve * factor)


def _drawn(board: Board, starts: Ints, kinds: Ints, stamps: Bytes) -> Floats:
    """Layers `[pictures, size, size]` with the dashes `[pictures, dashes]` on each."""
    pictures, number = starts.shape
    canvases = np.zeros((pictures, board.width, board.width), np.uint8)
    for i in range(number):
        rows = np.flatnonzero(kinds[:, i] >= 0)
        stamp(canvases, rows, starts[rows, i], stamps[kinds[rows, i]])
    inner = slice(board.rim, board.rim + board.size)
    return canvases[:, inner, inner].astype(np.float32)


def _flat(dashes: Ints) -> Ints:
    """The dashes of all curves of a picture as one list."""
    return dashes.reshape(len(dashes), dashes.shape[1] * dashes.shape[2])


def _to_bytes(values: Floats) -> Bytes:
    return np.floor(values + np.float32(0.5)).astype(np.uint8)


PATHFINDER = Pathfinder(
    size=32,
    dash=2,
    thickness=0.5,
    margins=(1,),
    radius=1.5,
    seed_distance=7,
    continuity=1.0,
    distractors=5,
    curve_contrast=1.5,
    distractor_contrast=2.0,
)
PATHX = Pathfinder(
    size=128,
    dash=5,
    thickness=1.5,
    margins=(2, 3),
    radius=3.0,
    seed_distance=20,
    continuity=1.8,
    distractors=8,
    curve_contrast=0.9,
    distractor_contrast=0.9,
)
