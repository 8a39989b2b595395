"""Layers: modules with parameters, built from `tcnca.ops` and chosen by typed configurations."""

from tcnca.layers.attention import AttentionConfig, ChunkedAttention
from tcnca.layers.block import FeedForward, GatedBlock, Layer, LayerConfig, LayerState, ResidualBlock
from tcnca.layers.cdil import CDIL, CDILConfig
from tcnca.layers.ema import EMA, EMAConfig
from tcnca.layers.linear import Dropout, GLUOutput, Linear
from tcnca.layers.mixer import Mixer, MixerConfig, ParamOptions, check_features
from tcnca.layers.norm import NORM_KINDS, BatchNorm, LayerNorm, NormKind, RMSNorm, make_norm
from tcnca.layers.sgconv import SGConv, SGConvConfig
from tcnca.layers.tcn import TCN, TCNConfig

__all__ = [
    "CDIL",
    "EMA",
    "NORM_KINDS",
    "TCN",
    "AttentionConfig",
    "BatchNorm",
    "CDILConfig",
    "ChunkedAttention",
    "Dropout",
    "EMAConfig",
    "FeedForward",
    "GLUOutput",
    "GatedBlock",
    "Layer",
    "LayerConfig",
    "LayerNorm",
    "LayerState",
    "Linear",
    "Mixer",
    "MixerConfig",
    "NormKind",
    "ParamOptions",
    "RMSNorm",
    "ResidualBlock",
    "SGConv",
    "SGConvConfig",
    "TCNConfig",
    "check_features",
    "make_norm",
]
