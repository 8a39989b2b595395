"""The checkpoints of a run: whole or not there, and readable on another number of processes.

Each is a folder: `model.safetensors` and `config.json`, which `tcnca.load` reads; the optimiser in the format of
PyTorch's distributed checkpoints; and `state.json`, which says how far the run was. It is written beside its place and
moved there at the end.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tcnca.data.store import explained
from tcnca.errors import CheckpointError
from tcnca.models import SequenceModel, save
from tcnca.models.checkpoint import WEIGHTS_FILE, fill
from tcnca.training.files import write_whole
from tcnca.training.processes import Processes

STATE = "state.json"
_OPTIMISER = "optimiser"
_BEST = "best.json"


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
    compiling: float = 0.0
    """Seconds of those in which the code for the first updates was made; a time budget's schedule leaves them out."""


class Checkpoints:
    """The checkpoints in a folder."""

    def __init__(self, folder: Path, keep: int, group: Processes) -> None:
        self.folder, self.keep, self.group = folder, keep, group

    def save(self, model: SequenceModel, optimiser: torch.optim.Optimizer, progress: Progress) -> Path:
        """Write a checkpoint; all processes take part."""
        place = self.folder / f"step-{progress.step:09}"
        beside = self.folder / f".{place.name}.partial"
        if self.group.first:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        self.group.wait()
        with explained(self.folder):
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(model, options=whole)
            state = {"optimiser": get_optimizer_state_dict(model, optimiser)}
            with warnings.catch_warnings():
                # Told that one process saves alone, which is so.
                warnings.filterwarnings("ignore", message=".*torch.distributed.*")
                state_dict_saver.save(state, checkpoint_id=beside / _OPTIMISER, no_dist=self.group.world == 1)
            if self.group.first:
                copy = _on_meta(model)
                copy.load_state_dict(weights, assign=True)
                save(copy, beside)
                (beside / STATE).write_text(json.dumps(dataclasses.asdict(progress)), encoding="utf-8")
                shutil.rmtree(place, ignore_errors=True)
                beside.rename(place)
                self._forget()
        self.group.wait()
        return place

    def load(self, place: Path, model: SequenceModel, optimiser: torch.optim.Optimizer) -> Progress:
        """Go back to a checkpoint; all processes take part."""
        progress = read_progress(place)
        try:
            weights = _weights(place, model)
            set_model_state_dict(
                model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
            )
            state = {"optimiser": get_optimizer_state_dict(model, optimiser)}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*torch.distributed.*")
                state_dict_loader.load(state, checkpoint_id=place / _OPTIMISER, no_dist=self.group.world == 1)
            set_optimizer_state_dict(model, optimiser, state["optimiser"])
        except Exception as error:
            # Damage shows in whatever reads it first: safetensors, pickle, or PyTorch's own formats.
            cure = "remove it to go on from the one before"
            raise CheckpointError(f"{place}: cannot be read ({error}); {cure}") from error
        return progress

    def latest(self) -> Path | None:
        """The last checkpoint that is whole."""
        found = self._all()
        return found[-1] if found else None

    def best(self) -> Path | None:
        """The checkpoint with the best validation."""
        path = self.folder / _BEST
        if not path.is_file():
            return None
        place = self.folder / json.loads(path.read_text(encoding="utf-8"))["checkpoint"]
        return place if (place / STATE).is_file() else None

    def best_score(self) -> float | None:
        """The best validation so far."""
        path = self.folder / _BEST
        return json.loads(path.read_text(encoding="utf-8"))["score"] if path.is_file() else None

    def mark_best(self, place: Path, score: float) -> None:
        """Remember that a checkpoint is the best so far."""
        if self.group.first:
            write_whole(self.folder / _BEST, json.dumps({"checkpoint": place.name, "score": score}))
            self._forget()
        self.group.wait()

    def _all(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"step-*/{STATE}"))

    def _forget(self) -> None:
        """Remove all but the last ones and the best."""
        best = self.best()
        for place in self._all()[: -self.keep]:
            if place != best:
                # Renamed first: what is half removed must not look whole.
                gone = place.rename(place.with_name(f".{place.name}.gone"))
                shutil.rmtree(gone, ignore_errors=True)


def read_progress(place: Path) -> Progress:
    """How far the run was at a checkpoint."""
    try:
        return Progress(**json.loads((place / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{place / STATE}: cannot be read ({error}); remove the folder {place.name}") from error


def _on_meta(model: SequenceModel) -> SequenceModel:
    with torch.device("meta"):
        return SequenceModel(model.config)


def _weights(place: Path, model: SequenceModel) -> dict[str, Any]:
    copy = _on_meta(model)
    fill(copy, load_file(place / WEIGHTS_FILE), str(place / WEIGHTS_FILE))
    return copy.state_dict()
