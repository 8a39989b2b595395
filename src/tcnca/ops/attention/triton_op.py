"""Chunked attention by kernels as PyTorch operators: `tcnca::chunked_attention` and its gradient.

The kernels, and Triton with them, are imported by the first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcnca.ops.dispatch import INTERPRETED
from tcnca.ops.driver import on_device
from tcnca.ops.library import register


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    chunk_size: int | None,
    causal: bool,
    activation: str,
    dropout: float,
) -> Tensor:
    """Attend in sequences from their start; queries, keys and values have one dtype.

    Padding is read as zeros, and its outputs are zeros.
    """
    seed = torch.randint(2**62, (1,), device=q.device) if dropout > 0.0 else None
    # 0 is full attention: a number in any case, so that a compiler may leave it open.
    settings = (0 if chunk_size is None else chunk_size, causal, activation, dropout)
    return _FORWARD(q, k, v, bias, lengths, seed, *settings)[0]


@on_device
def _forward(stream: int, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from tcnca.ops.attention.triton_launch import run_forward

    return run_forward(stream, q, *rest)


@on_device
def _backward(stream: int, dy: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from tcnca.ops.attention.triton_launch import run_backward

    dq, dk, dv, dbias = run_backward(stream, dy, *rest)
    bias, to_bias = rest[5], rest[-1]
    return dq, dk, dv, dbias.to(bias.dtype) if to_bias else dbias


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    activation = rest[5]
    normalizer = q.new_empty(q.shape[:2] if activation == "softmax" else (0,), dtype=torch.float32)
    return v.new_empty(v.shape), normalizer


def _fake_backward(
    dy: Tensor, out: Tensor, normalizer: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    to_bias = rest[-1]
    dbias = bias.new_empty(bias.shape) if bias is not None and to_bias else q.new_empty(0, dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.settings = inputs[6:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 10
    to_bias = ctx.needs_input_grad[3]
    dq, dk, dv, dbias = _BACKWARD(dy, *ctx.saved_tensors, *ctx.settings, to_bias)
    return dq, dk, dv, dbias if to_bias else None, *(None,) * 6


# Triton's interpreter runs the same kernels on the CPU, for tests.
_DEVICE = "CPU" if INTERPRETED else "CUDA"
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? lengths, Tensor? seed, "
    "SymInt chunk_size, bool causal, str activation, float dropout"
)
_BACKWARD = register(
    f"chunked_attention_backward(Tensor dy, Tensor out, Tensor normalizer, {_INPUTS}, bool to_bias)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    _backward,
    _fake_backward,
    _DEVICE,
    "naive",
)
_FORWARD = register(
    f"chunked_attention({_INPUTS}) -> (Tensor out, Tensor normalizer)",
    _forward,
    _fake_forward,
    _DEVICE,
    _gradients,
    _save,
)
