"""The cost of a TCN on this machine: measurements, and a model fitted to a few of them that predicts all others.

The model is a non-negative sum of what the convolutions of a TCN do at one size; see `features`. Its coefficients are
times on this device, so it is fitted for each size, to about two dozen structures. These are kept on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tcnca.bench.case import Workload
from tcnca.bench.timing import Phases, Timer
from tcnca.config import PositiveInt, Range
from tcnca.errors import ConfigError, is_out_of_memory
from tcnca.files import parse_json, to_json
from tcnca.layers import TCNConfig
from tcnca.layers.structure import Structure
from tcnca.ops import cache
from tcnca.training.provenance import hardware, versions

DESIGN_SIZE = 24
"""Structures that the model is fitted to."""
_MAX_ROUNDS = 8
"""Times that a structure is measured."""
_SETTLED = 0.97
"""Factor of all times to which a round must improve one of them for another round to follow."""
_SECONDS = 0.05
"""Time of one measurement, of at least three runs."""
_ROBUST_STEPS, _ROBUST_SCALE = 8, 0.1
"""Refits in which structures with a relative error above the scale count less, as a busy machine delays some."""

Array = NDArray[np.float64]
OnMeasured = Callable[[str, Structure, int, int], None]
"""Called with the purpose of a measurement, the structure, how many are done, and how many there are at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What a TCN is measured on: the input, the device, and everything of the TCN but its structure."""

    length: int
    batch: int = 1
    channels: int = 64
    causal: bool = True
    base: TCNConfig = dataclasses.field(default_factory=TCNConfig)
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    """Dtype of the computation: that of autocast unless it is float32."""

    def facts(self) -> dict[str, Any]:
        """Return the size as JSON values."""
        names = [field.name for field in dataclasses.fields(Structure)]
        base = {name: value for name, value in self.base.to_dict().items() if name not in names}
        fields = {name: getattr(self, name) for name in ("length", "batch", "channels", "causal")}
        return {**fields, "base": base, "device": self.device.type, "dtype": str(self.dtype).removeprefix("torch.")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a structure costs: seconds of a forward and backward pass, and the peak memory of these."""

    structure: Structure
    seconds: Annotated[float, Range(1e-12, 1e9)]
    bytes: PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
    """The measurements on disk, with what they were made on."""

    machine: dict[str, Any]
    versions: dict[str, str]
    size: dict[str, Any]
    measurements: list[Measurement]


# Measurements


def workload(size: Size, structure: Structure) -> Workload:
    """Build a TCN and its input, with gradients of the input and of all parameters."""
    x = torch.randn(size.batch, size.length, size.channels, device=size.device, requires_grad=True)
    tcn = structure.config(size.base).build(size.channels, size.causal).to(size.device)
    casts = size.dtype != torch.float32

    def run() -> Tensor:
        with torch.autocast(size.device.type, size.dtype, enabled=casts):
            y: Tensor = tcn(x)
        return y

    return Workload(run, (x, *tcn.parameters()))


def measure_seconds(
    size: Size,
    structures: Sequence[Structure],
    *,
    seconds: float,
    purpose: str = "measuring",
    on_measured: OnMeasured | None = None,
) -> list[float]:
    """Return the time of a forward and backward pass of each structure.

    Every round measures all structures, so that all see the same load of the machine. Other work on it only adds time,
    so the fastest of all rounds is returned, each by its lower quartile. Rounds end when one improves no time by more
    than a few percent.

    Args:
        size: what to measure on.
        structures: what to measure.
        seconds: no round starts after this time, but the first.
        purpose: for `on_measured`.
        on_measured: called before each measurement.
    """
    timer = Timer(size.device, min(_SECONDS, seconds), 3, cpu_time=measures_cpu_time())
    best, end = np.full(len(structures), np.inf), time.monotonic() + seconds
    for index in range(_MAX_ROUNDS):
        before = best.copy()
        for place, structure in enumerate(structures):
            if on_measured is not None:
                on_measured(purpose, structure, index * len(structures) + place, _MAX_ROUNDS * len(structures))
            with _memory_errors(structure):
                (phases,) = workload(size, structure).phases()
                # A GPU takes longer to launch small kernels than to run them, which a model in a graph does not see.
                timings = timer.graph(phases, False) if timer.on_gpu else timer.eager(phases, False)
            best[place] = min(best[place], timings["step"].q1)
            timer.free_memory()
        if time.monotonic() > end or (best >= _SETTLED * before).all():
            break
    return best.tolist()


def measures_cpu_time() -> bool:
    """Return whether times on a CPU are those that the thread computes, which other processes hardly change.

    With several threads, which wait for each other, there is no such time.
    """
    return torch.get_num_threads() == 1


def measure_bytes(size: Size, structure: Structure) -> int:
    """Return the peak memory of a forward and backward pass, above that of the input and the parameters."""
    timer = Timer(size.device, 0.0, 1)
    with _memory_errors(structure):
        (phases,) = workload(size, structure).phases()
        peak = timer.peak_memory(phases, timer.allocated())
        return _peak_on_cpu(phases) if peak is None else peak


def _peak_on_cpu(phases: Phases) -> int:
    """Return the largest sum of what was allocated and freed in a run."""
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for phase in phases.values():
            phase()
    events: Any = profiler.profiler
    found = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
    return int(np.cumsum([0, *changes]).max())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard what the profiler's library prints to the standard error."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def _memory_errors(structure: Structure) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"--batch: not enough memory for {structure}; give a smaller --batch or --channels"
        ) from error


# The model

FEATURES = ("constant", "convolutions", "dilated", "padding", "taps", "rows")


def features(size: Size, structure: Structure) -> Array:
    """Return what the time of a TCN is modeled as a sum of, in passes over the input.

    A convolution of dilation `d` reads the sequence as `d` rows of every `d`-th token, each with zeros before and after
    it. Taps that reach beyond the sequence are left out. The features are sums over the convolutions:

    - `convolutions`: 1, for the passes over the tensor;
    - `dilated`: 1 if the dilation is more than 1, for memory that is not read in order;
    - `padding`: the zeros around the rows, per token;
    - `taps`: the taps that are used;
    - `rows`: the number of rows, per token, for work at the ends of each row.
    """
    found = np.zeros(len(FEATURES))
    found[0] = 1.0
    for block in range(structure.depth):
        taps, dilation = _used_taps(size, structure, block)
        rows = dilation / size.length
        terms = np.array([0.0, 1.0, float(dilation > 1), (taps - 1) * rows, taps, rows])
        found += structure.convolutions * terms
    return found


def memory_features(size: Size, structure: Structure) -> Array:
    """Return what the memory is modeled as a sum of: a constant, the convolutions, and the largest padded input."""
    used = [_used_taps(size, structure, block) for block in range(structure.depth)]
    padding = max((taps - 1) * dilation / size.length for taps, dilation in used)
    return np.array([1.0, structure.depth * structure.convolutions, padding])


def _used_taps(size: Size, structure: Structure, block: int) -> tuple[int, int]:
    """Return the taps of a convolution that connect two tokens of the sequence, and its dilation, 1 for one tap."""
    dilation = structure.dilation_factor**block
    reach = (size.length - 1) // dilation
    future = 0 if size.causal else (structure.kernel_size - 1) // 2
    taps = 1 + min(structure.kernel_size - 1 - future, reach) + min(future, reach)
    return taps, dilation if taps > 1 else 1


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """Return the `x >= 0` that minimizes `‖matrix x - target‖`, by the active-set method of Lawson and Hanson."""
    count = matrix.shape[1]
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(matrix.T @ target).max()))
    for _ in range(10 * count):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[free] = -np.inf
        if gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        while True:
            wanted = np.zeros(count)
            wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = free & (wanted <= 0.0)
            if not negative.any():
                x = wanted
                break
            # Go toward the solution until the first coefficient is zero, and fix it there.
            step = (x[negative] / (x[negative] - wanted[negative])).min()
            x += step * (wanted - x)
            free &= x > 1e-14
            x[~free] = 0.0
    return x


def fit(matrix: Array, costs: Array) -> Array:
    """Return the non-negative coefficients of features with the smallest relative errors, robust to outliers."""
    scale = np.where((top := matrix.max(0)) > 0.0, top, 1.0) / costs.mean()
    relative = matrix / scale / costs[:, None]
    weights = np.ones(len(costs))
    for _ in range(_ROBUST_STEPS):
        coefficients = nonnegative_least_squares(relative * weights[:, None], weights)
        errors = np.abs(relative @ coefficients - 1.0)
        weights = np.sqrt(np.minimum(1.0, _ROBUST_SCALE / np.maximum(errors, 1e-12)))
    return coefficients / scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Predicts the cost of structures at one size."""

    size: Size
    time: Array
    """Seconds for one unit of each of `FEATURES`."""
    memory: Array
    """Bytes for one unit of each of `memory_features`."""
    measured: dict[Structure, float]
    """Seconds of the structures that it was fitted to."""

    @classmethod
    def fitted(cls, size: Size, measurements: Sequence[Measurement]) -> CostModel:
        """Fit a model to the measurements of some structures."""
        structures = [each.structure for each in measurements]
        seconds, peaks = (np.array([getattr(each, name) for each in measurements]) for name in ("seconds", "bytes"))
        time = fit(np.array([features(size, each) for each in structures]), seconds)
        memory = fit(np.array([memory_features(size, each) for each in structures]), peaks)
        measured = dict(zip(structures, seconds.tolist(), strict=True))
        return cls(size=size, time=time, memory=memory, measured=measured)

    def seconds(self, structure: Structure) -> float:
        """Return the predicted time of a forward and backward pass."""
        return float(features(self.size, structure) @ self.time)

    def bytes(self, structure: Structure) -> int:
        """Return the predicted peak memory."""
        return round(float(memory_features(self.size, structure) @ self.memory))


def design(size: Size, structures: Sequence[Structure], count: int = DESIGN_SIZE) -> list[Structure]:
    """Return some structures that differ most in their features: each is the farthest from those before it."""
    values = np.log1p(np.array([features(size, structure) for structure in structures])[:, 1:])
    spread = values.std(0)
    values = values / np.where(spread > 0.0, spread, 1.0)
    chosen = [int(np.square(values - np.median(values, axis=0)).sum(1).argmin())]
    distance = np.full(len(structures), np.inf)
    while len(chosen) < min(count, len(structures)):
        distance = np.minimum(distance, np.square(values - values[chosen[-1]]).sum(1))
        distance[chosen] = -1.0
        chosen.append(int(distance.argmax()))
    return [structures[index] for index in chosen]


def load_or_fit(
    size: Size,
    structures: Sequence[Structure],
    *,
    seconds: float,
    refit: bool = False,
    on_measured: OnMeasured | None = None,
) -> tuple[CostModel, bool]:
    """Return a cost model and whether it was on disk; otherwise measure some of the structures.

    Args:
        size: what to measure on.
        structures: what can be measured.
        seconds: time to measure for; more if one round takes longer.
        refit: whether to measure again what is on disk.
        on_measured: called before each measurement.
    """
    chosen = design(size, structures)
    facts = {"machine": hardware(size.device), "versions": versions(), "size": size.facts()}
    key = hashlib.sha256(to_json([facts, [dataclasses.asdict(each) for each in chosen]]).encode()).hexdigest()
    path = cache.cache_folder() / "search" / f"{key[:32]}.json"
    if not refit and (known := cache.load(path)) is not None:
        with contextlib.suppress(ConfigError):
            stored: _Stored = parse_json(known, _Stored)
            return CostModel.fitted(size, stored.measurements), True
    purpose = "fitting the cost model"
    times = measure_seconds(size, chosen, seconds=seconds, purpose=purpose, on_measured=on_measured)
    measured = [
        Measurement(structure=structure, seconds=spent, bytes=measure_bytes(size, structure))
        for structure, spent in zip(chosen, times, strict=True)
    ]
    stored = _Stored(**facts, measurements=measured)
    cache.store(path, to_json(dataclasses.asdict(stored), indent=1).encode())
    return CostModel.fitted(size, measured), False
