"""`tcnca bench lra`: the encoders of Long-Range Arena, TCNCA against MEGA-chunk, inference and training."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from tcnca.bench.check import DEEP_TOLERANCE
from tcnca.bench.entry import Entry, Settings
from tcnca.bench.variants import Variant, config_of, model_pair, training_subject, variants
from tcnca.bench.work import model_work
from tcnca.models import ModelConfig, PairHeadConfig
from tcnca.training import load_recipe

# Rows and tokens; of Retrieval, pairs of documents.
GPU_SIZES = {
    "listops": (32, 2048),
    "text": (32, 4096),
    "retrieval": (16, 4096),
    "image": (50, 1024),
    "pathfinder": (50, 1024),
    "pathx": (16, 16_384),
}
CPU_ROWS, CPU_LENGTH, CPU_LAYERS, CPU_CHUNK = 1, 1024, 2, 256


def lra_entries(settings: Settings) -> list[Entry]:
    """Every variant of every task."""
    return list(_entries(settings))


def _entries(settings: Settings) -> Iterator[Entry]:
    on_gpu = settings.device.type == "cuda"
    for task, (batch, length) in GPU_SIZES.items():
        rows = settings.batches[0] if settings.batches else (batch if on_gpu else CPU_ROWS)
        longest = settings.lengths[0] if settings.lengths else (length if on_gpu else CPU_LENGTH)
        time = min(length, longest)
        for variant in variants(settings.device):
            config = config_of(variant, task)
            yield _entry(settings, task, variant, config.override(**_changes(settings, config)), rows, time)


def _changes(settings: Settings, config: ModelConfig) -> dict[str, Any]:
    """How a model is made smaller for a CPU."""
    layers = {} if settings.num_layers is None else {"num_layers": settings.num_layers}
    if settings.device.type == "cuda":
        return layers
    assert config.attention is not None
    chunk = min(config.attention.chunk_size or CPU_CHUNK, CPU_CHUNK)
    return {"num_layers": min(config.num_layers, CPU_LAYERS), "chunk_size": chunk, **layers}


def _entry(settings: Settings, task: str, variant: Variant, config: ModelConfig, batch: int, length: int) -> Entry:
    optimizer = load_recipe(f"{task}-{variant.family}").optimizer
    tokens = batch * length * (2 if isinstance(config.head, PairHeadConfig) else 1)
    return Entry(
        suite="lra",
        name=variant.name,
        label=variant.label,
        about=f"the encoder of {task} on random data, inference and a step of training",
        sizes={"task": task, "batch": batch, "length": length, "num_layers": config.num_layers},
        tokens=tokens,
        build=functools.partial(training_subject, config, optimizer, settings, batch, length, inference=True),
        pair=functools.partial(model_pair, config, settings, length),
        work=model_work(config, length, tokens),
        tolerance=DEEP_TOLERANCE[settings.dtype],
        together=True,
        isolated=False,
    )
