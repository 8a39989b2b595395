"""The way in: finds out what form the user's data has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tcnca.data.custom.arrays import ARRAYS, read_arrays
from tcnca.data.custom.folders import files_under, split_files, stray
from tcnca.data.custom.options import CustomOptions, in_recipes
from tcnca.data.custom.rows import TABLES
from tcnca.data.custom.streams import read_bytes
from tcnca.data.custom.tables import read_tables
from tcnca.data.custom.validate import refuse_foreign
from tcnca.data.schema import Content, Kind
from tcnca.errors import DataError

Form = Literal["tables", "arrays"]

_SUFFIXES: Mapping[Form, Collection[str]] = {"tables": TABLES, "arrays": ARRAYS}
_KINDS: Mapping[Form, Collection[Kind]] = {
    "tables": ("classification", "pairs"),
    "arrays": ("classification", "regression", "forecast"),
}
_DEFAULT = CustomOptions()


def read_own(origin: Path, options: CustomOptions = _DEFAULT) -> Content:
    """Read the user's own data.

    - Tables (.csv with commas or semicolons, .tsv, .jsonl, .ndjson) hold texts to classify, or pairs of texts.
    - Arrays (.npy, .npz) hold sequences of real values, to classify, to predict targets from, or to forecast.
    - Every other file is bytes for a language model, and so is any file with kind language. Packed files and JSON that
      is not one object a line are refused unless that kind is given: hardly anyone means to learn their bytes.

    A folder of tables or of arrays holds files named train*, valid*, val* or dev*, and test*. `tcnca.data.custom.splits`
    says what becomes of splits that are not given.

    Args:
        origin: a file or a folder.
        options: what the files do not say themselves.

    Raises:
        DataError: the data is not there, damaged, or of no form that is known. Names the place and the cure.
    """
    try:
        return _read(origin, options)
    except DataError as error:
        raise in_recipes(error) from error


def _read(origin: Path, options: CustomOptions) -> Content:
    if not origin.exists():
        raise DataError(f"{origin}: there is no such file or folder; check the path")
    files = files_under(origin)
    if not files:
        raise DataError(f"{origin}: holds no files that are not hidden; put data there")
    form = None if options.kind == "language" else _form(origin, files, options)
    if form is None:
        return read_bytes(origin, options)
    given = {"train": [origin]} if origin.is_file() else _given(origin, form)
    return read_tables(origin, given, options) if form == "tables" else read_arrays(origin, given, options)


def _form(origin: Path, files: Sequence[Path], options: CustomOptions) -> Form | None:
    """The form of the data; None for bytes."""
    suffixes = [file.suffix.lower() for file in files]
    if options.kind is None:
        refuse_foreign(files)
        return next((form for form, known in _SUFFIXES.items() if all(suffix in known for suffix in suffixes)), None)
    there = [form for form, known in _SUFFIXES.items() if any(suffix in known for suffix in suffixes)]
    fitting = [form for form in there if options.kind in _KINDS[form]]
    if len(fitting) == 1:
        refuse_foreign([file for file in files if file.suffix.lower() in _SUFFIXES[fitting[0]]])
        return fitting[0]
    if fitting:
        raise DataError(f"{origin}: holds both tables and arrays; move one of them away")
    if not there:
        refuse_foreign(files)
    allowed = ", ".join([*dict.fromkeys(kind for form in there for kind in _KINDS[form]), "language"])
    holders = " or ".join(
        f"{form} ({', '.join(_SUFFIXES[form])})" for form in _SUFFIXES if options.kind in _KINDS[form]
    )
    raise DataError(f"{origin}: --kind {options.kind} needs {holders}; for what is there, allowed is {allowed}")


def _given(folder: Path, form: Form) -> dict[str, list[Path]]:
    given, others = split_files(folder, _SUFFIXES[form])
    if others:
        raise stray(others[0], f"or --kind language to learn the bytes of all {form}")
    return given
