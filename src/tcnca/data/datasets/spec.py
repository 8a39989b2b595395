"""The description of a data set in the registry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tcnca.config import check_at_least
from tcnca.data.generate import ExampleStream, Generator, Plan, split_fractions
from tcnca.data.schema import Content
from tcnca.data.tasks import Task
from tcnca.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Download:
    """A published file."""

    url: str
    filename: str
    checksum: str | None
    """`sha256:...`; None if none was published, to use the one that the host states."""
    size: int | None
    """Number of bytes, if known."""

    def __post_init__(self) -> None:
        if self.checksum is not None and not self.checksum.startswith("sha256:"):
            raise ConfigError(f"checksum: expected sha256:..., got {self.checksum!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A data set that `tcnca data prepare` knows by name: read from files, or generated."""

    name: str
    """For example `enwik8`."""
    title: str
    """Name in publications."""
    description: str
    """What a model has to do."""
    source: str
    """Where the data comes from, for display."""
    sizes: Mapping[str, int]
    """Published number of examples in each split; bytes for a language model."""
    disk_bytes: int
    """Approximate size of the prepared data set."""
    task: Callable[..., Task]
    """Builds the task from a `Dataset` and options."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Stored with the data set: `symbols`, `class_names`, `mean`, `std`."""
    read: Callable[..., Content] | None = None
    """`read(origin, unverified=False)` reads a file or folder and checks it against the published data set."""
    accepted_files: str = ""
    """Which files can be read, for display."""
    downloads: tuple[Download, ...] = ()
    """The public files."""
    generator: Generator | None = None
    """Generates the data set."""
    shard_size: int = 1000
    """Examples that are generated at once."""

    def sizes_for(self, train: int | None) -> dict[str, int]:
        """Return the sizes of the splits for a training split of another size, in the published proportions."""
        if train is None:
            return dict(self.sizes)
        check_at_least("size", train, 1)
        return {
            split: train if split == "train" else -(-train * size // self.sizes["train"])
            for split, size in self.sizes.items()
        }

    def plan(self, size: int | None, seed: int) -> Plan:
        """Return the plan of a generated data set."""
        return Plan(
            generator=self._require_generator(),
            seed=seed,
            sizes=self.sizes_for(size),
            fractions=split_fractions(self.sizes),
            shard_size=self.shard_size,
        )

    def stream(self) -> ExampleStream:
        """Return an endless stream of training examples."""
        return ExampleStream(self._require_generator(), split_fractions(self.sizes))

    def _require_generator(self) -> Generator:
        if self.generator is None:
            raise ConfigError(f"{self.name}: expected a generated data set, got one that is read from files")
        return self.generator
