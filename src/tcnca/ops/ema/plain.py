"""Multi-dimensional damped EMA in plain PyTorch, with state in and out."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import Tensor

from tcnca.errors import InputError, StateError
from tcnca.ops.checks import check_lengths
from tcnca.ops.ema.forms import ema_fft, ema_scan, ema_steps
from tcnca.ops.ema.kernel import decay_powers, ema_coefficients, ema_kernel
from tcnca.ops.padding import advance, take_time, zero_padding
from tcnca.ops.ring import push_ring, read_ring, unroll_ring
from tcnca.ops.state import State

Method = Literal["fft", "steps", "scan"]
METHODS: tuple[str, ...] = get_args(Method)

Parameters = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class EMAState(State):
    """What a causal EMA remembers.

    hidden: `[batch, channels, hidden]`, or None if the kernel is truncated.
    window: `[batch, truncation - 1, channels]`, a ring of the last inputs, for a truncated kernel only: there
        each input has to be forgotten after so many steps.
    position: `[batch]`, tokens seen so far.
    """

    hidden: Tensor | None
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
    """The state before the first token. Hidden states are kept in float32 at least: they sum over a whole past."""
    position = torch.zeros(batch, dtype=torch.long, device=device)
    if truncation is None:
        precise = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        return EMAState(torch.zeros(batch, channels, hidden, device=device, dtype=precise), None, position)
    return EMAState(None, torch.zeros(batch, truncation - 1, channels, device=device, dtype=dtype), position)


def ema(
    x: Tensor,
    delta: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    *,
    method: Method = "fft",
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
        method: `fft` (a convolution in the frequency domain), `steps` (token by token) or `scan` (parallel scan).
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
    check_ema(x, delta, alpha, beta, gamma, method, truncation, kernel, lengths, state, return_state)
    if torch.is_autocast_enabled(x.device.type):
        # Autocast would make the kernel in half precision.
        with torch.autocast(x.device.type, enabled=False):
            return ema(
                x,
                delta,
                alpha,
                beta,
                gamma,
                method=method,
                truncation=truncation,
                kernel=kernel,
                lengths=lengths,
                state=state,
                return_state=return_state,
                inplace=inplace,
            )
    parameters = (delta, alpha, beta, gamma)
    x = zero_padding(x, lengths)
    if return_state and state is None:
        state = initial_ema_state(x.shape[0], x.shape[2], delta.shape[2], truncation, x.device, x.dtype)
    if state is None:
        return _whole(x, parameters, method, truncation, kernel), None
    if state.window is not None:
        y = _windowed(x, parameters, method, state.window, state.position, kernel)
        window = push_ring(state.window, state.position, x, lengths, inplace) if return_state else state.window
        new = EMAState(None, window, advance(state.position, x.shape[1], lengths, inplace)) if return_state else None
        return y, new
    y, hidden = _recurrent(x, parameters, method, kernel, lengths, state)
    return y, EMAState(hidden, None, advance(state.position, x.shape[1], lengths, inplace)) if return_state else None


def _whole(x: Tensor, parameters: Parameters, method: Method, truncation: int | None, kernel: Tensor | None) -> Tensor:
    """The EMA of a sequence that starts here."""
    if method == "fft":
        lags = x.shape[1] if truncation is None else min(truncation, x.shape[1])
        kernel = ema_kernel(*parameters, lags) if kernel is None else kernel[..., :lags]
        return ema_fft(x, kernel)
    run = ema_steps if method == "steps" else ema_scan
    return run(x, ema_coefficients(*parameters), truncation)


def _recurrent(
    x: Tensor,
    parameters: Parameters,
    method: Method,
    kernel: Tensor | None,
    lengths: Tensor | None,
    state: EMAState,
) -> tuple[Tensor, Tensor]:
    """Continue from hidden states: what these inputs give by themselves, plus what is left of the past."""
    time = x.shape[1]
    drive, decay, readout = (part[0] for part in ema_coefficients(*parameters))
    hidden = state.hidden
    assert hidden is not None
    if time == 1:
        new = drive * x[:, 0].unsqueeze(-1) + decay * hidden
        y = (new * readout).sum(-1).unsqueeze(1).to(x.dtype)
        return y, new if lengths is None else torch.where((lengths > 0).view(-1, 1, 1), new, hidden)
    powers = decay_powers(decay, torch.arange(time + 1, device=x.device))
    left = torch.einsum("bdn,dnl->bld", hidden * readout, powers[..., 1:])
    y = _whole(x, parameters, method, None, kernel) + left.to(x.dtype)
    if lengths is None:
        entered, remaining = x, powers[..., -1]
    else:
        # Move each row's last real token to the end, where every row's powers are the same.
        source = torch.arange(time, device=x.device) - (time - lengths).unsqueeze(1)
        entered = take_time(x, source.clamp(min=0)).masked_fill((source < 0).unsqueeze(-1), 0.0)
        remaining = decay_powers(decay, lengths).permute(2, 0, 1)
    fresh = torch.einsum("bld,dnl->bdn", entered.to(powers.dtype), powers[..., :-1].flip(-1)) * drive
    return y, fresh + remaining * hidden


def _windowed(
    x: Tensor,
    parameters: Parameters,
    method: Method,
    window: Tensor,
    position: Tensor,
    kernel: Tensor | None,
) -> Tensor:
    """Continue a truncated EMA, whose outputs depend on the inputs of a window and nothing older."""
    lags = window.shape[1] + 1
    if x.shape[1] > 1:
        past = unroll_ring(window, position)
        y = _whole(torch.cat([past, x], 1), parameters, method, lags, kernel)
        return y[:, lags - 1 :]
    kernel = ema_kernel(*parameters, lags) if kernel is None else kernel[..., :lags]
    y = x * kernel[0, :, 0]
    if lags > 1:
        past = read_ring(window, position, torch.arange(1, lags, device=x.device))
        y = y + torch.einsum("bld,dl->bd", past.to(kernel.dtype), kernel[0, :, 1:]).unsqueeze(1)
    return y.to(x.dtype)


def check_ema(
    x: Tensor,
    delta: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    method: str,
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
    if method not in METHODS:
        raise InputError(f"method: got {method!r}, allowed are {', '.join(METHODS)}")
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
    name, held, expected = "hidden", state.hidden, [x.shape[0], x.shape[2], hidden]
    if truncation is not None:
        name, held, expected = "window", state.window, [x.shape[0], truncation - 1, x.shape[2]]
    if held is None or list(held.shape) != expected:
        got = None if held is None else list(held.shape)
        raise StateError(f"state.{name}: got shape {got}, allowed is {expected}")
