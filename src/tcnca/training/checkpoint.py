"""Checkpoints of a run: complete or absent, readable on any number of processes, and free of code.

Each is a directory: `model.safetensors` and `config.json`, which `tcnca.load` reads; `optimizers-RANK.safetensors` of
every process that holds a part of the optimizers; and `state.json` with the state of the run and a SHA-256 of every
file, which shows accidents. It is written under another name and moved into place at the end.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from tcnca.config import NonNegativeInt, Seconds
from tcnca.errors import CheckpointError, ConfigError, shown
from tcnca.files import atomic_write, disk_errors, parse_json, read_json, to_json
from tcnca.models import SequenceModel, save
from tcnca.models.serialization import CONFIG_FILE, WEIGHTS_FILE, fill
from tcnca.training.distributed import DistContext
from tcnca.training.logger import MeterState

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run directory."""
STATE = "state.json"
BEST_FILE = "best.json"
"""Names the best checkpoint of a run."""
_ROWS = "rows"
_REMEDY = "remove this checkpoint to resume from the one before"
_OTHER_VERSION = "if another version of tcnca wrote it, resume with that version or train again in another --out"


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """The state of a run besides the model and the optimizers."""

    step: NonNegativeInt = 0
    """Steps done."""
    seconds: Seconds = 0.0
    """Time spent, over all launches."""
    data: str = ""
    """Digest of the data set, so that a run is not resumed on other data."""
    score: float | None = None
    """Score of the last validation."""
    meter: list[MeterState] = dataclasses.field(default_factory=list)
    """Sums since the last line of the log, by process."""
    compile_seconds: Seconds = 0.0
    """Time of the first steps, while code is compiled; the schedule of a time budget leaves it out."""
    grown_at: NonNegativeInt | None = None
    """The first step with batches of full size, once it is known; for batches that grow."""


@dataclasses.dataclass(kw_only=True)
class _Saved:
    """The content of `state.json`."""

    format: Literal["tcnca-checkpoint-2"] = "tcnca-checkpoint-2"
    state: TrainState
    files: dict[str, str]
    """SHA-256 of every other file."""


@dataclasses.dataclass(kw_only=True)
class _Best:
    """The content of `best.json`."""

    checkpoint: str
    score: float

    def __post_init__(self) -> None:
        # It names a folder next to the file, and nothing else.
        if not re.fullmatch(r"step-\d+", self.checkpoint, re.ASCII):
            raise ConfigError(f"checkpoint: expected a name such as step-000001000, got {shown(self.checkpoint)}")


class CheckpointManager:
    """The checkpoints in a directory. All processes must call `save`, `load`, `mark_best` and `clean_up`."""

    def __init__(self, folder: Path, keep: int, dist: DistContext) -> None:
        self.folder, self.keep, self.dist = folder, keep, dist

    def save(self, model: SequenceModel, optimizers: Sequence[torch.optim.Optimizer], state: TrainState) -> Path:
        """Write a checkpoint."""
        place = self.folder / _name(state.step)
        partial = self.folder / f".{place.name}.partial"
        weights = _gather_weights(model, self.dist.is_main)
        with disk_errors(self.folder), self._remove_on_error(partial):
            with self._all_or_none():
                if self.dist.is_main:
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
            with self._all_or_none():
                _write_optimizers(partial, model, optimizers, self.dist.rank)
                if self.dist.is_main:
                    copy = _on_meta(model)
                    copy.load_state_dict(weights, assign=True)
                    save(copy, partial)
            with self._all_or_none():
                if self.dist.is_main:
                    files = {path.name: checksum(path) for path in sorted(partial.iterdir())}
                    content = dataclasses.asdict(_Saved(state=state, files=files))
                    (partial / STATE).write_text(to_json(content), encoding="utf-8")
                    shutil.rmtree(place, ignore_errors=True)
                    partial.rename(place)
                    self._remove_old()
        return place

    def load(self, place: Path, model: SequenceModel, optimizers: Sequence[torch.optim.Optimizer]) -> TrainState:
        """Restore the model and the optimizers from a checkpoint, and return the state of the run."""
        saved = _read(place)
        _verify(place, saved.files)
        # First, as it may take a step of the optimizers.
        _read_optimizers(place, _shards(saved.files), model, optimizers)
        copy, path = _on_meta(model), place / WEIGHTS_FILE
        with _reading(path):
            fill(copy, load_file(path), str(path))
        _set_weights(model, copy.state_dict())
        return saved.state

    def latest(self) -> Path | None:
        """Return the last checkpoint."""
        if self.folder.is_dir() and not os.access(self.folder, os.R_OK | os.X_OK):
            raise CheckpointError(f"{self.folder}: cannot be read ({os.strerror(errno.EACCES)})")
        latest = max(self.folder.glob("step-*"), default=None)
        if latest is not None and latest not in self._all():
            raise CheckpointError(f"{latest / STATE}: is missing, or cannot be read; {_REMEDY}")
        return latest

    def best(self) -> Path | None:
        """Return the checkpoint with the best validation."""
        marked = self._read_best()
        place = None if marked is None else self.folder / marked.checkpoint
        return place if place is not None and (place / STATE).is_file() else None

    def best_score(self) -> float | None:
        """Return the best validation so far; None if its checkpoint is gone, so that another can take its place."""
        marked = self._read_best()
        return None if marked is None or self.best() is None else marked.score

    def mark_best(self, place: Path, score: float) -> None:
        """Mark a checkpoint as the best so far."""
        if self.dist.is_main:
            best = _Best(checkpoint=place.name, score=score)
            atomic_write(self.folder / BEST_FILE, json.dumps(dataclasses.asdict(best)))
        self.clean_up()

    def clean_up(self) -> None:
        """Remove old checkpoints, and what a killed run has left."""
        with disk_errors(self.folder), self._all_or_none():
            if self.dist.is_main:
                self._remove_old()

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Wait for all processes at the end of a block, and raise an OSError on all if one could not write."""
        failure: OSError | None = None
        try:
            yield
        except (OSError, SafetensorError) as error:
            failure = _disk_error(error)
        number = failure.errno or errno.EIO if failure else 0
        number = int(self.dist.all_reduce_max(torch.tensor(float(number))))
        if number:
            raise OSError(number, os.strerror(number)) from failure

    @contextlib.contextmanager
    def _remove_on_error(self, partial: Path) -> Iterator[None]:
        """Remove an incomplete checkpoint."""
        try:
            yield
        except OSError:
            if self.dist.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _read_best(self) -> _Best | None:
        path = self.folder / BEST_FILE
        if not path.is_file():
            return None
        remedy = "remove it, and the best checkpoint is chosen from then on"
        best: _Best = read_json(path, _Best, error=CheckpointError, remedy=remedy)
        return best

    def _all(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"step-*/{STATE}") if path.is_file())

    def _remove_old(self) -> None:
        """Remove all checkpoints but the last ones and the best, and incomplete files."""
        for rest in self.folder.glob(".step-*"):
            shutil.rmtree(rest, ignore_errors=True)
        (self.folder / f".{BEST_FILE}").unlink(missing_ok=True)
        best = self.best()
        for place in self._all()[: -self.keep]:
            if place != best:
                # Renamed first: a checkpoint that is partly removed must not look complete.
                removed = place.rename(place.with_name(f".{place.name}.removed"))
                shutil.rmtree(removed, ignore_errors=True)


def verify(place: Path) -> None:
    """Raise a CheckpointError if files of a checkpoint differ from what was written."""
    _verify(place, _read(place).files)


def read_state(place: Path) -> TrainState:
    """Read the state of the run at a checkpoint."""
    return _read(place).state


def _name(step: int) -> str:
    return f"step-{step:09}"


# The files of a checkpoint.


def _read(place: Path) -> _Saved:
    """Read `state.json`, and check that it belongs here."""
    path = place / STATE
    saved: _Saved = read_json(path, _Saved, error=CheckpointError, remedy=f"{_REMEDY}, or, {_OTHER_VERSION}")
    if _name(saved.state.step) != place.name:
        got = shown(saved.state.step)
        raise CheckpointError(f"{path}: state.step: expected the step in {place.name}, got {got}; {_REMEDY}")
    if {CONFIG_FILE, WEIGHTS_FILE, *_shards(saved.files)} != saved.files.keys():
        got = shown(list(saved.files))
        raise CheckpointError(f"{path}: files: expected the names of a checkpoint's files, got {got}; {_REMEDY}")
    return saved


def _shards(files: Iterable[str]) -> list[str]:
    """Return the files of the optimizers."""
    return [name for name in files if re.fullmatch(r"optimizers-\d+\.safetensors", name, re.ASCII)]


def _verify(place: Path, files: Mapping[str, str]) -> None:
    """Raise a CheckpointError if files differ from what was written: file formats may not notice a few wrong bytes."""
    for name, expected in files.items():
        path = place / name
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; {_REMEDY}")
        if checksum(path) != expected:
            raise CheckpointError(f"{path}: is damaged, its checksum differs from what was written; {_REMEDY}")


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert the errors of a damaged file."""
    try:
        yield
    except (OSError, SafetensorError, ConfigError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {_REMEDY}") from error


def _disk_error(error: OSError | SafetensorError) -> OSError:
    """Return the error of the disk that an error of safetensors stands for."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"os error (\d+)", str(error))
    if number is None:
        raise error
    return OSError(int(number[1]), os.strerror(int(number[1])))


# The model.


def _on_meta(model: SequenceModel) -> SequenceModel:
    with torch.device("meta"):
        return SequenceModel(model.config, model.preprocessing)


def _gather_weights(model: SequenceModel, is_main: bool) -> dict[str, Tensor]:
    """Return all weights on the main process, and nothing on the others."""
    weights = {}
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_main:
            weights[name] = full.cpu()
    return weights


def _set_weights(model: SequenceModel, weights: Mapping[str, Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        part = _part(tensor)
        part.local.copy_(torch.atleast_1d(weights[name])[part.first : part.first + len(part.local)])


# The optimizers. Their tensors and numbers are saved by name, each process writing its own rows.


class _Part(NamedTuple):
    """What this process holds of a tensor."""

    local: Tensor
    """Its rows, which share memory with the tensor."""
    first: int
    """Index of the first row."""
    shape: torch.Size
    """Shape of the whole tensor."""


def _part(value: Tensor | float) -> _Part:
    """Return what this process holds of a tensor or a number, with at least one dimension."""
    if isinstance(value, DTensor):
        if value.placements != (Shard(0),):
            raise NotImplementedError(f"expected tensors that are sharded by rows, as by FSDP, got {value.placements}")
        size, rows = value.device_mesh.size(), len(value)
        first = min(-(-rows // size) * value.device_mesh.get_local_rank(), rows)
        return _Part(value.to_local(), first, value.shape)
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    local = torch.atleast_1d(value)
    return _Part(local, 0, local.shape)


def _optimizer_slots(
    model: SequenceModel, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, tuple[dict[str, Any], str]]:
    """Return by name where the tensors and numbers of the optimizers are: a dictionary and the key in it.

    Other values of a parameter group, such as flags, follow from the recipe and the device.
    """
    # A state dict contains the sharded parameters, also after a forward pass that has left some of them gathered.
    names = {tensor: name for name, tensor in model.state_dict(keep_vars=True).items()}
    slots: dict[str, tuple[dict[str, Any], str]] = {}
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, Tensor | int | float) and not isinstance(value, bool):
                    slots[f"{index}.groups.{number}.{key}"] = group, key
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor | int | float):
                        slots[f"{index}.state.{names[parameter]}.{key}"] = state, key
                    elif value is not None:
                        kind = f"{type(optimizer).__name__}: state {key} of type {type(value).__name__}"
                        raise NotImplementedError(f"{kind} cannot be saved, only tensors and numbers")
    return slots


def _write_optimizers(
    folder: Path, model: SequenceModel, optimizers: Sequence[torch.optim.Optimizer], rank: int
) -> None:
    """Write the rows that this process holds. The main process writes what all processes have."""
    tensors: dict[str, Tensor] = {}
    rows: dict[str, int] = {}
    for name, (values, key) in _optimizer_slots(model, optimizers).items():
        part = _part(values[key])
        if rank == 0 or (part.first and len(part.local)):
            tensors[name] = part.local.detach().cpu().contiguous()
            if part.first:
                rows[name] = part.first
    if tensors:
        path = folder / f"optimizers-{rank:05}.safetensors"
        save_file(tensors, path, {_ROWS: json.dumps(rows)})
        # Safetensors makes files private to the owner; they should follow the umask, as the folder does.
        path.chmod(folder.stat().st_mode & 0o666)


class _Piece(NamedTuple):
    """Rows of a tensor, in a file."""

    first: int
    shape: list[int]
    path: Path
    rows: Any
    """A slice of safetensors."""


def _read_optimizers(
    place: Path, names: Sequence[str], model: SequenceModel, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Fill the optimizers, of which each process reads its own rows, however they were saved."""
    pieces: dict[str, list[_Piece]] = {}
    with contextlib.ExitStack() as files, torch.no_grad():
        for path in (place / name for name in names):
            with _reading(path):
                file = files.enter_context(safe_open(path, framework="pt"))
                rows = parse_json((file.metadata() or {}).get(_ROWS, ""), dict[str, int])
                for name in file.keys():  # noqa: SIM118, not a dict
                    found = file.get_slice(name)
                    pieces.setdefault(name, []).append(_Piece(rows.get(name, 0), found.get_shape(), path, found))
        # An optimizer that has not taken a step has no state.
        for index, optimizer in enumerate(optimizers):
            if any(name.startswith(f"{index}.state.") for name in pieces):
                _create_state(optimizer)
        slots = _optimizer_slots(model, optimizers)
        missing, unknown = sorted(slots.keys() - pieces.keys()), sorted(pieces.keys() - slots.keys())
        if missing or unknown:
            got = f"missing {shown(missing)}, unknown {shown(unknown)}"
            raise CheckpointError(f"{place}: expected the state of the optimizers, got {got}; {_REMEDY}")
        for name, (values, key) in slots.items():
            _check_pieces(name, pieces[name], _part(values[key]))
        for name, (values, key) in slots.items():
            part = _part(values[key])
            for piece in pieces[name]:
                start = max(part.first, piece.first)
                end = min(part.first + len(part.local), piece.first + piece.shape[0])
                if start < end:
                    read = piece.rows[start - piece.first : end - piece.first]
                    part.local[start - part.first : end - part.first].copy_(read)
            if not isinstance(values[key], Tensor):
                values[key] = type(values[key])(part.local.item())


def _check_pieces(name: str, pieces: list[_Piece], part: _Part) -> None:
    """Raise a CheckpointError unless pieces are of the right type, and have every row of a tensor once."""
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.first):
        columns, expected = piece.shape[1:], list(part.shape[1:])
        # The type is that of an empty slice: its name in the file is the format's own.
        if not piece.shape or columns != expected or piece.rows[0:0].dtype != part.local.dtype:
            wanted = f"rows of {expected} in {part.local.dtype}"
            raise CheckpointError(f"{piece.path}: {name}: expected {wanted}, got shape {piece.shape}; {_REMEDY}")
        if piece.first != end:
            raise CheckpointError(f"{piece.path}: {name}: expected row {end}, got {shown(piece.first)}; {_REMEDY}")
        end += piece.shape[0]
    if end != part.shape[0]:
        raise CheckpointError(f"{pieces[0].path}: {name}: expected {part.shape[0]} rows, got {end}; {_REMEDY}")


def _create_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer create its state by taking a step, which leaves weights and state to be overwritten."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
