"""Typed, checked configurations of the parts. Errors name the field, what it got and what is allowed."""

from __future__ import annotations

import ast
import bisect
import dataclasses
import inspect
import itertools
import textwrap
from typing import Any, Literal, get_args

import numpy as np

from tcnca.errors import ConfigError
from tcnca.ops import (
    ACTIVATIONS,
    ATTENTION_FUNCTIONS,
    METHODS,
    Activation,
    AttentionFunction,
    Method,
    receptive_field,
)

TCNNorm = Literal["none", "weight", "rms", "layer", "batch", "sync_batch"]
TCNInit = Literal["ema", "series", "decay", "near", "graded", "normal"]
TCNBlock = Literal["linear", "chain", "residual"]
TCNFinish = Literal["none", "skip", "activation"]
EMAFinish = Literal["skip", "activation"]
Position = Literal["none", "simple", "rotary", "rope"]


class Config:
    """Base of the configurations.

    Numbers of NumPy's become plain ones, and the text under each field, which `help` would not show, is added to the
    docstring of the class.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        texts: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            texts |= _field_texts(base) if issubclass(base, Config) else {}
        if texts:
            lines = "".join(f"\n    {name}: {text}" for name, text in texts.items())
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nFields:{lines}\n"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())


def _field_texts(cls: type) -> dict[str, str]:
    """The string that follows each field in the source of a class; nothing if there is no source."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    texts = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, text in itertools.pairwise(statements):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                texts[name] = " ".join(words.split())
    return texts


def check_at_least(name: str, value: Any, least: int) -> None:
    """Raise a ConfigError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: got {value!r}, allowed is a whole number of at least {least}")


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise a ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name}: got {value!r}, allowed are {', '.join(allowed)}")


def check_probability(name: str, value: Any) -> None:
    """Raise a ConfigError unless `value` can be a dropout probability."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ConfigError(f"{name}: got {value!r}, allowed is a number from 0 up to, not including, 1")


def check_flag(name: str, value: Any) -> None:
    """Raise a ConfigError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: got {value!r}, allowed are True and False")


def check_reach(name: str, chunk: int | None, reach: int) -> None:
    """Raise a ConfigError if a `simple` position bias is too short for the chunk."""
    if chunk is not None and chunk > reach:
        raise ConfigError(
            f"{name}: got {chunk}, allowed is at most {reach}, as far as the simple position bias reaches; "
            f"attention.max_length sets how far before training, and rotary and rope positions have no such limit"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TCNConfig(Config):
    """The structure of a TCN: `depth` blocks, block `i` of dilation `dilation_factor^i`."""

    kernel_size: int = 17
    """Taps of every kernel (the paper's K)."""
    dilation_factor: int = 8
    """Growth of the dilation from block to block (the paper's f)."""
    depth: int = 4
    """Number of blocks (the paper's D)."""
    convolutions: int = 1
    """Convolutions in one block (the paper's B): 1 is the paper's, 2 the classic TCN's."""
    activation: Activation = "silu"
    """Non-linearity, where `block` or `finish` has one."""
    norm: TCNNorm = "none"
    """Normalization of each convolution: `weight` of its kernels, `batch` of each channel of its output;
    `rms` and `layer` of its output mix channels, which the paper's TCN does not. See docs/tcn-block.md."""
    bias: bool = False
    """Whether convolutions have a bias."""
    dropout: float = 0.0
    """Dropout inside the blocks."""
    block: TCNBlock = "linear"
    """How convolutions follow each other. `linear`: one directly after the other. `chain`: after each,
    `h + a · activation(h)` with a learned `a` for each channel that begins at 0. `residual`:
    `x + activation(convolution(x))`."""
    finish: TCNFinish = "skip"
    """What is made of the last block's `h`: nothing more (`none`), `h + ω · x` with a learned ω for each channel
    (`skip`), or the `activation` of that, as MEGA's EMA ends."""
    init: TCNInit = "ema"
    """How kernels start. `ema`: that of the first block as MEGA's EMA does, the others letting through what comes.
    `series`: for `linear` and `chain`, together one decaying exponential a channel, as far as
    `dilation_factor ^ depth` tokens if there are as many taps. `near`: random mixtures of decaying exponentials in the
    first block, nothing new in the others; `decay`: little in the others. `graded`: all N(0, 1 / kernel_size), each
    block 0.3 times the one before. `normal`: all alike. See docs/tcn-block.md."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("kernel_size", "dilation_factor", "depth", "convolutions"):
            check_at_least(f"mixer.{name}", getattr(self, name), 1)
        check_choice("mixer.activation", self.activation, ACTIVATIONS)
        check_choice("mixer.norm", self.norm, get_args(TCNNorm))
        check_choice("mixer.init", self.init, get_args(TCNInit))
        check_choice("mixer.block", self.block, get_args(TCNBlock))
        check_choice("mixer.finish", self.finish, get_args(TCNFinish))
        check_flag("mixer.bias", self.bias)
        check_probability("mixer.dropout", self.dropout)
        # What would be ignored is refused, as two models that are equal would pass for a comparison.
        if self.activation != "silu" and self.block == "linear" and self.finish != "activation":
            raise ConfigError(
                f"mixer.activation: got {self.activation!r}, but block 'linear' with finish {self.finish!r} has none; "
                "allowed is another with block 'chain' or 'residual' or finish 'activation'"
            )
        if self.init == "series" and self.block == "residual":
            raise ConfigError("mixer.init: got 'series' with block 'residual', allowed is it with 'linear' and 'chain'")

    @property
    def receptive_field(self) -> int:
        """Number of inputs that one output depends on."""
        return receptive_field(self.kernel_size, self.dilation_factor, self.depth, self.convolutions)

    @classmethod
    def covering(cls, length: int, **fields: Any) -> TCNConfig:
        """The TCN with the smallest dilation factor whose receptive field is at least `length`.

        This is the rule of the paper's runtime comparison. `fields` sets the others, for example `depth=4`.
        """
        check_at_least("length", length, 1)
        config = cls(dilation_factor=1, **fields)
        if config.receptive_field < length and (config.depth == 1 or config.kernel_size == 1):
            raise ConfigError(
                f"length: got {length}, allowed is at most {config.receptive_field} with depth {config.depth} and "
                f"kernel_size {config.kernel_size}, whatever the dilation factor"
            )
        # The field grows with the factor, and a factor of `length` is always enough.
        factors = range(1, length + 1)
        enough = bisect.bisect_left(factors, length, key=lambda f: config.with_dilation_factor(f).receptive_field)
        return config.with_dilation_factor(factors[enough])

    def with_dilation_factor(self, dilation_factor: int) -> TCNConfig:
        """A copy with another dilation factor."""
        return dataclasses.replace(self, dilation_factor=dilation_factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMAConfig(Config):
    """MEGA's multi-dimensional damped EMA."""

    hidden: int = 16
    """Hidden states of each channel (the paper's N)."""
    truncation: int | None = None
    """Lags after which the kernel is cut off. Streaming then keeps a window of so many inputs."""
    method: Method = "auto"
    """How it is computed: `fft`, `scan`, `steps`, or `fused`, by kernels for NVIDIA GPUs; `auto` takes `fused` where it
    can run, else `fft`. All give the same."""
    spread: bool = False
    """Whether decays start uniform between 0.5 and 1, instead of all near 0.75 as MEGA's do."""
    finish: EMAFinish = "activation"
    """What comes out: a SiLU of `ema(x) + ω · x` (`activation`), as MEGA has it, or that itself (`skip`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("mixer.hidden", self.hidden, 1)
        if self.truncation is not None:
            check_at_least("mixer.truncation", self.truncation, 1)
        check_choice("mixer.method", self.method, METHODS)
        check_flag("mixer.spread", self.spread)
        check_choice("mixer.finish", self.finish, get_args(EMAFinish))
        if self.method == "fused" and self.truncation is not None:
            raise ConfigError(
                f"mixer.method: got 'fused' with truncation {self.truncation}, allowed is 'fused' without truncation; "
                "'auto' takes 'fft' for a truncated kernel"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """Attention of one head inside chunks."""

    key_width: int = 64
    """Width of queries and keys (the paper's z)."""
    value_width: int = 128
    """Width of values (the paper's v)."""
    chunk: int | None = 128
    """Tokens in a chunk (the paper's C); None for attention over everything."""
    function: AttentionFunction = "softmax"
    """Turns scores into weights."""
    position: Position = "simple"
    """`simple`: a learned bias for each offset. `rotary`: MEGA's rotary bias. `rope`: true rotary embeddings
    on queries and keys. `none`."""
    max_length: int | None = None
    """How many tokens a `simple` bias reaches over; by default the chunk. Needed without chunks."""
    dropout: float = 0.0
    """Dropout of attention weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("attention.key_width", self.key_width, 1)
        check_at_least("attention.value_width", self.value_width, 1)
        for name in ("chunk", "max_length"):
            if getattr(self, name) is not None:
                check_at_least(f"attention.{name}", getattr(self, name), 1)
        check_choice("attention.function", self.function, ATTENTION_FUNCTIONS)
        check_choice("attention.position", self.position, get_args(Position))
        check_probability("attention.dropout", self.dropout)
        if self.position in ("rotary", "rope") and self.key_width % 2:
            raise ConfigError(
                f"attention.key_width: got {self.key_width}, allowed is an even number, as position "
                f"{self.position!r} turns pairs"
            )
        if self.position == "simple":
            check_reach("attention.chunk", self.chunk, self.reach)

    @property
    def reach(self) -> int:
        """How many tokens a `simple` bias reaches over."""
        reach = self.chunk if self.max_length is None else self.max_length
        if reach is None:
            raise ConfigError(
                "attention.max_length: got None, allowed is a whole number: a simple bias without chunks needs a length"
            )
        return reach


Mixer = TCNConfig | EMAConfig
