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

from tcnca.errors import CheckpointError
from tcnca.models.config import ModelConfig
from tcnca.models.model import SequenceModel

FORMAT = "tcnca-model-1"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def save(model: SequenceModel, folder: str | Path) -> Path:
    """Write `model` to `folder`, which is made if it is missing. Each file is moved into place when it is whole."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
    _write_whole(folder / WEIGHTS_FILE, lambda path: save_file(weights, path, {"format": "pt"}))
    text = json.dumps({"format": FORMAT, "model": model.config.to_dict()}, indent=2) + "\n"
    _write_whole(folder / CONFIG_FILE, lambda path: Path(path).write_text(text, encoding="utf-8"))
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
        if tensor.shape != weights[name].shape:
            raise CheckpointError(
                f"{where}: {name}: got shape {list(weights[name].shape)}, allowed is {list(tensor.shape)}"
            )
    model.load_state_dict(weights, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def _read_config(path: Path) -> ModelConfig:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; a checkpoint is a folder that tcnca.save wrote") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path}: format: got {got!r}, allowed is {FORMAT!r}")
    return ModelConfig.from_dict(content["model"])


def _write_whole(path: Path, write: Any) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(name)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
