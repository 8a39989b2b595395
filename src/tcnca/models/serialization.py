"""Saved models: a folder with the weights in safetensors, and the configuration and preprocessing in JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from tcnca.config import check, check_choice
from tcnca.errors import CheckpointError, ConfigError, shown
from tcnca.files import read_json, replace_file
from tcnca.models.model import ModelConfig, SequenceModel
from tcnca.models.preprocessing import Preprocessing, Standardization
from tcnca.ops.quantize import dequantize_rows, quantize_rows
from tcnca.ops.state import FLOAT_DTYPES, read_tensors

FORMAT = "tcnca-model-2"
QUANTIZED_FORMAT = "tcnca-model-3"
"""Format of weights that are in float32 when they are loaded: its `dtype` is `bfloat16` or `int8`."""
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
SCALE = "_scale"
"""End of the name of the scales of an int8 matrix: `embedding.weight` has `embedding.weight_scale`."""

_FREE_FIELDS = ("dropout", "ff_dropout", "value_dropout", "init", "backend", "chunk_size", "max_length", "pad_token_id")
"""Names of fields in which a model can differ from the one whose weights it takes over."""

SavedDtype = Literal["float32", "bfloat16", "int8"]
"""Data type of weights in a file."""
_QuantizedDtype = Literal["bfloat16", "int8"]


def save(model: SequenceModel, folder: str | Path, dtype: SavedDtype | None = None) -> Path:
    """Write `model` to `folder`, which is created if it is missing.

    Both files are written to a temporary folder and moved when both are complete, so that a full disk leaves an earlier
    model unchanged.

    Args:
        model: the model, which is not changed.
        folder: the folder.
        dtype: data type of the weights in the file; None for that of the model. `bfloat16` and `int8` round matrices
            and convolution kernels, and `load` returns them in float32: a file of a half or a quarter of the size.
            With `int8`, each row of a matrix has a scale, and kernels are in bfloat16. Norms, biases and other small
            tensors are in float32.
    """
    if dtype is not None:
        check_choice("dtype", dtype, get_args(SavedDtype))
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder}: expected a folder to create or to write to, got a file") from error
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    rounded = dtype in get_args(_QuantizedDtype)
    content = {
        "format": QUANTIZED_FORMAT if rounded else FORMAT,
        **({"dtype": dtype} if rounded else {}),
        "model": model.config.to_dict(),
        "preprocessing": model.preprocessing.to_dict(),
    }
    stored = _stored(weights, dtype)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        save_file(stored, Path(temporary, WEIGHTS_FILE), {"format": "pt"})
        Path(temporary, CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        # Safetensors makes files private to the owner; both files should follow the umask.
        Path(temporary, WEIGHTS_FILE).chmod(Path(temporary, CONFIG_FILE).stat().st_mode)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            replace_file(Path(temporary, name), folder / name)
    return folder


def load(folder: str | Path, device: str | torch.device = "cpu") -> SequenceModel:
    """Read a model that `save` wrote, or that of a run directory as it was trained, in evaluation mode.

    Of a run that is not finished, the last checkpoint is read. `tcnca.load` also applies how the run is evaluated.
    """
    folder = find_model(Path(folder))
    config, preprocessing, dtype = _read_config(folder)
    path = folder / WEIGHTS_FILE
    weights, _ = read_tensors(path, CheckpointError)
    scales = _take_scales(weights, str(path)) if dtype == "int8" else {}
    try:
        model = build_on_meta(config, preprocessing, weights, str(path))
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    # Before memory is allocated: the file of a huge int8 matrix can be small.
    _check_weights(model.state_dict(), weights, str(path), scales.keys())
    for name, scale in scales.items():
        weights[name] = dequantize_rows(weights[name], scale)
    fill(model, weights, str(path), device)
    return model.eval() if dtype is None else model.eval().float()


def load_config(folder: str | Path) -> ModelConfig:
    """Return the configuration of a saved model or of the model in a run directory."""
    return _read_config(folder)[0]


@torch.no_grad()
def copy_weights(model: SequenceModel, source: SequenceModel, name: str) -> bool:
    """Copy the weights of `source` into a model of the same structure and vocabulary.

    Data statistics are kept, and so is the head if it differs in kind, size or class names.

    Args:
        model: the model, which is changed.
        source: the model to copy from.
        name: of `source`, for errors.

    Returns:
        Whether the weights of the head were copied.
    """
    for each in ("byte_map", "symbols"):
        if getattr(model.preprocessing, each) != getattr(source.preprocessing, each):
            raise ConfigError(
                f"{name}: expected a model with the tokens of the data, got one with others (preprocessing.{each}); "
                "data.task.all_bytes decides whether EnWik8 has a token for every byte"
            )
    same_head = _same_head(model, source)
    structure = _structure(model.config)
    for field, value in _structure(source.config).items():
        if structure.get(field) != value:
            raise CheckpointError(
                f"{name}: {field}: expected {structure.get(field)!r}, as the new model has, got {value!r}"
            )
    weights, source_weights = _shared_weights(model, same_head), _shared_weights(source, same_head)
    _check_weights(weights, source_weights, name)
    for path, tensor in weights.items():
        tensor.copy_(source_weights[path])
    return same_head


def _same_head(model: SequenceModel, source: SequenceModel) -> bool:
    """Return whether two models have heads of one kind and size, for the same classes; both standardize or neither."""
    if type(model.config.head) is not type(source.config.head) or model.class_names != source.class_names:
        return False
    shapes = [{path: tensor.shape for path, tensor in each.head.state_dict().items()} for each in (model, source)]
    return shapes[0] == shapes[1]


def _shared_weights(model: SequenceModel, with_head: bool) -> dict[str, Tensor]:
    """Return what models for different data can share: all but data statistics and, on request, the head."""
    skipped = {path for path, module in model.named_modules() if isinstance(module, Standardization)}
    weights = model.state_dict()
    if not with_head:
        weights = {path: tensor for path, tensor in weights.items() if not path.startswith("head.")}
    return {path: tensor for path, tensor in weights.items() if path.rpartition(".")[0] not in skipped}


def _structure(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that decide what the weights compute, by name, except those of the head."""
    fields: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if isinstance(value, dict):
            fields |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            fields[name] = value
    return {
        name: value
        for name, value in fields.items()
        if not name.startswith("head.") and name.rpartition(".")[2] not in _FREE_FIELDS
    }


def saved_dtype(folder: str | Path) -> SavedDtype | None:
    """Return the `dtype` of a saved model, or of a run's last checkpoint."""
    return _read_config(folder)[2]


def _stored(weights: Mapping[str, Tensor], dtype: SavedDtype | None) -> dict[str, Tensor]:
    """Return the tensors of a file."""
    if dtype is None:
        return dict(weights)
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if dtype == "int8" and _is_matrix(name, tensor):
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(f"{name}: expected finite weights for dtype 'int8', got NaN or infinity")
            stored[name], scale = quantize_rows(tensor)
            stored[name + SCALE] = scale.bfloat16()
        elif dtype != "float32" and name.endswith("weight") and tensor.ndim > 1:
            stored[name] = tensor.bfloat16()
        else:
            stored[name] = tensor.float() if tensor.is_floating_point() else tensor
    return stored


def _is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether `int8` quantizes a tensor: a matrix of products, or of embeddings."""
    return name.endswith("weight") and tensor.ndim == 2


def _take_scales(weights: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Remove the scales of int8 matrices from the weights of a file, and return them by the name of the matrix."""
    scales = {}
    for name, tensor in list(weights.items()):
        # Others are compared with the model, which has no weights of this type.
        if tensor.dtype != torch.int8 or not _is_matrix(name, tensor):
            continue
        scale = weights.pop(name + SCALE, None)
        if scale is None:
            raise CheckpointError(f"{where}: {name}: expected int8 with {name + SCALE}, a scale per row, got none")
        if scale.shape != tensor.shape[:1] or scale.dtype not in FLOAT_DTYPES:
            expected = f"a floating-point number per row, shape {[len(tensor)]}"
            got = f"{scale.dtype} of shape {list(scale.shape)}"
            raise CheckpointError(f"{where}: {name + SCALE}: expected {expected}, got {got}")
        wrong = scale[~(scale.isfinite() & (scale > 0))]
        if wrong.numel():
            raise CheckpointError(f"{where}: {name + SCALE}: expected finite numbers above 0, got {float(wrong[0])}")
        scales[name] = scale
    return scales


def build_on_meta(
    config: ModelConfig, preprocessing: Preprocessing, weights: Mapping[str, torch.Tensor], where: str
) -> SequenceModel:
    """Return a model without memory for its weights, if `weights` has their names; `where` is named in errors.

    A file can ask for any number of layers, so one of them is compared with the weights before all are built.
    """
    found = {name.split(".", 2)[1] for name in weights if name.startswith("layers.")}
    with torch.device("meta"):
        first = SequenceModel(dataclasses.replace(config, num_layers=1), preprocessing)
        expected = first.state_dict().keys()
        if config.num_layers > len(found) and any(name.startswith("layers.") for name in expected):
            raise CheckpointError(
                f"{where}: num_layers: expected at most {len(found)}, the layers of the weights, got "
                f"{config.num_layers}"
            )
        _check_names(expected, {name for name in weights if not re.match(r"layers\.(?!0\.)", name)}, where)
        return SequenceModel(config, preprocessing)


def fill(
    model: SequenceModel, weights: Mapping[str, torch.Tensor], where: str, device: str | torch.device = "cpu"
) -> None:
    """Set all weights of a model that was built on the `meta` device; `where` is named in errors."""
    _check_weights(model.state_dict(), weights, where)
    # Copied: weights of a mapped file can have any alignment, with which matrix products round differently.
    model.load_state_dict({name: tensor.to(device, copy=True) for name, tensor in weights.items()}, assign=True)


def find_model(folder: Path) -> Path:
    """Return the folder of the model: in a run that is not finished, its last checkpoint."""
    if os.path.lexists(folder / CONFIG_FILE):
        return folder
    checkpoints = [path.parent for path in folder.glob(f"checkpoints/step-*/{CONFIG_FILE}") if path.is_file()]
    if checkpoints:
        return max(checkpoints)
    found = "a file" if folder.exists() else "no such folder"
    got = f"a folder without {CONFIG_FILE}" if folder.is_dir() else found
    raise CheckpointError(f"{folder}: expected a run directory or a saved model, got {got}; check the path")


def _check_weights(
    expected: Mapping[str, Tensor], weights: Mapping[str, Tensor], where: str, quantized: Set[str] = frozenset()
) -> None:
    """Raise an error unless the weights have the names, shapes and types of those expected."""
    _check_names(expected.keys(), weights.keys(), where)
    for name, tensor in expected.items():
        got = weights[name]
        if tensor.shape != got.shape:
            raise CheckpointError(f"{where}: {name}: expected shape {list(tensor.shape)}, got {list(got.shape)}")
        if name in quantized:
            continue
        if got.dtype not in (FLOAT_DTYPES if tensor.is_floating_point() else (tensor.dtype,)):
            kind = "floating-point numbers of 16 bits or more" if tensor.is_floating_point() else str(tensor.dtype)
            raise CheckpointError(f"{where}: {name}: expected {kind}, got {got.dtype}")


def _check_names(expected: Set[str], names: Set[str], where: str) -> None:
    missing, unknown = sorted(expected - names), sorted(names - expected)
    if missing or unknown:
        raise CheckpointError(
            f"{where}: expected the weights of the model, got missing {shown(missing)}, unknown {shown(unknown)}"
        )


def _read_config(folder: str | Path) -> tuple[ModelConfig, Preprocessing, _QuantizedDtype | None]:
    """Read configuration and preprocessing, and how the weights are rounded; None if they are not."""
    path = find_model(Path(folder)) / CONFIG_FILE
    content = read_json(path, dict[str, Any], error=CheckpointError, remedy="expected what tcnca.save wrote")
    try:
        if content.get("format") not in (FORMAT, QUANTIZED_FORMAT):
            raise ConfigError(
                f"format: expected {FORMAT!r} or {QUANTIZED_FORMAT!r}, got {shown(content.get('format'))}"
            )
        dtype = check("dtype", content.get("dtype"), _QuantizedDtype) if content["format"] == QUANTIZED_FORMAT else None
        values = [check(name, content.get(name), dict[str, Any]) for name in ("model", "preprocessing")]
        return ModelConfig.from_dict(values[0]), Preprocessing.from_dict(values[1]), dtype
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
