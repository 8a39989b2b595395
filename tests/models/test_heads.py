"""Inputs and heads of a model: pooling, pairs of documents, tied matrices, the final norm, the first loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca import (
    ClassifierHeadConfig,
    LanguageModelHeadConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
    preset,
    presets,
)
from tests.comparison import assert_close
from tests.examples import VOCABULARY, pairwise, small_model
from tests.models.gradients import gradients

LENGTHS = torch.tensor([7, 4, 1])


def _tokens(batch: int = 3, time: int = 7) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time))


def _features(model: SequenceModel, x: Tensor, **described: Any) -> Tensor:
    """What reaches the head, seen through a head that is the identity."""
    width = model.config.d_model
    reader = SequenceModel(model.config.override(head=RegressionHeadConfig(outputs=width, pooling="none")))
    body = {name: value for name, value in model.state_dict().items() if not name.startswith("head.")}
    identity = {"head.output.weight": torch.eye(width), "head.output.bias": torch.zeros(width)}
    reader.double().eval().load_state_dict(body | identity)
    with torch.no_grad():
        return reader(x, **described).logits


def _summary(features: Tensor, lengths: Tensor, pooling: str) -> Tensor:
    rows = [row[: int(length)] for row, length in zip(features, lengths, strict=True)]
    return torch.stack([{"mean": row.mean(0), "last": row[-1], "first": row[0]}[pooling] for row in rows])


def _through(model: SequenceModel, pooled: Tensor, activation: str = "gelu") -> Tensor:
    """The layers of a head, written out."""
    head: Any = model.head
    for layer in head.hidden:
        pooled = getattr(F, activation)(pooled @ layer.weight.T + layer.bias)
    bias = 0 if head.output.bias is None else head.output.bias
    return (pooled @ head.output.weight.T + bias).detach()


@pytest.mark.parametrize(
    ("pooling", "causal", "padded"), pairwise(["mean", "last", "first"], [True, False], [False, True])
)
def test_pooling_is_over_valid_tokens(pooling: str, causal: bool, padded: bool) -> None:
    head = ClassifierHeadConfig(num_classes=4, pooling=pooling, hidden=5, hidden_layers=2)  # type: ignore[arg-type]
    model, x = small_model("tcnca", causal=causal, head=head), _tokens()
    lengths = LENGTHS if padded else torch.full((3,), 7)
    described = {"lengths": LENGTHS} if padded else {}
    pooled = _summary(_features(model, x, **described), lengths, pooling)
    assert_close(model(x, **described).logits.detach(), _through(model, pooled))


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_regression_head_without_pooling_gives_values_at_every_time(activation: str) -> None:
    head = RegressionHeadConfig(outputs=2, pooling="none", hidden=5, activation=activation)  # type: ignore[arg-type]
    model, x = small_model("tcnca", head=head), _tokens()
    values = model(x).logits.detach()
    assert values.shape == (3, 7, 2)
    assert_close(values, _through(model, _features(model, x), activation))


def _pair(combination: str = "concat", **fields: Any) -> SequenceModel:
    return small_model("tcnca", causal=False, head=PairHeadConfig(num_classes=3, combination=combination, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("combination", "pooling", "hidden"), pairwise(["concat", "features"], ["mean", "last", "first"], [None, 5])
)
def test_pair_is_second_then_first_or_both_with_product_and_difference(
    combination: str, pooling: str, hidden: int | None
) -> None:
    model = _pair(combination, pooling=pooling, hidden=hidden)
    first, second, lengths2 = _tokens(), _tokens(3, 9), torch.tensor([9, 2, 5])
    u = _summary(_features(model, first, lengths=LENGTHS), LENGTHS, pooling)
    v = _summary(_features(model, second, lengths=lengths2), lengths2, pooling)
    logits = model(first, second, lengths=LENGTHS, lengths2=lengths2).logits
    joined = [v, u] if combination == "concat" else [u, v, u * v, u - v]
    assert_close(logits.detach(), _through(model, torch.cat(joined, -1)))


def test_tied_matrix_is_counted_once_and_gets_both_gradients() -> None:
    tied, untied = (
        small_model("tcnca", head=LanguageModelHeadConfig(tie_embeddings=choice)) for choice in (True, False)
    )
    size = VOCABULARY * tied.config.d_model
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == size
    with torch.no_grad():
        untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    x = _tokens()
    together, apart = (gradients(model(x).logits.square().sum(), model) for model in (tied, untied))
    assert_close(together["embedding.weight"], apart["embedding.weight"] + apart["head.weight"])


@pytest.mark.parametrize("features", [1, 3])
def test_real_values_enter_as_a_vector_a_feature_plus_a_bias(features: int) -> None:
    model = small_model("tcnca", input=ValueInputConfig(features=features), head=RegressionHeadConfig())
    embedding: Any = model.embedding
    x = torch.randn(2, 5, features, dtype=torch.float64)
    expected = embedding.bias + sum(x[..., i : i + 1] * embedding.weight[i] for i in range(features))
    assert_close(embedding(x, None).detach(), expected.detach())
    if features == 1:
        assert_close(model(x[..., 0]).logits.detach(), model(x).logits.detach())


# A CDIL-CNN has no norm, as published, and features of any size.
CLASSIFIERS = [
    name for name in presets() if not preset(name).model.head.generates and preset(name).model.norm != "none"
]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_first_loss_of_a_classifier_is_near_the_logarithm_of_the_classes(name: str) -> None:
    # The ends and widths of the preset, with one layer and short sequences.
    config = preset(name).model.override(num_layers=1)
    model, classes = SequenceModel(config), config.head.num_classes  # type: ignore[attr-defined]
    documents = [
        torch.randint(config.input.vocab_size, (16, 40))
        if isinstance(config.input, TokenInputConfig)
        else torch.randn(16, 40)
        for _ in range(config.head.documents)
    ]
    with torch.no_grad():
        loss = F.cross_entropy(model(*documents).logits, torch.arange(16) % classes)
    assert float(loss) == pytest.approx(math.log(classes), abs=0.05)
