"""Chunked attention as the models of the paper have it: one head, wide values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from tcnca.bench.check import TOLERANCE
from tcnca.bench.entry import Entry, Inputs, Settings, Work
from tcnca.bench.functions import function_entry
from tcnca.layers import AttentionConfig
from tcnca.models import preset
from tcnca.ops import attend, chunked_attention, offset_bias

# Rows and tokens on a GPU.
_MODELS = {"enwik8": (8, 8192), "text": (32, 4096), "pathx": (16, 16384)}
_CPU_SIZE, _CPU_CHUNK = (1, 2048), 512
_CHUNKS = 2
"""Of the sequences that are checked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of a model on sequences of some size."""

    config: AttentionConfig
    causal: bool
    batch: int
    length: int

    @property
    def chunk(self) -> int:
        """Tokens that see one another."""
        return min(self.config.chunk_size or self.length, self.length)


def attention_entries(settings: Settings) -> Iterator[Entry]:
    """The attention of three models, as the library does it by itself and in plain PyTorch."""
    on_gpu = settings.device.type == "cuda"
    for model, size in _MODELS.items():
        config = preset(f"tcnca-{model}").model
        batch, length = size if on_gpu else _CPU_SIZE
        assert config.attention is not None
        chunk = config.attention.chunk_size if on_gpu else min(config.attention.chunk_size or _CPU_CHUNK, _CPU_CHUNK)
        attention = dataclasses.replace(config.attention, chunk_size=chunk)
        case = Attention(config=attention, causal=config.causal, batch=batch, length=length)
        yield _entry(settings, model, case, "auto")
        if on_gpu:
            # On a CPU the library's choice is this one.
            yield _entry(settings, model, case, "naive")


def _entry(settings: Settings, model: str, case: Attention, backend: Literal["auto", "naive"]) -> Entry:
    small = dataclasses.replace(case, batch=1, length=min(case.length, _CHUNKS * case.chunk))
    own = backend == "auto"
    way = "as chosen by the library" if own else "in plain PyTorch"
    config = case.config
    return function_entry(
        suite="ops",
        name="attention" if own else "attention-plain",
        label="chunked attention" if own else "chunked attention, plain",
        about=f"chunks of {case.chunk}, keys {config.d_key} and values {config.d_value} wide, "
        f"{config.activation}, {'causal' if case.causal else 'bidirectional'}, {way}",
        sizes={"of": model, "batch": case.batch, "length": case.length, "chunk_size": case.chunk},
        tokens=case.batch * case.length,
        inputs=lambda checking: _inputs(small if checking else case, settings),
        run=lambda *parts: _attention(*parts, case=case, backend=backend),
        oracle=lambda *parts: dense_attention(*parts, case=case),
        work=_work(case, settings.dtype),
        tolerance=TOLERANCE[settings.dtype],
    )


def _inputs(case: Attention, settings: Settings) -> Inputs:
    kind: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device}
    widths = (case.config.d_key, case.config.d_key, case.config.d_value)
    q, k, v = (torch.randn(case.batch, case.length, width, **kind) for width in widths)
    # The bias is a parameter, which stays in float32.
    return Inputs((q, k, v, torch.randn(2 * case.chunk - 1, device=settings.device)))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, case: Attention, backend: Literal["auto", "naive"]
) -> Tensor:
    how: dict[str, Any] = {"chunk_size": case.chunk, "causal": case.causal, "activation": case.config.activation}
    return chunked_attention(q, k, v, bias=bias, backend=backend, **how)[0]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, case: Attention) -> Tensor:
    """The same between all tokens at once, with a mask for those of other chunks."""
    place = torch.arange(q.shape[1], device=q.device)
    chunk = place // case.chunk
    mask = chunk == chunk.unsqueeze(1)
    if case.causal:
        mask = mask & (place <= place.unsqueeze(1))
    return attend(q, k, v, activation=case.config.activation, bias=offset_bias(bias, place, place), mask=mask)


def _work(case: Attention, dtype: torch.dtype) -> dict[str, Work]:
    tokens, keys = case.batch * case.length, (case.chunk + 1) / 2 if case.causal else case.chunk
    z, v = case.config.d_key, case.config.d_value
    moved = tokens * (2 * z + 2 * v) * dtype.itemsize
    # Backwards: the scores once more, and the gradients of weights, values, queries and keys.
    return {
        "forward": Work(moved, 2 * tokens * keys * (z + v)),
        "backward": Work(2 * moved, 2 * tokens * keys * (3 * z + 2 * v)),
    }
