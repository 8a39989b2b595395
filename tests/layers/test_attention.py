"""Chunked attention as a module: its position parameters and the changeable chunk size."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tcnca import AttentionConfig
from tcnca.errors import ConfigError, StateError
from tcnca.layers import ChunkedAttention, LayerConfig
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


@pytest.mark.parametrize(
    ("causal", "fields"),
    [
        *((causal, {"chunk_size": size}) for causal in (True, False) for size in (5, None)),
        (True, {"activation": "laplace"}),
        (False, {"position": "none"}),
        (True, {"rope_fraction": 0.5}),
        (True, {"memory": True}),
        (True, {"memory": True, "rope_fraction": 0.5}),
        (True, {"memory": True, "num_heads": 1, "position": "none"}),
        (True, {"memory": True, "activation": "relu2"}),
    ],
)
def test_heads_and_memory_equal_the_formula(causal: bool, fields: dict[str, Any]) -> None:
    module = _attention(causal, **{"num_heads": 2, "d_key": 8, "d_value": 8, "position": "rope", **fields})
    q, k, v = (torch.randn(2, 13, 8, dtype=torch.float64) for _ in range(3))
    with torch.no_grad():
        assert_close(module(q, k, v), formulas.attention(module, q, k, v))


def test_each_head_has_its_norm_scale_and_shifted_keys() -> None:
    options: dict[str, Any] = {"position": "rope", "qk_norm": True, "shift_keys": True, "d_value": 4}
    module = _attention(num_heads=2, **options | {"d_key": 8, "d_value": 8})
    q, k, v = (torch.randn(2, 13, 8, dtype=torch.float64) for _ in range(3))
    assert module.qk_scale is not None
    expected = []
    for head, parts in enumerate(zip(*(part.chunk(2, -1) for part in (q, k, v)), strict=True)):
        alone = _attention(**options)
        assert alone.qk_scale is not None
        with torch.no_grad():
            alone.qk_scale.copy_(module.qk_scale[head : head + 1])
        expected.append(alone(*parts))
    with torch.no_grad():
        assert_close(module(q, k, v), torch.cat(expected, -1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 3}, "num_heads: expected a divisor of d_key, the width of all heads, 4, got 3"),
        ({"num_heads": 2, "position": "none"}, "num_heads: expected a divisor of d_value, .*, 3, got 2"),
        ({"num_heads": 2, "d_value": 4}, "position: expected 'rope' or 'none' with several heads, got 'simple'"),
        (
            {"num_heads": 4, "d_value": 4, "position": "rope"},
            "d_key: expected an even number for each of 4 heads for position 'rope', which rotates pairs, got 1",
        ),
        ({"memory": True}, "position: expected 'rope' or 'none' with memory, got 'simple'"),
        ({"memory": True, "position": "rope", "chunk_size": None}, "memory: expected False without chunks, got True"),
    ],
)
def test_configurations_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        AttentionConfig(**{"d_key": 4, "d_value": 3, "chunk_size": 5, **fields})


def test_memory_is_causal() -> None:
    config = AttentionConfig(d_key=4, d_value=3, memory=True, position="rope")
    for build in (lambda: ChunkedAttention(config, causal=False), lambda: LayerConfig(attention=config, causal=False)):
        with pytest.raises(ConfigError, match=r"^memory: expected False for bidirectional attention, got True"):
            build()


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
