"""Reads the checkpoints that MEGA's authors published into our MEGA.

A checkpoint holds training arguments and weights. The first half of this file maps the arguments, with the documented
defaults of each architecture of MEGA's published code, to our configuration; the second half maps the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tcnca.errors import CheckpointError, TcncaError, shown
from tcnca.layers import AttentionConfig, EMAConfig
from tcnca.models.heads import ClassifierHeadConfig, LanguageModelHeadConfig, PairHeadConfig
from tcnca.models.inputs import TokenInputConfig, ValueInputConfig
from tcnca.models.model import ModelConfig, SequenceModel
from tcnca.models.pickles import Call, TorchFile, describe
from tcnca.models.preprocessing import Preprocessing
from tcnca.models.serialization import build_on_meta, fill

PAD_TOKEN_ID = 1
"""The padding symbol of every dictionary of MEGA."""

Values = dict[str, Any]
"""Arguments and their defaults; a function computes the default from other arguments."""


def _decoder(layers: int, width: int, hidden: int, **more: Any) -> Values:
    sizes = {"decoder_layers": layers, "decoder_embed_dim": width, "decoder_hidden_dim": hidden}
    return {**sizes, "decoder_ffn_embed_dim": hidden, **more}


def _lra(width: int, hidden: int, keys: int, layers: int, length: int, **more: Any) -> Values:
    return {
        "layer_type": "mega",
        "encoder_embed_dim": width,
        "encoder_hidden_dim": hidden,
        "classifier_out_dim": hidden,
        "z_dim": keys,
        "n_dim": 16,
        "encoder_layers": layers,
        "activation_fn": "silu",
        "max_positions": length,
        "truncation_length": 1024,
        **more,
    }


def _speech(width: int) -> Values:
    return _lra(
        width,
        2 * width,
        width // 2,
        6,
        16000,
        classifier_out_dim=lambda a: 2 * a.number("encoder_embed_dim", width),
        dropout=0.0,
        attention_dropout=0.0,
        attention_activation_fn="laplace",
        norm_type="batchnorm",
        encoder_normalize_before=True,
        sentence_class_num=10,
        chunk_size=1000,
        truncation_length=1000,
        input_type="image",
    )


ARCHITECTURES: dict[str, Values] = {
    "mega_lm": {},
    "mega_lm_big": _decoder(16, 1024, 2048, decoder_z_dim=256),
    "mega_lm_enwik8_base": _decoder(12, 512, 1024),
    "mega_lm_enwik8_large": _decoder(24, 1024, 1536, dropout=0.2, attention_dropout=0.1, hidden_dropout=0.1),
    "lra": {},
    "mega_lra_listop": _lra(80, 160, 64, 6, 2002, norm_type="scalenorm", sentence_class_num=10),
    "mega_lra_imdb": _lra(128, 256, 64, 4, 4002, norm_type="scalenorm"),
    "mega_lra_aan": _lra(128, 256, 64, 6, 4002, classifier_in_dim=lambda a: 2 * a.number("encoder_embed_dim", 128)),
    "mega_lra_cifar10": _lra(160, 320, 96, 8, 1024, norm_type="batchnorm", sentence_class_num=10, chunk_size=1024),
    "mega_lra_pf32": _lra(128, 256, 64, 6, 1024, norm_type="batchnorm", chunk_size=1024),
    "mega_lra_pf128": _lra(64, 128, 32, 4, 16384, norm_type="batchnorm", chunk_size=16384, truncation_length=4096),
    "sc_raw": _speech(60),
    "mega_sc_raw": _speech(60),
    "mega_sc_raw_base": _speech(60),
    "mega_sc_raw_big": _speech(72),
}
"""Defaults of each architecture, where they differ from the general ones below."""

_NORMS = {
    "layernorm": "layer",
    "scalenorm": "scale",
    "rmsnorm": "rms",
    "batchnorm": "batch",
    "syncbatchnorm": "sync_batch",
}
_ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "linear": "none",
}
_FUNCTIONS = {"softmax": "softmax", "relu2": "relu2", "laplace": "laplace"}
_POSITIONS = {"simple": "simple", "rotary": "rotary"}
_POOLINGS = {"mp": "mean", "cls": "first"}


_LARGEST = 2**31 - 1


class Arguments:
    """The arguments of a checkpoint, with the defaults of its architecture for missing ones."""

    def __init__(self, given: Mapping[str, Any], fallback: str) -> None:
        self._given = given
        self._defaults = {"arch": fallback}
        architecture = self.get("arch") or fallback
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise CheckpointError(f"args.arch: expected one of {', '.join(ARCHITECTURES)}, got {shown(architecture)}")
        self._defaults = ARCHITECTURES[architecture]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument: None, a truth value, a number or a text."""
        if name in self._given:
            value = self._given[name]
            if value is not None and type(value) not in (bool, int, float, str):
                raise CheckpointError(f"args.{name}: expected a number or a text, got {describe(value)}")
            return value
        value = self._defaults.get(name, default)
        return value(self) if callable(value) else value

    def choice(self, name: str, table: dict[str, str], default: str) -> Any:
        """Return our name for the value of an argument."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in table:
            raise CheckpointError(f"args.{name}: expected one of {', '.join(table)}, got {shown(value)}")
        return table[value]

    def number(self, name: str, default: int) -> int:
        """Return a whole number."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST:
            raise CheckpointError(f"args.{name}: expected a whole number of up to {_LARGEST}, got {shown(value)}")
        return value

    def require(self, name: str, expected: Any, why: str) -> None:
        """Raise an error if an argument has another value, which our models do not support."""
        value = self.get(name, expected)
        if value != expected:
            raise CheckpointError(f"args.{name}: expected {expected!r}, got {shown(value)}; {why}")

    def chunk(self, name: str) -> int | None:
        """Return a chunk size; MEGA writes -1 for none."""
        value = self.number(name, -1)
        if value == 0:
            raise CheckpointError(f"args.{name}: expected a chunk size, or a negative number for no chunks, got 0")
        return value if value > 0 else None

    def truncation(self, default: int | None) -> int | None:
        """Return the truncation of the EMA's kernel, or None."""
        if self.get("truncation_length", default) is None:
            return None
        return max(self.number("truncation_length", default or 0), 0) or None


def language_model_config(a: Arguments, vocab_size: int) -> ModelConfig:
    """Return our configuration of a MEGA language model."""
    width, hidden = a.get("decoder_embed_dim", 512), a.get("decoder_hidden_dim", 1664)
    a.require("adaptive_input", False, "adaptive input embeddings are not supported")
    a.require("adaptive_softmax_cutoff", None, "the adaptive softmax is not supported")
    a.require("decoder_input_dim", width, "embeddings must be as wide as the layers")
    chunk_size = a.chunk("decoder_chunk_size")
    return ModelConfig(
        num_layers=a.get("decoder_layers", 6),
        d_model=width,
        d_ff=max(a.number("decoder_ffn_embed_dim", hidden), 0),
        mixer=EMAConfig(d_state=a.get("decoder_n_dim", 16), truncation=a.truncation(2048)),
        attention=AttentionConfig(
            d_key=a.get("decoder_z_dim", 128),
            d_value=hidden,
            chunk_size=chunk_size,
            activation=a.choice("attention_activation_fn", _FUNCTIONS, "softmax"),
            position=a.choice("rel_pos_bias", _POSITIONS, "simple"),
            max_length=(a.get("max_target_positions") or 1024) if chunk_size is None else None,
            dropout=a.get("attention_dropout", 0.0),
        ),
        input=TokenInputConfig(
            vocab_size=vocab_size,
            scale_embeddings=not a.get("no_scale_embedding"),
            norm=bool(a.get("normalize_embedding")),
            pad_token_id=PAD_TOKEN_ID,
        ),
        head=LanguageModelHeadConfig(tie_embeddings=bool(a.get("share_decoder_input_output_embed"))),
        activation=a.choice("activation_fn", _ACTIVATIONS, "silu"),
        norm=a.choice("normalization_type", _NORMS, "layernorm"),
        prenorm=bool(a.get("normalize_before")),
        final_norm_affine=not a.get("no_affine_final_norm"),
        dropout=a.get("dropout", 0.1),
        value_dropout=a.get("hidden_dropout", 0.0),
        ff_dropout=a.get("activation_dropout", 0.0),
        feature_dropout=bool(a.get("feature_dropout")),
    )


def classifier_config(a: Arguments, vocab_size: int | None, norm: str) -> ModelConfig:
    """Return our configuration of a MEGA classifier.

    Args:
        a: the arguments.
        vocab_size: None for real-valued input.
        norm: MEGA's name of the norm that the weights show, where neither arguments nor architecture name one.
    """
    a.require("layer_type", "mega", "only MEGA's layers are supported")
    a.require("use_p", False, "this is an option of Luna's layers")
    kind = "text" if vocab_size is not None else "image"
    a.require("input_type", kind, f"the weights belong to a model of {kind!r} input")
    width, hidden = a.number("encoder_embed_dim", 512), a.get("encoder_hidden_dim", 2048)
    inputs, hidden_layers = a.get("classifier_in_dim", width), a.number("classifier_layers", 1)
    if inputs not in (width, 2 * width):
        raise CheckpointError(
            f"args.classifier_in_dim: expected {width} for one document or {2 * width} for two, got {shown(inputs)}"
        )
    dropout, chunk_size = a.get("dropout", 0.1), a.chunk("chunk_size")
    positions = a.get("max_positions") or a.get("tokens_per_sample")
    embedding_norm = bool(a.get("normalize_embedding"))
    head = PairHeadConfig if inputs == 2 * width else ClassifierHeadConfig
    return ModelConfig(
        num_layers=a.get("encoder_layers", 6),
        d_model=width,
        d_ff=max(a.number("encoder_ffn_embed_dim", hidden), 0),
        mixer=EMAConfig(d_state=a.get("n_dim", 2), truncation=a.truncation(None)),
        attention=AttentionConfig(
            d_key=a.get("z_dim", 128),
            d_value=hidden,
            chunk_size=chunk_size,
            activation=a.choice("attention_activation_fn", _FUNCTIONS, "relu2"),
            position=a.choice("rel_pos_bias", _POSITIONS, "simple"),
            max_length=positions if chunk_size is None else None,
            dropout=a.get("attention_dropout", 0.1),
        ),
        causal=False,
        input=ValueInputConfig(norm=embedding_norm)
        if vocab_size is None
        else TokenInputConfig(vocab_size=vocab_size, norm=embedding_norm, pad_token_id=PAD_TOKEN_ID),
        head=head(
            num_classes=a.get("sentence_class_num", 2),
            pooling=a.choice("sen_rep_type", _POOLINGS, "mp"),
            hidden=a.get("classifier_out_dim", 2048) if hidden_layers > 0 else None,
            hidden_layers=max(hidden_layers, 1),
            activation=a.choice("classifier_activation_fn", _ACTIVATIONS, "gelu"),
            dropout=dropout,
        ),
        activation=a.choice("activation_fn", _ACTIVATIONS, "gelu"),
        norm=a.choice("norm_type", _NORMS, norm),
        prenorm=bool(a.get("encoder_normalize_before")),
        dropout=dropout,
        value_dropout=a.get("act_dropout", 0.0),
        ff_dropout=a.get("act_dropout", 0.0),
        feature_dropout=bool(a.get("feature_dropout")),
    )


_LAYER = re.compile(r"layers\.(\d+)\.(.+)")

# Prefixes of weights inside a layer, MEGA's and ours. In addition, the scale of ScaleNorm is called `scalar`.
_LAYER_NAMES = {
    "mega_layer.norm.norm.": "block.norm.",
    "mega_layer.move.": "block.mixer.",
    "mega_layer.v_proj.": "block.values.",
    "mega_layer.mx_proj.": "block.gates.",
    "mega_layer.h_proj.": "block.output.",
    "mega_layer.rel_pos_bias.rel_pos_bias": "block.attention.bias",
    "mega_layer.rel_pos_bias.": "block.attention.",
    "mega_layer.gamma": "block.gamma",
    "mega_layer.beta": "block.beta",
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
    "sentence_projection_layer.weight": "head.output.weight",
}
_IGNORED = re.compile(r"(^|\.)(version|_float_tensor)$")


def load_mega_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> SequenceModel:
    """Read a checkpoint of MEGA's published code: a language model, a classifier or a two-document classifier.

    The file holds the training arguments as a namespace and the weights. Missing arguments have the defaults of the
    architecture; an argument that our MEGA does not support is an error. Nothing in the file is executed: only
    tensors, plain values and the namespace are read.

    Returns:
        Our MEGA in evaluation mode. `model(tokens).logits` for a language model, `model(inputs, lengths=…).logits`
        for a classifier, `model(first, second, lengths=…, lengths2=…).logits` for a pair. Without lengths, MEGA's
        padding symbol is masked.
    """
    path = Path(path)
    try:
        arguments, weights = _read(path)
        if any(name.startswith("encoder.encoder.") for name in weights):
            model = _classifier(arguments, weights)
        elif any(name.startswith("decoder.layers.") for name in weights):
            model = _language_model(arguments, weights)
        else:
            raise CheckpointError(
                f"model: expected weights of a language model (decoder.…) or a classifier (encoder.encoder.…), "
                f"got {shown(sorted(weights)[:3])}"
            )
    except TcncaError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return model.to(device).eval()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the arguments and the weights of a checkpoint."""
    with TorchFile(path) as file:
        content = file.content
        args, model = (content.get("args"), content.get("model")) if isinstance(content, dict) else (content, content)
        if not (isinstance(args, Call) and args.name == "argparse.Namespace" and isinstance(args.state, dict)):
            raise CheckpointError(f"args: expected a Namespace, got {describe(args)}")
        if not isinstance(model, dict):
            raise CheckpointError(f"model: expected a dict, got {describe(model)}")
        names = [*args.state, *model]
        if not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"expected texts as names of arguments and weights, got {shown(names)}")
        # Twice the file, since a matrix may be shared by input and output.
        weights, left = {}, 2 * path.stat().st_size
        for name, value in model.items():
            if _IGNORED.search(name):
                continue
            tensor = file.tensor(shown(name)[1:-1], value)
            left -= tensor.nbytes
            if left < 0:
                raise CheckpointError(f"{name}: expected weights with values of their own, got shared ones")
            weights[name] = tensor.float() if tensor.is_floating_point() else tensor
    return args.state, weights


def _language_model(given: dict[str, Any], weights: dict[str, Tensor]) -> SequenceModel:
    name, output = "decoder.embed_tokens.weight", "decoder.output_projection.weight"
    # Adaptive embeddings have other names; the error about the arguments is clearer than a missing weight.
    embedding = weights.get(name, torch.zeros(PAD_TOKEN_ID + 1, 1))
    arguments = Arguments(given, "mega_lm")
    config = language_model_config(arguments, _rows(embedding, name))
    tied = weights.pop(output, None) if arguments.get("share_decoder_input_output_embed") else None
    if tied is not None and not torch.equal(tied, embedding):
        raise CheckpointError(
            f"{output}: expected the values of {name}, which args.share_decoder_input_output_embed shares, got others"
        )
    return _filled(config, {_rename(key, "decoder."): tensor for key, tensor in weights.items()})


def _classifier(given: dict[str, Any], weights: dict[str, Tensor]) -> SequenceModel:
    name = "encoder.encoder.embed_tokens.embed.weight"
    vocabulary = _rows(weights[name], name) if name in weights else None
    config = classifier_config(Arguments(given, "lra"), vocabulary, _norm_of(weights))
    return _filled(config, {_rename(key, "encoder.encoder."): tensor for key, tensor in weights.items()})


def _rows(tensor: Tensor, name: str) -> int:
    if tensor.dim() != 2:
        raise CheckpointError(f"{name}: expected shape [vocab_size, d_model], got {list(tensor.shape)}")
    return tensor.shape[0]


def _filled(config: ModelConfig, weights: dict[str, Tensor]) -> SequenceModel:
    model = build_on_meta(config, Preprocessing(), weights, "model")
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    directions = 1 if config.causal else 2
    for name, tensor in weights.items():
        if ".mixer." in name and not name.endswith("omega"):
            # MEGA's is [directions · channels, d_state, 1], or without the 1 for γ.
            if tensor.dim() in (2, 3) and tensor.shape[0] % directions == 0:
                weights[name] = tensor.reshape(directions, tensor.shape[0] // directions, -1)
        elif name in shapes and _sizes(tensor.shape) == _sizes(shapes[name]):
            # MEGA's may have another number of dimensions of size 1: the vector of a real-valued input, a rotary bias.
            weights[name] = tensor.reshape(shapes[name])
    fill(model, weights, "model")
    return model


def _sizes(shape: torch.Size) -> list[int]:
    return [size for size in shape if size > 1]


def _rename(name: str, prefix: str) -> str:
    short = name.removeprefix(prefix)
    hidden = re.fullmatch(r"classifier\.(\d+)\.0\.(weight|bias)", short)
    if hidden:
        return f"head.hidden.{hidden[1]}.{hidden[2]}"
    layer = _LAYER.fullmatch(short)
    table, inner, front = (_LAYER_NAMES, layer[2], f"layers.{layer[1]}.") if layer else (_MODEL_NAMES, short, "")
    for theirs, ours in table.items():
        if inner.startswith(theirs):
            rest = inner.removeprefix(theirs)
            return front + ours + ("weight" if rest == "scalar" else rest)
    raise CheckpointError(f"{shown(name)[1:-1]}: expected a weight of MEGA, got an unknown one")


def _norm_of(weights: dict[str, Tensor]) -> str:
    names = {name.rsplit(".", 1)[1] for name in weights if ".layers.0.mega_layer.norm.norm." in name}
    if "scalar" in names:
        return "scalenorm"
    if "running_mean" in names:
        return "batchnorm"
    return "layernorm" if "bias" in names else "rmsnorm"
