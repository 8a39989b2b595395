"""The TCN's kernels: when they run, their sources, and what is done around them. What they compute needs a GPU."""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tcnca
from tcnca.errors import ConfigError, InputError, KernelError
from tcnca.ops import ACTIVATIONS, TCNState, initial_tcn_state, kernels, tcn
from tcnca.ops.tcn import why_not
from tcnca.ops.tcn.cuda import compiled, operator, plan, run
from tcnca.ops.tcn.cuda.source import (
    DTYPES,
    LARGEST_KERNEL,
    Block,
    RingBackward,
    RingForward,
    TileBackward,
    TileForward,
    WholeBackward,
    WholeForward,
)
from tcnca.ops.tcn.plain import plain_tcn
from tests.comparison import assert_close

Layout = TileForward | TileBackward | RingForward | RingBackward | WholeForward | WholeBackward


def _arguments(
    convolutions: int = 1, dtype: torch.dtype = torch.float32, leaf: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, 9, 4), (3, convolutions, 4, 3), (3, convolutions, 4))
    x, weight, bias = (torch.randn(*shape, dtype=dtype, requires_grad=leaf) for shape in shapes)
    return x, weight, bias


def test_on_a_cpu_auto_is_plain_to_the_bit() -> None:
    x, weight, bias = _arguments(2)
    lengths = torch.tensor([9, 4])
    y, state = tcn(x, weight, 2, bias=bias, lengths=lengths, return_state=True)
    expected, plain = plain_tcn(x, weight, 2, bias=bias, lengths=lengths, return_state=True)
    assert torch.equal(y, expected)
    assert state is not None
    assert plain is not None
    assert all(torch.equal(a, b) for a, b in zip(state.buffers, plain.buffers, strict=True))
    assert torch.equal(tcn(x, weight, 2, bias=bias, lengths=lengths, backend="plain")[0], expected)


def test_cuda_is_refused_where_it_cannot_run() -> None:
    x, weight, _ = _arguments()
    with pytest.raises(KernelError, match=r"backend: got 'cuda'.*x: got one on cpu, allowed is a CUDA device"):
        tcn(x, weight, 2, backend="cuda")
    assert why_not(x, weight) == "x: got one on cpu, allowed is a CUDA device"


def test_other_backends_are_refused() -> None:
    x, weight, _ = _arguments()
    with pytest.raises(InputError, match="backend: got 'triton', allowed are auto, plain, cuda"):
        tcn(x, weight, 2, backend="triton")  # type: ignore[arg-type]


def _fake(*shape: int, dtype: torch.dtype = torch.bfloat16, leaf: bool = False) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda", requires_grad=leaf)


def test_reasons_against_kernels_are_named() -> None:
    with torch._subclasses.FakeTensorMode():
        x, weight, bias = _fake(2, 9, 8), _fake(3, 1, 8, 5), _fake(3, 1, 8)
        state = initial_tcn_state(2, 8, 5, 2, 3, device="cuda", dtype=torch.bfloat16)
        found = [
            why_not(x, weight, state=state, dropout=0.1),
            why_not(x, weight, lengths=torch.empty(2, dtype=torch.long)),
            why_not(x.double(), weight.double()),
            why_not(x, weight, bias.float()),
            why_not(x, _fake(3, 1, 8, LARGEST_KERNEL + 1)),
            why_not(_fake(2, 1, 8), weight, state=state),
            why_not(x, _fake(3, 1, 8, 5, leaf=True), state=state),
            why_not(_fake(65536, 1, 8), weight),
        ]
    words = ["dropout", "another device", "dtype", "except under autocast", "kernel_size: got 65"]
    words += ["one token", "gradients are wanted", "batch"]
    for reason, word in zip(found, words, strict=True):
        assert reason is not None
        assert word in reason


def _machine() -> Any:
    return importlib.import_module("tcnca.ops.tcn.cuda.machine")


def test_what_is_missing_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _machine()
    monkeypatch.setattr(machine, "_unable", lambda device: None)
    kernels.warn.cache_clear()
    monkeypatch.setattr(compiled, "missing", lambda: "cuda.bindings: gone; `pip install cuda-bindings` installs it")
    with pytest.warns(RuntimeWarning, match="pip install cuda-bindings.*plain PyTorch"):
        assert not machine.worth_it(0)
    assert not machine.worth_it(0)  # a second warning would be an error


def test_the_environment_can_choose_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _machine()
    monkeypatch.setattr(machine, "_unable", lambda device: None)
    monkeypatch.setattr(compiled, "missing", lambda: None)
    assert machine.worth_it(0)
    monkeypatch.setenv("TCNCA_KERNELS", "plain")
    assert not machine.worth_it(0)
    monkeypatch.setenv("TCNCA_KERNELS", "fast")
    with pytest.raises(ConfigError, match="TCNCA_KERNELS: got 'fast' in the environment, allowed are auto, plain"):
        machine.worth_it(0)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> tuple[Any, Any]:
        raise KernelError("cuda.bindings: cannot be imported")

    monkeypatch.setattr(compiled, "_bindings", absent)
    assert compiled.missing.__wrapped__() == "cuda.bindings: cannot be imported"


def test_importing_the_library_loads_neither_cuda_nor_the_compiler() -> None:
    code = "import sys, torch; before = set(sys.modules); import tcnca; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ast.literal_eval(done.stdout)
    assert "tcnca.ops.tcn.cuda.operator" in loaded
    assert not [name for name in loaded if name.startswith(("cuda.", "torch._dynamo")) or name.endswith(".machine")]


def _blocks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    dilation: int = 1,
    factor: int = 2,
    **options: Any,
) -> Tensor:
    """`tcn_blocks` in plain PyTorch, in what it promises about padding too."""
    weight = weight if weight.dim() == 3 else weight[:, 0]
    bias = bias if bias is None or bias.dim() == 2 else bias[:, 0]
    for block in range(weight.shape[0]):
        x = tcnca.ops.zero_padding(x, lengths)
        taps = torch.zeros(*weight.shape[1:-1], (weight.shape[-1] - 1) * dilation * factor**block + 1).to(weight)
        taps[..., :: dilation * factor**block] = weight[block]
        offset = None if bias is None else bias[block][None, None]
        x, _ = plain_tcn(x, taps[None, None], 1, bias=offset, **options)
    return x


def _from_state(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    past: Tensor,
    position: Tensor,
    *,
    dilation: int,
    **options: Any,
) -> Tensor:
    """`tcn_block_from_state` in plain PyTorch."""
    order = (position.unsqueeze(1) + torch.arange(past.shape[1])) % max(past.shape[1], 1)
    older = past.gather(1, order.unsqueeze(-1).expand_as(past))
    x = tcnca.ops.zero_padding(x, lengths)
    both = _blocks(
        torch.cat([older, x], 1), weight[None], None if bias is None else bias[None], **options, dilation=dilation
    )
    return both[:, past.shape[1] :]


def _by_kernels(
    x: Tensor, weight: Tensor, bias: Tensor, lengths: Tensor | None, state: TCNState | None, **options: Any
) -> tuple[Tensor, TCNState | None]:
    choice = {"nonlinearity": "silu", "residual": True, "causal": True, "return_state": False, "inplace": False}
    return run.run_kernels(x, weight, 2, bias, lengths=lengths, state=state, **{**choice, **options})


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "tcn_blocks", _blocks)
    monkeypatch.setattr(run, "tcn_block_from_state", _from_state)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "straight"])
@pytest.mark.parametrize("convolutions", [1, 2])
@pytest.mark.parametrize("lengths", [None, [9, 4]], ids=str)
@pytest.mark.parametrize("return_state", [True, False], ids=["state", "stateless"])
def test_what_surrounds_the_kernels_gives_outputs_states_and_gradients(
    residual: bool, convolutions: int, lengths: list[int] | None, return_state: bool
) -> None:
    x, weight, bias = _arguments(convolutions, torch.float64, leaf=True)
    real = None if lengths is None else torch.tensor(lengths)
    options = {"residual": residual, "return_state": return_state}
    results = []
    for y, state in (
        _by_kernels(x, weight, bias, real, None, **options),
        plain_tcn(x, weight, 2, bias=bias, lengths=real, residual=residual, return_state=return_state),
    ):
        out = [tcnca.ops.zero_padding(y, real), *(state.buffers if state is not None else ())]
        gradients = torch.autograd.grad(sum(part.square().sum() for part in out), (x, weight, bias))  # type: ignore[arg-type]
        results.append([*out, *gradients])
    assert len(results[0]) == 4 + (3 * convolutions if return_state else 0)
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("convolutions", [1, 2])
@pytest.mark.parametrize("return_state", [True, False], ids=["state", "stateless"])
def test_what_surrounds_the_kernels_normalizes_between_them(convolutions: int, return_state: bool) -> None:
    x, weight, bias = _arguments(convolutions, torch.float64, leaf=True)

    def normalize(h: Tensor, number: int) -> Tensor:
        return F.layer_norm(h, (4,)) * (number + 1)

    results = []
    for by in (_by_kernels, plain_tcn):
        torch.manual_seed(4)
        arguments = (x, weight, bias, None, None) if by is _by_kernels else (x, weight, 2)
        options: dict[str, Any] = {} if by is _by_kernels else {"bias": bias}
        y, state = by(*arguments, normalize=normalize, dropout=0.3, return_state=return_state, **options)
        out = [y, *(state.buffers if state is not None else ())]
        results.append([*out, *torch.autograd.grad(y.square().sum(), (x, weight, bias))])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("convolutions", [1, 2])
@pytest.mark.parametrize("inplace", [False, True], ids=["new", "inplace"])
def test_what_surrounds_the_kernels_goes_on_from_a_state(convolutions: int, inplace: bool) -> None:
    x, weight, bias = _arguments(convolutions, torch.float64)
    whole, _ = plain_tcn(x, weight, 2, bias=bias)
    pieces, state = [], None
    for part in x.split([4, 3, 2], 1):
        y, state = _by_kernels(
            part, weight, bias, None, state, return_state=True, inplace=inplace and state is not None
        )
        pieces.append(y)
    assert state is not None
    assert state.position.tolist() == [9, 9]
    assert_close(torch.cat(pieces, 1), whole)


def test_operators_know_their_shapes_without_running() -> None:
    x, weight, bias = (part.to("meta", torch.bfloat16) for part in _arguments())
    settings = (None, 1, 2, "silu", True, True, 0.0)
    for taps, offset in ((weight, bias), (weight[:, 0], bias[:, 0])):
        y, inner = torch.ops.tcnca.tcn_blocks(x, taps.float(), offset.float(), None, *settings, True)
        assert (y.shape, y.dtype, inner.shape) == (x.shape, torch.bfloat16, (2, *x.shape))
        parts = torch.ops.tcnca.tcn_blocks_backward(y, x, inner, taps.float(), offset, None, *settings)
        assert [part.shape for part in parts] == [x.shape, taps.shape, offset.shape]
    assert [part.dtype for part in parts] == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("leaf", [False, True])
def test_tensors_without_memory_are_not_asked_for_their_address(leaf: bool) -> None:
    with FakeTensorMode():
        x, weight, bias = (part[:, 0] if part.dim() == 4 else part for part in _arguments(leaf=leaf))
        assert operator.tcn_blocks(x, weight, bias[:, 0]).shape == (2, 9, 4)


def test_lengths_that_kernels_read_lie_in_the_row() -> None:
    assert operator._whole(torch.tensor([-3, 0, 5, 99], dtype=torch.int32), 9).tolist() == [0, 0, 5, 9]


def test_what_does_not_lie_in_pieces_is_copied() -> None:
    whole = torch.randn(1, 9, 24)
    assert operator._in_pieces(whole[..., 4:12]).data_ptr() == whole[..., 4:].data_ptr()
    moved = operator._in_pieces(whole[..., 3:11])
    assert torch.equal(moved, whole[..., 3:11])
    assert plan.in_pieces(plan.lies(moved))


def _sources() -> list[tuple[Layout, Block]]:
    """Sizes and types that take every branch of the sources."""
    found: list[tuple[Layout, Block]] = []
    sizes = [(1, True), (2, False), (5, True), (17, True), (17, False), (33, True), (64, False)]
    for number, ((size, causal), dtype) in enumerate(itertools.product(sizes, DTYPES)):
        flags = {
            "bias": number % 2 == 0,
            "residual": number % 3 != 0,
            "lengths": number % 4 < 2,
            "dropout": number % 5 < 2,
        }
        activation = ACTIVATIONS[number % len(ACTIVATIONS)]
        block = Block(kernel_size=size, dtype=dtype, nonlinearity=activation, causal=causal, **flags)
        past = (None, "float32", dtype)[number % 3]
        found += [(RingForward(vector=1 + number % 2, past=past), block), (RingBackward(vector=1), block)]
        if size <= 17:
            found += [(WholeForward(), block), (WholeBackward(), block)]
        if dtype != "float32" and size <= 17:
            found += [(TileForward(), block), (TileBackward(), block), (RingBackward(vector=2), block)]
            found += [(TileForward(unrolled=True), block), (TileBackward(unrolled=True), block)] if size == 17 else []
    return found


def test_sources_come_with_the_package_and_are_written_for_every_configuration() -> None:
    texts = [layout.text(block) for layout, block in _sources()]
    assert len(set(texts)) == len(texts)
    for text, (layout, block) in zip(texts, _sources(), strict=True):
        assert f"#define K {block.kernel_size}\n" in text
        kind, way = re.findall("[A-Z][a-z]+", type(layout).__name__)
        assert f"{kind.lower()}_{way.lower()}(const Job job)" in text


@pytest.mark.slow
def test_sources_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled.missing() is not None:
        pytest.skip("needs cuda.bindings and NVRTC")
    monkeypatch.setenv("TCNCA_CACHE", str(tmp_path))
    for layout, block in _sources():
        image = compiled.cubin(layout.text(block), "sm_90")
        assert image.startswith(b"\x7fELF")
    assert len(list((tmp_path / "kernels").iterdir())) == len(_sources())


def test_sources_that_do_not_compile_say_why() -> None:
    if compiled.missing() is not None:
        pytest.skip("needs cuda.bindings and NVRTC")
    with pytest.raises(KernelError, match=r"(?s)sm_90.*TCNCA_KERNELS=plain.*nonsense"):
        compiled._compile("nonsense;", "sm_90")
