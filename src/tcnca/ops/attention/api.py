"""Chunked attention of one head: the public function, its checks, and the choice of a backend."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tcnca.errors import InputError, StateError
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
)
from tcnca.ops.attention.triton_op import fused_attention
from tcnca.ops.checks import autocasts, check_lengths, check_sequence, check_state, check_values
from tcnca.ops.dispatch import Candidate, select_backend, tensors_reason, transform_reason
from tcnca.ops.padding import advance, zero_padding

AttentionBackend = Literal["auto", "naive", "triton"]
TRITON_MIN_CONTINUED = 64  # tokens; fewer are read faster without the queries in the slots of their chunk
TRITON_MAX_KEY = 128  # d_key; a block of queries or keys stays in shared memory


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
    backend: AttentionBackend = "auto",
) -> tuple[Tensor, AttentionState | None]:
    """Compute attention of one head inside chunks that do not overlap.

    Args:
        q, k: `[batch, time, d_key]`.
        v: `[batch, time, d_value]`.
        chunk_size: tokens in a chunk, or None for full attention.
        causal: whether a query sees only keys that are not later than itself.
        activation: `softmax`, `relu2` or `laplace` (see `attend`).
        bias: `[2 · max_length - 1]` by key minus query, with `max_length` at least the chunk size.
        dropout: probability of dropping an attention weight, less than 1.
        lengths: `[batch]`, valid tokens in each row; no query sees the padding.
        state: what an earlier call returned; None is the start of the sequence. Causal only.
        return_state: also return the state after these tokens.
        inplace: reuse the memory of the given state, which must not be used again.
        backend: `naive` (PyTorch's own operators), `triton` (kernels for NVIDIA GPUs that keep no matrix of weights in
            memory; they draw other random numbers for dropout), or `auto` (`triton` where it can run and is faster,
            else `naive`). See `tcnca.ops.dispatch`.

    Returns:
        `[batch, time, d_value]`, arbitrary in the padding, and the new state or None.
    """
    call = AttentionCall(q, k, v, chunk_size, causal, activation, bias, dropout, lengths, state, return_state, inplace)
    _check(call)
    if select_backend("attention", backend, q.device, call, CANDIDATES, ("naive",)) == "naive":
        return naive_attention(call)
    return _run_triton(call)


def _triton_unsupported(call: AttentionCall) -> str | None:
    q, k, v = call.q, call.k, call.v
    if q.device.type not in ("cuda", "cpu"):
        return f"q: expected a CUDA tensor, got one on {q.device}"
    if call.state is not None and call.chunk_size is None:
        return "chunk_size: expected chunks when continuing from a state, got None"
    reason = tensors_reason([q, k, v], call.bias, call.lengths)
    if reason is not None:
        return reason
    if not autocasts(q.device) and not q.dtype == k.dtype == v.dtype:
        return f"dtype: expected one for q, k and v, except under autocast, got {q.dtype}, {k.dtype} and {v.dtype}"
    if q.shape[2] > TRITON_MAX_KEY:
        return f"d_key: expected at most {TRITON_MAX_KEY}, got {q.shape[2]}"
    return transform_reason()


def _triton_should_use(call: AttentionCall) -> bool:
    if call.state is not None and call.q.shape[1] < TRITON_MIN_CONTINUED:
        return False
    # In float32 the kernels are right but slow: they multiply without tensor cores.
    return call.q.is_cuda and (autocasts(call.q.device) or call.q.dtype != torch.float32)


CANDIDATES = (Candidate("triton", "triton", _triton_unsupported, _triton_should_use),)


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
    return fused_attention(q, k, v, call.bias, lengths, call.chunk_size, call.causal, call.activation, call.dropout)


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
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk_size: expected 1 or more, or None for full attention, got {chunk_size}")
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
    slots = state.keys.shape[1] if call.chunk_size is None else call.chunk_size
    check_state("keys", state.keys, [batch, slots, d_key])
    check_state("values", state.values, [batch, slots, call.v.shape[2]])
    if call.chunk_size is None:
        check_values(
            state.position <= slots,
            f"state.position: expected at most {slots} tokens, as the state of full attention has slots",
            state.position,
            StateError,
        )
