"""The kernels of state-space models as PyTorch operators: `tcnca::ssm`, `tcnca::diagonal_scan` and their gradients.

Complex numbers are pairs of real ones, in a last dimension of size 2. The kernels, and Triton with them, are imported
by the first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcnca.ops.dispatch import INTERPRETED
from tcnca.ops.driver import on_device
from tcnca.ops.library import register
from tcnca.ops.padding import kernel_lengths


def fused_ssm(x: Tensor, log_decay: Tensor, weight: Tensor, initial: Tensor | None, lengths: Tensor | None) -> Tensor:
    """Return the outputs of `tcnca.ops.ssm`, with first derivatives; the caller has checked that the kernels can run.

    Args:
        x: `[batch, time, channels]`.
        log_decay, weight: `[directions, channels, d_state]`, complex.
        initial: the hidden states before the first token, `[batch, channels, d_state, 2]`, or None.
        lengths: `[batch]` or None.
    """
    y: Tensor = _SSM(x, _as_pairs(log_decay), _as_pairs(weight), initial, lengths)
    return y


def fused_scan(v: Tensor, log_decay: Tensor, initial: Tensor | None, lengths: Tensor | None, reverse: bool) -> Tensor:
    """Return the hidden states of `tcnca.ops.diagonal_scan`, likewise.

    Args:
        v: `[batch, time, states]`, complex.
        log_decay: `[states]`, complex.
        initial: the hidden states before the first token, `[batch, states, 2]`, or None.
        lengths: `[batch]` or None.
        reverse: run from the last token to the first.
    """
    return torch.view_as_complex(_SCAN(_as_pairs(v), _as_pairs(log_decay), initial, lengths, reverse))


def _as_pairs(value: Tensor) -> Tensor:
    return torch.view_as_real(value.resolve_conj())


def _aligned(value: Tensor | None) -> Tensor | None:
    from tcnca.ops.launcher import aligned

    return None if value is None else aligned(value)


@on_device
def _run_ssm(
    stream: int, x: Tensor, log_decay: Tensor, weight: Tensor, initial: Tensor | None, lengths: Tensor | None
) -> Tensor:
    from tcnca.ops.ssm.triton_launch import run_ssm

    return run_ssm(stream, x, log_decay, weight, _aligned(initial), kernel_lengths(lengths))


@on_device
def _run_ssm_backward(stream: int, g: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    from tcnca.ops.ssm.triton_launch import run_ssm_backward

    log_decay, weight, initial, lengths = rest
    found = run_ssm_backward(stream, g, x, log_decay, weight, _aligned(initial), kernel_lengths(lengths))
    return *found[:3], _or_empty(found[3], x)


@on_device
def _run_scan(
    stream: int, v: Tensor, log_decay: Tensor, initial: Tensor | None, lengths: Tensor | None, reverse: bool
) -> Tensor:
    from tcnca.ops.ssm.triton_launch import run_scan

    if v.numel() == 0:
        return torch.empty_like(v, memory_format=torch.contiguous_format)
    return run_scan(stream, v, log_decay, _aligned(initial), kernel_lengths(lengths), reverse)[0]


@on_device
def _run_scan_backward(
    stream: int,
    g: Tensor,
    h: Tensor,
    log_decay: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Run the same in the other direction of time, with conjugate decays."""
    from tcnca.ops.ssm.triton_launch import run_scan

    if h.numel() == 0:
        return tuple(map(torch.zeros_like, _fake_scan_backward(g, h, log_decay, initial)))
    conjugate = torch.view_as_complex(log_decay.double().contiguous()).conj_physical()
    to_v, total, found = run_scan(
        stream, g, torch.view_as_real(conjugate), None, kernel_lengths(lengths), not reverse, h
    )
    decay = torch.exp(conjugate)
    sums = torch.view_as_complex(found.sum((0, 1), dtype=torch.float64).mT.contiguous())
    if initial is None:
        return to_v, _as_pairs(decay * sums).to(log_decay.dtype), _or_empty(None, h)
    first = torch.view_as_complex(total.double())
    sums = sums + (first * torch.view_as_complex(initial.double().contiguous()).conj()).sum(0)
    return to_v, _as_pairs(decay * sums).to(log_decay.dtype), _as_pairs(decay * first).to(initial.dtype)


def _or_empty(value: Tensor | None, like: Tensor) -> Tensor:
    """Replace None, which an operator cannot return, by an empty tensor."""
    return like.new_empty(0, dtype=torch.float32) if value is None else value


def _fake(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_ssm_backward(g: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    log_decay, weight, initial, *_ = rest
    return _fake(x), _fake(log_decay), _fake(weight), _or_empty(None if initial is None else _fake(initial), x)


def _fake_scan_backward(g: Tensor, h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    log_decay, initial, *_ = rest
    return _fake(h), _fake(log_decay), _or_empty(None if initial is None else _fake(initial), h)


def _save_ssm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _ssm_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes them
    found = _SSM_BACKWARD(g, *saved)
    return *found[:3], None if saved[3] is None else found[3], None


def _save_scan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, *inputs[1:4])
    ctx.reverse = inputs[4]


def _scan_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    found = _SCAN_BACKWARD(g, *saved, ctx.reverse)
    return *found[:2], None if saved[2] is None else found[2], None, None


# Triton's interpreter runs the same kernels on the CPU, for tests.
_DEVICE = "CPU" if INTERPRETED else "CUDA"
_STATE = "Tensor? initial, Tensor? lengths"
_SSM_BACKWARD = register(
    f"ssm_backward(Tensor g, Tensor x, Tensor log_decay, Tensor weight, {_STATE})"
    " -> (Tensor to_x, Tensor to_log_decay, Tensor to_weight, Tensor to_initial)",
    _run_ssm_backward,
    _fake_ssm_backward,
    _DEVICE,
    "chunked",
)
_SSM = register(
    f"ssm(Tensor x, Tensor log_decay, Tensor weight, {_STATE}) -> Tensor",
    _run_ssm,
    _fake,
    _DEVICE,
    _ssm_gradients,
    _save_ssm,
)
_SCAN_BACKWARD = register(
    f"diagonal_scan_backward(Tensor g, Tensor h, Tensor log_decay, {_STATE}, bool reverse)"
    " -> (Tensor to_v, Tensor to_log_decay, Tensor to_initial)",
    _run_scan_backward,
    _fake_scan_backward,
    _DEVICE,
    "scan",
)
_SCAN = register(
    f"diagonal_scan(Tensor v, Tensor log_decay, {_STATE}, bool reverse) -> Tensor",
    _run_scan,
    _fake,
    _DEVICE,
    _scan_gradients,
    _save_scan,
)
