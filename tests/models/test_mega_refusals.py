"""What cannot be read of MEGA's checkpoints is refused by a CheckpointError that names it, and nothing is executed."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tcnca import CheckpointError, load_mega_checkpoint
from tests.models.mega_files import CLASSIFIER, LANGUAGE_MODEL, random_weights, write


class Malicious:
    """Unpickling it makes a folder: a stand-in for any command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def in_extra_state(bad: Any) -> dict[str, Any]:
    return {"extra_state": {"train_iterator": {"epoch": 3}, "note": bad}}


def in_namespace(bad: Any) -> dict[str, Any]:
    return {"args": argparse.Namespace(**LANGUAGE_MODEL, note=bad)}


def in_namespace_list(bad: Any) -> dict[str, Any]:
    return {"args": argparse.Namespace(**LANGUAGE_MODEL, lr=[0.1, bad])}


def among_weights(bad: Any) -> dict[str, Any]:
    return {"model": {**random_weights(LANGUAGE_MODEL), "decoder.version": bad}}


@pytest.mark.parametrize(
    ("place", "zipped"),
    [(in_extra_state, True), (in_namespace, False), (in_namespace_list, True), (among_weights, True)],
)
def test_malicious_pickle_is_refused_and_not_executed(
    tmp_path: Path, place: Callable[[Any], dict[str, Any]], zipped: bool
) -> None:
    marker, path = tmp_path / "marker", tmp_path / "malicious.pt"
    content = {"args": argparse.Namespace(**LANGUAGE_MODEL), "model": random_weights(LANGUAGE_MODEL)}
    torch.save({**content, **place(Malicious(marker))}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"malicious\.pt.*refused.*could run code"):
        load_mega_checkpoint(path)
    assert not marker.exists()
    # The file does bite: read without care it makes the folder.
    torch.load(path, weights_only=False)
    assert marker.is_dir()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_bare_malicious_pickle_is_refused_and_not_executed(tmp_path: Path, protocol: int) -> None:
    marker, path = tmp_path / "marker", tmp_path / "malicious.pt"
    path.write_bytes(pickle.dumps(Malicious(marker), protocol))
    with pytest.raises(CheckpointError, match=r"malicious\.pt"):
        load_mega_checkpoint(path)
    assert not marker.exists()


def numpy_1_names(path: Path) -> None:
    """Rename NumPy's parts to what they were called when MEGA was trained."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


@pytest.mark.parametrize("old", [False, True], ids=["numpy-2", "numpy-1"])
def test_numbers_of_numpy_in_the_logs_are_no_obstacle(tmp_path: Path, old: bool) -> None:
    numbers = [kind(1) for kind in (np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8, np.bool_)]
    log = {"val_loss": np.float64(1.25), "best": np.float32(1.0), "meters": {"numbers": numbers}}
    weights = random_weights(LANGUAGE_MODEL)
    path = write(tmp_path / "lm.pt", {**LANGUAGE_MODEL, "lr": [np.float64(0.005)]}, weights, extra_state=log)
    if old:
        numpy_1_names(path)
    model = load_mega_checkpoint(path)
    assert torch.equal(model.embedding.weight, weights["decoder.embed_tokens.weight"])


LM, LRA = LANGUAGE_MODEL, CLASSIFIER


@pytest.mark.parametrize(
    ("base", "name", "value"),
    [
        (LM, "arch", "transformer_lm_gpt"),
        (LM, "adaptive_input", True),
        (LM, "adaptive_softmax_cutoff", "20000,60000"),
        (LM, "decoder_input_dim", 4),
        (LM, "activation_fn", "tanh"),
        (LM, "attention_activation_fn", "sigmoid"),
        (LM, "rel_pos_bias", "alibi"),
        (LM, "normalization_type", "groupnorm"),
        (LM, "decoder_chunk_size", 0),
        (LM, "activation_fn", None),
        (LRA, "layer_type", "transformer"),
        (LRA, "use_p", True),
        (LRA, "norm_type", "groupnorm"),
        (LRA, "sen_rep_type", "max"),
        (LRA, "classifier_in_dim", 7),
        (LRA, "input_type", "image"),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else value["arch"],
)
def test_argument_that_our_mega_cannot_honor(tmp_path: Path, base: dict[str, Any], name: str, value: Any) -> None:
    path = write(tmp_path / "checkpoint.pt", {**base, name: value}, random_weights(base))
    with pytest.raises(
        CheckpointError, match=rf"checkpoint\.pt.*args\.{name}: expected .*, got {re.escape(repr(value))}"
    ):
        load_mega_checkpoint(path)


@pytest.mark.parametrize("architecture", ["mega_lm_wiki103", "mega_lm_adaptive_big", "mega_lm_adaptive_base"])
def test_architecture_with_adaptive_embeddings_says_so(tmp_path: Path, architecture: str) -> None:
    path = write(tmp_path / "wiki.pt", {"arch": architecture}, random_weights(LM))
    with pytest.raises(CheckpointError, match=r"args\.adaptive_input: expected False, got True"):
        load_mega_checkpoint(path)


def test_classifier_of_no_known_architecture_is_taken_for_one_of_transformers(tmp_path: Path) -> None:
    args = {name: value for name, value in LRA.items() if name not in ("arch", "layer_type")}
    path = write(tmp_path / "lra.pt", args, random_weights(LRA))
    with pytest.raises(CheckpointError, match=r"args\.layer_type: expected 'mega', got 'transformer'"):
        load_mega_checkpoint(path)


@pytest.mark.parametrize(
    ("base", "name", "value", "ours"),
    [
        (LM, "decoder_layers", 0, "num_layers"),
        (LM, "decoder_embed_dim", "wide", "d_model"),
        (LM, "decoder_n_dim", -1, "d_state"),
        (LM, "dropout", 2.0, "dropout"),
        (LM, "decoder_ffn_embed_dim", "wide", "d_ff"),
        (LM, "truncation_length", "long", "mixer.truncation"),
        (LRA, "encoder_embed_dim", None, "d_model"),
        (LRA, "classifier_layers", None, "head.hidden_layers"),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else value["arch"],
)
def test_argument_of_no_sense(tmp_path: Path, base: dict[str, Any], name: str, value: Any, ours: str) -> None:
    """The message names the argument, or the field of ours that it would set."""
    path = write(tmp_path / "checkpoint.pt", {**base, name: value}, random_weights(base))
    named = rf"(args\.{name}|{re.escape(ours)}): .*{re.escape(repr(value))}"
    with pytest.raises(CheckpointError, match=rf"checkpoint\.pt.* {named}"):
        load_mega_checkpoint(path)


UNTIED = {**LANGUAGE_MODEL, "share_decoder_input_output_embed": False, "rel_pos_bias": "simple"}
BATCHED = {**CLASSIFIER, "norm_type": "batchnorm", "rel_pos_bias": "rotary"}
SCALED = {**CLASSIFIER, "norm_type": "scalenorm", "input_type": "image", "encoder_normalize_before": True}


@pytest.mark.parametrize("args", [UNTIED, BATCHED, SCALED], ids=["lm", "batch", "scale"])
def test_missing_weight_and_weight_of_the_wrong_shape(tmp_path: Path, args: dict[str, Any]) -> None:
    names = [
        name
        for name in random_weights(args)
        if ".layers.1." not in name and not name.endswith(("version", "_float_tensor"))
    ]
    for name in names[::3]:
        weights = random_weights(args)
        tensor = weights.pop(name)
        with pytest.raises(CheckpointError, match=r"checkpoint\.pt.*(missing|args\.input_type)"):
            load_mega_checkpoint(write(tmp_path / "checkpoint.pt", args, weights))
        if name.endswith(("embed.weight", "scalar", "tracked")):
            continue  # one more row is a larger vocabulary, and a number has no shape
        weights[name] = torch.cat([tensor, tensor[:1]])
        with pytest.raises(CheckpointError, match=r"checkpoint\.pt.*: expected shape .*, got"):
            load_mega_checkpoint(write(tmp_path / "checkpoint.pt", args, weights))


@pytest.mark.parametrize(
    ("args", "name", "named"),
    [
        (LM, "decoder.layers.0.mega_layer.k_proj.weight", "decoder.layers.0.mega_layer.k_proj.weight"),
        (LM, "decoder.layers.7.mega_layer.gamma", "layers.7.block.gamma"),
        (LM, "decoder.project_in_dim.weight", "decoder.project_in_dim.weight"),
        (LRA, "encoder.encoder.layers.0.self_attn.weight", "encoder.encoder.layers.0.self_attn.weight"),
        (LRA, "classifier.1.0.weight", "head.hidden.1.weight"),
        (LRA, "lm_head.weight", "lm_head.weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["arch"],
)
def test_surplus_weight(tmp_path: Path, args: dict[str, Any], name: str, named: str) -> None:
    weights = {**random_weights(args), name: torch.zeros(2, 2)}
    with pytest.raises(CheckpointError, match=rf"checkpoint\.pt.*{re.escape(named)}"):
        load_mega_checkpoint(write(tmp_path / "checkpoint.pt", args, weights))


@pytest.mark.parametrize("value", [3, None, [1.0]], ids=str)
def test_weight_that_is_no_tensor(tmp_path: Path, value: Any) -> None:
    name = "decoder.layers.0.mega_layer.gamma"
    weights = {**random_weights(LM), name: value}
    with pytest.raises(CheckpointError, match=rf"checkpoint\.pt.*{re.escape(name)}"):
        load_mega_checkpoint(write(tmp_path / "checkpoint.pt", LM, weights))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([1, 2], "got list"),
        ({"model": random_weights(LM)}, "got NoneType"),
        ({"args": dict(LM), "model": random_weights(LM)}, "got dict"),
        ({"args": argparse.Namespace(**LM)}, "got NoneType"),
        ({"args": argparse.Namespace(**LM), "model": {}}, "got []"),
        ({"args": argparse.Namespace(**LM), "model": {"fc.weight": torch.zeros(2)}}, "fc.weight"),
        ({"args": argparse.Namespace(**LM), "model": {"encoder.layers.0.w": torch.zeros(2)}}, "encoder.layers.0.w"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_file_that_holds_something_else(tmp_path: Path, content: Any, named: str) -> None:
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=rf"other\.pt.*expected.*{re.escape(named)}"):
        load_mega_checkpoint(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.pt: no such file"):
        load_mega_checkpoint(tmp_path / "absent.pt")


def test_folder_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        load_mega_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"hello world\n", b'{"format": 1}', b"PK\x03\x04" + bytes(50)],
    ids=["empty", "text", "json", "zip"],
)
def test_file_that_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"other\.pt: cannot be read"):
        load_mega_checkpoint(path)


@pytest.mark.parametrize(("part", "zipped"), [(0.1, True), (0.5, False), (0.99, True)])
def test_truncated_file(tmp_path: Path, part: float, zipped: bool) -> None:
    path = tmp_path / "cut.pt"
    content = {"args": argparse.Namespace(**LM), "model": random_weights(LM)}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(CheckpointError, match=r"cut\.pt: cannot be read"):
        load_mega_checkpoint(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@given(content=st.binary(max_size=60))
def test_any_bytes_at_all(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "noise.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"noise\.pt"):
        load_mega_checkpoint(path)


def test_tied_output_that_is_not_the_embedding(tmp_path: Path) -> None:
    weights = random_weights(LM)
    weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"] + 1.0
    with pytest.raises(CheckpointError, match=r"output_projection\.weight: expected the values of "):
        load_mega_checkpoint(write(tmp_path / "checkpoint.pt", LM, weights))
