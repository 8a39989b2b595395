"""Saved models: a folder with the weights in safetensors, and the configuration and preprocessing in JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tcnca.config import check
from tcnca.errors import CheckpointError, ConfigError, shown
from tcnca.files import read_json
from tcnca.models.model import ModelConfig, SequenceModel
from tcnca.models.preprocessing import Preprocessing
from tcnca.ops.state import FLOAT_DTYPES, read_tensors

FORMAT = "tcnca-model-2"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def save(model: SequenceModel, folder: str | Path) -> Path:
    """Write `model` to `folder`, which is created if it is missing.

    Both files are written to a temporary folder and moved when both are complete, so that a full disk leaves an earlier
    model unchanged.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder}: expected a folder to create or to write to, got a file") from error
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    content = {
        "format": FORMAT,
        "model": model.config.to_dict(),
        "preprocessing": model.preprocessing.to_dict(),
    }
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        save_file(weights, Path(temporary, WEIGHTS_FILE), {"format": "pt"})
        Path(temporary, CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        # Safetensors makes files private to the owner; both files should follow the umask.
        Path(temporary, WEIGHTS_FILE).chmod(Path(temporary, CONFIG_FILE).stat().st_mode)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            os.replace(Path(temporary, name), folder / name)
    return folder


def load(folder: str | Path, device: str | torch.device = "cpu") -> SequenceModel:
    """Read a model that `save` wrote, or that of a run directory as it was trained, in evaluation mode.

    Of a run that is not finished, the last checkpoint is read. `tcnca.load` also applies how the run is evaluated.
    """
    folder = _find_model(Path(folder))
    if not os.path.lexists(folder / CONFIG_FILE):
        found = "a file" if folder.exists() else "no such folder"
        got = f"a folder without {CONFIG_FILE}" if folder.is_dir() else found
        raise CheckpointError(f"{folder}: expected a run directory or a saved model, got {got}; check the path")
    config, preprocessing = _read_config(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    weights, _ = read_tensors(path, CheckpointError)
    try:
        model = build_on_meta(config, preprocessing, weights, str(path))
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    fill(model, weights, str(path), device)
    return model.eval()


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
    expected = model.state_dict()
    _check_names(expected.keys(), weights.keys(), where)
    for name, tensor in expected.items():
        got = weights[name]
        if tensor.shape != got.shape:
            raise CheckpointError(f"{where}: {name}: expected shape {list(tensor.shape)}, got {list(got.shape)}")
        if got.dtype not in (FLOAT_DTYPES if tensor.is_floating_point() else (tensor.dtype,)):
            kind = "floating-point numbers of 16 bits or more" if tensor.is_floating_point() else str(tensor.dtype)
            raise CheckpointError(f"{where}: {name}: expected {kind}, got {got.dtype}")
    # Copied: weights of a mapped file can have any alignment, with which matrix products round differently.
    model.load_state_dict({name: tensor.to(device, copy=True) for name, tensor in weights.items()}, assign=True)


def _find_model(folder: Path) -> Path:
    """Return the folder of the model: in a run that is not finished, its last checkpoint."""
    if (folder / CONFIG_FILE).exists():
        return folder
    checkpoints = folder.glob(f"checkpoints/step-*/{CONFIG_FILE}")
    return max((path.parent for path in checkpoints if path.is_file()), default=folder)


def _check_names(expected: Set[str], names: Set[str], where: str) -> None:
    missing, unknown = sorted(expected - names), sorted(names - expected)
    if missing or unknown:
        raise CheckpointError(
            f"{where}: expected the weights of the model, got missing {shown(missing)}, unknown {shown(unknown)}"
        )


def _read_config(path: Path) -> tuple[ModelConfig, Preprocessing]:
    content = read_json(path, dict[str, Any], error=CheckpointError, remedy="expected what tcnca.save wrote")
    try:
        if content.get("format") != FORMAT:
            raise ConfigError(f"format: expected {FORMAT!r}, got {shown(content.get('format'))}")
        values = [check(name, content.get(name), dict[str, Any]) for name in ("model", "preprocessing")]
        return ModelConfig.from_dict(values[0]), Preprocessing.from_dict(values[1])
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
