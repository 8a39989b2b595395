"""What the registry knows of a set before it is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tcnca.data.generators.generator import Generator, Stream, shares
from tcnca.data.generators.shards import Plan
from tcnca.data.schema import Content
from tcnca.data.sources import Download
from tcnca.data.tasks import Task
from tcnca.errors import ConfigError


class Reader(Protocol):
    """Reads a set from files."""

    def __call__(self, origin: Path, *, unverified: bool = False) -> Content:
        """The content of a file or folder, checked against the published set."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A set that `tcnca data prepare` knows by name: read from files, or made by a generator."""

    name: str
    """For example `enwik8`."""
    title: str
    """What it is called elsewhere."""
    about: str
    """What a model has to do."""
    source: str
    """Where it comes from, for people."""
    sizes: Mapping[str, int]
    """Published number of examples in each split; for a language model, of bytes."""
    disk: int
    """About how many bytes the prepared set takes."""
    task: Callable[..., Task]
    """Makes the task of a set: called with it and options."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What to remember with the set: `symbols`, `num_classes`, `mean`, `deviation`."""
    read: Reader | None = None
    """Reads the set from files."""
    forms: str = ""
    """What it can be read from, for people."""
    downloads: tuple[Download, ...] = ()
    """The files, where the public has them."""
    generator: Generator | None = None
    """Makes the set."""
    shard: int = 1000
    """Examples that a generator makes at once."""

    def sizes_for(self, train: int | None) -> dict[str, int]:
        """Sizes of the splits for a training split of another size, in the published proportions."""
        if train is None:
            return dict(self.sizes)
        if train < 1:
            raise ConfigError(f"size: got {train}, allowed is at least 1")
        return {
            split: train if split == "train" else -(-train * size // self.sizes["train"])
            for split, size in self.sizes.items()
        }

    def plan(self, size: int | None, seed: int) -> Plan:
        """How to make the set."""
        if self.generator is None:
            raise ConfigError(f"{self.name}: is read from files, not made; give --from or let it be downloaded")
        return Plan(
            generator=self.generator,
            seed=seed,
            sizes=self.sizes_for(size),
            share=shares(self.sizes),
            shard=self.shard,
        )

    def stream(self) -> Stream:
        """Training examples without end."""
        if self.generator is None:
            raise ConfigError(f"{self.name}: is read from files; only sets that are made can stream endlessly")
        return Stream(self.generator, shares(self.sizes))
