"""Language models: rows of chunks for training, and every byte predicted once in evaluation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcnca import LanguageModelHeadConfig, SequenceModel, TokenInputConfig
from tcnca.data import IGNORE, Batch, Dataset
from tcnca.data.tasks import LanguageTask
from tcnca.errors import ConfigError, DataError, VocabularyError
from tcnca.models.preprocessing import Preprocessing
from tests.examples import small_model

CHUNK = 8
SIZE = 100
# Random bytes in which no eight consecutive ones occur twice.
TRAIN = np.random.default_rng(0).integers(0, 256, 1003).astype(np.uint8)
# Distinct bytes, so that a byte identifies its position.
DISTINCT = np.random.default_rng(1).permutation(256)[:250].astype(np.uint8)


def language(train: NDArray[np.uint8] = TRAIN, **options: object) -> LanguageTask:
    splits = {"train": {"bytes": train}, "validation": {"bytes": DISTINCT}, "test": {"bytes": DISTINCT[:41]}}
    return LanguageTask(Dataset("tiny", {"kind": "language"}, splits), **{"chunk_size": CHUNK, **options})  # type: ignore[arg-type]


def starts(inputs: Tensor) -> list[int]:
    """Where in the training bytes each row comes from."""
    whole = TRAIN.tobytes()
    found = []
    for row in inputs.numpy().astype(np.uint8):
        assert whole.count(row.tobytes()) == 1
        found.append(whole.find(row.tobytes()))
    return found


def test_targets_are_the_next_bytes() -> None:
    task = language()
    for step in range(12):
        batch = task.batch(step, SIZE)
        assert batch.lengths is None
        assert not batch.continues
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        for row, begin in enumerate(starts(batch.inputs)):
            expected = TRAIN[begin + 1 : begin + 1 + batch.inputs.shape[1]]
            np.testing.assert_array_equal(batch.targets[row], expected)


def test_rows_of_two_three_and_four_chunks() -> None:
    task = language()
    runs = [task.batch(step, SIZE).inputs.shape[1] // CHUNK for step in range(60)]
    turns = [tuple(runs[begin : begin + 3]) for begin in range(0, 60, 3)]
    assert all(sorted(turn) == [2, 3, 4] for turn in turns)
    assert len(set(turns)) == 6


def epoch_starts(task: LanguageTask, run: int, epochs: int) -> list[list[int]]:
    """The starts of the runs of one length in each epoch, in order."""
    # So many runs as cover the split wherever they are cut: one begins up to a run less a byte before it.
    total = -(-(len(TRAIN) - 1 + run * CHUNK - 1) // (run * CHUNK))
    found: list[int] = []
    step = 0
    while len(found) < epochs * total:
        batch = task.batch(step, SIZE)
        if batch.inputs.shape[1] == run * CHUNK:
            found += starts(batch.inputs)
        step += 1
    return [sorted(found[epoch * total : (epoch + 1) * total]) for epoch in range(epochs)]


@pytest.mark.parametrize(("run", "runs"), [(1, (1,)), (2, (2, 3, 4)), (3, (2, 3, 4)), (4, (2, 3, 4))])
def test_an_epoch_covers_the_split(run: int, runs: tuple[int, ...]) -> None:
    width, last = run * CHUNK, len(TRAIN) - 1 - run * CHUNK
    cuts = set()
    for begins in epoch_starts(language(chunks_per_row=runs), run, 12):
        # Every byte is a target, the first ones and the last ones too.
        assert (begins[0], begins[-1]) == (0, last)
        # Runs follow each other without a gap, and only those at the ends overlap.
        steps = np.diff(begins)
        assert (steps <= width).all()
        assert (steps[1:-2] == width).all()
        cuts.add(begins[1] % width)
    # Epochs are cut in different places, and not at chunks alone.
    assert len(cuts) > 4
    assert any(cut % CHUNK for cut in cuts)


@pytest.mark.parametrize("size", [9, 10, 200, 700])
def test_chunks_of_a_tiny_text(size: int) -> None:
    raw = TRAIN[:size]
    task = LanguageTask(Dataset("tiny", {}, {"train": {"bytes": raw}}))
    assert task.chunk_size == (size - 1) // 8
    lengths = set()
    for step in range(30):
        batch = task.batch(step, 4 * task.chunk_size)
        lengths.add(batch.inputs.shape[1])
        for row, target in zip(batch.inputs.numpy(), batch.targets.numpy(), strict=True):
            window = np.append(row, target[-1]).astype(np.uint8)
            assert window.tobytes() in raw.tobytes()
            np.testing.assert_array_equal(row[1:], target[:-1])
    assert lengths == {2 * task.chunk_size, 3 * task.chunk_size, 4 * task.chunk_size}


def counted(batches: Iterator[Batch]) -> tuple[NDArray[np.int64], list[Batch]]:
    """How often each byte value is a target that counts, each of them checked to follow its input."""
    times = np.zeros(256, np.int64)
    before = dict(zip(DISTINCT.tolist(), [10, *DISTINCT[:-1].tolist()], strict=True))
    kept = list(batches)
    for batch in kept:
        for row in range(len(batch)):
            real = batch.targets[row] != IGNORE
            length = int(real.sum())
            # What counts comes first, and is no longer than the row says it is.
            assert bool(real[:length].all())
            assert length <= (batch.inputs.shape[1] if batch.lengths is None else int(batch.lengths[row]))
            for token, target in zip(batch.inputs[row, :length], batch.targets[row, :length], strict=True):
                assert before[int(target)] == int(token)
                times[int(target)] += 1
    return times, kept


def expected_times(split: NDArray[np.uint8]) -> NDArray[np.int64]:
    return np.isin(np.arange(256), split).astype(np.int64)


@pytest.mark.parametrize("carry_state", [True, False])
@pytest.mark.parametrize(("eval_length", "segments", "size"), [(7, 6, 4), (1000, 50, 64), (1, 5, 1), (5, 900, 7)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_byte_is_predicted_once(
    carry_state: bool, eval_length: int, segments: int, size: int, world_size: int
) -> None:
    task = language(eval_length=eval_length, segments=segments, carry_state=carry_state)
    times = np.zeros(256, np.int64)
    counts, flags = set(), set()
    for rank in range(world_size):
        found, batches = counted(task.eval_batches("validation", size, rank, world_size))
        times += found
        counts.add(len(batches))
        flags.add(tuple(batch.continues for batch in batches))
        assert all(len(batch) <= size and batch.inputs.shape[1] <= eval_length for batch in batches)
        assert all(len(batch) > 0 for batch in batches)
    np.testing.assert_array_equal(times, expected_times(DISTINCT))
    # Processes that wait for each other need equally many batches, which go on at the same time.
    assert len(counts) == len(flags) == 1


def test_windows_continue_within_a_segment() -> None:
    task = language(eval_length=20, segments=5)
    batches = list(task.eval_batches("validation", 5))
    # Five segments of fifty bytes: calls of 20, 20 and 10.
    assert [batch.inputs.shape for batch in batches] == [(5, 20), (5, 20), (5, 10)]
    assert [batch.continues for batch in batches] == [False, True, True]
    assert all(batch.lengths is None for batch in batches)
    targets = torch.cat([batch.targets for batch in batches], 1)
    np.testing.assert_array_equal(targets, DISTINCT.reshape(5, 50))
    inputs = torch.cat([batch.inputs for batch in batches], 1)
    np.testing.assert_array_equal(inputs, np.append(10, DISTINCT[:-1]).reshape(5, 50))


def test_segments_of_small_splits_are_no_shorter_than_a_window() -> None:
    """Otherwise nearly all bytes of a small file would be predicted without a context."""
    for eval_length, segments in ((100, 2), (300, 1)):
        (first, *_) = language(eval_length=eval_length, segments=50).eval_batches("validation", 50)
        assert first.inputs.shape[0] == segments


def tiny_model(task: LanguageTask) -> SequenceModel:
    return small_model("tcnca", input=task.input, head=task.head, causal=task.causal)


@torch.no_grad()
def evaluated(task: LanguageTask, model: SequenceModel, size: int) -> tuple[float, int]:
    """Bits and bytes of a split, as training will evaluate it."""
    bits, number, state = 0.0, 0, None
    for batch in task.eval_batches("validation", size):
        logits, state = model(batch.inputs, lengths=batch.lengths, state=state if batch.continues else None)
        total, count = task.metric_sums(logits, batch)
        bits, number = bits + float(total), number + int(count)
    return bits, number


@torch.no_grad()
def bits_of(model: SequenceModel, begin: int, end: int) -> float:
    """Bits of some bytes of the split, in one call."""
    tokens = torch.from_numpy(np.append(10, DISTINCT).astype(np.int64))
    answers = model(tokens[None, begin:end]).logits[0].double().log_softmax(-1)
    return -float(answers[torch.arange(end - begin), tokens[begin + 1 : end + 1]].sum()) / math.log(2)


@pytest.mark.parametrize("size", [2, 6])
def test_carried_evaluation_equals_one_call(size: int) -> None:
    task = language(eval_length=17, segments=6)
    model = tiny_model(task)
    bounds = [250 * segment // 6 for segment in range(7)]
    expected = sum(bits_of(model, begin, end) for begin, end in itertools.pairwise(bounds))
    bits, number = evaluated(task, model, size)
    assert number == 250
    assert bits == pytest.approx(expected, rel=1e-6)
    # What goes on from nothing costs something else, so the comparison can tell.
    apart = sum(
        bits_of(model, place, min(place + 17, end))
        for begin, end in itertools.pairwise(bounds)
        for place in range(begin, end, 17)
    )
    assert abs(apart - expected) > 1e-4 * expected


def test_loss_and_bits() -> None:
    task = language()
    targets = torch.tensor([[3, IGNORE], [0, 1]])
    logits = torch.randn(2, 2, 256)
    batch = Batch(inputs=torch.zeros(2, 2, dtype=torch.int64), targets=targets)
    answers = logits.double().softmax(-1)
    chances = [float(answers[0, 0, 3]), float(answers[1, 0, 0]), float(answers[1, 1, 1])]
    bits, number = task.metric_sums(logits, batch)
    assert int(number) == 3
    assert bits.dtype == torch.float64
    assert float(bits) == pytest.approx(-sum(map(math.log2, chances)), rel=1e-6)
    assert float(task.loss(logits, batch)) == pytest.approx(-sum(map(math.log, chances)) / 3, rel=1e-6)


def test_tokens_are_the_bytes_that_occur() -> None:
    raw = np.frombuffer(b"\nbanana cabana, a bandana\n" * 20, np.uint8)
    symbols = sorted(set(raw.tolist()))
    task = LanguageTask(Dataset("tiny", {"symbols": symbols}, {"train": {"bytes": raw}}), chunk_size=8)
    assert task.input == TokenInputConfig(vocab_size=len(symbols), scale_embeddings=True)
    assert task.head == LanguageModelHeadConfig()
    text, facts = b"a banana", task.preprocessing()
    assert facts == Preprocessing(task="language", byte_map=tuple(symbols))
    assert facts.encode(text).tolist() == [symbols.index(byte) for byte in text]
    batch = task.batch(0, 64)
    assert facts.decode(batch.inputs[0]) in raw.tobytes()
    first = next(task.eval_batches("train", 2))
    assert int(first.inputs[0, 0]) == symbols.index(10)
    with pytest.raises(VocabularyError, match="bytes that occur in the training data"):
        facts.encode(b"banz")


@pytest.mark.parametrize(
    ("option", "value"),
    [("chunk_size", 0), ("eval_length", 0), ("segments", 0), ("chunks_per_row", ()), ("chunks_per_row", (2, 0))],
)
def test_options_below_one(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option}: expected an integer >= 1, got 0"):
        language(TRAIN, **{option: value})


@pytest.mark.parametrize("step", range(3))
def test_too_small_batches_and_splits(step: int) -> None:
    with pytest.raises(ConfigError, match=r"batch_size: expected at least 32 tokens, a row of 4 chunks of 8, got 31"):
        language().batch(step, 31)
    with pytest.raises(ConfigError, match=r"expected at least one row for each of the 3 processes, got 2"):
        language().batch(step, 64, world_size=3)
    with pytest.raises(DataError, match="tiny: expected at least 9 bytes in the training split, got 8"):
        language(TRAIN[:8])


def test_tokens_can_be_all_bytes() -> None:
    """A data set that lists its byte values has a token for each of them, or for every byte."""
    splits = {split: {"bytes": np.frombuffer(b"abcab" * 9, np.uint8)} for split in ("train", "validation", "test")}
    data = Dataset("tiny", {"kind": "language", "symbols": list(b"abc")}, splits)
    few, every = (LanguageTask(data, chunk_size=2, all_bytes=all_bytes) for all_bytes in (False, True))
    assert (few.input.vocab_size, every.input.vocab_size) == (3, 256)
    assert every.preprocessing().byte_map == tuple(range(256))
    assert set(few.batch(0, 16).inputs.flatten().tolist()) == {0, 1, 2}
    assert set(every.batch(0, 16).inputs.flatten().tolist()) == set(b"abc")
    assert every.preprocessing().encode(b"\r\0\xff").tolist() == [13, 0, 255]
    with pytest.raises(VocabularyError):
        few.preprocessing().encode(b"\r")
