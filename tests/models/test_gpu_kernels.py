"""Layers and models on a GPU: kernels agree with plain PyTorch."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor

import tcnca
from tcnca import AttentionConfig, ModelConfig, SequenceModel, TCNConfig, TokenInputConfig
from tcnca.layers import TCN
from tests.comparison import TOLERANCE, assert_close

pytestmark = pytest.mark.gpu

VOCABULARY = 50
MIXER = TCNConfig(kernel_size=17, dilation_factor=4, depth=3)


def _model(gated: bool) -> SequenceModel:
    torch.manual_seed(0)
    config = ModelConfig(
        num_layers=2,
        d_model=64,
        d_ff=128,
        mixer=MIXER,
        attention=AttentionConfig(d_key=32, d_value=128, chunk_size=64),
        gated=gated,
        input=TokenInputConfig(vocab_size=VOCABULARY),
    )
    return tcnca.build(config).cuda()


@pytest.mark.parametrize(
    "fields", [{}, {"convolutions": 2, "bias": True}, {"norm": "none"}, {"norm": "batch", "bias": True}], ids=str
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_layer_equals_plain_pytorch(fields: dict[str, object], causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TCN(64, TCNConfig(kernel_size=5, dilation_factor=3, depth=3, dropout=0.1, **fields), causal)  # type: ignore[arg-type]
    layer = layer.cuda().eval()
    x, lengths = torch.randn(3, 200, 64, device="cuda"), torch.tensor([200, 130, 1], device="cuda")
    results, by_kernels = [], []
    api = importlib.import_module("tcnca.ops.tcn.api")
    run = api._RUN["cuda"]

    def recorded(spec: Any) -> Any:
        by_kernels.append(os.environ["TCNCA_KERNELS"])
        return run(spec)

    monkeypatch.setitem(api._RUN, "cuda", recorded)
    for kernels in ("auto", "off"):
        monkeypatch.setenv("TCNCA_KERNELS", kernels)
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x, lengths=lengths)
        # The kernels and PyTorch's convolutions compute in the dtype of autocast, and the layer keeps it.
        assert y.dtype == torch.bfloat16
        y = tcnca.ops.zero_padding(y.float(), lengths)
        results.append([y, *torch.autograd.grad(y.square().mean(), [*layer.parameters()])])
    assert by_kernels == ["auto"]
    for ours, plain in zip(*results, strict=True):
        assert ours.dtype == plain.dtype
        assert_close(ours, plain, dtype=torch.bfloat16)


def _step(model: SequenceModel, tokens: Tensor, lengths: Tensor | None, compile: bool) -> tuple[Tensor, list[Tensor]]:
    torch.compiler.reset()  # which kernels run is settled when compiling
    call = torch.compile(model, fullgraph=True) if compile else model
    with torch.autocast("cuda", torch.bfloat16):
        logits = call(tokens, lengths=lengths, return_state=False).logits
    logits = logits.float() if lengths is None else tcnca.ops.zero_padding(logits.float(), lengths)
    return logits, list(torch.autograd.grad(logits.square().mean(), [*model.parameters()]))


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("gated", [True, False], ids=["tcnca", "tcnca-simple"])
def test_model_under_autocast_equals_plain_pytorch(
    gated: bool, padded: bool, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(gated)
    tokens = torch.randint(VOCABULARY, (2, 256), device="cuda")
    lengths = torch.tensor([256, 77], device="cuda") if padded else None
    logits, gradients = _step(model, tokens, lengths, compile)
    monkeypatch.setenv("TCNCA_KERNELS", "off")
    plain_logits, plain_gradients = _step(model, tokens, lengths, compile)
    assert not torch.equal(logits, plain_logits)  # or both ran the same way
    assert_close(logits, plain_logits, dtype=torch.bfloat16)
    scale = max(float(part.norm()) for part in plain_gradients)
    for ours, plain in zip(gradients, plain_gradients, strict=True):
        assert ours.dtype == plain.dtype
        assert float((ours - plain).norm()) <= TOLERANCE[torch.bfloat16] * scale


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_a_prompt_then_single_tokens_equal_one_call(autocast: bool) -> None:
    model = _model(gated=True).eval()
    tokens = torch.randint(VOCABULARY, (2, 150), device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        whole = model(tokens, return_state=False).logits
        out = model(tokens[:, :100])
        pieces = [out.logits]
        for size in [1] * 10 + [30] + [1] * 10:
            begin = sum(piece.shape[1] for piece in pieces)
            out = model(tokens[:, begin : begin + size], state=out.state, inplace=True)
            pieces.append(out.logits)
    assert_close(torch.cat(pieces, 1), whole, dtype=torch.bfloat16 if autocast else torch.float32)
