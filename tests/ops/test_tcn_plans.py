"""Which of the TCN's kernels run a call, with which arguments, and how they cut time."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tcnca.errors import KernelError
from tcnca.ops.tcn.cuda import compiled, plan, tiles, wholes
from tcnca.ops.tcn.cuda.source import Block


class _Kernel:
    """Stands in for a compiled kernel, and remembers what is made ready."""

    slots = 264

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: list[tuple[Any, ...]] = []

    def prepare(self, *arguments: Any, memory: int = 0) -> str:
        self.ready.append((*arguments, memory))
        return self.name


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_Kernel]]:
    """The kernels that plans ask for, on a chip that can do anything."""
    found: list[_Kernel] = []

    def load(layout: Any, block: Block, name: str, *_: int) -> _Kernel:
        found.append(_Kernel(name))
        return found[-1]

    monkeypatch.setattr(compiled, "load", load)
    monkeypatch.setattr(compiled, "most_memory", lambda device: 232448)
    monkeypatch.setattr(wholes, "clusters", lambda device: True)
    plans = (plan.forward_plan, plan.backward_plan, plan.recomputes)
    for kept in plans:
        kept.cache_clear()
    yield found
    for kept in plans:
        kept.cache_clear()


def _lies(*shape: int, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> plan.Lies:
    size = torch.Size(shape)
    return size, (shape[1] * shape[2], shape[2], 1), dtype, offset, 0


@pytest.mark.parametrize(
    ("x", "kernel_size", "forward", "backward"),
    [
        (_lies(1, 8192, 64), 17, "whole", "whole"),
        (_lies(1, 20000, 64), 17, "whole", "tile"),
        (_lies(1, 131072, 64), 17, "tile", "tile"),
        (_lies(8, 8192, 64), 17, "tile", "tile"),
        (_lies(1, 8192, 64, dtype=torch.float32), 17, "whole", "whole"),
        (_lies(8, 8192, 64, dtype=torch.float32), 17, "ring", "ring"),
        (_lies(8, 100, 64), 33, "tile", "ring"),
        (_lies(8, 100, 64), 64, "ring", "ring"),
        (_lies(1, 8192, 64, offset=2), 17, "ring", "ring"),
        (_lies(1, 100, 63), 5, "ring", "ring"),
    ],
)
def test_plans_take_thekernels_that_can_run(
    x: plan.Lies, kernel_size: int, forward: str, backward: str, kernels: list[_Kernel]
) -> None:
    rest = ((4, 1, x[0][2], kernel_size), True, False, (1, 8, "silu", True, True, 0.1))
    for keep in (False, True):
        plan.forward_plan(x, *rest, keep)
        assert {kernel.name for kernel in kernels} == {f"{forward}_forward"}
        kernels.clear()
    plan.backward_plan(x, x, *rest)
    assert {kernel.name for kernel in kernels} - {"add_up"} == {f"{backward}_backward"}
    assert plan.recomputes(x, *rest) == (backward == "whole")


def test_plans_are_made_once(kernels: list[_Kernel]) -> None:
    rest = ((4, 64, 17), False, False, (1, 8, "silu", True, True, 0.0))
    first = plan.forward_plan(_lies(8, 512, 64), *rest, False)
    assert plan.forward_plan(_lies(8, 512, 64), *rest, False) is first
    assert len(kernels) == 1
    assert plan.forward_plan(_lies(8, 513, 64), *rest, False) is not first


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_dropout_keeps_the_mean(dropout: float) -> None:
    settings = (1, 8, "silu", True, True, dropout)
    dropped, scale = plan._call(_lies(1, 8, 8), (1, 8, 3), False, False, settings, False).dropping
    assert abs(dropped / 65536 - dropout) < 1e-5
    assert scale * (65536 - dropped) / 65536 == (0.0 if dropout == 1.0 else pytest.approx(1.0))


def test_launches_hand_over_addresses_and_then_the_rest() -> None:
    seen: list[tuple[Any, ...]] = []

    def start(*arguments: Any) -> tuple[int]:
        *fixed, stream, parameters = arguments
        (argument,) = struct.unpack("q", ctypes.string_at(parameters, 8))
        seen.append((*fixed, stream, *struct.unpack("qqqqd", ctypes.string_at(argument, 40))))
        return (0,)

    launch = compiled.Launch(start, ("kernel", 3), 2, compiled.packed(5, -6, 0.25), ())
    launch.start(77, 1 << 40, 12)
    launch.start(78, 13, 14)
    assert seen == [("kernel", 3, 77, 1 << 40, 12, 5, -6, 0.25), ("kernel", 3, 78, 13, 14, 5, -6, 0.25)]


def test_launches_that_fail_say_so() -> None:
    launch = compiled.Launch(lambda *_: (700,), (), 1, b"", ())
    with pytest.raises(KernelError, match=r"failed with 700.*TCNCA_KERNELS=plain"):
        launch.start(0, 1)


@pytest.mark.parametrize("time", [1, 7, 8, 129, 8192])
@pytest.mark.parametrize("dilation", [1, 3, 20, 8000])
def test_cuts_cover_all_of_time(time: int, dilation: int) -> None:
    step = min(dilation, time)
    steps = tiles.tile_steps(time, step, 1, 264, 2)
    assert steps % 8 == 0
    chains = step * math.ceil(math.ceil(time / step) / steps)  # (segment, phase) pairs, 16 to a tile
    assert 16 * tiles.tiles_in_row(time, step, steps) >= chains
    assert chains * steps >= time
