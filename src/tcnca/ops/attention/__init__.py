"""Chunked attention of one head, with position biases and true rotary embeddings."""

from tcnca.ops.attention.attend import ATTENTION_ACTIVATIONS, AttentionActivation, attend
from tcnca.ops.attention.checks import needed_reach
from tcnca.ops.attention.chunked import chunked_attention
from tcnca.ops.attention.position import offset_bias, rotary_bias, rotate
from tcnca.ops.attention.streaming import AttentionState, initial_attention_state

__all__ = [
    "ATTENTION_ACTIVATIONS",
    "AttentionActivation",
    "AttentionState",
    "attend",
    "chunked_attention",
    "initial_attention_state",
    "needed_reach",
    "offset_bias",
    "rotary_bias",
    "rotate",
]
