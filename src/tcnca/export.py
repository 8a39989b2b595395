"""Export to ONNX: one step of a causal model, or a model of whole sequences, for programs without PyTorch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tcnca.errors import ExportError, shorten
from tcnca.extras import require
from tcnca.files import atomic_path
from tcnca.layers import EMA, Mixer
from tcnca.models import SequenceModel
from tcnca.models.inputs import TokenEmbedding, ValueEmbedding
from tcnca.models.prediction import class_names
from tcnca.ops import SSMState
from tcnca.ops.dispatch import without_kernels
from tcnca.ops.state import MAX_POSITION
from tcnca.version import __version__

Graph = Literal["step", "sequence"]
Shape = tuple[int | str, ...]
"""Sizes of a tensor; a size that may vary is a name."""
Tensors = dict[str, tuple[str, Shape]]
"""Dtype and shape of tensors by their name."""

TOLERANCE = 1e-4
"""Largest difference between ONNX Runtime and PyTorch, relative to the largest value of a tensor."""
_ROUNDING = 1e-6
"""Difference of values near zero that is rounding."""
_MAX_BYTES = 2**31 - 2**24
"""Bytes of the weights: Protocol Buffers, the format of ONNX files, end at 2 GiB."""
_STEPS = 4
"""Steps that are compared with PyTorch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnnxExport:
    """An ONNX file that was written."""

    path: Path
    """The file."""
    graph: Graph
    """What it computes: one `step`, or a whole `sequence`."""
    inputs: Tensors
    """Dtype and shape of each input."""
    outputs: Tensors
    """Dtype and shape of each output."""
    difference: float | None
    """Largest difference of an output between ONNX Runtime and PyTorch; None without ONNX Runtime."""


def export_onnx(
    model: SequenceModel,
    path: str | Path,
    graph: Graph | None = None,
    *,
    length: int | None = None,
    batch_size: int | None = None,
) -> OnnxExport:
    """Write a model to an ONNX file, in float32, and compare it with PyTorch if ONNX Runtime is installed.

    A `step` reads one time step of each sequence:

    - inputs: `x` (`[batch]` tokens or `[batch, features]` values) and the tensors of the state, `state.…`;
    - outputs: `logits` (`[batch, …]`) and the tensors of the new state, `next_state.…`, in the same order.

    The state before the first step is zeros; the entry `state` of the file's metadata has dtypes and shapes.

    A `sequence` reads whole sequences: `x` (`[batch, time]` or `[batch, time, features]`) and `lengths` (`[batch]`, the
    valid time steps of each row), for pairs also `second` and `lengths2`. Its output is `logits`, as of the model.

    Standardization is part of the graph. Class names, byte map or symbols, chunk size and version are in the metadata,
    and `max_length`, the most time steps, if there is a limit.

    Args:
        model: the model, which is not changed.
        path: the file. An existing one is replaced, unless the export fails.
        graph: `step` or `sequence`; by default a step of a language model, and a sequence of any other model.
        length: time steps of a sequence; by default any number.
        batch_size: number of sequences; by default any number.

    Raises:
        ExportError: if a package is missing, the model cannot be exported, or ONNX Runtime gives other outputs.
    """
    graph = graph or ("step" if model.config.head.generates else "sequence")
    path = Path(path)
    if path.is_dir():
        raise ExportError(f"{path}: expected a file to write, got a folder")
    _check(model, graph, length, batch_size)
    fixed = {name: size for name, size in (("time", length), ("time2", length), ("batch", batch_size)) if size}
    function = _Step(_portable(model)) if graph == "step" else _Sequence(_portable(model))
    with atomic_path(path) as temporary, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        program = _trace(function, fixed)
        program.model.metadata_props.update(_metadata(function, graph))
        program.save(temporary, external_data=False)
        installed = importlib.util.find_spec("onnxruntime") is not None
        difference = _compare(function, fixed, temporary) if installed else None
    inputs, outputs = (_tensors(values) for values in (program.model.graph.inputs, program.model.graph.outputs))
    return OnnxExport(path=path, graph=graph, inputs=inputs, outputs=outputs, difference=difference)


def _check(model: SequenceModel, graph: Graph, length: int | None, batch_size: int | None) -> None:
    """Raise an ExportError if a model cannot be exported, or not in this way."""
    if graph not in ("step", "sequence"):
        raise ExportError(f"graph: expected 'step' or 'sequence', got {graph!r}")
    for name, size in (("length", length), ("batch_size", batch_size)):
        if size is not None and size < 1:
            raise ExportError(f"{name}: expected at least 1, got {size}")
    if graph == "step" and length is not None:
        raise ExportError(f"length: expected none for a step, which reads one time step, got {length}")
    if length is not None and length > _reach(model):
        raise ExportError(f"length: expected at most {_reach(model)} (attention.max_length), got {length}")
    if graph == "step" and not model.streams:
        kind = "is bidirectional" if model.config.head.documents == 1 else "reads two documents"
        raise ExportError(
            f"graph: expected 'sequence' for a model that {kind}, got 'step', for which a model has to be causal"
        )
    for module in model.modules():
        if isinstance(module, Mixer) and issubclass(module.state_class, SSMState):
            kind = type(module).__name__
            raise ExportError(
                f"mixer: expected one with real states, as of a TCN or an EMA, got {kind}: ONNX lacks the "
                "products of complex numbers"
            )
    size = 4 * sum(tensor.numel() for tensor in model.state_dict().values())
    if size > _MAX_BYTES:
        raise ExportError(f"model: expected weights of less than 2 GiB, the limit of ONNX files, got {size:,} bytes")
    require("onnx", "export to ONNX")


def _portable(model: SequenceModel) -> SequenceModel:
    """Return a copy in float32 on the CPU, with operators that ONNX has."""
    model = copy.deepcopy(model).float().cpu().eval()
    for module in model.modules():
        if isinstance(module, EMA):
            module.config = dataclasses.replace(module.config, backend="chunked")
    return model


class _Function(nn.Module):
    """A model as a function of tensors: base of `_Step` and `_Sequence`.

    inputs: dtype and shape of each.
    outputs: their names.
    """

    inputs: dict[str, tuple[torch.dtype, Shape]]
    outputs: list[str]

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model
        tokens = isinstance(model.embedding, TokenEmbedding)
        self.dtype = torch.int64 if tokens else torch.float32
        self.features = () if tokens else tuple(model.embedding.weight.shape[:1])

    def example(self, batch: int, time: int) -> dict[str, Tensor]:
        """Return random inputs: of `time` time steps, or of a step after as many."""
        raise NotImplementedError

    def draw(self, *shape: int) -> Tensor:
        """Return random tokens or raw values, of which `shape` is without the features."""
        embedding = self.model.embedding
        if isinstance(embedding, ValueEmbedding):
            values = torch.randn(*shape, *self.features)
            return values if embedding.standardize is None else embedding.standardize.inverse(values)
        return torch.randint(len(embedding.weight), shape)


class _Step(_Function):
    """One step of a causal model."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__(model)
        self.inputs = {"x": (self.dtype, ("batch", *self.features))}
        self.places: list[str | None] = []  # the input of each part of the state
        state = model.initial_state(1)
        leaves, self.structure = pytree.tree_flatten(state)
        names = iter(state.tensors())
        for leaf in leaves:
            name = None if leaf is None else f"state.{next(names)}"
            if name is not None:
                # All parts have seen as many tokens: they share one position.
                name = "state.position" if name.endswith(".position") else name
                # Only the cache of full attention, which is empty before the first step, grows.
                empty = "past" if ".attention." in name else 0
                self.inputs[name] = leaf.dtype, ("batch", *(size or empty for size in leaf.shape[1:]))
            self.places.append(name)
        self.outputs = ["logits", *(f"next_{name}" for name in self.inputs if name != "x")]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the logits and the tensors of the new state."""
        given = dict(zip(self.inputs, inputs, strict=True))
        leaves = [None if name is None else given[name] for name in self.places]
        logits, state = self.model(given["x"].unsqueeze(1), state=pytree.tree_unflatten(leaves, self.structure))
        new = dict(zip(self.places, pytree.tree_leaves(state), strict=True))
        return (logits if logits.dim() == 2 else logits[:, 0], *(new[name] for name in self.inputs if name != "x"))

    def example(self, batch: int, time: int) -> dict[str, Tensor]:
        """Return random inputs of a step after `time` time steps, in further rows after a few more."""
        inputs = {"x": self.draw(batch)}
        for name, (dtype, (_, *shape)) in list(self.inputs.items())[1:]:
            sizes = [batch, *(time if isinstance(size, str) else size for size in shape)]
            inputs[name] = torch.randn(sizes, dtype=dtype) if dtype.is_floating_point else torch.full(sizes, time)
            if time == 0:
                inputs[name].zero_()
            elif name == "state.position" and not self.grows:
                inputs[name] += torch.arange(batch)
        return inputs

    @property
    def grows(self) -> bool:
        """Whether the state grows with the number of steps."""
        return any("past" in shape for _, shape in self.inputs.values())


class _Sequence(_Function):
    """A model of whole sequences."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__(model)
        self.inputs = {}
        for x, lengths, time in (("x", "lengths", "time"), ("second", "lengths2", "time2")):
            self.inputs[x] = self.dtype, ("batch", time, *self.features)
            self.inputs[lengths] = torch.int64, ("batch",)
            if model.config.head.documents == 1:
                break
        self.outputs = ["logits"]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the logits."""
        return (self.model(**dict(zip(self.inputs, inputs, strict=True)), return_state=False).logits,)

    def example(self, batch: int, time: int) -> dict[str, Tensor]:
        """Return random inputs, of which the first row has no padding."""
        inputs = {}
        for x, lengths in (("x", "lengths"), ("second", "lengths2")):
            inputs[x] = self.draw(batch, time)
            inputs[lengths] = torch.cat([torch.tensor([time]), torch.randint(1, time + 1, (batch - 1,))])
        return {name: inputs[name] for name in self.inputs}


def _trace(function: _Function, fixed: dict[str, int]) -> Any:
    """Return the `torch.onnx.ONNXProgram` of a function; sizes that are not `fixed` may vary."""
    shapes = tuple(
        {index: size for index, size in enumerate(shape) if isinstance(size, str) and size not in fixed}
        for _, shape in function.inputs.values()
    )
    # More than two chunks: that a sequence has only one must not become part of the graph.
    time = min(_some_time(function.model) + 3, _reach(function.model) - 1)
    example = function.example(fixed.get("batch", 2), fixed.get("time", time))
    with _quiet(), without_kernels(), torch.no_grad():
        from onnx_ir.passes.common import ClearMetadataAndDocStringPass

        try:
            program: Any = torch.onnx.export(
                function,
                tuple(example.values()),
                dynamo=True,
                verbose=False,
                input_names=list(function.inputs),
                output_names=function.outputs,
                dynamic_shapes={"inputs": shapes},
            )
        except torch.onnx.OnnxExporterError as error:
            advice = "; a fixed length may help (--length)" if any("time" in shape.values() for shape in shapes) else ""
            raise ExportError(f"model: expected operators that ONNX has, got {_reason(error)}{advice}") from error
        # It holds the source code of every operator, with paths.
        ClearMetadataAndDocStringPass()(program.model)
    return program


def _some_time(model: SequenceModel) -> int:
    """Return a number of time steps that ends a chunk."""
    attention = model.config.attention
    return 24 if attention is None or attention.chunk_size is None else 2 * attention.chunk_size


def _reach(model: SequenceModel) -> int:
    """Return the most time steps that a model can read."""
    attention = model.config.attention
    if attention is None or attention.position != "simple" or attention.chunk_size is not None:
        return MAX_POSITION
    return attention.reach


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what PyTorch reports about its exporter."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    """Return the first line of the error that an error comes from."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return shorten(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def _metadata(function: _Function, graph: Graph) -> dict[str, str]:
    """Return what a user of the file has to know."""
    model = function.model
    facts, attention = model.preprocessing, model.config.attention
    max_length = min(facts.max_length or MAX_POSITION, _reach(model))
    values: dict[str, Any] = {
        "version": __version__,
        "graph": graph,
        "task": facts.task or None,
        "class_names": None if model.config.head.generates else class_names(model),
        "byte_map": facts.byte_map,
        "symbols": facts.symbols,
        # A step does not notice that it is beyond a position bias.
        "max_length": None if max_length == MAX_POSITION else max_length,
        "image_size": facts.image_size,
        "chunk_size": None if attention is None else attention.chunk_size,
        "config": model.config.to_dict(),
    }
    if graph == "step":
        values["state"] = {
            name: {"dtype": _name(dtype), "shape": [0 if size == "past" else size for size in shape[1:]]}
            for name, (dtype, shape) in function.inputs.items()
            if name != "x"
        }
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return {name: text for name, text in texts.items() if values[name] is not None}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(values: Any) -> Tensors:
    """Describe inputs or outputs of a graph."""
    return {
        value.name: (
            value.dtype.numpy().name,
            tuple(size if isinstance(size, int) else str(size.value) for size in value.shape),
        )
        for value in values
    }


@torch.no_grad()
def _compare(function: _Function, fixed: dict[str, int], path: Path) -> float:
    """Return the largest difference between ONNX Runtime and PyTorch; raise an ExportError if it is too large."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised
    options.intra_op_num_threads = torch.get_num_threads()
    with _runtime_errors():
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    worst = 0.0
    for inputs in _cases(function, fixed):
        theirs = inputs
        for _ in range(min(_STEPS, _reach(function.model)) if isinstance(function, _Step) else 1):
            expected = dict(zip(function.outputs, function(*inputs.values()), strict=True))
            with _runtime_errors():
                results = session.run(None, {name: value.numpy() for name, value in theirs.items()})
            got = dict(zip(function.outputs, map(torch.from_numpy, results), strict=True))
            worst = max(worst, *(_difference(name, expected[name], got[name]) for name in function.outputs))
            next_x = {"x": function.draw(len(inputs["x"]))}
            inputs, theirs = (
                next_x | {name[len("next_") :]: new[name] for name in function.outputs[1:]} for new in (expected, got)
            )
    return worst


def _cases(function: _Function, fixed: dict[str, int]) -> Iterator[dict[str, Tensor]]:
    """Yield inputs to compare: several batch sizes and lengths, or steps from the start and over the end of a chunk."""
    end, most = _some_time(function.model), _reach(function.model)
    cases = [(1, 1), (3, 7), (2, end // 2 + 5)]
    if isinstance(function, _Step):
        cases, most = [(1, 0), (3, end - 2)], max(most - _STEPS, 0)
    for batch, time in cases:
        yield function.example(fixed.get("batch", batch), fixed.get("time", min(time, most)))


def _difference(name: str, expected: Tensor, got: Tensor) -> float:
    """Return the largest difference of two tensors; raise an ExportError if it is too large."""
    if expected.shape != got.shape:
        raise ExportError(f"{name}: expected shape {list(expected.shape)} in ONNX Runtime, got {list(got.shape)}")
    if not expected.numel():
        return 0.0
    difference = (expected.double() - got.double()).abs().max().item()
    limit = TOLERANCE * expected.abs().max().item() + _ROUNDING if expected.is_floating_point() else 0.0
    if not difference <= limit:  # or it is NaN
        raise ExportError(
            f"{name}: expected the values of PyTorch in ONNX Runtime, to {limit:.1e}, got a difference of "
            f"{difference:.1e}; no file was written. Please report this with the configuration of the model"
        )
    return difference


@contextlib.contextmanager
def _runtime_errors() -> Iterator[None]:
    """Convert errors of ONNX Runtime."""
    try:
        yield
    except Exception as error:
        raise ExportError(f"model: ONNX Runtime cannot run it ({_reason(error)}); no file was written") from error
