"""Preparing a set: fetched, read or made, stored, and opened again."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tcnca.data.columns import Columns, count, head
from tcnca.data.custom import CustomOptions, read_own
from tcnca.data.datasets import Entry, canonical, entry, known
from tcnca.data.generators import shards
from tcnca.data.schema import Content
from tcnca.data.store import MANIFEST, Dataset, SetWriter, alone, check_space, read_manifest, restore_folder
from tcnca.errors import ConfigError, DataError

DOWNLOADS = "downloads"
"""Folder, among the sets, of the files that were fetched."""
Watch = Callable[[str, int, int | None], None]
"""Told what is being done, how much of it is done, and how much there is to do, None if that is not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A set that is ready to be used."""

    data: Dataset
    """The set."""
    folder: Path
    """Where it is."""
    new: bool
    """Whether it was prepared just now, not before."""


def data_folder() -> Path:
    """Where sets are kept unless another place is given: `$TCNCA_DATA`, or else `data` in the current folder."""
    return Path(os.environ.get("TCNCA_DATA") or "data")


def prepare(
    name: str,
    out: Path | str | None = None,
    *,
    origin: Path | str | None = None,
    size: int | None = None,
    seed: int = 0,
    workers: int = 1,
    unverified: bool = False,
    force: bool = False,
    custom: CustomOptions | None = None,
    watch: Watch = lambda what, done, total: None,
) -> Prepared:
    """Prepare a set, unless it is there already.

    Args:
        name: a set that is known by name, or a name for data of your own.
        out: the folder that gets it, in a folder of its name; by default `data_folder()`.
        origin: a file or folder to read it from. Without it, a known set is fetched or made.
        size: number of training examples (for EnWik8, bytes); other splits in proportion. Default: as published.
        seed: of a set that is made, or of how data of your own is split.
        workers: processes that make it; more than one need the usual `if __name__ == "__main__":` in scripts.
        unverified: accept files that are not the published ones; the set remembers that.
        force: prepare again what is there.
        custom: how to read data of your own.
        watch: told about the progress.
    """
    job = _Job(
        name=canonical(name),
        folder=(data_folder() if out is None else Path(out)) / canonical(name),
        origin=None if origin is None else Path(origin),
        size=size,
        seed=seed,
        workers=workers,
        unverified=unverified,
        custom=custom if custom is not None and not seed else dataclasses.replace(custom or CustomOptions(), seed=seed),
        watch=watch,
    )
    # A set that is there may be on a disk that cannot be written, so it is looked at before the lock.
    if not force and (found := job.found()) is not None:
        return found
    job.check()
    with alone(job.folder, lambda: watch(f"waiting for another process that prepares {job.name}", 0, None)):
        restore_folder(job.folder)
        if not force and (found := job.found()) is not None:
            return found
        if not (job.folder / MANIFEST).exists() and job.folder.exists():
            raise DataError(
                f"{job.folder}: exists and is no prepared set; choose another name or another place with --out"
            )
        job.run()
        return Prepared(data=Dataset.open(job.folder), folder=job.folder, new=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """A set to be prepared."""

    name: str
    folder: Path
    origin: Path | None
    size: int | None
    seed: int
    workers: int
    unverified: bool
    custom: CustomOptions
    watch: Watch

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise ConfigError(
                f"name: got {self.name!r}, allowed are letters, digits, `_`, `.` and `-`, as for a folder"
            )
        if self.name == DOWNLOADS:
            raise ConfigError(f"name: got {self.name!r}, which is where fetched files go; choose another")
        if self.workers < 1:
            raise ConfigError(f"workers: got {self.workers}, allowed is at least 1")
        if self.origin is not None and known(self.name) and entry(self.name).generator is not None:
            raise ConfigError(f"{self.name}: is made, not read; leave --from out")
        if self.size is not None:
            self._check_size(self.size)
        self._check_ignored()

    def _check_ignored(self) -> None:
        """Refuse what would make no difference."""
        made = known(self.name) and entry(self.name).generator is not None
        if known(self.name) and self.custom != CustomOptions(seed=self.custom.seed):
            raise ConfigError(f"{self.name}: is a known set, and options for data of your own mean nothing for it")
        if known(self.name) and not made and self.seed:
            raise ConfigError(f"seed: got {self.seed}, but nothing of {self.name} is drawn; leave --seed out")
        if self.unverified and (made or not known(self.name)):
            raise ConfigError(f"unverified: there is no published {self.name} to check against; leave --unverified out")

    def _check_size(self, size: int) -> None:
        if not known(self.name) or not entry(self.name).sizes:
            what = self.name if known(self.name) else "data of your own"
            raise ConfigError(f"size: got {size}, but {what} is taken whole; leave --size out")
        most = entry(self.name).sizes["train"]
        if entry(self.name).sizes_for(size)["train"] > most and entry(self.name).generator is None:
            raise ConfigError(f"size: got {size}, allowed is at most {most}, as many as {self.name} has")

    def found(self) -> Prepared | None:
        """The set, if it is there; a DataError if it is not the one that is wanted."""
        if not (self.folder / MANIFEST).exists():
            return None
        self.check_same(read_manifest(self.folder))
        return Prepared(data=Dataset.open(self.folder), folder=self.folder, new=False)

    def check(self) -> None:
        """A ConfigError if there is nothing to prepare the set from."""
        if not known(self.name) and self.origin is None:
            try:
                entry(self.name)
            except ConfigError as error:
                raise ConfigError(f"{error}; or give --from FILE to prepare data of your own under this name") from None

    def run(self) -> None:
        if not known(self.name):
            self._read_own()
        elif entry(self.name).generator is not None:
            self._make(entry(self.name))
        else:
            self._read(entry(self.name))

    def request(self) -> dict[str, Any]:
        """What was asked for, to know whether a set that is there is the one that is wanted."""
        if not known(self.name):
            name = None if self.origin is None else self.origin.name
            options = {f"--{key}": value for key, value in dataclasses.asdict(self.custom).items()}
            return {"source": name, "source of": _version(self.origin), **options}
        generator = entry(self.name).generator
        made = {} if generator is None else {"seed": self.seed, "generator version": generator.version}
        return {"size": self.size, **made}

    def check_same(self, manifest: Mapping[str, Any]) -> None:
        """A DataError if the set that is there was prepared from something else."""
        if not known(self.name) and self.origin is None:
            return
        if manifest.get("unverified") and not self.unverified:
            raise DataError(
                f"{self.folder}: was prepared from files that are not the published ones; --unverified takes it all "
                "the same, --force prepares it anew"
            )
        there = manifest.get("request", {})
        for key, wanted in self.request().items():
            if there.get(key) != wanted:
                nothing = "as published" if key == "size" else "none"
                was, now = (nothing if value is None else value for value in (there.get(key), wanted))
                raise DataError(
                    f"{self.folder}: was prepared with {key} {was}, asked for is {now}; --force prepares it anew, "
                    f"--out chooses another place"
                )

    def _read_own(self) -> None:
        assert self.origin is not None
        self.watch(f"reading {self.origin.name}", 0, None)
        content = read_own(self.origin, self.custom)
        self._store(content, content.splits.items(), {"title": self.name})

    def _read(self, known_set: Entry) -> None:
        assert known_set.read is not None
        check_space(self.folder, known_set.disk if self.size is None else 0)
        origin = self._fetched(known_set) if self.origin is None else self.origin
        self.watch(f"reading {origin.name}", 0, None)
        try:
            content = known_set.read(origin, unverified=self.unverified)
        except DataError as error:
            raise DataError(f"{error}. {self.name} is read from {known_set.forms}") from error
        splits = content.splits
        if self.size is not None:
            sizes = known_set.sizes_for(self.size)
            splits = {split: _first(parts, sizes[split]) for split, parts in splits.items()}
        unverified = {"unverified": self.unverified and not content.verified}
        self._store(content, splits.items(), {"title": known_set.title, **known_set.facts, **unverified})

    def _fetched(self, known_set: Entry) -> Path:
        if not known_set.downloads:
            raise DataError(f"{self.name}: is not to be had from the public; give --from FOLDER")
        # Imported late: what it needs takes long to import, and is needed here alone.
        from tcnca.data.sources.download import fetch

        folder = self.folder.parent / DOWNLOADS
        files = [
            fetch(download, folder, functools.partial(self.watch, f"fetching {download.filename}"))
            for download in known_set.downloads
        ]
        return files[0] if len(files) == 1 else folder

    def _make(self, known_set: Entry) -> None:
        plan = known_set.plan(self.size, self.seed)
        # The shards stay until the set is whole, so it is there twice for a while.
        check_space(self.folder, 2 * known_set.disk * sum(plan.sizes.values()) // sum(known_set.sizes.values()))
        beside = self.folder.with_name(f".{self.folder.name}.shards")

        def progress(done: int, total: int) -> None:
            self.watch(f"making {self.name}", done * plan.shard, total * plan.shard)

        content = Content(kind="classification", splits={}, origin="made by tcnca", verified=True)
        parts = ((split, [columns]) for split, columns in shards.make(plan, beside, self.workers, progress))
        made = {"generator": repr(plan.generator), "version": plan.generator.version, "seed": self.seed}
        self._store(content, parts, {"title": known_set.title, **known_set.facts, **made})
        shards.remove(beside)

    def _store(
        self, content: Content, splits: Iterable[tuple[str, Iterable[Columns]]], facts: Mapping[str, Any]
    ) -> None:
        # A part of the published set is not the published set.
        part = self.size is not None and "generator" not in facts
        checked = {"verified": content.verified and not part, "part": content.verified and part}
        about = {"kind": content.kind, "origin": content.origin, **checked, **content.facts, **facts}
        stored = 0
        with SetWriter(self.folder) as writer:
            for split, parts in splits:
                for columns in parts:
                    writer.append(split, columns)
                    stored += count(columns)
                    self.watch("storing", stored, None)
            known_set = {"set": self.name} if known(self.name) else {}
            writer.finish({**known_set, **about, "request": self.request()})


def _version(origin: Path | None) -> str:
    """What changes when a file, or one in a folder, does."""
    files = [] if origin is None else [origin, *origin.rglob("*")] if origin.is_dir() else [origin]
    stats = [path.stat() for path in files if path.is_file()]
    latest = datetime.datetime.fromtimestamp(max((stat.st_mtime for stat in stats), default=0), datetime.UTC)
    return f"{sum(stat.st_size for stat in stats):,} bytes, last changed {latest.isoformat()}"


def _first(parts: Iterable[Columns], wanted: int) -> Iterator[Columns]:
    """The first `wanted` examples."""
    for columns in parts:
        if wanted <= 0:
            return
        kept = min(wanted, count(columns))
        yield head(columns, kept)
        wanted -= kept
