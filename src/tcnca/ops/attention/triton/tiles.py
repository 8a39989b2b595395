"""How large the tiles of the kernels are: by the widths, the chunk and the type, never by the length of a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """What one program holds, and how it is run."""

    rows: int
    """Tokens whose result it finds; of the gradient of the scores, both queries and keys."""
    others: int
    """Tokens that it looks at in one step; not counted for the gradient of the scores."""
    columns: int
    """Value columns: of its result, or for the gradient of the scores, of one step."""
    warps: int
    stages: int
    """Steps whose loads are on their way together."""


# The one place to change after a measurement. Sizes are for the 227 KB of shared memory of data-center GPUs since 2022.
# The gradients of scores and of rows are cut into the same blocks.
HALF = {
    "attended": Tile(64, 64, 256, warps=4, stages=2),
    "scores_gradient": Tile(128, 128, 64, warps=8, stages=4),
    "rows_gradient": Tile(128, 64, 256, warps=8, stages=3),
}
# What the scores themselves cost outweighs the products over so few value columns, and small tiles hide it better.
NARROW = 256
HALF_NARROW = HALF | {
    "scores_gradient": Tile(64, 64, 64, warps=4, stages=3),
    "rows_gradient": Tile(64, 64, 128, warps=4, stages=3),
}
# For the 99 KB of others.
LEAN = {
    "attended": Tile(64, 32, 128, warps=4, stages=2),
    "scores_gradient": Tile(64, 64, 32, warps=4, stages=2),
    "rows_gradient": Tile(64, 32, 128, warps=4, stages=2),
}
ROOM = 227 * 1024
# Products of float32 in full precision run on no tensor core: each thread multiplies for itself.
FULL = {
    "attended": Tile(32, 32, 64, warps=4, stages=1),
    "scores_gradient": Tile(32, 32, 32, warps=4, stages=1),
    "rows_gradient": Tile(32, 32, 64, warps=4, stages=1),
}
# Bytes of weights and gradients of scores that are in memory at once, unless a single block of keys has more.
SLAB = 512 * 2**20
BIAS = 64  # tokens of a tile whose diagonals are summed up, which takes long for larger ones
MOST_GROUPS = 65_535  # of the second side of a grid
# From so many slices of values on, the softmax's normalizer is found before, not once more in every slice.
NORMALISE_FIRST = 2
LEAST = 16  # of any side of a product
MOST = 256  # of tokens in a tile


def padded(width: int) -> int:
    """The power of two that holds a width and that a product can have."""
    return max(LEAST, 1 << (width - 1).bit_length())


def tile_of(
    kernel: str, width: int, values: int, chunk: int, dtype: torch.dtype, memory: int, result: int | None = None
) -> Tile:
    """The tile of a kernel for keys and values of these widths, and so many bytes of shared memory.

    `chunk` 0 is full attention. The result is as wide as the values unless `result` says otherwise.
    """
    tile = _table(values, dtype, memory)[kernel]
    if chunk:
        tile = tile._replace(rows=min(tile.rows, padded(chunk)), others=min(tile.others, padded(chunk)))
    if kernel == "scores_gradient":
        return tile._replace(columns=min(tile.columns, padded(values)))
    # What every slice costs besides its own columns: its scores, or reading those that were found.
    depth = padded(width) if kernel == "attended" else tile.others
    return tile._replace(columns=_slice(tile.columns, depth, values if result is None else result))


def _table(values: int, dtype: torch.dtype, memory: int) -> dict[str, Tile]:
    if dtype == torch.float32:
        return FULL
    if memory < ROOM:
        return LEAN
    return HALF if values > NARROW else HALF_NARROW


def _slice(widest: int, depth: int, values: int) -> int:
    """The width of a slice for which all slices, each with its own scores, cost least."""
    widths = [width for width in (32, 64, 128, 256, 512) if width <= min(widest, padded(values))] or [padded(values)]
    return min(widths, key=lambda width: -(-values // width) * (width + depth))


class Slab(NamedTuple):
    """The chunks of a batch, and their keys, whose scores are in memory together."""

    group: int
    groups: int
    block: int
    """The first block of keys, in each of the chunks."""
    blocks: int


def slabs(groups: int, blocks: int, block: int, itemsize: int, most: int) -> list[Slab]:
    """All of `groups` chunks of so many blocks, in slabs of at most `most` bytes, or of a single block of keys."""
    if not groups * blocks:
        return []
    row = 2 * itemsize * block * block * blocks
    keys = max(1, min(blocks, most // row))
    together = max(1, min(groups, most // (row * blocks), MOST_GROUPS))
    return [
        Slab(group, min(together, groups - group), first, min(keys, blocks - first))
        for group in range(0, groups, together)
        for first in range(0, blocks, keys)
    ]
