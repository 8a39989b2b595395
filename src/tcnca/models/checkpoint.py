"""Checkpoints of ours: a folder with the weights in safetensors and the configuration in JSON."""

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
from tcnca.models.config import ModelConfig
from tcnca.models.model import SequenceModel

FORMAT = "tcnca-model-1"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def save(model: SequenceModel, folder: str | Path) -> Path:
    """Write `model` to `folder`, which is made if it is missing.

    Both files are written beside their places and moved there when both are whole, so that a disk that fills up
    leaves an earlier checkpoint as it was.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder}: is a file, allowed is a folder to make or to write into") from error
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    text = json.dumps({"format": FORMAT, "model": model.config.to_dict()}, indent=2) + "\n"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as beside:
        save_file(weights, Path(beside, WEIGHTS_FILE), {"format": "pt"})
        Path(beside, CONFIG_FILE).write_text(text, encoding="utf-8")
        # Safetensors writes for the owner alone; let both files have what the user's mask says.
        Path(beside, WEIGHTS_FILE).chmod(Path(beside, CONFIG_FILE).stat().st_mode)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            os.replace(Path(beside, name), folder / name)
    return folder


def load(folder: str | Path, device: str | torch.device = "cpu") -> SequenceModel:
    """Read a model that `save` wrote, in evaluation mode."""
    folder = Path(folder)
    config = _read_config(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a checkpoint is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    try:
        weights = load_file(path, device=str(device))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error}); is the file whole?") from error
    with torch.device("meta"):
        model = SequenceModel(config)
    fill(model, weights, str(path))
    return model.eval()


def fill(model: SequenceModel, weights: dict[str, torch.Tensor], where: str) -> None:
    """Give a model that was built on the `meta` device its weights, all of them and no others."""
    expected = model.state_dict()
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(f"{where}: weights do not fit the model: missing {missing}, unknown {unknown}")
    for name, tensor in expected.items():
        got = weights[name]
        if tensor.shape != got.shape:
            raise CheckpointError(f"{where}: {name}: got shape {list(got.shape)}, allowed is {list(tensor.shape)}")
        if tensor.is_floating_point() != got.is_floating_point():
            kind = "floating-point" if tensor.is_floating_point() else "whole"
            raise CheckpointError(f"{where}: {name}: got {got.dtype}, allowed are {kind} numbers")
    # Memory of its own: in a mapped file weights lie at any address, and products round differently there.
    model.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)


def _read_config(path: Path) -> ModelConfig:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: no such file; a checkpoint is a folder that tcnca.save wrote") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path}: format: got {got!r}, allowed is {FORMAT!r}")
    if not isinstance(content.get("model"), dict):
        raise CheckpointError(f"{path}: model: got {content.get('model')!r}, allowed is a configuration")
    try:
        return ModelConfig.from_dict(_explicit(content["model"]))
    except ConfigError as error:
        raise CheckpointError(f"{path}: model: {error}") from error


def _explicit(model: dict[str, Any]) -> dict[str, Any]:
    """A configuration in which the TCN says how it ends: before it could, that followed from its block."""
    mixer = model.get("mixer")
    if not isinstance(mixer, dict) or mixer.get("kind") != "tcn" or "output" in mixer:
        return model
    block = mixer.get("block", "residual")
    return {**model, "mixer": {**mixer, "block": block, "output": "none" if block == "residual" else "activation"}}
