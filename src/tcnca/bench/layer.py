"""`tcnca bench layer`: one whole layer of the EnWik8 models: mixer, attention, gates and feed-forward net."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from tcnca.bench.check import DEEP_TOLERANCE
from tcnca.bench.entry import Entry, Pair, Settings, Subject, Work
from tcnca.bench.variants import Variant, arithmetic, config_of, exact_config, variants
from tcnca.layers import Layer
from tcnca.models import ModelConfig

GPU_SIZE, CPU_SIZE = (8, 8192), (1, 2048)
_CHECKED = 512
_FLOAT = 4
"""Bytes of a weight, and of a number of the sequence between layers."""


def layer_entries(settings: Settings) -> list[Entry]:
    """Every variant, as it is and compiled."""
    return list(_entries(settings))


def _entries(settings: Settings) -> Iterator[Entry]:
    batch, length = GPU_SIZE if settings.device.type == "cuda" else CPU_SIZE
    for rows in settings.batches or (batch,):
        for time in settings.lengths or (length,):
            for variant in variants(settings.device):
                for compiled in (False, True) if settings.compile else (False,):
                    yield _entry(settings, variant, rows, time, compiled)


def _entry(settings: Settings, variant: Variant, batch: int, length: int, compiled: bool) -> Entry:
    # Without dropout, so that what is compiled can be compared with what is not.
    config = config_of(variant, "enwik8", dropout=0.0)
    tokens = batch * length
    with torch.device("meta"):
        block = Layer(config)
        weights = sum(parameter.numel() for parameter in block.parameters())
        flops = 2 * block.macs(length) * tokens
    sequence, weights = tokens * config.d_model * _FLOAT, weights * _FLOAT
    return Entry(
        suite="layer",
        name=variant.name + ("-compiled" if compiled else ""),
        label=variant.label + (", compiled" if compiled else ""),
        about="a gated layer of the EnWik8 model, without dropout",
        sizes={"batch": batch, "length": length},
        tokens=tokens,
        build=lambda: _subject(config, settings, batch, length, compiled),
        pair=functools.partial(_compiled_pair if compiled else _pair, config, settings, batch, length),
        work={
            "forward": Work(2 * sequence + weights, flops),
            "backward": Work(3 * sequence + 2 * weights, 2 * flops),
        },
        tolerance=DEEP_TOLERANCE[settings.dtype],
        together=True,
    )


def _subject(config: ModelConfig, settings: Settings, batch: int, length: int, compiled: bool) -> Subject:
    torch.manual_seed(0)
    block = Layer(config).to(settings.device)
    if compiled:
        block.compile(dynamic=False)
    x = torch.randn(batch, length, config.d_model).to(settings.device)
    return _run(block, x, settings)


def _run(block: Layer, x: Tensor, settings: Settings) -> Subject:
    x.requires_grad_()

    def run() -> Tensor:
        with arithmetic(settings):
            y: Tensor = block(x)[0]
            return y

    return Subject(run, (x, *block.parameters()))


def _pair(config: ModelConfig, settings: Settings, batch: int, length: int) -> Pair:
    """A layer on one short row, and the same in float64 on the CPU."""
    exact = Layer(exact_config(config))
    block = Layer(config)
    block.load_state_dict(exact.state_dict())
    x = torch.randn(1, min(length, _CHECKED), config.d_model)
    doubled = x.double().requires_grad_()
    exact = exact.double()
    oracle = Subject(lambda: exact(doubled)[0], (doubled, *exact.parameters()))
    return Pair(_run(block.to(settings.device), x.to(settings.device), settings), oracle)


def _compiled_pair(config: ModelConfig, settings: Settings, batch: int, length: int) -> Pair:
    """A compiled layer at its full size, and the same as it is: that one is compared with float64 by itself.

    Code is made for one size; at a small one it would be other code.
    """
    return Pair(*(_subject(config, settings, batch, length, compiled) for compiled in (True, False)))
