"""Tables that cannot be read say where, why, and what to do about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tcnca.data.custom import CustomOptions, read_custom
from tcnca.errors import DataError

GOOD = "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(6))


def _refused(path: Path, content: str | bytes, message: str, options: CustomOptions | None = None) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        read_custom(path, options or CustomOptions())
    assert str(caught.value).startswith(str(path))
    assert re.search(message, str(caught.value).removeprefix(str(path))), str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "^: has no rows"),
        ("text,label\n", "^: has no rows"),
        ("text,label,text\na,1,b\n", "^, line 1: two columns are called 'text'"),
        (GOOD + "too,many,1\n", "^, line 8: has 3 fields, there are 2 columns; put a field that holds the delimiter"),
        (GOOD + "too few\n", "^, line 8: field 'label' is missing, the row has 1 of 2"),
        (GOOD + "text, \n", "^, line 8: label 'label' is empty"),
        (GOOD + '"never closed,1\nnext,1\n', r"^, line 8: cannot be read \(unexpected end of data\)"),
        (GOOD + '"two\nlines",1\nbad\n', "^, line 10: field 'label' is missing"),
        ("text,label\n,1\n,0\n,1\n", "^: column 'text' is empty in every row; say with --text"),
        ("first,second,label\na,,1\nb,,0\nc,,1\n", "^: column 'second' is empty in every row; say with --second"),
        ("text,label\n" + "a,1\nb,1\nc,1\n", "^: every label is '1'; classification needs at least two classes"),
        ("text,label\na,1\nb,2\n", "^: has 2 different examples, at least 3 are needed to draw validation and test"),
        ("text,label\na,1\nb,2\nc,3\n", "^: no class has 3 different examples to draw validation and test from"),
    ],
)
def test_csv(tmp_path: Path, content: str, message: str) -> None:
    _refused(tmp_path / "a.csv", content, message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "label"', r"^, line 2: is not JSON \(Expecting ':'.*; each line is one JSON object"),
        ("[" * 100_000, "^, line 2: is not JSON"),
        ('["a", 1]', "^, line 2: holds a JSON list"),
        ('{"text": "a"}', "^, line 2: field 'label' is missing, there are 'text'"),
        ('{"text": 5, "label": 1}', "^, line 2: field 'text' holds 5, it must be text"),
        ('{"text": null, "label": 1}', "^, line 2: field 'text' holds null, it must be text"),
        ('{"text": "a", "label": null}', "^, line 2: label 'label' is empty"),
        ('{"text": "a", "label": ["x"]}', r"^, line 2: label 'label' holds \[\"x\"\], it must be one name or number"),
        (r'{"text": "a\ud800", "label": 1}', r"^, line 2: field 'text' holds half a character, '\\ud800'"),
    ],
)
def test_json_lines(tmp_path: Path, line: str, message: str) -> None:
    _refused(tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n' + line + "\n", message)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_text_that_is_not_utf_8(tmp_path: Path, mark: bytes) -> None:
    content = mark + GOOD.encode() + "naïve,1\n".encode("latin-1")
    offset = content.index(b"\xef", 3)
    message = (
        f"^, line 8: byte 0xef at offset {offset} is not UTF-8; convert the file, .*`iconv -f latin-1 -t utf-8`, "
        "or --kind language"
    )
    _refused(tmp_path / "a.csv", content, message)


def test_the_bad_byte_is_found_far_into_the_file(tmp_path: Path) -> None:
    content = GOOD.encode() + b"filler,1\n" * 5000 + b"\xff,1\n"
    _refused(tmp_path / "a.csv", content, f"^, line 5008: byte 0xff at offset {len(content) - 4} is not UTF-8")


@pytest.mark.parametrize(
    ("header", "options", "message"),
    [
        ("words,mood", {}, "^: no column is obviously the text, there are 'words', 'mood' .*; say which with --text,"),
        ("text,mood", {}, "^: no column is obviously the label, there are 'text', 'mood'"),
        ("text,review,label", {}, "^: columns 'text', 'review' could each be the text, there are 'text', 'review'"),
        ("text,label,class", {}, "^: columns 'label', 'class' could each be the label"),
        ("text,label", {"text": "txt"}, "^: has no column 'txt', there are 'text', 'label'; did you mean 'text'"),
        ("text,label", {"label": "zzz"}, "^: has no column 'zzz', there are 'text', 'label'; name one of them"),
        ("text,label", {"split": "part"}, "^: has no column 'part'"),
        ("text,label", {"label": "text"}, "^: no column is obviously the text"),
        ("text,label", {"text": "text", "label": "text"}, "^: column 'text' is to be two things at once"),
        (
            "text,label",
            {"kind": "pairs"},
            r"^: no columns are obviously .* name them with --text and --second "
            r"\(in a recipe: data\.custom\.text=…, data\.custom\.second=…\)$",
        ),
        ("a,b,label", {"kind": "pairs", "text": "a"}, "^: no columns are obviously the two texts"),
        ("text1,text2,first,second,label", {}, "^: several columns could be the two texts of a pair"),
        (
            "a,b,label",
            {"kind": "classification", "second": "b"},
            "^: --second 'b' makes pairs, --kind says classification",
        ),
        ("text,label", {"values": "x"}, "^: --values 'x' means nothing for tables; leave it out"),
    ],
)
def test_columns(tmp_path: Path, header: str, options: dict[str, str], message: str) -> None:
    row = ",".join("1" * (header.count(",") + 1))
    _refused(tmp_path / "a.csv", f"{header}\n{row}\n", message, CustomOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "first_line"),
    [
        ("a.csv", "words,label\n1,1\n", " (the first line names them)"),
        ("a.tsv", "words\tlabel\n1\t1\n", " (the first line names them)"),
        ("a.jsonl", '{"words": "1", "label": 1}', ""),
    ],
)
def test_columns_are_explained_as_the_file_has_them(tmp_path: Path, name: str, content: str, first_line: str) -> None:
    message = f": no column is obviously the text, there are 'words', 'label'{first_line}; say which with --text, or "
    message += "--kind language to learn the bytes as they are"
    message += " (in a recipe: data.custom.text=…, data.custom.kind=language)"
    _refused(tmp_path / name, content, "^" + re.escape(message) + "$")


def test_a_split_that_does_not_exist(tmp_path: Path) -> None:
    content = "text,label,split\na,1,train\nb,2,holdout\n"
    _refused(
        tmp_path / "a.csv", content, "^, line 3: 'split' says 'holdout', allowed are", CustomOptions(split="split")
    )


def test_a_column_of_splits_in_files_that_are_splits(tmp_path: Path) -> None:
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(GOOD)
    with pytest.raises(DataError, match="the files are splits already, --split 'label' would be others; leave it out"):
        read_custom(tmp_path, CustomOptions(split="label"))


def test_columns_are_the_same_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text(GOOD)
    (tmp_path / "test.csv").write_text("review,label\na,1\n")
    with pytest.raises(DataError, match=r"test\.csv, line 2: field 'text' is missing, there are 'review', 'label'"):
        read_custom(tmp_path)


def test_numbers_are_not_classes(tmp_path: Path) -> None:
    rows = "".join(f"text {n},{n / 7 - 9:.3f}\n" for n in range(150))
    message = r"^: has 150 different labels in 150 examples, such as -.*; they look like numbers to regress.* arrays"
    _refused(tmp_path / "a.csv", "text,label\n" + rows, message)


@pytest.mark.parametrize(("label", "each"), [("name {}", 1), ("{}.5", 3)])
def test_many_classes_are_classes_if_they_are_names_or_come_again(tmp_path: Path, label: str, each: int) -> None:
    path = tmp_path / "a.csv"
    labels = [label.format(n // each) for n in range(150 * each)] + ["7.5"] * 10
    path.write_text("text,label\n" + "".join(f"text {n},{label}\n" for n, label in enumerate(labels)))
    assert len(read_custom(path).metadata["class_names"]) == len(set(labels))


@pytest.mark.parametrize("name", ["table.csv", "book.txt"])
def test_a_file_that_fails_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / name
    path.write_text("text,label\na,b\n" * 20)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=rf"{name}: cannot be read \(Permission denied\)"):
        list(read_custom(path).splits["train"])
