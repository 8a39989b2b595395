"""Dropout by hashes has the right probability everywhere, and no visible pattern."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tcnca.ops.dropout import dropout, hashed_dropout


def kept(first: int, second: int, *shape: int, probability: float = 0.5) -> Tensor:
    seeds = torch.tensor([first, second], dtype=torch.int32)
    return hashed_dropout(torch.ones(shape), probability, seeds) != 0


def assert_independent(one: Tensor, other: Tensor) -> None:
    """Fail unless two masks that keep half agree in half of their elements, within four standard deviations."""
    share = (one == other).double().mean().item()
    assert abs(share - 0.5) < 4 * 0.5 / one.numel() ** 0.5


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.9])
def test_probability(probability: float) -> None:
    x = torch.full((64, 100, 96), 3.0)
    y = hashed_dropout(x, probability, torch.tensor([17, -5], dtype=torch.int32))
    dropped = (y == 0).double()
    deviation = (probability * (1 - probability)) ** 0.5
    assert abs(dropped.mean().item() - probability) < 4 * deviation / x.numel() ** 0.5
    for axis in range(3):
        rows = dropped.mean([other for other in range(3) if other != axis])
        assert (rows - probability).abs().max() < 5 * deviation / (x.numel() / x.shape[axis]) ** 0.5
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 3.0 / (1 - probability)))


def test_neighbors_are_independent() -> None:
    mask = kept(1, 2, 1 << 20)
    for offset in (1, 2, 3, 7, 64, 512, 4096, 65536):
        assert_independent(mask[offset:], mask[:-offset])


def test_seeds_are_independent() -> None:
    mask = kept(0, 0, 1 << 20)
    for seeds in ((1, 0), (0, 1), (1, 1), (-1, 0), (0, 1 << 30), (1 << 16, 0)):
        other = kept(*seeds, 1 << 20)
        assert_independent(mask, other)
    # Nor is one mask another one shifted.
    for offset in (1, 5):
        assert_independent(mask[offset:], kept(offset, 1, 1 << 20)[:-offset])


def test_gradients_are_those_of_the_mask() -> None:
    x = torch.randn(4, 33, 5, dtype=torch.float64, requires_grad=True)
    seeds = torch.tensor([3, 4], dtype=torch.int32)
    y = hashed_dropout(x, 0.25, seeds)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, (y != 0).double() / 0.75)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_dropout_follows_the_seed(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(dropout, fullgraph=True, backend="aot_eager")
    x = torch.ones(8, 100, 16, dtype=dtype)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return compiled(x, 0.5)

    assert drawn(0).dtype == dtype
    assert torch.equal(drawn(0), drawn(0))
    assert_independent(drawn(0), drawn(1))
    torch.manual_seed(0)
    assert_independent(compiled(x, 0.5), compiled(x, 0.5))


def test_everything_can_be_dropped() -> None:
    torch._dynamo.reset()
    assert not kept(1, 2, 1000, probability=1.0).any()
    compiled = torch.compile(dropout, fullgraph=True, backend="aot_eager")
    assert not compiled(torch.ones(3, 4), 1.0).any()
