"""Chunked attention: the public function, its checks, and the choice of a backend."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from tcnca.errors import InputError, StateError
from tcnca.ops.attention.memory import memory_attention
from tcnca.ops.attention.naive import (
    ATTENTION_ACTIVATIONS,
    AttentionCall,
    AttentionState,
    continue_attention,
    first_state,
    naive_attention,
    outputs_of_queries,
    queries_in_slots,
    required_slots,
    split_heads,
)
from tcnca.ops.attention.triton_op import fused_attention
from tcnca.ops.checks import autocasts, check_lengths, check_sequence, check_state, check_values
from tcnca.ops.dispatch import Candidate, select_backend, tensors_reason, transform_reason
from tcnca.ops.padding import advance, zero_padding

AttentionBackend = Literal["auto", "naive", "sdpa", "triton"]
TRITON_MIN_CONTINUED = 64  # tokens; fewer are read faster without the queries in the slots of their chunk
TRITON_MAX_KEY = 128  # d_key; a block of queries or keys stays in shared memory


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk_size: int | None,
    num_heads: int = 1,
    memory: bool = False,
    rope_width: int = 0,
    causal: bool = True,
    activation: str = "softmax",
    bias: Tensor | None = None,
    dropout: float = 0.0,
    lengths: Tensor | None = None,
    state: AttentionState | None = None,
    return_state: bool = False,
    inplace: bool = False,
    backend: AttentionBackend = "auto",
) -> tuple[Tensor, AttentionState | None]:
    """Compute attention inside chunks that do not overlap.

    Args:
        q: queries, `[batch, time, d_key]`.
        k: keys, `[batch, time, d_key]`.
        v: values, `[batch, time, d_value]`.
        chunk_size: tokens in a chunk, or None for full attention.
        num_heads: heads, each of which has an equal part of the features of `q`, `k` and `v`, in order.
        memory: whether a chunk also sees the keys and values of the chunk before it, into which no gradient flows, as
            in Transformer-XL. Causal only, without bias.
        rope_width: with `memory`, features of each head of `q` and `k` that are rotated by their positions. Without it,
            rotate them before: with it, a key has two positions.
        causal: whether a query sees only keys that are not later than itself.
        activation: `softmax`, `relu2` or `laplace` (see `attend`).
        bias: `[2 · max_length - 1]` by key minus query, with `max_length` at least the chunk size. One head only.
        dropout: probability of dropping an attention weight, less than 1.
        lengths: `[batch]`, valid tokens in each row; no query sees the padding.
        state: what an earlier call returned; None is the start of the sequence. Causal only.
        return_state: also return the state after these tokens.
        inplace: reuse the memory of the given state, which must not be used again.
        backend: `naive` (PyTorch's own operators), `sdpa` (PyTorch's `scaled_dot_product_attention`, for the softmax
            without bias; a few tokens after a state run as `naive`), `triton` (kernels for NVIDIA GPUs), or `auto`:
            `sdpa` with several heads or memory, else `triton`, where these can run and are faster, else `naive`. Both
            keep no matrix of weights in memory, and draw other random numbers for dropout. See `tcnca.ops.dispatch`.

    Returns:
        `[batch, time, d_value]`, arbitrary in the padding, and the new state or None.
    """
    call = AttentionCall(
        q=q,
        k=k,
        v=v,
        chunk_size=chunk_size,
        causal=causal,
        activation=activation,
        bias=bias,
        dropout=dropout,
        lengths=lengths,
        state=state,
        return_state=return_state,
        inplace=inplace,
        num_heads=num_heads,
        memory=memory,
        rope_width=rope_width,
    )
    return run_attention(call, backend)


def run_attention(call: AttentionCall, backend: AttentionBackend = "auto") -> tuple[Tensor, AttentionState | None]:
    """Check a call of `chunked_attention`, and run it."""
    _check(call)
    selected = select_backend("attention", backend, call.q.device, call, CANDIDATES, ("naive",))
    if selected == "triton":
        return _run_triton(call)
    call = dataclasses.replace(call, fused=selected == "sdpa")
    if call.memory:
        assert call.chunk_size is not None
        return memory_attention(call, call.chunk_size)
    return naive_attention(call)


def _sdpa_unsupported(call: AttentionCall) -> str | None:
    if call.activation != "softmax":
        return f"activation: expected 'softmax', got {call.activation!r}"
    if call.bias is not None:
        return "bias: expected None, got a tensor"
    return _dtype_reason(call) or transform_reason()


def _sdpa_should_use(call: AttentionCall) -> bool:
    if call.num_heads == 1 and not call.memory:
        return False
    # With dropout, or values of another width, PyTorch has no fused kernel for CPUs.
    return call.q.device.type != "cpu" or (call.dropout == 0.0 and call.q.shape[2] == call.v.shape[2])


def _dtype_reason(call: AttentionCall) -> str | None:
    q, k, v = call.q, call.k, call.v
    if not autocasts(q.device) and not q.dtype == k.dtype == v.dtype:
        return f"dtype: expected one for q, k and v, except under autocast, got {q.dtype}, {k.dtype} and {v.dtype}"
    return None


def _triton_unsupported(call: AttentionCall) -> str | None:
    q, k, v = call.q, call.k, call.v
    if q.device.type not in ("cuda", "cpu"):
        return f"q: expected a CUDA tensor, got one on {q.device}"
    if call.memory:
        return "memory: expected False, got True"
    if call.state is not None and call.chunk_size is None:
        return "chunk_size: expected chunks when continuing from a state, got None"
    reason = tensors_reason([q, k, v], call.bias, call.lengths) or _dtype_reason(call)
    if reason is not None:
        return reason
    if q.shape[2] > TRITON_MAX_KEY * call.num_heads:
        return f"d_key: expected at most {TRITON_MAX_KEY} for each head, got {q.shape[2] // call.num_heads}"
    return transform_reason()


def _triton_should_use(call: AttentionCall) -> bool:
    # In float32 the kernels are right but slow: they multiply without tensor cores.
    if not call.q.is_cuda or (call.q.dtype == torch.float32 and not autocasts(call.q.device)):
        return False
    return call.state is None or call.q.shape[1] >= TRITON_MIN_CONTINUED


CANDIDATES = (
    Candidate("sdpa", None, _sdpa_unsupported, _sdpa_should_use),
    Candidate("triton", "triton", _triton_unsupported, _triton_should_use),
)


def _run_triton(call: AttentionCall) -> tuple[Tensor, AttentionState | None]:
    if call.state is None:
        out = _attend_from_start(call, call.q, call.k, call.v, call.lengths)
        if not call.return_state:
            return out, None
    q, k, v = (zero_padding(part, call.lengths) for part in (call.q, call.k, call.v))
    if call.state is None:
        return out, first_state(call, q, k, v)
    out, new = continue_attention(call, call.state, q, k, v, _attend_in_slots)
    return out, new if call.return_state else None


def _attend_from_start(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
    if autocasts(q.device):
        q, k, v = (part.to(torch.get_autocast_dtype(q.device.type)) for part in (q, k, v))
    heads, settings = call.num_heads, (call.chunk_size, call.causal, call.activation, call.dropout)
    if heads == 1:
        return fused_attention(q, k, v, call.bias, lengths, *settings)
    # Each head is a row.
    q, k, v = (split_heads(part, heads).transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    lengths = None if lengths is None else lengths.repeat_interleave(heads)
    out = fused_attention(q, k, v, None, lengths, *settings)
    return out.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)


def _attend_in_slots(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, fill: Tensor, end: Tensor) -> Tensor:
    """Attend from the start of the unfinished chunk, and drop the outputs of the tokens that were read before."""
    time, slots = q.shape[1], k.shape[1]
    q = queries_in_slots(q, fill, slots).to(k.dtype)
    return outputs_of_queries(_attend_from_start(call, q, k, v, end), fill, time)


def required_max_length(
    time: int,
    chunk_size: int | None,
    lengths: Tensor | None,
    state: AttentionState | None,
    return_state: bool,
    max_length: int | None = None,
) -> int:
    """Return the number of tokens that a position bias has to cover for a call with `time` tokens.

    `max_length` is the number that a given bias covers; slots beyond it are counted exactly.
    """
    if chunk_size is not None:
        return chunk_size if state is not None or return_state else min(chunk_size, time)
    if state is None:
        return time
    return required_slots(state.keys.shape[1], advance(state.position, time, lengths), time, lengths, max_length)


def _check(call: AttentionCall) -> None:
    """Raise an error that names what is wrong with the arguments of `chunked_attention`."""
    q, k, v, bias, chunk_size = call.q, call.k, call.v, call.bias, call.chunk_size
    check_sequence("q", q, "d_key")
    if k.shape != q.shape:
        raise InputError(f"k: expected the shape of q, {list(q.shape)}, got {list(k.shape)}")
    if v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        raise InputError(f"v: expected shape [{q.shape[0]}, {q.shape[1]}, d_value], got {list(v.shape)}")
    heads, widths = call.num_heads, (q.shape[2], v.shape[2])
    if heads < 1 or any(width % heads for width in widths):
        raise InputError(
            f"num_heads: expected a divisor of d_key and d_value, {widths[0]} and {widths[1]}, got {heads}"
        )
    if heads > 1 and bias is not None:
        raise InputError(f"bias: expected None for several heads, got a tensor for {heads} heads; use rotate")
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk_size: expected 1 or more, or None for full attention, got {chunk_size}")
    if call.memory and (chunk_size is None or not call.causal or bias is not None):
        got = "no chunks" if chunk_size is None else "bidirectional attention" if not call.causal else "a bias"
        raise InputError(f"memory: expected False with {got}, got True")
    if not 0 <= call.rope_width <= (q.shape[2] // heads if call.memory else 0) or call.rope_width % 2:
        raise InputError(
            f"rope_width: expected an even number of the features of a head with memory, 0 without (use rotate), got "
            f"{call.rope_width}"
        )
    if call.activation not in ATTENTION_ACTIVATIONS:
        raise InputError(f"activation: expected one of {', '.join(ATTENTION_ACTIVATIONS)}, got {call.activation!r}")
    if not 0.0 <= call.dropout < 1.0:
        raise InputError(f"dropout: expected a number from 0 up to, not including, 1, got {call.dropout}")
    check_lengths(call.lengths, q.shape[0], q.shape[1])
    if (call.state is not None or call.return_state) and not call.causal:
        raise StateError("state: expected None for bidirectional attention, only causal attention has a state")
    if call.state is not None:
        _check_state(call, call.state)
    if bias is not None:
        covered = (bias.numel() + 1) // 2
        needed = required_max_length(q.shape[1], chunk_size, call.lengths, call.state, call.return_state, covered)
        if bias.dim() != 1 or bias.numel() % 2 == 0 or covered < needed:
            raise InputError(
                f"bias: expected shape [2 · max_length - 1] with a max_length of at least {needed}, the "
                f"{'chunk size' if chunk_size is not None else 'number of tokens'}, got {list(bias.shape)}"
            )


def _check_state(call: AttentionCall, state: AttentionState) -> None:
    batch, _, d_key = call.q.shape
    slots = state.keys.shape[1] if call.chunk_size is None else call.chunk_size * (2 if call.memory else 1)
    check_state("keys", state.keys, [batch, slots, d_key])
    check_state("values", state.values, [batch, slots, call.v.shape[2]])
    if call.chunk_size is None:
        check_values(
            state.position <= slots,
            f"state.position: expected at most {slots} tokens, as the state of full attention has slots",
            state.position,
            StateError,
        )
