"""What a run was made with: enough to make it again, and to compare its speed with that of others."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tcnca.errors import TrainingError
from tcnca.training.files import write_whole
from tcnca.training.processes import Processes, cores
from tcnca.version import __version__

RECORD = "record.json"
_PACKAGE = Path(__file__).parent.parent
_PATIENCE = 3.0
"""Seconds that git may take; a run does not wait for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One start of a run: its first, or that of a `--resume`."""

    recipe: str
    """Name of the recipe."""
    command: str
    """What makes the run again, from its beginning."""
    step: int
    """Updates that were done when this part began."""
    seed: int
    """Seed of the order of examples, of the weights and of dropout."""
    budget: float | None
    """Seconds to train; None where the number of updates says when to end."""
    begun: str
    """When it began, in UTC."""
    processes: int
    """Number of processes."""
    hardware: dict[str, Any]
    """What it is computed on."""
    versions: dict[str, str]
    """Of what it is computed with."""
    platform: str
    """The operating system."""
    commit: str | None
    """Commit of the library's source, with `+changes` if it was changed since; None for an installed library."""


def part_of(recipe: str, command: str, *, step: int, seed: int, budget: float | None, group: Processes) -> Part:
    """A start of a run here and now."""
    return Part(
        recipe=recipe,
        command=command,
        step=step,
        seed=seed,
        budget=budget,
        begun=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        processes=group.world,
        hardware=hardware(group),
        versions=versions(),
        platform=platform.platform(),
        commit=commit(),
    )


def add_part(folder: Path, part: Part, resumed: bool) -> None:
    """Write down a start of a run. One that is no `--resume` is the only one.

    Raises:
        DataError: the folder cannot be written.
        TrainingError: it holds a record that cannot be read.
    """
    parts = [*(read_record(folder) if resumed else []), part]
    text = json.dumps({"parts": [dataclasses.asdict(each) for each in parts]}, indent=1)
    write_whole(folder / RECORD, text + "\n")


def read_record(folder: Path) -> list[Part]:
    """The starts of a run, the first one first."""
    path = folder / RECORD
    if not path.is_file():
        return []
    try:
        return [Part(**values) for values in json.loads(path.read_text(encoding="utf-8"))["parts"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TrainingError(f"{path}: cannot be read ({error!r}); remove it, the run goes on without") from error


def command(arguments: Sequence[str]) -> str:
    """A command of the library as it is typed, with `torchrun` before it where that has started this process."""
    start = ["tcnca"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
        several = [] if nodes == "1" else ["--nnodes", nodes]
        start = ["torchrun", *several, "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "tcnca"]
    return shlex.join([*start, *arguments])


def hardware(group: Processes) -> dict[str, Any]:
    """What the processes compute on."""
    if group.device.type == "cuda":
        facts = torch.cuda.get_device_properties(group.device)
        memory = round(facts.total_memory / 2**30, 1)
        return {"device": "cuda", "name": facts.name, "count": group.world, "memory_gib": memory}
    return {"device": group.device.type, "name": _processor(), "cores": cores(), "threads": torch.get_num_threads()}


def versions() -> dict[str, str]:
    """Of Python and of the libraries that compute; those that are not there are left out."""
    found = {"tcnca": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return {**found, "numpy": np.__version__}


def commit(package: Path = _PACKAGE) -> str | None:
    """The commit of a package's source, with `+changes` if files of it were changed, or None if it is no checkout."""
    # An installed package may lie inside a checkout of something else, where it is ignored or not known.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _git(package, "rev-parse", "--verify", "HEAD")
    changed = _git(package, "status", "--porcelain", "--", ".")
    if found is None or changed is None:
        return None
    return found.strip() + ("+changes" if changed.strip() else "")


def _git(folder: Path, *arguments: str) -> str | None:
    # Git tells hooks and aliases where their repository is, which is not to be taken for this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PATIENCE,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
