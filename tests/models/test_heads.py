"""Inputs' and outputs' ends of a model: pooling, pairs of documents, tied matrices, the last norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca import (
    ClassifierHeadConfig,
    InputError,
    LanguageModelHeadConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
)
from tests.comparison import assert_close
from tests.examples import VOCABULARY, small_config, small_model
from tests.models.gradients import gradients

POOLINGS = pytest.mark.parametrize("pooling", ["mean", "last", "first"])
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


@POOLINGS
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "lengths"])
def test_pooling_is_over_real_tokens(pooling: str, causal: bool, padded: bool) -> None:
    head = ClassifierHeadConfig(num_classes=4, pooling=pooling, hidden=5, hidden_layers=2)  # type: ignore[arg-type]
    model, x = small_model("tcnca", causal=causal, head=head), _tokens()
    lengths = LENGTHS if padded else torch.full((3,), 7)
    described = {"lengths": LENGTHS} if padded else {}
    pooled = _summary(_features(model, x, **described), lengths, pooling)
    assert_close(model(x, **described).logits.detach(), _through(model, pooled))


@POOLINGS
def test_pooling_after_left_padding_finds_the_real_tokens(pooling: str) -> None:
    model = small_model("mega", causal=False, head=ClassifierHeadConfig(pooling=pooling))  # type: ignore[arg-type]
    x = _tokens()
    mask = torch.arange(7) >= 7 - LENGTHS.unsqueeze(1)
    for row in range(3):
        alone = model(x[row : row + 1, mask[row]]).logits
        assert_close(model(x, attention_mask=mask).logits[row : row + 1], alone)


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_regression_head_without_pooling_gives_values_at_every_time(activation: str) -> None:
    head = RegressionHeadConfig(outputs=2, pooling="none", hidden=5, activation=activation)  # type: ignore[arg-type]
    model, x = small_model("tcnca", head=head), _tokens()
    values = model(x).logits.detach()
    assert values.shape == (3, 7, 2)
    assert_close(values, _through(model, _features(model, x), activation))


def test_regression_has_a_bias_and_classifiers_have_none() -> None:
    assert "head.output.bias" in small_model(head=RegressionHeadConfig()).state_dict()
    assert "head.output.bias" not in small_model(head=ClassifierHeadConfig()).state_dict()


def _pair(combination: str = "concat", **fields: Any) -> SequenceModel:
    return small_model("tcnca", causal=False, head=PairHeadConfig(num_classes=3, combination=combination, **fields))  # type: ignore[arg-type]


@POOLINGS
@pytest.mark.parametrize("hidden", [None, 5])
def test_concatenated_pair_is_second_then_first(pooling: str, hidden: int | None) -> None:
    model = _pair("concat", pooling=pooling, hidden=hidden)
    first, second, lengths2 = _tokens(), _tokens(3, 9), torch.tensor([9, 2, 5])
    u = _summary(_features(model, first, lengths=LENGTHS), LENGTHS, pooling)
    v = _summary(_features(model, second, lengths=lengths2), lengths2, pooling)
    logits = model(first, second, lengths=LENGTHS, lengths2=lengths2).logits
    assert_close(logits.detach(), _through(model, torch.cat([v, u], -1)))


@POOLINGS
@pytest.mark.parametrize("hidden", [None, 5])
def test_features_of_a_pair_are_both_their_product_and_their_difference(pooling: str, hidden: int | None) -> None:
    model = _pair("features", pooling=pooling, hidden=hidden)
    first, second = _tokens(), _tokens(3, 9)
    u = _summary(_features(model, first), torch.full((3,), 7), pooling)
    v = _summary(_features(model, second), torch.full((3,), 9), pooling)
    logits = model(first, second).logits
    assert_close(logits.detach(), _through(model, torch.cat([u, v, u * v, u - v], -1)))


@pytest.mark.parametrize("combination", ["concat", "features"])
@torch.no_grad()
def test_the_order_of_a_pair_matters(combination: str) -> None:
    model, first, second = _pair(combination), _tokens(), _tokens()
    difference = model(first, second).logits - model(second, first).logits
    assert bool((difference.abs().amax(1) > 1e-3).all())


def test_one_encoder_reads_both_documents() -> None:
    model, first, second = _pair("features", pooling="mean"), _tokens(), _tokens()
    # Equal documents have equal features, so the difference is zero and its weights do not matter.
    with torch.no_grad():
        model.head.output.weight[:, 3 * 8 :] = 1e6  # type: ignore[union-attr, operator]
        assert float(model(first, first).logits.abs().max()) < 1e3
        assert float(model(first, second).logits.abs().max()) > 1e3


def test_a_causal_pair_model_reads_whole_documents() -> None:
    model = small_model("mega", head=PairHeadConfig(pooling="last"))
    assert not model.streams
    assert model(_tokens(), _tokens()).state is None


def test_pair_head_asks_for_two_documents_and_others_for_one() -> None:
    with pytest.raises(InputError, match="second: got None"):
        _pair()(_tokens())
    with pytest.raises(InputError, match="second: got a tensor"):
        small_model()(_tokens(), _tokens())


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tie_embeddings", "untied"])
def test_language_model_head_reads_with_the_embedding_or_a_matrix_of_its_own(tied: bool) -> None:
    model, x = small_model("tcnca", head=LanguageModelHeadConfig(tie_embeddings=tied)), _tokens()
    own = dict(model.named_parameters()).get("head.weight")
    assert (own is None) == tied
    matrix = model.embedding.weight if own is None else own
    assert_close(model(x).logits.detach(), (_features(model, x) @ matrix.T).detach())


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


@pytest.mark.parametrize("norm", ["layer", "scale", "rms", "batch"])
def test_last_norm_without_affine_is_one_with_scales_of_one(norm: str) -> None:
    affine, plain = (small_model("tcnca", norm=norm, final_norm_affine=choice) for choice in (True, False))
    weights = affine.state_dict()
    learned = weights.keys() - plain.state_dict().keys()
    assert learned == ({"norm.weight"} if norm in ("scale", "rms") else {"norm.weight", "norm.bias"})
    plain.load_state_dict({name: value for name, value in weights.items() if name not in learned})
    x = _tokens()
    with torch.no_grad():
        assert float((affine(x).logits - plain(x).logits).abs().max()) > 1e-3
        for name in learned:
            weights[name].fill_(float(name == "norm.weight"))
        assert_close(affine(x).logits, plain(x).logits)


def test_post_norm_models_have_no_last_norm() -> None:
    assert small_model("tcnca", prenorm=False).norm is None


def test_embeddings_are_scaled_by_the_root_of_the_width() -> None:
    plain = small_model("tcnca", head=LanguageModelHeadConfig(tie_embeddings=False))
    scaled = small_model(
        "tcnca",
        head=LanguageModelHeadConfig(tie_embeddings=False),
        input=TokenInputConfig(vocab_size=VOCABULARY, scale_embeddings=True),
    )
    scaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        scaled.embedding.weight.div_(plain.config.d_model**0.5)
    x = _tokens()
    assert_close(scaled(x).logits.detach(), plain(x).logits.detach())


@pytest.mark.parametrize("features", [1, 3])
def test_real_values_enter_as_a_vector_a_feature_plus_a_bias(features: int) -> None:
    model = small_model("tcnca", input=ValueInputConfig(features=features), head=RegressionHeadConfig())
    embedding: Any = model.embedding
    x = torch.randn(2, 5, features, dtype=torch.float64)
    expected = embedding.bias + sum(x[..., i : i + 1] * embedding.weight[i] for i in range(features))
    assert_close(embedding(x, None).detach(), expected.detach())
    if features == 1:
        assert_close(model(x[..., 0]).logits.detach(), model(x).logits.detach())


def test_dropout_of_a_head_is_for_training() -> None:
    model, x = small_model("tcnca", head=ClassifierHeadConfig(hidden=50, dropout=0.5)), _tokens()
    with torch.no_grad():
        assert torch.equal(model(x).logits, model(x).logits)
        model.head.train()
        assert not torch.equal(model(x).logits, model(x).logits)


def test_head_of_a_configuration_alone_decides_the_outputs() -> None:
    shapes = {
        "language model": (small_config("tcnca"), (3, 7, VOCABULARY)),
        "classifier": (small_config("tcnca", head=ClassifierHeadConfig(num_classes=4)), (3, 4)),
        "classifier of every token": (
            small_config("tcnca", head=ClassifierHeadConfig(num_classes=4, pooling="none")),
            (3, 7, 4),
        ),
        "regression": (small_config("tcnca", head=RegressionHeadConfig(outputs=2)), (3, 2)),
    }
    for name, (config, shape) in shapes.items():
        assert small_model(config)(_tokens()).logits.shape == shape, name


@pytest.mark.parametrize(
    "head", [RegressionHeadConfig(outputs=2, pooling="none"), ClassifierHeadConfig(num_classes=2, pooling="none")]
)
def test_answers_at_every_time_are_zero_in_the_padding(head: RegressionHeadConfig | ClassifierHeadConfig) -> None:
    model = small_model(head=head)
    tokens = torch.randint(VOCABULARY, (2, 6))
    logits = model(tokens, lengths=[6, 3]).logits
    assert not logits[1, 3:].any()
    assert logits[1, :3].all()
    packed = model(tokens.view(1, -1), cu_seqlens=[0, 6, 9, 12]).logits
    assert_close(packed[0, :6], logits[0])
