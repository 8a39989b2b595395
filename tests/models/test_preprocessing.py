"""A saved model takes raw data and answers in the units of the data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tcnca import (
    ClassifierHeadConfig,
    ConfigError,
    InputError,
    Preprocessing,
    RegressionHeadConfig,
    SequenceModel,
    ValueInputConfig,
    VocabularyError,
    build,
    load,
    save,
)
from tests.comparison import assert_close
from tests.examples import small_config

MEAN, STD = (1000.0, -3.0), (100.0, 0.25)
INPUT = ValueInputConfig(features=2)
CLASSES = Preprocessing(task="classification", input_mean=MEAN, input_std=STD, class_names=("flat", "wave"))


def _signals(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return raw signals, far from mean 0 and deviation 1, and their classes."""
    labels = torch.arange(rows) % 2
    wave = torch.sin(torch.arange(24) * 0.7) * labels.unsqueeze(1)
    standard = wave.unsqueeze(-1) + 0.3 * torch.randn(rows, 24, 2)
    return standard * torch.tensor(STD) + torch.tensor(MEAN), labels


def test_classifier_trained_on_raw_signals_answers_on_raw_signals_when_loaded(tmp_path: Path) -> None:
    config = small_config("tcn-mlp", causal=False, input=INPUT, head=ClassifierHeadConfig(num_classes=2))
    model = SequenceModel(config, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        x, labels = _signals(16)
        optimizer.zero_grad()
        F.cross_entropy(model(x).logits, labels).backward()
        optimizer.step()
    x, labels = _signals(64)
    with torch.no_grad():
        expected = model.eval()(x).logits
        loaded = load(save(model, tmp_path))
        assert torch.equal(loaded(x).logits, expected)
    assert float((expected.argmax(-1) == labels).float().mean()) > 0.9
    assert loaded.preprocessing == CLASSES
    assert loaded.class_names == ("flat", "wave")


@pytest.mark.parametrize("pooling", ["mean", "none"])
@torch.no_grad()
def test_regression_answers_in_the_units_of_the_data(pooling: Any, tmp_path: Path) -> None:
    head = RegressionHeadConfig(outputs=2, pooling=pooling)
    config = small_config(input=INPUT, head=head)
    facts = Preprocessing(task="regression", input_mean=MEAN, input_std=STD, target_mean=(50.0, 0.0), target_std=(5, 1))
    model, plain = build(config, preprocessing=facts).eval(), SequenceModel(config).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    x, lengths = _signals(3)[0], torch.tensor([24, 7, 1])
    standard = plain((x - torch.tensor(MEAN)) / torch.tensor(STD), lengths=lengths).logits
    expected = standard * torch.tensor((5.0, 1.0)) + torch.tensor((50.0, 0.0))
    got = load(save(model, tmp_path))(x, lengths=lengths).logits
    if pooling == "none":
        expected[~(torch.arange(24) < lengths.unsqueeze(1))] = 0
    assert_close(got, expected)
    # In half precision, too, raw values are standardized in float32 and outputs keep their digits.
    assert copy.deepcopy(model).bfloat16()(x).logits.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(model(x, lengths=lengths).logits, got, dtype=torch.bfloat16)


@torch.no_grad()
def test_statistics_survive_half_precision_reset_and_export() -> None:
    config = small_config("tcn-mlp", input=INPUT, head=ClassifierHeadConfig(num_classes=2))
    facts = Preprocessing(input_mean=(1003.7, 0.0), input_std=(0.5, 1.0))
    model = SequenceModel(config, facts).bfloat16()
    assert model.get_buffer("embedding.standardize.mean").tolist() == pytest.approx([1003.7, 0.0])
    with torch.device("meta"):
        empty = SequenceModel(config, facts)
    empty.to_empty(device="cpu").reset_parameters()
    assert empty.get_buffer("embedding.standardize.std").tolist() == [0.5, 1.0]
    x = torch.randn(2, 6, 2) + torch.tensor([1003.7, 0.0])
    program = torch.export.export(empty.eval(), (x,), {"return_state": False})
    assert_close(program.module()(x, return_state=False).logits, empty(x).logits)


def test_bytes_are_encoded_and_decoded(tmp_path: Path) -> None:
    facts = Preprocessing(task="language", byte_map=(10, 32, *range(97, 106)))
    model = load(save(SequenceModel(small_config(), facts), tmp_path))
    tokens = model.encode("a bad\n")
    assert tokens.tolist() == [[2, 1, 3, 2, 5, 0]]
    assert model.decode(tokens) == model.decode(tokens[0]) == b"a bad\n"
    assert model(model.encode(b"a")).logits.shape == (1, 1, 11)
    with pytest.raises(VocabularyError, match=r"^text: .*got b'Z'"):
        model.encode("aZ")
    with pytest.raises(InputError, match=r"^text: expected valid Unicode, got the unpaired surrogate '\\ud800'"):
        model.encode("a\ud800")
    with pytest.raises(VocabularyError, match=r"^tokens: expected 0 to 10"):
        model.decode(torch.tensor([11]))
    with pytest.raises(InputError, match=r"^tokens: expected one sequence"):
        model.decode(torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(InputError, match="saved without a byte map"):
        SequenceModel(small_config()).encode("a")


def test_words_are_encoded_and_decoded() -> None:
    model = SequenceModel(small_config(), Preprocessing(symbols=("[MAX", "1", "2", "]")))
    assert model.encode("[MAX 1 2 ]").tolist() == [[0, 1, 2, 3]]
    assert model.decode(torch.tensor([0, 2, 3])) == b"[MAX 2 ]"
    with pytest.raises(VocabularyError, match=r"^text: expected words out of \[MAX 1 2 \] .*got '3'"):
        model.encode("[MAX 3 ]")
    with pytest.raises(VocabularyError, match=r"^text: expected words out of .*got '\\\\xff'"):
        model.encode(b"1 \xff")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"input_mean": (1.0,)}, "input_mean, input_std: expected both"),
        ({"target_mean": (1.0,), "target_std": (1.0, 2.0)}, "target_mean, target_std: expected both"),
        ({"input_mean": (0.0,), "input_std": (0.0,)}, "input_std: expected numbers above 0"),
        ({"input_mean": (float("nan"),), "input_std": (1.0,)}, "input_mean: expected values, each a number"),
        ({"byte_map": (1, 256)}, r"byte_map: expected values, each an integer in \[0, 255\]"),
        ({"byte_map": (1, 1)}, "byte_map: expected different numbers"),
        ({"byte_map": (1,), "symbols": ("a",)}, "symbols: expected None together with byte_map"),
    ],
)
def test_preprocessing_with_wrong_values(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Preprocessing(**facts)


@pytest.mark.parametrize(
    ("changes", "facts", "message"),
    [
        (
            {"input": ValueInputConfig(), "head": ClassifierHeadConfig()},
            {"input_mean": MEAN, "input_std": STD},
            "preprocessing.input_mean: expected one of each feature, 1, got 2",
        ),
        (
            {"head": RegressionHeadConfig()},
            {"target_mean": MEAN, "target_std": STD},
            "preprocessing.target_mean: expected one of each feature, 1, got 2",
        ),
        ({"head": ClassifierHeadConfig()}, {"class_names": ("a", "b", "c")}, "head.num_classes: expected at least 3"),
        ({}, {"byte_map": tuple(range(12))}, "preprocessing.byte_map: expected at most vocab_size 11"),
    ],
)
def test_preprocessing_that_does_not_fit(changes: dict[str, Any], facts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        SequenceModel(small_config(**changes), Preprocessing(**facts))
