"""The user's own data: text, tables or arrays, read without code."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tcnca.data.archives import check_source, compression
from tcnca.data.custom.arrays import ARRAY_SUFFIXES, read_arrays
from tcnca.data.custom.numeric_tables import holds_numbers, read_numeric_tables
from tcnca.data.custom.options import CustomOptions
from tcnca.data.custom.streams import list_files, read_bytes, split_files, unassigned_file
from tcnca.data.custom.tables import TABLE_SUFFIXES, read_tables
from tcnca.data.schema import Content, Kind
from tcnca.errors import DataError

__all__ = ["CustomOptions", "read_custom"]

_Form = Literal["tables", "arrays"]
_SUFFIXES: Mapping[_Form, Collection[str]] = {"tables": TABLE_SUFFIXES, "arrays": ARRAY_SUFFIXES}
_KINDS: Mapping[_Form, Collection[Kind]] = {
    "tables": ("classification", "pairs", "regression", "forecast"),
    "arrays": ("classification", "regression", "forecast"),
}
_COMPRESSED = (".gz", ".xz", ".bz2", ".zip", ".zst", ".7z")


def read_custom(origin: Path, options: CustomOptions | None = None) -> Content:
    """Read the user's own data.

    - Tables (.csv with commas or semicolons, .tsv, .jsonl, .ndjson) hold texts to classify, pairs of texts, or numbers:
      sequences in rows to classify or to predict targets from, or a series in columns to forecast.
    - Arrays (.npy, .npz) hold real-valued sequences to classify, to predict targets from, or to forecast.
    - Every other file is bytes for a language model, and so is any file with kind language. Compressed files and JSON
      that is not one object per line are refused without that kind, since hardly anyone wants to model their bytes.

    A folder of tables or arrays holds files named train*, valid*, val* or dev*, and test*. `tcnca.data.custom.options`
    describes what happens with splits that are not given. Messages name options as `tcnca data prepare` has them.
    """
    options = options or CustomOptions()
    check_source(origin)
    files = list_files(origin)
    if not files:
        raise DataError(f"{origin}: expected visible files, got none; add data")
    form = None if options.kind == "language" else _form(origin, files, options)
    if form is None:
        return read_bytes(origin, options)
    given = {"train": [origin]}
    if origin.is_dir():
        given, others = split_files(origin, _SUFFIXES[form])
        if others:
            raise unassigned_file(others[0], f"or give --kind language to model the bytes of all {form}")
    if form == "arrays":
        return read_arrays(origin, given, options)
    numeric = "train" in given and holds_numbers(given["train"][0], options)
    return read_numeric_tables(origin, given, options) if numeric else read_tables(origin, given, options)


def _form(origin: Path, files: Sequence[Path], options: CustomOptions) -> _Form | None:
    """Return the format of the data; None for bytes."""
    suffixes = [file.suffix.lower() for file in files]
    if options.kind is None:
        _refuse_unsuitable(files)
        return next((form for form, known in _SUFFIXES.items() if all(suffix in known for suffix in suffixes)), None)
    present = [form for form, known in _SUFFIXES.items() if any(suffix in known for suffix in suffixes)]
    fitting = [form for form in present if options.kind in _KINDS[form]]
    if len(fitting) == 2 and options.kind != "classification":
        fitting = ["arrays"]  # of which the table may be a description
    if len(fitting) == 1:
        _refuse_unsuitable([file for file in files if file.suffix.lower() in _SUFFIXES[fitting[0]]])
        return fitting[0]
    if fitting:
        raise DataError(f"{origin}: expected either tables or arrays, got both; move one of them away")
    if not present:
        _refuse_unsuitable(files)
    possible = ", ".join([*dict.fromkeys(kind for form in present for kind in _KINDS[form]), "language"])
    needed = " or ".join(f"{form} ({', '.join(_SUFFIXES[form])})" for form in _SUFFIXES if options.kind in _KINDS[form])
    raise DataError(f"{origin}: kind {options.kind} needs {needed}, got other files; for these, use {possible}")


def _refuse_unsuitable(files: Sequence[Path]) -> None:
    """Raise a DataError for compressed files, and for data that consists of JSON files."""
    for file in files:
        if _is_compressed(file):
            raise DataError(f"{file}: is compressed; unpack it, or give --kind language to model the compressed bytes")
    # Among other files, for example source code, JSON is text like them.
    if all(file.suffix.lower() == ".json" for file in files):
        raise DataError(
            f"{files[0]}: expected one JSON object per line in a .jsonl file, got .json; convert it, or give "
            "--kind language to model its bytes"
        )


def _is_compressed(file: Path) -> bool:
    suffix = file.suffix.lower()
    # An .npz is an archive, but it is read as arrays.
    return suffix in _COMPRESSED or (suffix not in ARRAY_SUFFIXES and compression(file) is not None)
