"""Checkpoints such as MEGA's code writes, made up on the spot: its arguments, its names of weights, random values."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcnca import SequenceModel, load_mega_checkpoint
from tests.models.mega_reference import Arguments, Weights

# Every argument that bears on the model, small.
LANGUAGE_MODEL: Arguments = {
    "arch": "mega_lm_enwik8_base",
    "decoder_layers": 2,
    "decoder_embed_dim": 6,
    "decoder_hidden_dim": 8,
    "decoder_ffn_embed_dim": 5,
    "decoder_z_dim": 4,
    "decoder_n_dim": 3,
    "decoder_chunk_size": 4,
    "max_target_positions": 20,
    "activation_fn": "silu",
    "attention_activation_fn": "softmax",
    "normalization_type": "layernorm",
    "normalize_before": True,
    "normalize_embedding": False,
    "no_affine_final_norm": False,
    "no_scale_embedding": False,
    "rel_pos_bias": "rotary",
    "truncation_length": 8192,
    "share_decoder_input_output_embed": True,
}
CLASSIFIER: Arguments = {
    "arch": "mega_lra_listop",
    "input_type": "text",
    "layer_type": "mega",
    "encoder_layers": 2,
    "encoder_embed_dim": 6,
    "encoder_hidden_dim": 8,
    "encoder_ffn_embed_dim": 5,
    "z_dim": 4,
    "n_dim": 3,
    "chunk_size": 4,
    "max_positions": 20,
    "activation_fn": "silu",
    "attention_activation_fn": "softmax",
    "norm_type": "layernorm",
    "encoder_normalize_before": False,
    "normalize_embedding": False,
    "rel_pos_bias": "simple",
    "truncation_length": 1024,
    "sen_rep_type": "mp",
    "classifier_layers": 1,
    "classifier_in_dim": 6,
    "classifier_out_dim": 7,
    "classifier_activation_fn": "gelu",
    "sentence_class_num": 3,
}
VOCABULARY = 9


def random_weights(args: Arguments, seed: int = 0) -> dict[str, Tensor]:
    """Values for every weight, large enough for each to matter."""
    generator = np.random.default_rng(seed)
    shapes = weight_shapes(args, None if args.get("input_type") == "image" else VOCABULARY)
    weights = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    if args.get("share_decoder_input_output_embed"):
        weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"]
    return weights


def _random(name: str, shape: Sequence[int], generator: np.random.Generator) -> Tensor:
    if name.endswith("num_batches_tracked"):
        return torch.tensor(7)
    if name.endswith("_float_tensor"):
        # MEGA leaves this one uninitialized.
        return torch.full(tuple(shape), float("nan"))
    values = generator.normal(size=shape)
    if name.endswith("running_var"):
        values = 0.5 + values**2
    elif ".norm." in name and name.endswith(("weight", "scalar")):
        values = 1.0 + 0.3 * values
    elif name.endswith(("proj.weight", "fc1.weight", "fc2.weight")):
        values = 0.6 * values
    return torch.from_numpy(values.astype(np.float32))


def as_arrays(weights: dict[str, Tensor]) -> Weights:
    """The weights for the reference."""
    return {name: tensor.double().numpy() for name, tensor in weights.items()}


def write(path: Path, args: Arguments, weights: dict[str, Tensor], **more: Any) -> Path:
    """Write a checkpoint; `more` are further entries beside the arguments and the weights."""
    content = {"args": argparse.Namespace(**args), "model": weights, "extra_state": {"epoch": 3}, **more}
    torch.save(content, path)
    return path


def loaded(args: Arguments, weights: dict[str, Tensor]) -> SequenceModel:
    """Our model of a checkpoint with these arguments and weights, in float64."""
    with tempfile.TemporaryDirectory() as folder:
        return load_mega_checkpoint(write(Path(folder) / "checkpoint.pt", args, weights)).double()


def weight_shapes(args: Arguments, vocab_size: int | None) -> dict[str, Sequence[int]]:
    """The name and shape of every weight that MEGA writes for these arguments; no vocabulary for real-valued input."""
    if "decoder_layers" in args:
        shapes: dict[str, Sequence[int]] = _decoder_shapes(args, vocab_size or 0)
        prefix, side, causal = "decoder.", "decoder_", True
    else:
        shapes = _encoder_shapes(args, vocab_size)
        prefix, side, causal = "encoder.encoder.", "", False
    width, hidden = (args[f"{'decoder' if causal else 'encoder'}_{part}_dim"] for part in ("embed", "hidden"))
    ffn = args["decoder_ffn_embed_dim" if causal else "encoder_ffn_embed_dim"]
    keys, states, chunk = (args[side + part] for part in ("z_dim", "n_dim", "chunk_size"))
    reach = chunk if chunk > 0 else args["max_target_positions" if causal else "max_positions"]
    norm = _norm_shapes(args["normalization_type" if causal else "norm_type"], width)
    prenorm = args["normalize_before" if causal else "encoder_normalize_before"]
    kernels = width if causal else 2 * width
    layer: dict[str, Sequence[int]] = {
        "mega_layer.gamma": (2, keys),
        "mega_layer.beta": (2, keys),
        **{f"mega_layer.norm.{name}": shape for name, shape in norm.items()},
        **{f"mega_layer.move.{name}": (kernels, states, 1) for name in ("delta", "alpha", "beta")},
        "mega_layer.move.gamma": (kernels, states),
        "mega_layer.move.omega": (width,),
        **_linear_shapes("mega_layer.v_proj.", width, hidden),
        **_linear_shapes("mega_layer.mx_proj.", width, 2 * width + keys + hidden),
        **_linear_shapes("mega_layer.h_proj.", hidden, width),
    }
    if args["rel_pos_bias"] == "simple":
        layer["mega_layer.rel_pos_bias.rel_pos_bias"] = (2 * reach - 1,)
    else:
        layer.update({f"mega_layer.rel_pos_bias.{name}": (1, keys) for name in ("alpha", "beta")})
        layer["mega_layer.rel_pos_bias._float_tensor"] = (1,)
    if ffn:
        layer.update({f"nffn.norm.{name}": shape for name, shape in norm.items()})
        layer.update(_linear_shapes("nffn.fc1.", width, ffn) | _linear_shapes("nffn.fc2.", ffn, width))
    for number in range(args["decoder_layers" if causal else "encoder_layers"]):
        shapes.update({f"{prefix}layers.{number}.{name}": shape for name, shape in layer.items()})
    if args["normalize_embedding"]:
        shapes.update({f"{prefix}embed_norm.{name}": shape for name, shape in norm.items()})
    if prenorm:
        # Without learned scales a batch norm still has its statistics.
        bare = args.get("no_affine_final_norm", False)
        kept = {
            name: shape for name, shape in norm.items() if not (bare and name.endswith(("weight", "bias", "scalar")))
        }
        shapes.update({f"{prefix}final_norm.{name}": shape for name, shape in kept.items()})
    return shapes


def _decoder_shapes(args: Arguments, vocab_size: int) -> dict[str, Sequence[int]]:
    matrix = (vocab_size, args["decoder_embed_dim"])
    return {"decoder.version": (1,), "decoder.embed_tokens.weight": matrix, "decoder.output_projection.weight": matrix}


def _encoder_shapes(args: Arguments, vocab_size: int | None) -> dict[str, Sequence[int]]:
    width, hidden = args["encoder_embed_dim"], args["classifier_out_dim"]
    embedding: dict[str, Sequence[int]] = {"embed.weight": (vocab_size or 0, width)}
    if vocab_size is None:
        embedding = {"weight": (width,), "bias": (width,)}
    shapes = {f"encoder.encoder.embed_tokens.{name}": shape for name, shape in embedding.items()}
    for number in range(args["classifier_layers"]):
        shapes.update(
            _linear_shapes(f"classifier.{number}.0.", hidden if number else args["classifier_in_dim"], hidden)
        )
    shapes["sentence_projection_layer.weight"] = (args["sentence_class_num"], hidden)
    return shapes


def _linear_shapes(name: str, inputs: int, outputs: int) -> dict[str, Sequence[int]]:
    return {name + "weight": (outputs, inputs), name + "bias": (outputs,)}


def _norm_shapes(kind: str, width: int) -> dict[str, Sequence[int]]:
    if kind == "scalenorm":
        return {"norm.scalar": (1,)}
    shapes: dict[str, Sequence[int]] = {"norm.weight": (width,)}
    if kind != "rmsnorm":
        shapes["norm.bias"] = (width,)
    if kind in ("batchnorm", "syncbatchnorm"):
        shapes.update({"norm.running_mean": (width,), "norm.running_var": (width,), "norm.num_batches_tracked": ()})
    return shapes
