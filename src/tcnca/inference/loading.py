"""Load a saved model, or that of a run as evaluation does."""

from __future__ import annotations

from pathlib import Path

import torch

from tcnca.errors import CheckpointError
from tcnca.models import SequenceModel
from tcnca.models import load as load_model
from tcnca.training.checkpoint import CheckpointManager
from tcnca.training.distributed import DistContext
from tcnca.training.provenance import RECIPE
from tcnca.training.recipe import load_recipe


def load(folder: str | Path, device: str | torch.device = "cpu", *, best: bool = False) -> SequenceModel:
    """Read a model that `save` wrote, or the model of a run directory, in evaluation mode.

    The model takes raw inputs: it applies the preprocessing that it was trained with. Of a run that is not finished,
    the last checkpoint is read. The model of a run has the chunk size of its evaluation (`eval.chunk_size`).

    Args:
        folder: the folder.
        device: `cpu` or `cuda`.
        best: the best checkpoint of the run by validation, instead of the last.
    """
    run = Path(folder)
    found = CheckpointManager(run / "checkpoints", 1, DistContext()).best() if best else run
    if found is None:
        raise CheckpointError(f"{run}: has no best checkpoint, it was not validated; leave out --best")
    model = load_model(found, device)
    if (run / RECIPE).is_file() and model.config.attention is not None:
        chunk_size = load_recipe(str(run / RECIPE)).eval.chunk_size
        if chunk_size is not None:
            model.set_chunk_size(chunk_size)
    return model
