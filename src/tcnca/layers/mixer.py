"""The protocol of mixers: modules that mix each channel over time, such as the TCN, the EMA and S4D.

Blocks, models, summaries and optimizers use mixers through this protocol alone. To add a mixer:

1. an operator in a folder of `tcnca.ops`;
2. a file in this package with a `Mixer` and its configuration, `class NewConfig(MixerConfig, kind="new")`. The `kind`
   registers it: recipes, saved models and the command line then accept `mixer=new` and the fields of `NewConfig`;
3. a line in `tcnca/layers/__init__.py` that imports it.

`tests/layers/test_new_mixer.py` adds a small one.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tcnca.config import Config, check_at_least
from tcnca.errors import ConfigError, InputError, StateError
from tcnca.ops import ContextParallel, State, autocasts, check_tensor, current_context, zero_padding
from tcnca.ops.context import continued, not_compiled


class ParamOptions(NamedTuple):
    """How an optimizer treats a parameter."""

    group: str
    """Name of the parameter group. The group `kernels` is also scaled by the recipe's `optimizer.kernel_lr_mult` and
    `optimizer.kernel_wd_mult`, the group `ssm` by `optimizer.ssm_lr_mult`, `ngrams` by `optimizer.ngram_lr_mult`."""
    lr_mult: float = 1.0
    """Factor of the learning rate."""
    wd_mult: float = 1.0
    """Factor of the weight decay; 0 for none."""


class MixerConfig(Config, abc.ABC):
    """Base of the mixers' configurations."""

    @abc.abstractmethod
    def build(self, d_model: int, causal: bool = True) -> Mixer:
        """Return a new module for `d_model` channels."""


class Mixer(nn.Module, abc.ABC):
    """Base of the mixers.

    Args:
        d_model: number of channels.
        config: the configuration that the module is built from.
        causal: whether an output depends on the past and present only. Only causal mixers have a state.
    """

    state_class: ClassVar[type[State]]
    """Class of the streaming state, whose tensors have the batch as their first dimension."""
    rounds_inputs: ClassVar[bool] = False
    """Whether inputs are rounded to the dtype of autocast, where it is on: a halo may be rounded before it is sent."""

    def __init__(self, d_model: int, config: MixerConfig, causal: bool) -> None:
        super().__init__()
        check_at_least("d_model", d_model, 1)
        self.d_model = d_model
        self.config = config
        self.causal = causal

    def forward(
        self,
        x: Tensor,
        *,
        lengths: Tensor | None = None,
        state: State | None = None,
        return_state: bool | None = None,
        inplace: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """Mix `x` over time.

        Args:
            x: `[batch, time, d_model]`, in the dtype of the parameters or under autocast.
            lengths: `[batch]`, valid tokens of each row; the rest is padding.
            state: the state that the previous call returned; None at the start of the sequence. Causal only.
            return_state: whether to return the new state; by default if `state` is given.
            inplace: whether the memory of `state` may be reused. `state` must not be used again.

        Returns:
            `[batch, time, d_model]`, or a tuple of it and the new state.
        """
        return_state = state is not None if return_state is None else return_state
        if not self.causal and (state is not None or return_state):
            raise StateError("state: expected None, got a request for one; bidirectional mixers have no state")
        if not (state is None or isinstance(state, self.state_class)):
            raise StateError(f"state: expected a {self.state_class.__name__}, got a {type(state).__name__}")
        check_features("x", x, self.d_model, next(self.parameters(), None))
        context = current_context()
        if context is None:
            y, new = self.mix(x, lengths, state, return_state, inplace)
        else:
            y, new = self._mix_part(context, x, lengths, state, return_state)
        if not return_state:
            return y
        assert new is not None
        return y, new

    @abc.abstractmethod
    def mix(
        self, x: Tensor, lengths: Tensor | None, state: Any, return_state: bool, inplace: bool
    ) -> tuple[Tensor, State | None]:
        """Implement `forward`: return the output, in the dtype of the operator's result, and the new state or None."""

    @not_compiled
    def _mix_part(
        self,
        context: ContextParallel,
        x: Tensor,
        lengths: Tensor | None,
        state: Any,
        return_state: bool,
    ) -> tuple[Tensor, State | None]:
        """Mix a part of a sequence, together with its halo if it has one, whose outputs are dropped."""
        halo = self.halo
        if halo is None:
            return self.mix(x, lengths, state, return_state, False)
        if self.rounds_inputs and autocasts(x.device):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        time, start = x.shape[1], context.rank * x.shape[1]
        extended, left = context.extend(zero_padding(x, lengths), *halo)
        if state is not None or return_state:
            batch = x.shape[0]
            state = self.initial_state(batch) if state is None else state
            if left < start:
                # What is before the halo has no effect on the outputs of the part.
                state = continued(self.initial_state(batch), state, start - left)
        valid = context.extended_lengths(lengths, time, left, extended.shape[1])
        with context.suspended():
            y, new = self.mix(extended, valid, state, return_state, False)
        return y[:, left : left + time], None if new is None else context.final_state(new, lengths, time)

    @property
    def halo(self) -> tuple[int, int] | None:
        """Inputs before and after a part of a sequence that its outputs depend on, for context parallelism.

        A part and its halo are then mixed as one sequence. None if the operators of the mixer exchange what they need.
        """
        field = self.receptive_field
        if field is None:
            raise ConfigError(
                f"mixer: expected one with a limited receptive field, or that exchanges its states, in a context of "
                f"several processes, got {type(self).__name__}; override Mixer.halo"
            )
        return field - 1, 0 if self.causal else field - 1

    @abc.abstractmethod
    def initial_state(self, batch: int) -> State:
        """Return the state before the first token."""

    @abc.abstractmethod
    def macs(self, length: int) -> int:
        """Return the multiply-accumulate operations for one token of a sequence of `length`."""

    @property
    @abc.abstractmethod
    def receptive_field(self) -> int | None:
        """Number of inputs that one output depends on; None if there is no limit."""

    @property
    @abc.abstractmethod
    def signature(self) -> str:
        """What two mixers must share for one to continue from a state of the other."""

    def param_options(self) -> dict[str, ParamOptions]:
        """Return the options of parameters, by name, that the optimizer should not treat by its general rule.

        The general rule is: matrices called `weight` are decayed, everything else is not.
        """
        return {}

    def extra_repr(self) -> str:
        """Describe the module for `print`."""
        return f"{self.d_model}, {self.config}, causal={self.causal}"


def check_features(name: str, x: Tensor, width: int, parameter: Tensor | None) -> None:
    """Raise an InputError unless `x` is `[batch, time, width]` and, without autocast, has the dtype of `parameter`."""
    check_tensor(name, x)
    if x.dim() != 3 or x.shape[2] != width or x.shape[1] < 1:
        swapped = x.dim() == 3 and x.shape[1] == width
        hint = "; this looks like [batch, channels, time]: pass x.transpose(1, 2)" if swapped else ""
        raise InputError(f"{name}: expected shape [batch, time, {width}], got {list(x.shape)}{hint}")
    if parameter is not None and x.dtype != parameter.dtype and not autocasts(x.device):
        raise InputError(
            f"{name}: expected {parameter.dtype}, the dtype of the parameters, got {x.dtype}; convert the input with "
            f"{name}.to({parameter.dtype}) or the module with .to({x.dtype}), or use torch.autocast"
        )
