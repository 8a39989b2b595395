"""A head that the library does not know: a configuration, whose `kind` registers it, and a module are all it needs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import tcnca
from tcnca.models import summarize
from tcnca.models.heads import Head, HeadConfig
from tcnca.models.inputs import InputConfig
from tcnca.models.packing import Packing
from tcnca.models.preprocessing import Preprocessing
from tests.examples import VOCABULARY, small_config


class EnergyHeadConfig(HeadConfig, kind="energy"):
    """The mean square of the features at every time."""

    def build(self, d_model: int, input: InputConfig, preprocessing: Preprocessing) -> EnergyHead:
        return EnergyHead()


class EnergyHead(Head):
    def forward(self, pooled: Tensor, packing: Packing, time: int, embedding: Tensor) -> Tensor:
        return packing.restore(pooled.square().mean(-1, keepdim=True), time)

    def macs(self, embedding: Tensor) -> int:
        return embedding.shape[1]


def test_new_head_builds_streams_saves_and_is_summarized(tmp_path: Path) -> None:
    config = small_config("tcnca", head=EnergyHeadConfig())
    model = tcnca.build(config).eval()
    tokens = torch.randint(VOCABULARY, (2, 11))
    expected, _ = model(tokens)
    assert expected.shape == (2, 11, 1)
    first, state = model(tokens[:, :4])
    second, _ = model(tokens[:, 4:], state=state)
    torch.testing.assert_close(torch.cat([first, second], 1), expected, rtol=1e-4, atol=1e-5)

    loaded = tcnca.load(tcnca.save(model, tmp_path / "model"))
    assert loaded.config == config
    assert torch.equal(loaded(tokens).logits, expected)
    assert tcnca.ModelConfig.from_dict({"head": {"kind": "energy"}}).head == EnergyHeadConfig()
    assert summarize(config, 100).macs > 0
