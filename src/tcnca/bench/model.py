"""`tcnca bench model`: a step of training of the EnWik8 models, forward, backward and the update."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from tcnca.bench.check import DEEP_TOLERANCE
from tcnca.bench.entry import Entry, Pair, Settings, Subject
from tcnca.bench.variants import Variant, config_of, model_pair, training_subject, variants
from tcnca.bench.work import model_work
from tcnca.models import ModelConfig
from tcnca.training import OptimizerConfig, load_recipe

GPU_SIZE, CPU_SIZE = (8, 8192), (1, 1024)
CPU_LAYERS = 2


def model_entries(settings: Settings) -> list[Entry]:
    """Every variant, as it is and compiled."""
    return list(_entries(settings))


def _entries(settings: Settings) -> Iterator[Entry]:
    on_gpu = settings.device.type == "cuda"
    batch, length = GPU_SIZE if on_gpu else CPU_SIZE
    layers = settings.num_layers or (None if on_gpu else CPU_LAYERS)
    for rows in settings.batches or (batch,):
        for time in settings.lengths or (length,):
            for variant in variants(settings.device):
                config = config_of(variant, "enwik8", **({} if layers is None else {"num_layers": layers}))
                for compiled in (False, True) if settings.compile else (False,):
                    yield _entry(settings, variant, config, rows, time, compiled)


def _entry(settings: Settings, variant: Variant, config: ModelConfig, batch: int, length: int, compiled: bool) -> Entry:
    optimizer = load_recipe(f"enwik8-{variant.family}").optimizer
    step = functools.partial(training_subject, config, optimizer, settings, batch, length)
    return Entry(
        suite="model",
        name=variant.name + ("-compiled" if compiled else ""),
        label=variant.label + (", compiled" if compiled else ""),
        about="a step of training of the EnWik8 model on random bytes, with dropout, clipping and AdamW",
        sizes={"batch": batch, "length": length, "num_layers": config.num_layers},
        tokens=batch * length,
        build=functools.partial(step, compiled=compiled),
        pair=functools.partial(_loss_pair, config, optimizer, settings, batch, length)
        if compiled
        else functools.partial(model_pair, config, settings, length),
        work=model_work(config, length, batch * length),
        tolerance=DEEP_TOLERANCE[settings.dtype],
        together=True,
        isolated=False,
    )


def _loss_pair(config: ModelConfig, optimizer: OptimizerConfig, settings: Settings, batch: int, length: int) -> Pair:
    """The loss of a compiled model at its full size, and of the same as it is.

    That one is compared with float64 by itself. Dropout draws other numbers when compiled, so that nothing but the
    loss can be compared, and code without dropout would be other code.
    """
    subjects = (training_subject(config, optimizer, settings, batch, length, compiled=way) for way in (True, False))
    return Pair(*(Subject(subject.run) for subject in subjects))
