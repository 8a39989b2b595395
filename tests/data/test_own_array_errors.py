"""Arrays that cannot be read say which, where, and what to do about it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data.custom import CustomOptions, read_custom
from tcnca.errors import DataError

VALUES = np.arange(60.0).reshape(20, 3)
HALVES = np.arange(20) % 2


def _with(index: tuple[int, ...], value: float, shape: tuple[int, ...] = (20, 3)) -> NDArray[Any]:
    values = np.zeros(shape)
    values[index] = value
    return values


def _refused(path: Path, message: str, options: CustomOptions | None = None) -> None:
    with pytest.raises(DataError) as caught:
        read_custom(path, options or CustomOptions())
    assert str(caught.value).startswith(str(path))
    assert re.search(message, str(caught.value).removeprefix(str(path))), str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"values": _with((4, 1), np.nan)}, r"^: values\[4, 1\] is nan, not a number that float32 can hold"),
        ({"x": _with((2, 1, 1), -np.inf, (5, 3, 2))}, r"^: x\[2, 1, 1\] is -inf"),
        ({"values": _with((0, 2), 1e39)}, r"^: values\[0, 2\] is 1e\+39, not a number that float32 can hold"),
        ({"values": VALUES, "targets": _with((7,), np.nan, (20,))}, r"^: targets\[7\] is nan"),
        ({"values": np.zeros(9)}, r"^: array 'values' has shape \(9,\); it must be \[examples, time\] or"),
        ({"values": np.zeros((2, 2, 2, 2))}, r"^: array 'values' has shape \(2, 2, 2, 2\)"),
        ({"values": np.zeros((0, 5))}, r"^: array 'values' has shape \(0, 5\), it is empty"),
        ({"values": np.zeros((5, 0))}, r"^: array 'values' has shape \(5, 0\), it is empty"),
        ({"values": np.array([["a"]])}, r"^: array 'values' has dtype <U1; it must hold real numbers"),
        ({"values": VALUES * 1j}, r"^: array 'values' has dtype complex128"),
        ({"values": np.array([[1, None]])}, r"^, array 'values': cannot be read .*not of objects"),
        ({"values": VALUES, "labels": HALVES[:19]}, "^: array 'labels' is for 19 examples, 'values' has 20"),
        ({"values": VALUES, "labels": np.array(1)}, "^: array 'labels' is for 0 examples, 'values' has 20"),
        ({"values": VALUES, "targets": np.zeros((3, 20))}, "^: array 'targets' is for 3 examples"),
        ({"values": VALUES, "lengths": [1] * 21}, "^: array 'lengths' is for 21 examples, 'values' has 20"),
        ({"values": VALUES, "lengths": [3] * 19 + [4]}, r"^: lengths\[19\] is 4, allowed is 1 to 3"),
        ({"values": VALUES, "lengths": [0] * 20}, r"^: lengths\[0\] is 0, allowed is 1 to 3"),
        ({"values": VALUES, "lengths": [1.0] * 20}, "^: array 'lengths' has dtype float64 .*; lengths are whole"),
        (
            {"values": VALUES, "labels": HALVES / 3},
            r"^: array 'labels' has dtype float64 .*name real numbers with --targets "
            r"\(in a recipe: data\.custom\.targets=…\)$",
        ),
        ({"values": VALUES, "labels": HALVES[:, None]}, r"^: array 'labels' has dtype int64 and shape \(20, 1\)"),
        ({"values": VALUES, "labels": HALVES * 0}, "^: every label is '0'"),
        ({"values": VALUES, "targets": np.array(["a"] * 20)}, "^: array 'targets' has dtype <U1"),
        ({"values": VALUES, "targets": np.zeros((20, 1, 1))}, r"shape \(20, 1, 1\); targets are real numbers"),
        (
            {"values": VALUES, "labels": HALVES, "targets": HALVES},
            "^: has both labels and targets; say --kind classification or --kind",
        ),
        ({"values": VALUES, "data": VALUES}, "^: arrays 'values', 'data' could each be the values"),
        (
            {"signal": VALUES, "y": HALVES},
            r"^: no array is obviously the values, there are 'signal', 'y'; say which with --values "
            r"\(in a recipe: data\.custom\.values=…\)$",
        ),
        ({"test_values": VALUES}, "^: no array is obviously the values, there are 'test_values'"),
        ({"train_x": VALUES, "x_train": VALUES}, "^: arrays 'train_x' and 'x_train' mean the same"),
        ({"values": VALUES[:2]}, "^: has 2 different examples, at least 3 are needed"),
        ({"values": np.zeros((9, 4))}, "^: has 1 different examples, at least 3 are needed"),
        (
            {"train_x": VALUES, "train_y": HALVES, "test_x": VALUES[:2], "test_y": np.array([1, 5])},
            r"^: test_y\[1\]: label '5' does not occur in the training split",
        ),
        (
            {"train_x": VALUES, "train_y": HALVES, "test_x": VALUES},
            r"^: the splits differ in what is to be predicted \(train: classification, test: forecast\)",
        ),
        (
            {"train_x": VALUES, "train_lengths": HALVES + 1, "test_x": VALUES},
            r"^: the splits differ in whether there are lengths \(train: True, test: False\)",
        ),
        (
            {"train_x": VALUES, "test_x": VALUES[..., None].repeat(2, 2)},
            r"^: the splits differ in their number of features \(train: 1, test: 2\)",
        ),
    ],
)
def test_npz(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    _refused(tmp_path / "a.npz", message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": "valeus"}, "^: has no array 'valeus', there are 'values', 'y'; did you mean 'values'"),
        ({"labels": "l"}, "^: has no array 'l'"),
        ({"lengths": "l"}, "^: has no array 'l'"),
        ({"labels": "y", "targets": "y"}, "^: --labels and --targets are both given"),
        ({"labels": "y", "kind": "regression"}, "^: --labels 'y' means classification, --kind says regression"),
        ({"targets": "y", "kind": "forecast"}, "^: --targets 'y' means regression, --kind says forecast"),
        (
            {"text": "values"},
            r"^: --text 'values' means nothing for arrays; leave it out \(in a recipe: data\.custom\.text=…\)$",
        ),
        ({"split": "y"}, "^: --split 'y' means nothing for arrays"),
    ],
)
def test_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", values=VALUES, y=HALVES)
    _refused(tmp_path / "a.npz", message, CustomOptions(**options))


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_nothing_to_predict(tmp_path: Path, kind: Any) -> None:
    np.save(tmp_path / "a.npy", VALUES)
    message = "^: no array is obviously the (labels|targets), there are 'values'; say which with --(labels|targets), or"
    _refused(tmp_path / "a.npy", message, CustomOptions(kind=kind))


@pytest.mark.parametrize(
    ("arrays", "left", "kind"),
    [
        ({"X": VALUES, "Y": HALVES, "n": HALVES}, "'Y', 'n'", "forecast"),
        ({"x": VALUES, "y": HALVES, "sizes": HALVES}, "'sizes'", "classification"),
        ({"x": VALUES, "y": HALVES / 2, "labels_": HALVES}, "'labels_'", "regression"),
        ({"x": VALUES, "labels": HALVES, "y": HALVES}, "'y'", "classification"),
        ({"train_x": VALUES, "train_Y": HALVES, "test_x": VALUES, "test_Y": HALVES}, "'train_Y', 'test_Y'", "forecast"),
        ({"train_x": VALUES, "test_x": VALUES, "rate": np.array(50)}, "'rate'", "forecast"),
        ({"values": VALUES, "train_mask": HALVES, "test_mask": HALVES}, "'train_mask', 'test_mask'", "forecast"),
    ],
)
def test_arrays_of_no_known_role(tmp_path: Path, arrays: dict[str, Any], left: str, kind: Any) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    _refused(path, f"^: the role of {left} is not known; .* --labels, .* --targets, .* --lengths, or --kind {kind} ")
    assert read_custom(path, CustomOptions(kind=kind)).kind == kind


def test_an_array_of_no_known_role_in_the_file_of_a_split(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", values=VALUES, labels=HALVES)
    np.savez(tmp_path / "test.npz", values=VALUES, labels=HALVES, n=HALVES)
    with pytest.raises(DataError, match=r"test\.npz: the role of 'n' is not known"):
        read_custom(tmp_path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (_with((4, 1), np.nan), r"^: values\[4, 1\] is nan"),
        (np.array([1.0, 2.0, np.inf]), r"^: values\[2\] is inf"),
        (np.zeros(5), "^: has 5 steps, at least 6 are needed for train and validation and test"),
        (np.zeros((2, 2, 2, 2)), r"has shape \(2, 2, 2, 2\)"),
        (np.array(3.0), r"has shape \(\)"),
        (np.zeros((0, 3)), "it is empty"),
        (np.array([None, 1]), "^, array 'values': cannot be read .*not of objects"),
    ],
)
def test_npy(tmp_path: Path, array: NDArray[Any], message: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    _refused(tmp_path / "a.npy", message)


@pytest.mark.parametrize("ending", ["npy", "npz"])
@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 no archive", b"\x93NUMPY\x01\x00\x10\x00{}"])
def test_what_is_not_a_file_of_numpy(tmp_path: Path, ending: str, content: bytes) -> None:
    path = tmp_path / f"a.{ending}"
    path.write_bytes(content)
    _refused(path, "cannot be read")


def test_a_npz_with_a_flipped_bit(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, values=VALUES)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    _refused(path, "^, array 'values': cannot be read .*CRC")


def test_two_files_for_a_split(tmp_path: Path) -> None:
    for name in ("train1.npz", "train2.npz", "test.npz"):
        np.savez(tmp_path / name, values=VALUES)
    _refused(tmp_path, "^: has 2 files for train; join their arrays in one")


def test_header_that_promises_more_than_fits(tmp_path: Path) -> None:
    path = tmp_path / "series.npy"
    np.save(path, np.zeros(4))
    path.write_bytes(path.read_bytes().replace(b"(4,), }" + b" " * 15, b"(4" + b"0" * 15 + b",), }"))
    with pytest.raises(DataError, match=r"series\.npy, array 'values': cannot be read \(Unable to allocate"):
        read_custom(path)


def test_archive_packed_in_an_unknown_way(tmp_path: Path) -> None:
    path = tmp_path / "signals.npz"
    np.savez(path, values=np.zeros((9, 4)), labels=np.arange(9) % 2)
    raw = bytearray(path.read_bytes())
    for magic, place in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        begin = raw.find(magic)
        while begin >= 0:
            raw[begin + place] = 99
            begin = raw.find(magic, begin + 1)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"signals\.npz, array 'labels': cannot be read \(That compression method"):
        read_custom(path)
