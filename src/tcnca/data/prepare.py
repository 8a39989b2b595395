"""Prepare a data set: download, read or generate it, store it, and open it."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tcnca.config import check_at_least
from tcnca.data.archives import check_source
from tcnca.data.custom import CustomOptions, read_custom
from tcnca.data.custom.streams import list_files, read_errors
from tcnca.data.datasets import DatasetSpec, canonical_name, get_dataset, is_dataset
from tcnca.data.generate import generate
from tcnca.data.manifest import MANIFEST
from tcnca.data.schema import Columns, Content, head, num_examples
from tcnca.data.store import Dataset, DatasetWriter, check_space
from tcnca.errors import ConfigError, DataError
from tcnca.extras import require
from tcnca.files import file_lock

DOWNLOADS = "downloads"
"""Folder of downloaded files, next to the data sets."""
Progress = Callable[[str, int, int | None], None]
"""Called with the activity, the amount that is done, and the total, None if that is unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared data set."""

    data: Dataset
    folder: Path
    new: bool
    """Whether it was prepared by this call, not before."""


def data_folder() -> Path:
    """Return the default folder of data sets: `$TCNCA_DATA`, or else `data` in the current folder."""
    return Path(os.environ.get("TCNCA_DATA") or "data")


def prepare_dataset(
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
    progress: Progress = lambda activity, done, total: None,
) -> Prepared:
    """Prepare a data set unless it is already prepared.

    Args:
        name: a data set of the registry, or a name for your own data.
        out: the folder that gets a subfolder of this name; by default `data_folder()`.
        origin: a file or folder to read. Without it, a data set of the registry is downloaded or generated.
        size: number of training examples (bytes for EnWik8); other splits in proportion. Default: as published.
        seed: seed of a generated data set, or of the splits of your own data.
        workers: processes that generate it; more than one need `if __name__ == "__main__":` in scripts.
        unverified: accept files that differ from the published ones; this is stored with the data set.
        force: prepare again even if it is already prepared.
        custom: how to read your own files.
        progress: called with the progress.
    """
    custom = custom or CustomOptions()
    job = _Job(
        name=canonical_name(name),
        folder=(data_folder() if out is None else Path(out)) / canonical_name(name),
        spec=get_dataset(name) if is_dataset(name) else None,
        origin=None if origin is None else Path(origin),
        size=size,
        seed=seed,
        workers=workers,
        unverified=unverified,
        custom=dataclasses.replace(custom, seed=seed) if seed else custom,
        progress=progress,
    )
    job.check_options()
    # Look before locking: a prepared data set may be on a read-only disk.
    if not force and (found := job.find()) is not None:
        return found
    job.check_source()
    lock = job.folder.with_name(f".{job.folder.name}.lock")
    with file_lock(lock, lambda: progress(f"waiting for another process that prepares {job.name}", 0, None)):
        if not force and (found := job.find()) is not None:
            return found
        if not (job.folder / MANIFEST).is_file() and job.folder.exists():
            raise DataError(
                f"{job.folder}: exists and is not a prepared data set; choose another name or another folder with --out"
            )
        job.run()
        return Prepared(data=Dataset.open(job.folder), folder=job.folder, new=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    """A data set to prepare. `spec` is None for the user's own data."""

    name: str
    folder: Path
    spec: DatasetSpec | None
    origin: Path | None
    size: int | None
    seed: int
    workers: int
    unverified: bool
    custom: CustomOptions
    progress: Progress

    def check_options(self) -> None:
        """Refuse options that are wrong or would have no effect."""
        if not re.fullmatch(r"\w[\w.-]*", self.name) or self.name == DOWNLOADS:
            raise ConfigError(
                f"name: expected letters, digits, `_`, `.` and `-`, as in a folder name, and not {DOWNLOADS!r}, got "
                f"{self.name!r}"
            )
        check_at_least("workers", self.workers, 1)
        spec = self.spec
        generated = spec is not None and spec.generator is not None
        if generated and self.origin is not None:
            raise ConfigError(
                f"origin: expected none, since {self.name} is generated, got {self.origin}; remove --from"
            )
        if spec is not None and self.custom != CustomOptions(seed=self.custom.seed):
            raise ConfigError(f"custom: expected no options for your own files, since {self.name} is a known data set")
        if spec is not None and not generated and self.seed:
            raise ConfigError(f"seed: expected 0, since {self.name} is not generated, got {self.seed}; remove --seed")
        if self.unverified and (generated or spec is None):
            raise ConfigError(f"unverified: expected False, since {self.name} was not published; remove --unverified")
        if self.size is None:
            return
        if spec is None or not spec.sizes:
            raise ConfigError(
                f"size: expected none, since {self.name} is always used completely, got {self.size}; remove --size"
            )
        largest = spec.sizes["train"]
        if spec.sizes_for(self.size)["train"] > largest and not generated:
            raise ConfigError(f"size: expected at most {largest}, the size of {self.name}, got {self.size}")

    def find(self) -> Prepared | None:
        """Return the data set if it is prepared; raise a DataError if it differs from the requested one."""
        if not (self.folder / MANIFEST).is_file():
            return None
        data = Dataset.open(self.folder)
        self._check_same(data.manifest)
        return Prepared(data=data, folder=self.folder, new=False)

    def _check_same(self, manifest: Mapping[str, Any]) -> None:
        if self.spec is None and self.origin is None:
            return
        if manifest.get("unverified") and not self.unverified:
            raise DataError(
                f"{self.folder}: was prepared from files that differ from the published ones; accept it with "
                "--unverified, or prepare it again with --force"
            )
        stored = manifest.get("request", {})
        for key, wanted in self._request().items():
            if stored.get(key) != wanted:
                default = "as published" if key == "size" else "none"
                got, expected = (default if value is None else value for value in (stored.get(key), wanted))
                raise DataError(
                    f"{self.folder}: expected {key} {expected}, got a data set prepared with {got}; prepare it again "
                    "with --force, or choose another folder with --out"
                )

    def _request(self) -> dict[str, Any]:
        """Return what determines the data set, to compare it with one that is already prepared."""
        if self.spec is None:
            name = None if self.origin is None else self.origin.name
            options = {f"--{key}": value for key, value in dataclasses.asdict(self.custom).items()}
            return {"source": name, "source of": _file_version(self.origin), **options}
        generator = self.spec.generator
        return {"size": self.size} | (
            {} if generator is None else {"seed": self.seed, "generator version": generator.version}
        )

    def check_source(self) -> None:
        """Raise an error if there is nothing to prepare the data set from."""
        if self.spec is None and self.origin is None:
            try:
                get_dataset(self.name)
            except ConfigError as error:
                raise ConfigError(f"{error}; or give --from FILE to prepare your own data under this name") from None
        if self.origin is not None:
            with read_errors(self.origin):
                exists = self.origin.exists()
            if not exists:
                raise DataError(f"{self.origin}: no such file or folder; check the path")
            check_source(self.origin)

    def run(self) -> None:
        """Prepare the data set."""
        if self.spec is None:
            self._read_custom()
        elif self.spec.generator is not None:
            self._generate(self.spec)
        else:
            self._read(self.spec)

    def _read_custom(self) -> None:
        assert self.origin is not None
        self.progress(f"reading {self.origin.name}", 0, None)
        check_space(self.folder, sum(file.stat().st_size for file in list_files(self.origin)))
        content = read_custom(self.origin, self.custom)
        self._store(content, content.splits.items(), {"title": self.name})

    def _read(self, spec: DatasetSpec) -> None:
        assert spec.read is not None
        check_space(self.folder, spec.disk_bytes if self.size is None else 0)
        origin = self._download(spec) if self.origin is None else self.origin
        self.progress(f"reading {origin.name}", 0, None)
        try:
            content = spec.read(origin, unverified=self.unverified)
        except DataError as error:
            raise DataError(f"{error}. {self.name} is read from {spec.accepted_files}") from error
        splits = content.splits
        if self.size is not None:
            splits = {split: _first(parts, spec.sizes_for(self.size)[split]) for split, parts in splits.items()}
        unverified = {"unverified": self.unverified and not content.verified}
        self._store(content, splits.items(), {"title": spec.title, **spec.metadata, **unverified})

    def _download(self, spec: DatasetSpec) -> Path:
        if not spec.downloads:
            raise DataError(f"{self.name}: is not publicly available; give --from FOLDER")
        require("download", f"{self.name}: cannot be downloaded")
        # Imported here: its dependencies take long to import and are needed for downloads only.
        from tcnca.data.download import download_file

        folder = self.folder.parent / DOWNLOADS
        files = [
            download_file(download, folder, functools.partial(self.progress, f"downloading {download.filename}"))
            for download in spec.downloads
        ]
        return files[0] if len(files) == 1 else folder

    def _generate(self, spec: DatasetSpec) -> None:
        plan = spec.plan(self.size, self.seed)
        # The shards are kept until the data set is complete, so it needs twice its space for a while.
        check_space(self.folder, 2 * spec.disk_bytes * sum(plan.sizes.values()) // sum(spec.sizes.values()))
        shards = self.folder.with_name(f".{self.folder.name}.shards")

        def progress(done: int, total: int) -> None:
            self.progress(f"generating {self.name}", done * plan.shard_size, total * plan.shard_size)

        content = Content(kind="classification", splits={}, origin="generated by tcnca", verified=True)
        parts = ((split, [columns]) for split, columns in generate(plan, shards, self.workers, progress))
        about = {"generator": repr(plan.generator), "version": plan.generator.version, "seed": self.seed}
        self._store(content, parts, {"title": spec.title, **spec.metadata, **about})
        shutil.rmtree(shards, ignore_errors=True)

    def _store(
        self, content: Content, splits: Iterable[tuple[str, Iterable[Columns]]], metadata: Mapping[str, Any]
    ) -> None:
        # A part of the published data set is not the published data set.
        part = self.size is not None and "generator" not in metadata
        checked = {"verified": content.verified and not part, "part": content.verified and part}
        about = {"kind": content.kind, "origin": content.origin, **checked, **content.metadata, **metadata}
        stored = 0
        with DatasetWriter(self.folder) as writer:
            for split, parts in splits:
                for columns in parts:
                    writer.append(split, columns)
                    stored += num_examples(columns)
                    self.progress("storing", stored, None)
            name = {} if self.spec is None else {"dataset": self.name}
            writer.commit({**name, **about, "request": self._request()})


def _file_version(origin: Path | None) -> str:
    """Return a text that changes when the file, or a file in the folder, changes."""
    files = [] if origin is None else [origin, *origin.rglob("*")] if origin.is_dir() else [origin]
    stats = [path.stat() for path in files if path.is_file()]
    latest = datetime.datetime.fromtimestamp(max((stat.st_mtime for stat in stats), default=0), datetime.UTC)
    return f"{sum(stat.st_size for stat in stats):,} bytes, last changed {latest.isoformat()}"


def _first(parts: Iterable[Columns], wanted: int) -> Iterator[Columns]:
    """Yield the first `wanted` examples."""
    for columns in parts:
        if wanted <= 0:
            return
        kept = min(wanted, num_examples(columns))
        yield head(columns, kept)
        wanted -= kept
