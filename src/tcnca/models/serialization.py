"""Saved models: a folder with the weights in safetensors, and the configuration and preprocessing in JSON."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tcnca.errors import CheckpointError, ConfigError
from tcnca.models.model import ModelConfig, SequenceModel
from tcnca.models.preprocessing import Preprocessing

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
    """Read a model that `save` wrote, in evaluation mode.

    The model takes raw inputs: it applies the preprocessing that it was trained with.
    """
    folder = Path(folder)
    model = _read_config(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        weights = load_file(path, device=str(device))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error}); is the file complete?") from error
    fill(model, weights, str(path))
    return model.eval()


def fill(model: SequenceModel, weights: dict[str, torch.Tensor], where: str) -> None:
    """Set all weights of a model that was built on the `meta` device; `where` is named in errors."""
    expected = model.state_dict()
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(f"{where}: expected the weights of the model, got missing {missing}, unknown {unknown}")
    for name, tensor in expected.items():
        got = weights[name]
        if tensor.shape != got.shape:
            raise CheckpointError(f"{where}: {name}: expected shape {list(tensor.shape)}, got {list(got.shape)}")
        if tensor.is_floating_point() != got.is_floating_point():
            kind = "floating-point" if tensor.is_floating_point() else "whole"
            raise CheckpointError(f"{where}: {name}: expected {kind} numbers, got {got.dtype}")
    # Copied: weights of a mapped file can have any alignment, with which matrix products round differently.
    model.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)


def _read_config(path: Path) -> SequenceModel:
    """Return the model, without memory for its weights."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: no such file; expected a folder that tcnca.save wrote") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path}: format: expected {FORMAT!r}, got {got!r}")
    for name in ("model", "preprocessing"):
        if not isinstance(content.get(name), dict):
            raise CheckpointError(f"{path}: {name}: expected a configuration, got {content.get(name)!r}")
    try:
        config, facts = ModelConfig.from_dict(content["model"]), Preprocessing.from_dict(content["preprocessing"])
        with torch.device("meta"):
            return SequenceModel(config, facts)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error
