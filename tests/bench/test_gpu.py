"""Timing on a GPU: as called, as a graph, and how it is added up. The last needs no GPU, only something like one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tcnca.bench import SUITES, Clock, Floors, entries_of, measure
from tcnca.bench.timing import captured, parts_of
from tests.bench.small import contestant, settings
from tests.bench.test_registry import SMALL

FLOORS = Floors(bandwidth=4e12, rate=7e14, dtype="bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("suite", SUITES)
def test_suite_is_measured_as_called_and_as_a_graph(suite: str) -> None:
    device = torch.device("cuda")
    clock = Clock(device, 0.0, 3)
    for entry in entries_of(suite, settings(**{**SMALL[suite], "channels": 8}, device=device, dtype=torch.bfloat16)):
        result = measure(entry, clock, FLOORS)
        if result.status == "not available":
            assert result.reason
            continue
        assert (result.status, result.reason) == ("timed", ""), entry.name
        for part, ways in result.times.items():
            assert set(ways) == {"eager", "graph"}, (entry.name, part)
            assert all(times.median > 0 for times in ways.values())
        assert result.peak_bytes is not None
        assert result.peak_bytes > 0


@pytest.mark.gpu
def test_graph_computes_what_the_call_computes() -> None:
    device = torch.device("cuda")
    entry = next(entry for entry in entries_of("ops", settings(device=device, lengths=(300,))) if entry.name == "tcn")
    subject = entry.build()
    expected = subject.run().detach().clone()
    kept: list[torch.Tensor] = []

    def forward() -> None:
        kept[:] = [subject.run()]

    replay = captured({"forward": forward})["forward"]
    with torch.no_grad():
        kept[0].fill_(float("nan"))
    replay()
    torch.cuda.synchronize()
    assert torch.equal(kept[0], expected)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_no_trace() -> None:
    x, found = torch.randn(5, device="cuda"), torch.zeros(5, device="cuda")

    def wait() -> None:
        torch.rand(5, device="cuda")
        torch.cuda.synchronize()

    with pytest.raises(RuntimeError):
        captured({"forward": wait})
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    x = torch.rand_like(x)
    replay = captured({"forward": lambda: _do(found.copy_(x + torch.rand_like(x)))})["forward"]
    drawn = []
    for _ in range(2):
        replay()
        drawn.append(found.clone())
    assert not torch.equal(*drawn)
    assert bool((drawn[0] >= x).all())


def _do(_: object) -> None:
    """A part returns nothing."""


class _Machine:
    """Keeps a clock that only moves when something runs, and a diary."""

    def __init__(self) -> None:
        self.now = 0.0
        self.diary: list[str] = []

    def event(self, **_: Any) -> SimpleNamespace:
        made = SimpleNamespace(at=0.0)
        made.record = lambda: setattr(made, "at", self.now)
        made.elapsed_time = lambda other: other.at - made.at
        return made

    def run(self, name: str, milliseconds: float) -> None:
        self.now += milliseconds
        self.diary.append(name)


@contextlib.contextmanager
def _entered(*_: object, **__: object) -> Iterator[None]:
    yield


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    made = _Machine()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: made.diary.append(name))
    return made


def gpu_clock(machine: _Machine) -> Clock:
    clock = Clock(torch.device("cpu"), 0.0, 3)
    clock.device = torch.device("cuda")
    clock._flusher = SimpleNamespace(zero_=lambda: machine.run("flush", 50.0))  # type: ignore[assignment]
    return clock


def test_parts_are_timed_by_themselves_from_cold_caches(machine: _Machine) -> None:
    parts = {"forward": lambda: machine.run("forward", 2.0), "backward": lambda: machine.run("backward", 5.0)}
    found = gpu_clock(machine).eager(parts, isolated=True)
    assert {name: times.median for name, times in found.items()} == {"forward": 2e-3, "backward": 5e-3}
    assert found["forward"].runs == 3
    # After the warm-up: caches overwritten and everything waited for, before each part.
    begin = machine.diary.index("flush")
    assert machine.diary[begin : begin + 6] == ["flush", "synchronize", "forward", "flush", "synchronize", "backward"]


def test_steps_of_training_follow_one_another(machine: _Machine) -> None:
    names = ("forward", "backward", "update")
    parts = {name: lambda name=name: machine.run(name, 1.0) for name in names}
    found = gpu_clock(machine).eager(parts, isolated=False)
    assert found["step"].median == pytest.approx(3e-3)
    assert "flush" not in machine.diary
    last = "".join(name[0] for name in machine.diary[-7:-1])
    assert last == "fbufbu"


def test_graphs_are_replayed_in_their_order(machine: _Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[list[str]] = []

    @contextlib.contextmanager
    def capture(graph: SimpleNamespace, **_: object) -> Iterator[None]:
        before = len(machine.diary)
        yield
        graph.names = machine.diary[before:]
        recorded.append(graph.names)

    def graph() -> SimpleNamespace:
        made = SimpleNamespace(names=[])

        def replay() -> None:
            for name in made.names:
                machine.run(f"replayed {name}", 1.0)

        made.replay = replay
        return made

    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", _entered)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 1)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (SimpleNamespace(clone_state=lambda: None),))
    parts = {"forward": lambda: machine.run("forward", 9.0), "backward": lambda: machine.run("backward", 9.0)}
    found = gpu_clock(machine).graph(parts, isolated=True)
    assert recorded == [["forward"], ["backward"]]
    assert {name: times.median for name, times in found.items()} == {"forward": 1e-3, "backward": 1e-3}
    shown = [name for name in machine.diary if name.startswith("replayed")]
    assert shown == ["replayed forward", "replayed backward"] * 3


def test_graph_that_cannot_be_captured_leaves_the_rest(machine: _Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(parts: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("tcnca.bench.timing.captured", refuse)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 40)
    result = measure(contestant(lambda x: x * x), gpu_clock(machine), FLOORS)
    assert result.status == "timed"
    assert set(result.times["forward"]) == {"eager"}
    assert result.reason == "not captured as a graph: operation not permitted when stream is capturing"
    assert result.peak_bytes == 60


def test_a_failed_capture_gives_back_stream_memory_and_generator(
    machine: _Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def capture(graph: object, **_: object) -> Iterator[None]:
        yield
        raise RuntimeError("capture was invalidated")

    states: list[str] = []
    generator = SimpleNamespace(clone_state=lambda: "what was drawn before", graphsafe_set_state=states.append)
    before = SimpleNamespace(name="the stream before")
    ended: list[tuple[int, int]] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    made: list[object] = []
    for name, value in {
        "Stream": lambda: stream,
        "current_stream": lambda: before,
        "stream": _entered,
        "set_stream": made.append,
        "current_device": lambda: 0,
        "default_generators": (generator,),
        "graph_pool_handle": lambda: 7,
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *which: ended.append(which), raising=False)
    with pytest.raises(RuntimeError, match="invalidated"):
        captured({"forward": lambda: machine.run("forward", 1.0)})
    assert made == [before]
    assert ended == [(0, 7)]
    assert states == ["what was drawn before"]


def test_backward_frees_what_the_forward_pass_kept() -> None:
    """Otherwise memory would grow from run to run."""
    subject = contestant(lambda x: x * x).build()
    (parts,) = parts_of(subject)
    parts["forward"]()
    parts["backward"]()
    with pytest.raises(IndexError):
        parts["backward"]()
