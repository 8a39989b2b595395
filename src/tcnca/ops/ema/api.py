"""Multi-dimensional damped EMA with state in and out: the public function, its state, and the choice of a backend."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from tcnca.errors import InputError, StateError
from tcnca.ops.checks import check_float64, check_lengths, check_sequence, check_state, without_autocast
from tcnca.ops.context import ContextParallel, current_context
from tcnca.ops.dispatch import INTERPRETED, Candidate, select_backend, tensors_reason, transform_reason
from tcnca.ops.ema import triton_op
from tcnca.ops.ema.chunked import ema_chunked
from tcnca.ops.ema.naive import add_skip, decay_powers, ema_coefficients, ema_kernel, ema_recurrent, ema_scan
from tcnca.ops.long_conv import fft_convolve
from tcnca.ops.padding import advance, align_right, zero_padding
from tcnca.ops.ring import push_ring, read_ring, unroll_ring
from tcnca.ops.ssm.naive import decayed_sum, sum_exponentials
from tcnca.ops.state import State

EMABackend = Literal["auto", "chunked", "recurrent", "scan", "fft", "triton"]
EMAActivation = Literal["silu", "none"]
TRITON_MAX_STATES = 64

Parameters = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class EMAState(State):
    """What a causal EMA remembers.

    Attributes:
        hidden: `[batch, channels, d_state]`, the hidden states.
        window: `[batch, truncation, channels]`, a ring buffer of the last inputs, for a truncated kernel only, where
            each input is subtracted again after `truncation` steps. None otherwise.
        position: `[batch]`, tokens seen so far.
    """

    _rings: ClassVar[frozenset[str]] = frozenset({"window"})

    hidden: Tensor
    window: Tensor | None
    position: Tensor

    def _least_dtype(self, field: str) -> torch.dtype | None:
        return _hidden_dtype(self.window is not None) if field == "hidden" else None


def _hidden_dtype(truncated: bool) -> torch.dtype:
    """Return the least dtype of hidden states, which sum over a whole past.

    Where a truncated EMA subtracts an input again, the rounding error that remains would stay forever if the decay is
    near 1, so its hidden states are kept and computed in float64.
    """
    return torch.float64 if truncated else torch.float32


@dataclasses.dataclass(frozen=True)
class EMACall:
    """The arguments of one call of `ema`."""

    x: Tensor
    parameters: Parameters
    omega: Tensor | None
    activation: str
    truncation: int | None
    lengths: Tensor | None
    state: EMAState | None
    return_state: bool
    inplace: bool


def initial_ema_state(
    batch: int,
    channels: int,
    d_state: int,
    truncation: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> EMAState:
    """Return the state before the first token; hidden states are in float32 at least, with truncation in float64."""
    precise = torch.promote_types(dtype or torch.get_default_dtype(), _hidden_dtype(truncation is not None))
    return EMAState(
        torch.zeros(batch, channels, d_state, device=device, dtype=precise),
        None if truncation is None else torch.zeros(batch, truncation, channels, device=device, dtype=dtype),
        torch.zeros(batch, dtype=torch.long, device=device),
    )


def ema(
    x: Tensor,
    delta: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    *,
    omega: Tensor | None = None,
    activation: EMAActivation = "none",
    backend: EMABackend = "auto",
    truncation: int | None = None,
    lengths: Tensor | None = None,
    state: EMAState | None = None,
    return_state: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, EMAState | None]:
    """Compute the multi-dimensional damped exponential moving average of every channel.

    `s ← p β x + q s`, `y = Σ_n γ s / √N` with `p = σ(δ)` and `q = 1 - p σ(α)`. The names are those of MEGA's
    code: its δ weighs the input and its α damps, the other way round than in its paper.

    All backends but `fft` are strictly causal: an output has the same bits whatever later inputs are, infinity and NaN
    included, and its error is relative to what its own past adds up to (`tcnca.ops.ema.chunked` states the bound). The
    error of `fft` is relative to the largest input of the row: in float32, an input of 1e6 changes all outputs of its
    channel, earlier ones too, by about 0.1 times the sum of the kernel, and one NaN makes them all NaN.

    Args:
        x: `[batch, time, channels]`.
        delta: `[directions, channels, d_state]`. One direction is causal; with two, the second looks into the future
            and both see the present.
        alpha: of the same shape.
        beta: of the same shape.
        gamma: of the same shape.
        omega: `[channels]`, for a skip connection: the output is `y + omega · x`, with the `y` of all directions.
        activation: of that sum, `silu` or `none`.
        backend: `chunked` (matrix products over blocks of time), `recurrent` (token by token), `scan` (parallel scan),
            `fft` (convolution in the frequency domain), `triton` (a scan in fused kernels for NVIDIA GPUs: no
            truncation, no float64, first derivatives only) or `auto` (`triton` where it can run, else `chunked`). See
            `tcnca.ops.dispatch`.
        truncation: number of lags after which the kernel is cut off.
        lengths: `[batch]`, valid tokens in each row; the rest is padding, taken as zeros except in `omega · x`.
        state: what an earlier call returned; None is the start of the sequence. Causal only.
        return_state: also return the state after these tokens.
        inplace: reuse the memory of the given state, which must not be used again.

    Returns:
        `y` of `x`'s shape and dtype, and the new state or None.
    """
    call = EMACall(
        x=x,
        parameters=(delta, alpha, beta, gamma),
        omega=omega,
        activation=activation,
        truncation=truncation,
        lengths=lengths,
        state=state,
        return_state=return_state,
        inplace=inplace,
    )
    _check(call)
    context = current_context()
    if context is not None:
        y, new = _run_part(call, backend, context)
        return add_skip(y, x, omega, activation), new
    chosen = select_backend("the EMA", backend, x.device, call, CANDIDATES, PYTORCH_BACKENDS)
    if chosen == "triton" and (state is None or x.shape[1] > 1):
        return _run_triton(call)
    # Autocast would compute the kernel in half precision.
    with without_autocast(x.device):
        y, new = _run_pytorch(call, chosen)
        return add_skip(y, x, omega, activation), new


def _triton_unsupported(call: EMACall) -> str | None:
    x, d_state = call.x, call.parameters[0].shape[2]
    if not x.is_cuda and not INTERPRETED:
        return f"x: expected a CUDA tensor, got one on {x.device}"
    if call.truncation is not None:
        return f"truncation: expected None, got {call.truncation}; the fused scan never subtracts an input"
    optional = (call.omega, None if call.state is None else call.state.hidden)
    given = [part for part in optional if part is not None]
    reason = tensors_reason([x, *call.parameters, *given], call.lengths)
    if reason is not None:
        return reason
    if d_state > TRITON_MAX_STATES:
        return f"d_state: expected at most {TRITON_MAX_STATES}, got {d_state}"
    return transform_reason()


PYTORCH_BACKENDS = ("chunked", "fft", "scan", "recurrent")
CANDIDATES = (Candidate("triton", "triton", _triton_unsupported),)


def _run_triton(call: EMACall) -> tuple[Tensor, EMAState | None]:
    """Compute outputs, and the state after them or None, in one scan."""
    x, state = call.x, call.state
    start = None if state is None else state.hidden.mT
    silu = call.activation == "silu"
    y, hidden = triton_op.scan(x, *call.parameters, start, call.lengths, call.omega, silu, call.return_state)
    if hidden is None:
        return y, None
    if state is None:
        position = advance(torch.zeros(x.shape[0], dtype=torch.long, device=x.device), x.shape[1], call.lengths)
    else:
        position = advance(state.position, x.shape[1], call.lengths, call.inplace)
    return y, EMAState(hidden.mT, None, position)


def _run_part(call: EMACall, backend: EMABackend, context: ContextParallel) -> tuple[Tensor, EMAState | None]:
    """Compute the outputs of a part of a sequence from the state that the parts before it leave."""
    if call.truncation is not None:
        raise InputError(
            f"truncation: expected None in a context of several processes, got {call.truncation}; use the layer EMA, "
            "which exchanges the inputs that a truncated kernel sees"
        )
    x = zero_padding(call.x, call.lengths)
    y, new = _run_direction(call, backend, context, x, 0)
    if len(call.parameters[0]) == 2:
        y = y + _run_direction(call, backend, context, x.flip(1), 1)[0].flip(1)
    return y, context.final_state(new, call.lengths, x.shape[1]) if call.return_state else None


def _run_direction(
    call: EMACall, backend: EMABackend, context: ContextParallel, x: Tensor, direction: int
) -> tuple[Tensor, EMAState]:
    """Return the outputs of one direction, and the state after the part."""
    delta, alpha, beta, gamma = (part[direction : direction + 1] for part in call.parameters)
    lengths, time = None if direction else call.lengths, x.shape[1]
    with context.suspended():
        y, _ = ema(x, delta, alpha, beta, gamma, backend=backend, lengths=lengths)
    with without_autocast(x.device):
        drive, decay, readout = (part[0] for part in ema_coefficients(delta, alpha, beta, gamma))
        log_decay = torch.log(decay.clamp(min=torch.finfo(decay.dtype).tiny))

        def powers(steps: Tensor) -> Tensor:
            return decay_powers(decay, steps).movedim(-1, 0)

        # By blocks of time: a power for each lag of a long part would take much memory.
        end = decayed_sum(align_right(x, lengths).to(decay.dtype), log_decay) * drive
        first = None if call.state is None else call.state.hidden
        hidden = context.state_before(end, first, powers, time, lengths, bool(direction))
        rest = sum_exponentials((hidden * readout * decay).transpose(0, 1), log_decay, time).permute(1, 2, 0)
        steps = torch.full((x.shape[0],), time, device=x.device) if lengths is None else lengths
        position = steps.long() + context.rank * time + (0 if call.state is None else call.state.position)
        return y + rest.to(y.dtype), EMAState(end + powers(steps) * hidden, None, position)


def _run_pytorch(call: EMACall, backend: str) -> tuple[Tensor, EMAState | None]:
    x, parameters, state = zero_padding(call.x, call.lengths), call.parameters, call.state
    hidden = None
    if state is None:
        y = _from_start(call, x, backend)
    elif x.shape[1] == 1:
        hidden = _next_hidden(x, parameters, state)
        y = (hidden * ema_coefficients(*parameters).readout[0]).sum(-1).unsqueeze(1).to(x.dtype)
    elif state.window is None:
        y = _from_start(call, x, backend) + _rest_of_past(x, parameters, state.hidden)
    else:
        # The outputs depend on a window of inputs and on nothing older.
        past = unroll_ring(state.window, state.position)[:, 1:]
        y = _from_start(call, torch.cat([past, x], 1), backend)[:, past.shape[1] :]
    if not call.return_state:
        return y, None
    if state is None:
        batch, _, channels = x.shape
        state = initial_ema_state(batch, channels, parameters[0].shape[2], call.truncation, x.device, x.dtype)
    return y, _next_state(call, x, state, hidden)


def _from_start(call: EMACall, x: Tensor, backend: str) -> Tensor:
    """Compute the EMA of a sequence that starts here."""
    if backend == "fft":
        lags = x.shape[1] if call.truncation is None else min(call.truncation, x.shape[1])
        return fft_convolve(x, ema_kernel(*call.parameters, lags))
    run = {"chunked": ema_chunked, "recurrent": ema_recurrent, "scan": ema_scan}[backend]
    return run(x, ema_coefficients(*call.parameters), call.truncation)


def _next_hidden(x: Tensor, parameters: Parameters, state: EMAState) -> Tensor:
    """Return the hidden states after one token."""
    drive, decay, _ = (part[0] for part in ema_coefficients(*_exact(parameters, state.window)))
    hidden = drive * x[:, 0].unsqueeze(-1) + decay * state.hidden
    if state.window is None:
        return hidden
    lags = torch.full((1,), state.window.shape[1], device=x.device)
    leaving = read_ring(state.window, state.position, lags)[:, 0]
    return hidden - drive * decay_powers(decay, lags)[..., 0] * leaving.unsqueeze(-1)


def _exact(parameters: Parameters, window: Tensor | None) -> Parameters:
    """Return the parameters, in float64 for a truncated EMA (see `_hidden_dtype`)."""
    if window is None:
        return parameters
    delta, alpha, beta, gamma = (part.double() for part in parameters)
    return delta, alpha, beta, gamma


def _rest_of_past(x: Tensor, parameters: Parameters, hidden: Tensor) -> Tensor:
    """Return what the past adds to the outputs of the next tokens."""
    _, decay, readout = (part[0] for part in ema_coefficients(*parameters))
    powers = decay_powers(decay, torch.arange(1, x.shape[1] + 1, device=x.device))
    return torch.einsum("bdn,dnl->bld", hidden * readout, powers).to(x.dtype)


def _next_state(call: EMACall, x: Tensor, state: EMAState, hidden: Tensor | None) -> EMAState:
    """Return the state after the tokens `x`, whose padding is zero; `hidden` is given if it is known already."""
    time, lengths = x.shape[1], call.lengths
    window = None if state.window is None else push_ring(state.window, state.position, x, lengths, call.inplace)
    position = advance(state.position, time, lengths, call.inplace)
    if hidden is not None:
        if lengths is not None:
            hidden = torch.where((lengths > 0).view(-1, 1, 1), hidden, state.hidden)
        return EMAState(hidden, window, position)
    # All that is still remembered is in the window. Without one, the last valid tokens are moved to the end, where
    # every row's powers are the same.
    entered = align_right(x, lengths) if window is None else unroll_ring(window, position)
    drive, decay, _ = (part[0] for part in ema_coefficients(*_exact(call.parameters, window)))
    powers = decay_powers(decay, torch.arange(entered.shape[1] - 1, -1, -1, device=x.device))
    hidden = torch.einsum("bld,dnl->bdn", entered.to(powers.dtype), powers) * drive
    if window is None:
        steps = torch.full_like(position, time) if lengths is None else lengths
        hidden = hidden + decay_powers(decay, steps).permute(2, 0, 1) * state.hidden
    return EMAState(hidden, window, position)


def _check(call: EMACall) -> None:
    """Raise an error that names what is wrong with the arguments of `ema`."""
    x, truncation, delta = call.x, call.truncation, call.parameters[0]
    if truncation is not None:
        check_float64("truncation", x.device)
    check_sequence("x", x)
    directions, channels, d_state = delta.shape if delta.dim() == 3 else (0, 0, 0)
    for name, value in zip(("delta", "alpha", "beta", "gamma"), call.parameters, strict=True):
        if value.shape != delta.shape or directions not in (1, 2) or channels != x.shape[2] or d_state < 1:
            raise InputError(
                f"{name}: expected shape [directions, channels, d_state], the same for all four, with 1 or 2 "
                f"directions and {x.shape[2]} channels as in x, got {list(value.shape)}"
            )
    if call.omega is not None and call.omega.shape != x.shape[2:]:
        raise InputError(f"omega: expected [channels], {list(x.shape[2:])}, got shape {list(call.omega.shape)}")
    if call.activation not in get_args(EMAActivation):
        expected = " or ".join(repr(name) for name in get_args(EMAActivation))
        raise InputError(f"activation: expected {expected}, got {call.activation!r}")
    check_lengths(call.lengths, x.shape[0], x.shape[1])
    if truncation is not None and truncation < 1:
        raise InputError(f"truncation: expected None or 1 or more, got {truncation}")
    if directions == 2 and (call.state is not None or call.return_state):
        raise StateError("state: expected None for a bidirectional EMA, only a causal one has a state")
    if call.state is not None:
        check_state("hidden", call.state.hidden, [x.shape[0], x.shape[2], d_state])
        check_state("window", call.state.window, None if truncation is None else [x.shape[0], truncation, x.shape[2]])
