"""What the EMA promises about outliers, infinity and NaN: no backend but the FFT carries them back in time."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.export import Dim

from tcnca.ops import EMABackend, ema
from tcnca.ops.ema.naive import EMACoefficients, ema_coefficients, ema_recurrent
from tests.comparison import assert_close
from tests.ops.properties import leaf

CHUNKED: Any = importlib.import_module("tcnca.ops.ema.chunked")
# Several blocks, of which the states are carried by several blocks; no multiple of anything.
TIME = 1500
OUTLIERS = (1e6, 1e30, 3e38, torch.inf, -torch.inf, torch.nan)
TRUNCATIONS = pytest.mark.parametrize("truncation", [None, 20, 64, 300], ids=lambda value: f"truncation={value}")
DIRECTIONS = pytest.mark.parametrize("directions", [1, 2], ids=["causal", "bidirectional"])


@pytest.fixture
def _tiny_blocks() -> Iterator[None]:
    with mock.patch.multiple(CHUNKED, SHORT_BLOCK=3, CARRY_BLOCK=2):
        yield


def draw(directions: int = 1, channels: int = 3, time: int = TIME) -> tuple[Tensor, list[Tensor]]:
    """Return inputs and parameters in float32, with fast and slow decays."""
    torch.manual_seed(0)
    return torch.randn(2, time, channels), [torch.randn(directions, channels, 4) * 1.5 for _ in range(4)]


def assert_locally_close(y: Tensor, x: Tensor, values: list[Tensor], truncation: int | None) -> None:
    """Fail unless errors are less than 1e-5 of `Σ |k[l]| |x[t - l]|`, for the coefficients as float32 has them."""
    drive, decay, readout = (part.double() for part in ema_coefficients(*values))
    exact = ema_recurrent(x.double(), EMACoefficients(drive, decay, readout), truncation)
    scale = ema_recurrent(x.double().abs(), EMACoefficients(drive.abs(), decay, readout.abs()), truncation)
    worst = ((y - exact).abs() / scale).max()
    assert worst < 1e-5, f"error of {worst:.1e} of the sum"


@TRUNCATIONS
@pytest.mark.parametrize("backend", ["auto", "scan"])
@torch.no_grad()
def test_later_inputs_do_not_change_a_bit(backend: EMABackend, truncation: int | None) -> None:
    x, values = draw()
    expected, _ = ema(x, *values, backend=backend, truncation=truncation)
    for at in (1, 63, 64, 700, 1030, TIME - 1):
        for outlier in OUTLIERS:
            changed = x.clone()
            changed[0, at, 1] = outlier
            y, _ = ema(changed, *values, backend=backend, truncation=truncation)
            assert torch.equal(y[0, :at], expected[0, :at]), f"{outlier} at {at}"
            assert torch.equal(y[1], expected[1]), "another row"
            assert torch.equal(y[..., ::2], expected[..., ::2]), "other channels"
            reached = y[0, at : at + (20 if truncation is None else truncation), 1]
            if outlier in (1e6, 1e30):
                assert bool(reached.isfinite().all())
            elif outlier != 3e38:
                assert not bool(reached.isfinite().any()), "an output that depends on it must say so"


def test_the_fft_is_the_only_backend_that_leaks() -> None:
    """If this fails, the documentation of `fft` promises too little."""
    x, values = draw()
    changed = x.clone()
    changed[0, 700:, 1] = 1e6
    before, after = (ema(part, *values, backend="fft")[0][0, :700, 1] for part in (x, changed))
    assert (before - after).abs().max() > 1e-3
    changed[0, 700:, 1] = torch.nan
    assert bool(ema(changed, *values, backend="fft")[0][0, :, 1].isnan().all())


@DIRECTIONS
@TRUNCATIONS
@torch.no_grad()
def test_the_error_is_relative_to_what_an_output_sums(directions: int, truncation: int | None) -> None:
    x, values = draw(directions)
    x[:, 700] = 1e6
    assert_locally_close(ema(x, *values, truncation=truncation)[0], x, values, truncation)
    with pytest.raises(AssertionError, match="of the sum"):
        assert_locally_close(ema(x, *values, truncation=truncation, backend="fft")[0], x, values, truncation)


@TRUNCATIONS
@pytest.mark.parametrize("sizes", [[1] * 130, [57, 1, 72], [65, 65]], ids=["tokens", "pieces", "halves"])
@torch.no_grad()
def test_streaming_has_the_same_bound(truncation: int | None, sizes: list[int]) -> None:
    x, values = draw(time=130)
    x[:, 60] = 1e6
    state, outputs = None, []
    for piece in x.split(sizes, 1):
        y, state = ema(piece, *values, truncation=truncation, state=state, return_state=True)
        outputs.append(y)
    assert_locally_close(torch.cat(outputs, 1), x, values, truncation)


@DIRECTIONS
@TRUNCATIONS
@torch.no_grad()
def test_padding_does_not_change_a_bit(directions: int, truncation: int | None) -> None:
    x, values = draw(directions)
    lengths = torch.tensor([700, 65])
    expected, _ = ema(x, *values, truncation=truncation, lengths=lengths)
    for outlier in OUTLIERS:
        padded = x.clone()
        for row, length in enumerate(lengths.tolist()):
            padded[row, length:] = outlier
        y, _ = ema(padded, *values, truncation=truncation, lengths=lengths)
        assert torch.equal(y[0, :700], expected[0, :700])
        assert torch.equal(y[1, :65], expected[1, :65])


def test_an_ignored_nan_has_no_gradient() -> None:
    x, values = draw()
    x[:, 700] = torch.nan
    leaves = [part.requires_grad_() for part in (x, *values)]
    y, _ = ema(x, *values)
    for gradient in torch.autograd.grad(y[:, :700].sum(), leaves):
        assert bool(gradient.isfinite().all())


@pytest.mark.usefixtures("_tiny_blocks")
@pytest.mark.parametrize(("directions", "truncation"), [(1, None), (2, None), (1, 4), (2, 8)], ids=str)
def test_derivatives_across_blocks(directions: int, truncation: int | None) -> None:
    """20 tokens are blocks of blocks of blocks."""
    values = [leaf(directions, 1, 2) for _ in range(4)]

    def function(x: Tensor, *values: Tensor) -> Tensor:
        return ema(x, *values, backend="chunked", truncation=truncation)[0]

    assert gradcheck(function, (leaf(1, 20, 1), *values), check_forward_ad=True)
    assert gradgradcheck(function, (leaf(1, 20, 1), *values))


@pytest.mark.usefixtures("_tiny_blocks")
@DIRECTIONS
def test_vmap_over_inputs_and_parameters(directions: int) -> None:
    x, values = torch.randn(3, 2, 20, 2), [torch.randn(3, directions, 2, 4) for _ in range(4)]
    y = torch.vmap(lambda x, *values: ema(x, *values)[0])(x, *values)
    expected = torch.stack([ema(*arguments)[0] for arguments in zip(x, *values, strict=True)])
    assert_close(y, expected)


@pytest.mark.parametrize(("directions", "truncation"), [(1, None), (2, 100)], ids=str)
def test_one_graph_for_all_lengths(directions: int, truncation: int | None) -> None:
    torch.compiler.reset()
    _, values = draw(directions)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda x: ema(x, *values, truncation=truncation)[0], fullgraph=True, dynamic=True, backend=counter
    )
    with torch.no_grad():
        for time in (20, 64, 65, 1200):
            x = torch.randn(2, time, 3)
            assert_close(compiled(x), ema(x, *values, truncation=truncation)[0], f"output of {time} tokens")
        changed = x.clone()
        changed[:, 700:] = torch.nan
        if directions == 1:
            assert torch.equal(compiled(changed)[:, :700], compiled(x)[:, :700])
    assert counter.frame_count == 1
    torch.compiler.reset()


class _Module(torch.nn.Module):
    def __init__(self, values: list[Tensor], truncation: int | None) -> None:
        super().__init__()
        self.values, self.truncation = torch.nn.ParameterList(values), truncation

    def forward(self, x: Tensor) -> Tensor:
        return ema(x, *self.values, truncation=self.truncation)[0]


@pytest.mark.parametrize("truncation", [300, None])
@torch.no_grad()
def test_an_exported_program_takes_any_length(truncation: int | None) -> None:
    module = _Module(draw()[1], truncation)
    program = torch.export.export(module, (torch.randn(2, 20, 3),), dynamic_shapes={"x": {1: Dim.DYNAMIC}}).module()
    for time in (1, 64, 65, 1200, 20_000):
        x = torch.randn(2, time, 3)
        assert_close(program(x), module(x), f"output of {time} tokens")


@pytest.mark.slow
@torch.no_grad()
def test_inductor_keeps_the_bits() -> None:
    torch.compiler.reset()
    x, values = draw(time=200)
    compiled = torch.compile(lambda x: ema(x, *values)[0], fullgraph=True)
    expected = compiled(x)
    for outlier in OUTLIERS:
        changed = x.clone()
        changed[:, 100:] = outlier
        y = compiled(changed)
        assert torch.equal(y[:, :100], expected[:, :100])
        assert bool(y[:, 100:].isfinite().all()) == (outlier in (1e6, 1e30))
    torch.compiler.reset()
