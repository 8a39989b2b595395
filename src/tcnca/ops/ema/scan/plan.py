"""What the kernels of the EMA are started with: how time is cut, grids, and all arguments but the addresses.

A plan is made once for every shape, as making it takes longer in Python than short sequences take on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from tcnca.ops.ema.scan.gradients import reduce, weights
from tcnca.ops.ema.scan.kernels import carry, ends, outputs, prepare
from tcnca.ops.triton_kernels.start import Launch

TILE = 32
# Programs of one warp for each multiprocessor. More of them hide how slow memory is; each reads where it starts from.
PROGRAMS = 32
SHORTEST, LONGEST = 128, 1024
# Segments are whole groups of steps, of any size below.
STEPS = 16
# Steps whose inputs are on their way together; fewer where the hidden states of a program fill its registers.
ENDS_GROUP, OUTPUTS_GROUP, WEIGHTS_GROUP = 16, 16, 8
# Hidden states that one program holds, where these need not meet.
HELD = 16
# Chains of segments that one program follows side by side, for so many hidden states.
CHAINS, LANES = 16, 32
# Plans that are kept, of a few kilobytes each.
KEPT = 512

Strides = tuple[int, ...]


class Call(NamedTuple):
    """What a call is like: types, and None or False for what is not given."""

    shape: tuple[int, ...]
    directions: int
    hidden: int
    dtype: torch.dtype
    parameters: tuple[torch.dtype, ...]
    initial: torch.dtype | None
    lengths: bool
    final: bool
    device: int | None

    @property
    def counts(self) -> torch.dtype:
        """The type of the lengths, or of what stands in for them."""
        return torch.int64 if self.lengths else torch.float32


class Forward(NamedTuple):
    """The launches of a call in their order, and the size of the buffer between them."""

    carries: int
    prepare: Launch
    ends: Launch
    carry: Launch
    outputs: tuple[Launch, ...]


class Backward(NamedTuple):
    """The launches of a call's gradients in their order, and the sizes of the buffers between them.

    `ends` and `carry` find again what the call itself may have kept.
    """

    carries: int
    parts: int
    ends: Launch
    carry: Launch
    pulls: Launch
    carry_pulls: Launch
    outputs: tuple[Launch, ...]
    weights: Launch
    reduce: Launch


class Cut(NamedTuple):
    """How a call's time, channels and hidden states are cut up."""

    length: int
    segments: int
    tiles: int
    states: int
    groups: int


def cut(call: Call) -> Cut:
    """Cut time into segments, about so many that all run at once."""
    rows, time, channels = call.shape
    tiles = -(-channels // TILE)
    most = max(PROGRAMS * _processors(call.device) // (rows * tiles), 1)
    length = min(max(-(-time // (STEPS * most)) * STEPS, SHORTEST), LONGEST)
    states = 1 << (call.hidden - 1).bit_length()
    # One segment more than are full: the last may be empty, and starts from the final state.
    return Cut(length, time // length + 1, tiles, states, -(-states // HELD))


def _processors(device: int | None) -> int:
    return 1 if device is None else int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(KEPT)
def forward(call: Call, strides: Strides) -> Forward:
    """The plan of a call whose `x` has these strides."""
    c = cut(call)
    rows, _, channels = call.shape
    scaled = call.initial is not None
    size = channels * call.hidden
    return Forward(
        call.directions * rows * c.segments * size,
        _launch(
            call,
            prepare,
            (-(-size // 128), call.directions),
            (*call.parameters, torch.float32),
            (channels,),
            4,
            SCALE=call.hidden**-0.5,
            BLOCK=128,
        ),
        _ends(call, c, strides, call.dtype, scaled, gradient=False, injected=False),
        _carry(call, c, gradient=False),
        _outputs(call, c, strides, call.dtype, scaled, gradient=False),
    )


@functools.lru_cache(KEPT)
def backward(call: Call, strides: Strides, g_strides: Strides, g_dtype: torch.dtype) -> Backward:
    """The plan of the gradients of a call; `final` says whether one comes from its final hidden states."""
    c = cut(call)
    scaled = call.initial is not None or call.final
    segments = call.shape[0] * c.segments
    size = call.shape[2] * call.hidden
    return Backward(
        call.directions * segments * size,
        (3 if scaled else 2) * call.directions * segments * size,
        _ends(call, c, strides, call.dtype, scaled, gradient=False, injected=False),
        _carry(call, c, gradient=False),
        _ends(call, c, g_strides, g_dtype, scaled, gradient=True, injected=call.final),
        _carry(call, c, gradient=True),
        _outputs(call, c, g_strides, g_dtype, scaled, gradient=True),
        _weights(call, c, strides, g_strides, g_dtype, scaled),
        _launch(
            call,
            reduce,
            (-(-size // 8), call.directions),
            (torch.float32, torch.float32, *call.parameters[:3], *call.parameters),
            (segments, call.shape[2]),
            4,
            # Several hidden states are loaded at once, which takes aligned tensors; others load one for each thread.
            multiple=1,
            SCALE=call.hidden**-0.5,
            SCALED=scaled,
            WIDTH=512,
            BLOCK=8,
        ),
    )


def _launch(
    call: Call,
    kernel: Any,
    grid: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    numbers: tuple[int, ...],
    warps: int,
    multiple: int | None = None,
    **constants: object,
) -> Launch:
    constants = {"HIDDEN": call.hidden, **constants}
    return Launch(kernel, grid, dtypes, numbers, constants, warps, call.device, multiple=multiple)


def _ends(
    call: Call, c: Cut, strides: Strides, dtype: torch.dtype, scaled: bool, *, gradient: bool, injected: bool
) -> Launch:
    rows, time, channels = call.shape
    return _launch(
        call,
        ends,
        (c.tiles * c.groups * c.segments * rows * call.directions, 1),
        (dtype, torch.float32, torch.float32, call.counts, torch.float32),
        (*strides, rows, time, channels, c.segments, c.length, c.tiles, c.groups, int(gradient)),
        1,
        ENTER=2 if gradient and scaled else 0,
        STATES=min(c.states, HELD),
        SCALED=scaled,
        # The padding's gradient counts; only where the last token's stands has to be known.
        LENGTHS=call.lengths and (injected or not gradient),
        INJECT=injected,
        TILE=TILE,
        GROUP=ENDS_GROUP,
    )


def _carry(call: Call, c: Cut, *, gradient: bool) -> Launch:
    rows, _, channels = call.shape
    group = 4
    blocks = -(-channels * call.hidden // LANES)
    share = -(-c.segments // (CHAINS * group)) * group
    return _launch(
        call,
        carry,
        (blocks * rows * call.directions, 1),
        (torch.float32, torch.float32, call.initial or torch.float32, torch.float32),
        (rows, channels, c.segments, c.length, share, blocks, int(gradient)),
        4,
        multiple=1,
        INITIAL=call.initial is not None and not gradient,
        TOTAL=call.initial is not None and gradient,
        WIDTH=CHAINS,
        BLOCK=LANES,
        GROUP=group,
    )


def _outputs(
    call: Call, c: Cut, strides: Strides, dtype: torch.dtype, scaled: bool, *, gradient: bool
) -> tuple[Launch, ...]:
    rows, time, channels = call.shape
    steps = []
    for direction in range(call.directions):
        # Of two directions the first leaves float32 for the second to add to.
        first, last = direction == 0, direction == call.directions - 1
        kinds = (call.dtype if last else torch.float32, call.dtype if first and last else torch.float32)
        step = _launch(
            call,
            outputs,
            (c.tiles * c.segments * rows, 1),
            (dtype, *kinds, torch.float32, torch.float32, call.counts, torch.float32),
            (*strides, rows, time, channels, c.segments, c.length, c.tiles, direction, int(gradient)),
            1,
            ENTER=2 if gradient and scaled else 0,
            STATES=c.states,
            SCALED=scaled,
            LENGTHS=call.lengths,
            GRADIENT=gradient and call.lengths,
            INJECT=gradient and call.final,
            ADD=not first,
            FINAL=call.final and not gradient,
            TILE=TILE,
            GROUP=OUTPUTS_GROUP * HELD // max(c.states, HELD),
        )
        steps.append(step)
    return tuple(steps)


def _weights(call: Call, c: Cut, strides: Strides, g_strides: Strides, g_dtype: torch.dtype, scaled: bool) -> Launch:
    rows, time, channels = call.shape
    return _launch(
        call,
        weights,
        (c.tiles * c.groups * c.segments * rows * call.directions, 1),
        (call.dtype, g_dtype, *[torch.float32] * 4, call.counts, torch.float32),
        (*strides, *g_strides, rows, time, channels, c.segments, c.length, c.tiles, c.groups),
        1,
        STATES=min(c.states, HELD),
        SCALED=scaled,
        LENGTHS=call.lengths,
        INJECT=call.final,
        TILE=TILE,
        GROUP=WEIGHTS_GROUP,
    )
