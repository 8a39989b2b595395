"""What `save` writes, `load` reads again to the last bit, and a broken folder is refused with a reason."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import tcnca.models.serialization
from tcnca import (
    CheckpointError,
    ClassifierHeadConfig,
    ModelConfig,
    PairHeadConfig,
    RegressionHeadConfig,
    SequenceModel,
    ValueInputConfig,
    load,
    save,
)
from tests.comparison import assert_close
from tests.examples import FAMILY, VOCABULARY, small_config, small_model

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 9))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that is in order."""
    return save(small_model(), tmp_path / "model")


def assert_same(loaded: SequenceModel, model: SequenceModel, *inputs: Tensor) -> None:
    assert loaded.config == model.config
    expected, got = model.state_dict(), loaded.state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name
    with torch.no_grad():
        assert torch.equal(loaded(*inputs).logits, model(*inputs).logits)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILY)
def test_language_model_comes_back(tmp_path: Path, family: str, kind: torch.dtype) -> None:
    model = small_model(family, kind)
    assert_same(load(save(model, tmp_path)), model, tokens())


@pytest.mark.parametrize(
    "head",
    [
        ClassifierHeadConfig(num_classes=3, hidden=5, hidden_layers=2),
        ClassifierHeadConfig(num_classes=3, pooling="none"),
        RegressionHeadConfig(outputs=2, pooling="last"),
        PairHeadConfig(hidden=5, combination="features"),
    ],
    ids=["classifier", "tagger", "regression", "pair"],
)
def test_every_head_comes_back(tmp_path: Path, head: Any) -> None:
    model = small_model(small_config(head=head, causal=False))
    inputs = [tokens() for _ in range(1 + isinstance(head, PairHeadConfig))]
    assert_same(load(save(model, tmp_path)), model, *inputs)


def test_model_of_real_values_comes_back(tmp_path: Path) -> None:
    model = small_model(small_config(head=ClassifierHeadConfig(), input=ValueInputConfig(features=3, norm=True)))
    assert_same(load(save(model, tmp_path)), model, torch.randn(2, 9, 3, dtype=torch.float64))


@pytest.mark.parametrize("position", ["none", "simple", "rotary", "rope"])
@pytest.mark.parametrize("chunk_size", [2, None])
def test_chunk_that_was_set_comes_back(tmp_path: Path, position: str, chunk_size: int | None) -> None:
    model = small_model(position=position, max_length=9).set_chunk_size(chunk_size)
    loaded = load(save(model, tmp_path))
    assert_same(loaded, model, tokens())
    assert loaded.config.attention is not None
    assert loaded.config.attention.chunk_size == chunk_size


@pytest.mark.parametrize(
    ("block", "output", "left_out"),
    [("residual", "none", ["block", "output"]), ("residual", "none", ["output"]), ("chain", "activation", ["output"])],
)
def test_earlier_checkpoint_that_does_not_say_how_its_tcn_ends(
    tmp_path: Path, block: str, output: str, left_out: list[str]
) -> None:
    model = SequenceModel(small_config(block=block, output=output)).eval()
    save(model, tmp_path)
    content = json.loads((tmp_path / CONFIG).read_text())
    for name in left_out:
        del content["model"]["mixer"][name]
    (tmp_path / CONFIG).write_text(json.dumps(content))
    assert_same(load(tmp_path), model, tokens())


def test_simple_bias_survives_a_smaller_chunk(tmp_path: Path) -> None:
    """It keeps its reach, so that the chunk can be set back after loading."""
    model, x = small_model(), tokens()
    before = model(x).logits
    loaded = load(save(model.set_chunk_size(2), tmp_path)).set_chunk_size(4)
    assert torch.equal(loaded(x).logits, before)


@pytest.mark.parametrize("norm", ["batch", "sync_batch"])
def test_statistics_of_batch_norms_come_back(tmp_path: Path, norm: str) -> None:
    model = small_model(norm=norm)
    model.train()(tokens())
    model.eval()
    assert any(int(value) == 1 for name, value in model.state_dict().items() if name.endswith("num_batches_tracked"))
    assert_same(load(save(model, tmp_path)), model, tokens())


def test_loaded_model_is_ready_for_use_and_for_training(folder: Path) -> None:
    model = load(folder)
    assert not any(module.training for module in model.modules())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    model(tokens()).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_loaded_model_streams(folder: Path) -> None:
    model, x = load(folder), tokens()
    with torch.no_grad():
        _, state = model(x[:, :5])
        assert_close(model(x[:, 5:], state=state).logits, model(x).logits[:, 5:])


def test_folder_holds_the_weights_and_the_configuration_and_nothing_else(tmp_path: Path) -> None:
    model = small_model()
    folder = save(model, tmp_path / "new" / "nested")
    assert folder == tmp_path / "new" / "nested"
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    assert content["format"] == "tcnca-model-1"
    assert ModelConfig.from_dict(content["model"]) == model.config
    assert safetensors.torch.load_file(folder / WEIGHTS).keys() == model.state_dict().keys()


def test_files_can_be_read_by_others_where_new_files_can(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        folder = save(small_model(), tmp_path)
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {
        CONFIG: "0o644",
        WEIGHTS: "0o644",
    }


def test_saving_again_replaces(folder: Path) -> None:
    other = small_model("mega")
    assert_same(load(str(save(other, str(folder)))), other, tokens())
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


def test_saving_leaves_the_model_alone(tmp_path: Path) -> None:
    model = small_model().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save(model, tmp_path)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def break_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_file(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(b"half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr(tcnca.models.serialization, "save_file", save_file)


def break_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(path: Path, text: str, encoding: str) -> None:
        path.write_bytes(b"half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)


def break_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(source: str, target: str) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("breaking", [break_weights, break_configuration, break_moving])
def test_failed_saving_leaves_the_earlier_checkpoint_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, breaking: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    breaking(monkeypatch)
    with pytest.raises(OSError, match="no space left"):
        save(small_model("mega"), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("breaking", [break_weights, break_configuration, break_moving])
def test_failed_saving_leaves_no_part_of_a_new_checkpoint_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaking: Callable[[pytest.MonkeyPatch], None]
) -> None:
    breaking(monkeypatch)
    with pytest.raises(OSError, match="no space left"):
        save(small_model(), tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name not in (CONFIG, WEIGHTS)]
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: no such file; a checkpoint is a folder"):
        load(folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent.*: no such file; a checkpoint is a folder"):
        load(tmp_path / "absent")


def test_file_instead_of_a_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(WEIGHTS)):
        load(folder / WEIGHTS)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.999])
def test_truncated_weights(folder: Path, part: float) -> None:
    path = folder / WEIGHTS
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(WEIGHTS)}: cannot be read as safetensors .*is the file whole"
    ):
        load(folder)


@pytest.mark.parametrize("content", [b"hello world", b"\xff" * 100, b"PK\x03\x04"], ids=["text", "noise", "zip"])
def test_weights_that_are_no_safetensors(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{re.escape(WEIGHTS)}: cannot be read as safetensors"):
        load(folder)


CONFIGURATIONS = {
    "empty": (b"", "is no JSON"),
    "truncated": (b'{"format": "tcnca-mo', "is no JSON"),
    "no-text": (b"\xff\xfe", "is no JSON"),
    "list": (b"[]", "format: got 'list', allowed is 'tcnca-model-1'"),
    "no-format": (b"{}", "format: got None, allowed is 'tcnca-model-1'"),
    "later-format": (b'{"format": "tcnca-model-2"}', "format: got 'tcnca-model-2', allowed is 'tcnca-model-1'"),
    "no-model": (b'{"format": "tcnca-model-1"}', "model"),
    "list-for-model": (b'{"format": "tcnca-model-1", "model": []}', "model"),
    "number-for-model": (b'{"format": "tcnca-model-1", "model": 3}', "model"),
    "unknown-field": (b'{"format": "tcnca-model-1", "model": {"layer": 2}}', "layer: no such field"),
    "wrong-field": (b'{"format": "tcnca-model-1", "model": {"num_layers": 0}}', "layers: got 0, allowed"),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_configuration_that_gives_no_model(folder: Path, case: str) -> None:
    content, message = CONFIGURATIONS[case]
    (folder / CONFIG).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{re.escape(CONFIG)}: .*{re.escape(message)}"):
        load(folder)


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = safetensors.torch.load_file(folder / WEIGHTS)
    change(weights)
    safetensors.torch.save_file(weights, folder / WEIGHTS)


def test_weight_of_the_wrong_shape(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"layers.0.block.gamma": torch.zeros(2, 5)}))
    expected = "layers.0.block.gamma: got shape [2, 5], allowed is [2, 4]"
    with pytest.raises(CheckpointError, match=rf"{re.escape(WEIGHTS)}: {re.escape(expected)}"):
        load(folder)


def test_missing_weight(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop("layers.1.block.output.bias"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*missing \['layers\.1\.block\.output\.bias'\]"):
        load(folder)


def test_unknown_weight(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"layers.2.block.gamma": torch.zeros(2, 4)}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*unknown \['layers\.2\.block\.gamma'\]"):
        load(folder)


def test_weight_of_whole_numbers(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.update({"layers.0.block.gamma": torch.zeros(2, 4).long()}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*layers\.0\.block\.gamma"):
        load(folder)


def test_weights_of_another_model(folder: Path, tmp_path: Path) -> None:
    other = save(small_model("tcnca", d_model=6), tmp_path / "other")
    (other / WEIGHTS).replace(folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*got shape .*6.*, allowed is .*8"):
        load(folder)
