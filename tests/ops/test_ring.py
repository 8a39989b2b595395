"""Ring buffers: rows at one position and at different ones, with and without memory of their own."""

from __future__ import annotations

import pytest
import torch

from tcnca.ops.ring import extend_ring, push_ring, read_ring, unroll_ring

SIZE = 5


def pushed(
    inputs: torch.Tensor, position: list[int], times: list[int], inplace: bool
) -> tuple[torch.Tensor, list[int]]:
    """Return the ring of each row after calls of `times` inputs, of which rows count from `position`."""
    buffer, seen = torch.zeros(len(position), SIZE, inputs.shape[2]), torch.tensor(position)
    begin = 0
    for time in times:
        before = buffer.clone()
        new = push_ring(buffer, seen, inputs[:, begin : begin + time], None, inplace)
        assert inplace or torch.equal(buffer, before)
        buffer, seen, begin = new, seen + time, begin + time
    return buffer, seen.tolist()


@pytest.mark.parametrize("inplace", [False, True], ids=["new", "in place"])
@pytest.mark.parametrize("times", [[3], [5], [7], [2, 2, 2], [4, 4, 1], [12, 3], [1] * 8], ids=str)
@pytest.mark.parametrize("position", [[0, 0], [3, 3], [0, 4], [11, 7]], ids=str)
def test_a_ring_holds_the_last_inputs(position: list[int], times: list[int], inplace: bool) -> None:
    inputs = torch.randn(2, sum(times), 3)
    buffer, seen = pushed(inputs, position, times, inplace)
    expected = torch.cat([torch.zeros(2, SIZE, 3), inputs], 1)[:, -SIZE:]
    assert torch.equal(unroll_ring(buffer, torch.tensor(seen)), expected)
    following = torch.randn(2, 2, 3)
    extended = extend_ring(buffer, torch.tensor(seen), following)
    assert torch.equal(extended, torch.cat([expected, following], 1))
    assert torch.equal(read_ring(buffer, torch.tensor(seen), torch.tensor([1, 3])), expected[:, [-1, -3]])


@pytest.mark.parametrize("position", [[0, 0], [2, 4]], ids=["one position", "two positions"])
@pytest.mark.parametrize("time", [2, 9])
def test_gradients_reach_inputs_and_buffer(position: list[int], time: int) -> None:
    buffer, x = torch.randn(2, SIZE, 2, dtype=torch.float64), torch.randn(2, time, 2, dtype=torch.float64)
    seen = torch.tensor(position)
    inputs = (buffer.requires_grad_(), x.requires_grad_())
    assert torch.autograd.gradcheck(lambda buffer, x: push_ring(buffer, seen, x, None), inputs)
    assert torch.autograd.gradcheck(lambda buffer: unroll_ring(buffer, seen), inputs[:1])
    assert torch.autograd.gradcheck(lambda buffer, x: extend_ring(buffer, seen, x), inputs)
