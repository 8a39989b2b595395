"""Pathfinder and Path-X of Long-Range Arena: decide whether two dots lie on the same dashed curve.

After Linsley et al., Learning long-range spatial dependencies with horizontal gated recurrent units (2018), with the
parameters of Long-Range Arena (2021).

Three parts: `Dashes` holds every dash that can occur, drawn once as a small window; `Board` grows curves of dashes in
many images at once; `Pathfinder` is the generator. A dash starts at a pixel, and its direction is a whole number of
degrees (the first dash of a curve) or that of one of a few displacements by whole pixels (the following dashes), so the
number of different dashes is small. The canvas of an image has a rim that counts as occupied, so that nothing grows
over the border. A place is an index of the flattened canvas.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tcnca.data.datasets.spec import DatasetSpec
from tcnca.data.rng import CounterRNG
from tcnca.data.schema import Column
from tcnca.data.tasks import ClassificationTask
from tcnca.errors import ConfigError

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_TURNS = 360
"""Directions of the first dash of a curve: kinds 0 to 359. The kinds of later dashes follow."""
_STRAIGHT = 1 << 12
"""Weight of continuing straight."""
_LIMIT = 459
"""Two masks collide where their sum reaches this value, 1.8 times full."""
_FREE = 76
"""Maximum occupancy, 0.3 of full, where a first dash may lie."""
_TRIES = 3
"""Attempts for the first dash of a curve, and for each next one."""
_DEAD_END = 1e-4 * _STRAIGHT * 255
"""A curve ends where the candidates together weigh less."""
_AT_ONCE = 512
"""Images in progress at a time: enough to amortize calls, few enough for the cache."""
_STOCK = 4096
"""Pairs of first dashes drawn at a time."""
_OVERSAMPLING = 2
"""Resolution of the drawing relative to the image."""
_BLOCK = 1 << 22
"""Pixels generated at a time, to bound memory."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Dashes:
    """All dashes of one length, thickness and margin.

    Windows are `[kinds, side, side]`, with the start in the middle.
    """

    ink: Bytes
    """Windows of the visible dash."""
    mask: Bytes
    """Windows of the space that a dash occupies."""
    wide: Bytes
    """The same, dilated by the margin."""
    bearable: Bytes
    """Windows of the maximum occupancy without a collision."""
    solid: tuple[Ints, ...]
    """For each first dash the pixels `[pixels, 2]` (row, column), from the start, where its mask is full."""
    inside: Ints
    """`[2, 360, 2]`: from the start of a first dash to its head and to its pivot, which must lie in the image."""
    candidates: Ints
    """`[kinds, candidates, 2]`: from the start of a dash to the possible starts (row, column) of the next one."""
    next_kinds: Ints
    """`[kinds, candidates]`: kind of the next dash."""
    weights: NDArray[np.int32]
    """`[kinds, candidates]`: weight of the candidate, largest for the straight continuation."""

    @property
    def reach(self) -> int:
        """Maximum distance from the start of a dash to the space it occupies or to the start of the next one."""
        return max(self.wide.shape[-1] // 2, int(np.abs(self.candidates).max()))


def shrink(image: Bytes, size: int) -> Bytes:
    """Resize square images `[..., height, width]` to `size` with a Lanczos filter of three lobes."""
    scale = image.shape[-1] / size
    offsets = (np.arange(image.shape[-1]) + 0.5 - (np.arange(size)[:, None] + 0.5) * scale) / scale
    weights = np.where(np.abs(offsets) < 3, np.sinc(offsets) * np.sinc(offsets / 3), 0.0)
    weights /= weights.sum(1, keepdims=True)
    across = _to_bytes(image.astype(np.float64) @ weights.T)
    return _to_bytes(weights @ across.astype(np.float64))


def dilate(image: Bytes, radius: int) -> Bytes:
    """Replace each pixel by the maximum of the pixels within `radius`."""
    *_, height, width = image.shape
    padded = np.pad(image, [(0, 0)] * (image.ndim - 2) + [(radius, radius)] * 2)
    result = image.copy()
    for row in range(-radius, radius + 1):
        for column in range(-radius, radius + 1):
            if row**2 + column**2 <= radius**2:
                top, left = radius + row, radius + column
                np.maximum(result, padded[..., top : top + height, left : left + width], out=result)
    return result


def disc(radius: float, scale: int) -> Bytes:
    """Return a window with a filled circle around its center."""
    # The filter rings three pixels beyond the edge.
    reach = int(np.ceil(radius)) + 3
    axis = np.arange(-reach * scale, (reach + 1) * scale)
    filled = axis[:, None] ** 2 + axis**2 <= (radius * scale) ** 2
    return shrink(np.where(filled, np.uint8(255), np.uint8(0)), 2 * reach + 1)


@functools.cache
def dashes(length: int, thickness: float, margin: int, continuity: float, scale: int) -> Dashes:
    """Draw all dashes, at `scale` times the resolution of the image."""
    degrees = np.deg2rad(np.arange(_TURNS))
    circle = _circle(length + margin)
    angles = np.concatenate([degrees, np.arctan2(circle[:, 0], circle[:, 1])])
    # A later dash starts at its far end and is drawn back to its pivot.
    ink, mask = _windows(np.concatenate([degrees, angles[_TURNS:] + np.pi]), length, thickness, margin, scale)
    heads = _steps(degrees, length)
    pivots = np.concatenate([heads + _steps(degrees + np.pi, length + margin), -circle])
    next_pivots = pivots + _steps(angles, length + 2 * margin)

    turns = np.abs((angles[:, None] - angles[_TURNS:] + np.pi) % (2 * np.pi) - np.pi)
    weights = np.rint(_STRAIGHT * np.cos(np.minimum(continuity * turns, np.pi / 2)) ** 2).astype(np.int32)
    # The remaining candidates have no weight after any dash.
    best = np.argsort(-weights, 1, kind="stable")[:, : (weights > 0).sum(1).max()]
    return Dashes(
        ink=ink,
        mask=mask,
        wide=dilate(np.pad(mask, [(0, 0), (margin, margin), (margin, margin)]), margin),
        bearable=np.minimum(_LIMIT - 1 - mask.astype(np.int64), 255).astype(np.uint8),
        solid=tuple(np.argwhere(window == 255) - len(window) // 2 for window in mask[:_TURNS]),
        inside=np.stack([heads, pivots[:_TURNS]]),
        candidates=next_pivots[:, None] + circle[best],
        next_kinds=_TURNS + best,
        weights=np.take_along_axis(weights, best, 1),
    )


def _steps(angles: NDArray[np.float64], distance: float) -> Ints:
    """Return displacements (row, column) by `distance`, rounded up to whole pixels."""
    exact = distance * np.stack([np.sin(angles), np.cos(angles)], -1)
    # Without the inner rounding, the error of sin(180°) would be rounded up to a pixel.
    return np.ceil(exact.round(9)).astype(np.int64)


def _circle(radius: int) -> Ints:
    """Return the pixels (row, column) of a circle, one per pixel of its circumference."""
    angles = np.arange(0, 2 * np.pi, 1 / radius)
    exact = radius * np.stack([np.sin(angles), np.cos(angles)], -1)
    return np.unique(np.floor(exact.round(9)).astype(np.int64), axis=0)


def _windows(
    angles: NDArray[np.float64], length: int, thickness: float, margin: int, scale: int
) -> tuple[Bytes, Bytes]:
    """Draw ink and mask of dashes in the directions `angles`."""
    reach = length + int(np.ceil(thickness)) + margin
    lines = np.stack([_line(end, reach * scale, thickness * scale) for end in _steps(angles, length * scale)])
    return shrink(lines, 2 * reach + 1), shrink(dilate(lines, margin * scale), 2 * reach + 1)


def _line(end: Ints, reach: int, thickness: float) -> Bytes:
    """Draw a line from the center of a window to `end`; every pixel is black or white."""
    row, column = end / np.hypot(*end)
    axis = np.arange(-reach, reach + 1)
    along = axis[:, None] * row + axis * column
    across = axis[:, None] * column - axis * row
    # The thinnest line has one pixel per row or per column, whichever are more.
    half = (thickness - 1 + max(abs(row), abs(column))) / 2
    inked = (across > 1e-9 - half) & (across < half + 1e-9) & (along > -1e-9) & (along < np.hypot(*end) + 1e-9)
    return np.where(inked, np.uint8(255), np.uint8(0))


def _to_bytes(values: NDArray[np.float64]) -> Bytes:
    # Halves are common here; without the inner rounding, processors would round them differently.
    return np.clip(np.floor(values.round(6) + 0.5), 0, 255).astype(np.uint8)


@dataclasses.dataclass(frozen=True, eq=False)
class Curves:
    """Curves with the same number of dashes: start and kind of each dash."""

    starts: Ints
    """`[images, curves, dashes]`, places."""
    kinds: Ints
    """`[images, curves, dashes]`; -1 where a curve was left out."""

    @classmethod
    def none(cls, *shape: int) -> Curves:
        """Return curves without dashes."""
        return cls(np.zeros(shape, np.int64), np.full(shape, -1))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Board:
    """The occupied space in images: as it is, and dilated by the margin."""

    dashes: Dashes
    size: int
    """Side length of an image."""
    rim: int
    """Width of the rim."""
    candidates: Ints
    """`[kinds, candidates]`: from the place where a dash starts to the possible starts of the next one."""
    blank: tuple[Bytes, Bytes]
    """`[width, width]` each: the occupancy of an empty image, and the dilated one."""
    occupied: Bytes
    """`[images, width, width]`."""
    wide: Bytes
    """`[images, width, width]`."""

    @classmethod
    def empty(cls, images: int, size: int, rim: int, padding: int, margin: int, dashes: Dashes) -> Board:
        """Return empty images: only the border is occupied."""
        blank = _frame(size, rim, padding), _frame(size, rim, padding + margin)
        occupied, wide = (np.tile(canvas, (images, 1, 1)) for canvas in blank)
        candidates = dashes.candidates @ np.array([size + 2 * rim, 1])
        return cls(dashes=dashes, size=size, rim=rim, candidates=candidates, blank=blank, occupied=occupied, wide=wide)

    @property
    def width(self) -> int:
        """Side length of a canvas."""
        return self.size + 2 * self.rim

    def occupy(self, rows: Ints, starts: Ints, kinds: Ints) -> None:
        """Mark the space of one dash in each of the images `rows` as occupied."""
        stamp(self.occupied, rows, starts, self.dashes.mask[kinds])
        stamp(self.wide, rows, starts, self.dashes.wide[kinds])

    def place(self, points: Ints) -> Ints:
        """Return the places of points (row, column)."""
        return (points[..., 0] + self.rim) * self.width + points[..., 1] + self.rim

    def point(self, places: Ints) -> Ints:
        """Return the points (row, column) at `places`."""
        return np.stack(np.divmod(places, self.width), -1) - self.rim

    def contains(self, points: Ints) -> NDArray[np.bool_]:
        """Return whether points (row, column) lie in the image."""
        inside: NDArray[np.bool_] = np.logical_and.reduce((points >= 0) & (points < self.size), axis=-1)
        return inside


def stamp(canvases: Bytes, rows: Ints, starts: Ints, windows: Bytes) -> None:
    """Draw one window around `starts` on each of the canvases `rows`, which must be distinct, keeping the maximum."""
    where, views = _views(canvases, rows, starts, windows.shape[-1])
    views[where] = np.maximum(views[where], windows)


def grow_pairs(board: Board, rng: CounterRNG, length: int, distance: int) -> Curves:
    """Grow two curves of `length` dashes in each image of the empty `board`, starting `distance` apart.

    They grow in turns, and if one of them cannot continue, both are dropped. Attempts are made until there are enough
    images. Every successful attempt takes the same number of turns, so taking images in the order in which they finish
    introduces no bias.
    """
    count, last = len(board.occupied), 2 * (length - 1)
    pairs, trials = Curves.none(count, 2, length), Curves.none(_AT_ONCE, 2, length)
    # The first turn blanks all of these.
    canvases = np.empty((2, _AT_ONCE, board.width, board.width), np.uint8)
    work = dataclasses.replace(board, occupied=canvases[0], wide=canvases[1])
    turn, rows = np.full(_AT_ONCE, last), np.arange(_AT_ONCE)
    stock = Curves.none(0, 2)
    ready = 0
    while ready < count:
        fresh = np.flatnonzero((turn < 0) | (turn == last))
        while len(stock.starts) < len(fresh):
            stock = _add_firsts(stock, board, rng, distance)
        trials.starts[fresh, :, 0], trials.kinds[fresh, :, 0] = stock.starts[: len(fresh)], stock.kinds[: len(fresh)]
        stock = Curves(stock.starts[len(fresh) :], stock.kinds[len(fresh) :])
        work.occupied[fresh], work.wide[fresh] = board.blank
        turn[fresh] = 0

        index, curve = np.divmod(turn, 2)
        starts, kinds = trials.starts[rows, curve, index], trials.kinds[rows, curve, index]
        # A dash occupies its space only when the next one exists, or the curve would collide with itself.
        next_starts, next_kinds = _extend(work, rows, starts, kinds, rng)
        trials.starts[rows, curve, index + 1], trials.kinds[rows, curve, index + 1] = next_starts, next_kinds
        grown = next_kinds >= 0
        work.occupy(rows[grown], starts[grown], kinds[grown])
        turn = np.where(grown, turn + 1, -1)

        done = np.flatnonzero(turn == last)[: count - ready]
        places = slice(ready, ready + len(done))
        pairs.starts[places], pairs.kinds[places] = trials.starts[done], trials.kinds[done]
        board.occupied[places], board.wide[places] = work.occupied[done], work.wide[done]
        ready += len(done)
    for i in range(2):
        board.occupy(np.arange(count), pairs.starts[:, i, -1], pairs.kinds[:, i, -1])
    return pairs


def grow_distractors(board: Board, rng: CounterRNG, number: int, length: int, attempts: int) -> Curves:
    """Grow up to `number` curves of `length` dashes in the free space.

    A curve that fails `attempts` times is left out.
    """
    count = len(board.occupied)
    curves = Curves.none(count, number, length)
    for curve in range(number):
        rows = np.arange(count)
        for _ in range(attempts):
            starts, kinds, done = _grow_distractor(board, rows, rng, length)
            curves.starts[rows[done], curve], curves.kinds[rows[done], curve] = starts[done], kinds[done]
            rows = rows[~done]
    return curves


def _grow_distractor(board: Board, rows: Ints, rng: CounterRNG, length: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Try once to grow a curve in each of the images `rows`.

    Returns starts and kinds, `[rows, length]`, and which rows succeeded.
    """
    before = board.occupied[rows], board.wide[rows]
    starts, kinds = np.zeros((length, len(rows)), np.int64), np.full((length, len(rows)), -1)
    starts[0], kinds[0] = _first_distractors(board, rows, rng)
    going = np.flatnonzero(kinds[0] >= 0)
    for i in range(1, length):
        starts[i, going], kinds[i, going] = _extend(board, rows[going], starts[i - 1, going], kinds[i - 1, going], rng)
        going = going[kinds[i, going] >= 0]
        board.occupy(rows[going], starts[i - 1, going], kinds[i - 1, going])
    board.occupy(rows[going], starts[-1, going], kinds[-1, going])
    done = kinds[-1] >= 0
    board.occupied[rows[~done]], board.wide[rows[~done]] = before[0][~done], before[1][~done]
    return starts.T, kinds.T, done


def _add_firsts(stock: Curves, board: Board, rng: CounterRNG, distance: int) -> Curves:
    """Add first dashes for two curves to the stock `[pairs, 2]`."""
    dashes = board.dashes
    # The first one lies near the center, so that the second one fits on every side.
    low = 2 * distance - np.stack([pixels.min(0) for pixels in dashes.solid])
    room = board.size - 2 * distance - np.stack([pixels.max(0) for pixels in dashes.solid]) - low
    kinds = rng.integers(0, _TURNS, _STOCK, 2)
    points = np.zeros((_STOCK, 2, 2), np.int64)
    points[:, 0] = low[kinds[:, 0]] + (rng.uniform(_STOCK, 2) * room[kinds[:, 0]]).astype(np.int64)
    fits = (room[kinds[:, 0]] > 0).all(1) & board.contains(points[:, 0] + dashes.inside[:, kinds[:, 0]]).all(0)
    missing = np.ones(_STOCK, np.bool_)
    for _ in range(_TRIES):
        again = rng.integers(0, _TURNS, _STOCK)
        kinds[:, 1] = np.where(missing, again, kinds[:, 1])
        angles = np.deg2rad(rng.integers(0, 360, _STOCK))
        away = np.rint(distance * np.stack([np.sin(angles), np.cos(angles)], 1).round(9)).astype(np.int64)
        points[:, 1] = np.where(missing[:, None], points[:, 0] + away, points[:, 1])
        missing = ~(board.contains(points[:, 1]) & board.contains(points[:, 1] + dashes.inside[:, kinds[:, 1]]).all(0))
    fits &= ~missing
    if not fits.any():
        raise ConfigError(f"size: expected enough for two curves that start {distance} pixels apart, got {board.size}")
    return Curves(np.concatenate([stock.starts, board.place(points[fits])]), np.concatenate([stock.kinds, kinds[fits]]))


def _first_distractors(board: Board, rows: Ints, rng: CounterRNG) -> tuple[Ints, Ints]:
    """Place a first dash in each of the images `rows` at random free points; kind -1 where there is none."""
    starts, kinds = np.zeros(len(rows), np.int64), np.full(len(rows), -1)
    trying = np.arange(len(rows))
    for _ in range(_TRIES):
        tried, lots = rng.integers(0, _TURNS, len(trying)), rng.uniform(len(trying))
        found = np.zeros((len(trying), 2), np.int64)
        for i, row in enumerate(rows[trying]):
            found[i] = _free_point(board, row, tried[i], lots[i])
        fits = board.contains(found) & board.contains(found + board.dashes.inside[:, tried]).all(0)
        starts[trying[fits]], kinds[trying[fits]] = board.place(found[fits]), tried[fits]
        # Without any free point the attempt has failed.
        trying = trying[~fits & (found[:, 0] >= 0)]
    return starts, kinds


def _free_point(board: Board, row: int, kind: int, lot: float) -> tuple[int, int]:
    """Draw a point where the solid part of a first dash is free; (-1, -1) if there is none."""
    free = board.occupied[row] <= _FREE
    fits = np.ones((board.size, board.size), np.bool_)
    for down, right in (board.dashes.solid[kind] + board.rim).tolist():
        fits &= free[down : down + board.size, right : right + board.size]
    points = np.flatnonzero(fits)
    if not len(points):
        return -1, -1
    return divmod(int(points[int(lot * len(points))]), board.size)


def _extend(board: Board, rows: Ints, starts: Ints, kinds: Ints, rng: CounterRNG) -> tuple[Ints, Ints]:
    """Draw the dash after the given one in each of the images `rows`; kind -1 where there is none."""
    dashes, area = board.dashes, board.width**2
    options = starts[:, None] + board.candidates[kinds]
    taken = board.wide.reshape(-1)[(rows * area)[:, None] + options]
    sums = np.cumsum(dashes.weights[kinds] * (255 - taken.astype(np.int32)), 1)
    next_starts, next_kinds = np.zeros_like(starts), np.full_like(kinds, -1)
    trying = np.flatnonzero(sums[:, -1] >= _DEAD_END)
    for _ in range(_TRIES):
        lots = rng.uniform(len(trying)) * sums[trying, -1]
        chosen = (sums[trying] <= lots[:, None]).sum(1)
        tried_starts, tried_kinds = options[trying, chosen], dashes.next_kinds[kinds[trying], chosen]
        bearable = dashes.bearable[tried_kinds]
        where, views = _views(board.occupied, rows[trying], tried_starts, bearable.shape[-1])
        clear = ~(views[where] > bearable).any((1, 2))
        next_starts[trying[clear]], next_kinds[trying[clear]] = tried_starts[clear], tried_kinds[clear]
        trying = trying[~clear]
    return next_starts, next_kinds


def _views(canvases: Bytes, rows: Ints, starts: Ints, side: int) -> tuple[tuple[Ints, Ints, Ints], Bytes]:
    """Return the indices of the windows around `starts`, and all windows `[images, row, column, side, side]`."""
    down, right = np.divmod(starts, canvases.shape[-1])
    views = sliding_window_view(canvases, (side, side), axis=(1, 2), writeable=True)
    return (rows, down - side // 2, right - side // 2), views


def _frame(size: int, rim: int, padding: int) -> Bytes:
    """Return a canvas that is occupied on its rim and on the outermost pixels of the image."""
    canvas = np.full((size + 2 * rim, size + 2 * rim), 255, np.uint8)
    inner = slice(rim + padding, rim + size - padding)
    canvas[inner, inner] = 0
    return canvas


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Scenes:
    """Images and what is drawn on them."""

    pixels: Bytes
    """`[count, size, size]`."""
    labels: Ints
    """`[count]`: 1 if both dots lie on the same curve, else 0."""
    curves: Bytes
    """`[count, 2, size, size]`: the ink of each of the two long curves."""
    distractors: Bytes
    """`[count, size, size]`: the ink of the short curves."""
    dots: Ints
    """`[count, 2, 2]`: center of each dot (row, column)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pathfinder:
    """Generator of images. Lengths are in pixels, contrasts relative to the dots.

    The repr is part of the seed, so do not rename the fields.
    """

    version: ClassVar[int] = 1

    size: int
    """Side length of the image."""
    dash: int
    """Length of a dash."""
    thickness: float
    """Thickness of a dash, a multiple of 0.5."""
    margins: tuple[int, ...]
    """Free space around a dash; each image uses one of these."""
    radius: float
    """Radius of a dot."""
    seed_distance: int
    """Distance between the starts of the two long curves."""
    continuity: float
    """Straightness of curves: 1.0 allows turns of up to 90 degrees, 2.0 of up to 45."""
    distractors: int
    """Maximum number of short curves."""
    curve_contrast: float
    """Contrast of the dashes of the long curves."""
    distractor_contrast: float
    """Contrast of the dashes of the short curves."""
    curve_dashes: int = 14
    """Dashes of a long curve."""
    distractor_dashes: int = 4
    """Dashes of a short curve."""
    padding: int = 1
    """Width of the empty border."""
    distractor_attempts: int = 5
    """Attempts to place a short curve before it is left out."""

    def __post_init__(self) -> None:
        if self.thickness * _OVERSAMPLING % 1 or self.thickness <= 0:
            raise ConfigError(f"thickness: expected a positive multiple of 0.5, got {self.thickness}")
        if self.curve_dashes < 2 or self.distractor_dashes < 2:
            got = f"{self.curve_dashes} and {self.distractor_dashes}"
            raise ConfigError(f"curve_dashes, distractor_dashes: expected at least 2, got {got}")

    def examples(self, rng: CounterRNG, count: int) -> dict[str, Column]:
        """Generate `count` images: `pixels`, uint8 `[count, size, size]`, and `labels`, int64 `[count]`."""
        scenes = self.scenes(rng, count)
        return {"pixels": scenes.pixels, "labels": scenes.labels}

    def scenes(self, rng: CounterRNG, count: int) -> Scenes:
        """Generate images in blocks of one margin."""
        scenes = Scenes(
            pixels=np.zeros((count, self.size, self.size), np.uint8),
            # Drawn first: the label only decides where the dots go.
            labels=rng.integers(0, 2, count),
            curves=np.zeros((count, 2, self.size, self.size), np.uint8),
            distractors=np.zeros((count, self.size, self.size), np.uint8),
            dots=np.zeros((count, 2, 2), np.int64),
        )
        origins, margins = rng.integers(0, 2, count), rng.integers(0, len(self.margins), count)
        size = max(1, _BLOCK // self.size**2)
        for block in np.split(np.arange(count), range(size, count, size)):
            for choice, margin in enumerate(self.margins):
                rows = block[margins[block] == choice]
                if len(rows):
                    self._fill(scenes, rows, origins[rows], margin, rng)
        return scenes

    def _fill(self, scenes: Scenes, rows: Ints, origins: Ints, margin: int, rng: CounterRNG) -> None:
        """Draw the images `rows`."""
        stamps = dashes(self.dash, self.thickness, margin, self.continuity, _OVERSAMPLING)
        dot = disc(self.radius, _OVERSAMPLING)
        rim = max(stamps.reach, len(dot) // 2)
        board = Board.empty(len(rows), self.size, rim, self.padding, margin, stamps)
        pairs = grow_pairs(board, rng, self.curve_dashes, self.seed_distance)
        short = grow_distractors(board, rng, self.distractors, self.distractor_dashes, self.distractor_attempts)

        each = np.arange(len(rows))
        ends = np.where(scenes.labels[rows] == 1, origins, 1 - origins)
        dots = np.stack([pairs.starts[each, origins, 0], pairs.starts[each, ends, -1]], 1)
        scenes.dots[rows] = board.point(dots)
        for i in range(2):
            scenes.curves[rows, i] = _drawn(board, pairs.starts[:, i], pairs.kinds[:, i], stamps.ink)
        scenes.distractors[rows] = _drawn(board, _flat(short.starts), _flat(short.kinds), stamps.ink)
        image = np.maximum(
            np.float32(self.curve_contrast) * scenes.curves[rows].max(1),
            np.float32(self.distractor_contrast) * scenes.distractors[rows],
        )
        image = np.maximum(image, _drawn(board, dots, np.zeros_like(dots), dot[None]))
        image *= 255 / image.max((1, 2), keepdims=True)
        scenes.pixels[rows] = np.floor(image + np.float32(0.5)).astype(np.uint8)


def _drawn(board: Board, starts: Ints, kinds: Ints, stamps: Bytes) -> Bytes:
    """Draw the dashes `[images, dashes]` on layers `[images, size, size]`."""
    canvases = np.zeros((len(starts), board.width, board.width), np.uint8)
    for i in range(starts.shape[1]):
        rows = np.flatnonzero(kinds[:, i] >= 0)
        stamp(canvases, rows, starts[rows, i], stamps[kinds[rows, i]])
    inner = slice(board.rim, board.rim + board.size)
    return canvases[:, inner, inner]


def _flat(dashes: Ints) -> Ints:
    """Flatten the dashes of all curves of an image."""
    return dashes.reshape(len(dashes), -1)


_SMALL = Pathfinder(
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
_LARGE = Pathfinder(
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
PATHFINDER = DatasetSpec(
    name="pathfinder",
    title="Pathfinder (Long-Range Arena)",
    description="decide whether two dots are connected by a dashed curve, 32×32 pixels in a row",
    source="generated",
    sizes={"train": 160_000, "validation": 20_000, "test": 20_000},
    disk_bytes=206_000_000,
    task=ClassificationTask,
    metadata={"class_names": ["apart", "joined"], "mean": 0.5, "std": 0.5},
    generator=_SMALL,
)
PATHX = dataclasses.replace(
    PATHFINDER,
    name="pathx",
    title="Path-X (Long-Range Arena)",
    description="decide whether two dots are connected by a dashed curve, 128×128 pixels in a row",
    disk_bytes=3_280_000_000,
    generator=_LARGE,
    shard_size=250,
)
