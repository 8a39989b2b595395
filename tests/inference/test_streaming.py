"""Endless streams: the answers of the parallel forward, in memory that does not grow, saved and continued exactly."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import tracemalloc
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import tcnca
from tcnca import (
    ClassifierHeadConfig,
    InputError,
    PairHeadConfig,
    Preprocessing,
    RegressionHeadConfig,
    SequenceModel,
    StateError,
    Stream,
    TokenInputConfig,
    ValueInputConfig,
    VocabularyError,
)
from tcnca.inference.streaming import StreamState
from tcnca.models.heads import PoolState
from tests.examples import FAMILY, VARIANTS, VOCABULARY, small_model

FORECAST = Preprocessing(
    task="forecast", input_mean=(100.0, -3.0), input_std=(20.0, 0.5), target_mean=(100.0, -3.0), target_std=(20.0, 0.5)
)
CLASSES = Preprocessing(task="classification", class_names=("calm", "storm"))
T = TypeVar("T")
BYTES = Preprocessing(task="language", byte_map=tuple(range(10, 127)))
TEXT = b"The first line.\nAnother one,\n\nand a last one without an end " * 2
# Rings of the small models have 2, 4 and 8 slots, chunks 4 tokens, and truncated kernels 6 or 1.
PERIOD = 24


def build(family: str, facts: Preprocessing, **changes: Any) -> SequenceModel:
    """Return a model with statistics of its data."""
    random = small_model(family, torch.float32, **changes)
    model = SequenceModel(random.config, facts).eval()
    model.load_state_dict(random.state_dict(), strict=False)
    return model


def forecaster(family: str = "tcnca") -> SequenceModel:
    head = RegressionHeadConfig(outputs=2, pooling="none")
    return build(family, FORECAST, input=ValueInputConfig(features=2), head=head)


def classifier(pooling: Any = "mean", **changes: Any) -> SequenceModel:
    head = ClassifierHeadConfig(num_classes=2, pooling=pooling)
    return build("tcnca", CLASSES, input=ValueInputConfig(), head=head, **changes)


def text_model(family: str = "tcnca") -> SequenceModel:
    return build(family, BYTES, input=TokenInputConfig(vocab_size=len(BYTES.byte_map or ())))


def some(value: T | None) -> T:
    assert value is not None
    return value


def series(time: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal([100, -3], [20, 0.5], (time, 2)).astype(np.float32)


def shifted(state: StreamState, by: int) -> StreamState:
    """The same state as after `by` more values, if it is a multiple of the period of rings and chunks."""
    return state.map(lambda tensor: tensor + by if tensor.dtype == torch.int64 and tensor.dim() == 1 else tensor)


def answer(stream: Stream, values: Any) -> Any:
    found = stream.push(values)
    return np.concatenate(
        [part.ravel() for part in (found.bits, found.probabilities, found.values) if part is not None]
    )


@pytest.mark.parametrize("family", FAMILY)
def test_a_forecast_has_the_next_values_in_the_units_of_the_data(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = forecaster(family), series(40)
    with torch.no_grad():
        expected = model(torch.from_numpy(x)[None]).logits[0].numpy()
    assert 50 < np.median(expected[:, 0]) < 150
    monkeypatch.setattr("tcnca.generation.prompts.PREFILL_TOKENS", 8)
    stream = Stream(model)
    pieces: list[Any] = [x[0], x[1].tolist(), torch.from_numpy(x[2:3]), x[3:4].astype(np.float64), x[4:30], x[30:]]
    found = [some(stream.push(piece).values) for piece in pieces]
    assert [len(each) for each in found] == [1, 1, 1, 1, 26, 10]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4)
    assert stream.position == 40
    np.testing.assert_allclose(expected[-1], some(model.predict(x).values)[0, 0], rtol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
def test_a_classifier_has_the_probabilities_so_far(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcnca.generation.prompts.PREFILL_TOKENS", 8)
    model, x = classifier(pooling), series(30)[:, 0]
    stream, begin = Stream(model), 0
    for end in (1, 2, 20, 30):
        found, expected = stream.push(x[begin:end] if end > 1 else float(x[0])), model.predict(x[:end])
        np.testing.assert_allclose(some(found.probabilities), some(expected.probabilities), atol=1e-5)
        assert (found.labels, found.classes) == (expected.labels, ("calm", "storm"))
        begin = end


def test_a_classifier_of_every_step_answers_each() -> None:
    model, x = classifier("none"), series(9)[:, 0]
    with torch.no_grad():
        logits = model(torch.from_numpy(x)[None]).logits[0]
    found = Stream(model).push(x)
    np.testing.assert_allclose(some(found.probabilities), logits.softmax(-1).numpy(), atol=1e-5)
    assert found.labels == [some(CLASSES.class_names)[index] for index in logits.argmax(-1)]


@pytest.mark.parametrize("family", FAMILY)
def test_a_language_model_has_bits_and_the_next_byte(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = text_model(family), TEXT[:60]
    whole = tcnca.score(model, text)
    monkeypatch.setattr("tcnca.generation.prompts.PREFILL_TOKENS", 8)
    stream = Stream(model)
    first = some(stream.push(b"").probabilities)
    pieces: list[Any] = [text[:1], text[1:30].decode(), bytearray(text[30:59]), text[59:]]
    found, following = [], []
    for piece in pieces:
        output = stream.push(piece)
        found.append(some(output.bits))
        following.append(some(output.probabilities))
    np.testing.assert_allclose(np.concatenate(found), whole, rtol=1e-4, atol=1e-4)
    assert stream.position == 60
    for place, probabilities in zip((0, 1, 30, 59), [first, *following[:-1]], strict=True):
        assert probabilities.shape == (1, 256)
        assert probabilities.sum() == pytest.approx(1, abs=1e-5)
        assert -np.log2(probabilities[0, text[place]]) == pytest.approx(whole[place], abs=1e-4)


def test_tokens_without_a_text() -> None:
    model = small_model(dtype=torch.float32)
    output = Stream(model).push([3, 1])
    assert (some(output.bits).shape, some(output.probabilities).shape) == ((2,), (1, VOCABULARY))


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("kind", ["text", "forecast"])
def test_a_saved_stream_continues_exactly(kind: str, family: str, tmp_path: Path) -> None:
    make = {"text": text_model, "forecast": forecaster}[kind]
    model, values = make(family), TEXT[:44] if kind == "text" else series(44)
    stream = Stream(model)
    stream.push(values[:21])
    stream.save(tmp_path / "app.state")
    assert [path.name for path in tmp_path.iterdir()] == ["app.state"]
    other = Stream.load(tcnca.load(tcnca.save(model, tmp_path / "model")), tmp_path / "app.state")
    assert other.position == 21
    for piece in (values[21:22], values[22:]):
        assert np.array_equal(answer(other, piece), answer(stream, piece))


def test_a_stream_that_has_read_nothing_is_saved(tmp_path: Path) -> None:
    model = text_model()
    Stream(model).save(tmp_path / "s")
    stream = Stream.load(model, tmp_path / "s")
    assert stream.position == 0
    assert np.array_equal(stream.score(TEXT), tcnca.score(model, TEXT))


def test_a_reset_stream_starts_again() -> None:
    stream = Stream(text_model())
    before = stream.score(TEXT)
    stream.reset()
    assert stream.position == 0
    assert np.array_equal(stream.score(TEXT), before)


def test_a_state_is_a_copy() -> None:
    stream = Stream(text_model())
    stream.push(TEXT)
    state = stream.state()
    first = Stream(stream.model, state).score(TEXT)
    stream.push(TEXT[:9])
    assert np.array_equal(Stream(stream.model, state).score(TEXT), first)


def test_the_model_keeps_its_mode() -> None:
    model = build("tcnca", BYTES, input=TokenInputConfig(vocab_size=117), dropout=0.5).train()
    assert np.array_equal(Stream(model).score(TEXT), Stream(model).score(TEXT))
    assert model.training


# Mistakes.


def test_models_that_do_not_stream_are_refused() -> None:
    with pytest.raises(InputError, match=r"^model: .* got one that is bidirectional; train with `causal=true`"):
        Stream(classifier(causal=False))
    pair = small_model(causal=False, head=PairHeadConfig())
    with pytest.raises(InputError, match=r"got one that reads pairs; train one of single sequences$"):
        Stream(pair)
    with pytest.raises(InputError, match=r"^model: expected a language model, got a classifier; use"):
        Stream(classifier()).score([1.0])


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (forecaster, [[1.0, 2.0], [3.0, float("nan")]], "values, time step 1: expected finite float32 numbers"),
        (forecaster, [1.0, 2.0, 3.0], "values: expected 2 features at each time step"),
        (forecaster, "text", "values: expected numbers, since the model was trained on values, got a text"),
        (forecaster, np.zeros((0, 2)), "values: expected at least one time step, got none"),
        (text_model, b"ab\xff", "text: expected the 117 bytes that occur in the training data, got b'\\\\xff'"),
        (text_model, "ab\ud800", r"values: expected valid Unicode, got the unpaired surrogate '\\ud800'; remove it"),
        (text_model, [3, 117], "values: expected tokens of the vocabulary, 0 to 116, got 3 to 117"),
    ],
)
def test_refused_values_change_nothing(make: Any, values: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcnca.generation.prompts.PREFILL_TOKENS", 1)
    model = make()
    valid = TEXT[:30] if make is text_model else series(30)
    stream, undisturbed = Stream(model), Stream(model)
    stream.push(valid)
    undisturbed.push(valid)
    with pytest.raises(InputError, match=rf"^{message}"):
        stream.push(values)
    assert stream.position == 30
    assert np.array_equal(answer(stream, valid), answer(undisturbed, valid))


def test_states_of_other_models_are_refused(tmp_path: Path) -> None:
    model, other = text_model(), text_model()
    stream = Stream(model)
    stream.push(TEXT)
    stream.save(tmp_path / "s")
    with pytest.raises(StateError, match=r"^state: expected one of this model, got one of a model with other weights"):
        Stream.load(other, tmp_path / "s")
    similar = text_model()
    similar.load_state_dict(model.state_dict())
    with torch.no_grad():
        list(similar.parameters())[-1].add_(0.1)
    with pytest.raises(StateError, match=r"got one of a model with other weights"):
        Stream.load(similar, tmp_path / "s")
    similar.load_state_dict(model.state_dict())
    with pytest.raises(StateError, match=r"^state: expected one of .*; set its chunk size first$"):
        Stream.load(similar.set_chunk_size(3), tmp_path / "s")
    state = stream.state()
    for logits in (None, torch.zeros(1, 3)):
        with pytest.raises(StateError, match=r"^state\.logits: expected shape \[1, 117\]"):
            Stream(model, dataclasses.replace(state, logits=logits))
    whole_numbers = Stream(model, dataclasses.replace(state, logits=torch.zeros(1, 117, dtype=torch.int64)))
    assert some(whole_numbers.push(b"").probabilities).sum() == pytest.approx(1)
    some(state.model).save(tmp_path / "model-state")
    with pytest.raises(StateError, match=r"expected a StreamState, got a ModelState$"):
        Stream.load(model, tmp_path / "model-state")


# Streams without an end.


@pytest.mark.parametrize("name", [name for name in VARIANTS if "full" not in name])
@pytest.mark.parametrize("start", [2**31, 2**50])
def test_positions_of_any_size(name: str, start: int) -> None:
    model = small_model(VARIANTS[name], torch.float32)
    near = Stream(model)
    near.push([token % VOCABULARY for token in range(40)])
    far = Stream(model, shifted(near.state(), (start - 40) // PERIOD * PERIOD))
    assert far.position <= start
    for piece in ([1], [token % VOCABULARY for token in range(25)], [3]):
        np.testing.assert_allclose(answer(far, piece), answer(near, piece), rtol=1e-4, atol=1e-5)
    assert far.position > start


def test_a_mean_of_many_millions_of_values_keeps_moving() -> None:
    """The sum of float32 numbers near 1 would end at 2^24."""
    model = classifier("mean")
    stream = Stream(model)
    stream.push(np.full(2 * PERIOD, 100.0))
    state = stream.state()
    young = some(state.model)
    count = 2**28 // PERIOD * PERIOD
    summary = some(young.pool).summary / (2 * PERIOD) * count
    old = dataclasses.replace(young, pool=PoolState(summary, torch.tensor([count])))
    later = Stream(model, dataclasses.replace(state, model=old))
    for each in (stream, later):
        for _ in range(3):
            each.push(100.0)
    added = [
        some(some(each.state().model).pool).summary - some(before.pool).summary
        for each, before in ((later, old), (stream, young))
    ]
    torch.testing.assert_close(*added, rtol=1e-4, atol=1e-6)
    assert bool((added[0].abs() > 0.01).any())


def traced(stream: Stream, values: Any, steps: int) -> int:
    """Push values, and return the bytes of Python objects."""
    for _ in range(steps):
        stream.push(values)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize(("make", "values"), [(text_model, b"x"), (forecaster, [[100.0, -3.0]]), (classifier, 1.0)])
def test_memory_stays(make: Any, values: Any) -> None:
    stream = Stream(make())
    stream.push(values)
    size = stream.state().nbytes
    tracemalloc.start()
    # What leaks grows every time; what Python keeps for later does not.
    sizes = [traced(stream, values, 25) for _ in range(4)]
    tracemalloc.stop()
    assert stream.state().nbytes == size
    assert min(after - before for before, after in itertools.pairwise(sizes)) < 25 * 64


def resident() -> int:
    """Bytes of this process in memory, those of tensors included."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_stays_over_many_steps() -> None:
    stream = Stream(build("ema-mlp", BYTES, input=TokenInputConfig(vocab_size=117), num_layers=1))
    for _ in range(2000):
        stream.push(b"x")
    size, sizes = stream.state().nbytes, []
    # What leaks grows every time; what other tests have left to the allocator does not.
    for _ in range(5):
        gc.collect()
        sizes.append(resident())
        for _ in range(25_000):
            stream.push(b"x")
    assert stream.state().nbytes == size
    assert min(after - before for before, after in itertools.pairwise(sizes)) < 5 * 25_000


def test_an_ema_forgets_its_rounding_errors() -> None:
    """In float32 as in float64, after as many values as one likes: each error decays like the values do."""
    model = build(
        "ema-mlp", FORECAST, input=ValueInputConfig(features=2), head=RegressionHeadConfig(outputs=2, pooling="none")
    )
    precise = SequenceModel(model.config, FORECAST).eval().double()
    precise.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    x = np.random.default_rng(0).normal([100, -3], [20, 0.5], (200_000, 2))
    errors = []
    narrow, wide = Stream(model), Stream(precise)
    for begin in range(0, len(x), 20_000):
        one, other = (some(stream.push(x[begin : begin + 20_000]).values) for stream in (narrow, wide))
        errors.append(float(np.abs(one - other).max()))
    assert max(errors[-3:]) < 2 * max(errors[:3])
    assert max(errors) < 1e-2


def test_texts_of_words_and_unknown_bytes() -> None:
    facts = Preprocessing(task="classification", symbols=("(", ")", "MAX", "1"))
    model = build("tcnca", facts, input=TokenInputConfig(vocab_size=4), head=ClassifierHeadConfig(num_classes=2))
    stream = Stream(model)
    stream.push("( MAX 1")
    assert stream.push("1 )").probabilities is not None
    assert stream.position == 5
    with pytest.raises(VocabularyError, match=r"^values: text: expected words out of \( \) MAX 1"):
        stream.push("2")
    assert stream.position == 5
    with pytest.raises(InputError, match=r"^values: expected at least one value, got none"):
        stream.push("")
