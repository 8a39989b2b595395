"""What is wrong with a checkpoint of MEGA is refused by a CheckpointError that names it, and nothing is executed."""

from __future__ import annotations

import argparse
import os
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

LM, LRA = LANGUAGE_MODEL, CLASSIFIER


class Malicious:
    """Unpickling it creates a folder: a stand-in for any command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.marker),)


PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "extra state": lambda bad: {"extra_state": {"train_iterator": {"epoch": 3}, "note": bad}},
    "arguments": lambda bad: {"args": argparse.Namespace(**LM, lr=[0.1, bad])},
    "weights": lambda bad: {"model": {**random_weights(LM), "decoder.version": bad}},
}


@pytest.mark.parametrize(
    ("place", "zipped"), [("extra state", True), ("arguments", True), ("arguments", False), ("weights", True)]
)
def test_malicious_pickle_is_refused_and_not_executed(tmp_path: Path, place: str, zipped: bool) -> None:
    marker, path = tmp_path / "marker", tmp_path / "malicious.pt"
    content = {"args": argparse.Namespace(**LM), "model": random_weights(LM), **PLACES[place](Malicious(marker))}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    expected = r"refused.*could run code \(found: posix\.mkdir" if zipped else "before 1.6"
    with pytest.raises(CheckpointError, match=rf"malicious\.pt.*{expected}"):
        load_mega_checkpoint(path)
    assert not marker.exists()
    # The file is harmful: read without care it creates the folder.
    torch.load(path, weights_only=False)
    assert marker.is_dir()


@pytest.mark.parametrize("old", [False, True], ids=["numpy-2", "numpy-1"])
def test_numpy_scalars_in_the_logs_can_be_read(tmp_path: Path, old: bool) -> None:
    numbers = [kind(1) for kind in (np.float64, np.float32, np.float16, np.int64, np.int32, np.uint8, np.bool_)]
    weights = random_weights(LM)
    path = write(tmp_path / "lm.pt", {**LM, "lr": [np.float64(0.005)]}, weights, extra_state={"numbers": numbers})
    if old:  # the names of NumPy's modules when MEGA was trained
        with zipfile.ZipFile(path) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, data in parts.items():
                archive.writestr(name, data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert torch.equal(load_mega_checkpoint(path).embedding.weight, weights["decoder.embed_tokens.weight"])


def test_plain_values_of_other_types_can_be_read(tmp_path: Path) -> None:
    values = {"set": {1, 2}, "dtype": torch.float16, "array": np.arange(3), "complex": 1j, "bytes": b"abc"}
    keys = {(1, "a"): 1, 0.5: 2, None: 3, 7: 4, torch.Size([2]): 5}
    weights = random_weights(LM)
    extra = {**values, "keys": keys, "text": "x" * 3 * 10**6, "size": torch.Size([1]), "large": 2**70}
    path = write(tmp_path / "lm.pt", LM, weights, extra_state=extra)
    assert torch.equal(load_mega_checkpoint(path).embedding.weight, weights["decoder.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LM, {"arch": "transformer_lm_gpt"}, "args.arch: expected one of"),
        (LM, {"adaptive_input": True}, "args.adaptive_input: expected False, got True"),
        (LM, {"adaptive_softmax_cutoff": "20000,60000"}, "args.adaptive_softmax_cutoff: expected None"),
        (LM, {"decoder_input_dim": 4}, "args.decoder_input_dim: expected 6, got 4"),
        (LM, {"activation_fn": "tanh"}, "args.activation_fn: expected one of silu"),
        (LM, {"activation_fn": None}, "args.activation_fn: expected one of silu"),
        (LM, {"rel_pos_bias": "alibi"}, "args.rel_pos_bias: expected one of simple"),
        (LM, {"decoder_chunk_size": 0}, "args.decoder_chunk_size: expected a chunk size"),
        (
            LM,
            {"truncation_length": "long"},
            "args.truncation_length: expected a whole number of up to 2147483647, got 'long'",
        ),
        (LM, {"decoder_layers": 0}, "num_layers: "),
        (LM, {"decoder_embed_dim": "wide"}, "d_model: "),
        (LM, {"dropout": 2.0}, "dropout: "),
        (LRA, {"layer_type": "luna"}, "args.layer_type: expected 'mega', got 'luna'"),
        (LRA, {"use_p": True}, "args.use_p: expected False"),
        (LRA, {"sen_rep_type": "max"}, "args.sen_rep_type: expected one of mp"),
        (LRA, {"classifier_in_dim": 7}, "args.classifier_in_dim: expected 6 for one document"),
        (LRA, {"input_type": "image"}, "args.input_type: expected 'text', got 'image'"),
        (
            LRA,
            {"encoder_embed_dim": None},
            "args.encoder_embed_dim: expected a whole number of up to 2147483647, got None",
        ),
    ],
)
def test_argument_that_is_not_supported(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "checkpoint.pt", {**base, **changes}, random_weights(base))
    with pytest.raises(CheckpointError, match=rf"checkpoint\.pt: .*{re.escape(message)}"):
        load_mega_checkpoint(path)


UNTIED = {**LM, "share_decoder_input_output_embed": False, "rel_pos_bias": "simple"}
BATCHED = {**LRA, "norm_type": "batchnorm", "rel_pos_bias": "rotary"}
SCALED = {**LRA, "norm_type": "scalenorm", "input_type": "image", "encoder_normalize_before": True}


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
    ("args", "name", "value", "named"),
    [
        (LM, "decoder.layers.0.mega_layer.k_proj.weight", torch.zeros(2, 2), "mega_layer.k_proj.weight: expected"),
        (LM, "decoder.layers.7.mega_layer.gamma", torch.zeros(2, 2), "unknown ['layers.7.block.gamma']"),
        (LRA, "lm_head.weight", torch.zeros(2, 2), "lm_head.weight: expected a weight of MEGA"),
        (LM, "decoder.layers.0.mega_layer.gamma", None, "mega_layer.gamma: expected a tensor, got a NoneType"),
        (LM, "decoder.output_projection.weight", torch.zeros(9, 6), "output_projection.weight: expected the values of"),
    ],
    ids=["unknown", "layer", "other", "no-tensor", "tied"],
)
def test_weight_that_does_not_fit(tmp_path: Path, args: dict[str, Any], name: str, value: Any, named: str) -> None:
    path = write(tmp_path / "checkpoint.pt", args, {**random_weights(args), name: value})
    with pytest.raises(CheckpointError, match=rf"checkpoint\.pt.*{re.escape(named)}"):
        load_mega_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([1, 2], "args: expected a Namespace, got a list"),
        ({"args": dict(LM), "model": random_weights(LM)}, "args: expected a Namespace, got a dict"),
        ({"args": argparse.Namespace(**LM)}, "model: expected a dict, got a NoneType"),
        ({"args": argparse.Namespace(**LM), "model": {"fc.weight": torch.zeros(2)}}, "got ['fc.weight']"),
        ({"args": argparse.Namespace(**LM), "model": {"encoder.layers.0.w": torch.zeros(2)}}, "encoder.layers.0.w"),
    ],
    ids=["list", "dict", "no-model", "other", "encoder"],
)
def test_file_that_is_no_checkpoint_of_mega(tmp_path: Path, content: Any, named: str) -> None:
    path = tmp_path / "other.pt"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=rf"other\.pt: .*{re.escape(named)}"):
        load_mega_checkpoint(path)


def test_missing_folder_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.pt: cannot be read \(No such file"):
        load_mega_checkpoint(tmp_path / "absent.pt")
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        load_mega_checkpoint(tmp_path)
    whole = write(tmp_path / "whole.pt", LM, random_weights(LM)).read_bytes()
    for content in (b"", b"hello world\n", b"PK\x03\x04" + bytes(50), whole[: len(whole) // 10], whole[:-20]):
        (tmp_path / "cut.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cut\.pt: cannot be read"):
            load_mega_checkpoint(tmp_path / "cut.pt")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@given(content=st.binary(max_size=60))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "noise.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"noise\.pt"):
        load_mega_checkpoint(path)
