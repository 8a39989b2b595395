"""Diagonal state-space models with state in and out: the public functions, their state, and the choice of a backend."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from tcnca.errors import InputError, StateError
from tcnca.ops.checks import check_float64, check_lengths, check_sequence, check_state, without_autocast
from tcnca.ops.context import ContextParallel, current_context
from tcnca.ops.dispatch import INTERPRETED, Candidate, select_backend, tensors_reason, transform_reason
from tcnca.ops.ema.chunked import convolve_exponentials
from tcnca.ops.long_conv import fft_convolve
from tcnca.ops.padding import advance, align_right, take_time, zero_padding
from tcnca.ops.ssm.naive import EXACT, decayed_sum, scan_recurrent, ssm_kernel, ssm_recurrent, sum_exponentials
from tcnca.ops.ssm.triton_op import fused_scan, fused_ssm
from tcnca.ops.state import State

SSMBackend = Literal["auto", "chunked", "fft", "recurrent", "triton"]
ScanBackend = Literal["auto", "scan", "recurrent", "triton"]
TRITON_MAX_STATES = 64


@dataclasses.dataclass(frozen=True)
class SSMState(State):
    """What a causal state-space model remembers.

    Attributes:
        hidden: `[batch, channels, d_state, 2]` of `ssm`, `[batch, states, 2]` of `diagonal_scan`: the real and
            imaginary parts of the hidden states.
        position: `[batch]`, tokens seen so far.
    """

    hidden: Tensor
    position: Tensor

    def _least_dtype(self, field: str) -> torch.dtype | None:
        # They sum over a whole past.
        return torch.float32 if field == "hidden" else None


@dataclasses.dataclass(frozen=True)
class SSMCall:
    """The arguments of one call of `ssm`, or of `diagonal_scan`, which has no weight."""

    x: Tensor
    log_decay: Tensor
    weight: Tensor | None
    lengths: Tensor | None
    state: SSMState | None
    return_state: bool
    inplace: bool


def _scan_unsupported(call: SSMCall) -> str | None:
    if not call.x.is_cuda and not INTERPRETED:
        return f"{'v' if call.weight is None else 'x'}: expected a CUDA tensor, got one on {call.x.device}"
    parts = [part.real for part in (call.x, call.log_decay, call.weight) if part is not None]
    hidden = () if call.state is None else (call.state.hidden,)
    return tensors_reason([*parts, *hidden], call.lengths) or transform_reason()


def _ssm_unsupported(call: SSMCall) -> str | None:
    d_state = call.log_decay.shape[2]
    if d_state > TRITON_MAX_STATES:
        return f"d_state: expected at most {TRITON_MAX_STATES}, got {d_state}"
    return _scan_unsupported(call)


SSM_BACKENDS = ("chunked", "fft", "recurrent")
SSM_CANDIDATES = (Candidate("triton", "triton", _ssm_unsupported),)
SCAN_BACKENDS = ("scan", "recurrent")
SCAN_CANDIDATES = (Candidate("triton", "triton", _scan_unsupported),)


def initial_ssm_state(
    batch: int, *sizes: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> SSMState:
    """Return the state before the first token, in float32 at least.

    `sizes` are those of the hidden states: channels and d_state for `ssm`, states for `diagonal_scan`.
    """
    precise = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
    hidden = torch.zeros(batch, *sizes, 2, device=device, dtype=precise)
    return SSMState(hidden, torch.zeros(batch, dtype=torch.long, device=device))


def ssm(
    x: Tensor,
    log_decay: Tensor,
    weight: Tensor,
    *,
    backend: SSMBackend = "auto",
    lengths: Tensor | None = None,
    state: SSMState | None = None,
    return_state: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, SSMState | None]:
    """Convolve every channel with a sum of complex exponentials, the kernel of a diagonal state-space model.

    `h ← exp(log_decay) h + x`, `y = Re Σ_n weight h`: the kernel is `Re Σ_n weight exp(lag · log_decay)`.

    `chunked` and `recurrent` are strictly causal: an output has the same bits whatever later inputs are, infinity and
    NaN included; `triton` for finite inputs. The error of `fft` is relative to the largest input of the row.

    Args:
        x: `[batch, time, channels]`, real.
        log_decay: `[directions, channels, d_state]`, complex, with negative real parts. One direction is causal; with
            two, the second looks into the future and both see the present.
        weight: of the same shape, complex.
        backend: `chunked` (matrix products over blocks of time), `fft` (convolution in the frequency domain),
            `recurrent` (token by token), `triton` (fused matrix products for NVIDIA GPUs: no float64, up to 64 states,
            first derivatives only) or `auto` (`triton` where it can run, else `chunked`).
        lengths: `[batch]`, valid tokens in each row; the rest is padding, taken as zeros.
        state: what an earlier call returned; None is the start of the sequence. Causal only.
        return_state: also return the state after these tokens.
        inplace: reuse the memory of the given state, which must not be used again.

    Returns:
        `y` of `x`'s shape and dtype, and the new state or None.
    """
    call = SSMCall(x, log_decay, weight, lengths, state, return_state, inplace)
    _check_ssm(call)
    context = current_context()
    if context is not None:
        return _ssm_part(call, backend, context)
    chosen = select_backend("the state-space model", backend, x.device, call, SSM_CANDIDATES, SSM_BACKENDS)
    # Autocast would compute products in half precision.
    with without_autocast(x.device):
        precise = torch.promote_types(log_decay.dtype, x.dtype)
        log_decay, weight = log_decay.to(precise), weight.to(precise)
        rows = zero_padding(x, lengths).to(log_decay.real.dtype)
        if state is not None and x.shape[1] == 1:
            hidden = _decayed(_complex(state.hidden), log_decay[0]) + rows[:, 0].unsqueeze(-1)
            y = (weight[0] * hidden).sum(-1).real.unsqueeze(1)
            if lengths is not None:
                hidden = torch.where((lengths > 0).view(-1, 1, 1), hidden, _complex(state.hidden))
            return y.to(x.dtype), _next_state(call, hidden) if return_state else None
        if chosen == "triton":
            y = fused_ssm(x, log_decay, weight, None if state is None else state.hidden, lengths)
        elif chosen == "fft":
            y = fft_convolve(rows, ssm_kernel(log_decay, weight, x.shape[1]))
        else:
            y = {"chunked": convolve_exponentials, "recurrent": ssm_recurrent}[chosen](rows, log_decay, weight)
        if state is not None and chosen != "triton":
            y = y + _rest_of_past(state, log_decay[0], weight[0], x.shape[1])
        return y.to(x.dtype), _next_state(call, _last_hidden(call, rows, log_decay[0])) if return_state else None


def diagonal_scan(
    v: Tensor,
    log_decay: Tensor,
    *,
    backend: ScanBackend = "auto",
    reverse: bool = False,
    lengths: Tensor | None = None,
    state: SSMState | None = None,
    return_state: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, SSMState | None]:
    """Return the hidden states `h[t] = exp(log_decay) h[t - 1] + v[t]` at all times.

    All backends are strictly causal, as those of `ssm`.

    Args:
        v: `[batch, time, states]`, complex.
        log_decay: `[states]`, complex. The real parts should be negative.
        backend: `scan` (block by block, in parallel), `recurrent` (token by token), `triton` (fused kernels for NVIDIA
            GPUs: no complex128, first derivatives only) or `auto` (`triton` where it can run, else `scan`).
        reverse: run from the last token to the first, `h[t] = exp(log_decay) h[t + 1] + v[t]`. There is no state then.
        lengths: `[batch]`, valid tokens in each row; the rest is padding, taken as zeros.
        state: what an earlier call returned; None is the start of the sequence.
        return_state: also return the state after these tokens.
        inplace: reuse the memory of the given state, which must not be used again.

    Returns:
        `h` of `v`'s shape, and the new state or None.
    """
    call = SSMCall(v, log_decay, None, lengths, state, return_state, inplace)
    _check_scan(call, reverse)
    context = current_context()
    if context is not None:
        return _scan_part(call, backend, context, reverse)
    chosen = select_backend("the diagonal scan", backend, v.device, call, SCAN_CANDIDATES, SCAN_BACKENDS)
    with without_autocast(v.device):
        past = None if state is None else _complex(state.hidden)
        if chosen == "triton" and v.shape[1] > 1:
            h = fused_scan(v, log_decay, None if state is None else state.hidden, lengths, reverse)
        else:
            h = _scan_pytorch(zero_padding(v, lengths), log_decay, past, chosen, reverse)
        if not return_state:
            return h, None
        if lengths is None:
            hidden = h[:, -1].clone()  # a view would keep all of `h` in memory
        else:
            hidden = take_time(h, (lengths.long() - 1).clamp(min=0).unsqueeze(1))[:, 0]
            before = torch.zeros_like(hidden) if past is None else past
            hidden = torch.where((lengths > 0).unsqueeze(1), hidden, before)
        return h, _next_state(call, hidden)


def _ssm_part(call: SSMCall, backend: SSMBackend, context: ContextParallel) -> tuple[Tensor, SSMState | None]:
    """Compute `ssm` of a part of a sequence from the state that the parts before it leave."""
    assert call.weight is not None
    precise = torch.promote_types(call.log_decay.dtype, call.x.dtype)
    log_decay, weight, time = call.log_decay.to(precise), call.weight.to(precise), call.x.shape[1]

    def direction(index: int, x: Tensor, lengths: Tensor | None) -> tuple[Tensor, SSMState | None]:
        kernel = log_decay[index : index + 1], weight[index : index + 1]
        with without_autocast(x.device):
            end = decayed_sum(align_right(x, lengths).to(log_decay.real.dtype), log_decay[index])
        before = _state_before(call, context, end, log_decay[index], lengths, reverse=index == 1)
        with context.suspended():
            return ssm(x, *kernel, backend=backend, lengths=lengths, state=before, return_state=call.return_state)

    rows = zero_padding(call.x, call.lengths)
    y, new = direction(0, rows, call.lengths)
    if len(log_decay) == 2:
        y = y + direction(1, rows.flip(1), None)[0].flip(1)
    return y, None if new is None else context.final_state(new, call.lengths, time)


def _scan_part(
    call: SSMCall, backend: ScanBackend, context: ContextParallel, reverse: bool
) -> tuple[Tensor, SSMState | None]:
    """Compute `diagonal_scan` of a part of a sequence from the state that the parts before it leave."""
    v, log_decay, lengths = zero_padding(call.x, call.lengths), call.log_decay, None if reverse else call.lengths
    v = v.flip(1) if reverse else v
    end = decayed_sum(align_right(v, lengths), log_decay.unsqueeze(1))[..., 0]
    before = _state_before(call, context, end, log_decay, lengths, reverse)
    with context.suspended():
        h, new = diagonal_scan(
            v, log_decay, backend=backend, lengths=lengths, state=before, return_state=call.return_state
        )
    h = h.flip(1) if reverse else h
    return h, None if new is None else context.final_state(new, lengths, v.shape[1])


def _state_before(
    call: SSMCall, context: ContextParallel, end: Tensor, log_decay: Tensor, lengths: Tensor | None, reverse: bool
) -> SSMState:
    """Return the state before a part of a sequence, given the hidden states after the part alone."""
    exact, time, state = log_decay.to(EXACT), call.x.shape[1], call.state

    def powers(steps: Tensor) -> Tensor:
        return torch.exp(exact * steps.view(-1, *[1] * exact.dim())).to(end.dtype)

    first = None if state is None else _complex(state.hidden)
    hidden = context.state_before(end, first, powers, time, lengths, reverse)
    start = torch.zeros(len(end), dtype=torch.long, device=end.device) if state is None else state.position
    return SSMState(torch.view_as_real(hidden.resolve_conj()), start + context.rank * time)


def _scan_pytorch(v: Tensor, log_decay: Tensor, past: Tensor | None, backend: str, reverse: bool) -> Tensor:
    """Return the hidden states of `v`, whose padding is zero, after the hidden states `past`."""
    if past is not None:
        first = v[:, :1] + _decayed(past, log_decay).unsqueeze(1)
        v = first if v.shape[1] == 1 else torch.cat([first, v[:, 1:]], 1)
    if v.shape[1] == 1:
        return v.clone()
    v = v.flip(1) if reverse else v
    if backend == "recurrent":
        h = scan_recurrent(v, log_decay)
    else:
        log_decay = log_decay.view(1, -1, 1)
        h = convolve_exponentials(v, log_decay, torch.ones_like(log_decay))
    return h.flip(1) if reverse else h


def _decayed(hidden: Tensor, log_decay: Tensor) -> Tensor:
    """Return hidden states one token later. A decay near 1 is not rounded, as all later tokens would see that."""
    return (torch.exp(log_decay.to(EXACT)) * hidden).to(hidden.dtype)


def _complex(hidden: Tensor) -> Tensor:
    return torch.view_as_complex(hidden.contiguous())


def _next_state(call: SSMCall, hidden: Tensor) -> SSMState:
    x, state = call.x, call.state
    before = torch.zeros(x.shape[0], dtype=torch.long, device=x.device) if state is None else state.position
    position = advance(before, x.shape[1], call.lengths, call.inplace)
    return SSMState(torch.view_as_real(hidden.resolve_conj()), position)


def _rest_of_past(state: SSMState, log_decay: Tensor, weight: Tensor, time: int) -> Tensor:
    """Return what the past adds to the outputs of the next `time` tokens, `[batch, time, channels]`."""
    hidden = _complex(state.hidden) * weight * torch.exp(log_decay)
    return sum_exponentials(hidden.transpose(0, 1), log_decay, time).permute(1, 2, 0)


def _last_hidden(call: SSMCall, x: Tensor, log_decay: Tensor) -> Tensor:
    """Return the hidden states after the tokens `x` (`[batch, time, channels]`), whose padding is zero."""
    hidden = decayed_sum(align_right(x, call.lengths), log_decay)
    if call.state is None:
        return hidden
    steps = torch.full_like(call.state.position, x.shape[1]) if call.lengths is None else call.lengths
    decay = torch.exp(log_decay.to(EXACT) * steps.view(-1, 1, 1)).to(hidden.dtype)
    return hidden + decay * _complex(call.state.hidden)


def _check_ssm(call: SSMCall) -> None:
    """Raise an error that names what is wrong with the arguments of `ssm`."""
    x, log_decay, weight = call.x, call.log_decay, call.weight
    assert weight is not None
    check_sequence("x", x)
    if not x.is_floating_point():
        raise InputError(f"x: expected real numbers, got {x.dtype}")
    for name, value in (("log_decay", log_decay), ("weight", weight)):
        _check_complex(name, value)
        directions, channels, d_state = value.shape if value.dim() == 3 else (0, 0, 0)
        if value.shape != log_decay.shape or directions not in (1, 2) or channels != x.shape[2] or d_state < 1:
            raise InputError(
                f"{name}: expected shape [directions, channels, d_state], the same for log_decay and weight, with 1 or "
                f"2 directions and {x.shape[2]} channels as in x, got {list(value.shape)}"
            )
    _check_common(call, list(log_decay.shape[1:]), log_decay.shape[0] == 2)


def _check_scan(call: SSMCall, reverse: bool) -> None:
    """Raise an error that names what is wrong with the arguments of `diagonal_scan`."""
    check_sequence("v", call.x, "states")
    for name, value in (("v", call.x), ("log_decay", call.log_decay)):
        _check_complex(name, value)
    if call.log_decay.shape != call.x.shape[2:]:
        raise InputError(f"log_decay: expected shape {list(call.x.shape[2:])}, got {list(call.log_decay.shape)}")
    if call.log_decay.dtype != call.x.dtype:
        raise InputError(f"log_decay: expected {call.x.dtype} like v, got {call.log_decay.dtype}; convert one of them")
    _check_common(call, list(call.log_decay.shape), reverse)


def _check_complex(name: str, value: Tensor) -> None:
    if value.dtype not in (torch.complex64, torch.complex128):
        raise InputError(f"{name}: expected complex64 or complex128, got {value.dtype}; use torch.complex")


def _check_common(call: SSMCall, sizes: list[int], future: bool) -> None:
    check_float64("state-space model", call.x.device)
    check_lengths(call.lengths, call.x.shape[0], call.x.shape[1])
    if future and (call.state is not None or call.return_state):
        raise StateError("state: expected None if the future is seen, only causal calls have a state")
    if call.state is not None:
        check_state("hidden", call.state.hidden, [call.x.shape[0], *sizes, 2])
