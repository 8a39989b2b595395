"""What `save` writes, `load` reads to the last bit, and a damaged folder is refused with a reason."""

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
    ConfigError,
    ModelConfig,
    PairHeadConfig,
    Preprocessing,
    RegressionHeadConfig,
    SequenceModel,
    ValueInputConfig,
    load,
    save,
)
from tcnca.models.serialization import SavedDtype, copy_weights
from tests.comparison import assert_close
from tests.examples import FAMILY, VOCABULARY, pairwise, small_config, small_model

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 9))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
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


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in FAMILY), ("tcnca", torch.bfloat16)]
)
def test_language_model_is_restored(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = small_model(family, dtype)
    assert_same(load(save(model, tmp_path)), model, tokens())


@pytest.mark.parametrize(
    "head",
    [
        ClassifierHeadConfig(num_classes=3, hidden=5, hidden_layers=2),
        RegressionHeadConfig(outputs=2, pooling="last"),
        PairHeadConfig(hidden=5, combination="features"),
    ],
    ids=["classifier", "regression", "pair"],
)
def test_every_head_is_restored(tmp_path: Path, head: Any) -> None:
    model = small_model(small_config(head=head, causal=False, input=ValueInputConfig(features=3, norm=True)))
    inputs = [torch.randn(2, 9, 3, dtype=torch.float64) for _ in range(head.documents)]
    assert_same(load(save(model, tmp_path)), model, *inputs)


@pytest.mark.parametrize(("position", "chunk_size"), pairwise(["none", "simple", "rotary", "rope"], [2, None]))
def test_changed_chunk_size_is_restored(tmp_path: Path, position: str, chunk_size: int | None) -> None:
    model, x = small_model(position=position, max_length=9), tokens()
    before = model(x).logits
    loaded = load(save(model.set_chunk_size(chunk_size), tmp_path))
    assert_same(loaded, model, x)
    # The bias keeps its length, so the chunk size can be set back.
    assert torch.equal(loaded.set_chunk_size(4)(x).logits, before)


WEIGHTS_THAT_MEAN_SOMETHING_ELSE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixer.dilation_factor": ("tcn-mlp", {"dilation_factor": 4}),
    "mixer.activation": ("tcn-mlp", {"mixer.activation": "gelu"}),
    "activation": ("tcnca", {"activation": "gelu"}),
    "attention.position": ("tcnca-simple", {"position": "rope"}),
    "input.scale_embeddings": ("tcnca", {"scale_embeddings": True}),
    "causal": ("tcn-mlp", {"causal": False}),
}


@pytest.mark.parametrize("field", WEIGHTS_THAT_MEAN_SOMETHING_ELSE)
def test_weights_are_not_copied_into_another_structure(field: str) -> None:
    family, change = WEIGHTS_THAT_MEAN_SOMETHING_ELSE[field]
    base = small_config(family, head=ClassifierHeadConfig(num_classes=3))
    base = base.override(position="none") if "position" in change else base
    source, model = small_model(base), small_model(base.override(change))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"^source: {re.escape(field)}: expected .*, got"):
        copy_weights(model, source, "source")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "change",
    [{"dropout": 0.3}, {"attention.dropout": 0.3}, {"chunk_size": 6}, {"chunk_size": None}, {"init": "decay"}],
    ids=str,
)
def test_weights_are_copied_into_a_model_that_is_trained_otherwise(change: dict[str, Any]) -> None:
    source, model = small_model("tcnca", position="rope"), small_model("tcnca", position="rope", **change)
    assert copy_weights(model, source, "source")
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_head_that_standardizes_is_another_one() -> None:
    config = small_config(head=RegressionHeadConfig(outputs=2), input=ValueInputConfig(features=1))
    known = Preprocessing(task="regression", target_mean=(1.0, 2.0), target_std=(3.0, 4.0))
    for one, other in ((known, None), (None, known)):
        model, source = SequenceModel(config, one), SequenceModel(config, other)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert not copy_weights(model, source, "source")
        after, copied = model.state_dict(), source.state_dict()
        for name, tensor in after.items():
            assert torch.equal(tensor, before[name] if name.startswith("head.") else copied[name])
    assert copy_weights(SequenceModel(config, known), SequenceModel(config, known), "source")


def test_batch_norm_statistics_are_restored(tmp_path: Path) -> None:
    model = small_model(norm="batch")
    model.train()(tokens())
    model.eval()
    assert any(int(value) == 1 for name, value in model.state_dict().items() if name.endswith("num_batches_tracked"))
    assert_same(load(save(model, tmp_path)), model, tokens())


def test_loaded_model_can_be_used_streamed_and_trained(folder: Path) -> None:
    model, x = load(folder), tokens()
    assert not any(module.training for module in model.modules())
    with torch.no_grad():
        _, state = model(x[:, :5])
        assert_close(model(x[:, 5:], state=state).logits, model(x).logits[:, 5:])
    model(x).logits.sum().backward()
    assert all(parameter.grad is not None and parameter.is_leaf for parameter in model.parameters())


def test_folder_holds_the_weights_and_the_configuration_and_nothing_else(tmp_path: Path) -> None:
    model, umask = small_model().train(), os.umask(0o022)
    try:
        folder = save(model, tmp_path / "new" / "nested")
    finally:
        os.umask(umask)
    assert model.training
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {
        CONFIG: "0o644",
        WEIGHTS: "0o644",
    }
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    assert content.keys() == {"format", "model", "preprocessing"}
    assert ModelConfig.from_dict(content["model"]) == model.config
    assert safetensors.torch.load_file(folder / WEIGHTS).keys() == model.state_dict().keys()


def test_saving_again_replaces(folder: Path) -> None:
    other = small_model("mega")
    assert_same(load(str(save(other, str(folder)))), other, tokens())
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 0.5 / 127)])
@pytest.mark.parametrize("family", FAMILY)
def test_rounded_weights_are_close_and_in_float32(
    tmp_path: Path, family: str, dtype: SavedDtype, tolerance: float
) -> None:
    """The error of a weight is at most half a step of its row; in bfloat16, half a unit in the last place."""
    model = small_model(family, torch.float32)
    loaded = load(save(model, tmp_path, dtype))
    assert loaded.config == model.config
    for name, expected in model.state_dict().items():
        got = loaded.state_dict()[name]
        assert got.dtype == expected.dtype, name
        if name.endswith("weight") and expected.ndim > 1:
            # The factors of rows are in bfloat16.
            largest = expected.abs().amax(-1, keepdim=True)
            bound = largest * tolerance * (1 + 2**-8) if dtype == "int8" else expected.abs() * tolerance
            assert ((got - expected).abs() <= bound + 1e-12).all(), name
        else:
            assert torch.equal(got, expected), name
    x = tokens()
    with torch.no_grad():
        exact = model.double()(x).logits
        error = float((loaded(x).logits - exact).norm() / exact.norm())
    assert error < {"float32": 1e-5, "bfloat16": 1e-2, "int8": 3e-2}[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_rounding_twice_is_rounding_once(tmp_path: Path, dtype: SavedDtype) -> None:
    once = load(save(small_model(dtype=torch.float32), tmp_path / "once", dtype))
    assert_same(load(save(once, tmp_path / "twice", dtype)), once, tokens())


def test_int8_takes_a_quarter(tmp_path: Path) -> None:
    model = small_model(small_config(d_model=128, d_ff=256, d_key=64, d_value=256), torch.float32)
    sizes = {}
    for dtype in (None, "float32", "bfloat16", "int8"):
        sizes[dtype] = (save(model, tmp_path / str(dtype), dtype) / WEIGHTS).stat().st_size
    assert sizes[None] == sizes["float32"]
    assert sizes["bfloat16"] < 0.55 * sizes["float32"]
    assert sizes["int8"] < 0.32 * sizes["float32"]


def test_statistics_and_counts_are_not_rounded(tmp_path: Path) -> None:
    """The norms of this model have means, variances and counts; its inputs and outputs have statistics of the data."""
    facts = Preprocessing(input_mean=(1e6 + 1,), input_std=(0.123456789,), target_mean=(1 / 3,), target_std=(3.3,))
    config = small_config(norm="batch", head=RegressionHeadConfig(), input=ValueInputConfig(), causal=False)
    model = SequenceModel(config, facts)
    model.train()(torch.randn(2, 9, 1))
    loaded = load(save(model.eval(), tmp_path, "int8")).state_dict()
    exact = [name for name, tensor in model.state_dict().items() if tensor.ndim < 2]
    assert any("num_batches_tracked" in name for name in exact)
    assert any("std" in name for name in exact)
    for name in exact:
        assert loaded[name].dtype == model.state_dict()[name].dtype
        assert torch.equal(loaded[name], model.state_dict()[name]), name


def test_half_precision_is_kept_unless_a_dtype_is_given(tmp_path: Path) -> None:
    model = small_model(dtype=torch.bfloat16)
    assert load(save(model, tmp_path)).embedding.weight.dtype == torch.bfloat16
    for dtype in ("float32", "bfloat16", "int8"):
        loaded = load(save(model, tmp_path, dtype))
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    with pytest.raises(ConfigError, match=r"dtype: .*int8"):
        save(model, tmp_path, "int4")  # type: ignore[arg-type]


def test_saving_in_another_format_replaces(folder: Path) -> None:
    """A folder never has the dtype of one model with the weights of another."""
    model = small_model(dtype=torch.float32)
    for dtype in ("int8", None, "bfloat16", "float32"):
        save(model, folder, dtype)
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        rounded = dtype in ("int8", "bfloat16")
        assert (content["format"], content.get("dtype")) == (
            "tcnca-model-3" if rounded else "tcnca-model-2",
            dtype if rounded else None,
        )
        load(folder)


def fail(*args: Any, **kwargs: Any) -> None:
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    ("place", "name"),
    [(tcnca.models.serialization, "save_file"), (Path, "write_text"), (os, "replace")],
    ids=["weights", "configuration", "moving"],
)
def test_failed_saving_leaves_the_earlier_model_and_nothing_else(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(place, name, fail)
    for target in (folder, tmp_path / "new"):
        with pytest.raises(OSError, match="no space left"):
            save(small_model("mega"), target)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (CONFIG, r"expected a run directory or a saved model, got a folder without config\.json"),
        (WEIGHTS, rf"{WEIGHTS}: cannot be read .*\(No such file or directory\)"),
    ],
)
def test_missing_file(folder: Path, name: str, message: str) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_file_instead_of_a_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: expected a run directory or a saved model, got a file"):
        load(folder / CONFIG)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a folder .*, got a file"):
        save(small_model(), folder / CONFIG)


@pytest.mark.parametrize("content", [b"", b"not tensors", bytes(100)], ids=["empty", "text", "zeros"])
def test_weights_that_are_not_safetensors(folder: Path, content: bytes) -> None:
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{re.escape(WEIGHTS)}: cannot be read as safetensors"):
        load(folder)


FORMAT = b'{"format": "tcnca-model-2"'
CONFIGURATIONS = {
    "empty": (b"", "expected JSON"),
    "no-text": (b"\xff\xfe", "expected JSON"),
    "list": (b"[]", "expected keys and values, got []"),
    "other-format": (b'{"format": "tcnca-model-1"}', "format: expected 'tcnca-model-2' or 'tcnca-model-3', got"),
    "no-dtype": (b'{"format": "tcnca-model-3"}', "dtype: expected one of bfloat16, int8, got None"),
    "wrong-dtype": (b'{"format": "tcnca-model-3", "dtype": "int4"}', "dtype: "),
    "no-model": (FORMAT + b"}", "model: expected"),
    "no-preprocessing": (FORMAT + b', "model": {}}', "preprocessing: expected"),
    "unknown-field": (FORMAT + b', "model": {"layer": 2}, "preprocessing": {}}', "layer"),
    "wrong-field": (FORMAT + b', "model": {"num_layers": 0}, "preprocessing": {}}', "num_layers: "),
    "unknown-fact": (FORMAT + b', "model": {}, "preprocessing": {"median": 1}}', "median: "),
    "wrong-fact": (FORMAT + b', "model": {}, "preprocessing": {"byte_map": [1, 1]}}', "byte_map: expected"),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_configuration_that_cannot_be_read(folder: Path, case: str) -> None:
    content, message = CONFIGURATIONS[case]
    (folder / CONFIG).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{re.escape(CONFIG)}: .*{re.escape(message)}"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: w.update({"layers.0.block.gamma": torch.zeros(2, 5)}),
            "layers.0.block.gamma: expected shape [2, 4], got [2, 5]",
        ),
        (lambda w: w.pop("layers.1.block.output.bias"), "missing ['layers.1.block.output.bias']"),
        (lambda w: w.update({"layers.2.block.gamma": torch.zeros(2, 4)}), "unknown ['layers.2.block.gamma']"),
        (lambda w: w.update({"layers.0.block.gamma": torch.zeros(2, 4).long()}), "expected floating-point numbers"),
    ],
    ids=["shape", "missing", "unknown", "dtype"],
)
def test_weights_that_do_not_fit(folder: Path, change: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    weights = safetensors.torch.load_file(folder / WEIGHTS)
    change(weights)
    safetensors.torch.save_file(weights, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"{re.escape(WEIGHTS)}: .*{re.escape(message)}"):
        load(folder)
