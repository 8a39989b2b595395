"""The configuration of a model: one family, whose members differ in their parts."""

from __future__ import annotations

import dataclasses

from tcnca.config import Config, NonNegativeInt, PositiveInt, Probability
from tcnca.errors import ConfigError
from tcnca.layers import AttentionConfig, BlockConfig, EMAConfig, NormKind, TCNConfig
from tcnca.models.heads import (
    ClassifierHeadConfig,
    LanguageModelHeadConfig,
    PairHeadConfig,
    RegressionHeadConfig,
)
from tcnca.models.inputs import TokenInputConfig, ValueInputConfig
from tcnca.ops import Activation


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
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
    d_model: PositiveInt = 128
    """Channels of the sequence between layers (the paper's d)."""
    d_ff: NonNegativeInt = 256
    """Hidden width of the feed-forward nets; 0 for none."""
    mixer: TCNConfig | EMAConfig | None = dataclasses.field(default_factory=TCNConfig)
    """Mixes over time before the attention."""
    attention: AttentionConfig | None = dataclasses.field(default_factory=AttentionConfig)
    """Attention inside chunks."""
    gated: bool = True
    """Whether mixer and attention are joined by MEGA's gates, or by plain residual connections."""
    causal: bool = True
    """Whether a token sees only the past. Only causal models stream."""
    input: TokenInputConfig | ValueInputConfig = dataclasses.field(default_factory=TokenInputConfig)
    """What the model reads."""
    head: LanguageModelHeadConfig | ClassifierHeadConfig | RegressionHeadConfig | PairHeadConfig = dataclasses.field(
        default_factory=LanguageModelHeadConfig
    )
    """What the model predicts."""
    activation: Activation = "silu"
    """Non-linearity of values, candidates and feed-forward nets."""
    norm: NormKind = "layer"
    """Normalization of every layer."""
    prenorm: bool = True
    """Whether to normalize the input of each sublayer, or its sum with the residual."""
    final_norm_affine: bool = True
    """Whether the norm after the last layer, which pre-norm models have, has learned scales."""
    dropout: Probability = 0.0
    """Dropout of embeddings, of mixers' outputs and of everything added to the residual."""
    value_dropout: Probability = 0.0
    """Dropout of the attention's values."""
    ff_dropout: Probability = 0.0
    """Dropout inside the feed-forward nets."""
    feature_dropout: bool = False
    """Whether dropout inside the layers drops whole channels of a sequence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gated and self.attention is None:
            raise ConfigError("gated: expected False without attention, which MEGA's gates join to the mixer, got True")
        if isinstance(self.head, LanguageModelHeadConfig):
            if not isinstance(self.input, TokenInputConfig):
                raise ConfigError(
                    f"head: expected TokenInputConfig as the input of a LanguageModelHeadConfig, got {self.input}"
                )
            if not self.causal:
                raise ConfigError(
                    "causal: expected True with a LanguageModelHeadConfig, which predicts the next token, got False"
                )

    def block(self) -> BlockConfig:
        """Return what the layers need to know."""
        names = {field.name for field in dataclasses.fields(BlockConfig)}
        return BlockConfig(**{name: getattr(self, name) for name in names})
