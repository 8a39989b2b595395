"""Layers: modules with parameters, built from `tcnca.ops` and chosen by typed configurations."""

from tcnca.layers.attention import AttentionConfig, ChunkedAttention
from tcnca.layers.block import FeedForward, GatedBlock, Layer, LayerConfig, LayerState, ResidualBlock
from tcnca.layers.cdil import CDIL, CDILConfig
from tcnca.layers.ema import EMA, EMAConfig
from tcnca.layers.linear import Dropout, GLUOutput, Linear
from tcnca.layers.lru import LRU, LRUConfig
from tcnca.layers.mixer import Mixer, MixerConfig, ParamOptions, check_features
from tcnca.layers.norm import NORM_KINDS, BatchNorm, LayerNorm, NormKind, RMSNorm, make_norm
from tcnca.layers.s4d import S4D, S4DConfig
from tcnca.layers.s5 import S5, S5Config
from tcnca.layers.sgconv import SGConv, SGConvConfig
from tcnca.layers.tcn import TCN, TCNConfig

__all__ = [
    "CDIL",
    "EMA",
    "LRU",
    "NORM_KINDS",
    "S4D",
    "S5",
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
    "LRUConfig",
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
    "S4DConfig",
    "S5Config",
    "SGConv",
    "SGConvConfig",
    "TCNConfig",
    "check_features",
    "make_norm",
]
