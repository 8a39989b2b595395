"""The TCN's kernels without a GPU: which calls they run, their sources, their plans, and the code around them."""

from __future__ import annotations

import ast
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tcnca
from tcnca.errors import InputError, KernelError
from tcnca.ops import ACTIVATIONS, TCNState, dispatch, driver, initial_tcn_state, tcn
from tcnca.ops.tcn.cuda import nvrtc, operator, registers, smem, tensor_core, tensor_core_pair
from tcnca.ops.tcn.cuda.call import DTYPES, MAX_KERNEL_SIZE, Block, Call, Layout, Settings, layout
from tcnca.ops.tcn.naive import TCNCall, naive_tcn
from tests.comparison import assert_close


def _arguments(
    convolutions: int = 1, dtype: torch.dtype = torch.float32, leaf: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 9, 4), (3, convolutions, 4, 3), (3, convolutions, 4))
    x, weight, bias = (torch.randn(*shape, dtype=dtype, requires_grad=leaf) for shape in shapes)
    return x, weight, bias


def test_backends_that_cannot_run_are_refused() -> None:
    x, weight, _ = _arguments()
    with pytest.raises(KernelError, match=r"backend: 'cuda' cannot run .*; x: expected a CUDA tensor, got one on cpu"):
        tcn(x, weight, 2, backend="cuda")
    with pytest.raises(InputError, match="backend: expected one of auto, naive, cuda, cpu, got 'triton'"):
        tcn(x, weight, 2, backend="triton")  # type: ignore[arg-type]


def _fake(*shape: int, dtype: torch.dtype = torch.bfloat16, leaf: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda", requires_grad=leaf)


def test_unsupported_reasons_are_named() -> None:
    def reason(x: Tensor, weight: Tensor, **options: Any) -> str:
        return operator.unsupported_reason(TCNCall(x=x, weight=weight, dilation_factor=2, **options)) or ""

    with FakeTensorMode():
        x, weight, bias = _fake(2, 9, 8), _fake(3, 1, 8, 5), _fake(3, 1, 8)
        state = initial_tcn_state(2, 8, 5, 2, 3, device="cuda", dtype=torch.bfloat16)
        assert reason(x, weight, bias=bias) == ""
        assert "dropout: expected 0 after a state, got 0.1" in reason(x, weight, state=state, dropout=0.1)
        assert "got cpu" in reason(x, weight, lengths=torch.empty(2, dtype=torch.long))
        assert "got torch.float64" in reason(x.double(), weight.double())
        assert "kernel_size: expected at most 64, got 65" in reason(x, _fake(3, 1, 8, MAX_KERNEL_SIZE + 1))
        assert "time: expected more than one token" in reason(_fake(2, 1, 8), weight, state=state)
        assert "gradients are required" in reason(x, _fake(3, 1, 8, 5, leaf=True), state=state)
        assert "batch: expected at most 65535" in reason(_fake(65536, 1, 8), weight)


def test_importing_the_library_loads_neither_cuda_nor_the_compiler() -> None:
    code = "import sys, torch; before = set(sys.modules); import tcnca.ops; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ast.literal_eval(done.stdout)
    assert "tcnca.ops.tcn.cuda.operator" in loaded
    assert not [name for name in loaded if name.startswith(("cuda.", "torch._dynamo"))]


def _blocks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    settings: Settings,
    omega: Tensor | None = None,
) -> Tensor:
    """`tcn_blocks` with PyTorch's own operators, including what it promises about padding."""
    given = tcnca.ops.zero_padding(x, lengths)
    dilation, factor, activation, residual, causal, dropout = settings
    options: dict[str, Any] = {"activation": activation, "residual": residual, "causal": causal, "dropout": dropout}
    for number in range(weight.shape[0]):
        taps, offset, distance = TCNCall(
            x=x, weight=weight, bias=bias, dilation=dilation, dilation_factor=factor
        ).convolution(number)
        x = tcnca.ops.zero_padding(x, lengths)
        x, _ = naive_tcn(TCNCall(x=x, weight=taps, bias=offset, dilation=distance, dilation_factor=1, **options))
    return x if omega is None else x + omega * given


def _from_state(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, *rest: Any) -> Tensor:
    """`tcn_block_from_state` with PyTorch's own operators."""
    past, position, dilation, activation, residual = rest
    order = (position.unsqueeze(1) + torch.arange(past.shape[1])) % max(past.shape[1], 1)
    older = past.gather(1, order.unsqueeze(-1).expand_as(past))
    both = torch.cat([older, tcnca.ops.zero_padding(x, lengths)], 1)
    settings = Settings(dilation, 1, activation, residual, True, 0.0)
    return _blocks(both, weight, bias, None, settings)[:, past.shape[1] :]


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "tcn_blocks", _blocks)
    monkeypatch.setattr(operator, "tcn_block_from_state", _from_state)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("norm", [False, True], ids=["fused", "norm"])
@pytest.mark.parametrize("return_state", [True, False], ids=["state", "stateless"])
@pytest.mark.parametrize(
    ("residual", "convolutions", "lengths"), [(True, 1, None), (True, 2, [9, 4]), (False, 1, [9, 4]), (False, 2, None)]
)
def test_around_the_kernels_outputs_states_and_gradients_are_right(
    norm: bool,
    return_state: bool,
    residual: bool,
    convolutions: int,
    lengths: list[int] | None,
) -> None:
    x, weight, bias = _arguments(convolutions, torch.float64, leaf=True)
    omega = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = (x, weight, bias, omega)
    options: dict[str, Any] = {"bias": bias, "omega": omega, "residual": residual, "return_state": return_state}
    if norm:
        options |= {"norm_fn": lambda h, number: F.layer_norm(h, (4,)) * (number + 1), "dropout": 0.3}
    valid = None if lengths is None else torch.tensor(lengths)
    call = TCNCall(x=x, weight=weight, dilation_factor=2, lengths=valid, **options)
    results = []
    for run in (operator.run, naive_tcn):
        torch.manual_seed(4)
        y, state = run(call)
        out = [tcnca.ops.zero_padding(y, valid), *(state.buffers if state is not None else ())]
        gradients = torch.autograd.grad(torch.stack([part.square().sum() for part in out]).sum(), leaves)
        results.append([*out, *gradients])
    assert len(results[0]) == 5 + (3 * convolutions if return_state else 0)
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize(("convolutions", "inplace"), [(1, True), (2, False), (2, True)])
def test_around_the_kernels_calls_continue_from_a_state(convolutions: int, inplace: bool) -> None:
    x, weight, bias = _arguments(convolutions, torch.float64)
    whole, _ = tcn(x, weight, 2, bias=bias, backend="naive")
    pieces: list[Tensor] = []
    state: TCNState | None = None
    for part in x.split([4, 3, 2], 1):
        options: dict[str, Any] = {"state": state, "return_state": True, "inplace": inplace and state is not None}
        y, state = operator.run(TCNCall(x=part, weight=weight, dilation_factor=2, bias=bias, **options))
        pieces.append(y)
    assert state is not None
    assert state.position.tolist() == [9, 9]
    assert_close(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize(
    ("convolutions", "return_state", "norm"), [(1, False, False), (2, True, False), (1, True, True)]
)
def test_compiles_into_one_graph(convolutions: int, return_state: bool, norm: bool) -> None:
    torch._dynamo.reset()

    def call(x: Tensor, weight: Tensor, bias: Tensor, omega: Tensor) -> tuple[Tensor, TCNState | None]:
        options: dict[str, Any] = {"norm_fn": lambda h, number: h * number} if norm else {}
        options |= {"bias": bias, "omega": omega, "dropout": 0.1, "return_state": return_state}
        return operator.run(TCNCall(x=x, weight=weight, dilation_factor=2, **options))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = [part.detach().to("meta").requires_grad_() for part in (*_arguments(convolutions), torch.randn(4))]
    y, state = compiled(*leaves)
    gradients = torch.autograd.grad(y.sum(), leaves)
    assert [part.shape for part in (y, *gradients)] == [part.shape for part in (leaves[0], *leaves)]
    assert (state is not None) == return_state


@pytest.mark.parametrize("leaf", [False, True])
def test_tensors_without_memory_are_not_asked_for_their_address(leaf: bool) -> None:
    with FakeTensorMode():
        x, weight, bias = _arguments(leaf=leaf)
        assert operator.tcn_blocks(x, weight, bias, None, Settings(1, 2, "silu", True, True, 0.0)).shape == (2, 9, 4)


def test_lengths_are_clamped_to_the_row() -> None:
    lengths = torch.tensor([-3, 0, 5, 99], dtype=torch.int32)
    assert operator._prepared(torch.zeros(1), None, lengths, 9)[2].tolist() == [0, 0, 5, 9]


def test_unaligned_tensors_are_copied() -> None:
    whole = torch.randn(1, 9, 24)
    assert operator._aligned16(whole[..., 4:12]).data_ptr() == whole[..., 4:].data_ptr()
    moved = operator._aligned16(whole[..., 3:11])
    assert torch.equal(moved, whole[..., 3:11])
    assert layout(moved).aligned16()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that plans load, on a device that can run all of them."""
    names: list[str] = []

    def load(source: nvrtc.Source, name: str, shared_memory: int, device: int) -> str:
        (file,) = (file for file in source.files if file.endswith(".cu"))
        names.append(file.removesuffix(".cu") if name == "tensor_core_backward" else name)
        return name

    monkeypatch.setattr(nvrtc, "load", load)
    monkeypatch.setattr(nvrtc, "resident_blocks", lambda function, threads, device: 264)
    monkeypatch.setattr(driver, "max_shared_memory", lambda device: 232448)
    monkeypatch.setattr(driver, "Launch", lambda *arguments, **options: arguments)
    monkeypatch.setattr(smem, "has_clusters", lambda device: True)
    plans = (operator.forward_plan, operator.backward_plan, operator.recomputes)
    for plan in plans:
        plan.cache_clear()
    yield names
    for plan in plans:
        plan.cache_clear()


def _layout(*shape: int, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> Layout:
    return Layout(torch.Size(shape), (shape[1] * shape[2], shape[2], 1), dtype, offset, 0)


@pytest.mark.parametrize(
    ("x", "kernel_size", "forward", "backward"),
    [
        (_layout(1, 8192, 64), 17, "smem", "smem"),
        (_layout(1, 20000, 64), 17, "smem", "tensor_core"),
        (_layout(1, 131072, 64), 17, "tensor_core", "tensor_core"),
        (_layout(8, 8192, 64), 17, "tensor_core", "tensor_core"),
        (_layout(1, 8192, 64, dtype=torch.float32), 17, "smem", "smem"),
        (_layout(8, 8192, 64, dtype=torch.float32), 17, "registers", "registers"),
        (_layout(8, 100, 64), 33, "tensor_core", "registers"),
        (_layout(8, 100, 64), 64, "registers", "registers"),
        (_layout(8, 100, 63), 33, "registers", "registers"),
        (_layout(1, 8192, 64, offset=2), 17, "registers", "registers"),
        (_layout(1, 100, 63), 5, "registers", "registers"),
        (_layout(8, 8192, 64), 1, "tensor_core", "tensor_core"),
    ],
)
def test_plans_choose_the_family_of_kernels(
    x: Layout, kernel_size: int, forward: str, backward: str, loaded: list[str]
) -> None:
    rest = ((4, 1, x.shape[2], kernel_size), True, False, Settings(1, 8, "silu", True, True, 0.1))
    for keep, omega in itertools.product((False, True), repeat=2):
        operator.forward_plan(Call(x, *rest, keep, omega))
        assert set(loaded) == {f"{forward}_forward"}
        loaded.clear()
    for omega in (False, True):
        operator.backward_plan(Call(x, *rest, omega=omega), x)
        family = "tensor_core_backward_short" if backward == "tensor_core" else f"{backward}_backward"
        assert set(loaded) - {"sum_partials"} == {family}
        loaded.clear()
    assert operator.recomputes(Call(x, *rest)) == (backward == "smem")


@pytest.mark.parametrize(("omega", "kernel_size"), [(True, 17), (True, 1), (False, 17)])
def test_gradients_where_the_short_kernel_does_not_fit(
    omega: bool, kernel_size: int, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "max_shared_memory", lambda device: 163 * 1024)
    x = _layout(8, 8192, 64)
    kernel = (4, 1, 64, kernel_size), True, False, Settings(1, 8, "none", False, True, 0.0)
    operator.backward_plan(Call(x, *kernel, omega=omega), x)
    expected = {17: "tensor_core_backward_long", 1: "tensor_core_backward_short"}[kernel_size]
    assert set(loaded) - {"sum_partials"} == {expected if omega else "registers_backward"}


@pytest.mark.parametrize(
    ("x", "depth", "causal", "expected"),
    [
        (_layout(8, 131072, 64), 4, True, "tensor_core_pair"),
        (_layout(8, 131072, 64), 3, True, "tensor_core_forward"),
        (_layout(8, 131072, 64), 4, False, "tensor_core_pair"),
        (_layout(8, 131072, 63), 4, True, "registers_forward"),
    ],
)
def test_pairs_of_blocks_run_where_they_fit(
    x: Layout, depth: int, causal: bool, expected: str, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_core_pair, "ENABLED", True)
    settings = Settings(1, 20, "none", False, causal, 0.0)
    operator.forward_plan(Call(x, (depth, 1, x.shape[2], 17), False, False, settings))
    assert set(loaded) == {expected}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_pairs_of_blocks_cover_all_of_time(causal: bool) -> None:
    settings = Settings(1, 20, "none", False, causal, 0.0)
    call = Call(_layout(8, 131072, 64), (4, 1, 64, 17), False, False, settings)
    near, far = (tensor_core_pair.cut_time(call, pair, 264) for pair in range(2))
    assert near is not None
    assert far is not None
    assert near.before >= (16 if causal else 8) * (1 + 20)
    assert near.rows - near.own - near.before >= (0 if causal else 8) * (1 + 20)
    assert near.segments * near.own >= 131072
    assert tensor_core_pair.memory_rows(call.block, near.rows, near.own) <= tensor_core_pair.MAX_ROWS
    assert (far.before, far.segments) == (0, 1)
    assert far.own >= 131072 / 400


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_dropout_keeps_the_mean(dropout: float) -> None:
    settings = Settings(1, 8, "silu", True, True, dropout)
    dropped, scale = Call(_layout(1, 8, 8), (1, 8, 3), False, False, settings).dropout_arguments
    assert abs(dropped / 65536 - dropout) < 1e-5
    assert scale * (65536 - dropped) / 65536 == (0.0 if dropout == 1.0 else pytest.approx(1.0))


@pytest.mark.parametrize("time", [1, 7, 8, 129, 8192])
@pytest.mark.parametrize("dilation", [1, 3, 20, 8000])
def test_tiles_cover_all_of_time(time: int, dilation: int) -> None:
    dilation = min(dilation, time)
    steps = tensor_core.segment_steps(time, dilation, 1, 264, 2)
    assert steps % 8 == 0
    chains = dilation * math.ceil(math.ceil(time / dilation) / steps)  # (segment, phase) pairs, 16 per tile
    assert 16 * tensor_core.tiles_in_row(time, dilation, steps) >= chains
    assert chains * steps >= time


def _sources() -> list[tuple[str, nvrtc.Source]]:
    """Kernel sizes and dtypes that take every branch of the sources."""
    found: list[tuple[str, nvrtc.Source]] = []
    sizes = [(1, True), (2, False), (5, True), (17, True), (17, False), (33, True), (64, False)]
    for number, ((size, causal), dtype) in enumerate(itertools.product(sizes, DTYPES)):
        block = Block(
            kernel_size=size,
            dtype=dtype,
            causal=causal,
            activation=ACTIVATIONS[number % len(ACTIVATIONS)],
            bias=number % 2 == 0,
            residual=number % 3 != 0,
            lengths=number % 4 < 2,
            dropout=number % 5 < 2,
            omega=number % 7 in (0, 2, 5),
        )
        past = (None, torch.float32, dtype)[number % 3]
        found.append(("registers_forward", registers.forward_source(block, 1 + number % 2, past)))
        found.append(("registers_backward", registers.backward_source(block, 1)))
        if size <= 17:
            found += [("smem_forward", smem.source(block, True)), ("smem_backward", smem.source(block, False))]
        if dtype != torch.float32 and size <= 17:
            found.append(("tensor_core_forward", tensor_core.forward_source(block)))
            found.append(("tensor_core_pair", tensor_core_pair.source(block)))
            found.append(("tensor_core_backward", tensor_core.backward_source(block, long=False)))
            found.append(("registers_backward", registers.backward_source(block, 2)))
        if dtype != torch.float32 and size > 1:
            found.append(("tensor_core_backward", tensor_core.backward_source(block, long=True)))
    return found


def test_sources_are_packaged_and_differ_between_configurations() -> None:
    sources = _sources()
    texts = [source.text() for _, source in sources]
    assert len(set(texts)) == len(texts)
    assert all(f"{name}(const Args args)" in text for (name, _), text in zip(sources, texts, strict=True))


def _needs_nvrtc() -> None:
    reason = dispatch._nvrtc_missing()
    if reason is not None:
        pytest.skip(reason)


def _assert_compile(sources: list[tuple[str, nvrtc.Source]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_nvrtc()
    monkeypatch.setenv("TCNCA_CACHE", str(folder))
    for name, source in sources:
        image = nvrtc.cubin(source.text(), "sm_90")
        assert image.startswith(b"\x7fELF")
        assert name.encode() in image
        assert nvrtc.cubin(source.text(), "sm_90") == image
    assert len(list((folder / "kernels").iterdir())) == len(sources)


def test_one_source_of_each_kernel_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    representative = {name: source for name, source in _sources() if ("K", 5) in source.macros}
    assert len(representative) == 7
    _assert_compile([*representative.items()], tmp_path, monkeypatch)


@pytest.mark.slow
def test_all_sources_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _assert_compile(_sources(), tmp_path, monkeypatch)


def test_compiler_errors_are_shown() -> None:
    _needs_nvrtc()
    with pytest.raises(KernelError, match=r"(?s)sm_90.*TCNCA_KERNELS=off.*nonsense"):
        nvrtc.compile_source("nonsense;", "sm_90")
