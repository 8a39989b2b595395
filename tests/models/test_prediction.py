"""`SequenceModel.predict` answers on raw inputs of any form as the model does on each of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tcnca.models.prediction
from tcnca import (
    AttentionConfig,
    ClassifierHeadConfig,
    InputError,
    RegressionHeadConfig,
    ValueInputConfig,
    VocabularyError,
    load,
)
from tests.examples import FAMILY, small_model
from tests.inference.models import assert_near, saved

TEXTS = ["fine", "", "a much longer text than the others, of several chunks", "é"]


def test_texts_get_class_names_and_probabilities(tmp_path: Path) -> None:
    model = saved("classification", tmp_path)
    model.train()
    found = load(tmp_path).predict(TEXTS, batch_size=2)
    assert found.classes == ("bad", "fair", "good")
    assert found.labels is not None
    assert found.probabilities is not None
    assert len(found) == 4
    for text, label, chances in zip(TEXTS, found.labels, found.probabilities, strict=True):
        alone = model.predict(text)
        assert alone.labels == [label]
        assert_near(np.asarray(alone.probabilities)[0], chances, atol=1e-6)
        if text:
            with torch.no_grad():
                logits = load(tmp_path)(model.encode(text)).logits[0]
            assert_near(logits.softmax(-1), chances, atol=1e-6)
            assert found.classes[int(logits.argmax())] == label
    assert model.training  # as before the call
    assert model.predict([text.encode() for text in TEXTS]).labels == found.labels
    assert model.predict(np.array(TEXTS)).labels == found.labels
    assert len(model.predict([])) == 0


def test_sequences_are_cut_as_in_training(tmp_path: Path) -> None:
    model = saved("classification", tmp_path, max_length=4)
    found = model.predict(["good film", "good"]).probabilities
    assert found is not None
    assert_near(found[0], found[1], atol=1e-6)


def test_pairs_are_compared(tmp_path: Path) -> None:
    model = saved("pairs", tmp_path)
    found = model.predict(["one", "three four"], ["two", "x"])
    assert found.labels is not None
    assert set(found.labels) <= {"no", "yes"}
    with torch.no_grad():
        logits = model(model.encode("three four"), model.encode("x")).logits[0]
    assert_near(logits.softmax(-1), np.asarray(found.probabilities)[1], atol=1e-6)
    with pytest.raises(InputError, match=r"^second: expected the second texts of pairs"):
        model.predict(["one"])
    with pytest.raises(InputError, match=r"^second: expected 1 sequences, as many as in inputs, got 2"):
        model.predict("one", ["two", "three"])


def test_arrays_tensors_and_lists_of_different_lengths_are_the_same(tmp_path: Path) -> None:
    model = saved("signals", tmp_path)
    x = np.random.default_rng(0).normal(5, 2, (5, 9, 2))
    expected = model.predict(x).probabilities
    for form in (
        torch.from_numpy(x),
        torch.from_numpy(x).float(),
        list(x),
        x.tolist(),
        [torch.tensor(row) for row in x],
    ):
        assert_near(model.predict(form).probabilities, expected, atol=1e-6)
    ragged = model.predict([x[0], x[1][:4], x[2][:1]]).probabilities
    assert_near(np.asarray(ragged)[1], np.asarray(model.predict(x[1][:4]).probabilities)[0], atol=1e-6)


def test_regressions_answer_in_units_of_the_data(tmp_path: Path) -> None:
    model = saved("regression", tmp_path)
    x = torch.randn(3, 8) * 2 + 5
    with torch.no_grad():
        assert_near(model.predict(x).values, model(x).logits, rtol=1e-5)
    assert model.predict([1.0, 2.0, 3.0]).values is not None
    assert model.predict([1.0, 2.0, 3.0]).labels is None


def test_pixels_are_bytes_of_the_size_of_training(tmp_path: Path) -> None:
    model = saved("image", tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (5, 3, 4), np.uint8)
    found = model.predict(images)
    with torch.no_grad():
        logits = model(torch.tensor(images.reshape(5, 12) / 255, dtype=torch.float32)).logits
    assert_near(found.probabilities, logits.softmax(-1), atol=1e-6)
    assert found.classes == ("0", "1")
    assert len(model.predict(images[0])) == 1
    for same in (images.astype(np.int64), [image.ravel().tolist() for image in images], images.reshape(5, 12) / 255):
        assert_near(model.predict(same).probabilities, found.probabilities, atol=1e-6)
    for wrong in (images.reshape(5, 12).astype(float), images.astype(int) + 256, images.reshape(5, 12) / 255 - 1):
        with pytest.raises(InputError, match=r"^inputs\[\d\]: expected pixels from 0 to 255 as whole numbers"):
            model.predict(wrong)
    with pytest.raises(InputError, match=r"^inputs\[0\]: expected 3×4 pixels"):
        model.predict(images[:, :2])


def test_recall_answers_with_the_symbol_after_the_last(tmp_path: Path) -> None:
    model = saved("recall", tmp_path)
    found = model.predict(["a 1 b 2 a", "b 2 b"])
    with torch.no_grad():
        logits = model(model.encode("b 2 b")).logits[0, -1]
    assert_near(np.asarray(found.probabilities)[1], logits.softmax(-1), atol=1e-6)


@pytest.mark.parametrize("family", FAMILY)
def test_forecasts_continue_series_of_different_lengths(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step equals a call of the model on all values before it; windows and batches do not matter."""
    monkeypatch.setattr(tcnca.models.prediction, "_WINDOW", 7)
    head = RegressionHeadConfig(outputs=2, pooling="none")
    model = small_model(family, torch.float32, input=ValueInputConfig(features=2), head=head)
    series = [np.random.default_rng(length).normal(size=(length, 2)) for length in (3, 17, 30, 1)]
    found = model.predict(series, steps=4, batch_size=3).values
    assert found is not None
    assert found.shape == (4, 4, 2)
    for values, forecast in zip(series, found, strict=True):
        past = torch.tensor(values, dtype=torch.float32)[None]
        with torch.no_grad():
            for expected in forecast:
                step = model(past).logits[:, -1:]
                assert_near(expected, step[0, 0], rtol=2e-3, atol=2e-4)
                past = torch.cat([past, torch.tensor(expected).view(1, 1, 2)], 1)


def test_half_precision_takes_raw_values(tmp_path: Path) -> None:
    model = saved("regression", tmp_path)
    x = np.random.default_rng(0).normal(5, 2, (2, 6))
    exact = np.asarray(model.predict(x).values)
    assert_near(model.bfloat16().predict(x).values, exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("kind", "inputs", "options", "message"),
    [
        ("language", "text", {}, "model: expected a model that predicts .* got a language model; .* `tcnca generate`"),
        ("signals", "text", {}, r"inputs\[0\]: expected numbers, since the model was trained on values"),
        ("signals", np.zeros((2, 5, 3)), {}, r"inputs\[0\]: expected 2 features .* got shape \[5, 3\]"),
        ("signals", [np.zeros((4, 2)), np.zeros((0, 2))], {}, r"inputs\[1\]: expected at least one time step"),
        ("signals", [np.zeros((4, 2)), np.full((5, 2), np.nan)], {}, r"inputs\[1\], time step 0: expected finite"),
        ("signals", [[[1, 2], [3]]], {}, r"inputs\[0\]: expected numbers, got a list of unequal parts"),
        ("signals", 3, {}, "inputs: expected texts, arrays or a list of them, got a int"),
        ("classification", "text", {"steps": 2}, "steps: expected 1 for a model of classification, got 2"),
        ("classification", "text", {"batch_size": 0}, "batch_size: expected at least 1"),
        ("forecast", np.zeros((4, 2)), {"steps": 0}, "steps: expected at least 1, got 0"),
        ("classification", np.zeros((2, 3)), {}, r"inputs\[0\]: expected a text, or tokens"),
        ("classification", "\ud800", {}, r"inputs\[0\]: expected valid Unicode"),
        ("recall", b"a \xff", {}, r"inputs\[0\]: text: expected words out of a b 1 2 .* got '\\\\xff'"),
    ],
)
def test_wrong_inputs(kind: str, inputs: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        saved(kind, tmp_path).predict(inputs, **options)


def test_words_and_tokens_outside_the_vocabulary(tmp_path: Path) -> None:
    model = saved("recall", tmp_path)
    with pytest.raises(VocabularyError, match=r"^inputs\[1\]: text: expected words out of a b 1 2"):
        model.predict(["a 1 a", "a 3 a"])
    with pytest.raises(VocabularyError, match=r"^inputs\[0\]: expected tokens of the vocabulary, 0 to 3, got 0 to 4"):
        model.predict(np.array([[0, 4]]))


def test_sequences_beyond_a_simple_position_bias_are_named() -> None:
    attention = AttentionConfig(d_key=4, d_value=6, chunk_size=None, max_length=8)
    head = RegressionHeadConfig(pooling="none")
    model = small_model("mega-full", torch.float32, attention=attention, input=ValueInputConfig(), head=head)
    assert model.predict([np.zeros(5), np.zeros(6)], steps=3).values is not None
    message = r"^inputs\[1\]: expected at most 8 .* got 7 and 2 steps of a forecast; cut it"
    with pytest.raises(InputError, match=message):
        model.predict([np.zeros(5), np.zeros(7)], steps=3)


def test_outputs_at_every_step_are_not_predictions() -> None:
    model = small_model("tcnca", head=ClassifierHeadConfig(pooling="none"))
    with pytest.raises(InputError, match="with an output at every time step; call the model itself"):
        model.predict([[1, 2]])
