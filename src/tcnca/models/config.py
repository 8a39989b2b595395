"""The configuration of a model: one family, whose members differ in their parts."""

from __future__ import annotations

from tcnca.config import PositiveInt
from tcnca.layers import LayerConfig
from tcnca.models.heads import HeadConfig, LanguageModelHeadConfig
from tcnca.models.inputs import InputConfig, TokenInputConfig


class ModelConfig(LayerConfig):
    """A stack of layers between an input and a head.

    | model | mixer | attention | gated |
    |---|---|---|---|
    | TCNCA | TCNConfig, residual | AttentionConfig | yes |
    | TCNCA-linear | TCNConfig, linear | AttentionConfig | yes |
    | TCNCA-simple | TCNConfig, residual | AttentionConfig | no |
    | MEGA | EMAConfig | AttentionConfig | yes |
    | TCN-MLP | TCNConfig, residual | None | no |
    | EMA-MLP | EMAConfig | None | no |
    """

    num_layers: PositiveInt = 4
    """Number of layers."""
    input: InputConfig = TokenInputConfig()
    """What the model reads."""
    head: HeadConfig = LanguageModelHeadConfig()
    """What the model predicts."""
    final_norm_affine: bool = True
    """Whether the norm after the last layer, which pre-norm models have, has learned scales."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head.check_model(self.input, self.causal)
