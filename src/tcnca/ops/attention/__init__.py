"""Chunked attention of one head, with position biases and true rotary embeddings."""

from tcnca.ops.attention.api import AttentionBackend, chunked_attention, required_max_length
from tcnca.ops.attention.naive import (
    ATTENTION_ACTIVATIONS,
    AttentionActivation,
    AttentionState,
    attend,
    initial_attention_state,
    offset_bias,
    rotary_bias,
    rotate,
)

__all__ = [
    "ATTENTION_ACTIVATIONS",
    "AttentionActivation",
    "AttentionBackend",
    "AttentionState",
    "attend",
    "chunked_attention",
    "initial_attention_state",
    "offset_bias",
    "required_max_length",
    "rotary_bias",
    "rotate",
]
