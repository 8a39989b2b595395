"""Launch the kernels of state-space models: how time is cut, which tables and buffers there are, what is launched."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.ops.driver import max_shared_memory
from tcnca.ops.launcher import Launch, aligned, multiprocessors
from tcnca.ops.ssm import triton_kernels as kernels


class Config(NamedTuple):
    """Sizes of the programs of `ssm`."""

    block: int
    """Tokens of a block of time."""
    rows: int
    """Sequences and segments of a program: 64 is a tile of Hopper's matrix instructions."""
    ends_warps: int
    outputs_warps: int
    weights_warps: int
    weights_width: int
    """Most states of a program that computes gradients of parameters, which has six numbers for each in registers."""
    stages: int
    """Blocks whose loads are in flight together."""


# For inputs in bfloat16 and in float32, whose products take three times as many registers.
HALF_CONFIG = Config(64, 64, 4, 4, 4, 16, 3)
FULL_CONFIG = Config(32, 64, 4, 8, 4, 16, 3)
# For GPUs whose blocks have 99 KB of shared memory: with more states than this, bfloat16 takes 104 KB as above.
LEAN_CONFIG = HALF_CONFIG._replace(rows=32, stages=2)
LEAN_STATES, LARGE_SHARED_MEMORY = 32, 104 * 1024
# Programs of `ssm` for each multiprocessor, and the fewest tokens of a segment.
PROGRAMS, MIN_TOKENS = 4, 256
# Channels of a tile that is transposed, of one block of time.
CHANNELS = 64
# Segments and hidden states that a program joins at once: `ssm` has many rows, `diagonal_scan` many segments.
SSM_CARRY, SCAN_CARRY = (16, 32), (64, 16)
# States of a program of `diagonal_scan`, programs for each multiprocessor, tokens of a segment, and those of them that
# are loaded together.
TILE = 32
SCAN_PROGRAMS, MIN_SEGMENT, MAX_SEGMENT = 32, 128, 4096
GROUP, GRADIENT_GROUP = 16, 8
CACHED_PLANS = 256

FULL, EXACT = torch.float32, torch.float64


class Tables(NamedTuple):
    """What the kernels of `ssm` know of decays λ and weights, see there; of `[directions · channels, lags, states]`."""

    exact: Tensor
    """`λ^l` in complex128."""
    powers: Tensor
    readout: Tensor
    kernel: Tensor
    step: Tensor
    segment: Tensor
    """The decay of a segment, `[directions · channels, 2, states]` in float64."""


class SSMPlan(NamedTuple):
    """The launches of calls of `ssm` of one size, forward or in reversed time, and the dtypes of rows."""

    block: int
    """Tokens of a block of time."""
    shape: tuple[int, int, int, int]
    """Of rows: directions · channels, batch, segments, tokens of a segment."""
    programs: int
    rows: torch.dtype
    y_rows: torch.dtype
    to_rows: Launch
    ends: Launch
    carry: Launch
    outputs: Launch
    from_rows: Launch


def config_of(rows: torch.dtype, states: int, shared_memory: int) -> Config:
    """Return the sizes for rows of a dtype, a number of states, and the bytes of shared memory of a block."""
    if rows != torch.bfloat16:
        return FULL_CONFIG
    return LEAN_CONFIG if states > LEAN_STATES and shared_memory < LARGE_SHARED_MEMORY else HALF_CONFIG


def cut_blocks(batch: int, time: int, channels: int, config: Config, device: int | None) -> tuple[int, int]:
    """Cut time into segments, about as many as can run at once; return their number and their blocks."""
    blocks = -(-time // config.block)
    tiles = -(-PROGRAMS * multiprocessors(device) // channels)
    segments = max(min(tiles * config.rows // batch, time // MIN_TOKENS), 1)
    length = -(-blocks // segments)
    return -(-blocks // length), length


def cut_tokens(batch: int, time: int, states: int, device: int | None) -> tuple[int, int]:
    """Cut time for `diagonal_scan`; return the number of segments and their tokens."""
    most = max(SCAN_PROGRAMS * multiprocessors(device) // (batch * -(-states // TILE)), 1)
    length = min(max(-(-time // (GROUP * most)) * GROUP, MIN_SEGMENT), MAX_SEGMENT)
    return -(-time // length), length


@functools.lru_cache(CACHED_PLANS)
def ssm_plan(
    shape: tuple[int, int, int],
    directions: int,
    states: int,
    dtype: torch.dtype,
    lengths: bool,
    initial: torch.dtype | None,
    gradient: bool,
    device: int | None,
) -> SSMPlan:
    """Prepare the launches of `ssm`; with `gradient`, those of reversed time."""
    batch, time, channels = shape
    rows = torch.bfloat16 if dtype == torch.bfloat16 else FULL
    config = config_of(rows, states, max_shared_memory(device))
    segments, length = cut_blocks(batch, time, directions * channels, config, device)
    tokens, count, tiles = length * config.block, batch * segments, -(-batch * segments // config.rows)
    programs, of_channels = directions * channels * tiles, -(-channels // CHANNELS)
    y_rows = rows if directions == 1 else FULL
    launch = functools.partial(Launch, device=device, stride_divisor=8 if channels % 8 == 0 else 1)
    walk = functools.partial(launch, num_stages=config.stages)
    numbers = (time * channels, channels, batch, time, channels, segments * length, of_channels)
    tile = {"FLIP": gradient, "EVEN": channels % CHANNELS == 0, "TIMES": config.block, "CHANNELS": CHANNELS}
    constants = walk_constants(states, rows, config)
    return SSMPlan(
        config.block,
        (directions * channels, batch, segments, tokens),
        programs,
        rows,
        y_rows,
        launch(
            kernels.to_rows,
            (of_channels * segments * length * batch * directions, 1),
            (dtype, rows, torch.int64 if lengths else FULL),
            numbers,
            # The gradient of padded outputs counts.
            {"LENGTHS": lengths and not gradient, **tile},
            num_warps=4,
        ),
        walk(
            kernels.ends,
            (programs, 1),
            (rows, *[FULL] * 3),
            (count, length, tiles),
            constants,
            num_warps=config.ends_warps,
        ),
        carry_launch(SSM_CARRY, directions * channels, batch, segments, states, initial, False, device),
        walk(
            kernels.outputs,
            (programs, 1),
            (rows, *[FULL] * 5, y_rows),
            (count, length, tiles),
            constants,
            num_warps=max(config.outputs_warps, walk_width(states) // 8),
        ),
        launch(
            kernels.from_rows,
            (of_channels * segments * length * batch, 1),
            (y_rows, dtype, torch.int64 if lengths else FULL),
            numbers,
            {"LENGTHS": lengths and gradient, "DIRECTIONS": directions, **tile},
            num_warps=4,
        ),
    )


def walk_width(states: int) -> int:
    """Return the width of a tile of states: a power of two, and no less than what a matrix product takes."""
    return max(1 << (states - 1).bit_length(), 16)


def walk_constants(states: int, rows: torch.dtype, config: Config) -> dict[str, object]:
    """Return the compile-time constants of a walk over blocks."""
    sizes = {"BLOCK": config.block, "ROWS": config.rows}
    return {"STATES": states, "WIDTH": walk_width(states), "HALF": rows == torch.bfloat16, **sizes}


@functools.lru_cache(CACHED_PLANS)
def weights_launches(
    channels: int, batch: int, segments: int, length: int, states: int, rows: torch.dtype, device: int | None
) -> tuple[Launch, Launch]:
    """Prepare the kernels of the gradients of the parameters; `length` is in blocks."""
    config = config_of(rows, states, max_shared_memory(device))
    constants = walk_constants(states, rows, config)
    tiles, width = -(-batch * segments // config.rows), min(walk_width(states), config.weights_width)
    groups = -(-states // width)
    numbers = (batch * segments, segments, length, tiles)
    launch = functools.partial(
        Launch, device=device, num_warps=config.weights_warps, num_stages=config.stages, stride_divisor=1
    )
    of_lags = {name: constants[name] for name in ("HALF", "BLOCK", "ROWS")}
    return (
        launch(kernels.lags, (channels * tiles, 1), (rows, rows, FULL), numbers, of_lags),
        launch(
            kernels.weights,
            (channels * tiles * groups, 1),
            (rows, rows, *[FULL] * 6),
            (*numbers, groups),
            {**constants, "WIDTH": width},
        ),
    )


def carry_launch(
    tile: tuple[int, int],
    channels: int,
    batch: int,
    segments: int,
    states: int,
    initial: torch.dtype | None,
    backwards: bool,
    device: int | None,
) -> Launch:
    """Prepare the kernel that joins segments, with `tile` of segments and states at once."""
    blocks = -(-states // tile[1])
    return Launch(
        kernels.carry,
        (blocks * batch * channels, 1),
        (EXACT, FULL, FULL, initial or FULL, FULL),
        (batch, channels, segments, states, blocks, int(backwards)),
        {"INITIAL": initial is not None, "SEGMENTS": tile[0], "LANES": tile[1]},
        device=device,
        num_warps=4,
        stride_divisor=1,
    )


def make_tables(log_decay: Tensor, weight: Tensor, plan: SSMPlan) -> Tables:
    """Compute powers of the decays in float64, and round them."""
    states = log_decay.shape[2]
    log = torch.view_as_complex(log_decay.to(EXACT).contiguous()).view(-1, 1, states)
    lag = torch.arange(plan.block + 1, device=log.device, dtype=EXACT).view(1, -1, 1)
    exact = torch.exp(log * lag)
    readout = exact * torch.view_as_complex(weight.to(EXACT).contiguous()).view(-1, 1, states)
    step = torch.view_as_real(exact[:, -1]).mT
    high = step.to(FULL)
    return Tables(
        exact,
        parts(exact).to(FULL).contiguous(),
        parts(readout).to(FULL).contiguous(),
        readout.real[:, :-1].sum(-1).to(FULL),
        torch.cat((high, (step - high).to(FULL)), 1),
        torch.view_as_real(torch.exp(log[:, 0] * plan.shape[3])).mT.contiguous(),
    )


def parts(values: Tensor) -> Tensor:
    """Return real and imaginary parts of `[channels, lags, states]` as `[channels, 2, lags, states]`."""
    return torch.view_as_real(values).permute(0, 3, 1, 2)


def _walk(
    stream: int,
    plan: SSMPlan,
    tables: Tables,
    x: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    last: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `x` in rows, what its segments start from and, if `last`, the last hidden states.

    These are `[batch, channels, states, 2]`, of one direction; without `last`, they have no meaning.
    """
    channels, batch, segments, tokens = plan.shape
    states = tables.exact.shape[2]
    rows = x.new_empty((channels, batch, segments * tokens), dtype=plan.rows)
    found, starts = (x.new_empty((channels, batch, segments, 2, states), dtype=FULL) for _ in range(2))
    total = x.new_empty((batch, channels, states, 2), dtype=FULL)
    plan.to_rows(stream, x, rows, tables.step if lengths is None else lengths)
    if segments > 1 or last:
        plan.ends(stream, rows, tables.powers, tables.step, found)
    else:
        found.zero_()
    plan.carry(stream, tables.segment, found, starts, tables.step if initial is None else initial, total)
    return rows, starts, total


def _outputs(
    stream: int, plan: SSMPlan, tables: Tables, rows: Tensor, starts: Tensor, y: Tensor, lengths: Tensor | None
) -> None:
    y_rows = rows.new_empty(rows.shape, dtype=plan.y_rows)
    plan.outputs(stream, rows, tables.kernel, tables.powers, tables.readout, tables.step, starts, y_rows)
    plan.from_rows(stream, y_rows, y, tables.step if lengths is None else lengths)


def run_ssm(
    stream: int, x: Tensor, log_decay: Tensor, weight: Tensor, initial: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """Return the outputs; logarithms of decays and weights are `[directions, channels, states, 2]`."""
    x = aligned(x)
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    plan = _plan(x, log_decay, initial, lengths, gradient=False)
    tables = make_tables(log_decay, weight, plan)
    rows, starts, _ = _walk(stream, plan, tables, x, initial, lengths)
    _outputs(stream, plan, tables, rows, starts, y, lengths)
    return y


def _plan(x: Tensor, log_decay: Tensor, initial: Tensor | None, lengths: Tensor | None, *, gradient: bool) -> SSMPlan:
    dtype = None if initial is None or gradient else initial.dtype
    directions, _, states, _ = log_decay.shape
    shape = (x.shape[0], x.shape[1], x.shape[2])
    return ssm_plan(shape, directions, states, x.dtype, lengths is not None, dtype, gradient, x.device.index)


def run_ssm_backward(
    stream: int,
    g: Tensor,
    x: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of `x`, of the parameters, and of the initial hidden states (None if there are none)."""
    g, x = aligned(g.to(x.dtype)), aligned(x)
    to_x = torch.empty_like(x)
    if x.numel() == 0:
        zeros = [torch.zeros_like(part, memory_format=torch.contiguous_format) for part in (log_decay, weight)]
        return to_x, zeros[0], zeros[1], None if initial is None else torch.zeros_like(initial)
    forward = _plan(x, log_decay, initial, lengths, gradient=False)
    reverse = _plan(x, log_decay, initial, lengths, gradient=True)
    tables = make_tables(log_decay, weight, forward)
    g_rows, pulls, total = _walk(stream, reverse, tables, g, None, lengths, initial is not None)
    _outputs(stream, reverse, tables, g_rows, pulls, to_x, lengths)
    rows, starts, _ = _walk(stream, forward, tables, x, initial, lengths)
    found = _parameter_gradients(stream, forward, tables, rows, g_rows, starts, pulls)
    factor = torch.view_as_complex(weight.to(EXACT).contiguous()).flatten(0, 1)
    to_initial = None
    if initial is not None:
        past = torch.view_as_complex(total) * (factor * tables.exact[:, 1])
        to_initial = torch.view_as_real(past.conj().resolve_conj()).to(initial.dtype)
    return to_x, _conjugate(factor * found[1], log_decay), _conjugate(found[0], weight), to_initial


def _parameter_gradients(
    stream: int, plan: SSMPlan, tables: Tables, rows: Tensor, g_rows: Tensor, starts: Tensor, pulls: Tensor
) -> tuple[Tensor, Tensor]:
    """Return sums over time of gradients times states, and times derivatives of states by logarithms of decays."""
    channels, batch, segments, tokens = plan.shape
    block, states = tables.exact.shape[1] - 1, tables.exact.shape[2]
    lag = torch.arange(block + 1, device=rows.device, dtype=EXACT).view(1, -1, 1)
    slopes = parts(tables.exact * lag).to(FULL).contiguous()
    products = rows.new_empty((channels, plan.programs // channels, block, block), dtype=FULL)
    found = rows.new_empty((channels, plan.programs // channels, 2, 2, states), dtype=FULL)
    sizes = (channels, batch, segments, tokens // block, states)
    lags, weights = weights_launches(*sizes, plan.rows, rows.device.index)
    lags(stream, rows, g_rows, products)
    weights(stream, rows, g_rows, tables.powers, slopes, tables.step, starts, pulls, found)
    # In reversed time, products of one lag are on one antidiagonal: a row of `2 · block - 1` is one place further.
    skewed = F.pad(products.sum(1, dtype=EXACT), (0, block)).flatten(1)[:, : block * (2 * block - 1)]
    to_kernel = skewed.view(channels, block, 2 * block - 1).sum(1)[:, :block].flip(1).unsqueeze(2)
    sums = torch.view_as_complex(found.sum(1, dtype=EXACT).transpose(2, 3).contiguous()) * tables.exact[:, 1:2]
    inside = tables.exact[:, :-1] * to_kernel
    return sums[:, 0] + inside.sum(1), sums[:, 1] + (lag[:, :-1] * inside).sum(1)


def _conjugate(value: Tensor, like: Tensor) -> Tensor:
    """Return a gradient as PyTorch defines it, the conjugate of a derivative, with the shape and dtype of `like`."""
    return torch.view_as_real(value.conj().resolve_conj()).view(like.shape).to(like.dtype)


class ScanPlan(NamedTuple):
    """The launches of calls of `diagonal_scan` of one size."""

    segments: int
    tokens: int
    ends: Launch
    carry: Launch
    outputs: Launch


@functools.lru_cache(CACHED_PLANS)
def scan_plan(
    shape: tuple[int, int, int],
    lengths: bool,
    initial: torch.dtype | None,
    backwards: bool,
    gradient: bool,
    device: int | None,
) -> ScanPlan:
    """Prepare the launches of `diagonal_scan` in one direction of time, or those of a gradient."""
    batch, time, states = shape
    segments, length = cut_tokens(batch, time, states, device)
    tiles = -(-states // TILE)

    def launch(output: bool) -> Launch:
        constants: dict[str, Any] = {
            # The gradient of padded outputs counts.
            "LENGTHS": lengths and (output or not gradient),
            "OUTPUT": output,
            "GRADIENT": output and gradient,
            "TILE": TILE,
            "GROUP": GRADIENT_GROUP if gradient else GROUP,
        }
        return Launch(
            kernels.scan,
            (tiles * segments * batch, 1),
            (*[FULL] * 6, torch.int64 if lengths else FULL),
            (time, states, segments, length, tiles, int(backwards)),
            constants,
            device=device,
            num_warps=1,
            stride_divisor=1,
        )

    carry = carry_launch(SCAN_CARRY, 1, batch, segments, states, initial, backwards, device)
    return ScanPlan(segments, length, launch(False), carry, launch(True))


def run_scan(
    stream: int,
    v: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
    past: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all hidden states, those at the end, and the sums of products with `past`; see the kernel `scan`.

    `v` and `past` are `[batch, time, states, 2]`, `past` for gradients only, `log_decay` is `[states, 2]`.
    """
    v = aligned(v)
    batch, time, states, _ = v.shape
    h = torch.empty_like(v)
    dtype = None if initial is None else initial.dtype
    plan = scan_plan((batch, time, states), lengths is not None, dtype, reverse, past is not None, v.device.index)
    log = torch.view_as_complex(log_decay.to(EXACT).contiguous())
    exact = torch.view_as_real(torch.exp(log)).mT
    decay = torch.cat((exact.to(FULL), (exact - exact.to(FULL)).to(FULL)))
    segment = torch.view_as_real(torch.exp(log * plan.tokens)).mT.contiguous()
    found, starts = (v.new_empty((batch, plan.segments, 2, states)) for _ in range(2))
    total = v.new_empty((batch, states, 2))
    count = decay if lengths is None else lengths
    past = v if past is None else aligned(past)
    plan.ends(stream, v, h, past, decay, starts, found, count)
    plan.carry(stream, segment, found, starts, decay if initial is None else initial, total)
    plan.outputs(stream, v, h, past, decay, starts, found, count)
    return h, total, found
