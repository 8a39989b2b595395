"""Load a saved model, or that of a run as evaluation does, and export it without the rest of the run."""

from __future__ import annotations

from pathlib import Path

import torch

from tcnca import pretrained
from tcnca.errors import CheckpointError, ConfigError
from tcnca.files import atomic_write, to_json
from tcnca.models import SequenceModel, save
from tcnca.models import load as load_model
from tcnca.models.serialization import SavedDtype
from tcnca.training.checkpoint import CHECKPOINTS, CheckpointManager
from tcnca.training.distributed import DistContext
from tcnca.training.logger import LOG, read_log
from tcnca.training.provenance import RECIPE
from tcnca.training.recipe import load_recipe
from tcnca.training.report import RESULT, read_result, write_result


def load(folder: str | Path | None = None, device: str | torch.device = "cpu", *, best: bool = False) -> SequenceModel:
    """Read a model that `save` wrote, or the model of a run directory, in evaluation mode.

    The model takes raw inputs: it applies the preprocessing that it was trained with. Of a run that is not finished,
    the last checkpoint is read. The model of a run has the chunk size of its evaluation (`eval.chunk_size`).

    Args:
        folder: the folder; None for the pretrained model that comes with the package, a language model of bytes.
        device: `cpu` or `cuda`.
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
    run: str | Path | None, folder: str | Path, dtype: SavedDtype | None = None, *, best: bool = False
) -> Path:
    """Write the model of a run to a folder, with what `tcnca eval` and `tcnca compare` need of the run.

    These are its recipe, without the folder of prepared data sets, which other machines do not have, its result and its
    log. Checkpoints and optimizers stay behind.

    Args:
        run: run directory or saved model; None for the pretrained model.
        folder: folder to write to, which is created if it is missing.
        dtype: data type of the weights in the file, see `tcnca.save`.
        best: the best checkpoint of the run by validation, instead of the last.
    """
    run, folder = pretrained.FOLDER if run is None else Path(run), Path(folder)
    if (folder / CHECKPOINTS).exists() or (folder.exists() and run.exists() and folder.samefile(run)):
        raise ConfigError(f"{folder}: expected a folder of its own for the model, got a run; choose another one")
    model = load_model(_checkpoint(run, best))
    # Read and written, not copied: a run from elsewhere can have anything under these names.
    recipe = load_recipe(str(run / RECIPE)).override({"data.folder": None}) if (run / RECIPE).is_file() else None
    result, lines = read_result(run), read_log(run) if (run / LOG).is_file() else []
    save(model, folder, dtype)
    for path in (folder / RECIPE, folder / RESULT, folder / LOG, *folder.glob("eval-*.json")):  # of another model
        path.unlink(missing_ok=True)
    if recipe is not None:
        atomic_write(folder / RECIPE, recipe.to_yaml())
    if result is not None:
        write_result(folder, result)
    if lines:
        atomic_write(folder / LOG, "".join(to_json(line) + "\n" for line in lines))
    return folder


def _checkpoint(run: Path, best: bool) -> Path:
    """Return the folder of the model: the run directory itself, or its best checkpoint."""
    found = CheckpointManager(run / CHECKPOINTS, 1, DistContext()).best() if best else run
    if found is None:
        raise CheckpointError(f"{run}: has no best checkpoint, it was not validated; leave out --best")
    return found
