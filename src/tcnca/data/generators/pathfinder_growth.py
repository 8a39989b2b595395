"""How the curves of Pathfinder grow, many pictures at once.

The canvas of a picture has a rim around it that counts as occupied, so that nothing needs to be cut off at the border,
and nothing grows over it. A place is a pixel of the flattened canvas.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tcnca.data.generators.pathfinder_stamps import STRAIGHT, TURNS, Bytes, Dashes, Ints
from tcnca.data.rng import CounterRNG
from tcnca.errors import ConfigError

_FREE = 76
"""A first dash may lie where the occupancy is at most this, 0.3 of full."""
_TRIES = 3
"""How often a next dash, or the first of a curve, is tried."""
_DEAD_END = 1e-4 * STRAIGHT * 255
"""A curve cannot go on where all candidates together weigh less."""
_AT_ONCE = 512
"""Pictures in work at a time: enough to make calls cheap, few enough for the processor's cache."""
_STOCK = 4096
"""Pairs of first dashes drawn at a time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Curves:
    """Curves of the same number of dashes each: where each dash starts, and of which kind it is."""

    starts: Ints
    """`[pictures, curves, dashes]`, places."""
    kinds: Ints
    """`[pictures, curves, dashes]`; -1 where a curve was left out."""

    @classmethod
    def none(cls, *shape: int) -> Curves:
        """Curves yet to be drawn."""
        return cls(np.zeros(shape, np.int64), np.full(shape, -1))


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Board:
    """The room that is taken in pictures: as such, and wider by the margin."""

    dashes: Dashes
    size: int
    """Side of a picture."""
    rim: int
    """Width of the rim."""
    candidates: Ints
    """`[kinds, candidates]`: from the place where a dash starts to those where the next one may."""
    blank: tuple[Bytes, Bytes]
    """`[width, width]` each: the occupancy of a picture of which only the border is taken, and the wider one."""
    occupied: Bytes
    """`[pictures, width, width]`."""
    wide: Bytes
    """`[pictures, width, width]`."""

    @classmethod
    def empty(cls, pictures: int, size: int, rim: int, padding: int, margin: int, dashes: Dashes) -> Board:
        """Pictures of which only the border is taken."""
        candidates = dashes.candidates @ np.array([size + 2 * rim, 1])
        blank = _frame(size, rim, padding), _frame(size, rim, padding + margin)
        none = np.zeros((0, *blank[0].shape), np.uint8)
        return cls(
            dashes=dashes,
            size=size,
            rim=rim,
            candidates=candidates,
            blank=blank,
            occupied=none,
            wide=none,
        ).more(pictures)

    @property
    def width(self) -> int:
        """Side of a canvas."""
        return self.size + 2 * self.rim

    def more(self, pictures: int) -> Board:
        """So many empty pictures of the same kind."""
        occupied, wide = (np.tile(canvas, (pictures, 1, 1)) for canvas in self.blank)
        return dataclasses.replace(self, occupied=occupied, wide=wide)

    def take(self, rows: Ints, starts: Ints, kinds: Ints) -> None:
        """Mark the room of one dash in each of the pictures `rows` as taken."""
        stamp(self.occupied, rows, starts, self.dashes.mask[kinds])
        stamp(self.wide, rows, starts, self.dashes.wide[kinds])

    def place(self, points: Ints) -> Ints:
        """The places of points (row, column) of the picture."""
        return (points[..., 0] + self.rim) * self.width + points[..., 1] + self.rim

    def point(self, places: Ints) -> Ints:
        """The points (row, column) of the picture at `places`."""
        return np.stack(np.divmod(places, self.width), -1) - self.rim

    def holds(self, points: Ints) -> NDArray[np.bool_]:
        """Whether points (row, column) lie in the picture."""
        inside: NDArray[np.bool_] = np.logical_and.reduce((points >= 0) & (points < self.size), axis=-1)
        return inside


def stamp(canvases: Bytes, rows: Ints, starts: Ints, windows: Bytes) -> None:
    """Draw one window about `starts` on each of the canvases `rows`, each named once, over what is darker."""
    where, views = _views(canvases, rows, starts, windows.shape[-1])
    views[where] = np.maximum(views[where], windows)


def grow_pairs(board: Board, draw: CounterRNG, length: int, distance: int) -> Curves:
    """Two curves of `length` dashes in each picture of the empty `board`, starting `distance` apart.

    They grow in turns, and where one of them cannot go on, both are given up. Attempts are made until there are enough
    pictures. As every attempt that succeeds takes the same number of turns, to take pictures in the order in which they
    are done prefers none.
    """
    count, last = len(board.occupied), 2 * (length - 1)
    pairs, trials = Curves.none(count, 2, length), Curves.none(_AT_ONCE, 2, length)
    work = board.more(_AT_ONCE)
    turn, rows = np.full(_AT_ONCE, last), np.arange(_AT_ONCE)
    stock = Curves.none(0, 2)
    ready = 0
    while ready < count:
        fresh = np.flatnonzero((turn < 0) | (turn == last))
        while len(stock.starts) < len(fresh):
            stock = _add_firsts(stock, board, draw, distance)
        trials.starts[fresh, :, 0], trials.kinds[fresh, :, 0] = stock.starts[: len(fresh)], stock.kinds[: len(fresh)]
        stock = Curves(stock.starts[len(fresh) :], stock.kinds[len(fresh) :])
        work.occupied[fresh], work.wide[fresh] = board.blank
        turn[fresh] = 0

        index, curve = np.divmod(turn, 2)
        starts, kinds = trials.starts[rows, curve, index], trials.kinds[rows, curve, index]
        # A dash takes its room only when the next is there, or the curve would run into itself.
        next_starts, next_kinds = _extend(work, rows, starts, kinds, draw)
        trials.starts[rows, curve, index + 1], trials.kinds[rows, curve, index + 1] = next_starts, next_kinds
        grown = next_kinds >= 0
        work.take(rows[grown], starts[grown], kinds[grown])
        turn = np.where(grown, turn + 1, -1)

        done = np.flatnonzero(turn == last)[: count - ready]
        places = slice(ready, ready + len(done))
        pairs.starts[places], pairs.kinds[places] = trials.starts[done], trials.kinds[done]
        board.occupied[places], board.wide[places] = work.occupied[done], work.wide[done]
        ready += len(done)
    for i in range(2):
        board.take(np.arange(count), pairs.starts[:, i, -1], pairs.kinds[:, i, -1])
    return pairs


def grow_distractors(board: Board, draw: CounterRNG, number: int, length: int, attempts: int) -> Curves:
    """Up to `number` curves of `length` dashes in the room that is left.

    One that fails `attempts` times is left out.
    """
    count = len(board.occupied)
    curves = Curves.none(count, number, length)
    for curve in range(number):
        rows = np.arange(count)
        for _ in range(attempts):
            starts, kinds, done = _grow_distractor(board, rows, draw, length)
            curves.starts[rows[done], curve], curves.kinds[rows[done], curve] = starts[done], kinds[done]
            rows = rows[~done]
    return curves


def _grow_distractor(board: Board, rows: Ints, draw: CounterRNG, length: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Try once to grow a curve in each of the pictures `rows`.

    Returns starts and kinds, `[rows, length]`, and for which rows they are whole.
    """
    before = board.occupied[rows], board.wide[rows]
    starts, kinds = np.zeros((length, len(rows)), np.int64), np.full((length, len(rows)), -1)
    starts[0], kinds[0] = _first_distractors(board, rows, draw)
    going = np.flatnonzero(kinds[0] >= 0)
    for i in range(1, length):
        starts[i, going], kinds[i, going] = _extend(board, rows[going], starts[i - 1, going], kinds[i - 1, going], draw)
        going = going[kinds[i, going] >= 0]
        board.take(rows[going], starts[i - 1, going], kinds[i - 1, going])
    board.take(rows[going], starts[-1, going], kinds[-1, going])
    done = kinds[-1] >= 0
    board.occupied[rows[~done]], board.wide[rows[~done]] = before[0][~done], before[1][~done]
    return starts.T, kinds.T, done


def _add_firsts(stock: Curves, board: Board, draw: CounterRNG, distance: int) -> Curves:
    """The stock `[pairs, 2]` of first dashes for two curves, and more of them."""
    dashes = board.dashes
    # The first lies in the middle of the picture, so that the second has room on every side.
    low = 2 * distance - np.stack([pixels.min(0) for pixels in dashes.solid])
    room = board.size - 2 * distance - np.stack([pixels.max(0) for pixels in dashes.solid]) - low
    kinds = draw.integers(0, TURNS, _STOCK, 2)
    points = np.zeros((_STOCK, 2, 2), np.int64)
    points[:, 0] = low[kinds[:, 0]] + (draw.uniform(_STOCK, 2) * room[kinds[:, 0]]).astype(np.int64)
    fits = (room[kinds[:, 0]] > 0).all(1) & board.holds(points[:, 0] + dashes.inside[:, kinds[:, 0]]).all(0)
    missing = np.ones(_STOCK, np.bool_)
    for _ in range(_TRIES):
        again = draw.integers(0, TURNS, _STOCK)
        kinds[:, 1] = np.where(missing, again, kinds[:, 1])
        angles = np.deg2rad(draw.integers(0, 360, _STOCK))
        away = np.rint(distance * np.stack([np.sin(angles), np.cos(angles)], 1).round(9)).astype(np.int64)
        points[:, 1] = np.where(missing[:, None], points[:, 0] + away, points[:, 1])
        missing = ~(board.holds(points[:, 1]) & board.holds(points[:, 1] + dashes.inside[:, kinds[:, 1]]).all(0))
    fits &= ~missing
    if not fits.any():
        raise ConfigError(f"size: got {board.size}, too small for two curves that start {distance} pixels apart")
    return Curves(np.concatenate([stock.starts, board.place(points[fits])]), np.concatenate([stock.kinds, kinds[fits]]))


def _first_distractors(board: Board, rows: Ints, draw: CounterRNG) -> tuple[Ints, Ints]:
    """A first dash in each of the pictures `rows`, anywhere it finds room; kind -1 where there is none."""
    starts, kinds = np.zeros(len(rows), np.int64), np.full(len(rows), -1)
    trying = np.arange(len(rows))
    for _ in range(_TRIES):
        tried, lots = draw.integers(0, TURNS, len(trying)), draw.uniform(len(trying))
        found = np.zeros((len(trying), 2), np.int64)
        for i, row in enumerate(rows[trying]):
            found[i] = _free_point(board, row, tried[i], lots[i])
        fits = board.holds(found) & board.holds(found + board.dashes.inside[:, tried]).all(0)
        starts[trying[fits]], kinds[trying[fits]] = board.place(found[fits]), tried[fits]
        # Where there is no room at all, the attempt is over.
        trying = trying[~fits & (found[:, 0] >= 0)]
    return starts, kinds


def _free_point(board: Board, row: int, kind: int, lot: float) -> tuple[int, int]:
    """A point, by lot, where the full part of a first dash's mask meets nothing; (-1, -1) where there is none."""
    free = board.occupied[row] <= _FREE
    fits = np.ones((board.size, board.size), np.bool_)
    for down, right in (board.dashes.solid[kind] + board.rim).tolist():
        fits &= free[down : down + board.size, right : right + board.size]
    points = np.flatnonzero(fits)
    if not len(points):
        return -1, -1
    return divmod(int(points[int(lot * len(points))]), board.size)


def _extend(board: Board, rows: Ints, starts: Ints, kinds: Ints, draw: CounterRNG) -> tuple[Ints, Ints]:
    """The dash after the given one in each of the pictures `rows`; kind -1 where there is none."""
    dashes, area = board.dashes, board.width**2
    options = starts[:, None] + board.candidates[kinds]
    taken = board.wide.reshape(-1)[(rows * area)[:, None] + options]
    sums = np.cumsum(dashes.weights[kinds] * (255 - taken.astype(np.int32)), 1)
    next_starts, next_kinds = np.zeros_like(starts), np.full_like(kinds, -1)
    trying = np.flatnonzero(sums[:, -1] >= _DEAD_END)
    for _ in range(_TRIES):
        lots = draw.uniform(len(trying)) * sums[trying, -1]
        chosen = (sums[trying] <= lots[:, None]).sum(1)
        tried_starts, tried_kinds = options[trying, chosen], dashes.next_kinds[kinds[trying], chosen]
        bearable = dashes.bearable[tried_kinds]
        where, views = _views(board.occupied, rows[trying], tried_starts, bearable.shape[-1])
        clear = ~(views[where] > bearable).any((1, 2))
        next_starts[trying[clear]], next_kinds[trying[clear]] = tried_starts[clear], tried_kinds[clear]
        trying = trying[~clear]
    return next_starts, next_kinds


def _views(canvases: Bytes, rows: Ints, starts: Ints, side: int) -> tuple[tuple[Ints, Ints, Ints], Bytes]:
    """All windows of the canvases `[pictures, row, column, side, side]`, and the indices of those about `starts`."""
    down, right = np.divmod(starts, canvases.shape[-1])
    views = sliding_window_view(canvases, (side, side), axis=(1, 2), writeable=True)
    return (rows, down - side // 2, right - side // 2), views


def _frame(size: int, rim: int, padding: int) -> Bytes:
    """A canvas that is taken on its rim and on the outermost pixels of the picture."""
    canvas = np.full((size + 2 * rim, size + 2 * rim), 255, np.uint8)
    inner = slice(rim + padding, rim + size - padding)
    canvas[inner, inner] = 0
    return canvas
