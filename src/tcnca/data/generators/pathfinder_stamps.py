"""The dashes of Pathfinder, drawn once and for all: in every direction the ink, and the room it takes.

A dash starts on a whole pixel, and its direction is either a whole number of degrees (the first of a curve) or that of
one of a few displacements by whole pixels (those that follow). So there are only so many kinds of dashes, and to draw
one is to stamp a small window.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

TURNS = 360
"""Directions of a curve's first dash. Kinds 0 to 359 are these, the kinds of later dashes follow."""
STRAIGHT = 1 << 12
"""Weight of going straight on."""
_LIMIT = 459
"""Two masks collide where they add up to this, 1.8 times full."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Dashes:
    """All dashes of one length, thickness and margin.

    Windows are `[kinds, side, side]`, with the start in the middle.
    """

    ink: Bytes
    """Windows of what is seen."""
    mask: Bytes
    """Windows of the room that a dash takes."""
    wide: Bytes
    """The same, wider by the margin."""
    bearable: Bytes
    """Windows of the greatest occupancy that a dash does not collide with."""
    solid: tuple[Ints, ...]
    """For each first dash the pixels `[pixels, 2]` (row, column), from the start, where its mask is full."""
    inside: Ints
    """`[2, 360, 2]`: from the start of a first dash to its head and its pivot, which must lie in the picture."""
    candidates: Ints
    """`[kinds, candidates, 2]`: from the start of a dash to the starts (row, column) that the next one may have."""
    next_kinds: Ints
    """`[kinds, candidates]`: of what kind the next dash is then."""
    weights: NDArray[np.int32]
    """`[kinds, candidates]`: how well it goes straight on."""

    @property
    def reach(self) -> int:
        """How far from the start of a dash its room, or the start of the next one, can be."""
        return max(self.wide.shape[-1] // 2, int(np.abs(self.candidates).max()))


def shrink(image: Bytes, size: int) -> Bytes:
    """Square images `[..., height, width]` brought down to `size` with a Lanczos filter of three lobes."""
    scale = image.shape[-1] / size
    offsets = (np.arange(image.shape[-1]) + 0.5 - (np.arange(size)[:, None] + 0.5) * scale) / scale
    weights = np.where(np.abs(offsets) < 3, np.sinc(offsets) * np.sinc(offsets / 3), 0.0)
    weights /= weights.sum(1, keepdims=True)
    across = _to_bytes(image.astype(np.float64) @ weights.T)
    return _to_bytes(weights @ across.astype(np.float64))


def dilate(image: Bytes, radius: int) -> Bytes:
    """Each pixel the greatest of those within `radius`."""
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
    """A window with a filled circle about its middle."""
    # The filter rings three pixels beyond the edge.
    reach = int(np.ceil(radius)) + 3
    axis = np.arange(-reach * scale, (reach + 1) * scale)
    filled = axis[:, None] ** 2 + axis**2 <= (radius * scale) ** 2
    return shrink(np.where(filled, np.uint8(255), np.uint8(0)), 2 * reach + 1)


@functools.cache
def dashes(length: int, thickness: float, margin: int, continuity: float, scale: int) -> Dashes:
    """All dashes there are, `scale` times finer drawn than seen."""
    degrees = np.deg2rad(np.arange(TURNS))
    circle = _circle(length + margin)
    angles = np.concatenate([degrees, np.arctan2(circle[:, 0], circle[:, 1])])
    # A later dash starts at its far end and is drawn back towards its pivot.
    ink, mask = _windows(np.concatenate([degrees, angles[TURNS:] + np.pi]), length, thickness, margin, scale)
    heads = _steps(degrees, length)
    pivots = np.concatenate([heads + _steps(degrees + np.pi, length + margin), -circle])
    next_pivots = pivots + _steps(angles, length + 2 * margin)

    turns = np.abs((angles[:, None] - angles[TURNS:] + np.pi) % (2 * np.pi) - np.pi)
    weights = np.rint(STRAIGHT * np.cos(np.minimum(continuity * turns, np.pi / 2)) ** 2).astype(np.int32)
    # All others have no weight, after any dash.
    best = np.argsort(-weights, 1, kind="stable")[:, : (weights > 0).sum(1).max()]
    return Dashes(
        ink=ink,
        mask=mask,
        wide=dilate(np.pad(mask, [(0, 0), (margin, margin), (margin, margin)]), margin),
        bearable=np.minimum(_LIMIT - 1 - mask.astype(np.int64), 255).astype(np.uint8),
        solid=tuple(np.argwhere(window == 255) - len(window) // 2 for window in mask[:TURNS]),
        inside=np.stack([heads, pivots[:TURNS]]),
        candidates=next_pivots[:, None] + circle[best],
        next_kinds=TURNS + best,
        weights=np.take_along_axis(weights, best, 1),
    )


def _steps(angles: Floats, distance: float) -> Ints:
    """Displacements (row, column) by `distance`, rounded up to whole pixels."""
    exact = distance * np.stack([np.sin(angles), np.cos(angles)], -1)
    # Without the inner rounding the noise of sin(180°) would make a pixel.
    return np.ceil(exact.round(9)).astype(np.int64)


def _circle(radius: int) -> Ints:
    """The pixels (row, column) of a circle, one for each pixel of its length."""
    angles = np.arange(0, 2 * np.pi, 1 / radius)
    exact = radius * np.stack([np.sin(angles), np.cos(angles)], -1)
    return np.unique(np.floor(exact.round(9)).astype(np.int64), axis=0)


def _windows(angles: Floats, length: int, thickness: float, margin: int, scale: int) -> tuple[Bytes, Bytes]:
    """Ink and mask of dashes in the directions `angles`."""
    reach = length + int(np.ceil(thickness)) + margin
    lines = np.stack([_line(end, reach * scale, thickness * scale) for end in _steps(angles, length * scale)])
    return shrink(lines, 2 * reach + 1), shrink(dilate(lines, margin * scale), 2 * reach + 1)


def _line(end: Ints, reach: int, thickness: float) -> Bytes:
    """A straight line from the middle of a window to `end`, every pixel black or white."""
    row, column = end / np.hypot(*end)
    axis = np.arange(-reach, reach + 1)
    along = axis[:, None] * row + axis * column
    across = axis[:, None] * column - axis * row
    # The thinnest line has one pixel in each row, or in each column, whichever are more.
    half = (thickness - 1 + max(abs(row), abs(column))) / 2
    inked = (across > 1e-9 - half) & (across < half + 1e-9) & (along > -1e-9) & (along < np.hypot(*end) + 1e-9)
    return np.where(inked, np.uint8(255), np.uint8(0))


def _to_bytes(values: Floats) -> Bytes:
    # Halves are common here; without the inner rounding each processor would round them its own way.
    return np.clip(np.floor(values.round(6) + 0.5), 0, 255).astype(np.uint8)
