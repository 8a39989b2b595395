"""What was measured, as numbers that can be kept: one JSON file a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tcnca.bench.timing import Times
from tcnca.errors import DataError
from tcnca.training.files import atomic_write, to_json

GRAPH, EAGER = "graph", "eager"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of an entry."""

    suite: str
    """Of which benchmark it is."""
    name: str
    """Of the contestant."""
    label: str
    """Its name for people."""
    about: str
    """What it computes."""
    sizes: dict[str, int | str]
    """At which size."""
    tokens: int
    """Tokens of one run."""
    status: str
    """`timed`, `wrong`, `failed`, `out of memory` or `not available`."""
    reason: str = ""
    """Why it was not timed, or not as a graph."""
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    """Relative errors of output and gradients against float64."""
    tolerance: float
    """The greatest that is right."""
    times: dict[str, dict[str, Times]] = dataclasses.field(default_factory=dict)
    """For each part, how long it took: `eager`, and on a GPU `graph` where it could be captured."""
    floor: dict[str, float] = dataclasses.field(default_factory=dict)
    """For each part, the seconds that no program could do without."""
    peak_bytes: int | None = None
    """The most memory of the GPU that a run held, its inputs and weights included."""

    def seconds(self, part: str, how: str | None = None) -> float | None:
        """The median of a part; by default as the device sees it, or as called where that is all there is."""
        times = self.times.get(part, {})
        found = times.get(how) if how else times.get(GRAPH, times.get(EAGER))
        return None if found is None else found.median

    def share(self, part: str) -> float | None:
        """How near to its floor a part came: 1 is there."""
        seconds, floor = self.seconds(part), self.floor.get(part)
        return None if not seconds or floor is None else floor / seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the shares and the tokens a second that follow from them."""
        values = dataclasses.asdict(self)
        values["share_of_floor"] = {part: self.share(part) for part in self.times}
        whole = self.seconds("step") or self.seconds("forward")
        values["tokens_per_second"] = None if whole is None else self.tokens / whole
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """What `to_dict` has written."""
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in values.items() if name in names}
        known["times"] = {
            part: {how: Times(**times) for how, times in ways.items()} for part, ways in known["times"].items()
        }
        return cls(**known)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A run of one benchmark."""

    suite: str
    """Which one."""
    hardware: dict[str, Any]
    """What it was computed on."""
    versions: dict[str, str]
    """Of what it was computed with."""
    commit: str | None
    """Of the library's source."""
    begun: str
    """When, in UTC."""
    command: str
    """What makes it again."""
    settings: dict[str, Any]
    """Sizes, types and times."""
    floors: dict[str, Any]
    """What the machine can do at best, as measured."""
    entries: list[Result]
    """What became of each contestant at each size."""
    ratios: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Who is how many times faster than whom, and other numbers to compare."""
    stopped: bool = False
    """Whether it ended before its end."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, "entries": [entry.to_dict() for entry in self.entries]}


def write_json(path: Path, report: Report) -> None:
    """Write a report, whole or not at all."""
    values = report.to_dict()
    atomic_write(path, to_json(values, indent=1) + "\n")


def read_json(path: Path) -> Report:
    """The report in a file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        entries = [Result.from_dict(entry) for entry in values.pop("entries")]
        return Report(entries=entries, **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: cannot be read as results of `tcnca bench` ({error!r}); make them anew") from error


def short_time(seconds: float | None) -> str:
    """A time for people: 1.23 s, 12.3 ms or 45.6 µs."""
    if seconds is None:
        return "–"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} µs"
