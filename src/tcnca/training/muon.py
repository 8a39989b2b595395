"""Muon: momentum whose update of every matrix is orthogonalized, for the hidden matrices of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

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
    side). Weight decay is decoupled, as in AdamW. With FSDP each process keeps the momentum of its rows, and gathers
    all rows to orthogonalize them.

    Args:
        params: matrices, or parameter groups of matrices. A group can have `parts`, a sequence for each matrix: the
            heights of the matrices that are stacked in it, and are orthogonalized one by one.
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
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": None})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        for group in self.param_groups:
            heights = group["parts"] or [parameter.shape[:1] for parameter in group["params"]]
            found = [
                (each, parts) for each, parts in zip(group["params"], heights, strict=True) if each.grad is not None
            ]
            if not found:
                continue
            matrices, parts = zip(*found, strict=True)
            weights = [_local(matrix) for matrix in matrices]
            gradients = [_local(matrix.grad) for matrix in matrices]
            momenta = [_local(self._momentum(matrix)) for matrix in matrices]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            nesterov = torch._foreach_lerp(gradients, momenta, group["momentum"])
            whole = [_gather(rows, matrix) for rows, matrix in zip(nesterov, matrices, strict=True)]
            updates = [
                _own_rows(update, matrix)
                for update, matrix in zip(_orthogonal_updates(whole, parts), matrices, strict=True)
            ]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of matrices `[number, rows, columns]` by about 1, from 0.7 to 1.2.

    Computed in bfloat16 on a GPU. A matrix of zeros stays as it is.
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


def _orthogonal_updates(matrices: Sequence[Tensor], parts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the updates of matrices from their momenta; parts of equal shape are orthogonalized together."""
    pieces = [piece for matrix, heights in zip(matrices, parts, strict=True) for piece in matrix.split(list(heights))]
    updates = list(pieces)
    for shape in dict.fromkeys(piece.shape for piece in pieces):
        equal = [index for index, piece in enumerate(pieces) if piece.shape == shape]
        batch = orthogonalize(torch.stack([pieces[index] for index in equal]))
        batch = (batch * (_UPDATE_RMS * math.sqrt(max(shape)))).to(matrices[0].dtype).contiguous()
        for index, update in zip(equal, batch, strict=True):
            updates[index] = update
    rest = iter(updates)
    return [
        torch.cat(found) if len(found) > 1 else found[0]
        for found in ([next(rest) for _ in heights] for heights in parts)
    ]


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
