"""What every operator promises, stated once: each test file brings its operator and the shapes to try it with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from tcnca.ops import EMABackend, SSMBackend, State
from tests.comparison import TOLERANCE, assert_close

Operator = Callable[..., tuple[Tensor, State | None]]

# Backends in PyTorch's own operators, which run anywhere.
PYTORCH_EMA: tuple[EMABackend, ...] = ("chunked", "fft", "recurrent", "scan")
PYTORCH_SSM: tuple[SSMBackend, ...] = ("chunked", "fft", "recurrent")

# Tokens in successive calls of one sequence: no multiples of anything, and single tokens among them.
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=6)
# Columns that are padding in every row.
EXTRA = st.integers(0, 2)

# Three rows that wait for each other in calls of one token and of several.
WAITING = [[3, 5, 0], [0, 1, 0], [1, 0, 1], [0, 6, 2], [0, 0, 0], [1, 1, 0], [1, 1, 1]]

# Rounding errors, relative to the largest gradient, that may remain of a gradient that is zero in theory.
ROUNDING_ERRORS = 64

# For properties where a fault may hide in a rare combination of shapes.
THOROUGH = settings(max_examples=50)


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator bound to its parameters, and inputs `[batch, time, channels]` for it; all of them leaves."""

    operator: Operator
    inputs: tuple[Tensor, ...]
    parameters: dict[str, Tensor]

    def leaves(self, inputs: Sequence[Tensor] | None = None) -> dict[str, Tensor]:
        return {f"input {i}": part for i, part in enumerate(inputs or self.inputs)} | self.parameters


def leaf(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal values in float64 that gradients can be taken for."""
    return (torch.randn(shape, dtype=torch.float64) * scale).requires_grad_()


def counts(batch: int) -> st.SearchStrategy[list[list[int]]]:
    """How many tokens each row of a batch gets in successive calls, at least one token in all."""
    # Calls of one token at most are a path of their own in most operators.
    call = st.sampled_from([1, 6]).flatmap(lambda most: st.lists(st.integers(0, most), min_size=batch, max_size=batch))
    return st.lists(call, min_size=1, max_size=5).filter(lambda calls: any(map(any, calls)))


def some_lengths(batch: int, time: int) -> st.SearchStrategy[list[int]]:
    """Valid tokens in each row of `time` tokens, none in some, but not in all."""
    return st.lists(st.integers(0, time), min_size=batch, max_size=batch).filter(any)


def gradients(y: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a weighted sum of `y`; the weights are the same for every `y` of one shape."""
    weights = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((y * weights).sum(), list(leaves.values()), allow_unused=True, retain_graph=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(value) if got is None else got for (name, value), got in pairs}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    largest = max(largest_value(value) for value in expected.values())
    for name, value in expected.items():
        # What is zero in theory, such as the gradient of a query that sees a single key, may be rounding errors.
        rounding = ROUNDING_ERRORS * torch.finfo(value.dtype).eps * largest
        if 0 < largest_value(value) <= rounding:
            found = largest_value(actual[name])
            assert found <= rounding, f"gradient of {name}: expected zeros but for rounding, got up to {found}"
        else:
            assert_close(actual[name], value, f"gradient of {name}")


def largest_value(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def assert_bit_equal(actual: State, expected: State) -> None:
    tensors = expected.tensors()
    assert actual.tensors().keys() == tensors.keys()
    for name, value in actual.tensors().items():
        assert torch.equal(value, tensors[name]), f"state.{name} differs"


def in_pieces(
    operator: Operator, inputs: Sequence[Tensor], sizes: Sequence[int], inplace: bool = False
) -> tuple[Tensor, State]:
    """The outputs of calls of `sizes` tokens each, joined, and the last state."""
    outputs: list[Tensor] = []
    state: State | None = None
    for piece in zip(*(part.split(list(sizes), 1) for part in inputs), strict=True):
        y, state = operator(*piece, state=state, return_state=True, inplace=inplace)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, 1), state


def assert_split_invariant(case: Case, sizes: Sequence[int]) -> None:
    """Many calls give what one call gives, and their gradients are the gradients of one call."""
    whole, nothing = case.operator(*case.inputs)
    assert nothing is None, "a state that nobody asked for"
    split, state = in_pieces(case.operator, case.inputs, sizes)
    assert_close(split.detach(), whole.detach())
    assert state.tensors()["position"].tolist() == [sum(sizes)] * whole.shape[0]
    assert_same_gradients(gradients(split, case.leaves()), gradients(whole, case.leaves()))


@torch.no_grad()
def assert_inplace_changes_nothing(case: Case, sizes: Sequence[int]) -> None:
    plain, plain_state = in_pieces(case.operator, case.inputs, sizes)
    reused, reused_state = in_pieces(case.operator, case.inputs, sizes, inplace=True)
    assert torch.equal(reused, plain)
    assert_bit_equal(reused_state, plain_state)


@torch.no_grad()
def assert_state_left_alone(case: Case, sizes: Sequence[int]) -> None:
    """Without `inplace` a state can be continued again and again; with it, only its own memory is written."""
    state: State | None = None
    for piece in zip(*(part.split(list(sizes), 1) for part in case.inputs), strict=True):
        before = None if state is None else state.clone()
        given = [part.clone() for part in piece]
        _, new = case.operator(*piece, state=state, return_state=True)
        _, other = case.operator(*piece, state=state, return_state=True)
        case.operator(*piece, state=other, return_state=True, inplace=True)
        if state is not None and before is not None:
            assert_bit_equal(state, before)
        assert all(torch.equal(*pair) for pair in zip(piece, given, strict=True)), "an input was written to"
        state = new


@torch.no_grad()
def assert_layout_does_not_matter(case: Case, sizes: Sequence[int]) -> None:
    strided = [part.detach().transpose(0, 2).contiguous().transpose(0, 2) for part in case.inputs]
    assert not any(part.is_contiguous() for part in strided), "the example tests nothing"
    assert_close(case.operator(*strided)[0], case.operator(*case.inputs)[0])
    assert_close(in_pieces(case.operator, strided, sizes)[0], in_pieces(case.operator, case.inputs, sizes)[0])


def assert_causal(case: Case, at: int, exact: bool = True) -> None:
    """New inputs from time `at` on move no earlier output, and no earlier output has a gradient there."""
    y, _ = case.operator(*case.inputs)
    changed = [torch.cat([part[:, :at], torch.randn_like(part[:, at:])], 1) for part in case.inputs]
    moved, _ = case.operator(*changed)
    inputs = {name: value for name, value in case.leaves().items() if name not in case.parameters}
    found = gradients(y[:, :at], inputs).values()
    if exact:
        assert torch.equal(moved[:, :at], y[:, :at])
        assert not any(bool(gradient[:, at:].any()) for gradient in found)
    else:
        assert_close(moved[:, :at].detach(), y[:, :at].detach())
        assert all(float(gradient[:, at:].abs().max()) <= TOLERANCE[y.dtype] for gradient in found)


def alone(case: Case, lengths: Sequence[int]) -> Tensor:
    """The outputs of each row's first tokens, computed without the other rows, end to end in `[tokens, channels]`."""
    rows = [(row, length) for row, length in enumerate(lengths) if length]
    return torch.cat([case.operator(*(part[r : r + 1, :n] for part in case.inputs))[0][0] for r, n in rows])


def assert_padding_ignored(case: Case, lengths: Sequence[int]) -> None:
    """Rows of different lengths, with NaN after their end, give what each gives alone; so do their gradients."""
    padded = [part.detach().clone() for part in case.inputs]
    for part in padded:
        for row, length in enumerate(lengths):
            part[row, length:] = torch.nan
        part.requires_grad_()
    y, _ = case.operator(*padded, lengths=torch.tensor(lengths))
    together = torch.cat([y[row, :length] for row, length in enumerate(lengths)])
    expected = alone(case, lengths)
    assert_close(together.detach(), expected.detach())
    assert_same_gradients(gradients(together, case.leaves(padded)), gradients(expected, case.leaves()))


def assert_padding_gives_no_nan(case: Case, lengths: Sequence[int], streaming: bool) -> None:
    """Nothing is NaN in any output, padding included, nor in the state and the gradients of all of these."""
    y, state = case.operator(*case.inputs, lengths=torch.tensor(lengths), return_state=streaming)
    parts = [y, *(() if state is None else (part for part in state.tensors().values() if part.is_floating_point()))]
    everything = torch.cat([part.flatten() for part in parts])
    assert bool(everything.isfinite().all())
    for name, gradient in gradients(everything, case.leaves()).items():
        assert bool(gradient.isfinite().all()), f"gradient of {name}"


def assert_ragged_stream(case: Case, calls: Sequence[Sequence[int]], extra: int, inplace: bool = False) -> None:
    """Rows that get different numbers of tokens in each call go on as each would alone, whatever is in the padding."""
    seen = [0] * len(calls[0])
    rows: list[list[Tensor]] = [[] for _ in seen]
    state: State | None = None
    for call in calls:
        width = max(*call, 1) + extra
        padded = [_padded_with_nan(part, seen, call, width) for part in case.inputs]
        y, state = case.operator(*padded, lengths=torch.tensor(call), state=state, return_state=True, inplace=inplace)
        for row, count in enumerate(call):
            rows[row].append(y[row, :count])
            seen[row] += count
    assert state is not None
    assert state.tensors()["position"].tolist() == seen
    assert all(bool(part.isfinite().all()) for part in state.tensors().values())
    streamed, expected = torch.cat([part for row in rows for part in row]), alone(case, seen)
    assert_close(streamed.detach(), expected.detach())
    if streamed.requires_grad:
        assert_same_gradients(gradients(streamed, case.leaves()), gradients(expected, case.leaves()))


def _padded_with_nan(part: Tensor, seen: Sequence[int], call: Sequence[int], width: int) -> Tensor:
    rows = [part[row, start : start + count] for row, (start, count) in enumerate(zip(seen, call, strict=True))]
    return torch.stack([F.pad(row, (0, 0, 0, width - row.shape[0]), value=torch.nan) for row in rows])
