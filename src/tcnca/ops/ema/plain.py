"""Multi-dimensional damped EMA, with state in and out: in plain PyTorch, or by the fused scan."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from tcnca.errors import InputError, KernelError, StateError
from tcnca.ops.checks import autocasts, check_lengths
from tcnca.ops.ema.forms import ema_fft, ema_scan, ema_steps
from tcnca.ops.ema.kernel import decay_powers, ema_coefficients, ema_kernel
from tcnca.ops.ema.scan import fused_scan, why_not_here, why_not_such, worth_it
from tcnca.ops.padding import advance, take_time, zero_padding
from tcnca.ops.ring import push_ring, read_ring, unroll_ring
from tcnca.ops.state import State

EMABackend = Literal["fft", "recurrent", "scan", "fused", "auto"]
EMA_BACKENDS: tuple[str, ...] = get_args(EMABackend)

Parameters = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class EMAState(State):
    """What a causal EMA remembers.

    hidden: `[batch, channels, hidden]`.
    window: `[batch, truncation, channels]`, a ring of the last inputs, for a truncated kernel only: there each
        input has to be taken out again after so many steps. None otherwise.
    position: `[batch]`, tokens seen so far.
    """

    _sums: ClassVar[frozenset[str]] = frozenset({"hidden"})

    hidden: Tensor
    window: Tensor | None
    position: Tensor


def initial_ema_state(
    batch: int,
    channels: int,
    hidden: int,
    truncation: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> EMAState:
    """The state before the first token.

    Hidden states are kept in float32 at least, as they sum over a whole past, and those of a truncated EMA in float64.
    """
    least = torch.float32 if truncation is None else torch.float64
    precise = torch.promote_types(dtype or torch.get_default_dtype(), least)
    return EMAState(
        torch.zeros(batch, channels, hidden, device=device, dtype=precise),
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
    backend: EMABackend = "auto",
    truncation: int | None = None,
    kernel: Tensor | None = None,
    lengths: Tensor | None = None,
    state: EMAState | None = None,
    return_state: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, EMAState | None]:
    """Multi-dimensional damped exponential moving average of every channel.

    `s ← p β x + q s`, `y = Σ_n γ s / √N` with `p = σ(δ)` and `q = 1 - p σ(α)`. The names are those of MEGA's
    code: its δ weighs the input and its α damps, the other way round than in its paper.

    Args:
        x: `[batch, time, channels]`.
        delta, alpha, beta, gamma: `[directions, channels, hidden]`. One direction is causal; with two, the second
            looks into the future and both see the present.
        backend: `fft` (a convolution in the frequency domain), `recurrent` (token by token), `scan` (parallel scan),
            `fused` (a scan by kernels for NVIDIA GPUs, or an error where they cannot run: no truncation, no float64,
            first derivatives only) or `auto` (`fused` where it can run and no `kernel` is given, unless the
            environment has TCNCA_KERNELS=plain; else `fft`).
        truncation: number of lags after which the kernel is cut off.
        kernel: what `ema_kernel` gives for these parameters with at least `time` lags (or `truncation`, if less):
            spares `fft` the making of it.
        lengths: `[batch]`, real tokens in each row; the rest is padding, taken as zeros.
        state: what an earlier call returned; None is the start of the sequence. Causal only.
        return_state: also return the state after these tokens.
        inplace: the given state's memory may be reused; do not use that state again.

    Returns:
        `y` of `x`'s shape, and the new state or None.
    """
    check_ema(x, delta, alpha, beta, gamma, backend, truncation, kernel, lengths, state, return_state)
    parameters = (delta, alpha, beta, gamma)
    if backend in ("fused", "auto"):
        backend = _resolved(backend, x, parameters, truncation, kernel, lengths, state)
    if backend == "fused" and (state is None or x.shape[1] > 1):
        return _fused(x, parameters, lengths, state, return_state, inplace)
    x = zero_padding(x, lengths)
    # Autocast would make the kernel in half precision.
    with torch.autocast(x.device.type, enabled=False) if autocasts(x.device) else contextlib.nullcontext():
        hidden = None
        if state is None:
            y = _whole(x, parameters, backend, truncation, kernel)
        elif x.shape[1] == 1:
            hidden = _step(x, parameters, state)
            y = _read_out(hidden, parameters).to(x.dtype)
        elif state.window is None:
            y = _whole(x, parameters, backend, None, kernel) + _left_over(x, parameters, state.hidden)
        else:
            # The outputs depend on a window of inputs and on nothing older.
            past = unroll_ring(state.window, state.position)[:, 1:]
            y = _whole(torch.cat([past, x], 1), parameters, backend, truncation, kernel)[:, past.shape[1] :]
        if not return_state:
            return y, None
        if state is None:
            batch, _, channels = x.shape
            state = initial_ema_state(batch, channels, delta.shape[2], truncation, x.device, x.dtype)
        return y, _advanced(x, parameters, lengths, state, hidden, inplace)


def _resolved(
    backend: EMABackend,
    x: Tensor,
    parameters: Parameters,
    truncation: int | None,
    kernel: Tensor | None,
    lengths: Tensor | None,
    state: EMAState | None,
) -> EMABackend:
    """`auto` decided, and an error where `fused` cannot run."""
    hidden = None if state is None else state.hidden
    if backend == "fused":
        reason = why_not_such(x, parameters, hidden, lengths, truncation) or why_not_here(x)
        if reason is not None:
            raise KernelError(f"backend: got 'fused', which cannot run this; {reason}. Take 'auto' or 'fft'")
        return backend
    # Whoever makes a kernel beforehand may also want its gradients.
    if kernel is None and worth_it(x) and why_not_such(x, parameters, hidden, lengths, truncation) is None:
        return "fused"
    return "fft"


def _fused(
    x: Tensor,
    parameters: Parameters,
    lengths: Tensor | None,
    state: EMAState | None,
    return_state: bool,
    inplace: bool,
) -> tuple[Tensor, EMAState | None]:
    """Outputs and the state after them, or None, from one scan."""
    start = None if state is None else state.hidden
    y, hidden = fused_scan(x, parameters, start, lengths, return_state)
    if hidden is None:
        return y, None
    if state is None:
        position = advance(torch.zeros(x.shape[0], dtype=torch.long, device=x.device), x.shape[1], lengths)
    else:
        position = advance(state.position, x.shape[1], lengths, inplace)
    return y, EMAState(hidden, None, position)


def _whole(
    x: Tensor, parameters: Parameters, backend: EMABackend, truncation: int | None, kernel: Tensor | None
) -> Tensor:
    """The EMA of a sequence that starts here."""
    if backend == "fft":
        lags = x.shape[1] if truncation is None else min(truncation, x.shape[1])
        kernel = ema_kernel(*parameters, lags) if kernel is None else kernel[..., :lags]
        return ema_fft(x, kernel)
    run = ema_steps if backend == "recurrent" else ema_scan
    return run(x, ema_coefficients(*parameters), truncation)


def _step(x: Tensor, parameters: Parameters, state: EMAState) -> Tensor:
    """The hidden states after one token."""
    drive, decay, _ = (part[0] for part in ema_coefficients(*_exact(parameters, state.window)))
    hidden = drive * x[:, 0].unsqueeze(-1) + decay * state.hidden
    if state.window is None:
        return hidden
    lags = torch.full((1,), state.window.shape[1], device=x.device)
    leaving = read_ring(state.window, state.position, lags)[:, 0]
    return hidden - drive * decay_powers(decay, lags)[..., 0] * leaving.unsqueeze(-1)


def _exact(parameters: Parameters, window: Tensor | None) -> Parameters:
    """The parameters in float64 for a truncated EMA.

    What an input leaves behind when it is taken out again would stay for ever where the decay is near 1: the hidden
    states of a truncated EMA are kept and computed in float64.
    """
    if window is None:
        return parameters
    delta, alpha, beta, gamma = (part.double() for part in parameters)
    return delta, alpha, beta, gamma


def _read_out(hidden: Tensor, parameters: Parameters) -> Tensor:
    """The output of one token, `[batch, 1, channels]`, from the hidden states after it."""
    return (hidden * ema_coefficients(*parameters).readout[0]).sum(-1).unsqueeze(1)


def _left_over(x: Tensor, parameters: Parameters, hidden: Tensor) -> Tensor:
    """What is left of the past in the outputs of the next tokens."""
    _, decay, readout = (part[0] for part in ema_coefficients(*parameters))
    powers = decay_powers(decay, torch.arange(1, x.shape[1] + 1, device=x.device))
    return torch.einsum("bdn,dnl->bld", hidden * readout, powers).to(x.dtype)


def _advanced(
    x: Tensor,
    parameters: Parameters,
    lengths: Tensor | None,
    state: EMAState,
    hidden: Tensor | None,
    inplace: bool,
) -> EMAState:
    """The state after the tokens `x`, with zeros in their padding; `hidden` if it is known already."""
    time = x.shape[1]
    window = None if state.window is None else push_ring(state.window, state.position, x, lengths, inplace)
    position = advance(state.position, time, lengths, inplace)
    if hidden is None:
        steps: Tensor | None = torch.full_like(position, time) if lengths is None else lengths
        entered = x
        if window is not None:
            # Whatever is still to be remembered stands in the window.
            entered, steps = unroll_ring(window, position), None
        elif lengths is not None:
            # Move each row's last real token to the end, where every row's powers are the same.
            source = torch.arange(time, device=x.device) - (time - lengths).unsqueeze(1)
            entered = take_time(x, source.clamp(min=0)).masked_fill((source < 0).unsqueeze(-1), 0.0)
        drive, decay, _ = (part[0] for part in ema_coefficients(*_exact(parameters, window)))
        powers = decay_powers(decay, torch.arange(entered.shape[1] - 1, -1, -1, device=x.device))
        hidden = torch.einsum("bld,dnl->bdn", entered.to(powers.dtype), powers) * drive
        if steps is not None:
            hidden = hidden + decay_powers(decay, steps).permute(2, 0, 1) * state.hidden
    elif lengths is not None:
        hidden = torch.where((lengths > 0).view(-1, 1, 1), hidden, state.hidden)
    return EMAState(hidden, window, position)


def check_ema(
    x: Tensor,
    delta: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    backend: str,
    truncation: int | None,
    kernel: Tensor | None,
    lengths: Tensor | None,
    state: EMAState | None,
    return_state: bool,
) -> None:
    """Raise an error that names what is wrong with the arguments of `ema`."""
    if x.dim() != 3 or x.shape[1] < 1:
        raise InputError(f"x: got shape {list(x.shape)}, allowed is [batch, time, channels] with 1 or more tokens")
    directions, channels, hidden = delta.shape if delta.dim() == 3 else (0, 0, 0)
    for name, value in {"delta": delta, "alpha": alpha, "beta": beta, "gamma": gamma}.items():
        if value.shape != delta.shape or directions not in (1, 2) or channels != x.shape[2] or hidden < 1:
            raise InputError(
                f"{name}: got shape {list(value.shape)}, allowed is [directions, channels, hidden], the same for all "
                f"four parameters, with 1 or 2 directions and {x.shape[2]} channels as x has"
            )
    check_lengths(lengths, x.shape[0], x.shape[1])
    if backend not in EMA_BACKENDS:
        raise InputError(f"backend: got {backend!r}, allowed are {', '.join(EMA_BACKENDS)}")
    if truncation is not None and truncation < 1:
        raise InputError(f"truncation: got {truncation}, allowed is 1 or more, or None")
    lags = x.shape[1]
    if truncation is not None:
        lags = truncation if state is not None or return_state else min(truncation, lags)
    if kernel is not None and (kernel.dim() != 3 or kernel.shape[:2] != delta.shape[:2] or kernel.shape[2] < lags):
        raise InputError(
            f"kernel: got shape {list(kernel.shape)}, allowed is [{directions}, {channels}, lags], lags {lags} or more"
        )
    if (state is not None or return_state) and directions == 2:
        raise StateError("state: asked of a bidirectional EMA, allowed is None; only causal ones stream")
    if state is not None:
        _check_state(x, hidden, truncation, state)


def _check_state(x: Tensor, hidden: int, truncation: int | None, state: EMAState) -> None:
    window = None if truncation is None else [x.shape[0], truncation, x.shape[2]]
    held = None if state.window is None else list(state.window.shape)
    for name, got, expected in (
        ("hidden", list(state.hidden.shape), [x.shape[0], x.shape[2], hidden]),
        ("window", held, window),
    ):
        if got != expected:
            raise StateError(f"state.{name}: got shape {got}, allowed is {expected}")
