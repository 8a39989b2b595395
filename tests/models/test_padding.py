"""Padding anywhere and packed documents: each valid token gets what it would get alone, and so do gradients."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca import (
    CDILConfig,
    ClassifierHeadConfig,
    ModelConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
)
from tcnca.models import packing
from tests.comparison import assert_close
from tests.examples import BIDIRECTIONAL, FAMILY, VARIANTS, VOCABULARY, pairwise, small_config, small_model
from tests.models.gradients import assert_gradients_close, gradients

TIME = 14
LENGTHS = (14, 5, 1, 9, 0)
PADDINGS = ("right", "left", "holes")
PACKED = [5, 0, 9, 4, 1, 13, 0]

EVERY = ClassifierHeadConfig(num_classes=3, pooling="none", hidden=5)
CASES: dict[str, ModelConfig] = VARIANTS | {
    f"{name}-bidirectional": VARIANTS[name].override(causal=False, head=EVERY) for name in BIDIRECTIONAL
}
CASES["cdil"] = small_config("tcn-mlp", mixer=CDILConfig(depth=3), causal=False, head=EVERY, norm="none")


def _mask(padding: str) -> Tensor:
    """Return where the valid tokens of rows of `LENGTHS` are."""
    lengths = torch.tensor(LENGTHS).unsqueeze(1)
    if padding == "right":
        return torch.arange(TIME) < lengths
    if padding == "left":
        return torch.arange(TIME) >= TIME - lengths
    return torch.stack([torch.randperm(TIME) for _ in LENGTHS]) < lengths


def _described(mask: Tensor, padding: str) -> dict[str, Any]:
    return {"lengths": mask.sum(1)} if padding == "right" else {"attention_mask": mask}


def _starts(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape)


def _check(model: SequenceModel, rows: list[Tensor], logits: Tensor, weights: Tensor) -> None:
    """Compare `logits` (`[tokens, outputs]`) of all rows, and gradients, with those of each row alone."""
    alone = torch.cat([model(row.unsqueeze(0)).logits[0] for row in rows if len(row)])
    assert_close(logits, alone)
    losses = [(part * weights[:, : part.shape[1]]).sum() for part in (logits, alone)]
    assert_gradients_close(*(gradients(loss, model) for loss in losses))


@pytest.mark.parametrize(("name", "padding"), list(zip(CASES, itertools.cycle(PADDINGS), strict=False)))
def test_padded_rows_equal_rows_alone(name: str, padding: str) -> None:
    model, mask = small_model(CASES[name]), _mask(padding)
    x, weights = _tokens(*mask.shape), torch.randn(*mask.shape, VOCABULARY, dtype=torch.float64)
    logits = model(x, **_described(mask, padding)).logits
    assert not logits[~mask].any(), "padding has zeros"
    _check(model, [row[valid] for row, valid in zip(x, mask, strict=True)], logits[mask], weights[mask])


@pytest.mark.parametrize("name", CASES)
def test_packed_documents_equal_documents_alone(name: str) -> None:
    model, x = small_model(CASES[name]), _tokens(1, sum(PACKED))
    logits = model(x, cu_seqlens=_starts(PACKED)).logits
    weights = torch.randn(sum(PACKED), VOCABULARY, dtype=torch.float64)
    _check(model, list(x[0].split(PACKED)), logits[0], weights)


@pytest.mark.parametrize(
    ("family", "causal", "pooling", "padding"),
    pairwise(list(FAMILY), [True, False], ["mean", "last", "first"], [*PADDINGS, "packed"]),
)
@torch.no_grad()
def test_pooled_features_are_those_of_valid_tokens(family: str, causal: bool, pooling: str, padding: str) -> None:
    head = ClassifierHeadConfig(num_classes=3, pooling=pooling, hidden=5)  # type: ignore[arg-type]
    model = small_model(family, causal=causal, head=head)
    if padding == "packed":
        x = _tokens(1, sum(PACKED))
        rows, logits = x[0].split(PACKED), model(x, cu_seqlens=_starts(PACKED)).logits
    else:
        mask = _mask(padding)
        x = _tokens(*mask.shape)
        rows = [row[valid] for row, valid in zip(x, mask, strict=True)]
        logits = model(x, **_described(mask, padding)).logits
    assert logits.shape == (len(rows), 3)
    assert bool(torch.isfinite(logits).all()), "also rows without tokens"
    for index, row in enumerate(rows):
        if len(row):
            assert_close(logits[index], model(row.unsqueeze(0)).logits[0], f"row {index}")


@pytest.mark.parametrize(
    ("family", "causal", "features", "padding"), pairwise(list(FAMILY), [True, False], [1, 3], PADDINGS)
)
def test_nan_at_padding_does_not_leak(family: str, causal: bool, features: int, padding: str) -> None:
    head, inputs = RegressionHeadConfig(outputs=2, pooling="none"), ValueInputConfig(features=features, norm=True)
    model, mask = small_model(family, causal=causal, head=head, input=inputs), _mask(padding)
    clean = torch.randn((*mask.shape, features) if features > 1 else mask.shape, dtype=torch.float64)
    results = []
    for value in (0.0, float("nan")):
        x = clean.clone()
        x[~mask] = value
        logits = model(x.requires_grad_(), **_described(mask, padding)).logits[mask]
        loss = logits.square().sum()
        (by_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        results.append((logits, gradients(loss, model)))
        assert not by_input[~mask].any()
        assert bool(torch.isfinite(by_input).all())
    assert torch.equal(results[0][0], results[1][0])
    assert_gradients_close(results[1][1], results[0][1])


@pytest.mark.parametrize(
    ("name", "padding", "inplace"),
    pairwise([*FAMILY, "rope-laplace-rms", "full-rotary-laplace-rms-post"], PADDINGS, [False, True]),
)
@torch.no_grad()
def test_state_after_padding_continues(name: str, padding: str, inplace: bool) -> None:
    model = small_model(VARIANTS[name])
    rows: list[list[int]] = [[] for _ in LENGTHS]
    state = None
    for call in range(4):
        # The last call is a single token, as in generation; rows are at different positions by then.
        mask = _mask(padding).roll(call, 0) if call < 3 else torch.ones(len(LENGTHS), 1, dtype=torch.bool)
        x = _tokens(*mask.shape)
        described = _described(mask, padding) if call < 3 else {}
        logits, state = model(x, state=state, inplace=inplace, **described)
        for row, valid in enumerate(mask):
            rows[row] += x[row, valid].tolist()
            new = int(valid.sum())
            if new:
                alone = model(torch.tensor([rows[row]])).logits[0, -new:]
                assert_close(logits[row, valid], alone, f"call {call}, row {row}")


@pytest.mark.parametrize("family", FAMILY)
@torch.no_grad()
def test_state_of_packed_documents_has_a_row_for_each(family: str) -> None:
    model = small_model(family)
    first, second = [3, 0, 9, 4, 1], [0, 5, 1, 6, 2]
    past, future, step = _tokens(1, sum(first)), _tokens(1, sum(second)), _tokens(5, 1)
    state = model(past, cu_seqlens=_starts(first)).state
    assert state is not None
    assert state.batch_size == 5
    packed, state = model(future, cu_seqlens=_starts(second), state=state)
    last = model(step, state=state).logits
    for index, (before, after) in enumerate(zip(past.split(first, 1), future.split(second, 1), strict=True)):
        alone = model(torch.cat([before, after, step[index : index + 1]], 1)).logits
        start = _starts(second)[index]
        assert_close(packed[:, start : start + second[index]], alone[:, first[index] : -1], f"document {index}")
        assert_close(last[index], alone[0, -1:], f"step of document {index}")


@torch.no_grad()
def test_padding_does_not_count_for_the_reach_of_full_attention() -> None:
    # The bias reaches over 64 tokens: enough for the 4 valid ones, too few for all 76.
    model, x, state = small_model("mega-full"), _tokens(1, 75), None
    mask = torch.arange(25).unsqueeze(0) == 3
    for piece in x.split(25, 1):
        state = model(piece, attention_mask=mask, state=state).state
    logits = model(x[:, :1], state=state).logits
    assert_close(logits[:, 0], model(x[:, [3, 28, 53, 0]]).logits[:, -1])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@torch.no_grad()
def test_pad_token_id_implies_a_mask(causal: bool) -> None:
    inputs = TokenInputConfig(vocab_size=VOCABULARY, pad_token_id=3)
    model = small_model(causal=causal, head=EVERY, input=inputs)
    x = _tokens(3, TIME)
    x[1, :4] = 3
    assert_close(model(x).logits, model(x, attention_mask=x != 3).logits)
    # If padding is described otherwise, it is a token like all others.
    everything = torch.ones_like(x, dtype=torch.bool)
    assert_close(model(x, lengths=[TIME] * 3).logits, model(x, attention_mask=everything).logits)
    assert float((model(x).logits - model(x, attention_mask=everything).logits).abs().max()) > 1e-3


@pytest.mark.parametrize(("norm", "causal", "prenorm"), pairwise(["batch", "sync_batch"], [True, False], [True, False]))
def test_batch_statistics_of_training_are_those_of_valid_tokens(norm: str, causal: bool, prenorm: bool) -> None:
    config = small_config("tcnca", causal=causal, head=EVERY, norm=norm, prenorm=prenorm, **{"mixer.norm": norm})
    start, short, lengths = small_model(config).state_dict(), _tokens(2, 6), torch.tensor([6, 3])
    mask = (torch.arange(8) < lengths.unsqueeze(1)).flip(1)
    longer, left = _tokens(2, 40), _tokens(2, 8)
    longer[:, :6] = short
    left[mask] = short[torch.arange(6) < lengths.unsqueeze(1)]
    found = []
    for x, described in (
        (short, {"lengths": lengths}),
        (longer, {"lengths": lengths}),
        (left, {"attention_mask": mask}),
    ):
        model = small_model(config).train()
        model.load_state_dict(start)
        logits = model(x, **described).logits
        valid = described.get("attention_mask", torch.arange(x.shape[1]) < lengths.unsqueeze(1))
        found.append((logits[valid], dict(model.named_buffers())))
    for logits, statistics in found[1:]:
        assert_close(logits, found[0][0])
        for name, buffer in statistics.items():
            assert_close(buffer.double(), found[0][1][name].double(), name)


@pytest.mark.parametrize(("padding", "combination"), [("right", "concat"), ("holes", "features")])
@torch.no_grad()
def test_documents_of_a_pair_are_padded_separately(padding: str, combination: str) -> None:
    model = small_model("tcnca", causal=False, head=PairHeadConfig(combination=combination))  # type: ignore[arg-type]
    mask, mask2 = _mask(padding), _mask(padding).roll(1, 0)
    x, second = _tokens(*mask.shape), _tokens(*mask.shape)
    described = _described(mask, padding)
    described |= {f"{name}2": value for name, value in _described(mask2, padding).items()}
    logits = model(x, second, **described).logits
    for row in range(len(LENGTHS)):
        if mask[row].any() and mask2[row].any():
            alone = model(x[row, mask[row]].unsqueeze(0), second[row, mask2[row]].unsqueeze(0)).logits[0]
            assert_close(logits[row], alone, f"row {row}")


@pytest.mark.parametrize("name", [*FAMILY, "transformer-full", "transformer-xl", "shift-keys-rope", "sgconv", "s4d"])
@pytest.mark.parametrize("described", ["attention_mask", "lengths"])
def test_masks_and_lengths_without_padding_are_recognized(
    name: str, described: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = small_model(VARIANTS[name]), _tokens(2, TIME + 6)

    def results(with_description: bool) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        outputs, state = [], None
        for piece in x.split([TIME, 5, 1], 1):
            valid = torch.ones_like(piece) if described == "attention_mask" else [piece.shape[1]] * 2
            logits, state = model(piece, state=state, **({described: valid} if with_description else {}))
            outputs.append(logits)
        assert state is not None
        logits = torch.cat(outputs, 1)
        return logits, state.tensors(), gradients(logits.square().sum(), model)

    found, plain = results(True), results(False)
    assert torch.equal(found[0], plain[0])
    assert all(torch.equal(tensor, plain[1][path]) for path, tensor in found[1].items())
    assert_gradients_close(found[2], plain[2])
    # What is recognized changes nothing but the time that it takes.
    monkeypatch.setattr(packing, "is_host_readable", lambda tensor: False)
    padded = results(True)
    assert_close(found[0].detach(), padded[0].detach())
    assert_gradients_close(found[2], padded[2])
    positions = [
        {path: part for path, part in tensors.items() if "position" in path} for _, tensors, _ in (found, padded)
    ]
    assert all(torch.equal(part, positions[1][path]) for path, part in positions[0].items())


@torch.no_grad()
def test_a_trace_of_a_mask_without_padding_takes_padding() -> None:
    model, x, mask = small_model("mega"), _tokens(2, 9), torch.ones(2, 9, dtype=torch.bool)

    class Masked(torch.nn.Module):  # traces have no keyword arguments
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            logits: Tensor = self.model(x, attention_mask=mask, return_state=False).logits
            return logits

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sizes become constants
        traced = torch.jit.trace(Masked(), (x, mask), check_trace=False)
    mask[1, :4] = False
    assert_close(traced(x, mask), model(x, attention_mask=mask).logits)


@torch.no_grad()
def test_types_of_lengths_and_masks() -> None:
    model, x = small_model("mega"), _tokens(2, 6)
    expected = model(x, lengths=torch.tensor([4, 6])).logits
    assert torch.equal(model(x, lengths=[4, 6]).logits, expected)
    assert torch.equal(model(x, lengths=torch.tensor([4, 6], dtype=torch.int32)).logits, expected)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    for dtype in (torch.bool, torch.uint8, torch.long):
        assert_close(model(x, attention_mask=mask.to(dtype)).logits, expected)
