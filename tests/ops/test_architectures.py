"""Kernels compile for GPUs of other architectures, and fit the 99 KB (163 KB on an A100) of shared memory of a block.

Compiling needs no GPU. Devices of compute capability 9.0, for which sizes were measured, keep theirs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tcnca
from tcnca.ops import driver
from tcnca.ops.tcn.cuda import nvrtc, operator, smem, tensor_core
from tcnca.ops.tcn.cuda.call import Call, Settings
from tests.ops.interpreter import not_interpreted
from tests.ops.test_tcn_cuda import _layout, _needs_nvrtc, _sources

ARCHITECTURES = (86, 89, 120)
SMALL, MEDIUM, LARGE = 99 * 1024, 163 * 1024, 227 * 1024
BRAIN, FULL = torch.bfloat16, torch.float32


def launch_module(name: str) -> Any:
    pytest.importorskip("triton")
    return importlib.import_module(f"tcnca.ops.{name}.triton_launch")


@pytest.mark.parametrize(
    ("architecture", "kernel_size"),
    [(86, 5), *(pytest.param(each, 17, marks=pytest.mark.slow) for each in ARCHITECTURES)],
)
def test_the_kernels_of_the_tcn_compile(architecture: int, kernel_size: int) -> None:
    _needs_nvrtc()
    representative = {name: source for name, source in _sources() if ("K", kernel_size) in source.macros}
    assert len(representative) == 7
    for name, source in representative.items():
        if architecture < 90 and name.startswith("smem"):
            continue  # these devices have no clusters
        image = nvrtc.compile_source(source.text(), f"sm_{architecture}")
        assert image.startswith(b"\x7fELF")
        assert name.encode() in image


@pytest.mark.parametrize(
    ("time", "dtype", "clusters", "forward", "backward"),
    [
        (131072, BRAIN, False, "tensor_core", "registers"),
        (2048, BRAIN, False, "tensor_core", "registers"),
        (2048, FULL, False, "registers", "registers"),
        (2048, BRAIN, True, "smem", "smem"),
        (8192, BRAIN, True, "smem", "registers"),
        (20000, BRAIN, True, "tensor_core", "registers"),
    ],
)
def test_the_tcn_takes_kernels_that_fit(
    monkeypatch: pytest.MonkeyPatch, time: int, dtype: torch.dtype, clusters: bool, forward: str, backward: str
) -> None:
    loaded: dict[str, int] = {}

    def load(source: nvrtc.Source, name: str, shared_memory: int, device: int) -> str:
        loaded[name] = shared_memory
        return name

    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc, "resident_blocks", lambda function, threads, device: 84)
    monkeypatch.setattr(driver, "max_shared_memory", lambda device: SMALL)
    monkeypatch.setattr(driver, "Launch", lambda *arguments, **options: arguments)
    monkeypatch.setattr(smem, "has_clusters", lambda device: clusters)
    x = _layout(1, time, 64, dtype=dtype)
    call = Call(x, (4, 1, 64, 17), True, False, Settings(1, 8, "silu", True, True, 0.0))
    operator.forward_plan.__wrapped__(call)
    operator.backward_plan.__wrapped__(call, x)
    assert set(loaded) - {"sum_partials"} == {f"{forward}_forward", f"{backward}_backward"}
    assert max(loaded.values()) <= SMALL
    assert tensor_core.forward_memory(call._replace(omega=True).block) <= SMALL


@pytest.mark.parametrize(
    ("memory", "kernel_size", "residual", "kernel", "depth"),
    [
        (LARGE, 17, True, "short", 3),
        (MEDIUM, 9, True, "long", 3),
        (MEDIUM, 17, True, "long", 2),
        (SMALL, 9, False, "long", 2),
        (SMALL, 17, True, None, None),
    ],
)
def test_gradients_load_less_ahead_where_there_is_less_memory(
    monkeypatch: pytest.MonkeyPatch,
    memory: int,
    kernel_size: int,
    residual: bool,
    kernel: str | None,
    depth: int | None,
) -> None:
    loaded: list[tuple[str | None, int | None]] = []

    def load(source: nvrtc.Source, name: str, shared_memory: int, device: int) -> str:
        assert shared_memory <= memory
        if name == "tensor_core_backward":
            short = "tensor_core_backward_short.cu" in source.files
            loaded.append(("short" if short else "long", dict(source.macros)["DEEP"]))
        return name

    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc, "resident_blocks", lambda function, threads, device: 84)
    monkeypatch.setattr(driver, "max_shared_memory", lambda device: memory)
    monkeypatch.setattr(driver, "Launch", lambda *arguments, **options: arguments)
    monkeypatch.setattr(smem, "has_clusters", lambda device: False)
    x = _layout(8, 8192, 64)
    settings = Settings(1, 8, "silu", residual, True, 0.0)
    operator.backward_plan.__wrapped__(Call(x, (4, 1, 64, kernel_size), True, False, settings, omega=True), x)
    assert loaded == ([] if kernel is None else [(kernel, depth)])


def test_state_space_models_take_smaller_tiles_only_where_they_have_to() -> None:
    plan = launch_module("ssm")
    for states in (1, 16, 32, 33, 64):
        assert plan.config_of(BRAIN, states, LARGE) == plan.HALF_CONFIG == (64, 64, 4, 4, 4, 16, 3)
        assert plan.config_of(FULL, states, LARGE) == plan.FULL_CONFIG == (32, 64, 4, 8, 4, 16, 3)
        assert plan.config_of(FULL, states, SMALL) == plan.FULL_CONFIG
        assert plan.config_of(BRAIN, states, SMALL) == (plan.LEAN_CONFIG if states > 32 else plan.HALF_CONFIG)


# What follows compiles Triton's kernels.


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, int]]:
    """The shared memory of each kernel that plans load, on a device of `capability` in the dictionary."""
    launcher: Any = pytest.importorskip("triton") and importlib.import_module("tcnca.ops.launcher")
    found: dict[str, int] = {"capability": 0}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def load(build: Any, device: int) -> None:
        compiled = launcher.compile_kernel(build, found["capability"])
        name = build.kernel.__name__
        found[name] = max(found.get(name, 0), int(compiled.metadata.shared))

    monkeypatch.setattr(launcher, "load_kernel", load)
    monkeypatch.setattr(driver, "Launch", lambda *arguments, **options: None)
    cached = []
    for name in ("ssm", "ema", "attention"):
        plan = launch_module(name)
        for patched, value in (("multiprocessors", 84), ("max_shared_memory", SMALL)):
            if hasattr(plan, patched):
                monkeypatch.setattr(plan, patched, functools.partial(lambda value, device: value, value))
        cached += [each for each in vars(plan).values() if hasattr(each, "cache_clear")]
    for each in cached:
        each.cache_clear()
    yield found
    for each in cached:
        each.cache_clear()


@not_interpreted
@pytest.mark.parametrize("architecture", [86, *(pytest.param(each, marks=pytest.mark.slow) for each in (89, 120))])
def test_state_space_models_fit(shared: dict[str, int], architecture: int) -> None:
    plan, shared["capability"] = launch_module("ssm"), architecture
    # Of all kernels, the outputs take most.
    config = plan.config_of(BRAIN, 64, SMALL)
    plan.Launch(
        plan.kernels.outputs,
        (1, 1),
        (BRAIN, *[FULL] * 5, BRAIN),
        (1, 1, 1),
        plan.walk_constants(64, BRAIN, config),
        device=0,
        num_warps=8,
        num_stages=config.stages,
        stride_divisor=8,
    )
    assert 0 < shared["outputs"] <= SMALL


@not_interpreted
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_of_state_space_models_fit(shared: dict[str, int], architecture: int) -> None:
    plan, shared["capability"] = launch_module("ssm"), architecture
    for dtype, states in ((BRAIN, 32), (BRAIN, 64), (FULL, 64)):
        plan.ssm_plan((2, 4096, 64), 1, states, dtype, True, FULL, False, 0)
        plan.weights_launches(64, 2, 4, 4, states, dtype, 0)
    plan.scan_plan((2, 4096, 64), False, None, False, True, 0)
    names = {"to_rows", "ends", "carry", "outputs", "from_rows", "lags", "weights", "scan"}
    assert set(shared) == names | {"capability"}
    assert max(shared.values()) <= SMALL


@not_interpreted
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_and_the_ema_fit(shared: dict[str, int], architecture: int) -> None:
    shared["capability"] = architecture
    plan = launch_module("attention")
    # The widest keys and values of the presets, in bfloat16, and float32, whose tiles are small everywhere.
    for dtype, width, d_value in ((BRAIN, 128, 1024), (FULL, 128, 256)):
        strides = (width, width, d_value)
        signature = plan.Signature(2, 4096, width, d_value, strides, dtype, 4096, None, 2048, True, "softmax", 0.1, 0)
        plan.forward_plan(signature)
        plan.backward_plan(signature, d_value, True)
    assert {"attended", "scores_gradient", "rows_gradient", "bias_gradient"} <= set(shared)
    plan = launch_module("ema")
    strides = (4096 * 64, 64, 1)
    for skip in ((None, False, False), (FULL, True, True)):
        signature = plan.Signature((2, 4096, 64), 1, 16, BRAIN, (FULL,) * 4, FULL, False, True, *skip, 0)
        plan.forward_plan(signature, strides)
        plan.backward_plan(signature, strides, strides, BRAIN)
    assert {"ends", "carry", "outputs", "weights", "reduce"} <= set(shared)
    assert max(shared.values()) <= SMALL


@not_interpreted
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("batch", "dtype"), [(1, BRAIN), (64, BRAIN), (64, FULL)])
def test_the_fused_step_fits(
    shared: dict[str, int], monkeypatch: pytest.MonkeyPatch, architecture: int, batch: int, dtype: torch.dtype
) -> None:
    fused: Any = importlib.import_module("tcnca.generation.fused")
    launcher: Any = importlib.import_module("tcnca.ops.launcher")
    shared["capability"] = architecture
    monkeypatch.setattr(fused, "max_shared_memory", lambda device: SMALL)
    launch = launcher.Launch  # of the CPU, where the step is built, nothing would be compiled
    monkeypatch.setattr(launcher, "Launch", lambda *given, device, **options: launch(*given, device=0, **options))
    model = tcnca.build("tcnca-linear-enwik8", vocab_size=256, num_layers=1).eval().to(dtype)
    state = model.initial_state(batch)
    assert fused._tile_bytes(model, state) <= SMALL  # or `unsupported_reason` refuses the model
    fused.FusedStep(model, state)
    assert max(shared.values()) <= SMALL
