"""Padding of any kind and anywhere: each real token gets what it would get alone, and so do gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca import (
    ClassifierHeadConfig,
    ModelConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
)
from tcnca.layers import NORM_KINDS
from tests.comparison import assert_close
from tests.examples import FAMILY, VOCABULARY, small_config, small_model
from tests.models.gradients import assert_gradients_close, gradients

TIME = 14
LENGTHS = (14, 5, 1, 9, 0)
PADDINGS = ("right", "left", "holes")

EVERY = ClassifierHeadConfig(num_classes=3, pooling="none", hidden=5)
CASES: dict[str, ModelConfig] = {family: small_config(family) for family in FAMILY}
CASES |= {f"{family}-bidirectional": small_config(family, causal=False, head=EVERY) for family in FAMILY}
for _causal in (True, False):
    _way = "causal" if _causal else "bidirectional"
    for _position in ("none", "rotary", "rope"):
        CASES[f"{_way}-{_position}"] = small_config("tcnca", causal=_causal, head=EVERY, position=_position)
    for _function in ("relu2", "laplace"):
        CASES[f"{_way}-{_function}"] = small_config(
            "mega", causal=_causal, head=EVERY, **{"attention.activation": _function}
        )
        CASES[f"{_way}-full-{_function}"] = small_config(
            "mega-full", causal=_causal, head=EVERY, **{"attention.activation": _function}
        )
    for _method in ("scan", "recurrent"):
        CASES[f"{_way}-{_method}"] = small_config("mega", causal=_causal, head=EVERY, backend=_method, truncation=6)
    for _norm in NORM_KINDS:
        # Not with a linear mixer: the norm after it would leave nothing of the scale of the norm before, whose gradient
        # would be all rounding.
        CASES[f"{_way}-{_norm}-post"] = small_config(
            "tcnca-simple", causal=_causal, head=EVERY, norm=_norm, prenorm=False
        )
    CASES[f"{_way}-batch-everywhere"] = small_config(
        "tcnca", causal=_causal, head=EVERY, norm="batch", **{"mixer.norm": "batch", "mixer.bias": True}
    )


def _mask(padding: str) -> Tensor:
    """Where the real tokens of rows of `LENGTHS` stand."""
    places = torch.arange(TIME)
    lengths = torch.tensor(LENGTHS).unsqueeze(1)
    if padding == "right":
        return places < lengths
    if padding == "left":
        return places >= TIME - lengths
    order = torch.stack([torch.randperm(TIME) for _ in LENGTHS])
    return order < lengths


def _described(mask: Tensor, padding: str) -> dict[str, Any]:
    return {"lengths": mask.sum(1)} if padding == "right" else {"attention_mask": mask}


def _loss(logits: Tensor, weights: Tensor) -> Tensor:
    return (logits * weights[..., : logits.shape[-1]]).sum()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("padding", PADDINGS)
def test_each_token_and_every_gradient_as_if_alone(name: str, padding: str) -> None:
    model, mask = small_model(CASES[name]), _mask(padding)
    x, weights = torch.randint(VOCABULARY, mask.shape), torch.randn(*mask.shape, VOCABULARY, dtype=torch.float64)
    logits = model(x, **_described(mask, padding)).logits
    loss = torch.zeros((), dtype=torch.float64)
    for row, real in enumerate(mask):
        if real.any():
            alone = model(x[row, real].unsqueeze(0)).logits[0]
            assert_close(logits[row, real], alone, f"row {row}")
            loss = loss + _loss(alone, weights[row, real])
    assert_gradients_close(gradients(_loss(logits[mask], weights[mask]), model), gradients(loss, model))


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
@pytest.mark.parametrize("padding", PADDINGS)
def test_pooled_features_are_those_of_real_tokens(family: str, causal: bool, pooling: str, padding: str) -> None:
    head = ClassifierHeadConfig(num_classes=3, pooling=pooling, hidden=5)  # type: ignore[arg-type]
    model, mask = small_model(family, causal=causal, head=head), _mask(padding)
    x = torch.randint(VOCABULARY, mask.shape)
    logits = model(x, **_described(mask, padding)).logits
    for row, real in enumerate(mask):
        if real.any():
            assert_close(logits[row], model(x[row, real].unsqueeze(0)).logits[0], f"row {row}")
    assert bool(torch.isfinite(logits[-1]).all()), "a row without tokens"


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("padding", PADDINGS)
def test_logits_of_a_language_model_are_zero_in_the_padding(family: str, padding: str) -> None:
    model, mask = small_model(family), _mask(padding)
    logits = model(torch.randint(VOCABULARY, mask.shape), **_described(mask, padding)).logits
    assert not logits[~mask].any()
    assert bool(logits[mask].any(-1).all())


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("padding", PADDINGS)
def test_nan_in_the_padding_does_not_leak(family: str, causal: bool, features: int, padding: str) -> None:
    head, inputs = RegressionHeadConfig(outputs=2, pooling="none"), ValueInputConfig(features=features, norm=True)
    model, mask = small_model(family, causal=causal, head=head, input=inputs), _mask(padding)
    shape = (*mask.shape, features) if features > 1 else mask.shape
    clean = torch.randn(shape, dtype=torch.float64)
    clean[~mask] = 0.0
    spoilt = clean.clone()
    spoilt[~mask] = float("nan")
    weights = torch.randn(*mask.shape, 2, dtype=torch.float64)
    results = []
    for x in (clean.requires_grad_(), spoilt.requires_grad_()):
        logits = model(x, **_described(mask, padding)).logits[mask]
        loss = _loss(logits, weights[mask])
        (by_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        results.append((logits, gradients(loss, model)))
        assert not by_input[~mask].any()
        assert bool(torch.isfinite(by_input).all())
    assert torch.equal(results[0][0], results[1][0])
    assert_gradients_close(results[1][1], results[0][1])


@pytest.mark.parametrize("name", [*FAMILY, "causal-rope", "causal-rotary", "causal-full-laplace", "causal-steps"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("inplace", [False, True], ids=["new-state", "in-place"])
@torch.no_grad()
def test_state_of_a_padded_call_goes_on(name: str, padding: str, inplace: bool) -> None:
    model = small_model(CASES[name])
    rows: list[list[int]] = [[] for _ in LENGTHS]
    state = None
    for call in range(4):
        # The last call is a single token, as in generation; rows are at different positions by then.
        mask = _mask(padding).roll(call, 0) if call < 3 else torch.ones(len(LENGTHS), 1, dtype=torch.bool)
        x = torch.randint(VOCABULARY, mask.shape)
        described = _described(mask, padding) if call < 3 else {}
        logits, state = model(x, state=state, inplace=inplace, **described)
        for row, real in enumerate(mask):
            rows[row] += x[row, real].tolist()
            new = int(real.sum())
            if new:
                alone = model(torch.tensor([rows[row]])).logits[0, -new:]
                assert_close(logits[row, real], alone, f"call {call}, row {row}")


@pytest.mark.parametrize("family", FAMILY)
@torch.no_grad()
def test_steps_in_which_only_some_rows_take_part(family: str) -> None:
    model, x = small_model(family), torch.randint(VOCABULARY, (2, 12))
    expected, state = model(x).logits, model.initial_state(2)
    seen = [0, 0]
    for step in range(18):
        rows = [0, 1] if step % 3 == 0 else [step % 3 - 1]
        lengths = [int(row in rows and seen[row] < 12) for row in range(2)]
        token = torch.stack([x[row, min(seen[row], 11)] for row in range(2)]).unsqueeze(1)
        logits, state = model(token, lengths=lengths, state=state, inplace=True)
        for row in range(2):
            if lengths[row]:
                assert_close(logits[row, 0], expected[row, seen[row]], f"row {row}, token {seen[row]}")
                seen[row] += 1
    assert seen == [12, 12]


@torch.no_grad()
def test_padding_does_not_use_up_the_reach_of_full_attention() -> None:
    # The bias reaches over 64 tokens: enough for the 4 real ones, too few for the 75 places.
    model, x = small_model("mega-full"), torch.randint(VOCABULARY, (1, 75))
    state, real = None, []
    for start in range(0, 75, 25):
        mask = torch.zeros(1, 25, dtype=torch.bool)
        mask[0, 3] = True
        real.append(start + 3)
        state = model(x[:, start : start + 25], attention_mask=mask, state=state).state
    logits = model(x[:, :1], state=state).logits
    assert_close(logits[:, 0], model(x[:, [*real, 0]]).logits[:, -1])


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@torch.no_grad()
def test_padding_index_means_a_mask(family: str, causal: bool) -> None:
    inputs = TokenInputConfig(vocab_size=VOCABULARY, pad_token_id=3)
    model = small_model(family, causal=causal, head=EVERY, input=inputs)
    x = torch.randint(VOCABULARY, (3, TIME))
    x[1, :4] = 3
    assert_close(model(x).logits, model(x, attention_mask=x != 3).logits)
    # Where padding is described otherwise the symbol is a token like all others.
    everything = torch.ones_like(x, dtype=torch.bool)
    assert_close(model(x, lengths=[TIME] * 3).logits, model(x, attention_mask=everything).logits)
    assert float((model(x).logits - model(x, attention_mask=everything).logits).abs().max()) > 1e-3


def test_embedding_of_the_padding_index_starts_at_zero() -> None:
    weight = SequenceModel(small_config(input=TokenInputConfig(vocab_size=VOCABULARY, pad_token_id=3))).embedding.weight
    assert not weight[3].any()
    assert bool(weight[:3].any(-1).all())


@pytest.mark.parametrize("norm", ["batch", "sync_batch"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("prenorm", [True, False], ids=["pre-norm", "post-norm"])
def test_batch_statistics_of_training_are_those_of_real_tokens(norm: str, causal: bool, prenorm: bool) -> None:
    config = small_config("tcnca", causal=causal, head=EVERY, norm=norm, prenorm=prenorm, **{"mixer.norm": norm})
    start = small_model(config).state_dict()
    short, mask = torch.randint(VOCABULARY, (2, 6)), _mask("holes")[:2, :8]
    lengths = mask.sum(1).clamp(max=6)
    mask = (torch.arange(8) < lengths.unsqueeze(1)).flip(1)
    longer = torch.randint(VOCABULARY, (2, 40))
    longer[:, :6] = short
    left = torch.randint(VOCABULARY, (2, 8))
    left[mask] = short[mask.flip(1)[:, :6]]
    found = []
    for x, described in (
        (short, {"lengths": lengths}),
        (longer, {"lengths": lengths}),
        (left, {"attention_mask": mask}),
    ):
        model = small_model(config).train()
        model.load_state_dict(start)
        logits = model(x, **described).logits
        real = described.get("attention_mask", torch.arange(x.shape[1]) < lengths.unsqueeze(1))
        found.append((logits[real], dict(model.named_buffers())))
    for logits, statistics in found[1:]:
        assert_close(logits, found[0][0])
        for name, buffer in statistics.items():
            assert_close(buffer.double(), found[0][1][name].double(), name)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("combination", ["concat", "features"])
def test_pairs_are_padded_each_on_its_own(padding: str, combination: str) -> None:
    model = small_model("tcnca", causal=False, head=PairHeadConfig(combination=combination))  # type: ignore[arg-type]
    mask, mask2 = _mask(padding), _mask(padding).roll(1, 0)
    x, second = (torch.randint(VOCABULARY, mask.shape) for _ in range(2))
    described = _described(mask, padding)
    described |= {f"{name}2": value for name, value in _described(mask2, padding).items()}
    logits = model(x, second, **described).logits
    for row in range(len(LENGTHS)):
        if mask[row].any() and mask2[row].any():
            alone = model(x[row, mask[row]].unsqueeze(0), second[row, mask2[row]].unsqueeze(0)).logits[0]
            assert_close(logits[row], alone, f"row {row}")


@pytest.mark.parametrize("kind", ["list", "int32", "int64"])
def test_lengths_may_be_any_whole_numbers(kind: str) -> None:
    model, x = small_model("mega"), torch.randint(VOCABULARY, (2, 6))
    lengths = {"list": [4, 6], "int32": torch.tensor([4, 6], dtype=torch.int32), "int64": torch.tensor([4, 6])}[kind]
    assert_close(model(x, lengths=lengths).logits[0, :4], model(x[:1, :4]).logits[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.long], ids=str)
def test_mask_may_be_truths_or_ones_and_zeros(dtype: torch.dtype) -> None:
    model, x = small_model("mega"), torch.randint(VOCABULARY, (1, 6))
    mask = torch.tensor([[0, 1, 1, 0, 1, 1]]).to(dtype)
    assert_close(model(x, attention_mask=mask).logits[:, [1, 2, 4, 5]], model(x[:, [1, 2, 4, 5]]).logits)
