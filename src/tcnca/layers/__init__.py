"""Layers: modules with parameters, built from `tcnca.ops` and chosen by typed configurations."""

from tcnca.layers.attention import AttentionConfig, ChunkedAttention
from tcnca.layers.block import Block, BlockConfig, GatedBlock, LayerState, Mixer, ResidualBlock
from tcnca.layers.dropout import Dropout
from tcnca.layers.ema import EMA, EMAConfig
from tcnca.layers.feed_forward import FeedForward
from tcnca.layers.linear import Linear
from tcnca.layers.norm import NORM_KINDS, BatchNorm, LayerNorm, NormKind, RMSNorm, make_norm
from tcnca.layers.tcn import TCN, TCNConfig

__all__ = [
    "EMA",
    "NORM_KINDS",
    "TCN",
    "AttentionConfig",
    "BatchNorm",
    "Block",
    "BlockConfig",
    "ChunkedAttention",
    "Dropout",
    "EMAConfig",
    "FeedForward",
    "GatedBlock",
    "LayerNorm",
    "LayerState",
    "Linear",
    "Mixer",
    "NormKind",
    "RMSNorm",
    "ResidualBlock",
    "TCNConfig",
    "make_norm",
]
