"""Messages of the operators name the field, what was expected and what was given."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca import InputError, StateError
from tcnca.ops import (
    AttentionState,
    chunked_attention,
    diagonal_scan,
    ema,
    initial_attention_state,
    initial_ema_state,
    initial_long_conv_state,
    initial_ssm_state,
    initial_tcn_state,
    long_conv,
    ssm,
    tcn,
)

# A name, the call, and what the message has to contain, the field first.
Row = tuple[str, Callable[[], object], list[str]]


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


X, EMPTY, FLAT = zeros(2, 5, 3), zeros(2, 0, 3), zeros(5, 3)
NO_TOKENS = ["[2, 0, 3]", "1 or more tokens"]
NO_BATCH = ["[5, 3]", "[batch, time, channels]"]
BIDIRECTIONAL = ["state:", "bidirectional"]

BLOCKS = zeros(2, 1, 3, 4)
tcn_both_ways = partial(tcn, X, BLOCKS, 2, causal=False)
TCN: list[Row] = [
    ("weight-dtype", lambda: tcn(X, BLOCKS.double(), 2), ["weight:", "torch.float32 like x", "got torch.float64"]),
    ("x-dimensions", lambda: tcn(FLAT, BLOCKS, 2), ["x:", *NO_BATCH]),
    ("x-empty", lambda: tcn(EMPTY, BLOCKS, 2), ["x:", *NO_TOKENS]),
    (
        "weight-dimensions",
        lambda: tcn(X, zeros(3, 4), 2),
        ["weight:", "[3, 4]", "[depth, convolutions, channels, kernel_size]"],
    ),
    ("weight-channels", lambda: tcn(X, zeros(2, 1, 5, 4), 2), ["weight:", "[2, 1, 5, 4]", "3 channels"]),
    ("weight-empty", lambda: tcn(X, zeros(0, 1, 3, 4), 2), ["weight:", "[0, 1, 3, 4]", "1 or more"]),
    ("dropout", lambda: tcn(X, BLOCKS, 2, dropout=math.nan), ["dropout:", "probability from 0 to 1", "got nan"]),
    ("factor", lambda: tcn(X, BLOCKS, 0), ["dilation_factor:", "got 0", "1 or more"]),
    (
        "activation",
        lambda: tcn(X, BLOCKS, 2, activation="tanh"),
        ["activation:", "'tanh'", "silu, gelu, gelu_tanh, relu, none"],
    ),
    ("state-bidirectional", lambda: tcn_both_ways(state=initial_tcn_state(2, 3, 4, 2, 2)), BIDIRECTIONAL),
    (
        "state-factor",
        lambda: tcn(X, BLOCKS, 2, state=initial_tcn_state(2, 3, 4, 3, 2)),
        ["state.buffers:", "[[2, 3, 3], [2, 9, 3]]", "[[2, 3, 3], [2, 6, 3]]"],
    ),
]

PARAMETERS = (zeros(1, 3, 4), zeros(1, 3, 4), zeros(1, 3, 4), zeros(1, 3, 4))
TWO_SIDED = (zeros(2, 3, 4), zeros(2, 3, 4), zeros(2, 3, 4), zeros(2, 3, 4))


def one_wrong(place: int) -> object:
    return ema(X, *(zeros(1, 3, 2) if i == place else part for i, part in enumerate(PARAMETERS)))


def run_ema(**options: Any) -> object:
    return ema(X, *PARAMETERS, **options)


EMA: list[Row] = [
    (
        "delta-dimensions",
        lambda: ema(X, zeros(3, 4), *PARAMETERS[1:]),
        ["delta:", "[3, 4]", "[directions, channels, d_state]"],
    ),
    ("delta-directions", lambda: ema(X, *[zeros(3, 3, 4)] * 4), ["delta:", "[3, 3, 4]", "1 or 2 directions"]),
    ("delta-empty", lambda: ema(X, *[zeros(1, 3, 0)] * 4), ["delta:", "[1, 3, 0]"]),
    ("gamma", lambda: one_wrong(3), ["gamma:", "[1, 3, 2]", "the same for all four"]),
    ("backend", lambda: run_ema(backend="loop"), ["backend:", "'loop'", "auto, chunked, fft, scan, recurrent, triton"]),
    ("omega", lambda: run_ema(omega=zeros(4)), ["omega:", "[4]", "[3]"]),
    ("activation", lambda: run_ema(activation="relu"), ["activation:", "'relu'", "'silu' or 'none'"]),
    ("truncation", lambda: run_ema(truncation=0), ["truncation:", "got 0", "None or 1 or more"]),
    ("state-bidirectional", lambda: ema(X, *TWO_SIDED, state=initial_ema_state(2, 3, 4)), BIDIRECTIONAL),
    (
        "state-hidden",
        lambda: run_ema(state=initial_ema_state(2, 3, 5)),
        ["state.hidden:", "got [2, 3, 5]", "[2, 3, 4]"],
    ),
    (
        "state-of-a-truncated-one",
        lambda: run_ema(state=initial_ema_state(2, 3, 4, truncation=6)),
        ["state.window:", "expected shape None", "got [2, 6, 3]"],
    ),
    (
        "state-of-one-not-truncated",
        lambda: run_ema(truncation=6, state=initial_ema_state(2, 3, 4)),
        ["state.window:", "got None", "[2, 6, 3]"],
    ),
]


KERNEL = zeros(1, 3, 4)
LONG_CONV: list[Row] = [
    ("x-empty", lambda: long_conv(EMPTY, KERNEL), ["x:", *NO_TOKENS]),
    ("kernel-dimensions", lambda: long_conv(X, zeros(3, 4)), ["kernel:", "[3, 4]", "[directions, channels, taps]"]),
    ("kernel-directions", lambda: long_conv(X, zeros(3, 3, 4)), ["kernel:", "[3, 3, 4]", "1 or 2 directions"]),
    ("kernel-channels", lambda: long_conv(X, zeros(1, 5, 4)), ["kernel:", "[1, 5, 4]", "3 channels"]),
    ("kernel-empty", lambda: long_conv(X, zeros(1, 3, 0)), ["kernel:", "[1, 3, 0]", "1 or more taps"]),
    ("state-bidirectional", lambda: long_conv(X, zeros(2, 3, 4), return_state=True), BIDIRECTIONAL),
    (
        "state-window",
        lambda: long_conv(X, KERNEL, state=initial_long_conv_state(2, 3, 5)),
        ["state.window:", "got [2, 4, 3]", "[2, 3, 3]"],
    ),
]

DECAYS = torch.zeros(1, 3, 4, dtype=torch.complex64)
V = torch.zeros(2, 5, 3, dtype=torch.complex64)
run_ssm: Any = partial(ssm, X, DECAYS, DECAYS)
run_scan: Any = partial(diagonal_scan, V, DECAYS[0, :, 0])
SSM: list[Row] = [
    ("x-empty", lambda: ssm(EMPTY, DECAYS, DECAYS), ["x:", *NO_TOKENS]),
    ("x-complex", lambda: ssm(V, DECAYS, DECAYS), ["x:", "real numbers", "got torch.complex64"]),
    ("real", lambda: ssm(X, DECAYS.real, DECAYS), ["log_decay:", "complex64", "got torch.float32", "torch.complex"]),
    ("weight", lambda: ssm(X, DECAYS, DECAYS[..., 1:]), ["weight:", "[1, 3, 3]", "[directions, channels, d_state]"]),
    ("channels", lambda: ssm(X, DECAYS[:, 1:], DECAYS), ["log_decay:", "[1, 2, 4]", "3 channels"]),
    ("backend", lambda: run_ssm(backend="loop"), ["backend:", "'loop'", "auto, chunked, fft, recurrent"]),
    ("lengths", lambda: run_ssm(lengths=torch.tensor([6, 1])), ["lengths:", "from 0 to 5", "[6]"]),
    ("state", lambda: run_ssm(state=initial_ssm_state(2, 3, 5)), ["state.hidden:", "[2, 3, 4, 2]", "got [2, 3, 5, 2]"]),
    ("state-future", lambda: ssm(X, *[DECAYS.expand(2, -1, -1)] * 2, return_state=True), ["state:", "only causal"]),
    ("scan-real", lambda: diagonal_scan(X, DECAYS[0, :, 0]), ["v:", "complex64", "got torch.float32"]),
    ("scan-states", lambda: diagonal_scan(V, DECAYS[0, 0]), ["log_decay:", "[3]", "got [4]"]),
    (
        "scan-dtype",
        lambda: diagonal_scan(V, DECAYS[0, :, 0].to(torch.complex128)),
        ["log_decay:", "complex64 like v", "complex128"],
    ),
    ("scan-backend", lambda: run_scan(backend="fft"), ["backend:", "'fft'", "auto, scan, recurrent"]),
    ("scan-state", lambda: run_scan(state=initial_ssm_state(1, 3)), ["state.hidden:", "[2, 3, 2]", "got [1, 3, 2]"]),
    ("scan-reverse", lambda: run_scan(reverse=True, return_state=True), ["state:", "only causal"]),
]


def attention(
    q: Tensor = X, k: Tensor = X, v: Tensor = X, chunk_size: int | None = 4, **options: Any
) -> tuple[Tensor, AttentionState | None]:
    return chunked_attention(q, k, v, chunk_size=chunk_size, **options)


PAST = AttentionState(zeros(2, 2, 3), zeros(2, 2, 3), torch.tensor([2, 0]))
BIAS_SHAPE = "[2 · max_length - 1]"
ATTENTION: list[Row] = [
    ("q-dimensions", lambda: attention(q=FLAT), ["q:", "[5, 3]", "[batch, time, d_key]"]),
    ("k", lambda: attention(k=zeros(2, 5, 4)), ["k:", "got [2, 5, 4]", "shape of q, [2, 5, 3]"]),
    ("v-time", lambda: attention(v=zeros(2, 6, 3)), ["v:", "got [2, 6, 3]", "[2, 5, d_value]"]),
    ("chunk_size", lambda: attention(chunk_size=0), ["chunk_size:", "got 0", "1 or more, or None"]),
    ("dropout-nan", lambda: attention(dropout=math.nan), ["dropout:", "got nan", "from 0 up to, not including, 1"]),
    ("activation", lambda: attention(activation="elu"), ["activation:", "'elu'", "softmax, relu2, laplace"]),
    ("state-bidirectional", lambda: attention(causal=False, state=initial_attention_state(2, 3, 3, 4)), BIDIRECTIONAL),
    (
        "state-of-another-chunk",
        lambda: attention(state=initial_attention_state(2, 3, 3, 6)),
        ["state.keys:", "got [2, 6, 3]", "[2, 4, 3]"],
    ),
    (
        "state-values",
        lambda: attention(state=initial_attention_state(2, 3, 7, 4)),
        ["state.values:", "got [2, 4, 7]", "[2, 4, 3]"],
    ),
    (
        "state-batch-of-full-attention",
        lambda: attention(chunk_size=None, state=initial_attention_state(1, 3, 3, None)),
        ["state.keys:", "got [1, 0, 3]", "[2, 0, 3]"],
    ),
    ("bias-short", lambda: attention(bias=zeros(5)), ["bias:", "got [5]", BIAS_SHAPE, "at least 4", "chunk size"]),
    ("bias-even", lambda: attention(bias=zeros(8)), ["bias:", "got [8]", BIAS_SHAPE]),
    (
        "bias-short-of-all-tokens",
        lambda: attention(chunk_size=None, bias=zeros(7)),
        ["bias:", "got [7]", "at least 5", "number of tokens"],
    ),
    (
        "bias-short-of-the-chunk-to-come",
        lambda: attention(chunk_size=6, bias=zeros(9), return_state=True),
        ["bias:", "got [9]", "at least 6", "chunk size"],
    ),
    (
        "bias-short-of-the-past",
        lambda: attention(chunk_size=None, bias=zeros(9), state=PAST),
        ["bias:", "got [9]", "at least 7", "number of tokens"],
    ),
]

TABLE = [
    pytest.param(*row[1:], id=f"{operator}-{row[0]}")
    for operator, rows in {"tcn": TCN, "ema": EMA, "long_conv": LONG_CONV, "ssm": SSM, "attention": ATTENTION}.items()
    for row in rows
]


@pytest.mark.parametrize(("call", "words"), TABLE)
def test_errors_name_the_field_and_what_was_expected(call: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(StateError if words[0].startswith("state") else InputError) as error:
        call()
    message = str(error.value)
    assert message.startswith(words[0])
    assert [word for word in words if word not in message] == [], message


def test_what_is_just_allowed_passes() -> None:
    # A bias need not cover more tokens than there are, unless more may follow.
    attention(chunk_size=6, bias=zeros(9))
    attention(chunk_size=5, bias=zeros(9), return_state=True)
    attention(chunk_size=None, bias=zeros(13), state=initial_attention_state(2, 3, 3, 2))
