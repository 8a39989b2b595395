"""A sequence to look at a model with: of a file, of the data of a run, of the package, or random."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcnca.data.custom.streams import read_errors
from tcnca.data.npy import array_errors, map_array
from tcnca.errors import ConfigError, DataError, InputError
from tcnca.files import check_regular
from tcnca.models import SequenceModel, TokenInputConfig, ValueInputConfig
from tcnca.models.prediction import check_sequence, is_one_sequence, to_sequence
from tcnca.training.provenance import RECIPE
from tcnca.training.recipe import load_recipe

_TEXT = Path(__file__).parent / "sample.txt"
_WORD = 16
"""Bytes that a token takes at most in a text of words."""


class Sample(NamedTuple):
    """One sequence.

    x: `[1, time]` or `[1, time, features]`, on the device of the model.
    about: where it comes from.
    """

    x: Tensor
    about: str


def read_sample(model: SequenceModel, path: Path, tokens: int) -> Sample:
    """Read up to `tokens` of a file: a text, or an .npy for a model of values, whose first sequence is taken."""
    example: Any
    if isinstance(model.config.input, ValueInputConfig):
        if path.suffix.lower() != ".npy":
            raise DataError(
                f"{path}: expected an .npy file, as the model reads values, got {path.suffix or 'no suffix'}"
            )
        with array_errors(path, "give an .npy file with one or more sequences"):
            check_regular(path)
            array = map_array(path)
            example = array if is_one_sequence(model, array.shape) else array[0]
    else:
        with read_errors(path):
            check_regular(path)
            with path.open("rb") as file:
                example = file.read(tokens * (1 if model.preprocessing.symbols is None else _WORD))
    sequence = to_sequence(model, example, str(path))
    if len(sequence) < 2:
        raise DataError(f"{path}: expected at least 2 tokens or time steps, got {len(sequence)}; give a longer file")
    sequence = check_sequence(model, sequence[:tokens], str(path))
    return Sample(_tensor(model, sequence), path.name)


def find_sample(model: SequenceModel, folder: Path | None, tokens: int) -> Sample:
    """Return the beginning of a run's validation data; without it, a text of the package or random inputs."""
    if folder is not None and (folder / RECIPE).is_file():
        try:
            return _run_sample(model, folder, tokens)
        except (DataError, ConfigError, InputError, StopIteration):
            pass  # the data of the run may be on another machine
    if model.preprocessing.byte_map is not None:
        known = set(model.preprocessing.byte_map)
        text = bytes(byte for byte in _TEXT.read_bytes() if byte in known)[:tokens]
        if len(text) > 1:
            return Sample(_tensor(model, to_sequence(model, text, "sample")), "a text of the package")
    generator = torch.Generator().manual_seed(0)
    if isinstance(model.config.input, TokenInputConfig):
        drawn = torch.randint(model.config.input.vocab_size, (tokens,), generator=generator)
        return Sample(_tensor(model, drawn.numpy()), "random tokens")
    features = getattr(model.config.input, "features", 1)
    values = torch.randn(tokens, features, generator=generator).numpy()
    facts = model.preprocessing
    if facts.input_mean is not None and facts.input_std is not None:
        values = values * np.array(facts.input_std) + np.array(facts.input_mean)
    return Sample(_tensor(model, values), "random values")


def _run_sample(model: SequenceModel, folder: Path, tokens: int) -> Sample:
    task = load_recipe(str(folder / RECIPE)).build_task()
    split = task.eval_split("validation")
    batch = next(iter(task.eval_batches(split, 1)))
    x = batch.inputs[:1, : tokens if batch.lengths is None else min(tokens, int(batch.lengths[0]))]
    if x.shape[1] < 2:
        raise DataError(f"{task.name}: expected a sequence of at least 2 tokens, got {x.shape[1]}")
    model.embedding.check_shape("x", x)
    model.embedding.check_values("x", x)
    return Sample(x.to(model.embedding.weight.device), f"{task.name}, {split}")


def _tensor(model: SequenceModel, sequence: NDArray[Any]) -> Tensor:
    """Return a sequence as the input of a model in float32."""
    real = isinstance(model.config.input, ValueInputConfig)
    x = torch.from_numpy(np.array(sequence, np.float32 if real else np.int64)).unsqueeze(0)
    return x.to(model.embedding.weight.device)
