"""Chunked attention as a module: its position parameters and the changeable chunk size."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tcnca import AttentionConfig
from tcnca.errors import StateError
from tcnca.layers import ChunkedAttention
from tcnca.layers.attention import QK_EPS, Position
from tcnca.layers.norm import rms_norm
from tcnca.models import SequenceModel, preset
from tcnca.ops import ATTENTION_ACTIVATIONS
from tests.comparison import assert_close
from tests.examples import pairwise
from tests.layers import formulas

POSITIONS = pytest.mark.parametrize("position", get_args(Position))


def _attention(causal: bool = True, **fields: Any) -> ChunkedAttention:
    config = AttentionConfig(**{"d_key": 4, "d_value": 3, "chunk_size": 5, "max_length": 16, **fields})
    module = ChunkedAttention(config, causal).double().eval()
    formulas.scramble(module)
    return module


def _qkv(time: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, time, width, dtype=torch.float64) for width in (4, 4, 3))
    return q, k, v


@pytest.mark.parametrize(
    ("causal", "position", "function", "chunk_size"),
    pairwise([True, False], get_args(Position), ATTENTION_ACTIVATIONS, [1, 5, 16, None]),
)
def test_equals_the_formula(causal: bool, position: str, function: str, chunk_size: int | None) -> None:
    module = _attention(causal, position=position, activation=function, chunk_size=chunk_size)
    q, k, v = _qkv()
    with torch.no_grad():
        assert_close(module(q, k, v), formulas.attention(module, q, k, v))


def test_rope_can_rotate_some_of_the_features() -> None:
    module = _attention(position="rope", rope_fraction=0.5)
    assert module.config.rope_width == 2
    assert AttentionConfig(d_key=96, position="rope", rope_fraction=0.0208333).rope_width == 2
    assert AttentionConfig(d_key=100, position="rope", rope_fraction=0.58).rope_width == 58
    q, k, v = _qkv()
    with torch.no_grad():
        assert_close(module(q, k, v), formulas.attention(module, q, k, v))
        assert not torch.equal(module(q, k, v), _attention(position="rope")(q, k, v))
        # Features that are not rotated see no positions.
        q[..., :2] = 0.0
        assert_close(module(q, k, v), _attention(position="none")(q, k, v))


@pytest.mark.parametrize("position", ["none", "rope"])
def test_normalized_queries_and_keys(position: str) -> None:
    module = _attention(position=position, qk_norm=True)
    plain = _attention(position=position)
    assert module.qk_scale is not None
    q, k, v = _qkv()
    with torch.no_grad():
        norms = [(x.square().mean(-1, keepdim=True) + QK_EPS).sqrt() for x in (q, k)]
        expected = plain(q / norms[0] * module.qk_scale, k / norms[1], v)
        assert_close(module(q, k, v), expected)
        # The scale of queries and keys no longer matters.
        assert_close(module(1000 * q, 1000 * k, v), expected, dtype=torch.float32)


@pytest.mark.parametrize("name", ["tcnca-linear-listops", "mega-recall-64", "tcnca-linear-enwik8"])
def test_queries_and_keys_are_normalized_from_the_start(name: str) -> None:
    """New models have small ones, as gates multiply them by small factors."""
    config = preset(name).model.override(num_layers=1, qk_norm=True, chunk_size=None, position="none")
    block: Any = SequenceModel(config).layers[0].block
    seen: list[Tensor] = []

    def record(module: ChunkedAttention, inputs: tuple[Tensor, ...]) -> None:
        assert module.qk_scale is not None
        seen.extend([rms_norm(inputs[0], module.qk_scale, QK_EPS), rms_norm(inputs[1], None, QK_EPS)])

    block.attention.register_forward_pre_hook(record)
    with torch.no_grad():
        block(torch.randn(2, 16, config.d_model), None, None, False, False)
    for x in seen:
        assert x.square().mean(-1).min() > 0.9


@pytest.mark.parametrize(
    ("causal", "position", "chunk_size"), pairwise([True, False], get_args(Position), [1, 3, 16, None])
)
def test_set_chunk_equals_a_module_with_that_chunk(causal: bool, position: str, chunk_size: int | None) -> None:
    module, other = _attention(causal, position=position), _attention(causal, position=position, chunk_size=chunk_size)
    other.load_state_dict(module.state_dict())
    q, k, v = _qkv()
    with torch.no_grad():
        before = module(q, k, v)
        module.set_chunk_size(chunk_size)
        assert_close(module(q, k, v), other(q, k, v))
        module.set_chunk_size(5)
        assert_close(module(q, k, v), before)


@POSITIONS
def test_streaming_after_set_chunk(position: str) -> None:
    module = _attention(position=position)
    module.set_chunk_size(7)
    q, k, v = _qkv()
    with torch.no_grad():
        parallel = module(q, k, v)
        state, pieces = module.initial_state(2, q.device, q.dtype), []
        for piece in (slice(0, 4), slice(4, 5), slice(5, 13)):
            y, state = module(q[:, piece], k[:, piece], v[:, piece], state=state, return_state=True)
            pieces.append(y)
    assert_close(torch.cat(pieces, 1), parallel)


@pytest.mark.parametrize("function", ATTENTION_ACTIVATIONS)
def test_dropout_drops_weights_in_training_only(function: str) -> None:
    # Values that are unit vectors make the output the weights themselves.
    module = _attention(dropout=0.25, activation=function, d_value=5)
    q, k = (torch.randn(40, 5, 4, dtype=torch.float64) for _ in range(2))
    v = torch.eye(5, dtype=torch.float64).expand(40, 5, 5)
    with torch.no_grad():
        weights = module.eval()(q, k, v)
        dropped = module.train()(q, k, v)
    kept = dropped != 0
    assert bool((kept < (weights != 0)).any())
    assert_close(dropped, weights / 0.75 * kept)


@pytest.mark.parametrize("position", ["none", "rope"])
def test_shifted_keys(position: str) -> None:
    """A query attends by the key of the preceding token, to the value and the position of a token."""
    module, plain = _attention(position=position, shift_keys=True), _attention(position=position)
    q, k, v = _qkv()
    with torch.no_grad():
        assert_close(module(q, k, v), plain(q, torch.cat([torch.zeros_like(k[:, :1]), k[:, :-1]], 1), v))


def test_the_last_key_is_that_of_the_last_valid_token() -> None:
    module = _attention(shift_keys=True)
    q, k, v = _qkv(6)
    with torch.no_grad():
        _, state = module(q, k, v, lengths=torch.tensor([4, 6]), return_state=True)
        assert torch.equal(state.last_key, torch.stack([k[0, 3], k[1, 5]]))
        _, state = module(q, k, v, lengths=torch.tensor([0, 1]), state=state, return_state=True)
        assert torch.equal(state.last_key, torch.stack([k[0, 3], k[1, 0]]))
        with pytest.raises(StateError, match=r"state\.last_key: expected shape \[2, 4\], got None"):
            module(q, k, v, state=dataclasses.replace(state, last_key=None), return_state=True)
