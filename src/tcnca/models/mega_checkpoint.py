"""Reads the checkpoints that MEGA's authors published into our MEGA."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcnca.errors import CheckpointError, ConfigError
from tcnca.models.checkpoint import fill
from tcnca.models.config import ModelConfig
from tcnca.models.mega_arguments import PADDING_INDEX, Arguments, classifier_config, language_model_config
from tcnca.models.model import SequenceModel

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")

# Their names inside a layer, and ours. Norms differ only in that ScaleNorm's scale is a `scalar`.
_LAYER_NAMES = {
    "mega_layer.norm.norm.": "mixing.norm.",
    "mega_layer.move.": "mixing.mixer.",
    "mega_layer.v_proj.": "mixing.values.",
    "mega_layer.mx_proj.": "mixing.gates.",
    "mega_layer.h_proj.": "mixing.output.",
    "mega_layer.rel_pos_bias.rel_pos_bias": "mixing.attention.bias",
    "mega_layer.rel_pos_bias.": "mixing.attention.",
    "mega_layer.gamma": "mixing.gamma",
    "mega_layer.beta": "mixing.beta",
    "nffn.norm.norm.": "feed_forward.norm.",
    "nffn.fc1.": "feed_forward.up.",
    "nffn.fc2.": "feed_forward.down.",
}
_MODEL_NAMES = {
    "embed_tokens.embed.weight": "embedding.weight",
    "embed_tokens.": "embedding.",
    "embed_norm.norm.": "embedding.norm.",
    "final_norm.norm.": "norm.",
    "output_projection.weight": "head.weight",
}
_IGNORED = re.compile(r"(^|\.)(version|_float_tensor)$")


def load_mega_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> SequenceModel:
    """Read a checkpoint of MEGA's published code: a language model, a classifier or a two-document classifier.

    The file holds the training arguments as a namespace and the weights. Arguments that it leaves out have the
    defaults of its architecture; one that our MEGA cannot honor is an error that names it. Nothing in the file
    is executed: only tensors, plain values and the namespace are read.

    Returns:
        Our MEGA in evaluation mode. `model(tokens).logits` for a language model, `model(inputs, lengths=…).logits`
        for a classifier, `model(first, second, lengths=…, lengths2=…).logits` for a pair. Without lengths, tokens
        equal to MEGA's padding symbol are taken as padding.
    """
    arguments, weights = _read(Path(path))
    if any(name.startswith("encoder.encoder.") for name in weights):
        model = _classifier(arguments, weights, str(path))
    elif any(name.startswith("decoder.layers.") for name in weights) and not any(
        name.startswith("encoder.") for name in weights
    ):
        model = _language_model(arguments, weights, str(path))
    else:
        raise CheckpointError(
            f"{path}: model: got weights such as {sorted(weights)[:3]}, allowed are a language model's (decoder.…) "
            f"or a classifier's (encoder.encoder.…)"
        )
    return model.to(device).eval()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with torch.serialization.safe_globals(_readable()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except Exception as error:  # a file of other bytes can fail anywhere in the unpickler
        # PyTorch's own text would advise to trust the file; its cause is kept.
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{path}: cannot be read as tensors, plain values and an argument namespace. Anything else in a checkpoint "
            f"is refused, because loading it could run code{f' (found: {found[1]})' if found else ''}"
        ) from error
    for name, kind in (("args", argparse.Namespace), ("model", dict)):
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            got = type(content.get(name)).__name__ if isinstance(content, dict) else type(content).__name__
            raise CheckpointError(f"{path}: {name}: got {got}, allowed is a {kind.__name__}")
    weights = {}
    for name, tensor in content["model"].items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{path}: model: {name}: got {tensor!r}, allowed is a tensor")
        if not _IGNORED.search(name):
            weights[name] = tensor.float() if tensor.is_floating_point() else tensor
    return vars(content["args"]), weights


def _readable() -> list[Any]:
    """What a checkpoint may hold beside tensors and plain values: the namespace, and numbers of NumPy's in its logs."""
    scalar = np.float64(0).__reduce__()[0]
    numbers = [type(np.dtype(code)) for code in "?bhilqBHILQefd"]
    return [argparse.Namespace, np.dtype, scalar, (scalar, "numpy.core.multiarray.scalar"), *numbers]


def _language_model(given: dict[str, Any], weights: dict[str, Tensor], where: str) -> SequenceModel:
    # Adaptive embeddings have other names; the arguments say so better than a missing weight would.
    name = "decoder.embed_tokens.weight"
    vocabulary = _rows(weights.get(name, torch.zeros(PADDING_INDEX + 1, 1)), name, where)
    config = _configured(where, lambda: language_model_config(Arguments(given, "mega_lm"), vocabulary))
    output = "decoder.output_projection.weight"
    if getattr(config.head, "tie_embeddings", False) and output in weights:
        if not torch.equal(weights[output], weights[name]):
            raise CheckpointError(
                f"{where}: {output}: differs from {name}, allowed is the same: the arguments say that they are one "
                f"(share_decoder_input_output_embed)"
            )
        weights = {key: tensor for key, tensor in weights.items() if key != output}
    renamed = {_rename(key.removeprefix("decoder."), key, where): tensor for key, tensor in weights.items()}
    return _filled(config, renamed, where)


def _classifier(given: dict[str, Any], weights: dict[str, Tensor], where: str) -> SequenceModel:
    name = "encoder.encoder.embed_tokens.embed.weight"
    vocabulary = _rows(weights[name], name, where) if name in weights else None
    found = {"norm_type": _norm_of(weights)}
    config = _configured(where, lambda: classifier_config(Arguments(given, "lra", **found), vocabulary))
    renamed = {}
    for name, tensor in weights.items():
        hidden = re.fullmatch(r"classifier\.(\d+)\.0\.(weight|bias)", name)
        if hidden:
            renamed[f"head.hidden.{hidden[1]}.{hidden[2]}"] = tensor
        elif name == "sentence_projection_layer.weight":
            renamed["head.output.weight"] = tensor
        else:
            renamed[_rename(name.removeprefix("encoder.encoder."), name, where)] = tensor
    return _filled(config, renamed, where)


def _rows(tensor: Tensor, name: str, where: str) -> int:
    if tensor.dim() != 2:
        raise CheckpointError(f"{where}: {name}: got shape {list(tensor.shape)}, allowed is [vocabulary, width]")
    return tensor.shape[0]


def _configured(where: str, make: Callable[[], ModelConfig]) -> ModelConfig:
    try:
        return make()
    except ConfigError as error:
        raise CheckpointError(f"{where}: the arguments give no model: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _filled(config: ModelConfig, weights: dict[str, Tensor], where: str) -> SequenceModel:
    with torch.device("meta"):
        model = SequenceModel(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    directions = 1 if config.causal else 2
    for name, tensor in weights.items():
        if ".mixer." in name and not name.endswith("omega"):
            # Theirs is [directions · channels, hidden, 1], or without the 1 for γ.
            if tensor.dim() in (2, 3) and tensor.shape[0] % directions == 0:
                weights[name] = tensor.reshape(directions, tensor.shape[0] // directions, -1)
        elif name in shapes and _sizes(tensor.shape) == _sizes(shapes[name]):
            # Theirs may have a dimension of 1 more or less: the vector of a real-valued input, of a rotary bias.
            weights[name] = tensor.reshape(shapes[name])
    fill(model, weights, where)
    return model


def _sizes(shape: torch.Size) -> list[int]:
    return [size for size in shape if size > 1]


def _rename(short: str, name: str, where: str) -> str:
    layer = _LAYER.fullmatch(short)
    table, inner, front = (_LAYER_NAMES, layer[2], f"layers.{layer[1]}.") if layer else (_MODEL_NAMES, short, "")
    for theirs, ours in table.items():
        if inner.startswith(theirs):
            rest = inner.removeprefix(theirs)
            return front + ours + ("weight" if rest == "scalar" else rest)
    raise CheckpointError(f"{where}: {name}: no part of our MEGA has such a weight")


def _norm_of(weights: dict[str, Tensor]) -> str:
    names = {name.rsplit(".", 1)[1] for name in weights if ".layers.0.mega_layer.norm.norm." in name}
    if "scalar" in names:
        return "scalenorm"
    if "running_mean" in names:
        return "batchnorm"
    return "layernorm" if "bias" in names else "rmsnorm"
