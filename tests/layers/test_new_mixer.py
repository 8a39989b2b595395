"""A mixer that the library does not know: a configuration, whose `kind` registers it, and a module are all it needs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tcnca
from tcnca.layers import Mixer, MixerConfig, ParamOptions
from tcnca.models import summarize
from tcnca.ops import State, zero_padding
from tcnca.training.config import OptimizerConfig
from tcnca.training.optimizer import parameter_groups
from tests.comparison import assert_close
from tests.examples import ATTENTION, VOCABULARY, small_config


@dataclasses.dataclass(frozen=True)
class LeakyState(State):
    total: Tensor


class LeakyConfig(MixerConfig, kind="leaky"):
    """A leaky sum."""

    leak: float = 0.5
    """Initial factor of the past."""

    def build(self, d_model: int, causal: bool = True) -> Leaky:
        return Leaky(d_model, self, causal)


class Leaky(Mixer):
    """`y[t] = x[t] + leak · y[t - 1]`."""

    state_class = LeakyState
    config: LeakyConfig

    def __init__(self, d_model: int, config: LeakyConfig, causal: bool = True) -> None:
        super().__init__(d_model, config, causal)
        self.leak = nn.Parameter(torch.full((d_model,), config.leak))

    def mix(
        self, x: Tensor, lengths: Tensor | None, state: LeakyState | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, LeakyState | None]:
        total = torch.zeros_like(x[:, 0]) if state is None else state.total
        outputs = []
        for time, value in enumerate(zero_padding(x, lengths).unbind(1)):
            new = value + self.leak * total
            total = new if lengths is None else torch.where((time < lengths).unsqueeze(1), new, total)
            outputs.append(total)
        return torch.stack(outputs, 1), LeakyState(total) if return_state else None

    def initial_state(self, batch: int) -> LeakyState:
        return LeakyState(self.leak.new_zeros(batch, self.d_model))

    def macs(self, length: int) -> int:
        return self.d_model

    @property
    def receptive_field(self) -> None:
        return None

    @property
    def signature(self) -> str:
        return "Leaky()"

    def param_options(self) -> dict[str, ParamOptions]:
        return {"leak": ParamOptions("leaks", lr_mult=0.1, wd_mult=0.0)}


@pytest.mark.parametrize("attention", [ATTENTION, None], ids=["gated", "residual"])
def test_new_mixer_does_all_that_others_do(attention: tcnca.AttentionConfig | None, tmp_path: Path) -> None:
    config = small_config(mixer=LeakyConfig(leak=0.3), attention=attention, gated=attention is not None)
    assert tcnca.ModelConfig.from_dict(config.to_dict()) == config
    model = tcnca.build(config)
    x = torch.randint(VOCABULARY, (2, 15))

    groups = {group["name"]: group for group in parameter_groups(model, OptimizerConfig(weight_decay=0.1))}
    assert {parameter.shape for parameter in groups["leaks"]["params"]} == {(8,)}
    assert (groups["leaks"]["lr_mult"], groups["leaks"]["weight_decay"]) == (0.1, 0.0)
    assert len(groups["leaks"]["params"]) == 2

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = model.get_parameter("layers.0.block.mixer.leak").detach().clone()
    nn.functional.cross_entropy(model(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    optimizer.step()
    assert not torch.equal(model.get_parameter("layers.0.block.mixer.leak"), before)

    model.eval()
    with torch.no_grad():
        expected, state = model(x).logits, None
        for piece in x.split([1, 1, 6, 4, 3], 1):
            logits, state = model(piece, state=state)
            begin = x.shape[1] - expected.shape[1]
            assert_close(logits, expected[:, : piece.shape[1]], f"from token {begin}")
            expected = expected[:, piece.shape[1] :]
        loaded = tcnca.load(tcnca.save(model, tmp_path))
        assert torch.equal(loaded(x).logits, model(x).logits)
        assert tcnca.generate(loaded, x, 5, temperature=0.0).shape == (2, 5)

    summary = summarize(config, 15)
    assert summary.receptive_field is None
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert summary.state_bytes == model.initial_state(1).nbytes
    assert summary.macs > 2 * 8


def test_state_of_another_mixer_is_refused() -> None:
    model, other = tcnca.build(small_config(mixer=LeakyConfig())), tcnca.build(small_config())
    x = torch.randint(VOCABULARY, (1, 3))
    with pytest.raises(tcnca.StateError, match=r"expected one of .*Leaky\(\).*got one of another model"):
        model(x, state=other(x).state)
