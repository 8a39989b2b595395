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
_TINY = 1e-30
"""Keeps rows of zeros finite: far below the square of any other row, and in the range of float32."""


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
        beta2: decay rate of a running mean of the squares of each row of the updates, by whose root the row is divided
            (NorMuon, Li et al., 2025); the norm of the update stays. None for updates as they are.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.005,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        beta2: float | None = None,
    ) -> None:
        for name, value in {"lr": lr, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ConfigError(f"{name}: expected a number >= 0, got {value}")
        for name, rate in {"momentum": momentum, "beta2": beta2 or 0.0}.items():
            if not 0 <= rate < 1:
                raise ConfigError(f"{name}: expected a number from 0 to below 1, got {rate}")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "beta2": beta2, "parts": None}
        super().__init__(params, defaults)
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
            together: dict[Any, list[tuple[Tensor, list[int]]]] = {}
            for matrix, parts in _matrices(group):
                if matrix.grad is not None:
                    # Sharded matrices are gathered shape by shape, to save memory.
                    kind = (matrix.shape, tuple(parts)) if isinstance(matrix, DTensor) else None
                    together.setdefault(kind, []).append((matrix, list(parts)))
            for found in together.values():
                self._update(group, [matrix for matrix, _ in found], [parts for _, parts in found])
        return loss

    @torch.no_grad()
    def _update(self, group: dict[str, Any], matrices: list[Tensor], parts: list[list[int]]) -> None:
        gradients = [_local(matrix.grad) for matrix in matrices]
        momenta = [_local(self._state("momentum", matrix, matrix.dtype)) for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, momenta, group["momentum"])
        whole = [_gather(rows, matrix) for rows, matrix in zip(nesterov, matrices, strict=True)]
        updates = self._orthogonal_updates(group, matrices, parts, whole)
        weights, changes = list[Tensor](), list[Tensor]()
        for matrix, heights in zip(matrices, parts, strict=True):
            pieces = [next(updates) for _ in heights]
            sharded = isinstance(matrix, DTensor)
            weights += [_local(matrix)] if sharded else matrix.split(heights)
            changes += [_own_rows(torch.cat(pieces), matrix)] if sharded else pieces
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, changes, alpha=-group["lr"])

    def _orthogonal_updates(
        self, group: dict[str, Any], matrices: list[Tensor], parts: list[list[int]], whole: list[Tensor]
    ) -> Iterator[Tensor]:
        """Return the update of every part. Parts of one shape are computed together: few large products are faster."""
        pieces = [piece for matrix, heights in zip(whole, parts, strict=True) for piece in matrix.split(heights)]
        updates = list(pieces)
        squares = list[Tensor]()
        if group["beta2"] is not None:
            precise = torch.promote_types(whole[0].dtype, torch.float32)
            states = [self._state("mean_square", matrix, precise, columns=1) for matrix in matrices]
            gathered = [_gather(_local(state), state) for state in states]
            squares = [each for state, heights in zip(gathered, parts, strict=True) for each in state.split(heights)]
        for shape in dict.fromkeys(piece.shape for piece in pieces):
            equal = [index for index, piece in enumerate(pieces) if piece.shape == shape]
            x = pieces[0].new_empty(len(equal), *shape, dtype=torch.bfloat16 if pieces[0].is_cuda else None)
            torch._foreach_copy_(list(x), [pieces[index] for index in equal])
            x = orthogonalize(x)
            factor = pieces[0].new_full((1, 1, 1), _UPDATE_RMS * math.sqrt(max(shape)))
            if squares:
                rows = [squares[index] for index in equal]
                mean_square, scale = _row_scale(x, torch.stack(rows), group["beta2"])
                torch._foreach_copy_(rows, list(mean_square))
                factor = factor * scale
            for index, update in zip(equal, x * factor, strict=True):
                updates[index] = update
        if squares:
            for state, rows_of_all in zip(states, gathered, strict=True):
                if isinstance(state, DTensor):
                    _local(state).copy_(_own_rows(rows_of_all, state))
        return iter(updates)

    def _state(self, name: str, matrix: Tensor, dtype: torch.dtype, columns: int | None = None) -> Tensor:
        """Return a state of a matrix, zeros at first; `load_state_dict` casts states to the dtype of the matrix."""
        state = self.state[matrix]
        if name not in state:
            state[name] = torch.zeros_like(matrix[:, :columns], dtype=dtype)
        elif state[name].dtype != dtype:
            state[name] = state[name].to(dtype)
        found: Tensor = state[name]
        return found


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of matrices `[number, rows, columns]` by about 1.

    Those above a thousandth of the matrix's norm end between 0.8 and 1.15, smaller ones below. Computed in bfloat16 on
    a GPU. A matrix of zeros stays as it is.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    precise = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=precise)
    x = x / norm.clamp(min=1e-20).to(x.dtype)
    for a, b, c in _COEFFICIENTS:
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b / _MARGIN**3, alpha=c / _MARGIN**5)
        polynomial.diagonal(dim1=1, dim2=2).add_(a / _MARGIN)
        x = x @ polynomial if tall else polynomial @ x
    return x


def _row_scale(x: Tensor, mean_square: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """Return the new mean squares of the rows of `x`, and factors by which they become equal at the same norm."""
    square = torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=mean_square.dtype).square() / x.shape[2]
    mean_square = mean_square.lerp(square, 1 - beta2)
    scale = (mean_square + _TINY).rsqrt()
    norm = square.sum(1, keepdim=True) / (scale.square() * square).sum(1, keepdim=True).clamp(min=_TINY)
    return mean_square, scale * norm.sqrt()


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
