"""Layers: modules with parameters, built from `tcnca.ops` and chosen by typed configurations."""

from tcnca.layers.attention import ChunkedAttention
from tcnca.layers.block import Block, BlockConfig, GatedMixing, LayerState, PlainMixing
from tcnca.layers.config import (
    AttentionConfig,
    Config,
    EMAConfig,
    Mixer,
    TCNConfig,
    check_at_least,
    check_choice,
    check_flag,
    check_probability,
)
from tcnca.layers.dropout import Dropout
from tcnca.layers.ema import EMA
from tcnca.layers.feed_forward import FeedForward
from tcnca.layers.linear import Linear
from tcnca.layers.norm import NORM_KINDS, BatchNorm, LayerNorm, NormKind, RMSNorm, make_norm
from tcnca.layers.tcn import TCN

__all__ = [
    "EMA",
    "NORM_KINDS",
    "TCN",
    "AttentionConfig",
    "BatchNorm",
    "Block",
    "BlockConfig",
    "ChunkedAttention",
    "Config",
    "Dropout",
    "EMAConfig",
    "FeedForward",
    "GatedMixing",
    "LayerNorm",
    "LayerState",
    "Linear",
    "Mixer",
    "NormKind",
    "PlainMixing",
    "RMSNorm",
    "TCNConfig",
    "check_at_least",
    "check_choice",
    "check_flag",
    "check_probability",
    "make_norm",
]
