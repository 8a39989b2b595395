"""Chunked attention: queries see the keys of their own chunk `[0, C), [C, 2C), …` and no other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.ops.attention.attend import attend
from tcnca.ops.attention.checks import check_attention
from tcnca.ops.attention.choice import Backend, kernels_run
from tcnca.ops.attention.position import chunk_bias
from tcnca.ops.attention.streaming import AttentionState, begin_attention_state, continue_attention
from tcnca.ops.attention.triton.operator import fused_attention
from tcnca.ops.checks import autocasts
from tcnca.ops.padding import length_mask, zero_padding


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int | None,
    causal: bool = True,
    activation: str = "softmax",
    bias: Tensor | None = None,
    dropout: float = 0.0,
    lengths: Tensor | None = None,
    state: AttentionState | None = None,
    return_state: bool = False,
    inplace: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, AttentionState | None]:
    """Attention of one head inside chunks that do not overlap.

    Args:
        q, k: `[batch, time, width]`.
        v: `[batch, time, d_value]`.
        chunk: tokens in a chunk, or None for full attention.
        causal: whether a query sees only keys that are not later than itself.
        activation: `softmax`, `relu2` or `laplace` (see `attend`).
        bias: `[2 · reach - 1]` by key minus query (see `tcnca.ops.attention.position`), reach at least the chunk.
        dropout: probability of dropping an attention weight, less than 1.
        lengths: `[batch]`, real tokens in each row; padding is seen by nobody.
        state: what an earlier call returned; None is the start of the sequence. Causal only.
        return_state: also return the state after these tokens.
        inplace: the given state's memory may be reused; do not use that state again.
        backend: "plain" is PyTorch's own operators, "triton" kernels for NVIDIA GPUs that keep no matrix of weights
            in memory, or an error where they cannot run; "auto" takes the kernels where they can and pay, unless the
            environment has TCNCA_KERNELS=plain. They draw other numbers for dropout.

    Returns:
        `[batch, time, d_value]`, arbitrary in the padding, and the new state or None.
    """
    check_attention(q, k, v, chunk_size, causal, activation, bias, lengths, state, return_state, dropout)
    kernels = kernels_run(backend, q, k, v, bias, lengths, state)
    if kernels:
        out = _by_kernels(q, k, v, chunk_size, causal, activation, bias, dropout, lengths)
        if not return_state:
            return out, None
    # Weights of zero do not stop a NaN in the padding.
    q, k, v = (zero_padding(part, lengths) for part in (q, k, v))
    if state is not None:
        out, new = continue_attention(q, k, v, chunk_size, activation, bias, dropout, lengths, state, inplace)
        return out, new if return_state else None
    if not kernels:
        size = q.shape[1] if chunk_size is None else min(chunk_size, q.shape[1])
        out = _by_chunks(q, k, v, size, causal, activation, bias, dropout, lengths)
    if not return_state:
        return out, None
    # One type for both: under autocast values may be narrower than queries and keys.
    return out, begin_attention_state(k.to(q.dtype), v.to(q.dtype), chunk_size, lengths)


def _by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int | None,
    causal: bool,
    activation: str,
    bias: Tensor | None,
    dropout: float,
    lengths: Tensor | None,
) -> Tensor:
    if autocasts(q.device):
        q, k, v = (part.to(torch.get_autocast_dtype(q.device.type)) for part in (q, k, v))
    return fused_attention(
        q, k, v, bias, lengths, chunk=chunk_size, causal=causal, function=activation, dropout=dropout
    )


def _by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: int,
    causal: bool,
    activation: str,
    bias: Tensor | None,
    dropout: float,
    lengths: Tensor | None,
) -> Tensor:
    """Whole sequences from their start, padded at the right to a multiple of the chunk and cropped again."""
    time = q.shape[1]
    chunks = (time + size - 1) // size
    missing = chunks * size - time
    # A program that is exported for any length must not ask whether one is a multiple of the chunk.
    any_length = isinstance(time, torch.SymInt)
    if any_length or missing:
        q, k, v = (F.pad(part, (0, 0, 0, missing)) for part in (q, k, v))
        if lengths is None:
            lengths = torch.full((q.shape[0],), time, device=q.device)
    place = torch.arange(size, device=q.device)
    mask = place <= place.unsqueeze(1) if causal else None
    if lengths is not None:
        real = length_mask(lengths, chunks * size).unflatten(1, (chunks, size)).unsqueeze(2)
        mask = real if mask is None else real & mask
    q, k, v = (part.unflatten(1, (chunks, size)) for part in (q, k, v))
    biases = None if bias is None else chunk_bias(bias, size)
    out = attend(q, k, v, activation=activation, bias=biases, mask=mask, dropout=dropout).flatten(1, 2)
    return out.index_select(1, torch.arange(time, device=out.device)) if any_length else out[:, :time]
