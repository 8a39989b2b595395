"""Where a run comes from: enough to repeat it, and to compare its speed with that of others."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from tcnca.config import NonNegativeInt, PositiveInt, Range, Seed
from tcnca.errors import TrainingError
from tcnca.files import atomic_write, read_json, to_json
from tcnca.training.distributed import available_cores
from tcnca.version import __version__

RECIPE = "recipe.yaml"
PROVENANCE = "provenance.json"
_PACKAGE = Path(__file__).parent.parent
_GIT_SECONDS = 3.0
"""Time limit of a git command."""

Budget = Annotated[float, Range(1e-3, 1e9)]
"""Seconds to train, at most some thirty years."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of a run: the first, or one that resumes it."""

    recipe: str
    """Name of the recipe."""
    command: str
    """Command that repeats the run from its start."""
    step: NonNegativeInt
    """Steps done before this launch."""
    seed: Seed
    """Seed of the order of examples, the weights and dropout."""
    budget: Budget | None
    """Seconds to train; None if the number of steps ends the run."""
    processes: PositiveInt
    """Number of processes."""
    hardware: dict[str, str | int | float]
    """Devices of the run."""
    init_weights: str | None = None
    """SHA-256 of the file of weights that the run started from; None for random weights."""
    started: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )
    """Time of the launch, in UTC."""
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: versions())
    """Versions of Python and of the libraries that compute."""
    platform: str = dataclasses.field(default_factory=platform.platform)
    """Operating system."""
    commit: str | None = dataclasses.field(default_factory=lambda: commit())
    """Commit of the library's source, with `+changes` if it was changed since; None for an installed library."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Provenance:
    """The content of the file."""

    launches: list[Launch]


def add_launch(folder: Path, launch: Launch, *, resumed: bool) -> None:
    """Add a launch to the provenance of a run; one that does not resume replaces it."""
    launches = [*(read_launches(folder) if resumed else []), launch]
    text = to_json({"launches": [dataclasses.asdict(each) for each in launches]}, indent=1)
    atomic_write(folder / PROVENANCE, text + "\n")


def read_launches(folder: Path) -> list[Launch]:
    """Read the launches of a run, the first one first."""
    path = folder / PROVENANCE
    if not path.is_file():
        return []
    remedy = "remove it, the run can be resumed without"
    stored: _Provenance = read_json(path, _Provenance, error=TrainingError, remedy=remedy)
    return stored.launches


def command_line(arguments: Sequence[str]) -> str:
    """Return a `tcnca` command as it is typed, with `torchrun` if that has started this process."""
    start = ["tcnca"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
        several = [] if nodes == "1" else ["--nnodes", nodes]
        start = ["torchrun", *several, "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "-m", "tcnca"]
    return shlex.join([*start, *arguments])


def hardware(device: torch.device, count: int = 1) -> dict[str, Any]:
    """Describe a device, of which `count` are used."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        memory = round(facts.total_memory / 2**30, 1)
        return {"device": "cuda", "name": facts.name, "count": count, "memory_gib": memory}
    # Also of Apple's GPUs, which are part of the processor.
    threads = torch.get_num_threads()
    return {"device": device.type, "name": _processor(), "cores": available_cores(), "threads": threads}


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that compute, as far as they are installed."""
    found = {"tcnca": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return {**found, "numpy": np.__version__}


def commit(package: Path = _PACKAGE) -> str | None:
    """Return the commit of a package's source, with `+changes` if it was changed; None if it is not a checkout."""
    # An installed package may lie inside the checkout of something else, which ignores it or does not know it.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _git(package, "rev-parse", "--verify", "HEAD")
    changed = _git(package, "status", "--porcelain", "--", ".")
    if found is None or changed is None:
        return None
    return found.strip() + ("+changes" if changed.strip() else "")


def _git(folder: Path, *arguments: str) -> str | None:
    # Git sets GIT_* variables for hooks and aliases, which point to their repository instead of this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_SECONDS,
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
