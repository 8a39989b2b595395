"""Load the model of a run, as evaluation does."""

from __future__ import annotations

from pathlib import Path

import torch

from tcnca.errors import CheckpointError
from tcnca.models import SequenceModel, load
from tcnca.training.checkpoint import CheckpointManager
from tcnca.training.distributed import DistContext
from tcnca.training.provenance import RECIPE
from tcnca.training.recipe import load_recipe


def load_run(run: Path, device: str | torch.device = "cpu", *, best: bool = False) -> SequenceModel:
    """Return the model of a run directory or a saved model, with the chunk size with which its run is evaluated.

    Args:
        run: the folder.
        device: `cpu` or `cuda`.
        best: the best checkpoint of the run by validation, instead of the last.
    """
    folder = CheckpointManager(run / "checkpoints", 1, DistContext()).best() if best else run
    if folder is None:
        raise CheckpointError(f"{run}: has no best checkpoint, it was not validated; leave out --best")
    model = load(folder, device)
    if (run / RECIPE).is_file() and model.config.attention is not None:
        chunk_size = load_recipe(str(run / RECIPE)).eval.chunk_size
        if chunk_size is not None:
            model.set_chunk_size(chunk_size)
    return model
