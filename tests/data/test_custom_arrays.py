"""Real-valued arrays: their roles, splits and statistics, and errors that name the place and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data.custom import CustomOptions, read_custom
from tcnca.data.schema import Column, Content, Ragged
from tests.data.helpers import assert_refused

Array = NDArray[Any]


def _noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape) * 3 + 5


def _npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def _column(content: Content, split: str, name: str = "values") -> Column:
    (columns,) = content.splits[split]
    return columns[name]


def _array(content: Content, split: str, name: str = "values") -> Array:
    column = _column(content, split, name)
    assert not isinstance(column, Ragged)
    return column


def _labels(content: Content, split: str) -> list[str]:
    return [content.metadata["class_names"][label] for label in _array(content, split, "labels")]


def test_a_classification(tmp_path: Path) -> None:
    values, labels = _noise(40, 6, 2), np.arange(40) % 4 * 10
    content = read_custom(_npz(tmp_path / "a.npz", values=values, labels=labels))
    assert (content.kind, content.origin, content.verified) == ("classification", "a.npz", False)
    assert content.metadata["class_names"] == ["0", "10", "20", "30"]
    assert {split: len(_array(content, split)) for split in content.splits} == {"train": 36, "validation": 2, "test": 2}
    left = set(range(40))
    for split in content.splits:
        found = _array(content, split)
        assert found.dtype == np.float32
        assert found.shape[1:] == (6, 2)
        places = [int(np.flatnonzero((values.astype(np.float32) == one).all((1, 2)))[0]) for one in found]
        assert places == sorted(places)
        assert _labels(content, split) == [str(labels[place]) for place in places]
        left -= set(places)
    assert not left


@pytest.mark.parametrize("name", ["values", "x", "X", "data", "sequences", "inputs"])
def test_names_of_the_values(tmp_path: Path, name: str) -> None:
    content = read_custom(_npz(tmp_path / "a.npz", **{name: _noise(20, 5)}))
    assert content.kind == "forecast"
    assert _array(content, "train").shape == (18, 5, 1)


@pytest.mark.parametrize(
    ("y", "kind", "classes"),
    [
        (np.arange(30) % 3, "classification", ["0", "1", "2"]),
        (np.arange(30) % 2 > 0, "classification", ["false", "true"]),
        (np.arange(30)[:, None] % 2, "classification", ["0", "1"]),
        (np.array(["b", "a", "ü"] * 10), "classification", ["a", "b", "ü"]),
        (np.array([b"b", b"a"] * 15), "classification", ["a", "b"]),
        (np.linspace(0, 1, 30), "regression", None),
        (np.zeros((30, 2), np.float16), "regression", None),
    ],
)
def test_dtype_of_y_determines_the_task(tmp_path: Path, y: Array, kind: str, classes: list[str] | None) -> None:
    content = read_custom(_npz(tmp_path / "a.npz", x=_noise(30, 5), y=y))
    assert content.kind == kind
    assert content.metadata.get("class_names") == classes


def test_a_regression(tmp_path: Path) -> None:
    values, targets = _noise(40, 5, 1), _noise(40, 3, seed=1)
    content = read_custom(_npz(tmp_path / "a.npz", values=values, targets=targets))
    assert content.kind == "regression"
    for split in content.splits:
        found = _array(content, split)
        places = [int(np.flatnonzero((values.astype(np.float32) == one).all((1, 2)))[0]) for one in found]
        np.testing.assert_array_equal(_array(content, split, "targets"), targets[places].astype(np.float32))
        assert _array(content, split, "targets").dtype == np.float32


def test_named_arrays(tmp_path: Path) -> None:
    path = _npz(tmp_path / "a.npz", ecg=_noise(20, 5), x=_noise(3, 3), beat=np.arange(20) % 2, size=np.full(20, 3))
    content = read_custom(path, CustomOptions(values="ecg", labels="beat", lengths="size"))
    assert content.kind == "classification"
    column = _column(content, "train")
    assert isinstance(column, Ragged)
    assert set(column.lengths) == {3}
    assert read_custom(path, CustomOptions(values="ecg", targets="beat")).kind == "regression"


@pytest.mark.parametrize("kind", ["classification", "regression", "forecast"])
def test_kind_chooses_labels_or_targets(tmp_path: Path, kind: Any) -> None:
    path = _npz(tmp_path / "a.npz", x=_noise(20, 5), labels=np.arange(20) % 2, targets=np.arange(20.0))
    content = read_custom(path, CustomOptions(kind=kind))
    assert content.kind == kind
    (columns,) = content.splits["train"]
    aim = {"classification": ["labels"], "regression": ["targets"], "forecast": []}[kind]
    assert list(columns) == ["values", *aim]


def test_padding_is_removed(tmp_path: Path) -> None:
    values, lengths = _noise(30, 8, 2), np.random.default_rng(1).integers(1, 9, 30)
    values[np.arange(8) >= lengths[:, None]] = np.nan
    content = read_custom(_npz(tmp_path / "a.npz", values=values, lengths=lengths, labels=np.arange(30) % 2))
    kept = {values[n, : lengths[n]].astype(np.float32).tobytes() for n in range(30)}
    for split in content.splits:
        column = _column(content, split)
        assert isinstance(column, Ragged)
        assert column.values.dtype == np.float32
        assert column.values.shape[1:] == (2,)
        kept -= {np.ascontiguousarray(column[index]).tobytes() for index in range(len(column))}
    assert not kept


def test_equal_sequences_stay_in_one_split(tmp_path: Path) -> None:
    values = _noise(10, 4)[np.arange(60) % 10]
    content = read_custom(_npz(tmp_path / "a.npz", values=values), CustomOptions(validation=0.2, test=0.2))
    seen = [{one.tobytes() for one in _array(content, split)} for split in content.splits]
    assert [len(some) for some in seen] == [6, 2, 2]
    assert len(set.union(*seen)) == 10


@pytest.mark.parametrize("shape", [(200,), (200, 3)])
def test_npy_is_one_series(tmp_path: Path, shape: tuple[int, ...]) -> None:
    series = _noise(*shape)
    np.save(tmp_path / "a.npy", series)
    content = read_custom(tmp_path / "a.npy")
    assert content.kind == "forecast"
    whole = series.astype(np.float32).reshape(1, 200, -1)
    for split, (begin, end) in {"train": (0, 180), "validation": (180, 190), "test": (190, 200)}.items():
        np.testing.assert_array_equal(_array(content, split), whole[:, begin:end])


@pytest.mark.parametrize("name", ["{split}_{what}", "{what}_{split}"])
def test_splits_from_names(tmp_path: Path, name: str) -> None:
    arrays = {}
    for number, split in enumerate(("test", "train", "val")):
        arrays[name.format(split=split, what="x")] = _noise(10, 4, 1, seed=number)
        arrays[name.format(split=split, what="y")] = np.arange(10) % 2
    content = read_custom(_npz(tmp_path / "a.npz", **arrays))
    assert list(content.splits) == ["train", "validation", "test"]
    for split, word in {"train": "train", "validation": "val", "test": "test"}.items():
        wanted = arrays[name.format(split=word, what="x")].astype(np.float32)
        np.testing.assert_array_equal(_array(content, split), wanted)


@pytest.mark.parametrize("test", [True, False])
def test_arrays_without_a_split_are_for_training(tmp_path: Path, test: bool) -> None:
    arrays = {"values": _noise(40, 4), "labels": np.arange(40) % 2}
    for number, split in enumerate(("val", "test")[: 1 + test]):
        arrays |= {f"{split}_values": _noise(4, 4, seed=1 + number), f"{split}_labels": np.arange(4) % 2}
    content = read_custom(_npz(tmp_path / "a.npz", **arrays))
    assert {split: len(_array(content, split)) for split in content.splits} == (
        {"train": 40, "validation": 4, "test": 4} if test else {"train": 40, "validation": 4}
    )
    np.testing.assert_array_equal(_array(content, "validation")[..., 0], arrays["val_values"].astype(np.float32))


def test_splits_from_files(tmp_path: Path) -> None:
    train, test = _noise(40, 4), _noise(7, 5, seed=1)
    _npz(tmp_path / "train.npz", values=train, labels=np.arange(40) % 2)
    _npz(tmp_path / "test.npz", values=test, labels=np.arange(7) % 2)
    content = read_custom(tmp_path)
    assert [_array(content, split).shape for split in content.splits] == [(38, 4, 1), (2, 4, 1), (7, 5, 1)]
    np.testing.assert_array_equal(_array(content, "test")[..., 0], test.astype(np.float32))


def test_statistics_are_of_the_training_split(tmp_path: Path) -> None:
    train, test = _noise(50, 6, 3), 100 + _noise(5, 6, 3)
    train[..., 1] = 0.1
    content = read_custom(_npz(tmp_path / "a.npz", train_values=train, val_values=test, test_values=test))
    wanted = train.astype(np.float32).astype(np.float64).reshape(-1, 3)
    np.testing.assert_allclose(content.metadata["mean"], [sum(f) / 300 for f in wanted.T], rtol=1e-12)
    deviation = [np.sqrt(sum((f - sum(f) / 300) ** 2) / 300) for f in wanted.T]
    np.testing.assert_allclose(content.metadata["std"], [deviation[0], 1.0, deviation[2]], rtol=1e-12)
    np.testing.assert_array_equal(_array(content, "train"), train.astype(np.float32))


VALUES = np.arange(60.0).reshape(20, 3)
HALVES = np.arange(20) % 2


def _with(index: tuple[int, ...], value: float, shape: tuple[int, ...] = (20, 3)) -> NDArray[Any]:
    values = np.zeros(shape)
    values[index] = value
    return values


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"values": _with((4, 1), np.nan)}, r"^: values\[4, 1\]: expected a finite float32 number, got nan"),
        ({"x": _with((2, 1, 1), -np.inf, (5, 3, 2))}, r"^: x\[2, 1, 1\]: expected a finite float32 number, got -inf"),
        ({"values": _with((0, 2), 1e39)}, r"^: values\[0, 2\]: expected a finite float32 number, got 1e\+39"),
        (
            {"values": VALUES, "targets": _with((7,), np.nan, (20,))},
            r"^: targets\[7\]: expected a finite float32 number, got nan",
        ),
        (
            {"values": np.zeros(9)},
            r"^: array 'values': expected shape \[examples, time\] or .*, got \(9,\); save one long series as \.npy",
        ),
        ({"values": np.zeros((5, 0))}, r"^: array 'values': expected values, got an empty array of shape \(5, 0\)"),
        ({"values": np.array([["a"]])}, r"^: array 'values': expected real numbers, got <U1"),
        ({"values": VALUES * 1j}, r"^: array 'values': expected real numbers, got complex128"),
        ({"values": np.array([[1, None]])}, r"^, array 'values': cannot be read .*not of objects"),
        ({"values": VALUES, "labels": HALVES[:19]}, "^: array 'labels': expected 20 examples, as in 'values', got 19"),
        ({"values": VALUES, "labels": np.array(1)}, "^: array 'labels': expected 20 examples, as in 'values', got 0"),
        ({"values": VALUES, "lengths": [1] * 21}, "^: array 'lengths': expected 20 examples, as in 'values', got 21"),
        ({"values": VALUES, "lengths": [3] * 19 + [4]}, r"^: lengths\[19\]: expected 1 to 3, .*, got 4"),
        ({"values": VALUES, "lengths": [0] * 20}, r"^: lengths\[0\]: expected 1 to 3, .*, got 0"),
        ({"values": VALUES, "lengths": [1.0] * 20}, "^: array 'lengths': expected integers .*, got float64"),
        (
            {"values": VALUES, "labels": HALVES / 3},
            r"^: array 'labels': expected integers, .*, got float64 .*name real numbers with --targets$",
        ),
        (
            {"values": VALUES, "labels": HALVES[:, None].repeat(2, 1)},
            r"^: array 'labels': expected .*, got int64 of shape \(20, 2\)",
        ),
        ({"values": VALUES, "labels": HALVES * 0}, "^: expected at least two classes, got only '0'"),
        ({"values": VALUES, "targets": np.array(["a"] * 20)}, "^: array 'targets': expected targets .*, got <U1"),
        (
            {"values": VALUES, "targets": np.zeros((20, 1, 1))},
            r"expected targets of shape .*, got float64 of shape \(20, 1, 1\)",
        ),
        (
            {"values": VALUES, "labels": HALVES, "targets": HALVES},
            "^: has labels and targets; give --kind classification or --kind",
        ),
        ({"values": VALUES, "data": VALUES}, "^: arrays 'values', 'data' could each be the values"),
        (
            {"signal": VALUES, "y": HALVES},
            r"^: no array is obviously the values; choose one of 'signal', 'y' with --values$",
        ),
        ({}, r"^: cannot be read \(expected arrays, got none\); save it again with np\.save or np\.savez"),
        ({"test_values": VALUES}, "^: no array is obviously the values; choose one of 'test_values'"),
        ({"val_x": VALUES, "test_x": VALUES}, "^: no array is obviously the values; choose one of 'val_x', 'test_x'"),
        ({"train_x": VALUES, "x_train": VALUES}, "^: arrays 'train_x' and 'x_train' mean the same"),
        ({"values": np.zeros((9, 4))}, "^: expected at least 3 different examples .*, got 1"),
        (
            {"train_x": VALUES, "train_y": HALVES, "test_x": VALUES[:2], "test_y": np.array([1, 5])},
            r"^: test_y\[1\]: expected a label of the training split, got '5'",
        ),
        (
            {"train_x": VALUES, "train_y": HALVES, "test_x": VALUES},
            r"^: expected the same task in all splits, got train: classification, test: forecast",
        ),
        (
            {"train_x": VALUES, "train_lengths": HALVES + 1, "test_x": VALUES},
            r"^: expected the same presence of lengths in all splits, got train: True, test: False",
        ),
        (
            {"train_x": VALUES, "test_x": VALUES[..., None].repeat(2, 2)},
            r"^: expected the same number of features in all splits, got train: 1, test: 2",
        ),
    ],
)
def test_invalid_npz(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    assert_refused(tmp_path / "a.npz", message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": "valeus"}, r"^: did you mean 'values'\? expected one of the arrays 'values', 'y', got 'valeus'"),
        ({"lengths": "l"}, "^: expected one of the arrays .*, got 'l'"),
        ({"labels": "y", "targets": "y"}, "^: expected --labels or --targets, got both"),
        (
            {"labels": "y", "kind": "regression"},
            "^: --labels 'y' means classification and contradicts --kind regression",
        ),
        ({"targets": "y", "kind": "forecast"}, "^: --targets 'y' means regression and contradicts --kind forecast"),
        (
            {"text": "values"},
            r"^: --text 'values' does not apply to arrays; remove it$",
        ),
    ],
)
def test_invalid_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "a.npz", values=VALUES, y=HALVES)
    assert_refused(tmp_path / "a.npz", message, CustomOptions(**options))


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_nothing_to_predict(tmp_path: Path, kind: Any) -> None:
    np.save(tmp_path / "a.npy", VALUES)
    message = "^: no array is obviously the (labels|targets); choose one of 'values' with --(labels|targets), or"
    assert_refused(tmp_path / "a.npy", message, CustomOptions(kind=kind))


@pytest.mark.parametrize(
    ("arrays", "left", "kind"),
    [
        ({"X": VALUES, "Y": HALVES, "n": HALVES}, "'Y', 'n'", "forecast"),
        ({"x": VALUES, "y": HALVES, "sizes": HALVES}, "'sizes'", "classification"),
        ({"x": VALUES, "y": HALVES / 2, "labels_": HALVES}, "'labels_'", "regression"),
        ({"x": VALUES, "labels": HALVES, "y": HALVES}, "'y'", "classification"),
        ({"train_x": VALUES, "train_Y": HALVES, "test_x": VALUES, "test_Y": HALVES}, "'train_Y', 'test_Y'", "forecast"),
        ({"train_x": VALUES, "test_x": VALUES, "rate": np.array(50)}, "'rate'", "forecast"),
        ({"x": VALUES, "test_time": HALVES}, "'test_time'", "forecast"),
        ({"values": VALUES, "train_mask": HALVES, "test_mask": HALVES}, "'train_mask', 'test_mask'", "forecast"),
    ],
)
def test_arrays_of_unknown_role(tmp_path: Path, arrays: dict[str, Any], left: str, kind: Any) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **arrays)
    assert_refused(
        path, f"^: the role of {left} is unknown; .* --labels, .* --targets, .* --lengths, or give --kind {kind} "
    )
    assert read_custom(path, CustomOptions(kind=kind)).kind == kind


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (_with((4, 1), np.nan), r"^: values\[4, 1\]: expected a finite float32 number, got nan"),
        (np.zeros(5), "^: expected at least 6 time steps for train and validation and test, got 5"),
        (np.zeros((2, 2, 2, 2)), r"expected shape .*, got \(2, 2, 2, 2\)"),
        (np.array(3.0), r"expected shape .*, got \(\)"),
        (np.zeros((0, 3)), "got an empty array"),
        (np.array([None, 1]), "^, array 'values': cannot be read .*not of objects"),
    ],
)
def test_invalid_npy(tmp_path: Path, array: NDArray[Any], message: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    assert_refused(tmp_path / "a.npy", message)


@pytest.mark.parametrize("ending", ["npy", "npz"])
@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 no archive", b"\x93NUMPY\x01\x00\x10\x00{}"])
def test_damaged_files(tmp_path: Path, ending: str, content: bytes) -> None:
    path = tmp_path / f"a.{ending}"
    path.write_bytes(content)
    assert_refused(path, "cannot be read")


def test_two_files_for_a_split(tmp_path: Path) -> None:
    for name in ("train1.npz", "train2.npz", "test.npz"):
        np.savez(tmp_path / name, values=VALUES)
    assert_refused(tmp_path, "^: expected one file for train, got 2; join their arrays")
