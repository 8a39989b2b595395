"""The manifest of a data set on disk, and the checks that the data is what it says.

A data set may come from a shared folder, so nothing that its files say is believed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from tcnca.config import NonNegativeInt, Range, check
from tcnca.data.schema import BLOCK, Column, Columns, Kind, Ragged, num_examples
from tcnca.errors import ConfigError, DataError, shown
from tcnca.files import read_json
from tcnca.models.preprocessing import Role

FORMAT = 2
MANIFEST = "manifest.json"
PREPARE_AGAIN = "prepare the data set again with --force"
"""Advice for a data set that is damaged."""

_COLUMNS: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "language": (("bytes",),),
    "classification": (("tokens", "labels"), ("pixels", "labels"), ("values", "labels")),
    "pairs": (("first", "second", "labels"),),
    "regression": (("values", "targets"),),
    "forecast": (("values",),),
}
# The dtype and the number of dimensions of each column; a Ragged has one more than its values.
_FORMS = {
    "bytes": ("uint8", 1),
    "tokens": ("uint8", 2),
    "first": ("uint8", 2),
    "second": ("uint8", 2),
    "pixels": ("uint8", 3),
    "values": ("float32", 3),
    "labels": ("int64", 1),
    "targets": ("float32", 2),
}
_RAGGED = ("tokens", "first", "second", "values")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What the manifest says of a file."""

    bytes: NonNegativeInt
    dtype: str
    shape: list[NonNegativeInt]
    values_sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The keys of a manifest that are used; there may be others."""

    kind: Kind
    splits: dict[Literal["train", "validation", "test"], list[str]]
    files: dict[str, FileEntry]
    dataset: str | None = None
    title: str = ""
    origin: str = ""
    verified: bool = False
    unverified: bool = False
    part: bool = False
    request: dict[str, Any] = dataclasses.field(default_factory=dict)
    generator: str = ""
    version: int = 0
    class_names: list[str] = dataclasses.field(default_factory=list)
    symbols: list[str] | list[Annotated[int, Range(0, 255)]] = dataclasses.field(default_factory=list)
    mean: float | list[float] = 0.0
    std: float | list[float] = 1.0
    columns: dict[Role, str] = dataclasses.field(default_factory=dict)
    value_columns: list[str] = dataclasses.field(default_factory=list)
    target_columns: list[str] = dataclasses.field(default_factory=list)
    unused_columns: list[str] = dataclasses.field(default_factory=list)
    numbers_as_names: bool = False


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of the data set in `folder`; raise a DataError if there is none or its format differs."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{folder}: no prepared data set here; create one with `tcnca data prepare`")
    content: dict[str, Any] = read_json(path, dict[str, Any], remedy=PREPARE_AGAIN)
    if content.get("format") != FORMAT:
        raise DataError(f"{path}: expected format {FORMAT}, got {shown(content.get('format'))}; {PREPARE_AGAIN}")
    return content


def check_manifest(content: Mapping[str, Any]) -> Manifest:
    """Return the keys of a manifest that are used, or raise a ConfigError."""
    names = [field.name for field in dataclasses.fields(Manifest)]
    manifest: Manifest = check("", {name: content[name] for name in names if name in content}, Manifest)
    for split, columns in manifest.splits.items():
        for name in columns:
            # Names become file names.
            if not re.fullmatch(r"\w{1,100}", name):
                raise ConfigError(f"splits.{split}: expected names of columns, got {shown(name)}")
    if "symbols" in content and not all(
        isinstance(symbol, int) == (manifest.kind == "language") for symbol in manifest.symbols or [None]
    ):
        raise ConfigError(f"symbols: expected bytes for language, else words, got {shown(manifest.symbols)}")
    if ("mean" in content) != ("std" in content):
        raise ConfigError("mean, std: expected both, got one of them")
    return manifest


def check_columns(manifest: Manifest, splits: Mapping[str, Columns]) -> None:
    """Raise a ConfigError unless the columns are those of the kind, and labels and statistics fit them."""
    if "train" not in splits or not num_examples(splits["train"]):
        raise ConfigError(f"splits: expected examples in train, got {shown(list(splits))}")
    train = splits["train"]
    if tuple(train) not in _COLUMNS[manifest.kind]:
        expected = " or ".join(" and ".join(names) for names in _COLUMNS[manifest.kind])
        raise ConfigError(f"splits: expected the columns {expected} for {manifest.kind}, got {shown(list(train))}")
    for split, columns in splits.items():
        if list(columns) != list(train):
            raise ConfigError(f"splits.{split}: expected the columns of train, got {shown(list(columns))}")
        for name, column in columns.items():
            _check_form(f"splits.{split}.{name}", name, column, train[name])
        if "labels" in columns:
            _check_labels(f"splits.{split}.labels", columns["labels"], len(manifest.class_names))
    features = _row_shape("values", train["values"])[-1] if "values" in train else 1
    for key, found in {"mean": manifest.mean, "std": manifest.std}.items():
        if len(found) != features if isinstance(found, list) else manifest.kind == "forecast":
            raise ConfigError(f"{key}: expected {features} numbers, one for each feature, got {shown(found)}")


def _check_form(where: str, name: str, column: Column, train: Column) -> None:
    dtype, dimensions = _FORMS[name]
    ragged = isinstance(column, Ragged)
    values = column.values if isinstance(column, Ragged) else column
    if str(values.dtype) != dtype or values.ndim + ragged != dimensions or (ragged and name not in _RAGGED):
        kind = "sequences" if ragged else "an array"
        raise ConfigError(
            f"{where}: expected {dtype} of {dimensions} dimensions, got {kind} of {values.dtype} {values.shape}"
        )
    if _row_shape(name, column) != _row_shape(name, train):
        raise ConfigError(f"{where}: expected examples as in train, got others")


def _row_shape(name: str, column: Column) -> tuple[int, ...]:
    """Return the shape of an example, without the length of a sequence."""
    shape = column.values.shape if isinstance(column, Ragged) else column.shape
    return shape[_FORMS[name][1] - 1 :] if name in _RAGGED and not isinstance(column, Ragged) else shape[1:]


def _check_labels(where: str, labels: Column, classes: int) -> None:
    for begin in range(0, len(labels), BLOCK):
        block = labels[begin : begin + BLOCK]  # type: ignore[index]
        if block.min() < 0 or block.max() >= classes:
            raise ConfigError(f"{where}: expected 0 to {classes - 1}, the classes, got {block.min()} to {block.max()}")
