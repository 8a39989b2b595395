"""ONNX Runtime computes what PyTorch does, from the file alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

import tcnca
from tcnca import (
    AttentionConfig,
    ClassifierHeadConfig,
    EMAConfig,
    ExportError,
    ModelConfig,
    PairHeadConfig,
    Preprocessing,
    RegressionHeadConfig,
    SequenceModel,
    TCNConfig,
    ValueInputConfig,
    export,
    export_onnx,
)
from tcnca.cli import app
from tcnca.errors import MissingPackageError
from tests.examples import BIDIRECTIONAL, VARIANTS, VOCABULARY, small_model

onnxruntime: Any = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

CLASSIFIER = ClassifierHeadConfig(num_classes=3, hidden=4)
TOLERANCE = 1e-5


def _open(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def _metadata(session: Any) -> dict[str, str]:
    return session.get_modelmeta().custom_metadata_map


def _stream(session: Any, x: NDArray[Any]) -> NDArray[Any]:
    """The logits of each step over `x` (`[batch, time, …]`), as a program with NumPy alone would run them."""
    shapes = json.loads(_metadata(session)["state"])
    state = {name: np.zeros((len(x), *each["shape"]), each["dtype"]) for name, each in shapes.items()}
    logits = []
    for time in range(x.shape[1]):
        outputs = session.run(None, {"x": x[:, time], **state})
        logits.append(outputs[0])
        state = dict(zip(state, outputs[1:], strict=True))
    return np.stack(logits, 1)


def _assert_steps_equal(model: SequenceModel, path: Path, time: int) -> None:
    session = _open(path)
    for batch in (1, 3):
        x = torch.randint(VOCABULARY, (batch, time))
        with torch.no_grad():
            expected = model(x).logits.numpy()
        np.testing.assert_allclose(_stream(session, x.numpy()), expected, rtol=0, atol=TOLERANCE)


def _assert_sequences_equal(model: SequenceModel, path: Path) -> None:
    session = _open(path)
    attention = model.config.attention
    limit = 64 if attention is not None and attention.chunk_size is None else 200  # of a simple bias
    for batch, time in ((1, 1), (3, 4), (2, 8), (5, 23), (1, 61), (2, limit)):
        x, lengths = torch.randint(VOCABULARY, (batch, time)), torch.randint(1, time + 1, (batch,))
        with torch.no_grad():
            expected = model(x, lengths=lengths, return_state=False).logits.numpy()
        (got,) = session.run(None, {"x": x.numpy(), "lengths": lengths.numpy()})
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


# ONNX has no complex numbers.
COMPLEX = ("s4d", "s4d-gated", "s5", "lru-gated")
EXPORTED = [name for name in VARIANTS if name not in COMPLEX]


def _model(name: str, **changes: Any) -> SequenceModel:
    return small_model(VARIANTS[name], torch.float32, num_layers=1, **changes)


@pytest.mark.parametrize("name", ["shallow", *(pytest.param(name, marks=pytest.mark.slow) for name in EXPORTED)])
def test_steps_in_a_loop(tmp_path: Path, name: str) -> None:
    """Over many chunks and turns of the ring buffers, for batch sizes that were not traced."""
    model = _model("half-rope", depth=1, d_ff=0) if name == "shallow" else _model(name)
    done = export_onnx(model, tmp_path / "step.onnx")
    assert done.graph == "step"
    assert done.difference is not None
    assert done.difference < TOLERANCE
    # The bias of these models reaches 64 tokens.
    _assert_steps_equal(model, done.path, 60 if "full" in name else 200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "causal"),
    [
        (name, causal)
        for name in EXPORTED
        for causal in (True, False)
        if name != "sgconv" and (causal or name in BIDIRECTIONAL)
    ],
)
def test_sequences_of_any_length(tmp_path: Path, name: str, causal: bool) -> None:
    model = _model(name, causal=causal, head=CLASSIFIER)
    _assert_sequences_equal(model, export_onnx(model, tmp_path / "sequence.onnx").path)


def _signals(**changes: Any) -> SequenceModel:
    facts = Preprocessing(
        input_mean=(100.0, -5.0), input_std=(10.0, 0.1), class_names=("a", "b"), task="classification"
    )
    config = ModelConfig(
        num_layers=1,
        d_model=8,
        d_ff=0,
        causal=False,
        mixer=TCNConfig(kernel_size=3, dilation_factor=2, depth=2),
        attention=AttentionConfig(d_key=4, d_value=8, chunk_size=8),
        input=ValueInputConfig(features=2),
        head=ClassifierHeadConfig(num_classes=2),
    )
    return tcnca.build(config.override(**changes), preprocessing=facts).eval()


@pytest.mark.parametrize("attention", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_classifier_of_raw_values(tmp_path: Path, attention: bool) -> None:
    model = _signals() if attention else _signals(attention=None, gated=False)
    session = _open(export_onnx(model, tmp_path / "signals.onnx").path)
    x = torch.randn(4, 30, 2) * torch.tensor([10.0, 0.1]) + torch.tensor([100.0, -5.0])
    lengths = torch.tensor([30, 8, 17, 1])
    with torch.no_grad():
        expected = model(x, lengths=lengths).logits.numpy()
    (got,) = session.run(None, {"x": x.numpy(), "lengths": lengths.numpy()})
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)
    metadata = _metadata(session)
    assert json.loads(metadata["class_names"]) == ["a", "b"]
    assert metadata["version"] == tcnca.__version__
    assert metadata["graph"] == "sequence"
    assert metadata.get("chunk_size") == ("8" if attention else None)
    assert "state" not in metadata


@pytest.mark.slow
def test_pairs(tmp_path: Path) -> None:
    model = small_model("tcnca", torch.float32, causal=False, head=PairHeadConfig(num_classes=2))
    session = _open(export_onnx(model, tmp_path / "pairs.onnx").path)
    first, second = torch.randint(VOCABULARY, (3, 13)), torch.randint(VOCABULARY, (3, 5))
    lengths, lengths2 = torch.tensor([13, 2, 7]), torch.tensor([1, 5, 4])
    with torch.no_grad():
        expected = model(first, second, lengths=lengths, lengths2=lengths2).logits.numpy()
    inputs = {"x": first, "lengths": lengths, "second": second, "lengths2": lengths2}
    (got,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_a_forecast_step_by_step(tmp_path: Path) -> None:
    """A head with an output at every time, and one that pools: both have a step."""
    heads = (RegressionHeadConfig(outputs=2, pooling="none"), ClassifierHeadConfig(num_classes=2))
    for head in heads:
        model = _signals(causal=True, head=head)
        session = _open(export_onnx(model, tmp_path / "forecast.onnx", "step").path)
        x = torch.randn(2, 40, 2) * torch.tensor([10.0, 0.1]) + torch.tensor([100.0, -5.0])
        with torch.no_grad():
            expected = model(x).logits.numpy()
        got = _stream(session, x.numpy())
        np.testing.assert_allclose(got if head is heads[0] else got[:, -1], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_fixed_sizes_and_other_dtypes(tmp_path: Path) -> None:
    model = small_model("mega", torch.float64, num_layers=1, causal=False, head=CLASSIFIER)
    done = export_onnx(model, tmp_path / "fixed.onnx", length=9, batch_size=1)
    assert done.inputs == {"x": ("int64", (1, 9)), "lengths": ("int64", (1,))}
    assert done.outputs == {"logits": ("float32", (1, 3))}
    assert next(model.parameters()).dtype == torch.float64


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["step", "sequence"])
def test_a_short_position_bias(tmp_path: Path, graph: Any) -> None:
    """The inputs that are traced and compared must not be longer; programs find the limit in the metadata."""
    attention = AttentionConfig(d_key=4, d_value=6, chunk_size=None, max_length=4)
    model = _model("mega-full", attention=attention)
    done = export_onnx(model, tmp_path / "short.onnx", graph)
    assert _metadata(_open(done.path))["max_length"] == "4"
    if graph == "step":
        _assert_steps_equal(model, done.path, 4)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = ModelConfig(num_layers=1, d_model=8, d_ff=0, gated=False, attention=None, mixer=EMAConfig(d_state=2))
    model = tcnca.build(config, preprocessing=Preprocessing(byte_map=tuple(range(256))))
    return tcnca.save(model, tmp_path / "model")


def test_command(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, run, random = saved.parent / "lm.onnx", CliRunner(), torch.get_rng_state()
    done = run.invoke(app, ["export", str(saved), "--onnx", str(file)])
    assert done.exit_code == 0, done.output
    assert torch.equal(torch.get_rng_state(), random)
    words = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert ["input", "state.layers.0.mixer.hidden", "float32", "[batch, 8, 2]"] in words
    assert ["output", "logits", "float32", "[batch, 256]"] in words
    assert "largest difference" in done.stdout
    assert json.loads(_metadata(_open(file))["byte_map"]) == list(range(256))
    assert str(Path(tcnca.__file__).parent) not in file.read_bytes().decode("latin-1"), "paths of this machine"

    refused = run.invoke(app, ["export", str(saved), "--onnx", str(file)])
    assert refused.exit_code == 1
    assert "--force" in refused.stderr

    # A file that differs replaces nothing.
    content = file.read_bytes()
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    differs = run.invoke(app, ["export", str(saved), "--onnx", str(file), "--force"])
    assert differs.exit_code == 1
    assert "logits: expected the values of PyTorch" in differs.stderr
    assert file.read_bytes() == content
    assert sorted(path.name for path in saved.parent.iterdir()) == ["lm.onnx", "model"]


def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, causal = tmp_path / "model.onnx", _model("tcnca")
    with pytest.raises(ExportError, match="graph: expected 'sequence' for a model that is bidirectional"):
        export_onnx(_signals(), file, "step")
    for name in COMPLEX:
        with pytest.raises(ExportError, match=r"mixer: expected one with real states.*got (S4D|S5|LRU): ONNX lacks"):
            export_onnx(_model(name), tmp_path / "a.onnx")
    with pytest.raises(ExportError, match="length: expected none for a step"):
        export_onnx(causal, file, length=8)
    with pytest.raises(ExportError, match=r"length: expected at most 64 \(attention.max_length\), got 65"):
        export_onnx(_model("mega-full"), file, "sequence", length=65)
    with pytest.raises(ExportError, match="batch_size: expected at least 1, got 0"):
        export_onnx(causal, file, batch_size=0)
    with pytest.raises(ExportError, match="expected a file to write, got a folder"):
        export_onnx(causal, tmp_path)
    with torch.device("meta"), pytest.raises(ExportError, match="less than 2 GiB"):
        export_onnx(SequenceModel(ModelConfig(d_model=2**13, num_layers=12)), file)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingPackageError, match=r"onnxscript is not installed; pip install 'tcnca\[onnx\]'"):
        export_onnx(causal, file)
    assert not file.exists()


@pytest.mark.slow
def test_operators_that_onnx_lacks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _signals()
    monkeypatch.setattr(model.layers[0], "feed_forward", torch.nn.ReLU())
    monkeypatch.setattr(torch.nn.ReLU, "forward", lambda self, x, lengths: x + torch.special.bessel_j0(x))
    with pytest.raises(ExportError, match=r"expected operators that ONNX has.*bessel_j0"):
        export_onnx(model, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_exports_run_without_onnx_runtime(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = export_onnx(tcnca.load(saved), saved / "lm.onnx", batch_size=1)
    assert done.difference is None
    assert done.inputs["x"] == ("int64", (1,))
