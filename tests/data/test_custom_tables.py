"""Tables of texts: the roles of columns, the splits, and errors that name the place and what to do."""

from __future__ import annotations

import csv
import itertools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcnca.data import npy
from tcnca.data.custom import CustomOptions, read_custom, tables
from tcnca.data.schema import Content, Kind, Ragged
from tcnca.errors import DataError
from tests.data.helpers import assert_refused

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
def test_table_is_read_completely(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"reviews.{ending}"
    if ending.lower() in ("csv", "tsv"):
        _csv(path, REVIEWS, "," if ending.lower() == "csv" else "\t")
    else:
        _jsonl(path, REVIEWS)
    content = read_custom(path)
    assert (content.kind, content.origin, content.verified) == ("classification", path.name, False)
    columns = {"text": "text", "label": "label"}
    assert dict(content.metadata) == {"class_names": ["bad", "good"], "columns": columns}
    found = _examples(content)
    assert {split: len(examples) for split, examples in found.items()} == {"train": 54, "validation": 3, "test": 3}
    assert sorted(itertools.chain(*found.values())) == sorted((row["text"], row["label"]) for row in REVIEWS)


def test_equal_texts_stay_in_one_split(tmp_path: Path) -> None:
    rows = [{"text": f"{n % 25}", "label": n % 25 % 2} for n in range(100)]
    content = read_custom(_csv(tmp_path / "a.csv", rows), CustomOptions(validation=0.2, test=0.2))
    seen = [set(_texts(content, split)) for split in content.splits]
    assert sum(len(texts) for texts in seen) == 25
    assert [len(_texts(content, split)) for split in content.splits] == [60, 20, 20]


@pytest.mark.parametrize(("encoding", "before"), [("utf-8", ""), ("utf-8-sig", ""), ("utf-8", "\r\n\r\n")])
def test_semicolons_as_delimiters(tmp_path: Path, encoding: str, before: str) -> None:
    rows = [{"a, b": n, "text": f'{n},5; "quoted"\nmore', "label": n % 2} for n in range(12)]
    path = _csv(tmp_path / "a.csv", rows, ";", encoding)
    path.write_text(before + path.read_text(encoding=encoding).replace("a, b", '"a, b"', 1), encoding, newline="")
    plain = _csv(tmp_path / "b.csv", rows)
    assert path.read_text(encoding=encoding).strip().startswith('"a, b";text;label')
    assert _examples(read_custom(path)) == _examples(read_custom(plain))


@pytest.mark.parametrize("header", ["text,label", '"text","label"', "text,label,a;b", '"a;b",text,label'])
def test_semicolons_elsewhere_are_text(tmp_path: Path, header: str) -> None:
    columns = next(csv.reader([header]))
    rows = [{name: f"{n % 2}" if name == "label" else f"{n}; {n}" for name in columns} for n in range(8)]
    path = tmp_path / "a.csv"
    path.write_text(header + "\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    assert sorted(_all_texts(read_custom(path))) == [f"{n}; {n}" for n in range(8)]


def test_long_document(tmp_path: Path) -> None:
    before = csv.field_size_limit(1000)
    rows = [{"text": "long" * 100_000 + str(n), "label": n % 2} for n in range(6)]
    content = read_custom(_csv(tmp_path / "a.csv", rows))
    assert {len(text) for text in _texts(content, "train")} == {400_001}
    assert csv.field_size_limit(before) == 1000, "the limit of others is left as it was"


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["10", "9", "-1"], ["-1", "9", "10"]),
        (["10", "9", "b"], ["10", "9", "b"]),
        (["Pear", "apple", "fig"], ["Pear", "apple", "fig"]),
        ([True, False, True], ["false", "true"]),
        ([10, 9, 100], ["9", "10", "100"]),
        ([1.5, 0.5, 1.5], ["0.5", "1.5"]),
    ],
)
def test_order_of_classes(tmp_path: Path, labels: list[Any], classes: list[str]) -> None:
    rows = [{"text": f"{n}", "label": labels[n % 3]} for n in range(30)]
    assert read_custom(_jsonl(tmp_path / "a.jsonl", rows)).metadata["class_names"] == classes


@pytest.mark.parametrize(
    ("text", "label"),
    [("text", "Label"), ("Sentence", "class"), ("CONTENT", "target"), ("review", "y"), ("input", "category")],
)
def test_columns_are_inferred(tmp_path: Path, text: str, label: str) -> None:
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
def test_pairs_are_inferred(tmp_path: Path, first: str, second: str) -> None:
    rows = [{second: f"{n} two", "label": n % 2, first: f"{n} one"} for n in range(10)]
    content = read_custom(_csv(tmp_path / "a.csv", rows))
    assert content.kind == "pairs"
    for split in content.splits:
        ones, twos = _texts(content, split, "first"), _texts(content, split, "second")
        assert [text.split() for text in ones] == [[text.split()[0], "one"] for text in twos]
        assert [int(text.split()[0]) % 2 for text in ones] == [int(label) for label in _labels(content, split)]


def test_pairs_from_named_columns(tmp_path: Path) -> None:
    rows = [{"a": f"{n}", "b": f"-{n}", "text": f"+{n}", "label": n % 2} for n in range(10)]
    path = _csv(tmp_path / "a.csv", rows)
    content = read_custom(path, CustomOptions(text="a", second="b"))
    assert [f"-{text}" for text in _texts(content, "train", "first")] == _texts(content, "train", "second")
    content = read_custom(path, CustomOptions(second="b"))
    assert [f"-{text[1:]}" for text in _texts(content, "train", "first")] == _texts(content, "train", "second")


def test_one_text_of_a_pair(tmp_path: Path) -> None:
    rows = [{"query": f"{n}", "document": f"-{n}", "label": n % 2} for n in range(10)]
    path = _csv(tmp_path / "a.csv", rows)
    assert _texts(read_custom(path, CustomOptions(kind="classification")), "train")[0].startswith("-")
    content = read_custom(path, CustomOptions(text="query"))
    assert content.kind == "classification"
    assert not _texts(content, "train")[0].startswith("-")


def test_splits_from_a_column(tmp_path: Path) -> None:
    words = ["train", "Training", "dev", "VAL", "validation", "test"]
    rows = [{"text": f"{n}", "label": n % 2, "part": words[n % 6]} for n in range(24)]
    content = read_custom(_csv(tmp_path / "a.csv", rows), CustomOptions(split="part"))
    wanted = {"train": (0, 1), "validation": (2, 3, 4), "test": (5,)}
    assert {split: _texts(content, split) for split in content.splits} == {
        split: [str(n) for n in range(24) if n % 6 in places] for split, places in wanted.items()
    }


def test_splits_from_files(tmp_path: Path) -> None:
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
    assert str(caught.value).startswith(f"{path}, line 6: expected a label of the training split, got 'ugly'")


GOOD = "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(6))


def _refused(path: Path, content: str | bytes, message: str, options: CustomOptions | None = None) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert_refused(path, message, options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "^: expected rows, got none"),
        ("text,label\n", "^: expected rows, got none"),
        ("text,label,text\na,1,b\n", "^, line 1: expected different column names, got 'text' twice"),
        (GOOD + "too,many,1\n", "^, line 8: expected 2 fields, got 3; .* in quotes"),
        (GOOD + "too few\n", "^, line 8: expected 2 fields, got 1; add missing ones"),
        (GOOD + "text, \n", "^, line 8, column 'label': expected a label, got an empty field"),
        (GOOD + '"never closed,1\nnext,1\n', r"^, line 8: cannot be read \(unexpected end of data\)"),
        (GOOD + '"two\nlines",1\nbad\n', "^, line 10: expected 2 fields, got 1"),
        ("text,label\n,1\n,0\n,1\n", "^: expected text in column 'text', got none; choose it with --text"),
        ("first,second,label\na,,1\nb,,0\nc,,1\n", "^: expected text in column 'second', got none; .* --second"),
        ("text,label\n" + "a,1\nb,1\nc,1\n", "^: expected at least two classes, got only '1'"),
        ("text,label\na,1\nb,2\n", "^: expected at least 3 different examples to draw validation and test from, got 2"),
        (
            "text,label\na,1\nb,2\nc,3\n",
            "^: expected a class with at least 3 different examples to draw validation and test from, got none",
        ),
    ],
)
def test_invalid_csv(tmp_path: Path, content: str, message: str) -> None:
    _refused(tmp_path / "a.csv", content, message)


def test_stray_quotes_do_not_merge_the_rows_of_a_tsv(tmp_path: Path) -> None:
    rows = "".join(f"text {n}\t{n % 2}\n" for n in range(6))
    message = "^, line 8: expected a row on one line, got a quote that opens a field of several rows; double the quotes"
    _refused(tmp_path / "a.tsv", f'text\tlabel\n{rows}"good one\t1\nbad one"\t0\n', message)
    texts = ["several\nlines, and\ta tab", 'a "quoted"\ttext', *(f"{n}" for n in range(6))]
    path = _csv(tmp_path / "b.tsv", [{"id": n, "text": text, "label": n % 2} for n, text in enumerate(texts)], "\t")
    assert sorted(_all_texts(read_custom(path))) == sorted(texts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"text": "a", "label"',
            r"^, line 2: expected JSON \(Expecting ':'.*; write one JSON object per line",
        ),
        ("[" * 100_000, "^, line 2: expected JSON.*; write one JSON object per line"),
        ('["a", 1]', "^, line 2: expected a JSON object such as .*, got a JSON list"),
        ('{"text": "a"}', "^, line 2: expected a field 'label', got 'text'; add it"),
        ('{"text": 5, "label": 1}', "^, line 2, column 'text': expected text, got 5"),
        ('{"text": null, "label": 1}', "^, line 2, column 'text': expected text, got None"),
        ('{"text": "a", "label": null}', "^, line 2, column 'label': expected a label, got an empty field"),
        ('{"text": "a", "label": ["x"]}', r"^, line 2, column 'label': expected one name or number, got \['x'\]"),
        (
            r'{"text": "a\ud800", "label": 1}',
            r"^, line 2, column 'text': expected valid Unicode, got the unpaired surrogate '\\ud800'",
        ),
    ],
)
def test_invalid_json_lines(tmp_path: Path, line: str, message: str) -> None:
    _refused(tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n' + line + "\n", message)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_text_that_is_not_utf_8(tmp_path: Path, mark: bytes) -> None:
    content = mark + GOOD.encode() + "naïve,1\n".encode("latin-1")
    message = "^, line 8: expected UTF-8, got byte 0xef; convert .*`iconv -f latin-1 -t utf-8`, or give --kind language"
    _refused(tmp_path / "a.csv", content, message)


@pytest.mark.parametrize(("encoding", "byte"), [("utf-16-le", "ff"), ("utf-16-be", "fe")])
def test_utf_16_is_named(tmp_path: Path, encoding: str, byte: str) -> None:
    message = f"^, line 1: expected UTF-8, got byte 0x{byte}; convert .*`iconv -f utf-16 -t utf-8`, or give --kind"
    _refused(tmp_path / "a.csv", f"\ufeff{GOOD}".encode(encoding), message)


@pytest.mark.parametrize(
    ("header", "options", "message"),
    [
        (
            "words,mood",
            {},
            r"^: no column is obviously the text; choose one of 'words', 'mood' .*first line\) with --text, .*",
        ),
        ("text,mood", {}, "^: no column is obviously the label; choose one of 'text', 'mood'"),
        ("text,review,label", {}, "^: columns 'text', 'review' could each be the text; choose one of"),
        ("text,label,class", {}, "^: columns 'label', 'class' could each be the label"),
        (
            "text,label",
            {"text": "txt"},
            r"^: did you mean 'text'\? expected one of the columns 'text', 'label', got 'txt'",
        ),
        ("text,label", {"label": "zzz"}, "^: expected one of the columns 'text', 'label', got 'zzz'"),
        ("text,label", {"split": "part"}, "^: expected one of the columns .*, got 'part'"),
        (
            "text,label",
            {"text": "txt", "label": "lable", "split": "part"},
            r"^: did you mean 'text' and 'label'\? expected columns among 'text', 'label', got 'txt', 'lable', 'part'$",
        ),
        ("text,label", {"label": "text"}, "^: no column is obviously the text"),
        ("text,label", {"text": "text", "label": "text"}, "^: column 'text' has two roles"),
        (
            "text,label",
            {"kind": "pairs"},
            r"^: no columns are obviously .* choose two of 'text', 'label' with --text and --second$",
        ),
        ("a,b,label", {"kind": "pairs", "text": "a"}, "^: no columns are obviously the two texts"),
        ("text1,text2,first,second,label", {}, "^: several columns could be the two texts of a pair"),
        (
            "a,b,label",
            {"kind": "classification", "second": "b"},
            "^: --second 'b' contradicts --kind classification",
        ),
        ("text,label", {"values": "x"}, "^: expected one of the columns 'text', 'label', got 'x'"),
        ("text,label", {"lengths": "x"}, "^: --lengths 'x' does not apply to tables; remove it"),
    ],
)
def test_invalid_columns(tmp_path: Path, header: str, options: dict[str, str], message: str) -> None:
    row = ",".join("a" * (header.count(",") + 1))
    _refused(tmp_path / "a.csv", f"{header}\n{row}\n", message, CustomOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [None, "classification"])
def test_a_text_in_a_column_of_numbers_makes_a_table_of_texts(tmp_path: Path, kind: Kind | None) -> None:
    message = (
        r"^: no column is obviously the text; .* with --text, columns of numbers with --values and their class with"
    )
    _refused(tmp_path / "a.csv", "a,b,label\n1,2,cat\n3,four,cat\n", message, CustomOptions(kind=kind))


def test_columns_of_numbers_can_be_texts(tmp_path: Path) -> None:
    rows = [{"text": f"{n}", "other": f"{n / 7}", "label": n % 2} for n in range(20)]
    path = _csv(tmp_path / "a.csv", rows)
    assert set(_all_texts(read_custom(path))) == {row["text"] for row in rows}
    assert set(_all_texts(read_custom(path, CustomOptions(text="other")))) == {row["other"] for row in rows}


def test_unknown_split(tmp_path: Path) -> None:
    content = "text,label,split\na,1,train\nb,2,holdout\n"
    _refused(
        tmp_path / "a.csv",
        content,
        "^, line 3, column 'split': expected one of train, .*, got 'holdout'",
        CustomOptions(split="split"),
    )


def test_many_numbers_are_not_classes(tmp_path: Path) -> None:
    rows = "".join(f"text {n},{n / 7 - 9:.3f}\n" for n in range(150))
    message = "^: expected classes, got 150 different numbers in 150 examples, for example -.*; for a regression from"
    _refused(tmp_path / "a.csv", "text,label\n" + rows, message)


@pytest.mark.parametrize(("label", "each"), [("name {}", 1), ("{}.5", 3)])
def test_many_classes(tmp_path: Path, label: str, each: int) -> None:
    path = tmp_path / "a.csv"
    labels = [label.format(n // each) for n in range(150 * each)] + ["7.5"] * 10
    path.write_text("text,label\n" + "".join(f"text {n},{label}\n" for n, label in enumerate(labels)))
    assert len(read_custom(path).metadata["class_names"]) == len(set(labels))


@pytest.mark.parametrize("file", ["table.csv", "book.txt"])
def test_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    path = tmp_path / file
    path.write_text("text,label\na,b\n" * 20)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for owner, name in ((Path, "open"), (Path, "read_bytes"), (np, "fromfile")):
        monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(DataError, match=rf"{file}: cannot be (read|opened) \(Permission denied\)"):
        list(read_custom(path).splits["train"])


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("test.csv", "text,label\n", {}, "expected rows for test, got none; add some, or remove the file"),
        ("test.csv", "review,label\na,1\n", {}, r"test\.csv, line 2: expected a field 'text', got 'review', 'label'"),
        ("test.csv", GOOD, {"split": "label"}, "the files already are splits, so --split 'label' has no use"),
        ("more.csv", GOOD, {}, r"more\.csv: expected a name that starts with train, valid or test"),
    ],
)
def test_folder_of_tables(tmp_path: Path, name: str, content: str, options: dict[str, str], message: str) -> None:
    (tmp_path / "train.csv").write_text(GOOD)
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_custom(tmp_path, CustomOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", [".csv", ".jsonl"])
def test_wide_tables_are_read_in_linear_time(tmp_path: Path, ending: str) -> None:
    names = ["text", "label", *(f"column {n}" for n in range(20_000))]
    rows = [[f"text {n}", str(n % 2), *["1"] * 20_000] for n in range(6)]
    table = tmp_path / f"wide{ending}"
    lines = [",".join(names), *map(",".join, rows)]
    if ending == ".jsonl":
        lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    table.write_text("\n".join(lines))
    begin = time.process_time()
    assert read_custom(table).metadata["class_names"] == ["0", "1"]
    with pytest.raises(DataError, match=r"'column 17' and 19,982 more, got 'nothing'") as caught:
        read_custom(table, CustomOptions(text="nothing"))
    assert len(str(caught.value)) < 1000
    # A check of each name against all others took ten seconds.
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_long_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(tables, "MAX_LINE", 100)
    text = "text,label\n" if name == "a.csv" else '{"text": "a", "label": 1}\n'
    (tmp_path / name).write_text(text + "a" * 200)
    with pytest.raises(DataError, match=f"{name}, line 2: expected fewer than 100 characters, got more; cut the text"):
        read_custom(tmp_path / name)


def test_long_field_of_several_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_LINE", 100)
    (tmp_path / "a.csv").write_text('text,label\n"' + "line\n" * 40 + '",1\n')
    with pytest.raises(DataError, match=r"a\.csv, line 2: cannot be read \(field larger than field limit \(100\)\)"):
        read_custom(tmp_path / "a.csv")


def test_table_that_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy, "available_memory", lambda: 10**9)
    (tmp_path / "a.csv").write_text(GOOD)
    os.truncate(tmp_path / "a.csv", 10**9)
    with pytest.raises(DataError, match=r"a\.csv: cannot be read \(it needs about 3\.0 GB of memory"):
        read_custom(tmp_path / "a.csv")


def test_wrong_byte_far_into_the_file(tmp_path: Path) -> None:
    """The place is right across the blocks in which the file is decoded."""
    start = GOOD.encode() + f"{'ä' * 1000},1\n".encode() * 1500
    (tmp_path / "a.csv").write_bytes(start + b"\xe4,1\n")
    line = start.count(b"\n") + 1
    with pytest.raises(DataError, match=rf"line {line}: expected UTF-8, got byte 0xe4;"):
        read_custom(tmp_path / "a.csv")
