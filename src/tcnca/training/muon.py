"""Muon: momentum whose update of every matrix is orthogonalized, for the hidden matrices of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from tcnca.errors import ConfigError

# Each iteration has its own polynomial, for the range of singular values that the ones before it leave ("The Polar
# Express", Amsel et al., 2025).
_COEFFICIENTS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_MARGIN = 1.02
"""Divides the singular values before each iteration: with rounding to bfloat16 they could leave the range of its
polynomial, and grow without limit."""
_UPDATE_RMS = 0.2
"""Root mean square of an update, about that of AdamW, so that both take similar learning rates and weight decays."""


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates (Jordan et al., 2024), for matrices.

    The update of a matrix is its Nesterov momentum with all singular values replaced by about 1, times 0.2 √(larger
    side). Weight decay is decoupled, as in AdamW.

    Unlike `torch.optim.Muon`, it orthogonalizes matrices that are stacked in one parameter one by one and all matrices
    of one shape together, and takes weights that are sharded by FSDP: each process keeps the momentum of its rows, and
    gathers the matrices of one shape after the other.

    Args:
        params: matrices, or parameter groups of matrices. A group can have `parts`, a sequence for each matrix: the
            heights of the matrices that are stacked in it.
        lr: learning rate.
        momentum: decay rate of the momentum.
        weight_decay: decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.005,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        for name, value in {"lr": lr, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ConfigError(f"{name}: expected a number >= 0, got {value}")
        if not 0 <= momentum < 1:
            raise ConfigError(f"momentum: expected a number from 0 to below 1, got {momentum}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": None})
        for group in self.param_groups:
            for matrix, parts in _matrices(group):
                if matrix.dim() != 2:
                    raise ConfigError(f"params: expected matrices, got shape {list(matrix.shape)}")
                if sum(parts) != matrix.shape[0]:
                    raise ConfigError(f"parts: expected a sum of {matrix.shape[0]}, the rows, got {list(parts)}")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all matrices that have a gradient, and return the loss of `closure`, if it is given."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            equal: dict[Any, list[Tensor]] = {}
            for matrix, parts in _matrices(group):
                if matrix.grad is not None:
                    equal.setdefault((matrix.shape, tuple(parts)), []).append(matrix)
            for (_, parts), matrices in equal.items():
                self._update(group, matrices, parts)
        return loss

    @torch.no_grad()
    def _update(self, group: dict[str, Any], matrices: Sequence[Tensor], parts: Sequence[int]) -> None:
        """Update matrices of one shape."""
        weights = [_local(matrix) for matrix in matrices]
        gradients = [_local(matrix.grad) for matrix in matrices]
        momenta = [_local(self._momentum(matrix)) for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, momenta, group["momentum"])
        whole = torch.stack([_gather(rows, matrix) for rows, matrix in zip(nesterov, matrices, strict=True)])
        pieces = [
            orthogonalize(piece) * (_UPDATE_RMS * math.sqrt(max(piece.shape[1:])))
            for piece in whole.split(list(parts), 1)
        ]
        updates = (torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0]).to(weights[0].dtype).contiguous()
        own = [_own_rows(update, matrix) for update, matrix in zip(updates, matrices, strict=True)]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, own, alpha=-group["lr"])

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of matrices `[number, rows, columns]` by about 1.

    Those above a thousandth of the matrix's norm end between 0.8 and 1.15, smaller ones below. Computed in bfloat16 on
    a GPU. A matrix of zeros stays as it is.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    x = x / norm.clamp(min=1e-20).to(x.dtype)
    for a, b, c in _COEFFICIENTS:
        gram = x @ x.mT
        scaled = torch.baddbmm(gram, gram, gram, beta=b / _MARGIN**3, alpha=c / _MARGIN**5)
        x = torch.baddbmm(x, scaled, x, beta=a / _MARGIN)
    return x.mT if tall else x


def _matrices(group: dict[str, Any]) -> Iterator[tuple[Tensor, Sequence[int]]]:
    """Yield the matrices of a group, each with the heights of its parts."""
    heights = group["parts"] or [matrix.shape[:1] for matrix in group["params"]]
    yield from zip(group["params"], heights, strict=True)


# A weight that is sharded by FSDP is a DTensor, of which each process has some rows.


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _gather(rows: Tensor, like: Tensor) -> Tensor:
    """Return the whole matrix from the rows of every process."""
    if not isinstance(like, DTensor):
        return rows
    sharded = DTensor.from_local(rows, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return sharded.full_tensor()


def _own_rows(whole: Tensor, like: Tensor) -> Tensor:
    """Return the rows of this process."""
    if not isinstance(like, DTensor):
        return whole
    return (
        DTensor.from_local(whole, like.device_mesh, [Replicate()]).redistribute(placements=like.placements).to_local()
    )
