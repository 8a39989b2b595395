"""Arrays of real values: what each is, how they are split, and the scale of the training values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data.custom import CustomOptions, read_custom
from tcnca.data.schema import Column, Content, Ragged

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
    ("y", "kind", "class_names"),
    [
        (np.arange(30) % 3, "classification", ["0", "1", "2"]),
        (np.arange(30) % 2 > 0, "classification", ["false", "true"]),
        (np.array(["b", "a", "ü"] * 10), "classification", ["a", "b", "ü"]),
        (np.array([b"b", b"a"] * 15), "classification", ["a", "b"]),
        (np.linspace(0, 1, 30), "regression", None),
        (np.zeros((30, 2), np.float16), "regression", None),
    ],
)
def test_the_type_of_y_decides(tmp_path: Path, y: Array, kind: str, classes: list[str] | None) -> None:
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


def test_arrays_are_named(tmp_path: Path) -> None:
    path = _npz(tmp_path / "a.npz", ecg=_noise(20, 5), x=_noise(3, 3), beat=np.arange(20) % 2, size=np.full(20, 3))
    content = read_custom(path, CustomOptions(values="ecg", labels="beat", lengths="size"))
    assert content.kind == "classification"
    column = _column(content, "train")
    assert isinstance(column, Ragged)
    assert set(column.lengths) == {3}
    assert read_custom(path, CustomOptions(values="ecg", targets="beat")).kind == "regression"


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"labels": "Y"}, "classification"), ({"targets": "Y"}, "regression"), ({"kind": "forecast"}, "forecast")],
)
def test_arrays_that_are_not_named_are_left_out(tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    path = _npz(tmp_path / "a.npz", X=_noise(20, 5), Y=np.arange(20) % 2, n=np.full(20, 3))
    content = read_custom(path, CustomOptions(**options))
    assert content.kind == kind
    assert _array(content, "train").shape == (18, 5, 1)


@pytest.mark.parametrize("kind", ["classification", "regression", "forecast"])
def test_the_kind_decides_between_labels_and_targets(tmp_path: Path, kind: Any) -> None:
    path = _npz(tmp_path / "a.npz", x=_noise(20, 5), labels=np.arange(20) % 2, targets=np.arange(20.0))
    content = read_custom(path, CustomOptions(kind=kind))
    assert content.kind == kind
    (columns,) = content.splits["train"]
    aim = {"classification": ["labels"], "regression": ["targets"], "forecast": []}[kind]
    assert list(columns) == ["values", *aim]


def test_sequences_are_cut_to_their_lengths(tmp_path: Path) -> None:
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


def test_what_lies_beyond_the_length_makes_no_difference(tmp_path: Path) -> None:
    """Sequences that differ in their padding alone are the same, and stay together."""
    values = np.repeat(_noise(20, 6), 2, axis=0)
    values[1::2, 4:] = 0
    content = read_custom(_npz(tmp_path / "a.npz", values=values, lengths=np.full(40, 4)))
    for split in content.splits:
        column = _column(content, split)
        found = [column[index].tobytes() for index in range(len(column))]
        assert len(found) == 2 * len(set(found))


def test_the_same_sequence_never_is_in_two_splits(tmp_path: Path) -> None:
    values = _noise(10, 4)[np.arange(60) % 10]
    content = read_custom(_npz(tmp_path / "a.npz", values=values), CustomOptions(validation=0.2, test=0.2))
    seen = [{one.tobytes() for one in _array(content, split)} for split in content.splits]
    assert [len(some) for some in seen] == [6, 2, 2]
    assert len(set.union(*seen)) == 10


@pytest.mark.parametrize("shape", [(200,), (200, 3)])
def test_a_npy_is_one_long_series(tmp_path: Path, shape: tuple[int, ...]) -> None:
    series = _noise(*shape)
    np.save(tmp_path / "a.npy", series)
    content = read_custom(tmp_path / "a.npy")
    assert content.kind == "forecast"
    whole = series.astype(np.float32).reshape(1, 200, -1)
    for split, (begin, end) in {"train": (0, 180), "validation": (180, 190), "test": (190, 200)}.items():
        np.testing.assert_array_equal(_array(content, split), whole[:, begin:end])


@pytest.mark.parametrize("name", ["{split}_{what}", "{what}_{split}"])
def test_names_give_the_splits(tmp_path: Path, name: str) -> None:
    arrays = {}
    for number, split in enumerate(("test", "train", "val")):
        arrays[name.format(split=split, what="x")] = _noise(10, 4, 1, seed=number)
        arrays[name.format(split=split, what="y")] = np.arange(10) % 2
    content = read_custom(_npz(tmp_path / "a.npz", **arrays))
    assert list(content.splits) == ["train", "validation", "test"]
    for split, word in {"train": "train", "validation": "val", "test": "test"}.items():
        wanted = arrays[name.format(split=word, what="x")].astype(np.float32)
        np.testing.assert_array_equal(_array(content, split), wanted)


def test_files_give_the_splits(tmp_path: Path) -> None:
    train, test = _noise(40, 4), _noise(7, 5, seed=1)
    _npz(tmp_path / "train.npz", values=train, labels=np.arange(40) % 2)
    _npz(tmp_path / "test.npz", values=test, labels=np.arange(7) % 2)
    content = read_custom(tmp_path)
    assert [_array(content, split).shape for split in content.splits] == [(38, 4, 1), (2, 4, 1), (7, 5, 1)]
    np.testing.assert_array_equal(_array(content, "test")[..., 0], test.astype(np.float32))


def test_series_give_the_splits(tmp_path: Path) -> None:
    np.save(tmp_path / "train.npy", np.arange(100.0))
    np.save(tmp_path / "test.npy", np.arange(9.0))
    content = read_custom(tmp_path)
    assert list(content.splits) == ["train", "validation", "test"]
    np.testing.assert_array_equal(_array(content, "validation").ravel(), np.arange(95, 100))
    np.testing.assert_array_equal(_array(content, "test").ravel(), np.arange(9))


def test_scale_is_that_of_training(tmp_path: Path) -> None:
    train, test = _noise(50, 6, 3), 100 + _noise(5, 6, 3)
    train[..., 1] = 0.1
    content = read_custom(_npz(tmp_path / "a.npz", train_values=train, val_values=test, test_values=test))
    wanted = train.astype(np.float32).astype(np.float64).reshape(-1, 3)
    np.testing.assert_allclose(content.metadata["mean"], [sum(f) / 300 for f in wanted.T], rtol=1e-12)
    deviation = [np.sqrt(sum((f - sum(f) / 300) ** 2) / 300) for f in wanted.T]
    np.testing.assert_allclose(content.metadata["std"], [deviation[0], 1.0, deviation[2]], rtol=1e-12)
    np.testing.assert_array_equal(_array(content, "train"), train.astype(np.float32))


def test_scale_leaves_out_padding(tmp_path: Path) -> None:
    values = np.full((20, 4), 1e6)
    values[:, :2] = np.arange(40).reshape(20, 2)
    content = read_custom(_npz(tmp_path / "a.npz", values=values, lengths=np.full(20, 2)))
    assert content.metadata["mean"][0] < 40


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_, np.float16, ">f8"])
def test_types_of_values(tmp_path: Path, dtype: Any) -> None:
    digits = np.arange(16)[:, None] >> np.arange(4) & 1
    content = read_custom(_npz(tmp_path / "a.npz", values=digits.astype(dtype)))
    found = np.concatenate([_array(content, split) for split in content.splits])[..., 0]
    assert found.dtype == np.float32
    assert sorted(found @ [1, 2, 4, 8]) == list(range(16))
