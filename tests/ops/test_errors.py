"""Every complaint of the operators: the field, what it got and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tcnca import InputError, StateError
from tcnca.ops import (
    AttentionState,
    chunked_attention,
    dilated_conv,
    ema,
    ema_kernel,
    initial_attention_state,
    initial_conv_state,
    initial_ema_state,
    initial_tcn_state,
    tcn,
)

# A name, the bad call, and what the message has to say.
Row = tuple[str, Callable[[], object], list[str]]


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


X = zeros(2, 5, 3)
EMPTY = zeros(2, 0, 3)
WEIGHT = zeros(3, 4)
CONV: list[Row] = [
    (
        "x-dimensions",
        lambda: dilated_conv(zeros(5, 3), WEIGHT, 1),
        ["x:", "[5, 3]", "[batch, time, channels]"],
    ),
    (
        "x-empty",
        lambda: dilated_conv(zeros(2, 0, 3), WEIGHT, 1),
        ["x:", "got shape [2, 0, 3]", "[2, 0, 3]", "1 or more"],
    ),
    (
        "weight-dimensions",
        lambda: dilated_conv(X, zeros(3), 1),
        ["weight:", "[3]", "[channels, kernel_size]"],
    ),
    ("weight-channels", lambda: dilated_conv(X, zeros(4, 4), 1), ["weight:", "[4, 4]", "3 channels"]),
    (
        "weight-empty",
        lambda: dilated_conv(X, zeros(3, 0), 1),
        ["weight:", "[3, 0]", "kernel_size of 1 or more"],
    ),
    ("dilation", lambda: dilated_conv(X, WEIGHT, 0), ["dilation:", "got 0", "1 or more"]),
    (
        "state-bidirectional",
        lambda: dilated_conv(X, WEIGHT, 1, causal=False, state=initial_conv_state(2, 3, 4, 1)),
        ["state:", "bidirectional", "allowed is None"],
    ),
    (
        "return_state-bidirectional",
        lambda: dilated_conv(X, WEIGHT, 1, causal=False, return_state=True),
        ["state:", "bidirectional", "allowed is None"],
    ),
    (
        "state-batch",
        lambda: dilated_conv(X, WEIGHT, 1, state=initial_conv_state(1, 3, 4, 1)),
        ["state.buffer:", "[1, 3, 3]", "[2, 3, 3]"],
    ),
    (
        "state-dilation",
        lambda: dilated_conv(X, WEIGHT, 1, state=initial_conv_state(2, 3, 4, 2)),
        ["state.buffer:", "[2, 6, 3]", "[2, 3, 3]"],
    ),
]

BLOCKS = zeros(2, 1, 3, 4)
TCN: list[Row] = [
    ("x-dimensions", lambda: tcn(zeros(5, 3), BLOCKS, 2), ["x:", "[5, 3]", "[batch, time, channels]"]),
    ("x-empty", lambda: tcn(zeros(2, 0, 3), BLOCKS, 2), ["x:", "[2, 0, 3]", "1 or more tokens"]),
    (
        "weight-dimensions",
        lambda: tcn(X, WEIGHT, 2),
        ["weight:", "[3, 4]", "[depth, convolutions, channels, kernel_size]"],
    ),
    ("weight-channels", lambda: tcn(X, zeros(2, 1, 5, 4), 2), ["weight:", "[2, 1, 5, 4]", "3 channels"]),
    ("weight-empty", lambda: tcn(X, zeros(0, 1, 3, 4), 2), ["weight:", "[0, 1, 3, 4]", "each 1 or more"]),
    ("factor", lambda: tcn(X, BLOCKS, 0), ["dilation_factor:", "got 0", "1 or more"]),
    (
        "nonlinearity",
        lambda: tcn(X, BLOCKS, 2, nonlinearity="tanh"),
        ["nonlinearity:", "'tanh'", "silu, gelu, gelu_tanh, relu, none"],
    ),
    (
        "state-bidirectional",
        lambda: tcn(X, BLOCKS, 2, causal=False, state=initial_tcn_state(2, 3, 4, 2, 2)),
        ["state:", "bidirectional", "allowed is None"],
    ),
    (
        "return_state-bidirectional",
        lambda: tcn(X, BLOCKS, 2, causal=False, return_state=True),
        ["state:", "bidirectional", "allowed is None"],
    ),
    (
        "state-factor",
        lambda: tcn(X, BLOCKS, 2, state=initial_tcn_state(2, 3, 4, 3, 2)),
        ["state.buffers:", "[[2, 3, 3], [2, 9, 3]]", "[[2, 3, 3], [2, 6, 3]]"],
    ),
    (
        "state-depth",
        lambda: tcn(X, BLOCKS, 2, state=initial_tcn_state(2, 3, 4, 2, 3)),
        ["state.buffers:", "[2, 12, 3]", "[[2, 3, 3], [2, 6, 3]]"],
    ),
]

PARAMETERS = (zeros(1, 3, 4), zeros(1, 3, 4), zeros(1, 3, 4), zeros(1, 3, 4))
TWO_SIDED = (zeros(2, 3, 4), zeros(2, 3, 4), zeros(2, 3, 4), zeros(2, 3, 4))
EMA: list[Row] = [
    ("x-dimensions", lambda: ema(zeros(5, 3), *PARAMETERS), ["x:", "[5, 3]", "[batch, time, channels]"]),
    ("x-empty", lambda: ema(zeros(2, 0, 3), *PARAMETERS), ["x:", "[2, 0, 3]", "1 or more tokens"]),
    (
        "delta-dimensions",
        lambda: ema(X, zeros(3, 4), *PARAMETERS[1:]),
        ["delta:", "[3, 4]", "[directions, channels, hidden]"],
    ),
    (
        "delta-directions",
        lambda: ema(X, *[zeros(3, 3, 4)] * 4),
        ["delta:", "[3, 3, 4]", "1 or 2 directions"],
    ),
    ("delta-channels", lambda: ema(X, *[zeros(1, 5, 4)] * 4), ["delta:", "[1, 5, 4]", "3 channels"]),
    (
        "delta-empty",
        lambda: ema(X, *[zeros(1, 3, 0)] * 4),
        ["delta:", "[1, 3, 0]", "[directions, channels, hidden]"],
    ),
    *(
        (
            name,
            lambda place=place: ema(X, *(zeros(1, 3, 2) if i == place else part for i, part in enumerate(PARAMETERS))),
            [f"{name}:", "[1, 3, 2]", "the same for all four"],
        )
        for place, name in enumerate(("alpha", "beta", "gamma"), start=1)
    ),
    (
        "backend",
        lambda: ema(X, *PARAMETERS, backend="loop"),  # type: ignore[arg-type]
        ["backend:", "'loop'", "fft, steps, scan, fused, auto"],
    ),
    (
        "truncation",
        lambda: ema(X, *PARAMETERS, truncation=0),
        ["truncation:", "got 0", "1 or more, or None"],
    ),
    (
        "kernel-short",
        lambda: ema(X, *PARAMETERS, kernel=ema_kernel(*PARAMETERS, 4)),
        ["kernel:", "[1, 3, 4]", "[1, 3, lags]", "5 or more"],
    ),
    (
        "kernel-short-for-a-window",
        lambda: ema(X, *PARAMETERS, truncation=8, kernel=ema_kernel(*PARAMETERS, 5), return_state=True),
        ["kernel:", "[1, 3, 5]", "8 or more"],
    ),
    (
        "kernel-directions",
        lambda: ema(X, *PARAMETERS, kernel=ema_kernel(*TWO_SIDED, 5)),
        ["kernel:", "[2, 3, 5]", "[1, 3, lags]"],
    ),
    (
        "kernel-dimensions",
        lambda: ema(X, *PARAMETERS, kernel=zeros(1, 3)),
        ["kernel:", "[1, 3]", "[1, 3, lags]"],
    ),
    (
        "state-bidirectional",
        lambda: ema(X, *TWO_SIDED, state=initial_ema_state(2, 3, 4)),
        ["state:", "bidirectional", "allowed is None"],
    ),
    (
        "return_state-bidirectional",
        lambda: ema(X, *TWO_SIDED, return_state=True),
        ["state:", "bidirectional", "allowed is None"],
    ),
    (
        "state-hidden",
        lambda: ema(X, *PARAMETERS, state=initial_ema_state(2, 3, 5)),
        ["state.hidden:", "[2, 3, 5]", "[2, 3, 4]"],
    ),
    (
        "state-batch",
        lambda: ema(X, *PARAMETERS, state=initial_ema_state(1, 3, 4)),
        ["state.hidden:", "[1, 3, 4]", "[2, 3, 4]"],
    ),
    (
        "state-of-a-truncated-one",
        lambda: ema(X, *PARAMETERS, state=initial_ema_state(2, 3, 4, truncation=6)),
        ["state.window:", "[2, 6, 3]", "None"],
    ),
    (
        "state-of-another-truncation",
        lambda: ema(X, *PARAMETERS, truncation=6, state=initial_ema_state(2, 3, 4, truncation=7)),
        ["state.window:", "[2, 7, 3]", "[2, 6, 3]"],
    ),
    (
        "state-of-one-not-truncated",
        lambda: ema(X, *PARAMETERS, truncation=6, state=initial_ema_state(2, 3, 4)),
        ["state.window:", "None", "[2, 6, 3]"],
    ),
]


def attention(
    q: Tensor = X, k: Tensor = X, v: Tensor = X, chunk_size: int | None = 4, **options: object
) -> tuple[Tensor, AttentionState | None]:
    return chunked_attention(q, k, v, chunk_size=chunk_size, **options)  # type: ignore[arg-type]


ATTENTION: list[Row] = [
    ("q-dimensions", lambda: attention(q=zeros(5, 3)), ["q:", "[5, 3]", "[batch, time, width]"]),
    (
        "q-empty",
        lambda: attention(q=EMPTY, k=EMPTY, v=EMPTY),
        ["q:", "[2, 0, 3]", "1 or more tokens"],
    ),
    ("k", lambda: attention(k=zeros(2, 5, 4)), ["k:", "[2, 5, 4]", "that of q, [2, 5, 3]"]),
    ("v-time", lambda: attention(v=zeros(2, 6, 3)), ["v:", "[2, 6, 3]", "[2, 5, d_value]"]),
    ("v-dimensions", lambda: attention(v=zeros(2, 5)), ["v:", "[2, 5]", "[2, 5, d_value]"]),
    ("chunk_size", lambda: attention(chunk_size=0), ["chunk:", "got 0", "1 or more, or None"]),
    ("dropout-of-all", lambda: attention(dropout=1.0), ["dropout:", "got 1.0", "from 0 up to, not including, 1"]),
    ("dropout-below-0", lambda: attention(dropout=-0.1), ["dropout:", "got -0.1", "from 0 up to, not including, 1"]),
    ("dropout-nan", lambda: attention(dropout=math.nan), ["dropout:", "got nan", "from 0 up to, not including, 1"]),
    (
        "function",
        lambda: attention(activation="linear"),
        ["function:", "'linear'", "softmax, relu2, laplace"],
    ),
    (
        "state-bidirectional",
        lambda: attention(causal=False, state=initial_attention_state(2, 3, 3, 4)),
        ["state:", "bidirectional", "allowed is None"],
    ),
    (
        "return_state-bidirectional",
        lambda: attention(causal=False, return_state=True),
        ["state:", "bidirectional", "allowed is None"],
    ),
    (
        "state-of-another-chunk",
        lambda: attention(state=initial_attention_state(2, 3, 3, 6)),
        ["state.keys:", "[2, 6, 3]", "[2, 4, 3]"],
    ),
    (
        "state-values",
        lambda: attention(state=initial_attention_state(2, 3, 7, 4)),
        ["state.values:", "[2, 4, 7]", "[2, 4, 3]"],
    ),
    (
        "state-batch-of-full-attention",
        lambda: attention(chunk_size=None, state=initial_attention_state(1, 3, 3, None)),
        ["state.keys:", "[1, 0, 3]", "[2, 0, 3]"],
    ),
    (
        "bias-short",
        lambda: attention(bias=zeros(5)),
        ["bias:", "[5]", "[2 · reach - 1]", "at least 4", "chunk_size"],
    ),
    ("bias-even", lambda: attention(bias=zeros(8)), ["bias:", "[8]", "[2 · reach - 1]"]),
    ("bias-dimensions", lambda: attention(bias=zeros(9, 1)), ["bias:", "[9, 1]", "[2 · reach - 1]"]),
    ("bias-scalar", lambda: attention(bias=torch.tensor(0.0)), ["bias:", "[]", "[2 · reach - 1]"]),
    (
        "bias-short-of-all-tokens",
        lambda: attention(chunk_size=None, bias=zeros(7)),
        ["bias:", "[7]", "at least 5", "number of tokens"],
    ),
    (
        "bias-short-of-the-chunk-to-come",
        lambda: attention(chunk_size=6, bias=zeros(9), return_state=True),
        ["bias:", "[9]", "at least 6", "chunk_size"],
    ),
    (
        "bias-short-of-the-past",
        lambda: attention(
            chunk_size=None, bias=zeros(9), state=AttentionState(zeros(2, 2, 3), zeros(2, 2, 3), torch.tensor([2, 0]))
        ),
        ["bias:", "[9]", "at least 7", "number of tokens"],
    ),
]

TABLE = [
    pytest.param(*row[1:], id=f"{operator}-{row[0]}")
    for operator, rows in {"conv": CONV, "tcn": TCN, "ema": EMA, "attention": ATTENTION}.items()
    for row in rows
]


@pytest.mark.parametrize(("bad_call", "words"), TABLE)
def test_errors_name_the_field_what_it_got_and_what_is_allowed(
    bad_call: Callable[[], object], words: list[str]
) -> None:
    with pytest.raises(StateError if words[0].startswith("state") else InputError) as error:
        bad_call()
    message = str(error.value)
    assert message.startswith(words[0])
    assert [word for word in words if word not in message] == [], message


def test_what_is_just_allowed_passes() -> None:
    kernel = ema_kernel(*PARAMETERS, 5)
    ema(X, *PARAMETERS, kernel=kernel)
    ema(X, *PARAMETERS, truncation=4, kernel=kernel[..., :4], return_state=True)
    # A bias need not reach further than there are tokens, unless more are to come.
    attention(chunk_size=6, bias=zeros(9))
    attention(chunk_size=5, bias=zeros(9), return_state=True)
    attention(chunk_size=None, bias=zeros(13), state=initial_attention_state(2, 3, 3, 2))
