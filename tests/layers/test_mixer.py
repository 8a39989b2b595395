"""What all mixers share: tensors in and out, states on request, clear errors, the dtype of the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tcnca
from tcnca import ConfigError, InputError, StateError
from tcnca.ops import tcn
from tests.comparison import assert_close

MIXERS = pytest.mark.parametrize(
    "mixer",
    [tcnca.TCN, tcnca.EMA, tcnca.S4D, tcnca.S5, tcnca.LRU, tcnca.SGConv],
    ids=["tcn", "ema", "s4d", "s5", "lru", "sgconv"],
)


@MIXERS
def test_mixer_maps_a_tensor_to_a_tensor(mixer: Any) -> None:
    layer, x = mixer(64), torch.randn(2, 30, 64)
    y = layer(x)
    assert isinstance(y, torch.Tensor)
    assert y.shape == x.shape
    assert mixer(64, causal=False)(x).shape == x.shape


def test_fields_can_be_passed_instead_of_a_configuration() -> None:
    assert tcnca.TCN(8, kernel_size=5, depth=2).weight.shape == (2, 1, 8, 5)
    assert tcnca.TCN(8, tcnca.TCNConfig(depth=3), kernel_size=5).weight.shape == (3, 1, 8, 5)
    assert tcnca.EMA(8, d_state=4).delta.shape == (1, 8, 4)
    assert tcnca.SGConv(8, kernel_length=16, piece_size=4).weight.shape == (1, 8, 3, 4)
    assert tcnca.CDIL(8, depth=2).weight.shape == (2, 8, 24)
    q = torch.randn(1, 6, 4)
    assert tcnca.ChunkedAttention(d_key=4, d_value=4, chunk_size=2)(q, q, q).shape == q.shape


@MIXERS
@torch.no_grad()
def test_state_is_returned_if_it_is_asked_for_or_given(mixer: Any) -> None:
    layer, x = mixer(8), torch.randn(2, 30, 8)
    first, state = layer(x[:, :20], return_state=True)
    second, state = layer(x[:, 20:25], state=state)
    third = layer(x[:, 25:], state=state, return_state=False)
    assert_close(torch.cat([first, second, third], 1), layer(x))
    assert_close(layer(x, state=layer.initial_state(2))[0], layer(x))


@MIXERS
@pytest.mark.parametrize("time", [1, 50])
@torch.no_grad()
def test_a_state_has_memory_of_its_own(mixer: Any, time: int) -> None:
    """A view into what was computed would keep a whole sequence in memory, or change with it."""
    layer, x = mixer(8), torch.randn(2, time, 8)
    y, state = layer(x, return_state=True)
    tensors = [value for value in vars(state).values() if isinstance(value, torch.Tensor)]
    copies = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    y.zero_()
    x.zero_()
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)


@MIXERS
@torch.no_grad()
def test_batches_can_be_empty(mixer: Any) -> None:
    assert mixer(8)(torch.randn(0, 5, 8)).shape == (0, 5, 8)


@MIXERS
def test_states_of_others_are_refused(mixer: Any) -> None:
    other = tcnca.EMA(8) if mixer is tcnca.TCN else tcnca.TCN(8)
    with pytest.raises(StateError, match=r"^state: expected a (TCN|EMA|SSM|LongConv)State, got a (TCN|EMA)State"):
        mixer(8)(torch.randn(2, 3, 8), state=other.initial_state(2))
    for asked in ({"return_state": True}, {"state": mixer(8).initial_state(2)}):
        with pytest.raises(StateError, match="bidirectional"):
            mixer(8, causal=False)(torch.randn(2, 3, 8), **asked)


@MIXERS
@pytest.mark.parametrize("width", [0, -1, 2.5, True])
def test_width_must_be_positive(mixer: Any, width: Any) -> None:
    with pytest.raises(ConfigError, match=r"^d_model: "):
        mixer(width)


@MIXERS
def test_channels_first_input_is_named(mixer: Any) -> None:
    layer = mixer(8)
    with pytest.raises(
        InputError, match=r"^x: expected shape \[batch, time, 8\], got \[2, 8, 30\]; .*transpose\(1, 2\)"
    ):
        layer(torch.randn(2, 8, 30))
    for shape in ((2, 30, 7), (2, 30), (30,), (2, 0, 8)):
        with pytest.raises(InputError, match=r"^x: expected shape \[batch, time, 8\], got"):
            layer(torch.randn(shape))


@MIXERS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_are_named(mixer: Any, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"^x: expected torch\.float32, .*got {dtype}"):
        mixer(8)(torch.randn(2, 5, 8).to(dtype))
    assert mixer(8).to(dtype)(torch.randn(2, 5, 8).to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    "layer",
    [
        *(tcnca.TCN(8), tcnca.TCN(8, output="activation"), tcnca.EMA(8), tcnca.EMA(8, output="skip")),
        *(tcnca.SGConv(8), tcnca.SGConv(8, output="activation"), tcnca.SGConv(8, output="none")),
        *(kind(8, output=output) for kind in (tcnca.S4D, tcnca.S5, tcnca.LRU) for output in ("none", "activation")),
    ],
    ids=[
        *("tcn", "tcn-activation", "ema", "ema-skip", "sgconv", "sgconv-activation", "sgconv-none"),
        *("s4d", "s4d-activation", "s5", "s5-activation", "lru", "lru-activation"),
    ],
)
@torch.no_grad()
def test_autocast_keeps_the_dtype_of_the_operator(layer: Any) -> None:
    x = torch.randn(2, 40, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, layer(x.float()))


@torch.no_grad()
def test_the_skip_connection_of_a_tcn_rounds_as_its_operator() -> None:
    layer, x = tcnca.TCN(8), torch.randn(2, 40, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        h, _ = tcn(x, layer.weight, 8, activation="none", residual=False)
    assert h.dtype == torch.bfloat16
    assert layer.omega is not None
    assert torch.equal(y, (h + layer.omega * x.bfloat16()).bfloat16())
    assert not torch.equal(y, (h + layer.omega * x).bfloat16())
