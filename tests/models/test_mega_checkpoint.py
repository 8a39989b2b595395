"""MEGA's checkpoints give MEGA's logits: those of its code, kept as files, and those of its formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tcnca import load_mega_checkpoint
from tests.comparison import assert_close
from tests.models import mega_reference
from tests.models.mega_files import CLASSIFIER, LANGUAGE_MODEL, VOCABULARY, as_arrays, loaded, random_weights, write

ASSETS = Path(__file__).parent.parent / "assets"
NORMS = ("layernorm", "scalenorm", "rmsnorm", "batchnorm", "syncbatchnorm")
ACTIVATIONS = ("silu", "gelu", "gelu_accurate", "gelu_fast", "relu", "linear")

batches_of_lengths = st.lists(st.integers(1, 11), min_size=1, max_size=3)
shared_choices = {
    "attention_activation_fn": st.sampled_from(("softmax", "relu2", "laplace")),
    "rel_pos_bias": st.sampled_from(("simple", "rotary")),
    "activation_fn": st.sampled_from(ACTIVATIONS),
    "truncation_length": st.sampled_from((3, 1024)),
    # Prenorm, or a norm on the embeddings, or neither: MEGA does not have both.
    "norms": st.sampled_from(("pre", "post", "post with embedding")),
}


def tokens(lengths: list[int], seed: int = 1) -> Tensor:
    """Rows of so many symbols each, ended with MEGA's padding symbol."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.full((len(lengths), max(lengths)), mega_reference.PADDING)
    for row, length in enumerate(lengths):
        rows[row, :length] = torch.randint(2, VOCABULARY, (length,), generator=generator)
    return rows


@settings(max_examples=20)
@given(
    choices=st.fixed_dictionaries(
        {
            **shared_choices,
            "normalization_type": st.sampled_from(NORMS),
            "decoder_chunk_size": st.sampled_from((-1, 1, 4)),
            "decoder_ffn_embed_dim": st.sampled_from((0, 5)),
            "no_affine_final_norm": st.booleans(),
            "no_scale_embedding": st.booleans(),
            "share_decoder_input_output_embed": st.booleans(),
        }
    ),
    lengths=batches_of_lengths,
)
def test_language_model_equals_the_formulas(choices: dict[str, Any], lengths: list[int]) -> None:
    norms = choices.pop("norms")
    args = {
        **LANGUAGE_MODEL,
        **choices,
        "normalize_before": norms == "pre",
        "normalize_embedding": norms == "post with embedding",
    }
    weights, x = random_weights(args), tokens(lengths)
    expected = mega_reference.language_model(args, as_arrays(weights), x.numpy())
    with torch.no_grad():
        logits = loaded(args, weights)(x).logits
    assert_close(logits, torch.from_numpy(expected))


classifier_choices = {
    **shared_choices,
    "norm_type": st.sampled_from(NORMS),
    "chunk_size": st.sampled_from((-1, 1, 4)),
    "encoder_ffn_embed_dim": st.sampled_from((0, 5)),
    "classifier_layers": st.sampled_from((1, 2)),
    "classifier_activation_fn": st.sampled_from(ACTIVATIONS),
}


def classifier_args(choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    norms = choices.pop("norms")
    return {
        **CLASSIFIER,
        **choices,
        "encoder_normalize_before": norms == "pre",
        "normalize_embedding": norms == "post with embedding",
        **more,
    }


@settings(max_examples=20)
@given(
    choices=st.fixed_dictionaries({**classifier_choices, "sen_rep_type": st.sampled_from(("mp", "cls"))}),
    lengths=st.lists(st.tuples(st.integers(1, 11), st.integers(1, 11)), min_size=1, max_size=3),
    pair=st.booleans(),
    say_lengths=st.booleans(),
)
def test_text_classifier_equals_the_formulas(
    choices: dict[str, Any], lengths: list[tuple[int, int]], pair: bool, say_lengths: bool
) -> None:
    args = classifier_args(choices, classifier_in_dim=12 if pair else 6)
    each = [list(document) for document in zip(*lengths, strict=True)][: 1 + pair]
    documents = [tokens(document, seed) for seed, document in enumerate(each)]
    weights = random_weights(args)
    expected = mega_reference.classifier(args, as_arrays(weights), *(document.numpy() for document in documents))
    said = dict(zip(("lengths", "lengths2"), each, strict=False)) if say_lengths else {}
    with torch.no_grad():
        logits = loaded(args, weights)(*documents, **said).logits
    assert_close(logits, torch.from_numpy(expected))


@settings(max_examples=12)
@given(choices=st.fixed_dictionaries(classifier_choices), batch=st.integers(1, 3), time=st.integers(1, 11))
def test_classifier_of_real_values_equals_the_formulas(choices: dict[str, Any], batch: int, time: int) -> None:
    args = classifier_args(choices, input_type="image")
    weights, x = random_weights(args), torch.randn(batch, time, dtype=torch.float64)
    expected = mega_reference.classifier(args, as_arrays(weights), x.numpy())
    with torch.no_grad():
        logits = loaded(args, weights)(x).logits
    assert_close(logits, torch.from_numpy(expected))


def golden_names() -> list[str]:
    return sorted(path.stem for path in ASSETS.glob("mega_*.pt"))


def test_golden_checkpoints_are_there() -> None:
    # Otherwise the test below would pass with nothing to test.
    assert len(golden_names()) == 8


@pytest.mark.parametrize("name", golden_names())
def test_logits_equal_those_of_megas_code(name: str) -> None:
    recorded = json.loads((ASSETS / f"{name}.json").read_text(encoding="utf-8"))
    inputs = {key: torch.tensor(value) for key, value in recorded["inputs"].items()}
    first = next(inputs.pop(key) for key in ("tokens", "values", "first") if key in inputs)
    with torch.no_grad():
        logits = load_mega_checkpoint(ASSETS / f"{name}.pt")(first, **inputs).logits
    expected = torch.tensor(recorded["logits"])
    assert logits.dtype == torch.float32
    assert logits.shape == expected.shape
    # Their float32 differs from float64 by up to 2e-6, and so may ours.
    assert float((logits - expected).abs().max()) <= 1e-5


def test_weights_of_half_precision_are_read_as_float32(tmp_path: Path) -> None:
    weights = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in random_weights(LANGUAGE_MODEL).items()
    }
    model = load_mega_checkpoint(write(tmp_path / "half.pt", LANGUAGE_MODEL, weights))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    x = tokens([7, 3])
    expected = mega_reference.language_model(LANGUAGE_MODEL, as_arrays(weights), x.numpy())
    with torch.no_grad():
        assert_close(model.double()(x).logits, torch.from_numpy(expected))
