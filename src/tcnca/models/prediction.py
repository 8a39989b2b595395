"""Predictions on raw inputs: classes with their probabilities, values, or forecasts, for any number of sequences."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tcnca.errors import InputError, VocabularyError
from tcnca.models.heads import ClassifierHeadConfig, PairHeadConfig, RegressionHeadConfig
from tcnca.models.inputs import TokenInputConfig, ValueInputConfig
from tcnca.models.preprocessing import to_bytes
from tcnca.ops import take_time

if TYPE_CHECKING:
    from tcnca.models.model import ModelState, SequenceModel

PredictionKind = Literal["classification", "recall", "pairs", "regression", "forecast"]

_MAX_ROWS = 64
_MAX_STEPS = 2**17
"""Rows of a batch, and time steps of all its rows, if the batch size is not given."""
_WINDOW = 4096
"""Time steps of a series that are read at once."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """What a model answers on some sequences, in their order."""

    classes: tuple[str, ...] | None = None
    """Names of the classes, in the order of `probabilities`; None for values."""
    labels: list[str] | None = None
    """The most likely class of each sequence."""
    probabilities: NDArray[np.float32] | None = None
    """`[sequences, classes]`."""
    values: NDArray[np.float32] | None = None
    """In the units of the data: `[sequences, outputs]`, of a forecast `[sequences, steps, features]`."""
    bits: NDArray[np.float64] | None = None
    """Of each token, `[time]`; only from a `tcnca.Stream` of a language model."""

    def __len__(self) -> int:
        found = self.probabilities if self.values is None else self.values
        assert found is not None
        return len(found)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a model or a part of one in evaluation mode, and those of its modules that were in training mode back."""
    training = [each for each in module.modules() if each.training]
    try:
        for each in training:
            each.training = False
        yield
    finally:
        for each in training:
            each.training = True


def check_language_model(model: SequenceModel, name: str = "model") -> None:
    """Raise an InputError for a model with another head; `name` is named in it."""
    head = model.config.head
    if head.generates:
        return
    found = "a model of another kind"
    if isinstance(head, RegressionHeadConfig):
        found = "a forecast model" if head.pooling == "none" else "a regression model"
    elif isinstance(head, ClassifierHeadConfig | PairHeadConfig):
        found = "a classifier of pairs" if isinstance(head, PairHeadConfig) else "a classifier"
    raise InputError(
        f"{name}: expected a language model, got {found}; use tcnca predict, or train one with tcnca train lm"
    )


def prediction_kind(model: SequenceModel, name: str = "model") -> PredictionKind:
    """Return what a model predicts of a sequence; raise an InputError that names `name` if it does something else."""
    config, task = model.config, model.preprocessing.task
    head, input = config.head, config.input
    if head.generates:
        if task == "recall":
            return "recall"
        raise InputError(
            f"{name}: expected a model that predicts a class, values or a forecast, got a language model; continue a "
            "text with `tcnca generate` or tcnca.generate"
        )
    if isinstance(head, PairHeadConfig):
        return "pairs"
    if isinstance(head, ClassifierHeadConfig | RegressionHeadConfig) and head.pooling != "none":
        return "classification" if isinstance(head, ClassifierHeadConfig) else "regression"
    same = (
        isinstance(head, RegressionHeadConfig)
        and isinstance(input, ValueInputConfig)
        and head.outputs == input.features
    )
    if same and task in ("", "forecast") and model.streams:
        return "forecast"
    raise InputError(
        f"{name}: expected a model that predicts a class or values of a sequence, or a causal one that forecasts its "
        f"own inputs, got a {type(head).__name__} with an output at every time step; call the model itself"
    )


def class_names(model: SequenceModel) -> tuple[str, ...] | None:
    """Return a name of each class, the number of the class where none is known; None if there are no classes."""
    head, input = model.config.head, model.config.input
    if isinstance(head, ClassifierHeadConfig | PairHeadConfig):
        count = head.num_classes
    elif head.generates and isinstance(input, TokenInputConfig):
        count = input.vocab_size
    else:
        return None
    known = (model.preprocessing.class_names or ())[:count]
    return (*known, *(str(index) for index in range(len(known), count)))


def predict(
    model: SequenceModel, inputs: Any, second: Any = None, *, steps: int = 1, batch_size: int | None = None
) -> Predictions:
    """Return what `SequenceModel.predict` does."""
    kind = prediction_kind(model)
    if (second is not None) != (kind == "pairs"):
        raise InputError(f"second: expected the second texts of pairs for a model of pairs only, got a model of {kind}")
    parts = {"inputs": _split(model, inputs), **({} if second is None else {"second": _split(model, second)})}
    counts = [len(part) for part in parts.values()]
    if len(set(counts)) > 1:
        raise InputError(f"second: expected {counts[0]} sequences, as many as in inputs, got {counts[1]}")
    sequences = [
        [to_sequence(model, example, f"{name}[{index}]") for index, example in enumerate(part)]
        for name, part in parts.items()
    ]
    examples = list(zip(*sequences, strict=True))
    return predict_sequences(model, examples, lambda index: f"inputs[{index}]", steps=steps, batch_size=batch_size)


def _split(model: SequenceModel, inputs: Any) -> list[Any]:
    """Return the single sequences of what a user calls inputs."""
    if isinstance(inputs, str | bytes):
        return [inputs]
    if isinstance(inputs, Tensor):
        inputs = to_numpy(inputs)
    if not isinstance(inputs, np.ndarray):
        if not isinstance(inputs, Iterable):
            raise InputError(f"inputs: expected texts, arrays or a list of them, got a {type(inputs).__name__}")
        inputs = list(inputs)
        alone = bool(inputs) and isinstance(inputs[0], numbers.Number)
        return [inputs] if alone else inputs
    if inputs.dtype.kind in "US":
        return inputs.reshape(-1).tolist()
    return [inputs] if is_one_sequence(model, inputs.shape) else list(inputs)


def is_one_sequence(model: SequenceModel, shape: tuple[int, ...]) -> bool:
    """Return whether an array of this shape is one sequence, not several."""
    input = model.config.input
    if len(shape) != 2 or not isinstance(input, ValueInputConfig):
        return len(shape) < 2
    # A series `[time, 1]`, as in training; several of one time step are `[series, 1, 1]`.
    series = shape[1] == 1 and prediction_kind(model) == "forecast"
    return series or input.features > 1 or shape == model.preprocessing.image_size


def to_sequence(model: SequenceModel, example: Any, where: str) -> NDArray[Any]:
    """Return a text or an array as tokens `[time]` or values `[time, features]`; `where` names it in errors.

    Values are not copied, so that those of a mapped file stay there.
    """
    input, facts = model.config.input, model.preprocessing
    if isinstance(example, str | bytes):
        if not isinstance(input, TokenInputConfig):
            raise InputError(f"{where}: expected numbers, since the model was trained on values, got a text")
        try:
            tokens = facts.encode(to_bytes(example, where)).numpy()
        except VocabularyError as error:
            raise VocabularyError(f"{where}: {error}") from None
        return tokens.astype(np.uint8 if input.vocab_size <= 256 else np.int32)
    try:
        array = to_numpy(example)
    except ValueError as error:
        raise InputError(f"{where}: expected numbers, got a list of unequal parts") from error
    if isinstance(input, TokenInputConfig):
        return _tokens(array, input.vocab_size, where)
    if not isinstance(input, ValueInputConfig):
        raise InputError(f"{where}: expected tokens or values, got a model with a {type(input).__name__}")
    if array.dtype.kind not in "fiub":
        raise InputError(f"{where}: expected real numbers, got {array.dtype}")
    if facts.image_size is not None and array.size:
        whole = array.dtype.kind in "iu"
        if whole and array.size != facts.image_size[0] * facts.image_size[1]:
            size = "×".join(map(str, facts.image_size))
            raise InputError(f"{where}: expected {size} pixels, as in training, got shape {list(array.shape)}")
        # Bytes that became floats, as in JSON lines, would give the class of another image.
        if array.min() < 0 or array.max() > (255 if whole else 1):
            raise InputError(
                f"{where}: expected pixels from 0 to 255 as whole numbers, or from 0 to 1, got {array.dtype} from "
                f"{array.min()} to {array.max()}"
            )
        if whole:
            return array.reshape(-1, 1).astype(np.float32) / 255
    array = array[:, None] if array.ndim == 1 and input.features == 1 else array
    if array.ndim != 2 or array.shape[1] != input.features:
        what = "one feature" if input.features == 1 else f"{input.features} features"
        raise InputError(
            f"{where}: expected {what} at each time step, as in training ([time, features]), got shape "
            f"{list(array.shape)}"
        )
    if not len(array):
        raise InputError(f"{where}: expected at least one time step, got none")
    return array


def to_numpy(example: Any) -> NDArray[Any]:
    """Return an array, a tensor or a list as an array."""
    if isinstance(example, Tensor):
        example = example.detach().cpu()
        example = example.float() if example.dtype == torch.bfloat16 else example
    return np.asarray(example)


def _tokens(array: NDArray[Any], vocab_size: int, where: str) -> NDArray[Any]:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{where}: expected a text, or tokens of shape [time] and a type of whole numbers, got {array.dtype} of "
            f"shape {list(array.shape)}"
        )
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < vocab_size:
        raise VocabularyError(
            f"{where}: expected tokens of the vocabulary, 0 to {vocab_size - 1}, got {array.min()} to {array.max()}"
        )
    return array


@torch.no_grad()
def predict_sequences(
    model: SequenceModel,
    examples: Sequence[tuple[NDArray[Any], ...]],
    where: Callable[[int], str],
    *,
    steps: int = 1,
    batch_size: int | None = None,
) -> Predictions:
    """Predict sequences that `to_sequence` returned, two in each example of a pair; `where` names one in errors.

    As in training, they are cut to the `max_length` of the preprocessing.
    """
    kind, classes = prediction_kind(model), class_names(model)
    if steps < 1 or (steps > 1 and kind != "forecast"):
        expected = "at least 1" if kind == "forecast" else f"1 for a model of {kind}"
        raise InputError(f"steps: expected {expected}, got {steps}")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size: expected at least 1, got {batch_size}")
    examples = [tuple(sequence[: model.preprocessing.max_length] for sequence in example) for example in examples]
    lengths = [max(len(sequence) for sequence in example) for example in examples]
    for index, length in enumerate(lengths):
        _check_length(model, length, steps - 1, where(index))
    head, input = model.config.head, model.config.input
    shape: tuple[int, ...] = (len(classes),) if classes is not None else (getattr(head, "outputs", 1),)
    if isinstance(input, ValueInputConfig) and kind == "forecast":
        shape = (steps, input.features)
    outputs, chosen = np.zeros((len(examples), *shape), np.float32), np.zeros(len(examples), np.int64)
    with evaluating(model):
        for rows in _batches(lengths, batch_size):
            columns = [
                PaddedRows(model, part, rows, where) for part in zip(*(examples[row] for row in rows), strict=True)
            ]
            answer = _forecast(model, columns[0], steps) if kind == "forecast" else _answer(model, kind, columns)
            if classes is not None:
                # Of the logits, as in evaluation: different ones can have equal probabilities after rounding.
                chosen[rows] = answer.argmax(-1).cpu().numpy()
                answer = answer.float().softmax(-1)
            outputs[rows] = answer.float().cpu().numpy()
    if classes is None:
        return Predictions(values=outputs)
    return Predictions(classes=classes, labels=[classes[index] for index in chosen], probabilities=outputs)


def check_sequence(model: SequenceModel, sequence: NDArray[Any], where: str, steps: int = 1) -> NDArray[Any]:
    """Return a sequence as the model reads it: cut to the `max_length` of the preprocessing, and values in float32.

    Raise an InputError where `predict_sequences` would, so that what comes before it can be predicted.
    """
    sequence = sequence[: model.preprocessing.max_length]
    _check_length(model, len(sequence), steps - 1, where)
    return _to_float32(sequence, where) if isinstance(model.config.input, ValueInputConfig) else sequence


def _check_length(model: SequenceModel, length: int, more: int, where: str) -> None:
    attention = model.config.attention
    if attention is None or attention.position != "simple" or attention.chunk_size is not None:
        return
    if length + more > attention.reach:
        forecast = f" and {more} steps of a forecast" if more else ""
        raise InputError(
            f"{where}: expected at most {attention.reach} tokens or time steps, as far as the simple position bias of "
            f"the model reaches (attention.max_length), got {length}{forecast}; cut it"
        )


def _to_float32(values: NDArray[Any], where: str, begin: int = 0) -> NDArray[np.float32]:
    """Return values `[time, features]` from time step `begin` on as float32, or raise an InputError."""
    with np.errstate(over="ignore"):
        found = values.astype(np.float32, copy=False)
    if not np.isfinite(found).all():
        time = int(np.argmin(np.isfinite(found).all(-1)))
        place = f"{where}, time step {begin + time}"
        raise InputError(f"{place}: expected finite float32 numbers, got {values[time].tolist()}; replace it")
    return found


def _batches(lengths: Sequence[int], batch_size: int | None) -> Iterator[list[int]]:
    """Yield the indices of sequences of similar lengths, the longest first."""
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    begin = 0
    while begin < len(order):
        fitting = min(_MAX_ROWS, _MAX_STEPS // max(lengths[order[begin]], 1))
        end = begin + (batch_size or max(fitting, 1))
        yield order[begin:end]
        begin = end


class PaddedRows:
    """The sequences of a batch, of which any range of time can be padded."""

    def __init__(
        self, model: SequenceModel, sequences: Sequence[NDArray[Any]], indices: list[int], where: Callable[[int], str]
    ) -> None:
        self.sequences, self.indices, self.where = sequences, indices, where
        self.lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        # A model needs at least one time step, so an empty text becomes one step of padding.
        self.longest = max(int(self.lengths.max()), 1)
        weight = model.embedding.weight
        self.device, self.dtype = weight.device, torch.long
        if isinstance(model.config.input, ValueInputConfig):
            # Raw values may need more digits than a model of half precision has, and it standardizes them itself.
            wide = torch.promote_types(weight.dtype, torch.float32)
            raw = getattr(model.embedding, "standardize", None) is not None
            self.dtype = wide if raw else weight.dtype

    def pad(self, begin: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Return the steps from `begin` to `end`, and the number of valid ones of each row, None if all are."""
        valid = np.clip(self.lengths - begin, 0, end - begin)
        real = self.dtype != torch.long
        shape = (len(self.sequences), end - begin, *self.sequences[0].shape[1:])
        padded = np.zeros(shape, np.float32 if real else np.int64)
        for row, (sequence, count) in enumerate(zip(self.sequences, valid, strict=True)):
            part = sequence[begin : begin + count]
            padded[row, :count] = _to_float32(part, self.where(self.indices[row]), begin) if real else part
        x = torch.from_numpy(padded).to(self.device, self.dtype)
        return x, None if (valid == end - begin).all() else torch.from_numpy(valid).to(self.device)


def _answer(model: SequenceModel, kind: PredictionKind, columns: Sequence[PaddedRows]) -> Tensor:
    """Return logits or values, one row for each example."""
    x, lengths = columns[0].pad(0, columns[0].longest)
    if kind == "pairs":
        second, lengths2 = columns[1].pad(0, columns[1].longest)
        return model(x, second, lengths=lengths, lengths2=lengths2).logits
    logits: Tensor = model(x, lengths=lengths, return_state=False).logits
    if kind != "recall":
        return logits
    last = torch.full((len(x),), x.shape[1], device=x.device) if lengths is None else lengths
    return take_time(logits, (last - 1).clamp(min=0).unsqueeze(1))[:, 0]


def _forecast(model: SequenceModel, rows: PaddedRows, steps: int) -> Tensor:
    """Return the next `steps` values of each series, `[rows, steps, features]`: each is the input of the next step."""
    state: ModelState | None = None
    last: Tensor | None = None
    for begin in range(0, rows.longest, _WINDOW):
        end = min(begin + _WINDOW, rows.longest)
        x, valid = rows.pad(begin, end)
        outputs, state = model(x, lengths=valid, state=state, inplace=state is not None)
        count = torch.full((len(x),), end - begin, device=x.device) if valid is None else valid
        new = take_time(outputs, (count - 1).clamp(min=0).unsqueeze(1))[:, 0]
        last = new if last is None else torch.where((count > 0).unsqueeze(1), new, last)
    assert last is not None
    values = [last]
    for _ in range(steps - 1):
        outputs, state = model(values[-1].unsqueeze(1).to(rows.dtype), state=state, inplace=True)
        values.append(outputs[:, -1])
    return torch.stack(values, 1)
