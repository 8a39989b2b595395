"""The checkpoints of a run: whole or not there, and readable on another number of processes.

Each is a folder: `model.safetensors` and `config.json`, which `tcnca.load` reads; the optimizer in the format of
PyTorch's distributed checkpoints; and `state.json`, which says how far the run was. It is written beside its place and
moved there at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

from tcnca.data.store import disk_errors
from tcnca.errors import CheckpointError
from tcnca.models import SequenceModel, save
from tcnca.models.serialization import WEIGHTS_FILE, fill
from tcnca.training.files import write_whole
from tcnca.training.processes import Processes

STATE = "state.json"
_OPTIMISER = "optimizer"
_BEST = "best.json"
_FILES = "files"
_CURE = "remove the folder to go on from the checkpoint before"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0
    """Updates done."""
    seconds: float = 0.0
    """Time spent, over all its parts."""
    data: str = ""
    """Digest of the set, so that no other one is gone on with."""
    score: float | None = None
    """Last validation."""
    meter: dict[str, float] = dataclasses.field(default_factory=dict)
    """What has been added up since the last line of the log."""
    compiling: float = 0.0
    """Seconds of those in which the code for the first updates was made; a time budget's schedule leaves them out."""


class Checkpoints:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path, keep: int, group: Processes) -> None:
        self.folder, self.keep, self.group = folder, keep, group

    def save(self, model: SequenceModel, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
        """Write a checkpoint; all processes take part."""
        place = self.folder / f"step-{progress.step:09}"
        beside = self.folder / f".{place.name}.partial"
        with disk_errors(self.folder), _written(beside):
            if self.group.first:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
            self.group.wait()
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(model, options=whole)
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            with warnings.catch_warnings():
                # Told that one process saves alone, which is so.
                warnings.filterwarnings("ignore", message=".*torch.distributed.*")
                state_dict_saver.save(state, checkpoint_id=beside / _OPTIMISER, no_dist=self.group.world == 1)
            if self.group.first:
                copy = _on_meta(model)
                copy.load_state_dict(weights, assign=True)
                save(copy, beside)
                values = {**dataclasses.asdict(progress), _FILES: _digests(beside)}
                (beside / STATE).write_text(json.dumps(values), encoding="utf-8")
                shutil.rmtree(place, ignore_errors=True)
                beside.rename(place)
                self._forget()
        self.group.wait()
        return place

    def load(self, place: Path, model: SequenceModel, optimizer: torch.optim.Optimizer) -> Progress:
        """Go back to a checkpoint; all processes take part."""
        progress = read_progress(place)
        _check(place)
        try:
            weights = _weights(place, model)
            set_model_state_dict(
                model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
            )
            # To ask for the state of an optimizer that has done nothing is to let it do a step: what was saved of it is
            # one too many.
            if progress.step:
                state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*torch.distributed.*")
                    state_dict_loader.load(state, checkpoint_id=place / _OPTIMISER, no_dist=self.group.world == 1)
                set_optimizer_state_dict(model, optimizer, state["optimizer"])
        except (Exception, CheckpointException) as error:
            # Damage shows in whatever reads it first: safetensors, pickle, or PyTorch's own formats.
            causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
            raise CheckpointError(f"{place}: cannot be read ({next(iter(causes), error)}); {_CURE}") from error
        return progress

    def latest(self) -> Path | None:
        """The last checkpoint that is whole."""
        found = self._all()
        return found[-1] if found else None

    def best(self) -> Path | None:
        """The checkpoint with the best validation."""
        marked = self._marked()
        place = None if marked is None else self.folder / marked[0]
        return place if place is not None and (place / STATE).is_file() else None

    def best_score(self) -> float | None:
        """The best validation so far; None if its checkpoint is gone, which one that is as good may replace."""
        marked = self._marked()
        return None if marked is None or self.best() is None else marked[1]

    def mark_best(self, place: Path, score: float) -> None:
        """Remember that a checkpoint is the best so far."""
        if self.group.first:
            write_whole(self.folder / _BEST, json.dumps({"checkpoint": place.name, "score": score}))
            with disk_errors(self.folder):
                self._forget()
        self.group.wait()

    def tidy(self) -> None:
        """Remove what a run that was killed has left."""
        if self.group.first:
            with disk_errors(self.folder):
                self._forget()
        self.group.wait()

    def _marked(self) -> tuple[str, float] | None:
        path = self.folder / _BEST
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return str(values["checkpoint"]), float(values["score"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            cure = "remove it, and the best is chosen from then on"
            raise CheckpointError(f"{path}: cannot be read ({error!r}); {cure}") from error

    def _all(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"step-*/{STATE}"))

    def _forget(self) -> None:
        """Remove all but the last ones and the best, and what a run that was killed has left half done."""
        for rest in self.folder.glob(".step-*"):
            shutil.rmtree(rest, ignore_errors=True)
        (self.folder / f".{_BEST}").unlink(missing_ok=True)
        best = self.best()
        for place in self._all()[: -self.keep]:
            if place != best:
                # Renamed first: what is half removed must not look whole.
                gone = place.rename(place.with_name(f".{place.name}.gone"))
                shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def _written(beside: Path) -> Iterator[None]:
    """Leave nothing that is not whole, and name the error of a disk what it is, whatever libraries make of it."""
    try:
        yield
    except (OSError, SafetensorError, CheckpointException) as error:
        shutil.rmtree(beside, ignore_errors=True)
        number = re.search(r"os error (\d+)", str(error))
        if isinstance(error, SafetensorError) and number:
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        if isinstance(error, CheckpointException):
            causes = [cause for cause, _ in error.failures.values()]
            raise next((cause for cause in causes if isinstance(cause, OSError)), causes[0]) from error
        raise


def read_progress(place: Path) -> Progress:
    """How far the run was at a checkpoint."""
    try:
        values = json.loads((place / STATE).read_text(encoding="utf-8"))
        progress = Progress(**{name: value for name, value in values.items() if name != _FILES})
        if not isinstance(values["step"], int) or not isinstance(values["seconds"], int | float):
            raise ValueError(f"step {progress.step!r} after {progress.seconds!r} seconds")
        return progress
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{place / STATE}: cannot be read ({error!r}); remove the folder {place.name}") from error


def _digests(place: Path) -> dict[str, str]:
    return {
        str(path.relative_to(place)): _digest(path)
        for path in sorted(place.rglob("*"))
        if path.is_file() and path.name != STATE
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(place: Path) -> None:
    """A CheckpointError if files are not what was written: formats need not notice a few bytes that are others."""
    written = json.loads((place / STATE).read_text(encoding="utf-8")).get(_FILES, {})
    for name, digest in written.items():
        path = place / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; {_CURE}")
        if _digest(path) != digest:
            raise CheckpointError(f"{path}: is damaged, it is not what was written; {_CURE}")


def _on_meta(model: SequenceModel) -> SequenceModel:
    with torch.device("meta"):
        return SequenceModel(model.config)


def _weights(place: Path, model: SequenceModel) -> dict[str, Any]:
    copy = _on_meta(model)
    fill(copy, load_file(place / WEIGHTS_FILE), str(place / WEIGHTS_FILE))
    return copy.state_dict()
