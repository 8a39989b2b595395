"""The form of the data is found out from the files, and what does not fit it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcnca.data.content import Kind
from tcnca.data.own import OwnOptions, read_own
from tcnca.errors import DataError

TABLE = "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(8))


def _make(folder: Path, name: str) -> Path:
    path = folder / name
    if path.suffix in (".npy", ".npz"):
        arrays = {"values": np.arange(40.0).reshape(20, 2), "labels": np.arange(20) % 2}
        np.savez(path, **arrays) if path.suffix == ".npz" else np.save(path, arrays["values"])  # type: ignore[arg-type]
    else:
        path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.csv", "classification"),
        ("a.npz", "classification"),
        ("a.npy", "forecast"),
        ("a.txt", "language"),
        ("a", "language"),
        ("a.gz", "language"),
    ],
)
def test_kind_of_a_file(tmp_path: Path, name: str, kind: Kind) -> None:
    assert read_own(_make(tmp_path, name)).kind == kind


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["train.csv", "test.csv"], "classification"),
        (["train.npz", "test.npz"], "classification"),
        (["train.txt", "test.csv"], "language"),
        (["a.csv", "b.txt"], "language"),
    ],
)
def test_kind_of_a_folder(tmp_path: Path, names: list[str], kind: Kind) -> None:
    for name in names:
        _make(tmp_path, name)
    assert read_own(tmp_path).kind == kind


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("a.npz", "pairs", r"needs tables \(.csv.*\); for what is there, allowed is classification, regression, fore"),
        ("a.csv", "regression", r"needs arrays \(.npy, .npz\); for what is there, allowed is classification, pairs, l"),
        ("a.csv", "forecast", r"kind forecast needs arrays"),
        ("a.txt", "classification", r"needs tables \(.*\) or arrays \(.*\); for what is there, allowed is language"),
    ],
)
def test_kinds_that_do_not_fit(tmp_path: Path, name: str, kind: Kind, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_own(_make(tmp_path, name), OwnOptions(kind=kind))


@pytest.mark.parametrize("name", ["a.csv", "a.npz", "a.npy", "a.txt"])
def test_everything_is_bytes_if_the_user_says_so(tmp_path: Path, name: str) -> None:
    path = _make(tmp_path, name)
    content = read_own(path, OwnOptions(kind="language"))
    parts = [np.asarray(part["bytes"]).tobytes() for parts in content.splits.values() for part in parts]
    assert b"".join(parts) == path.read_bytes()


def test_tables_beside_arrays(tmp_path: Path) -> None:
    for name in ("train.csv", "test.npz"):
        _make(tmp_path, name)
    with pytest.raises(DataError, match="holds both tables and arrays; move one of them away"):
        read_own(tmp_path, OwnOptions(kind="classification"))


@pytest.mark.parametrize("name", ["a.csv.gz", "b.jsonl.xz"])
def test_packed_tables_are_not_mistaken_for_text(tmp_path: Path, name: str) -> None:
    path = _make(tmp_path, name)
    with pytest.raises(DataError, match="is packed; unpack it first"):
        read_own(path)
    assert read_own(path, OwnOptions(kind="language")).kind == "language"


@pytest.mark.parametrize("option", ["text", "second", "label", "split", "values", "labels", "targets", "lengths"])
def test_options_that_mean_nothing_for_bytes(tmp_path: Path, option: str) -> None:
    chosen: dict[str, Any] = {option: "name"}
    with pytest.raises(DataError, match=f"{option}='name' means nothing for bytes"):
        read_own(_make(tmp_path, "a.txt"), OwnOptions(**chosen))


def test_a_kind_that_does_not_exist() -> None:
    with pytest.raises(DataError, match="kind: got 'translation', allowed are language, classification, pairs"):
        OwnOptions(kind="translation")  # type: ignore[arg-type]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing: there is no such file or folder"):
        read_own(tmp_path / "missing")
