"""What the training arguments in MEGA's checkpoints mean: each architecture's defaults, and our configuration for them.

The architectures are those of MEGA's published code, with the defaults it documents for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tcnca.errors import CheckpointError
from tcnca.layers import AttentionConfig, EMAConfig
from tcnca.models.config import ModelConfig
from tcnca.models.heads import ClassifierHeadConfig, LanguageModelHeadConfig, PairHeadConfig
from tcnca.models.inputs import TokenInputConfig, ValueInputConfig

# The index of the padding symbol in every dictionary of MEGA's.
PADDING_INDEX = 1

# A default may depend on other arguments: then it is a function of them.
Defaults = dict[str, Any]

_LANGUAGE_MODEL: Defaults = {
    "decoder_embed_dim": 512,
    "decoder_hidden_dim": 1664,
    "decoder_ffn_embed_dim": lambda a: a["decoder_hidden_dim"],
    "decoder_z_dim": 128,
    "decoder_n_dim": 16,
    "decoder_layers": 6,
    "decoder_chunk_size": -1,
    "max_target_positions": 1024,
    "adaptive_softmax_cutoff": None,
    "adaptive_input": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "activation_dropout": 0.0,
    "dropout": 0.1,
    "feature_dropout": False,
    "rel_pos_bias": "simple",
    "normalization_type": "layernorm",
    "normalize_before": False,
    "normalize_embedding": False,
    "no_scale_embedding": False,
    "no_affine_final_norm": False,
    "share_decoder_input_output_embed": False,
    "activation_fn": "silu",
    "attention_activation_fn": "softmax",
    "truncation_length": 2048,
}
_BIG: Defaults = {
    "decoder_layers": 16,
    "decoder_embed_dim": 1024,
    "decoder_hidden_dim": 2048,
    "decoder_ffn_embed_dim": 2048,
    "decoder_z_dim": 256,
}
_ADAPTIVE: Defaults = {
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "activation_dropout": 0.1,
    "adaptive_input": True,
    "adaptive_softmax_cutoff": "20000,60000",
}

_CLASSIFIER: Defaults = {
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "act_dropout": 0.0,
    "feature_dropout": False,
    "encoder_hidden_dim": 2048,
    "encoder_ffn_embed_dim": lambda a: a["encoder_hidden_dim"],
    "z_dim": 128,
    "n_dim": 2,
    "encoder_layers": 6,
    "encoder_embed_dim": 512,
    "classifier_in_dim": lambda a: a["encoder_embed_dim"],
    "classifier_out_dim": 2048,
    "sentence_class_num": 2,
    "activation_fn": "gelu",
    "attention_activation_fn": "relu2",
    "classifier_layers": 1,
    "classifier_activation_fn": "gelu",
    "encoder_normalize_before": False,
    "normalize_embedding": False,
    "layer_type": "transformer",
    "chunk_size": -1,
    "truncation_length": None,
    "rel_pos_bias": "simple",
    "sen_rep_type": "mp",
    "use_p": False,
    "max_positions": None,
}


def _lra(width: int, hidden: int, keys: int, layers: int, length: int, **more: Any) -> Defaults:
    return {
        **_CLASSIFIER,
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


def _speech(width: int, hidden: int, keys: int) -> Defaults:
    return _lra(
        width,
        hidden,
        keys,
        6,
        16000,
        classifier_out_dim=lambda a: 2 * a["encoder_embed_dim"],
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


ARCHITECTURES: dict[str, Defaults] = {
    "mega_lm": _LANGUAGE_MODEL,
    "mega_lm_big": {**_LANGUAGE_MODEL, **_BIG},
    "mega_lm_wiki103": {**_LANGUAGE_MODEL, **_BIG, **_ADAPTIVE},
    "mega_lm_adaptive_big": {**_LANGUAGE_MODEL, **_BIG, **_ADAPTIVE},
    "mega_lm_adaptive_base": {
        **_LANGUAGE_MODEL,
        **_ADAPTIVE,
        "decoder_layers": 16,
        "decoder_embed_dim": 768,
        "decoder_hidden_dim": 1536,
        "decoder_ffn_embed_dim": 1536,
    },
    "mega_lm_enwik8_base": {
        **_LANGUAGE_MODEL,
        "decoder_layers": 12,
        "decoder_hidden_dim": 1024,
        "decoder_ffn_embed_dim": 1024,
    },
    "mega_lm_enwik8_large": {
        **_LANGUAGE_MODEL,
        "decoder_layers": 24,
        "decoder_embed_dim": 1024,
        "decoder_hidden_dim": 1536,
        "decoder_ffn_embed_dim": 1536,
        "dropout": 0.2,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    },
    "lra": _CLASSIFIER,
    "mega_lra_listop": _lra(80, 160, 64, 6, 2002, norm_type="scalenorm", sentence_class_num=10),
    "mega_lra_imdb": _lra(128, 256, 64, 4, 4002, norm_type="scalenorm"),
    "mega_lra_aan": _lra(128, 256, 64, 6, 4002, classifier_in_dim=lambda a: 2 * a["encoder_embed_dim"]),
    "mega_lra_cifar10": _lra(160, 320, 96, 8, 1024, norm_type="batchnorm", sentence_class_num=10, chunk_size=1024),
    "mega_lra_pf32": _lra(128, 256, 64, 6, 1024, norm_type="batchnorm", chunk_size=1024),
    "mega_lra_pf128": _lra(64, 128, 32, 4, 16384, norm_type="batchnorm", chunk_size=16384, truncation_length=4096),
    "sc_raw": _speech(60, 120, 30),
    "mega_sc_raw": _speech(60, 120, 30),
    "mega_sc_raw_base": _speech(60, 120, 30),
    "mega_sc_raw_big": _speech(72, 144, 36),
}

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


class Arguments:
    """The arguments of a checkpoint, with its architecture's defaults for those it leaves out."""

    def __init__(self, given: Mapping[str, Any], fallback: str, **found: Any) -> None:
        """`found` is what the weights show: it stands in where neither the file nor the architecture has a word."""
        self.architecture = given.get("arch") or fallback
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"args.arch: got {self.architecture!r}, allowed are {', '.join(sorted(ARCHITECTURES))}"
            )
        self._values = {**found, **ARCHITECTURES[self.architecture], **given}

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        return value(self) if callable(value) else value

    def get(self, name: str, default: Any) -> Any:
        """The value of an argument that has no default of the architecture's own."""
        return self._values.get(name, default)

    def choice(self, name: str, table: dict[str, str]) -> Any:
        """Our word for the value of an argument."""
        value = self._values[name]
        if not isinstance(value, str) or value not in table:
            raise CheckpointError(f"args.{name}: got {value!r}, allowed are {', '.join(table)}")
        return table[value]

    def number(self, name: str) -> int:
        """A whole number."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"args.{name}: got {value!r}, allowed is a whole number")
        return value

    def refuse(self, name: str, allowed: Any, why: str) -> None:
        """Raise an error if an argument asks for what our models do not have."""
        value = self._values.get(name, allowed)
        if value != allowed:
            raise CheckpointError(f"args.{name}: got {value!r}, allowed is {allowed!r}: {why}")

    def chunk(self, name: str) -> int | None:
        """A chunk size; MEGA writes -1 for none."""
        value = self.number(name)
        if value == 0:
            raise CheckpointError(f"args.{name}: got 0, allowed is a whole number, negative for no chunks")
        return value if value > 0 else None

    def truncation(self) -> int | None:
        """The truncation of the EMA's kernel, if any."""
        if self["truncation_length"] is None:
            return None
        return max(self.number("truncation_length"), 0) or None


def language_model_config(arguments: Arguments, vocab_size: int) -> ModelConfig:
    """Our configuration of a MEGA language model."""
    a = arguments
    a.refuse("adaptive_input", False, "adaptive input embeddings are not supported")
    a.refuse("adaptive_softmax_cutoff", None, "the adaptive softmax is not supported")
    a.refuse(
        "decoder_input_dim", a["decoder_embed_dim"], "embeddings of another width than the layers' are not supported"
    )
    positions = a["max_target_positions"]
    hidden = a["decoder_hidden_dim"]
    return ModelConfig(
        num_layers=a["decoder_layers"],
        d_model=a["decoder_embed_dim"],
        d_ff=max(a.number("decoder_ffn_embed_dim"), 0),
        mixer=EMAConfig(d_state=a["decoder_n_dim"], truncation=a.truncation()),
        attention=_attention(a, a["decoder_z_dim"], hidden, a.chunk("decoder_chunk_size"), positions or 1024),
        input=TokenInputConfig(
            vocab_size=vocab_size,
            scale_embeddings=not a["no_scale_embedding"],
            norm=bool(a["normalize_embedding"]),
            pad_token_id=PADDING_INDEX,
        ),
        head=LanguageModelHeadConfig(tie_embeddings=bool(a["share_decoder_input_output_embed"])),
        activation=a.choice("activation_fn", _ACTIVATIONS),
        norm=a.choice("normalization_type", _NORMS),
        prenorm=bool(a["normalize_before"]),
        final_norm_affine=not a["no_affine_final_norm"],
        dropout=a["dropout"],
        value_dropout=a["hidden_dropout"],
        ff_dropout=a["activation_dropout"],
        feature_dropout=bool(a["feature_dropout"]),
    )


def classifier_config(arguments: Arguments, vocab_size: int | None) -> ModelConfig:
    """Our configuration of a MEGA classifier; `vocab_size` is None for real-valued input."""
    a = arguments
    a.refuse("layer_type", "mega", "only MEGA's layers can be read")
    a.refuse("use_p", False, "that is an option of Luna's layers")
    kind = "text" if vocab_size is not None else "image"
    a.refuse("input_type", kind, f"the weights are those of a model of kind {kind!r}")
    width, hidden = a.number("encoder_embed_dim"), a["encoder_hidden_dim"]
    inputs = a["classifier_in_dim"]
    if inputs not in (width, 2 * width):
        raise CheckpointError(
            f"args.classifier_in_dim: got {inputs}, allowed are {width} for one document and {2 * width} for two"
        )
    head: dict[str, Any] = {
        "num_classes": a["sentence_class_num"],
        "pooling": a.choice("sen_rep_type", _POOLINGS),
        "hidden": a["classifier_out_dim"] if a.number("classifier_layers") > 0 else None,
        "hidden_layers": max(a.number("classifier_layers"), 1),
        "activation": a.choice("classifier_activation_fn", _ACTIVATIONS),
        "dropout": a["dropout"],
    }
    embedding_norm = bool(a["normalize_embedding"])
    chunk = a.chunk("chunk_size")
    positions = a["max_positions"] or a.get("tokens_per_sample", None)
    return ModelConfig(
        num_layers=a["encoder_layers"],
        d_model=width,
        d_ff=max(a.number("encoder_ffn_embed_dim"), 0),
        mixer=EMAConfig(d_state=a["n_dim"], truncation=a.truncation()),
        attention=_attention(a, a["z_dim"], hidden, chunk, positions),
        causal=False,
        input=ValueInputConfig(norm=embedding_norm)
        if vocab_size is None
        else TokenInputConfig(vocab_size=vocab_size, norm=embedding_norm, pad_token_id=PADDING_INDEX),
        head=PairHeadConfig(**head) if inputs == 2 * width else ClassifierHeadConfig(**head),
        activation=a.choice("activation_fn", _ACTIVATIONS),
        norm=a.choice("norm_type", _NORMS),
        prenorm=bool(a["encoder_normalize_before"]),
        dropout=a["dropout"],
        value_dropout=a["act_dropout"],
        ff_dropout=a["act_dropout"],
        feature_dropout=bool(a["feature_dropout"]),
    )


def _attention(a: Arguments, keys: int, values: int, chunk_size: int | None, positions: int | None) -> AttentionConfig:
    return AttentionConfig(
        d_key=keys,
        d_value=values,
        chunk_size=chunk_size,
        activation=a.choice("attention_activation_fn", _FUNCTIONS),
        position=a.choice("rel_pos_bias", _POSITIONS),
        max_length=positions if chunk_size is None else None,
        dropout=a["attention_dropout"],
    )
