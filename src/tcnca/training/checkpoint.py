"""Checkpoints of a run: complete or absent, and readable on any number of processes.

Each is a directory: `model.safetensors` and `config.json`, which `tcnca.load` reads; the optimizers in the format of
PyTorch's distributed checkpoints; and `state.json` with the state of the run and a SHA-256 of every file. It is written
under another name and moved into place at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tcnca.errors import CheckpointError
from tcnca.files import atomic_write, disk_errors
from tcnca.models import SequenceModel, save
from tcnca.models.serialization import WEIGHTS_FILE, fill
from tcnca.training.distributed import DistContext

STATE = "state.json"
_OPTIMIZERS = "optimizers"
_BEST = "best.json"
_FILES = "files"
_REMEDY = "remove this checkpoint to resume from the one before"


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """The state of a run besides the model and the optimizers."""

    step: int = 0
    """Steps done."""
    seconds: float = 0.0
    """Time spent, over all launches."""
    data: str = ""
    """Digest of the data set, so that a run is not resumed on other data."""
    score: float | None = None
    """Score of the last validation."""
    meter: dict[str, float] = dataclasses.field(default_factory=dict)
    """Sums since the last line of the log."""
    compile_seconds: float = 0.0
    """Time of the first steps, while code is compiled; the schedule of a time budget leaves it out."""


class CheckpointManager:
    """The checkpoints in a directory. All processes must call `save`, `load`, `mark_best` and `clean_up`."""

    def __init__(self, folder: Path, keep: int, dist: DistContext) -> None:
        self.folder, self.keep, self.dist = folder, keep, dist

    def save(self, model: SequenceModel, optimizers: Sequence[torch.optim.Optimizer], state: TrainState) -> Path:
        """Write a checkpoint."""
        place = self.folder / f"step-{state.step:09}"
        partial = self.folder / f".{place.name}.partial"
        with disk_errors(self.folder), _remove_on_error(partial):
            if self.dist.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self.dist.barrier()
            weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            optimizer_state = {_OPTIMIZERS: get_optimizer_state_dict(model, optimizers)}
            with _single_process_warnings_ignored():
                state_dict_saver.save(
                    optimizer_state, checkpoint_id=partial / _OPTIMIZERS, no_dist=self.dist.world_size == 1
                )
            if self.dist.is_main:
                copy = _on_meta(model)
                copy.load_state_dict(weights, assign=True)
                save(copy, partial)
                values = {**dataclasses.asdict(state), _FILES: _checksums(partial)}
                (partial / STATE).write_text(json.dumps(values), encoding="utf-8")
                shutil.rmtree(place, ignore_errors=True)
                partial.rename(place)
                self._remove_old()
        self.dist.barrier()
        return place

    def load(self, place: Path, model: SequenceModel, optimizers: Sequence[torch.optim.Optimizer]) -> TrainState:
        """Restore the model and the optimizers from a checkpoint, and return the state of the run."""
        state = read_state(place)
        _verify(place)
        try:
            copy = _on_meta(model)
            fill(copy, load_file(place / WEIGHTS_FILE), str(place / WEIGHTS_FILE))
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
            set_model_state_dict(model, copy.state_dict(), options=options)
            # PyTorch creates the state of a new optimizer by taking a step, which must not count: at step 0 there is
            # nothing to load.
            if state.step:
                optimizer_state = {_OPTIMIZERS: get_optimizer_state_dict(model, optimizers)}
                with _single_process_warnings_ignored():
                    state_dict_loader.load(
                        optimizer_state, checkpoint_id=place / _OPTIMIZERS, no_dist=self.dist.world_size == 1
                    )
                set_optimizer_state_dict(model, optimizers, optimizer_state[_OPTIMIZERS])
        except (Exception, CheckpointException) as error:
            # Damage shows in whatever reads it first: safetensors, pickle, or PyTorch's own formats.
            raise CheckpointError(f"{place}: cannot be read ({_causes(error)[0]}); {_REMEDY}") from error
        return state

    def latest(self) -> Path | None:
        """Return the last checkpoint."""
        return max(self._all(), default=None)

    def best(self) -> Path | None:
        """Return the checkpoint with the best validation."""
        marked = self._read_best()
        place = None if marked is None else self.folder / marked[0]
        return place if place is not None and (place / STATE).is_file() else None

    def best_score(self) -> float | None:
        """Return the best validation so far; None if its checkpoint is gone, so that another can take its place."""
        marked = self._read_best()
        return None if marked is None or self.best() is None else marked[1]

    def mark_best(self, place: Path, score: float) -> None:
        """Mark a checkpoint as the best so far."""
        if self.dist.is_main:
            atomic_write(self.folder / _BEST, json.dumps({"checkpoint": place.name, "score": score}))
        self.clean_up()

    def clean_up(self) -> None:
        """Remove old checkpoints, and what a killed run has left."""
        if self.dist.is_main:
            with disk_errors(self.folder):
                self._remove_old()
        self.dist.barrier()

    def _read_best(self) -> tuple[str, float] | None:
        path = self.folder / _BEST
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return str(values["checkpoint"]), float(values["score"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error!r}); remove it, and the best checkpoint is chosen from then on"
            ) from error

    def _all(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"step-*/{STATE}"))

    def _remove_old(self) -> None:
        """Remove all checkpoints but the last ones and the best, and incomplete files."""
        for rest in self.folder.glob(".step-*"):
            shutil.rmtree(rest, ignore_errors=True)
        (self.folder / f".{_BEST}").unlink(missing_ok=True)
        best = self.best()
        for place in self._all()[: -self.keep]:
            if place != best:
                # Renamed first: a checkpoint that is partly removed must not look complete.
                removed = place.rename(place.with_name(f".{place.name}.removed"))
                shutil.rmtree(removed, ignore_errors=True)


def read_state(place: Path) -> TrainState:
    """Read the state of the run at a checkpoint."""
    try:
        values = json.loads((place / STATE).read_text(encoding="utf-8"))
        state = TrainState(**{name: value for name, value in values.items() if name != _FILES})
        if not isinstance(values["step"], int) or not isinstance(values["seconds"], int | float):
            raise ValueError(f"step {state.step!r} after {state.seconds!r} seconds")
        return state
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{place / STATE}: cannot be read ({error!r}); {_REMEDY}") from error


@contextlib.contextmanager
def _remove_on_error(partial: Path) -> Iterator[None]:
    """Remove an incomplete checkpoint, and raise the OSError of the disk that libraries hide in their own errors."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        causes = _causes(error)
        disk = next((found for cause in causes if (found := _disk_error(cause)) is not None), None)
        if disk is not None:
            raise disk from error
        if isinstance(error, CheckpointException):
            raise causes[0] from error
        raise


def _causes(error: BaseException) -> list[BaseException]:
    """Return the errors of all processes that PyTorch has gathered in one, or the error itself."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return [cause for cause, _ in failures] or [error]


def _disk_error(error: BaseException | None) -> OSError | None:
    """Return the error of the disk that an error of safetensors or of PyTorch's zip writer stands for."""
    if error is None or isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error))
    if isinstance(error, SafetensorError) and number:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    if isinstance(error, RuntimeError) and re.search(r"PytorchStreamWriter failed|unexpected pos", str(error)):
        # The zip writer does not pass on why a write failed. A full disk is by far the most common reason.
        return _disk_error(error.__context__) or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


@contextlib.contextmanager
def _single_process_warnings_ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed.*")
        yield


def _checksums(place: Path) -> dict[str, str]:
    files = (path for path in sorted(place.rglob("*")) if path.is_file() and path.name != STATE)
    return {str(path.relative_to(place)): _checksum(path) for path in files}


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(place: Path) -> None:
    """Raise a CheckpointError if files differ from what was written: file formats may not notice a few wrong bytes."""
    written = json.loads((place / STATE).read_text(encoding="utf-8")).get(_FILES, {})
    for name, checksum in written.items():
        path = place / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; {_REMEDY}")
        if _checksum(path) != checksum:
            raise CheckpointError(f"{path}: is damaged, its checksum differs from what was written; {_REMEDY}")


def _on_meta(model: SequenceModel) -> SequenceModel:
    with torch.device("meta"):
        return SequenceModel(model.config, model.preprocessing)
