"""Rendered examples and statistics of data sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data import Dataset, SplitSummary, summarize_data
from tcnca.data.schema import Columns, Ragged
from tcnca.data.show import render_example, render_pixels
from tcnca.errors import DataError

CLASS_NAMES = {"class_names": ["cat", "dog"]}


def made(columns: Columns, **facts: Any) -> Dataset:
    return Dataset("tiny", {**CLASS_NAMES, **facts}, {"train": columns})


def texts(*each: str, **facts: Any) -> Dataset:
    return made(
        {"tokens": Ragged.from_bytes(text.encode() for text in each), "labels": np.arange(len(each)) % 2}, **facts
    )


def test_text_with_its_label() -> None:
    found = render_example(texts("a film", "größer"), "train", 1)
    assert (found.title, found.body, found.image) == ("tiny, train 1: dog", "größer", None)


def test_long_text_is_truncated() -> None:
    data = texts("ab" * 700, "c" * 1000)
    # The end is shown as well, where recall asks its question.
    assert render_example(data, "train", 0).body == f"{'ab' * 480} … {'ab' * 20} (1,400 tokens)"
    assert render_example(data, "train", 0, full=True).body == "ab" * 700
    assert render_example(data, "train", 1).body == "c" * 1000


def test_pairs_show_both() -> None:
    columns: Columns = {
        "first": Ragged.from_bytes([b"one"]),
        "second": Ragged.from_bytes([b"x" * 1001]),
        "labels": np.array([0]),
    }
    assert (
        render_example(made(columns), "train", 0).body == f"first: one\nsecond: {'x' * 960} … {'x' * 40} (1,001 tokens)"
    )


def test_bytes_of_a_stream() -> None:
    data = Dataset("tiny", {}, {"test": {"bytes": np.frombuffer(b"0123456789" * 300, np.uint8)}})
    found = render_example(data, "test", 1205)
    assert found.title == "tiny, test from byte 1,205"
    assert found.body == "5678901234" * 100
    assert render_example(data, "test", 5, full=True).body == ("0123456789" * 300)[5:]


def test_unknown_example() -> None:
    with pytest.raises(DataError, match="index: expected 0 to 1 for train of tiny, got 2"):
        render_example(texts("a", "b"), "train", 2)
    with pytest.raises(DataError, match="index: expected 0 to 1 for train of tiny, got -1"):
        render_example(texts("a", "b"), "train", -1)
    with pytest.raises(DataError, match="split: expected one of train for tiny, got 'test'"):
        render_example(texts("a"), "test", 0)


def dark(height: int, width: int, *bright: tuple[int, int]) -> NDArray[np.uint8]:
    pixels = np.zeros((height, width), np.uint8)
    for place in bright:
        pixels[place] = 255
    return pixels


@pytest.mark.parametrize(
    ("row", "column", "width"), [(0, 0, 80), (5, 3, 32), (31, 31, 16), (16, 0, 10), (0, 31, 10), (5, 3, 1)]
)
def test_position_of_a_bright_pixel(row: int, column: int, width: int) -> None:
    lines = render_pixels(dark(32, 32, (row, column)), width).split("\n")
    factor = -(-32 // width)
    bright = [(y, x) for y, line in enumerate(lines) for x, shade in enumerate(line) if shade != " "]
    assert bright == [(row // (2 * factor), column // factor)]
    assert lines[bright[0][0]][bright[0][1]] == "█"
    assert max(map(len, lines)) <= width
    assert len(lines) == -(-32 // (2 * factor))


def pictures() -> Dataset:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32)).astype(np.uint8)
    return made({"pixels": pixels, "labels": np.arange(5) % 2})


def bars(values: NDArray[np.float32], width: int = 80) -> list[str]:
    data = made({"values": values[None], "targets": np.array([[1.5, -2.0]], np.float32)})
    return render_example(data, "train", 0, width).body.split("\n")


def test_bars() -> None:
    values = np.stack([np.arange(8.0), np.arange(8.0)[::-1] * 10], 1).astype(np.float32)
    first, second = bars(values)
    assert first.split() == ["0", "▁▂▃▄▅▆▇█", "7"]
    assert second.split() == ["0", "█▇▆▅▄▃▂▁", "70"]


def test_long_series_fit_the_terminal() -> None:
    values = np.sin(np.linspace(0, 6, 5000, dtype=np.float32))[:, None]
    (line,) = bars(values, 60)
    assert len(line.rstrip()) <= 60
    assert len(line.split()[1]) == 36


def test_summary() -> None:
    data = texts("a", "abc", "abcd")
    expected = SplitSummary(examples=3, shortest=1, mean=8 / 3, longest=4, symbols=4, class_counts={"cat": 2, "dog": 1})
    assert summarize_data(data) == {"train": expected}


def test_summary_of_other_kinds() -> None:
    stream = Dataset("tiny", {}, {"train": {"bytes": np.frombuffer(b"banana", np.uint8)}})
    found = summarize_data(stream)["train"]
    assert (found.examples, found.shortest, found.longest, found.symbols, found.class_counts) == (6, 6, 6, 3, {})
    found = summarize_data(pictures())["train"]
    assert (found.examples, found.shortest, found.mean, found.symbols) == (5, 1024, 1024.0, None)
    assert found.class_counts == {"cat": 3, "dog": 2}
    values = summarize_data(made({"values": np.zeros((4, 7, 3), np.float32)}))["train"]
    assert (values.examples, values.longest, values.symbols, values.class_counts) == (4, 7, None, {})
    pair: Columns = {
        "first": Ragged.from_bytes([b"ab", b"abc"]),
        "second": Ragged.from_bytes([b"z", b"yyyyyy"]),
        "labels": np.array([1, 1]),
    }
    both = summarize_data(made(pair))["train"]
    assert (both.examples, both.shortest, both.mean, both.longest, both.symbols) == (2, 1, 3.0, 6, 5)


def test_control_characters_are_replaced() -> None:
    texts = Ragged.from_bytes([b"a\x1b]0;mine\x07\tb\r\nc\xc2\x9bd"])
    data = Dataset("tricky", {"class_names": ["no"]}, {"train": {"tokens": texts, "labels": np.zeros(1, np.int64)}})
    assert render_example(data, "train", 0).body == "a\ufffd]0;mine\ufffd\tb\ufffd\nc\ufffdd"
