"""Predict files, lines or texts with a trained run, in bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from numpy.typing import NDArray

from tcnca.data.archives import check_source, compression
from tcnca.data.custom.arrays import ARRAY_SUFFIXES
from tcnca.data.custom.streams import read_errors
from tcnca.data.custom.tables import open_lines, read_lines
from tcnca.errors import ConfigError, DataError, Stopped, TcncaError, plural, shown
from tcnca.files import atomic_path, partial_path, replace_file
from tcnca.inference.readers import (
    FORMATS,
    ArraysReader,
    ColumnOptions,
    Example,
    Format,
    Reader,
    RowReader,
    TextsReader,
    value_columns,
)
from tcnca.inference.writers import ArrayWriter, JSONWriter, TableWriter, Writer
from tcnca.models import Predictions, SequenceModel
from tcnca.models.prediction import (
    PredictionKind,
    check_sequence,
    class_names,
    predict_sequences,
    prediction_kind,
    to_sequence,
)

_BLOCK_ROWS = 2048
_BLOCK_BYTES = 2**24
"""Examples, and bytes of their rows, sequences and predictions, that are sorted by length and predicted together."""
_TABLES = {".csv": ",", ".tsv": "\t"}
_PATH = re.compile(r"\S*(/\S*|\.[A-Za-z]\w{0,6})")
"""What is a path rather than a text."""
_ADVICE = "give texts that look like paths on standard input, with -"

Progress = Callable[[int, int | None], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How to predict."""

    out: Path | None = None
    """File for the predictions, whose suffix is its format; None for `stdout`."""
    format: Format | None = None
    """Format of the rows of the input; None for that of the suffix, or a text or sequence per line."""
    columns: ColumnOptions = dataclasses.field(default_factory=ColumnOptions)
    """Columns and arrays with other names than in training."""
    probabilities: bool = True
    """Whether to write the probability of each class."""
    steps: int = 1
    """Time steps of a forecast."""
    batch_size: int | None = None
    """Sequences that are computed at once; None: depending on their lengths."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictSummary:
    """What was predicted."""

    count: int
    """Number of examples."""
    cut: int
    """Number of examples that were longer than the sequences of training may be, and were cut as those are."""
    metric: str | None
    """`accuracy` or `mean squared error` if the input has labels or targets."""
    score: float
    """Value of the metric."""
    compared: int
    """Number of classes or values that were compared."""
    unknown: int = 0
    """Number of true classes that the model does not have. They count as wrong."""
    first_unknown: str = ""
    """The first of them, and where it is."""
    warning: str = ""
    """What may be wrong with the input."""


def predict_inputs(
    model: SequenceModel,
    inputs: Sequence[str],
    options: PredictOptions | None = None,
    *,
    stdin: BinaryIO | None = None,
    stdout: TextIO | None = None,
    progress: Progress | None = None,
) -> PredictSummary:
    """Predict a file, the lines of `stdin`, or texts, and write the predictions in the order of the input.

    Memory does not grow with the size of the input. `options.out` is written completely or not at all. If
    an error or a signal ends the function before, the predictions so far are in a file with `.partial` after its name.

    Args:
        model: the model, see `load`.
        inputs: a file; `-` for `stdin`; or texts (one or more; two for each pair), or lines of numbers.
        options: how to predict.
        stdin: lines; by default standard input.
        stdout: where predictions are printed without `options.out`; by default standard output.
        progress: is called with what is done, and with the total if it is known: bytes, or examples.
    """
    options = options or PredictOptions()
    kind = prediction_kind(model)
    if options.steps != 1 and kind != "forecast":
        raise ConfigError(f"--steps: expected a run that forecasts, got one of {kind}; leave it out")
    _check_out(options.out, kind, inputs)
    how: dict[str, Any] = {"steps": options.steps, "batch_size": options.batch_size}
    score, cut = _Score(), 0
    writer: Writer | None = None
    try:
        with _open_reader(model, inputs, options, stdin or sys.stdin.buffer) as reader, contextlib.ExitStack() as stack:
            blocks = stack.enter_context(contextlib.closing(_blocks(model, reader, options)))
            for block in blocks:
                predictions = predict_sequences(model, block.sequences, block.place, **how)
                # Opened late: the columns of a table are known after its first row.
                writer = writer or stack.enter_context(_open_writer(options, reader, stdout or sys.stdout))
                writer.write(block.examples, predictions)
                score.add(block.examples, predictions)
                cut += block.cut
                if progress is not None:
                    progress(reader.position, reader.total)
            if writer is None:
                if not reader.header:
                    raise DataError(f"{reader.name}: expected something to predict, got no rows; add some")
                writer = stack.enter_context(_open_writer(options, reader, stdout or sys.stdout))
                writer.write_empty(reader.header, reader.columns, predict_sequences(model, [], str, **how))
    except (KeyboardInterrupt, Stopped) as error:
        if options.out is None:
            error.add_note(f"{plural(0 if writer is None else writer.count, 'prediction')} printed")
        elif writer is None:
            error.add_note(f"no predictions were done, {options.out} was not written")
        raise
    metric = None if not score.count else "mean squared error" if kind == "regression" else "accuracy"
    return PredictSummary(
        count=writer.count,
        cut=cut,
        metric=metric,
        score=score.value,
        compared=score.count,
        unknown=reader.unknown,
        first_unknown=reader.first_unknown,
        warning=reader.warning,
    )


@contextlib.contextmanager
def _open_reader(
    model: SequenceModel, inputs: Sequence[str], options: PredictOptions, stdin: BinaryIO
) -> Iterator[Reader]:
    if not inputs:
        raise ConfigError("INPUT: expected a file, - for standard input, or a text, got nothing")
    if list(inputs) == ["-"]:
        file = open_lines(stdin)
        lines = read_lines(file, "standard input")
        try:
            yield RowReader(model, options.columns, "standard input", lines, options.format or "text")
        finally:
            # Otherwise it would be closed with the wrapper.
            file.detach()
        return
    # Of several words, one may be the name of a folder by chance.
    files = [each for each in inputs if os.path.exists(each) and (len(inputs) == 1 or not os.path.isdir(each))]
    for each in inputs:
        if each not in files and _PATH.fullmatch(each):
            raise DataError(f"{each}: no such file; check the path, or {_ADVICE}")
    if not files:
        yield _text_reader(model, inputs, options)
        return
    if len(inputs) > 1:
        got = f"{len(files)} files" if len(files) == len(inputs) else f"texts and the file {files[0]}; {_ADVICE}"
        raise ConfigError(f"INPUT: expected one file, or texts, got {got}")
    path = Path(inputs[0])
    check_source(path)
    if path.is_dir():
        raise DataError(f"{path}: expected a file, got a folder; give its files one by one, or {_ADVICE}")
    suffix = path.suffix.lower()
    if suffix in ARRAY_SUFFIXES:
        if options.format is not None:
            raise ConfigError(f"--format: expected none for {suffix}, got {options.format}; leave it out")
        yield ArraysReader(model, options.columns, path)
        return
    if (found := compression(path)) is not None:
        raise DataError(
            f"{path}: is compressed ({found}); unpack it, or pipe it: `… | tcnca predict RUN - --format csv`"
        )
    format = options.format or FORMATS.get(suffix)
    if format is None:
        known = ", ".join([*FORMATS, *ARRAY_SUFFIXES])
        raise DataError(f"{path}: expected one of {known}, got {suffix or 'no suffix'}; give --format for others")
    with read_errors(path):
        binary = path.open("rb")
    with open_lines(binary) as file:
        lines = read_lines(file, str(path))
        yield RowReader(model, options.columns, str(path), lines, format, path.stat().st_size, binary.tell)


def _text_reader(model: SequenceModel, texts: Sequence[str], options: PredictOptions) -> Reader:
    """Return a reader of the arguments themselves."""
    for text in texts:
        if not text.strip():
            raise DataError("INPUT: expected a text or a file, got an empty text")
    if options.format not in (None, "text"):
        raise ConfigError(f"--format: expected none for texts, got {options.format}; leave it out")
    if prediction_kind(model) == "pairs" and len(texts) % 2:
        raise ConfigError(f"INPUT: expected two texts for each pair, since the model compares pairs, got {len(texts)}")
    return TextsReader(model, options.columns, texts)


def _check_out(out: Path | None, kind: PredictionKind, inputs: Sequence[str]) -> None:
    """Raise a ConfigError for a file that predictions cannot be written to."""
    if out is None:
        return
    suffix = out.suffix.lower()
    known = [".csv", ".tsv", ".jsonl", ".ndjson", ".npz", *([".npy"] if kind in ("regression", "forecast") else [])]
    if suffix not in known:
        raise ConfigError(f"--out: expected a file that ends in {', '.join(known)}, got {shown(str(out))}")
    for path in (out, partial_path(out)):
        if path.exists() and not path.is_file():
            raise ConfigError(f"--out: expected a file, got {path}, which is something else")
        # Unlike `Path.exists`, `os.path.exists` takes long texts.
        if path.exists() and inputs and os.path.exists(inputs[0]) and path.samefile(inputs[0]):
            raise ConfigError(f"--out: expected another file than the input, got {path}")


def _block_rows(reader: Reader, options: PredictOptions) -> int:
    """Return the number of examples of a block: few if somebody may be waiting for each line."""
    live = reader.total is None and isinstance(reader, RowReader)
    if live and options.batch_size is not None:
        return options.batch_size
    return max(_BLOCK_ROWS, options.batch_size or 0)


@dataclasses.dataclass
class _Block:
    """Examples that are predicted together."""

    examples: list[Example] = dataclasses.field(default_factory=list)
    sequences: list[tuple[NDArray[Any], ...]] = dataclasses.field(default_factory=list)
    cut: int = 0

    def place(self, index: int) -> str:
        return self.examples[index].place


def _blocks(model: SequenceModel, reader: Reader, options: PredictOptions) -> Generator[_Block, None, None]:
    rows, answer = _block_rows(reader, options), _answer_bytes(model, options.steps)
    block, size, limit = _Block(), 0, model.preprocessing.max_length
    with contextlib.closing(iter(reader)) as examples:
        while True:
            try:
                example = next(examples, None)
                if example is None:
                    break
                sequences = tuple(to_sequence(model, each, example.place) for each in example.inputs)
                cut = limit is not None and max(map(len, sequences)) > limit
                sequences = tuple(check_sequence(model, each, example.place, options.steps) for each in sequences)
            except TcncaError:
                # What comes before the mistake is predicted.
                if block.examples:
                    yield block
                raise
            block.examples.append(example)
            block.sequences.append(sequences)
            block.cut += cut
            size += example.size + answer + sum(sequence.nbytes for sequence in sequences)
            if len(block.examples) >= rows or size >= _BLOCK_BYTES:
                yield block
                block, size = _Block(), 0
    if block.examples:
        yield block


def _answer_bytes(model: SequenceModel, steps: int) -> int:
    """Return the bytes of the prediction of an example."""
    classes = class_names(model)
    return 4 * steps * (getattr(model.config.head, "outputs", 1) if classes is None else len(classes))


@contextlib.contextmanager
def _open_writer(options: PredictOptions, reader: Reader, stdout: TextIO) -> Iterator[Writer]:
    if options.out is None:
        # In the format of the input.
        json = reader.format == "jsonl"
        yield _row_writer(stdout, None if json else reader.delimiter, options, reader)
        return
    suffix = options.out.suffix.lower()
    with atomic_path(options.out) as temporary, contextlib.ExitStack() as stack:
        if suffix in ARRAY_SUFFIXES:
            arrays = ArrayWriter(temporary, options.out, options.probabilities)
            stack.callback(arrays.discard)
            writer: Writer = arrays
        else:
            file = stack.enter_context(temporary.open("w", encoding="utf-8", errors="replace", newline=""))
            same = reader.format == "csv" and suffix == ".csv"
            writer = _row_writer(file, reader.delimiter if same else _TABLES.get(suffix), options, reader)
        try:
            yield writer
            writer.close()
        except BaseException as error:
            if not writer.count:
                error.add_note(f"no predictions were done, {options.out} was not written")
                raise
            # A full disk may have no space for arrays, either.
            with contextlib.suppress(OSError):
                writer.close()
                replace_file(temporary, partial_path(options.out))
                error.add_note(f"{plural(writer.count, 'prediction')} saved in {partial_path(options.out)}")
            raise
    partial_path(options.out).unlink(missing_ok=True)


def _row_writer(file: TextIO, delimiter: str | None, options: PredictOptions, reader: Reader) -> Writer:
    if delimiter is None:
        return JSONWriter(file, options.probabilities)
    names = value_columns(reader.model) if reader.kind == "forecast" else ()
    targets = reader.facts.target_columns or ()
    if len(targets) > 1:
        names = tuple(f"prediction_{name}" for name in targets)
    decimal = "." if delimiter == "," else reader.decimal
    return TableWriter(file, delimiter, options.probabilities, names, decimal)


class _Score:
    """The comparison with true classes or values."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")

    def add(self, examples: Sequence[Example], predictions: Predictions) -> None:
        for number, example in enumerate(examples):
            if example.target is None:
                continue
            if predictions.values is not None:
                truth = np.asarray(example.target, np.float64)
                # As in evaluation, NaN is a missing value.
                errors = (predictions.values[number] - truth)[~np.isnan(truth)]
                self.total, self.count = self.total + float((errors**2).sum()), self.count + errors.size
            elif predictions.labels is not None:
                self.total, self.count = self.total + (predictions.labels[number] == example.target), self.count + 1
