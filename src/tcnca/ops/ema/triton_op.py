"""The fused scan of an EMA as PyTorch operators: `tcnca::ema_scan` and its gradient.

The kernels, and Triton with them, are imported by the first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.checks import is_traced
from tcnca.ops.dispatch import INTERPRETED
from tcnca.ops.driver import on_device
from tcnca.ops.library import register
from tcnca.ops.padding import kernel_lengths


def scan(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None]:
    """Scan with first derivatives; the caller has checked that the kernels can run.

    Args:
        x: `[batch, time, channels]`, with any strides.
        rest: δ, α, β and γ, each `[directions, channels, hidden]`; the initial hidden states or None; the lengths or
            None; ω, `[channels]`, or None; whether a SiLU follows; whether to return the final hidden states. Hidden
            states are `[batch, hidden, channels]`.

    Returns:
        `y` of `x`'s shape, and the final hidden states, in float32, or None.
    """
    return_final = rest[-1]
    keep = torch.is_grad_enabled() and any(isinstance(part, Tensor) and part.requires_grad for part in (x, *rest))
    if is_traced(x):
        y, final, *_ = _FORWARD(x, *rest, keep)
        return y, final if return_final else None
    # The registered operator does the same, but its call takes longer than its kernels.
    if keep:
        found: tuple[Tensor, Tensor | None] = _Scan.apply(x, *rest)
        return found
    return _forward(x, *rest, False)[:2]


def _buffers(
    x: Tensor, delta: Tensor, silu: bool, return_final: bool, keep: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Allocate outputs, final hidden states or None, coefficients, and slopes of the SiLU or None."""
    directions, channels, hidden = delta.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    final = x.new_empty((x.shape[0], hidden, channels), dtype=torch.float32) if return_final else None
    coefficients = x.new_empty((directions, 3, hidden, channels), dtype=torch.float32)
    return y, final, coefficients, torch.empty_like(y) if silu and keep else None


@on_device
def _forward(stream: int, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Return outputs, final hidden states or None, coefficients, slopes or None, and what segments start from."""
    from tcnca.ops.ema.triton_launch import run_forward
    from tcnca.ops.launcher import aligned

    *parameters, initial, lengths, omega, silu, _, _ = rest
    buffers = _buffers(x, parameters[0], *rest[-3:])
    initial, omega = (None if part is None else aligned(part) for part in (initial, omega))
    packed = tuple([aligned(part) for part in parameters])
    return *buffers, run_forward(stream, x, packed, initial, kernel_lengths(lengths), omega, silu, *buffers)


@on_device
def _backward(
    stream: int,
    g: Tensor,
    to_final: Tensor | None,
    x: Tensor,
    coefficients: Tensor,
    slopes: Tensor | None,
    *rest: Any,
) -> tuple[Tensor | None, ...]:
    """Return gradients of all that has one, in the order of the arguments; None for what is not given.

    `rest` is δ, α, β, γ, initial hidden states, lengths and ω, and may end with what segments start from.
    """
    from tcnca.ops.ema.triton_launch import run_backward
    from tcnca.ops.launcher import aligned

    initial, lengths, omega, carries = (*rest[4:], None)[:4]
    to_x, to_parameters, to_initial, to_omega = run_backward(
        stream,
        g,
        None if to_final is None else aligned(to_final),
        x,
        aligned(coefficients),
        None if slopes is None else slopes.contiguous(),
        tuple([aligned(part) for part in rest[:4]]),
        None if initial is None else aligned(initial),
        kernel_lengths(lengths),
        None if omega is None else aligned(omega),
        carries,
    )
    return to_x, *to_parameters, to_initial, to_omega


class _Scan(torch.autograd.Function):
    """What `register_autograd` below does, with less work for each call, and keeping what segments start from."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        y, final, coefficients, slopes, carries = _forward(*inputs, True)
        ctx.save_for_backward(inputs[0], coefficients, slopes, *inputs[1:8], carries)
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        g, to_final = gradients
        x, *others = ctx.saved_tensors
        g = torch.zeros_like(x) if g is None else g
        if torch.is_grad_enabled():
            # A second derivative gets the registered operator's error instead of zeros.
            return _ordered(_BACKWARD(g, to_final, x, *others[:-1]), *others[2:-1])
        return _ordered(_backward(g, to_final, x, *others), *others[2:-1])


def _ordered(found: tuple[Tensor | None, ...], *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients in the order of the arguments of `scan`; None for those that are not given."""
    *_, initial, _, omega = inputs
    to_initial, to_omega = None if initial is None else found[5], None if omega is None else found[6]
    return *found[:5], to_initial, None, to_omega, None, None


def _or_empty(x: Tensor, found: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Replace None, which an operator cannot return, by an empty tensor."""
    return tuple([x.new_empty(0, dtype=torch.float32) if part is None else part for part in found])


def _run_forward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _or_empty(x, _forward(x, *rest)[:4])


def _run_backward(g: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _or_empty(g, _backward(g, *rest))


def _fake_forward(x: Tensor, delta: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _or_empty(x, _buffers(x, delta, *rest[-3:]))


def _fake_backward(g: Tensor, to_final: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _, _, *parameters, initial, _, omega = rest
    found = [
        None if part is None else torch.empty_like(part, memory_format=torch.contiguous_format)
        for part in (x, *parameters, initial, omega)
    ]
    return _or_empty(x, tuple(found))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    silu, ctx.return_final, keep = inputs[8:]
    ctx.complete = keep or not silu
    ctx.save_for_backward(inputs[0], output[2], output[3] if silu else None, *inputs[1:8])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, to_final: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if not ctx.complete:
        raise KernelError("ema_scan: expected keep=True where gradients are required, got keep=False")
    x, *others = ctx.saved_tensors
    g = torch.zeros_like(x) if g is None else g
    found = _BACKWARD(g, to_final if ctx.return_final else None, x, *others)
    return *_ordered(found, *others[2:]), None


# Triton's interpreter runs the same kernels on the CPU, for tests.
_DEVICE = "CPU" if INTERPRETED else "CUDA"
_PARAMETERS = "Tensor delta, Tensor alpha, Tensor beta, Tensor gamma, Tensor? initial, Tensor? lengths, Tensor? omega"
_BACKWARD = register(
    f"ema_scan_backward(Tensor g, Tensor? to_final, Tensor x, Tensor coefficients, Tensor? slopes, {_PARAMETERS})"
    " -> (Tensor to_x, Tensor to_delta, Tensor to_alpha, Tensor to_beta, Tensor to_gamma, Tensor to_initial,"
    " Tensor to_omega)",
    _run_backward,
    _fake_backward,
    _DEVICE,
    "chunked",
)
_FORWARD = register(
    f"ema_scan(Tensor x, {_PARAMETERS}, bool silu, bool return_final, bool keep)"
    " -> (Tensor y, Tensor final, Tensor coefficients, Tensor slopes)",
    _run_forward,
    _fake_forward,
    _DEVICE,
    _gradients,
    _save,
)
