"""Chunked attention as an operator of PyTorch: `tcnca::chunked_attention` and its gradient.

The kernels, and Triton with them, are imported by the first call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.kernels import ADVICE, INTERPRETED

_LIBRARY = torch.library.Library("tcnca", "FRAGMENT")
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? lengths, Tensor? seed"
_SETTINGS = "SymInt chunk, bool causal, str function, float dropout"
_LIBRARY.define(f"chunked_attention({_INPUTS}, {_SETTINGS}) -> (Tensor out, Tensor normalizer)")
_LIBRARY.define(
    f"chunked_attention_backward(Tensor dy, Tensor out, Tensor normalizer, {_INPUTS}, {_SETTINGS}, bool to_bias)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)"
)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    chunk: int | None,
    causal: bool,
    function: str,
    dropout: float = 0.0,
) -> Tensor:
    """`tcnca.ops.chunked_attention` of whole sequences, for one type of queries, keys and values.

    Whatever the padding holds counts as zeros, and comes out as zeros.
    """
    seed = None
    if dropout > 0.0:
        seed = torch.randint(2**62, (1,), device=q.device)
    # A number even for none, so that a compiler may leave it open.
    size = 0 if chunk is None else chunk
    out, _ = torch.ops.tcnca.chunked_attention.default(q, k, v, bias, lengths, seed, size, causal, function, dropout)
    return out


def _forward(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    from tcnca.ops.attention.triton import launch

    return launch.forward(q, *rest)


def _backward(dy: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from tcnca.ops.attention.triton import launch

    dq, dk, dv, dbias = launch.backward(dy, *rest)
    bias, to_bias = rest[5], rest[-1]
    return dq, dk, dv, dbias.to(bias.dtype) if to_bias else dbias


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    kept = q.shape[:2] if settings[5] == "softmax" else (0,)
    return v.new_empty(v.shape), q.new_empty(kept, dtype=torch.float32)


def _fake_backward(
    dy: Tensor, out: Tensor, normalizer: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    to_bias = settings[-1]
    dbias = bias.new_empty(bias.shape) if bias is not None and to_bias else q.new_empty(0, dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, chunk, causal, function, dropout = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.settings = (chunk, causal, function, dropout)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 10
    to_bias = ctx.needs_input_grad[3]
    dq, dk, dv, dbias = torch.ops.tcnca.chunked_attention_backward.default(
        dy, *ctx.saved_tensors, *ctx.settings, to_bias
    )
    return dq, dk, dv, dbias if to_bias else None, *(None,) * 6


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    return


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise KernelError(f"gradients of attention's gradients: the kernels have none; take backend='plain', or {ADVICE}")


# Triton's interpreter runs the same on a CPU, for tests.
_KEY = "CPU" if INTERPRETED else "CUDA"
_LIBRARY.impl("chunked_attention", _forward, _KEY)
_LIBRARY.impl("chunked_attention_backward", _backward, _KEY)
torch.library.register_fake("tcnca::chunked_attention", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("tcnca::chunked_attention_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("tcnca::chunked_attention", _gradients, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("tcnca::chunked_attention_backward", _refuse, setup_context=_save_nothing, lib=_LIBRARY)
