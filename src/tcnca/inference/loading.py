"""Load a saved model, or that of a run as evaluation does, and export it without the rest of the run."""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path

import torch

from tcnca import pretrained
from tcnca.errors import CheckpointError, ConfigError, shown
from tcnca.files import atomic_write, to_json
from tcnca.models import SequenceModel, save
from tcnca.models import load as load_model
from tcnca.models.serialization import CONFIG_FILE, WEIGHTS_FILE, SavedDtype, saved_dtype
from tcnca.training.checkpoint import CHECKPOINTS, CheckpointManager
from tcnca.training.distributed import DistContext
from tcnca.training.logger import LOG, read_log
from tcnca.training.provenance import RECIPE
from tcnca.training.recipe import load_recipe
from tcnca.training.report import RESULT, read_result, write_result

_EXPORTED = {CONFIG_FILE, WEIGHTS_FILE, RECIPE, RESULT, LOG}
_EVALUATIONS = "eval-*.json"


def load(folder: str | Path | None = None, device: str | torch.device = "cpu", *, best: bool = False) -> SequenceModel:
    """Read a model that `save` wrote, or the model of a run directory, in evaluation mode.

    The model takes raw inputs: it applies the preprocessing that it was trained with. Of a run that is not finished,
    the last checkpoint is read. The model of a run has the chunk size of its evaluation (`eval.chunk_size`).

    Args:
        folder: the folder; None for the pretrained model that comes with the package, a language model of bytes.
        device: `cpu`, `cuda` or `mps`.
        best: the best checkpoint of the run by validation, instead of the last.
    """
    run = pretrained.FOLDER if folder is None else Path(folder)
    model = load_model(_checkpoint(run, best), device)
    if (run / RECIPE).is_file() and model.config.attention is not None:
        chunk_size = load_recipe(str(run / RECIPE)).eval.chunk_size
        if chunk_size is not None:
            model.set_chunk_size(chunk_size)
    return model


def export_model(
    run: str | Path | None,
    folder: str | Path,
    dtype: SavedDtype | None = None,
    *,
    best: bool = False,
    force: bool = False,
) -> Path:
    """Write the model of a run to a folder, with what `tcnca eval` and `tcnca compare` need of the run.

    These are its recipe, without the folder of prepared data sets, which other machines do not have, its result, with
    the scores of the last weights before they were rounded, and its log. Checkpoints and optimizers stay behind.

    Args:
        run: run directory or saved model; None for the pretrained model.
        folder: folder to write to, which is created if it is missing.
        dtype: data type of the weights in the file, see `tcnca.save`; None for that of the file they come from.
        best: the best checkpoint of the run by validation, instead of the last. The result then has no scores.
        force: replace what an earlier export has written to the folder.
    """
    run, folder = pretrained.FOLDER if run is None else Path(run), Path(folder)
    _check_replaceable(folder, force)
    found = _checkpoint(run, best)
    model, dtype = load_model(found), dtype or saved_dtype(found)
    # Read and written, not copied: a run from elsewhere can have anything under these names.
    recipe = load_recipe(str(run / RECIPE)).override({"data.folder": None}) if (run / RECIPE).is_file() else None
    result, lines = read_result(run), read_log(run) if (run / LOG).is_file() else []
    # Those of another model, before its weights: a model without scores is better than one with those of another.
    for path in (folder / RECIPE, folder / RESULT, folder / LOG, *folder.glob(_EVALUATIONS)):
        if path.exists():
            path.unlink()
    save(model, folder, dtype)
    if recipe is not None:
        atomic_write(folder / RECIPE, recipe.to_yaml())
    if result is not None:
        write_result(folder, dataclasses.replace(result, scores={}) if best else result)
    if lines:
        atomic_write(folder / LOG, "".join(to_json(line) + "\n" for line in lines))
    return folder


def _check_replaceable(folder: Path, force: bool) -> None:
    """Raise an error unless a folder is new or, with `force`, has nothing but a model that was exported."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(name for name in names - _EXPORTED if not fnmatch.fnmatch(name, _EVALUATIONS))
    if others:
        raise ConfigError(f"{folder}: expected a new folder for the model, got one with {shown(others[0])} in it")
    if names and not force:
        raise ConfigError(f"{folder}: expected a new folder for the model, got one that exists; --force replaces it")
    if names:
        saved_dtype(folder)  # an error if it is a model of another library


def _checkpoint(run: Path, best: bool) -> Path:
    """Return the folder of the model: the run directory itself, or its best checkpoint."""
    if not best:
        return run
    if not (run / CHECKPOINTS).is_dir():
        name = pretrained.NAME if run == pretrained.FOLDER else run
        raise CheckpointError(f"{name}: has no best checkpoint, only a model; leave out --best")
    found = CheckpointManager(run / CHECKPOINTS, 1, DistContext()).best()
    if found is None:
        raise CheckpointError(f"{run}: has no best checkpoint, it was not validated; leave out --best")
    return found
