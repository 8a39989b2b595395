"""Norms against their formulas and PyTorch's own, and batch norm with padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tcnca.layers import NORM_KINDS, BatchNorm, make_norm
from tcnca.ops import length_mask
from tests.comparison import assert_close
from tests.layers.formulas import normalized, scramble

WIDTH = 6
LENGTHS = torch.tensor([5, 0, 9, 1])


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64) * 3 + 1


def _twins(kind: str) -> tuple[nn.Module, nn.Module]:
    first, second = scramble(make_norm(kind, WIDTH).double()), make_norm(kind, WIDTH).double()
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize("kind", NORM_KINDS)
def test_norm_in_evaluation_follows_its_formula(kind: str) -> None:
    norm = scramble(make_norm(kind, WIDTH).double()).eval()
    x = _values(3, 7, WIDTH)
    assert_close(norm(x), normalized(norm, kind, x))


@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_half_precision_are_precise(kind: str, dtype: torch.dtype) -> None:
    # The squares of these values overflow float16 and their sum exhausts bfloat16.
    x = (_values(4, 50, WIDTH) * 200).to(dtype)
    actual, precise = make_norm(kind, WIDTH), make_norm(kind, WIDTH).double()
    assert actual(x.float()).dtype == torch.float32
    result = actual.to(dtype)(x)
    assert result.dtype == dtype
    assert_close(result, precise(x.double()))


def test_batch_norm_equals_pytorchs_over_steps_of_training_and_in_evaluation() -> None:
    ours, theirs = BatchNorm(WIDTH).double(), nn.BatchNorm1d(WIDTH, eps=1e-5).double()
    with torch.no_grad():
        for norm in (ours, theirs):
            for parameter in norm.parameters():
                parameter.copy_(torch.linspace(-1, 2, WIDTH))
    for _ in range(3):
        x, weights = _values(4, 9, WIDTH).requires_grad_(), _values(4, 9, WIDTH)
        y, expected = ours(x), theirs(x.transpose(1, 2)).transpose(1, 2)
        assert_close(y, expected)
        actual = torch.autograd.grad((y * weights).sum(), [x, *ours.parameters()])
        wanted = torch.autograd.grad((expected * weights).sum(), [x, *theirs.parameters()])
        for name, a, b in zip(("x", "weight", "bias"), actual, wanted, strict=True):
            assert_close(a, b, f"gradient of {name}")
    for name in ("running_mean", "running_var"):
        assert_close(getattr(ours, name), getattr(theirs, name), name)
    assert int(ours.num_batches_tracked) == 3
    x = _values(2, 5, WIDTH)
    assert_close(ours.eval()(x), theirs.eval()(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize(("kind", "padding"), [("batch", float("nan")), ("sync_batch", 1e6)])
def test_batch_norm_in_training_mode_ignores_padding(kind: str, padding: float) -> None:
    x, weights, valid = _values(4, 9, WIDTH).requires_grad_(), _values(4, 9, WIDTH), length_mask(LENGTHS, 9)
    ours, alone = _twins(kind)
    y = ours(x.masked_fill(~valid.unsqueeze(-1), padding), LENGTHS)[valid]
    expected = alone(x[valid].unsqueeze(0))[0]
    assert_close(y, expected)
    for name in ("running_mean", "running_var"):
        assert_close(getattr(ours, name), getattr(alone, name), name)
    actual = torch.autograd.grad((y * weights[valid]).sum(), [x, *ours.parameters()])
    wanted = torch.autograd.grad((expected * weights[valid]).sum(), [x, *alone.parameters()])
    for name, a, b in zip(("x", "weight", "bias"), actual, wanted, strict=True):
        assert_close(a, b, f"gradient of {name}")


def test_batch_norm_in_evaluation_neither_uses_nor_moves_batch_statistics() -> None:
    norm = scramble(BatchNorm(WIDTH).double()).eval()
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    x = _values(3, 5, WIDTH)
    assert_close(norm(x)[1:2, 2:4], norm(x[1:2, 2:4]))
    for name, buffer in norm.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_batch_norm_of_a_single_token_is_finite_and_loses_it() -> None:
    norm = BatchNorm(WIDTH).double()
    scramble(norm)
    y = norm(_values(1, 1, WIDTH))
    assert norm.bias is not None
    assert_close(y[0, 0], norm.bias)
    assert all(torch.isfinite(buffer).all() for buffer in norm.buffers())


def test_batch_norm_learns_nothing_from_padding_alone() -> None:
    norm = make_norm("batch", 3).double()
    norm(torch.randn(2, 5, 3, dtype=torch.float64))
    before = {name: buffer.clone() for name, buffer in norm.named_buffers() if name.startswith("running")}
    norm(torch.randn(2, 5, 3, dtype=torch.float64), torch.tensor([0, 0]))
    for name, buffer in before.items():
        assert torch.equal(norm.get_buffer(name), buffer)
