"""Context parallelism: one sequence over the processes of a group, each of which holds an equal part of the time axis.

`ContextParallel` is the one object that operators, layers and models ask. What depends on other tokens does one of
three things with it:

- a window of inputs, such as a convolution, reads the neighbors' tokens that it needs (`extend`, `fetch`);
- a recurrence starts from the state that the tokens before the part leave, computed from the states that all parts
  leave by themselves (`state_before`);
- a sum, such as a mean over time, is added up over the processes (`sum`).

All of these are functions whose gradients are exchanged as well. As with DDP, what is differentiated is the sum, or the
mean, of the losses of all processes; the sum over the processes of the gradients of a parameter is its gradient.
Processes must make the same calls in the same order, in the backward pass too, which they do if they run one model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from tcnca.errors import ConfigError, InputError
from tcnca.ops.checks import check_values
from tcnca.ops.state import State

AnyState = TypeVar("AnyState", bound=State)
AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])

_current: ContextParallel | None = None
"""The context of the calls. Not a variable of one thread: PyTorch runs the backward pass, where activation
checkpointing recomputes layers, in threads of its own."""


def current_context() -> ContextParallel | None:
    """Return the context in which a model runs; None if every process holds whole sequences."""
    return _current


def not_compiled(function: AnyCallable) -> AnyCallable:
    """Exclude a function that exchanges tensors from compiled graphs; what is before and after it is compiled."""
    # `torch.compiler.disable` does the same, but imports the compiler at once, which takes seconds.
    return cast(AnyCallable, _disable_dynamo(function))


class ContextParallel:
    """A context in which models read sequences that are divided over processes, equal parts in the order of the ranks.

    `with ContextParallel(mesh): model(x)` computes what one process computes from the whole sequence: `x` is this
    process's part of the time axis, `[batch, time / processes, …]`, and so are the logits at every time. Pooled outputs
    and states are those of the whole sequence, on every process. Run the backward pass inside the context as well if
    activations are recomputed in it.

    Args:
        mesh: a device mesh of one dimension, or with one that is called `context`; or a process group.
    """

    def __init__(self, mesh: DeviceMesh | dist.ProcessGroup) -> None:
        if isinstance(mesh, DeviceMesh):
            names = mesh.mesh_dim_names or ()
            if mesh.ndim > 1 and "context" not in names:
                raise ConfigError(
                    f"mesh: expected one dimension, or one called 'context', got {mesh.ndim} called {names}; use "
                    "init_device_mesh(…, mesh_dim_names=('data', 'context'))"
                )
            self.group = mesh.get_group("context" if mesh.ndim > 1 else 0)
        elif isinstance(mesh, dist.ProcessGroup):
            self.group = mesh
        else:
            raise ConfigError(f"mesh: expected a DeviceMesh or a ProcessGroup, got a {type(mesh).__name__}")
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._outer: list[ContextParallel | None] = []
        self._whole: tuple[Tensor, Tensor] | None = None

    def __enter__(self) -> Self:
        global _current
        self._outer.append(_current)
        _current = self
        return self

    def __exit__(self, *error: object) -> None:
        global _current
        _current = self._outer.pop()
        self._whole = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Run calls on what this process holds alone."""
        global _current
        outer, _current = _current, None
        try:
            yield
        finally:
            _current = outer

    # For users: from whole sequences to parts, and back.

    def shard(self, x: Tensor) -> Tensor:
        """Return this process's part of `x` (`[batch, time, …]`), which every process has as a whole."""
        if x.shape[1] % self.size:
            raise InputError(
                f"x: expected a multiple of {self.size} tokens, the processes of the context, got {x.shape[1]}; "
                "pad the rows at the right, and pass their lengths"
            )
        return x.chunk(self.size, 1)[self.rank]

    def unshard(self, x: Tensor) -> Tensor:
        """Return the whole of `x`, of which this process has the part `[batch, time, …]`."""
        return self.fetch(x, [(0, self.size * x.shape[1])] * self.size)[0]

    # Lengths. Layers take those of their part, models those of whole rows.

    def local_lengths(self, lengths: Tensor, time: int) -> Tensor:
        """Return how many of the `time` tokens of this part are valid (`[batch]`), of rows of `lengths`."""
        return (lengths - self.rank * time).clamp(0, time)

    def whole_lengths(self, lengths: Tensor) -> Tensor:
        """Return the lengths of whole rows, of those of this part (`[batch]`).

        They are exchanged once for each tensor, which must not be changed in place inside the context.
        """
        if self._whole is None or self._whole[0] is not lengths:
            # All layers of a model are given the same tensor.
            whole = lengths.to(torch.long, copy=True)
            dist.all_reduce(whole, group=self.group)
            self._whole = lengths, whole
        return self._whole[1]

    def extended_lengths(self, lengths: Tensor | None, time: int, left: int, size: int) -> Tensor | None:
        """Return the valid tokens of parts that are extended to `size` tokens, `left` of them before the part."""
        if lengths is None:
            return None
        return (self.whole_lengths(lengths) - (self.rank * time - left)).clamp(0, size)

    def check_time(self, time: int, device: torch.device) -> None:
        """Raise an InputError unless the parts of all processes have `time` tokens."""
        bounds = torch.tensor([time, -time], device=device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self.group)
        check_values(
            bounds == time * torch.tensor([1, -1], device=device),
            "x: expected as many tokens in all processes of the context",
            bounds,
        )

    # Exchanges.

    def extend(self, x: Tensor, past: int, future: int = 0) -> tuple[Tensor, int]:
        """Return `x` (`[batch, time, …]`) with up to `past` tokens before and `future` tokens after it.

        Also returns how many are before it: fewer at the start of the sequence.
        """
        time = x.shape[1]
        return self.fetch(x, [(rank * time - past, (rank + 1) * time + future) for rank in range(self.size)])

    @not_compiled
    def fetch(self, x: Tensor, windows: Sequence[tuple[int, int]]) -> tuple[Tensor, int]:
        """Return the tokens from `begin` to `end` of the whole sequence, which contain those of `x`.

        `windows` has `begin` and `end` for each process, and is cropped to the sequence. Also returns how many tokens
        are before those of `x`. All tokens that neighbors need travel in one exchange.
        """
        time = x.shape[1]
        total = self.size * time
        windows = [(max(begin, 0), min(end, total)) for begin, end in windows]
        if self.aligned(windows, time):
            return x, 0
        start = self.rank * time

        def overlap(window: tuple[int, int], rank: int) -> tuple[int, int]:
            begin, end = max(window[0], rank * time), min(window[1], (rank + 1) * time)
            return begin, max(begin, end)

        others = [rank != self.rank for rank in range(self.size)]
        sent = [
            overlap(window, self.rank) if other else (start, start)
            for window, other in zip(windows, others, strict=True)
        ]
        received = [overlap(windows[self.rank], rank) if other else (0, 0) for rank, other in enumerate(others)]
        rows = x.transpose(0, 1)
        outgoing = torch.cat([rows[begin - start : end - start] for begin, end in sent])
        counts = [[end - begin for begin, end in parts] for parts in (sent, received)]
        incoming = _Exchange.apply(outgoing, counts[0], counts[1], self.group)
        left = start - windows[self.rank][0]
        before, after = (part.transpose(0, 1) for part in (incoming[:left], incoming[left:]))
        return torch.cat([before, x, after], 1), left

    def aligned(self, windows: Sequence[tuple[int, int]], time: int) -> bool:
        """Return whether the windows of all processes are what they have, so that nothing has to be exchanged."""
        return all(window == (rank * time, (rank + 1) * time) for rank, window in enumerate(windows))

    def previous(self, x: Tensor, first: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Return the token before those of `x` (`[batch, time, …]`), or `first` at the start, and `x`."""
        extended, left = self.extend(x, 1)
        # Always what came from the exchange, so that every process runs its backward pass.
        return (extended[:, 0], extended[:, 1:]) if left else (first, extended)

    def route(self, x: Tensor, source: Tensor) -> Tensor:
        """Return rows of other processes' `x` (`[rows, …]`), which all have as many: `[slots, …]`.

        Args:
            x: rows of this process.
            source: `[processes, slots]` on the CPU, for the slots of every process the row that belongs there, counted
                through all processes, or -1 for zeros.
        """
        owner = torch.where(source < 0, -1, source // max(len(x), 1))
        sent = [source[rank][owner[rank] == self.rank] - self.rank * len(x) for rank in range(self.size)]
        slots = [(owner[self.rank] == rank).nonzero()[:, 0] for rank in range(self.size)]
        outgoing = x[torch.cat(sent).to(x.device)]
        incoming = _Exchange.apply(outgoing, [len(each) for each in sent], [len(each) for each in slots], self.group)
        out = x.new_zeros(source.shape[1], *x.shape[1:])
        return out.index_copy(0, torch.cat(slots).to(x.device), incoming)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the processes."""
        return sum_over_processes(x, self.group)

    def pick(self, x: Tensor, owner: Tensor) -> Tensor:
        """Return for each row of `x` (`[batch, …]`) that of the process `owner` (`[batch]`)."""
        mine = (owner == self.rank).view(-1, *[1] * (x.dim() - 1))
        return self.sum(torch.where(mine, x, torch.zeros_like(x)))

    def last_rank(self, lengths: Tensor | None, like: Tensor, time: int) -> Tensor:
        """Return the process that has the last valid token of each row of `like`, `[batch]`; `lengths` are of parts."""
        if lengths is None:
            return torch.full((like.shape[0],), self.size - 1, device=like.device)
        return (self.whole_lengths(lengths) - 1).clamp(min=0) // time

    def final_state(self, state: AnyState, lengths: Tensor | None, time: int) -> AnyState:
        """Return the state after whole rows, given that after the `time` tokens of each part."""
        tensors = state.tensors()
        if not tensors:
            return state
        owner = self.last_rank(lengths, next(iter(tensors.values())), time)
        return state.map(lambda tensor: self.pick(tensor, owner))

    def state_before(
        self,
        end: Tensor,
        first: Tensor | None,
        decay: Callable[[Tensor], Tensor],
        time: int,
        lengths: Tensor | None,
        reverse: bool = False,
    ) -> Tensor:
        """Return the hidden states of a linear recurrence before this part, `[batch, …]`.

        Args:
            end: `[batch, …]`, the hidden states after this part if those before it are zero.
            first: `[batch, …]`, the hidden states before the sequence; None for zeros.
            decay: returns the factors by which hidden states have decayed after numbers of steps: of `[any]`,
                `[any, …]`.
            time: number of tokens of the part.
            lengths: `[batch]`, valid tokens of the part.
            reverse: whether the recurrence runs from the last token to the first. Without `lengths`: padding is zeros.
        """
        rank = self.size - 1 - self.rank if reverse else self.rank
        ends = _Gather.apply(end.unsqueeze(0), self.rank, self.size, self.group)
        ends = ends.flip(0)[:rank] if reverse else ends[:rank]
        begin = torch.tensor(rank * time, device=end.device)
        if lengths is not None and not reverse:
            begin = torch.minimum(self.whole_lengths(lengths), begin)
        begin = begin.expand(end.shape[0])
        after = (torch.arange(rank, device=end.device) + 1).unsqueeze(1) * time
        steps = (begin - after).clamp(min=0)
        # The sum over no parts is zero, and part of the graph of the first process, which has to run the backward
        # pass of the exchange.
        hidden = (decay(steps.flatten()).unflatten(0, (rank, end.shape[0])) * ends).sum(0)
        return hidden if first is None else hidden + decay(begin) * first


def continued(state: AnyState, before: AnyState, steps: int) -> AnyState:
    """Return `state` with the position of `before`, `steps` later, if states of this kind have one."""
    position = getattr(before, "position", None)
    return state if position is None else dataclasses.replace(state, position=position + steps)  # type: ignore[call-arg]


def sum_over_processes(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum over the processes of a group, by default of all; its gradient is the sum of the gradients."""
    return _Sum.apply(x, group)


class _Sum(torch.autograd.Function):
    """Sum over processes; the gradient is the sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(gradients[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """Concatenate the tensors of all processes; the gradient of one is the sum of what all processes have for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.group = rank, group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Sum.apply(gradients[0], ctx.group)[ctx.rank : ctx.rank + 1], None, None, None


class _Exchange(torch.autograd.Function):
    """Send rows to all processes and receive rows of them; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None
