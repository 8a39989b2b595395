"""The fused scan of the EMA: when it runs, what Triton makes of it, and how it is started. What it computes is tested
in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca import ConfigError, EMAConfig, ModelConfig
from tcnca.errors import KernelError
from tcnca.layers import EMA
from tcnca.ops import EMA_BACKENDS, EMAState, ema
from tests.ops.interpreter import not_interpreted

BRAIN, FULL = torch.bfloat16, torch.float32


def on_cpu(**options: Any) -> tuple[Tensor, EMAState | None]:
    return ema(torch.randn(2, 9, 3), *(torch.randn(1, 3, 4) for _ in range(4)), **options)


def test_methods() -> None:
    assert EMA_BACKENDS == ("fft", "recurrent", "scan", "fused", "auto")
    assert EMAConfig().backend == "auto"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("truncation", [None, 4], ids=["full", "truncated"])
@pytest.mark.parametrize("sizes", [[11], [1, 6, 1, 3]], ids=["whole", "pieces"])
def test_auto_is_the_fft_bit_for_bit_on_a_cpu(dtype: torch.dtype, truncation: int | None, sizes: list[int]) -> None:
    x, *parameters = (torch.randn(size).to(dtype) for size in ((2, 11, 3), *[(1, 3, 4)] * 4))
    states: dict[str, EMAState | None] = {"auto": None, "fft": None}
    for piece in x.split(sizes, 1):
        outputs = []
        for backend in ("auto", "fft"):
            options: dict[str, Any] = {"backend": backend, "truncation": truncation, "state": states[backend]}
            y, states[backend] = ema(piece, *parameters, return_state=True, **options)
            outputs.append(y)
        assert torch.equal(*outputs)
    auto, fft = states["auto"], states["fft"]
    assert auto is not None
    assert fft is not None
    assert all(torch.equal(value, fft.tensors()[name]) for name, value in auto.tensors().items())


def test_a_layer_is_the_same_by_auto_and_fft_on_a_cpu() -> None:
    module, x = EMA(5, EMAConfig(d_state=3), causal=False), torch.randn(2, 13, 5)
    other = EMA(5, EMAConfig(d_state=3, backend="fft"), causal=False)
    other.load_state_dict(module.state_dict())
    assert torch.equal(module(x)[0], other(x)[0])


@not_interpreted
def test_fused_says_that_it_needs_a_gpu() -> None:
    with pytest.raises(
        KernelError, match=r"backend: got 'fused'.*x: got one on cpu, allowed is a CUDA.*'auto' or 'fft'"
    ):
        on_cpu(backend="fused")


def test_derivatives_that_the_scan_lacks_are_no_work_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("tcnca.ops.ema.scan")
    # So that a CPU is no reason.
    monkeypatch.setattr(module, "INTERPRETED", True)
    x, parameter, reasons = torch.randn(2, 9, 3), torch.randn(1, 3, 4), []

    def loss(x: Tensor) -> Tensor:
        reasons.append(module.why_not_such(x, (parameter,) * 4))
        return x.sum()

    loss(x)
    torch.func.grad(loss)(x)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(x, x))
    assert reasons[0] is None
    assert all("torch.func" in reason for reason in reasons[1:])


def test_fused_refuses_a_truncation() -> None:
    with pytest.raises(ConfigError, match=r"mixer\.backend: got 'fused' with truncation 3"):
        EMAConfig(backend="fused", truncation=3)


@pytest.mark.parametrize("backend", EMA_BACKENDS)
def test_the_method_survives_a_round_trip(backend: Any) -> None:
    config = ModelConfig(num_layers=1, d_model=8, mixer=EMAConfig(d_state=4, backend=backend))
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_triton_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys\nsys.modules['triton'] = None\nimport torch, tcnca\nfrom tcnca.ops import ema\n"
        "ema(torch.randn(1, 4, 2), *[torch.randn(1, 2, 3)] * 4, backend='auto')\n"
        "assert not [name for name in sys.modules if name.startswith('tcnca.ops.ema.scan.')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = importlib.import_module("tcnca.ops.ema.scan.plan")
    monkeypatch.setattr(module, "_processors", lambda device: 132)
    for function in (module.forward, module.backward):
        function.cache_clear()
    yield module
    for function in (module.forward, module.backward):
        function.cache_clear()


def call(
    plan: Any, shape: tuple[int, int, int], dtype: torch.dtype = BRAIN, streams: bool = False, **options: Any
) -> Any:
    initial = FULL if streams else None
    usual = {"directions": 1, "hidden": 16, "parameters": (FULL,) * 4, "device": 0}
    return plan.Call(shape=shape, dtype=dtype, initial=initial, lengths=streams, final=streams, **usual | options)


@pytest.mark.parametrize(
    ("shape", "length", "segments"),
    [
        ((8, 8192, 64), 128, 65),
        ((8, 131072, 64), 512, 257),
        ((1, 131072, 64), 128, 1025),
        ((8, 8192, 512), 256, 33),
        ((64, 131072, 1024), 1024, 129),
        ((1, 1, 1), 128, 1),
    ],
    ids=str,
)
def test_time_is_cut_into_as_many_segments_as_fit(
    plan: Any, shape: tuple[int, int, int], length: int, segments: int
) -> None:
    cut = plan.cut(call(plan, shape))
    assert (cut.length, cut.segments) == (length, segments)
