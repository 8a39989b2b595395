"""Launch the kernels of the EMA: how time is cut, which buffers there are, what is launched in which order.

The launches of a call are prepared once for every `Signature`, as that takes longer in Python than short sequences take
on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcnca.ops.ema import triton_kernels as kernels
from tcnca.ops.launcher import Launch, multiprocessors

TILE = 32  # channels of a program
# Programs of one warp for each multiprocessor. More of them hide the latency of memory, but each reads its start.
PROGRAMS = 32
MIN_SEGMENT, MAX_SEGMENT = 128, 1024
# Segments are whole groups of steps, of any size below.
STEPS = 16
# Steps whose inputs are loaded together; fewer where the hidden states of a program fill its registers.
ENDS_GROUP, OUTPUTS_GROUP, WEIGHTS_GROUP = 16, 16, 8
# Hidden states of one program, where a program need not have all of them.
MAX_STATES = 16
# Chains of segments that one program follows in parallel, and the hidden states for which it does.
CHAINS, LANES = 16, 32
CACHED_PLANS = 512  # of a few kilobytes each

FULL = torch.float32
Strides = tuple[int, ...]
Parameters = tuple[Tensor, ...]


class Signature(NamedTuple):
    """What the launches of a call depend on; None or False for what is not given."""

    shape: tuple[int, ...]
    directions: int
    hidden: int
    dtype: torch.dtype
    parameters: tuple[torch.dtype, ...]
    initial: torch.dtype | None
    lengths: bool
    final: bool
    """Whether the final hidden states are returned; in the backward pass, whether they have a gradient."""
    omega: torch.dtype | None
    silu: bool
    keep: bool
    """Whether the slopes of the SiLU are kept; always True in the backward pass of one."""
    device: int | None

    @property
    def lengths_dtype(self) -> torch.dtype:
        """The dtype of the lengths, or of the coefficients, which are passed in their place."""
        return torch.int64 if self.lengths else FULL


class Forward(NamedTuple):
    """The launches of a call in their order, and the size of the buffer between them."""

    carries: int
    prepare: Launch
    ends: Launch
    carry: Launch
    outputs: tuple[Launch, ...]


class Backward(NamedTuple):
    """The launches of a call's gradients in their order, and the sizes of the buffers between them.

    `ends` and `carry` compute again what the forward pass may not have kept.
    """

    carries: int
    parts: int
    omega_parts: int
    ends: Launch
    carry: Launch
    pulls: Launch
    carry_pulls: Launch
    outputs: tuple[Launch, ...]
    weights: Launch
    reduce: Launch


def run_forward(
    stream: int,
    x: Tensor,
    parameters: Parameters,
    initial: Tensor | None,
    lengths: Tensor | None,
    omega: Tensor | None,
    silu: bool,
    y: Tensor,
    final: Tensor | None,
    coefficients: Tensor,
    slopes: Tensor | None,
) -> Tensor | None:
    """Fill `y`, `final`, `coefficients` and `slopes`; return what segments start from, for `run_backward`."""
    if x.numel() == 0:
        return None
    signature = _signature(x, parameters, initial, lengths, final is not None, omega, silu, slopes is not None)
    plan = forward_plan(signature, x.stride())
    carries = coefficients.new_empty(plan.carries)
    # The coefficients take the place of tensors that are not given.
    initial, count, final, omega, slopes = (
        coefficients if part is None else part for part in (initial, lengths, final, omega, slopes)
    )
    plan.prepare(stream, *parameters, coefficients)
    plan.ends(stream, x, coefficients, carries, count, *[coefficients] * 3)
    plan.carry(stream, coefficients, carries, initial, coefficients)
    _run_outputs(plan.outputs, stream, x, y, coefficients, carries, count, final, omega, slopes)
    return carries


def run_backward(
    stream: int,
    g: Tensor,
    to_final: Tensor | None,
    x: Tensor,
    coefficients: Tensor,
    slopes: Tensor | None,
    parameters: Parameters,
    initial: Tensor | None,
    lengths: Tensor | None,
    omega: Tensor | None,
    carries: Tensor | None,
) -> tuple[Tensor, Parameters, Tensor | None, Tensor | None]:
    """Return the gradients of the input, of the parameters, of the initial hidden states and of omega (or None).

    What segments start from is computed again if it was not kept.
    """
    to_x, to_parameters = _contiguous_like(x), tuple([_contiguous_like(part) for part in parameters])
    to_omega = None if omega is None else _contiguous_like(omega)
    if x.numel() == 0:
        for part in (*to_parameters, *([] if to_omega is None else [to_omega])):
            part.zero_()
        return to_x, to_parameters, None if initial is None else _contiguous_like(initial), to_omega
    silu = slopes is not None
    signature = _signature(x, parameters, initial, lengths, to_final is not None, omega, silu, silu)
    plan = backward_plan(signature, x.stride(), g.stride(), g.dtype)
    pulls, parts = coefficients.new_empty(plan.carries), coefficients.new_empty(plan.parts)
    total = coefficients if initial is None else coefficients.new_empty(initial.shape)
    count = coefficients if lengths is None else lengths
    last = coefficients if to_final is None else to_final
    skip, omega_parts, out_omega = [coefficients] * 3
    if omega is not None and to_omega is not None:  # both or none
        skip, omega_parts, out_omega = omega, coefficients.new_empty(plan.omega_parts), to_omega
    # A gradient of the final states needs states that include the drive, which a start from zero left out.
    if carries is None or (initial is None and to_final is not None):
        carries = coefficients.new_empty(plan.carries)
        plan.ends(stream, x, coefficients, carries, count, *[coefficients] * 3)
        plan.carry(stream, coefficients, carries, coefficients if initial is None else initial, coefficients)
    if slopes is None:
        plan.pulls(stream, g, coefficients, pulls, count, last, coefficients, coefficients)
    else:
        sloped = _contiguous_like(x)
        plan.pulls(stream, g, coefficients, pulls, count, last, slopes, sloped)
        g = sloped
    plan.carry_pulls(stream, coefficients, pulls, coefficients, total)
    _run_outputs(plan.outputs, stream, g, to_x, coefficients, pulls, count, last, skip, coefficients)
    plan.weights(stream, x, g, coefficients, carries, pulls, parts, omega_parts, count, last)
    plan.reduce(stream, parts, omega_parts, coefficients, *parameters[:3], *to_parameters, out_omega)
    if initial is None:
        return to_x, to_parameters, None, to_omega
    to_initial = coefficients[0, 1] * total
    if to_final is not None and lengths is not None:
        # Without a token, the final states are the initial ones.
        to_initial += torch.where((lengths == 0).view(-1, 1, 1), to_final, 0.0)
    return to_x, to_parameters, to_initial.to(initial.dtype), to_omega


def _contiguous_like(value: Tensor) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _signature(
    x: Tensor,
    parameters: Parameters,
    initial: Tensor | None,
    lengths: Tensor | None,
    final: bool,
    omega: Tensor | None,
    silu: bool,
    keep: bool,
) -> Signature:
    delta, alpha, beta, gamma = parameters
    directions, _, hidden = delta.shape
    return Signature(
        x.shape,
        directions,
        hidden,
        x.dtype,
        (delta.dtype, alpha.dtype, beta.dtype, gamma.dtype),
        None if initial is None else initial.dtype,
        lengths is not None,
        final,
        None if omega is None else omega.dtype,
        silu,
        keep,
        x.device.index,
    )


def _run_outputs(
    launches: tuple[Launch, ...],
    stream: int,
    x: Tensor,
    y: Tensor,
    coefficients: Tensor,
    *rest: Tensor,
) -> None:
    """Launch one direction after the other."""
    if len(launches) == 1:
        launches[0](stream, x, y, y, coefficients, *rest)
        return
    # The directions are added in float32, whatever the dtype of the outputs.
    between = y if y.dtype == FULL else torch.empty_like(y, dtype=FULL)
    launches[0](stream, x, between, between, coefficients, *rest)
    launches[1](stream, x, y, between, coefficients, *rest)


@functools.lru_cache(CACHED_PLANS)
def forward_plan(signature: Signature, strides: Strides) -> Forward:
    """Prepare the launches of a call whose `x` has these strides."""
    build = _Builder(signature, signature.initial is not None)
    s, cut = signature, build.cut
    size = s.shape[2] * s.hidden
    return Forward(
        s.directions * s.shape[0] * cut.segments * size,
        build.launch(
            kernels.prepare,
            (-(-size // 128), s.directions),
            (*s.parameters, FULL),
            (s.shape[2],),
            4,
            SCALE=s.hidden**-0.5,
            BLOCK=128,
        ),
        build.ends(strides, s.dtype, gradient=False),
        build.carry(gradient=False),
        build.outputs(strides, s.dtype, gradient=False),
    )


@functools.lru_cache(CACHED_PLANS)
def backward_plan(signature: Signature, strides: Strides, g_strides: Strides, g_dtype: torch.dtype) -> Backward:
    """Prepare the launches of a call's gradients."""
    build = _Builder(signature, signature.initial is not None or signature.final)
    s = signature
    segments, size = s.shape[0] * build.cut.segments, s.shape[2] * s.hidden
    # After the first launch, gradients are read that were multiplied by the slopes of a SiLU.
    read = ((s.shape[1] * s.shape[2], s.shape[2], 1), s.dtype) if s.silu else (g_strides, g_dtype)
    return Backward(
        s.directions * segments * size,
        (3 if build.scaled else 2) * s.directions * segments * size,
        segments * s.shape[2],
        build.ends(strides, s.dtype, gradient=False),
        build.carry(gradient=False),
        build.ends(g_strides, g_dtype, gradient=True),
        build.carry(gradient=True),
        build.outputs(*read, gradient=True),
        build.weights(strides, *read),
        build.launch(
            kernels.reduce,
            (-(-size // 8), s.directions),
            (FULL, FULL, FULL, *s.parameters[:3], *s.parameters, s.omega or FULL),
            (segments, s.shape[2]),
            4,
            # One thread loads several hidden states at once, which needs aligned tensors; other kernels load one.
            stride_divisor=1,
            SCALE=s.hidden**-0.5,
            SCALED=build.scaled,
            OMEGA=s.omega is not None,
            WIDTH=512,
            BLOCK=8,
        ),
    )


class Cut(NamedTuple):
    """How a call's time, channels and hidden states are divided."""

    length: int
    segments: int
    tiles: int
    states: int
    groups: int


def cut(signature: Signature) -> Cut:
    """Cut time into segments, about as many as can run at once."""
    rows, time, channels = signature.shape
    tiles = -(-channels // TILE)
    most = max(PROGRAMS * multiprocessors(signature.device) // (rows * tiles), 1)
    length = min(max(-(-time // (STEPS * most)) * STEPS, MIN_SEGMENT), MAX_SEGMENT)
    states = 1 << (signature.hidden - 1).bit_length()
    # One segment more than are full: the last may be empty, and starts from the final state.
    return Cut(length, time // length + 1, tiles, states, -(-states // MAX_STATES))


class _Builder:
    """Prepares the launches of one signature; `scaled` keeps the drive in the hidden states (see the kernels)."""

    def __init__(self, signature: Signature, scaled: bool) -> None:
        self.signature, self.scaled, self.cut = signature, scaled, cut(signature)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        dtypes: tuple[torch.dtype, ...],
        numbers: tuple[int, ...],
        num_warps: int = 1,
        stride_divisor: int | None = None,
        **constants: object,
    ) -> Launch:
        constants = {"HIDDEN": self.signature.hidden, **constants}
        device = self.signature.device
        return Launch(
            kernel, grid, dtypes, numbers, constants, device=device, num_warps=num_warps, stride_divisor=stride_divisor
        )

    def ends(self, strides: Strides, dtype: torch.dtype, *, gradient: bool) -> Launch:
        s, c, (rows, time, channels) = self.signature, self.cut, self.signature.shape
        injected, slopes = gradient and s.final, gradient and s.silu
        return self.launch(
            kernels.ends,
            (c.tiles * c.groups * c.segments * rows * s.directions, 1),
            (dtype, FULL, FULL, s.lengths_dtype, FULL, *[s.dtype if slopes else FULL] * 2),
            (*strides, rows, time, channels, c.segments, c.length, c.tiles, c.groups, int(gradient)),
            ENTER=2 if gradient and self.scaled else 0,
            STATES=min(c.states, MAX_STATES),
            SCALED=self.scaled,
            # The gradient of padded outputs counts; only the position of the last token has to be known.
            LENGTHS=s.lengths and (injected or not gradient),
            INJECT=injected,
            SLOPES=slopes,
            TILE=TILE,
            # Slopes double the loads of a step, and with 16 steps the registers.
            GROUP=max(1, ENDS_GROUP // 2) if slopes else ENDS_GROUP,
        )

    def carry(self, *, gradient: bool) -> Launch:
        s, c, (rows, _, channels) = self.signature, self.cut, self.signature.shape
        group = 4
        blocks = -(-channels * s.hidden // LANES)
        share = -(-c.segments // (CHAINS * group)) * group
        return self.launch(
            kernels.carry,
            (blocks * rows * s.directions, 1),
            (FULL, FULL, s.initial or FULL, FULL),
            (rows, channels, c.segments, c.length, share, blocks, int(gradient)),
            4,
            stride_divisor=1,
            INITIAL=s.initial is not None and not gradient,
            TOTAL=s.initial is not None and gradient,
            WIDTH=CHAINS,
            BLOCK=LANES,
            GROUP=group,
        )

    def outputs(self, strides: Strides, dtype: torch.dtype, *, gradient: bool) -> tuple[Launch, ...]:
        s, c, (rows, time, channels) = self.signature, self.cut, self.signature.shape
        launches = []
        for direction in range(s.directions):
            # Of two directions the first writes float32, to which the second adds.
            first, last = direction == 0, direction == s.directions - 1
            out, previous = s.dtype if last else FULL, s.dtype if first and last else FULL
            silu = s.silu and last and not gradient
            keep = silu and s.keep
            launch = self.launch(
                kernels.outputs,
                (c.tiles * c.segments * rows, 1),
                (dtype, out, previous, FULL, FULL, s.lengths_dtype, FULL, s.omega or FULL, s.dtype if keep else FULL),
                (*strides, rows, time, channels, c.segments, c.length, c.tiles, direction, int(gradient)),
                ENTER=2 if gradient and self.scaled else 0,
                STATES=c.states,
                SCALED=self.scaled,
                LENGTHS=s.lengths,
                GRADIENT=gradient and s.lengths,
                INJECT=gradient and s.final,
                ADD=not first,
                FINAL=s.final and not gradient,
                SKIP=s.omega is not None and last,
                SILU=silu,
                KEEP=keep,
                TILE=TILE,
                GROUP=OUTPUTS_GROUP * MAX_STATES // max(c.states, MAX_STATES),
            )
            launches.append(launch)
        return tuple(launches)

    def weights(self, strides: Strides, g_strides: Strides, g_dtype: torch.dtype) -> Launch:
        s, c, (rows, time, channels) = self.signature, self.cut, self.signature.shape
        return self.launch(
            kernels.weights,
            (c.tiles * c.groups * c.segments * rows * s.directions, 1),
            (s.dtype, g_dtype, *[FULL] * 5, s.lengths_dtype, FULL),
            (*strides, *g_strides, rows, time, channels, c.segments, c.length, c.tiles, c.groups),
            STATES=min(c.states, MAX_STATES),
            SCALED=self.scaled,
            LENGTHS=s.lengths,
            INJECT=s.final,
            OMEGA=s.omega is not None,
            TILE=TILE,
            GROUP=WEIGHTS_GROUP,
        )
