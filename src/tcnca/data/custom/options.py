"""What a user may say about their own data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from pathlib import Path
from typing import get_args

from tcnca.data.schema import Kind
from tcnca.errors import DataError

OF_TABLES = ("text", "second", "label", "split")
OF_ARRAYS = ("values", "labels", "targets", "lengths")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomOptions:
    """How to read the user's own data; whatever is left out is found out from the files."""

    kind: Kind | None = None
    """What a model is to do with the data. None: tables are classified (or compared, where they hold pairs), arrays
    speak for themselves, and every other file is bytes for a language model."""
    text: str | None = None
    """Column of a table that holds the text; of pairs, the first text."""
    second: str | None = None
    """Column of a table that holds the second text of a pair."""
    label: str | None = None
    """Column of a table that holds the class."""
    values: str | None = None
    """Array that holds the sequences."""
    labels: str | None = None
    """Array that holds the class of each sequence."""
    targets: str | None = None
    """Array that holds the numbers to predict from each sequence."""
    lengths: str | None = None
    """Array that holds the length of each sequence, where they are padded to the longest."""
    split: str | None = None
    """Column of a table that says train, validation or test."""
    validation: float = 0.05
    """Share that becomes the validation split, where none is given."""
    test: float = 0.05
    """Share that becomes the test split, where none is given."""
    seed: int = 0
    """Another seed draws other examples for validation and test."""

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in get_args(Kind):
            raise DataError(f"--kind: got {self.kind!r}, allowed are {', '.join(get_args(Kind))}")
        for name, share in (("validation", self.validation), ("test", self.test)):
            if not 0.0 < share < 1.0:
                raise DataError(f"--{name}: got {share}, allowed is a share between 0 and 1")
        if not self.validation + self.test < 1.0:
            raise DataError(
                f"--validation and --test: got {self.validation} and {self.test}, together they must be less than 1, "
                "to leave examples for training"
            )


def in_recipes(error: DataError) -> DataError:
    """The same error, with the options that it names as recipes call them, if it names some."""
    names = "|".join(field.name for field in dataclasses.fields(CustomOptions))
    found = re.findall(rf"(?<!\S)--({names})\b(?: ({'|'.join(get_args(Kind))})\b)?", str(error))
    if not found:
        return error
    keys = dict.fromkeys(f"data.custom.{name}={value or '…'}" for name, value in found)
    return DataError(f"{error} (in a recipe: {', '.join(keys)})")


def refuse(options: CustomOptions, names: Collection[str], path: Path, form: str) -> None:
    """Refuse those of the options called `names` that are set: they mean nothing for data of this form."""
    for name in names:
        value = getattr(options, name)
        if value is not None:
            raise DataError(f"{path}: --{name} {value!r} means nothing for {form}; leave it out")
