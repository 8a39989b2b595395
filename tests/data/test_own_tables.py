"""Tables of texts: which column is what, how they are split, and what is refused."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcnca.data.custom import CustomOptions, read_custom
from tcnca.data.schema import Content, Ragged
from tcnca.errors import DataError

Rows = Sequence[dict[str, Any]]
REVIEWS: Rows = [{"id": n, "text": f'review, «{n}»\n"quoted"', "label": ("bad", "good")[n % 2]} for n in range(60)]


def _csv(path: Path, rows: Rows, delimiter: str = ",", encoding: str = "utf-8") -> Path:
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def _jsonl(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _texts(content: Content, split: str, column: str = "tokens") -> list[str]:
    (columns,) = content.splits[split]
    ragged = columns[column]
    assert isinstance(ragged, Ragged)
    assert ragged.values.dtype == np.uint8
    return [ragged[index].tobytes().decode() for index in range(len(ragged))]


def _all_texts(content: Content) -> list[str]:
    return list(itertools.chain(*(_texts(content, split) for split in content.splits)))


def _labels(content: Content, split: str) -> list[str]:
    (columns,) = content.splits[split]
    labels = np.asarray(columns["labels"])
    assert labels.dtype == np.int64
    return [content.metadata["class_names"][label] for label in labels]


def _examples(content: Content) -> dict[str, list[tuple[str, str]]]:
    return {split: list(zip(_texts(content, split), _labels(content, split), strict=True)) for split in content.splits}


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "ndjson", "CSV"])
def test_a_table_is_read_whole(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"reviews.{ending}"
    if ending.lower() in ("csv", "tsv"):
        _csv(path, REVIEWS, "," if ending.lower() == "csv" else "\t")
    else:
        _jsonl(path, REVIEWS)
    content = read_custom(path)
    assert (content.kind, content.origin, content.verified) == ("classification", path.name, False)
    assert dict(content.metadata) == {"class_names": ["bad", "good"]}
    found = _examples(content)
    assert {split: len(examples) for split, examples in found.items()} == {"train": 54, "validation": 3, "test": 3}
    assert sorted(itertools.chain(*found.values())) == sorted((row["text"], row["label"]) for row in REVIEWS)


def test_the_same_text_never_is_in_two_splits(tmp_path: Path) -> None:
    rows = [{"text": f"{n % 25}", "label": n % 25 % 2} for n in range(100)]
    content = read_custom(_csv(tmp_path / "a.csv", rows), CustomOptions(validation=0.2, test=0.2))
    seen = [set(_texts(content, split)) for split in content.splits]
    assert sum(len(texts) for texts in seen) == 25
    assert [len(_texts(content, split)) for split in content.splits] == [60, 20, 20]


def test_a_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    rows = [{"text": f"{n}", "label": n % 2} for n in range(8)]
    marked, plain = _csv(tmp_path / "a.csv", rows, encoding="utf-8-sig"), _csv(tmp_path / "b.csv", rows)
    assert marked.read_bytes().startswith(b"\xef\xbb\xbf")
    assert _examples(read_custom(marked)) == _examples(read_custom(plain))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("before", ["", "\r\n\r\n"])
def test_semicolons_separate_where_the_header_has_no_commas(tmp_path: Path, encoding: str, before: str) -> None:
    rows = [{"a, b": n, "text": f'{n},5; "quoted"\nmore', "label": n % 2} for n in range(12)]
    path = _csv(tmp_path / "a.csv", rows, ";", encoding)
    path.write_text(before + path.read_text(encoding=encoding).replace("a, b", '"a, b"', 1), encoding, newline="")
    plain = _csv(tmp_path / "b.csv", rows)
    assert path.read_text(encoding=encoding).strip().startswith('"a, b";text;label')
    assert _examples(read_custom(path)) == _examples(read_custom(plain))


@pytest.mark.parametrize("header", ["text,label", '"text","label"', "text,label,a;b", '"a;b",text,label'])
def test_a_semicolon_elsewhere_separates_nothing(tmp_path: Path, header: str) -> None:
    columns = next(csv.reader([header]))
    rows = [{name: f"{n % 2}" if name == "label" else f"{n}; {n}" for name in columns} for n in range(8)]
    path = tmp_path / "a.csv"
    path.write_text(header + "\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    assert sorted(_all_texts(read_custom(path))) == [f"{n}; {n}" for n in range(8)]


def test_a_document_longer_than_csv_fields_usually_are(tmp_path: Path) -> None:
    before = csv.field_size_limit(1000)
    rows = [{"text": "long" * 100_000 + str(n), "label": n % 2} for n in range(6)]
    content = read_custom(_csv(tmp_path / "a.csv", rows))
    assert {len(text) for text in _texts(content, "train")} == {400_001}
    assert csv.field_size_limit(before) == 1000, "the limit of others is left as it was"


@pytest.mark.parametrize(
    ("labels", "class_names"),
    [
        (["10", "9", "-1"], ["-1", "9", "10"]),
        (["10", "9", "b"], ["10", "9", "b"]),
        (["Pear", "apple", "fig"], ["Pear", "apple", "fig"]),
        ([True, False, True], ["false", "true"]),
        ([10, 9, 100], ["9", "10", "100"]),
        ([1.5, 0.5, 1.5], ["0.5", "1.5"]),
    ],
)
def test_order_of_the_classes(tmp_path: Path, labels: list[Any], classes: list[str]) -> None:
    rows = [{"text": f"{n}", "label": labels[n % 3]} for n in range(30)]
    assert read_custom(_jsonl(tmp_path / "a.jsonl", rows)).metadata["class_names"] == classes


def test_columns_are_named(tmp_path: Path) -> None:
    rows = [{"body": f"{n}", "text": "no", "label": "no", "stars": n % 5} for n in range(40)]
    content = read_custom(_csv(tmp_path / "a.csv", rows), CustomOptions(text="body", label="stars"))
    assert content.metadata["class_names"] == ["0", "1", "2", "3", "4"]
    assert all(int(text) % 5 == int(label) for text, label in _examples(content)["train"])


@pytest.mark.parametrize("text", ["text", "Sentence", "CONTENT", "review", "document", "input"])
@pytest.mark.parametrize("label", ["Label", "class", "target", "category", "y"])
def test_obvious_columns(tmp_path: Path, text: str, label: str) -> None:
    rows = [{"number": n, text: f"{n}", label: n % 2} for n in range(8)]
    content = read_custom(_csv(tmp_path / "a.csv", rows))
    assert all(int(words) % 2 == int(name) for words, name in _examples(content)["train"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("text1", "text2"),
        ("first", "second"),
        ("sentence1", "sentence2"),
        ("Premise", "Hypothesis"),
        ("query", "document"),
        ("question", "answer"),
    ],
)
def test_pairs_are_found(tmp_path: Path, first: str, second: str) -> None:
    rows = [{second: f"{n} two", "label": n % 2, first: f"{n} one"} for n in range(10)]
    content = read_custom(_csv(tmp_path / "a.csv", rows))
    assert content.kind == "pairs"
    for split in content.splits:
        ones, twos = _texts(content, split, "first"), _texts(content, split, "second")
        assert [text.split() for text in ones] == [[text.split()[0], "one"] for text in twos]
        assert [int(text.split()[0]) % 2 for text in ones] == [int(label) for label in _labels(content, split)]


def test_pairs_are_named(tmp_path: Path) -> None:
    rows = [{"a": f"{n}", "b": f"-{n}", "text": f"+{n}", "label": n % 2} for n in range(10)]
    path = _csv(tmp_path / "a.csv", rows)
    content = read_custom(path, CustomOptions(text="a", second="b"))
    assert [f"-{text}" for text in _texts(content, "train", "first")] == _texts(content, "train", "second")
    content = read_custom(path, CustomOptions(second="b"))
    assert [f"-{text[1:]}" for text in _texts(content, "train", "first")] == _texts(content, "train", "second")


def test_one_text_of_a_pair_may_be_classified(tmp_path: Path) -> None:
    rows = [{"query": f"{n}", "document": f"-{n}", "label": n % 2} for n in range(10)]
    path = _csv(tmp_path / "a.csv", rows)
    assert _texts(read_custom(path, CustomOptions(kind="classification")), "train")[0].startswith("-")
    content = read_custom(path, CustomOptions(text="query"))
    assert content.kind == "classification"
    assert not _texts(content, "train")[0].startswith("-")


def test_pairs_that_only_join_to_the_same_text_are_different(tmp_path: Path) -> None:
    rows = [{"first": "abcdef"[:n], "second": "abcdef"[n:], "label": n % 2} for n in range(7)]
    assert [len(_labels(read_custom(_csv(tmp_path / "a.csv", rows)), split)) for split in ("train", "test")] == [5, 1]


def test_a_column_gives_the_splits(tmp_path: Path) -> None:
    words = ["train", "Training", "dev", "VAL", "validation", "test"]
    rows = [{"text": f"{n}", "label": n % 2, "part": words[n % 6]} for n in range(24)]
    content = read_custom(_csv(tmp_path / "a.csv", rows), CustomOptions(split="part"))
    wanted = {"train": (0, 1), "validation": (2, 3, 4), "test": (5,)}
    assert {split: _texts(content, split) for split in content.splits} == {
        split: [str(n) for n in range(24) if n % 6 in places] for split, places in wanted.items()
    }


def test_files_give_the_splits(tmp_path: Path) -> None:
    _csv(tmp_path / "train.csv", REVIEWS[:20])
    _csv(tmp_path / "Valid.csv", REVIEWS[20:30])
    _jsonl(tmp_path / "test.jsonl", REVIEWS[30:])
    content = read_custom(tmp_path)
    assert content.origin == tmp_path.name
    cuts = {"train": REVIEWS[:20], "validation": REVIEWS[20:30], "test": REVIEWS[30:]}
    assert _examples(content) == {split: [(row["text"], row["label"]) for row in rows] for split, rows in cuts.items()}


def test_classes_come_from_training(tmp_path: Path) -> None:
    _csv(tmp_path / "train.csv", REVIEWS[:10])
    path = _csv(tmp_path / "test.csv", [*REVIEWS[10:12], {"id": 1, "text": "x", "label": "ugly"}])
    # The texts of the rows before take up two lines each.
    with pytest.raises(DataError) as caught:
        read_custom(tmp_path)
    assert str(caught.value).startswith(f"{path}, line 6: label 'ugly' does not occur in the training split")
