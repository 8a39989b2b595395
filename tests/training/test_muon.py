"""Muon: orthogonalized updates, which parameters it trains, stacked matrices, and resuming."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tcnca.errors import ConfigError
from tcnca.training import OptimizerConfig, build_optimizers, set_lr
from tcnca.training.muon import Muon, orthogonalize
from tests.examples import FAMILY, small_model


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 16, 40), (2, 40, 16), (1, 1, 7)])
def test_singular_values_become_about_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonalize(matrices)
    assert found.shape == shape
    # In the basis of the matrix, the result is diagonal.
    inner = u.mT @ found @ v.mT
    values = torch.diagonal(inner, dim1=1, dim2=2)
    assert ((values > 0.7) & (values < 1.2))[s > 0.01 * s.amax()].all()
    assert (inner - torch.diag_embed(values)).abs().max() < 1e-3
    assert torch.equal(orthogonalize(torch.zeros(shape)), torch.zeros(shape))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("end", [0.3, 0.1, 0.01, 1e-4])
def test_rounding_to_bfloat16_does_not_make_singular_values_grow(device: str, end: float) -> None:
    """Singular values from 1 to `end`, as a momentum has them; without a margin some leave the polynomials' range."""
    rows = torch.logspace(0, math.log10(end), 128)
    u, v = (torch.linalg.qr(torch.randn(8, size, 128)).Q for size in (128, 512))
    matrices = (u * rows @ v.mT).to(device, torch.bfloat16)
    found = torch.linalg.svdvals(orthogonalize(matrices).float())
    assert found.max() < 1.2
    assert found.min() > (0.7 if end >= 0.01 else 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_matrices_of_any_precision(dtype: torch.dtype) -> None:
    matrix = nn.Parameter(torch.randn(6, 4, dtype=dtype))
    before = matrix.detach().clone()
    optimizer = Muon([matrix], 0.1, beta2=0.9)
    for _ in range(2):
        matrix.grad = torch.randn_like(matrix)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    matrix.grad = torch.randn_like(matrix)
    optimizer.step()
    assert matrix.dtype == dtype
    assert optimizer.state[matrix]["mean_square"].dtype == torch.promote_types(dtype, torch.float32)
    assert torch.isfinite(matrix).all()
    assert not torch.equal(matrix, before)


def naive_update(momentum: Tensor) -> Tensor:
    """Return the exact update of a matrix, by its singular value decomposition."""
    u, _, v = torch.linalg.svd(momentum, full_matrices=False)
    return 0.2 * max(momentum.shape) ** 0.5 * (u @ v)


def test_a_step_is_the_orthogonalized_momentum_of_each_part() -> None:
    """Two steps of two stacked matrices and a plain one, next to the definition; 12 % is the iteration's error."""
    stacked, plain = nn.Parameter(torch.randn(24, 10)), nn.Parameter(torch.randn(6, 12))
    before = {each: each.detach().clone() for each in (stacked, plain)}
    momentum = {each: torch.zeros_like(each) for each in before}
    optimizer = Muon([{"params": [stacked, plain], "parts": [(8, 16), (6,)]}], 0.01, momentum=0.9, weight_decay=0.5)
    for _ in range(2):
        for each, parts in ((stacked, (8, 16)), (plain, (6,))):
            gradient = torch.randn_like(each)
            each.grad = gradient
            momentum[each] = 0.9 * momentum[each] + 0.1 * gradient
            nesterov = 0.1 * gradient + 0.9 * momentum[each]
            update = torch.cat([naive_update(part) for part in nesterov.split(parts)])
            before[each] = before[each] * (1 - 0.01 * 0.5) - 0.01 * update
        optimizer.step()
    for each, expected in before.items():
        error = (each.detach() - expected).norm() / (0.01 * 0.2 * each.numel() ** 0.5)
        assert error < 0.2
    whole = Muon([other := nn.Parameter(torch.randn(24, 10))], 0.01)
    other.grad = torch.randn_like(other)
    start = other.detach().clone()
    whole.step()
    change = (start - other.detach() - 0.01 * 0.1 * start) / 0.01
    assert (change - naive_update(other.grad)).norm() / change.norm() < 0.15


def test_rows_of_updates_become_equally_large_with_beta2() -> None:
    """Rows whose updates were small become larger by the root of their mean square; the norm of the update stays."""
    gradients = torch.randn(3, 12, 8) * torch.logspace(0, -3, 12).unsqueeze(1)
    matrices = {beta2: nn.Parameter(torch.zeros(12, 8)) for beta2 in (None, 0.0, 0.9)}
    updates: dict[float | None, list[Tensor]] = {}
    for beta2, matrix in matrices.items():
        optimizer = Muon([{"params": [matrix], "parts": [(4, 8)]}], 1.0, momentum=0.0, weight_decay=0.0, beta2=beta2)
        updates[beta2] = []
        for gradient in gradients:
            before = matrix.detach().clone()
            matrix.grad = gradient
            optimizer.step()
            updates[beta2].append(before - matrix.detach())
    mean_square = torch.zeros(12, 1)
    for plain, equal, found in zip(updates[None], updates[0.0], updates[0.9], strict=True):
        mean_square = 0.9 * mean_square + 0.1 * plain.square().mean(1, keepdim=True)
        for rows in (slice(0, 4), slice(4, 12)):
            norms = equal[rows].norm(dim=1)
            torch.testing.assert_close(norms, norms.mean().expand_as(norms))
            expected = plain[rows] / mean_square[rows].sqrt()
            expected *= plain[rows].norm() / expected.norm()
            torch.testing.assert_close(found[rows], expected, rtol=1e-3, atol=1e-5)
    zeros = nn.Parameter(torch.ones(3, 4))
    zeros.grad = torch.zeros(3, 4)
    Muon([zeros], 1.0, weight_decay=0.0, beta2=0.9).step()
    assert torch.equal(zeros, torch.ones(3, 4))


@pytest.mark.parametrize("family", FAMILY)
def test_muon_trains_the_matrices_inside_the_layers(family: str) -> None:
    model = small_model(family)
    muon, adamw = build_optimizers(model, OptimizerConfig(name="muon", lr=0.002, muon_lr=0.006, muon_weight_decay=0.3))
    names = {parameter: name for name, parameter in model.named_parameters()}
    (group,) = muon.param_groups
    hidden = {names[parameter] for parameter in group["params"]}
    rest = {names[parameter] for each in adamw.param_groups for parameter in each["params"]}
    assert hidden | rest == set(names.values())
    assert not hidden & rest
    expected = {
        name for name, each in model.named_parameters() if name.startswith("layers.") and name.endswith("weight")
    }
    assert hidden == {name for name in expected if "norm" not in name and "mixer" not in name}
    for parameter, parts in zip(group["params"], group["parts"], strict=True):
        assert sum(parts) == parameter.shape[0]
        assert len(parts) == (4 if "gates" in names[parameter] else 3 if "projection" in names[parameter] else 1)
    set_lr([muon, adamw], 0.001)
    assert group["lr"] == pytest.approx(0.003)
    assert group["weight_decay"] == 0.3
    assert {each["lr"] for each in adamw.param_groups} == {0.001}


def test_a_matrix_without_a_gradient_is_left_alone() -> None:
    first, second = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    optimizer, before = Muon([first, second]), second.detach().clone()
    optimizer.step()
    first.grad = torch.randn(3, 4)
    optimizer.step()
    assert torch.equal(second, before)
    assert second not in optimizer.state


def test_a_closure_computes_the_gradients() -> None:
    matrix = nn.Parameter(torch.randn(3, 4))
    optimizer, before = Muon([matrix]), matrix.detach().clone()

    def closure() -> float:
        loss = matrix.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == pytest.approx(float(before.square().sum()))
    assert not torch.equal(matrix, before)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3, 4), {"lr": -1.0}, "lr: expected a number >= 0, got -1"),
        ((3, 4), {"momentum": 1.0}, "momentum: expected a number from 0 to below 1, got 1"),
        ((3, 4), {"beta2": 1.0}, "beta2: expected a number from 0 to below 1, got 1"),
        ((3, 4), {"weight_decay": -2.0}, "weight_decay: expected a number >= 0, got -2"),
        ((3,), {}, r"params: expected matrices, got shape \[3\]"),
    ],
)
def test_errors(shape: tuple[int, ...], options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Muon([nn.Parameter(torch.zeros(shape))], **options)
    with pytest.raises(ConfigError, match=r"parts: expected a sum of 3, the rows, got \[1, 1\]"):
        Muon([{"params": [nn.Parameter(torch.zeros(3, 4))], "parts": [(1, 1)]}])


def test_a_learning_rate_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr: expected a positive number"):
        OptimizerConfig(name="muon", lr=0.0)
