"""What can be wrong with a call of chunked attention."""

from __future__ import annotations

from torch import Tensor

from tcnca.errors import InputError, StateError
from tcnca.ops.attention.attend import ATTENTION_ACTIVATIONS
from tcnca.ops.attention.streaming import AttentionState, full_slots
from tcnca.ops.checks import check_lengths, check_values
from tcnca.ops.padding import advance


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk_size: int | None,
    causal: bool,
    function: str,
    bias: Tensor | None,
    lengths: Tensor | None,
    state: AttentionState | None,
    return_state: bool,
    dropout: float,
) -> None:
    """Raise an error that names what is wrong with the arguments of `chunked_attention`."""
    if q.dim() != 3 or q.shape[1] < 1:
        raise InputError(f"q: got shape {list(q.shape)}, allowed is [batch, time, width] with 1 or more tokens")
    if k.shape != q.shape:
        raise InputError(f"k: got shape {list(k.shape)}, allowed is that of q, {list(q.shape)}")
    if v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        raise InputError(f"v: got shape {list(v.shape)}, allowed is [{q.shape[0]}, {q.shape[1]}, d_value]")
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk: got {chunk_size}, allowed is 1 or more, or None for full attention")
    if function not in ATTENTION_ACTIVATIONS:
        raise InputError(f"function: got {function!r}, allowed are {', '.join(ATTENTION_ACTIVATIONS)}")
    if not 0.0 <= dropout < 1.0:
        raise InputError(f"dropout: got {dropout}, allowed is a number from 0 up to, not including, 1")
    check_lengths(lengths, q.shape[0], q.shape[1])
    if state is not None or return_state:
        if not causal:
            raise StateError("state: asked of bidirectional attention, allowed is None; only causal attention streams")
        if state is not None:
            _check_state(q, v, chunk_size, state)
    if bias is not None:
        reach = (bias.numel() + 1) // 2
        needed = needed_reach(q.shape[1], chunk_size, lengths, state, return_state, reach)
        if bias.dim() != 1 or bias.numel() % 2 == 0 or reach < needed:
            raise InputError(
                f"bias: got shape {list(bias.shape)}, allowed is [2 · reach - 1] with a reach of at least {needed}, "
                f"the {'chunk' if chunk_size is not None else 'number of tokens'}"
            )


def needed_reach(
    time: int,
    chunk_size: int | None,
    lengths: Tensor | None,
    state: AttentionState | None,
    return_state: bool,
    reach: int | None = None,
) -> int:
    """How far a position bias has to reach for a call of chunked attention with `time` tokens.

    `reach` is how far a given one does; slots beyond it are counted exactly.
    """
    if chunk_size is not None:
        return chunk_size if state is not None or return_state else min(chunk_size, time)
    if state is None:
        return time
    return full_slots(state.keys.shape[1], advance(state.position, time, lengths), time, lengths, reach)


def _check_state(q: Tensor, v: Tensor, chunk_size: int | None, state: AttentionState) -> None:
    slots = state.keys.shape[1] if chunk_size is None else chunk_size
    expected = {"keys": [q.shape[0], slots, q.shape[2]], "values": [q.shape[0], slots, v.shape[2]]}
    for name, shape in expected.items():
        got = list(getattr(state, name).shape)
        if got != shape:
            raise StateError(f"state.{name}: got shape {got}, allowed is {shape} ([batch, slots, width])")
    if chunk_size is None:
        check_values(
            state.position <= slots,
            f"state.position: got more tokens than the {slots} slots hold, allowed is a state of full attention",
            state.position,
            StateError,
        )
