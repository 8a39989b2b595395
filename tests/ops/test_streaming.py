"""What operators promise with state in and out: split invariance, padding, causality, states as values."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, Protocol
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tcnca.ops import (
    ATTENTION_ACTIVATIONS,
    AttentionState,
    EMABackend,
    EMAState,
    LongConvState,
    SSMBackend,
    SSMState,
    TCNState,
    chunked_attention,
    diagonal_scan,
    ema,
    initial_attention_state,
    initial_ema_state,
    initial_ssm_state,
    long_conv,
    ssm,
    tcn,
)
from tests.comparison import assert_close
from tests.ops import properties
from tests.ops.properties import (
    EXTRA,
    PYTORCH_EMA,
    PYTORCH_SSM,
    SIZES,
    THOROUGH,
    WAITING,
    Case,
    counts,
    leaf,
    some_lengths,
)

CHUNKED: Any = importlib.import_module("tcnca.ops.ema.chunked")
NAIVE_SSM: Any = importlib.import_module("tcnca.ops.ssm.naive")
BATCH, CHANNELS, HIDDEN, WIDTH = 3, 2, 3, 3
# A truncation of the EMA, taps of a kernel, the chunk size of attention, or the number of a shape of the TCN. A
# truncation of one is tested apart.
LIMITS = st.none() | st.integers(2, 9)
SOME_LIMITS = pytest.mark.parametrize("limit", [None, 4], ids=["full", "limited"])


# Kernel size, dilation factor, depth, convolutions per block.
TCN_SHAPES = [
    (3, 2, 2, 1),
    (1, 2, 2, 1),
    (4, 3, 2, 2),
    (2, 1, 3, 2),
    (3, 5, 2, 1),
    (5, 2, 1, 2),
    (2, 3, 3, 1),
    (4, 4, 2, 1),
    (5, 1, 2, 2),
    (2, 5, 3, 2),
]


class Make(Protocol):
    def __call__(self, time: int, limit: int | None = None, *, causal: bool = True, extra: bool = False) -> Case: ...


def tcn_case(time: int, limit: int | None = None, *, causal: bool = True, extra: bool = False) -> Case:
    """`limit` selects a shape, `extra` leaves the skip connections out."""
    torch.manual_seed(0)
    kernel_size, factor, depth, convolutions = TCN_SHAPES[limit or 0]
    weight, bias = leaf(depth, convolutions, CHANNELS, kernel_size), leaf(depth, convolutions, CHANNELS)

    def operator(x: Tensor, **options: Any) -> tuple[Tensor, TCNState | None]:
        return tcn(x, weight, factor, bias=bias, causal=causal, residual=not extra, **options)

    return Case(operator, (leaf(BATCH, time, CHANNELS),), {"weight": weight, "bias": bias})


def ema_case(
    time: int, limit: int | None = None, *, causal: bool = True, extra: bool = False, backend: EMABackend
) -> Case:
    """`extra` adds a skip connection and a SiLU."""
    torch.manual_seed(0)
    delta, alpha, beta, gamma = (leaf(1 if causal else 2, CHANNELS, HIDDEN, scale=1.5) for _ in range(4))
    omega = leaf(CHANNELS) if extra else None

    def operator(x: Tensor, **options: Any) -> tuple[Tensor, EMAState | None]:
        options |= {"backend": backend, "truncation": limit}
        options |= {"omega": omega, "activation": "silu" if extra else "none"}
        # A few tokens would be one block.
        with mock.patch.multiple(CHUNKED, SHORT_BLOCK=3, CARRY_BLOCK=2):
            return ema(x, delta, alpha, beta, gamma, **options)

    parameters = {"delta": delta, "alpha": alpha, "beta": beta, "gamma": gamma}
    parameters |= {} if omega is None else {"omega": omega}
    return Case(operator, (leaf(BATCH, time, CHANNELS),), parameters)


def long_conv_case(time: int, limit: int | None = None, *, causal: bool = True, extra: bool = False) -> Case:
    """`extra` leaves one tap, with which there is no past."""
    torch.manual_seed(0)
    kernel = leaf(1 if causal else 2, CHANNELS, 1 if extra else limit or 30)

    def operator(x: Tensor, **options: Any) -> tuple[Tensor, LongConvState | None]:
        return long_conv(x, kernel, **options)

    return Case(operator, (leaf(BATCH, time, CHANNELS),), {"kernel": kernel})


def log_decays(*sizes: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return parameters, and the logarithms of decays from slow to fast that they give."""
    parts = {"damping": leaf(*sizes), "phase": leaf(*sizes, scale=2.0)}
    return parts, torch.complex(-torch.exp(parts["damping"]), parts["phase"])


def ssm_case(
    time: int, limit: int | None = None, *, causal: bool = True, extra: bool = False, backend: SSMBackend
) -> Case:
    """There is no limit and nothing extra."""
    torch.manual_seed(0)
    directions = 1 if causal else 2
    parts, log_decay = log_decays(directions, CHANNELS, HIDDEN)
    weight = leaf(directions, CHANNELS, HIDDEN, 2)

    def operator(x: Tensor, **options: Any) -> tuple[Tensor, SSMState | None]:
        with mock.patch.multiple(CHUNKED, SHORT_BLOCK=3, CARRY_BLOCK=2), mock.patch.object(NAIVE_SSM, "BLOCK", 4):
            return ssm(x, log_decay, torch.view_as_complex(weight), backend=backend, **options)

    return Case(operator, (leaf(BATCH, time, CHANNELS),), parts | {"weight": weight})


def scan_case(time: int, limit: int | None = None, *, causal: bool = True, extra: bool = False) -> Case:
    """Half of the channels are real parts, the others imaginary ones. `extra` uses the recurrence."""
    torch.manual_seed(0)
    parts, log_decay = log_decays(CHANNELS)

    def operator(x: Tensor, **options: Any) -> tuple[Tensor, SSMState | None]:
        v = torch.complex(*x.chunk(2, -1))
        options |= {"backend": "recurrent" if extra else "scan", "reverse": not causal}
        with mock.patch.object(CHUNKED, "CARRY_BLOCK", 3):
            h, state = diagonal_scan(v, log_decay, **options)
        return torch.cat([h.real, h.imag], -1), state

    return Case(operator, (leaf(BATCH, time, 2 * CHANNELS),), parts)


def attention_case(
    time: int, limit: int | None = None, *, causal: bool = True, extra: bool = False, activation: str
) -> Case:
    """`extra` leaves the position bias out."""
    torch.manual_seed(0)
    # Full attention keeps the padding of every call, and some tests continue one state twice.
    bias = None if extra else leaf(2 * 100 - 1)

    def operator(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, AttentionState | None]:
        options |= {"chunk_size": limit, "causal": causal, "activation": activation, "bias": bias}
        return chunked_attention(q, k, v, **options)

    leaves = (leaf(BATCH, time, WIDTH), leaf(BATCH, time, WIDTH), leaf(BATCH, time, CHANNELS))
    return Case(operator, leaves, {} if bias is None else {"bias": bias})


MAKERS: dict[str, Make] = {"tcn": tcn_case, "long_conv": long_conv_case}
MAKERS |= {f"ema-{name}": partial(ema_case, backend=name) for name in PYTORCH_EMA}
MAKERS |= {f"ssm-{name}": partial(ssm_case, backend=name) for name in ("chunked", "fft")} | {"scan": scan_case}
MAKERS |= {f"attention-{name}": partial(attention_case, activation=name) for name in ATTENTION_ACTIVATIONS}
every_operator = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every_operator
@THOROUGH
@given(limit=LIMITS, sizes=SIZES, extra=st.booleans())
def test_many_calls_equal_one(make: Make, limit: int | None, sizes: list[int], extra: bool) -> None:
    properties.assert_split_invariant(make(sum(sizes), limit, extra=extra), sizes)


@every_operator
@THOROUGH
@given(limit=LIMITS, sizes=SIZES)
def test_inplace_equals_a_new_state(make: Make, limit: int | None, sizes: list[int]) -> None:
    properties.assert_inplace_changes_nothing(make(sum(sizes), limit), sizes)


@every_operator
@given(limit=LIMITS, sizes=SIZES)
def test_a_state_can_be_used_again(make: Make, limit: int | None, sizes: list[int]) -> None:
    properties.assert_state_left_alone(make(sum(sizes), limit), sizes)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@every_operator
@THOROUGH
@given(limit=LIMITS, lengths=some_lengths(BATCH, 9))
def test_padding_is_ignored(make: Make, causal: bool, limit: int | None, lengths: list[int]) -> None:
    properties.assert_padding_ignored(make(9, limit, causal=causal), lengths)


@every_operator
@THOROUGH
@example(limit=None, calls=WAITING, extra=0, inplace=False)
@example(limit=4, calls=WAITING, extra=0, inplace=False)
@example(limit=4, calls=WAITING, extra=0, inplace=True)
@given(limit=LIMITS, calls=counts(BATCH), extra=EXTRA, inplace=st.booleans())
def test_rows_of_different_lengths_stream_independently(
    make: Make, limit: int | None, calls: list[list[int]], extra: int, inplace: bool
) -> None:
    case = make(max(map(sum, zip(*calls, strict=True))), limit)
    with torch.set_grad_enabled(not inplace):
        properties.assert_ragged_stream(case, calls, extra, inplace)


@pytest.mark.parametrize(
    ("limit", "lengths"), [(None, [0, 6, 0]), (1, [0, 1, 6]), (2, [1, 2, 3]), (3, [6, 3, 2]), (9, [0, 6, 1])], ids=str
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@every_operator
def test_rows_and_chunks_without_tokens_give_no_nan(
    make: Make, causal: bool, limit: int | None, lengths: list[int]
) -> None:
    properties.assert_padding_gives_no_nan(make(6, limit, causal=causal), lengths, streaming=causal)


@SOME_LIMITS
@every_operator
def test_tensors_without_values_stream(make: Make, limit: int | None) -> None:
    with FakeTensorMode():
        case = make(9, limit)
        lengths, state = torch.full((BATCH,), 4), None
        for tokens in (slice(4), slice(4, 8), slice(8, 9)):
            piece = [part[:, tokens] for part in case.inputs]
            y, state = case.operator(*piece, state=state, return_state=True)
            assert y.shape[:2] == piece[0].shape[:2]
        case.operator(*(part[:, :4] for part in case.inputs), lengths=lengths, state=state, return_state=True)


@every_operator
@given(limit=LIMITS, at=st.integers(1, 9))
def test_outputs_depend_on_the_past_only(make: Make, limit: int | None, at: int) -> None:
    # A Fourier transform spreads its rounding over all times.
    spreading = [MAKERS[name] for name in ("ema-fft", "ssm-fft", "long_conv")]
    properties.assert_causal(make(10, limit), at, exact=make not in spreading)


@SOME_LIMITS
@every_operator
def test_strided_inputs_give_the_same(make: Make, limit: int | None) -> None:
    properties.assert_layout_does_not_matter(make(9, limit), [1, 6, 2])


@SOME_LIMITS
def test_starting_from_the_initial_state_equals_starting_from_none(limit: int | None) -> None:
    states = (
        initial_ema_state(BATCH, CHANNELS, HIDDEN, limit, dtype=torch.float64),
        initial_attention_state(BATCH, WIDTH, CHANNELS, limit, dtype=torch.float64),
        initial_ssm_state(BATCH, CHANNELS, HIDDEN, dtype=torch.float64),
        initial_ssm_state(BATCH, CHANNELS, dtype=torch.float64),
    )
    names = ("ema-fft", "attention-softmax", "ssm-chunked", "scan")
    for make, state in zip((MAKERS[name] for name in names), states, strict=True):
        case = make(7, limit)
        assert_close(case.operator(*case.inputs, state=state)[0].detach(), case.operator(*case.inputs)[0].detach())


@pytest.mark.parametrize("backend", PYTORCH_EMA)
def test_a_truncation_of_one_has_no_past(backend: str) -> None:
    case = MAKERS[f"ema-{backend}"](7, 1)
    with torch.no_grad():
        _, state = case.operator(case.inputs[0][:, :4], return_state=True)
        continued, _ = case.operator(case.inputs[0][:, 4:], state=state)
        afresh, _ = case.operator(case.inputs[0][:, 4:])
    assert_close(continued, afresh)


@pytest.mark.parametrize(
    ("make", "backend"), [*((ema_case, name) for name in PYTORCH_EMA), *((ssm_case, name) for name in PYTORCH_SSM)]
)
def test_another_backend_continues_a_state(make: Any, backend: str) -> None:
    first, second, whole = (make(11, backend=form) for form in ("fft", backend, "recurrent"))
    with torch.no_grad():
        _, state = first.operator(first.inputs[0][:, :6], return_state=True)
        y, _ = second.operator(first.inputs[0][:, 6:], state=state)
        assert_close(y, whole.operator(*first.inputs)[0][:, 6:])
