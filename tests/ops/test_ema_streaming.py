"""The EMA with state in and out: hidden states of a whole past, with a window of inputs if truncated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tcnca.ops import EMABackend, EMAState, ema, ema_kernel, initial_ema_state
from tests.comparison import assert_close
from tests.ops.properties import (
    EXTRA,
    PLAIN,
    SIZES,
    THOROUGH,
    WAITING,
    Case,
    assert_causal,
    assert_inplace_changes_nothing,
    assert_layout_does_not_matter,
    assert_padding_gives_no_nan,
    assert_padding_ignored,
    assert_ragged_stream,
    assert_split_invariant,
    assert_state_left_alone,
    counts,
    leaf,
    some_lengths,
)

BATCH, CHANNELS = 3, 2
# From the second lag on alpha matters; a truncation of one is tested apart.
TRUNCATIONS = st.none() | st.integers(2, 12)

every_method = pytest.mark.parametrize("backend", PLAIN)


def ema_case(
    time: int,
    backend: EMABackend,
    truncation: int | None = None,
    hidden: int = 3,
    directions: int = 1,
    cached: bool = False,
) -> Case:
    torch.manual_seed(0)
    delta, alpha, beta, gamma = (leaf(directions, CHANNELS, hidden, scale=1.5) for _ in range(4))
    kernel = ema_kernel(delta, alpha, beta, gamma, max(time, truncation or 1)) if cached else None

    def operator(x: Tensor, **options: Any) -> tuple[Tensor, EMAState | None]:
        options |= {"backend": backend, "truncation": truncation, "kernel": kernel}
        return ema(x, delta, alpha, beta, gamma, **options)

    parameters = {"delta": delta, "alpha": alpha, "beta": beta, "gamma": gamma}
    return Case(operator, (leaf(BATCH, time, CHANNELS),), parameters)


@every_method
@THOROUGH
@given(truncation=TRUNCATIONS, hidden=st.integers(1, 3), sizes=SIZES, cached=st.booleans())
def test_many_calls_equal_one(
    backend: EMABackend, truncation: int | None, hidden: int, sizes: list[int], cached: bool
) -> None:
    assert_split_invariant(ema_case(sum(sizes), backend, truncation, hidden, cached=cached), sizes)


@every_method
def test_a_truncation_of_one_has_no_past(backend: EMABackend) -> None:
    case = ema_case(7, backend, truncation=1)
    with torch.no_grad():
        _, state = case.operator(case.inputs[0][:, :4], return_state=True)
        continued, _ = case.operator(case.inputs[0][:, 4:], state=state)
        afresh, _ = case.operator(case.inputs[0][:, 4:])
    assert isinstance(state, EMAState)
    assert_close(continued, afresh)


@every_method
@THOROUGH
@given(truncation=TRUNCATIONS, sizes=SIZES)
def test_inplace_equals_a_new_state(backend: EMABackend, truncation: int | None, sizes: list[int]) -> None:
    assert_inplace_changes_nothing(ema_case(sum(sizes), backend, truncation), sizes)


@every_method
@given(truncation=TRUNCATIONS, sizes=SIZES)
def test_a_state_can_be_used_again(backend: EMABackend, truncation: int | None, sizes: list[int]) -> None:
    assert_state_left_alone(ema_case(sum(sizes), backend, truncation), sizes)


@pytest.mark.parametrize("truncation", [None, 1, 5])
def test_starting_from_the_initial_state_equals_starting_from_none(truncation: int | None) -> None:
    case = ema_case(7, "fft", truncation)
    start = initial_ema_state(BATCH, CHANNELS, 3, truncation, dtype=torch.float64)
    with torch.no_grad():
        assert_close(case.operator(*case.inputs, state=start)[0], case.operator(*case.inputs)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, None], ids=str)
def test_hidden_states_start_in_float32_at_least(dtype: torch.dtype | None) -> None:
    hidden = initial_ema_state(BATCH, CHANNELS, 3, dtype=dtype).hidden
    assert hidden is not None
    assert hidden.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@every_method
def test_a_state_may_be_continued_by_another_form(backend: EMABackend) -> None:
    first, second, whole = (ema_case(11, form) for form in ("fft", backend, "recurrent"))
    with torch.no_grad():
        _, state = first.operator(first.inputs[0][:, :6], return_state=True)
        y, _ = second.operator(first.inputs[0][:, 6:], state=state)
        assert_close(y, whole.operator(*first.inputs)[0][:, 6:])


@pytest.mark.parametrize("directions", [1, 2], ids=["causal", "bidirectional"])
@every_method
@THOROUGH
@given(truncation=TRUNCATIONS, lengths=some_lengths(BATCH, 9))
def test_padding_is_ignored(backend: EMABackend, directions: int, truncation: int | None, lengths: list[int]) -> None:
    assert_padding_ignored(ema_case(9, backend, truncation, directions=directions), lengths)


@every_method
@THOROUGH
@example(truncation=None, calls=WAITING, extra=0, inplace=False)
@example(truncation=None, calls=WAITING, extra=0, inplace=True)
@example(truncation=4, calls=WAITING, extra=0, inplace=True)
@given(truncation=TRUNCATIONS, calls=counts(BATCH), extra=EXTRA, inplace=st.booleans())
def test_rows_of_different_lengths_stream_alone(
    backend: EMABackend, truncation: int | None, calls: list[list[int]], extra: int, inplace: bool
) -> None:
    case = ema_case(max(map(sum, zip(*calls, strict=True))), backend, truncation)
    with torch.set_grad_enabled(not inplace):
        assert_ragged_stream(case, calls, extra, inplace)


@pytest.mark.parametrize("truncation", [None, 4], ids=["full", "truncated"])
@pytest.mark.parametrize(("directions", "streaming"), [(1, True), (1, False), (2, False)])
@every_method
def test_rows_without_tokens_give_no_nan(
    backend: EMABackend, directions: int, streaming: bool, truncation: int | None
) -> None:
    assert_padding_gives_no_nan(ema_case(6, backend, truncation, directions=directions), [0, 6, 0], streaming)


@every_method
@given(truncation=TRUNCATIONS, at=st.integers(1, 9))
def test_the_future_moves_nothing(backend: EMABackend, truncation: int | None, at: int) -> None:
    # A Fourier transform spreads its rounding over all times.
    assert_causal(ema_case(10, backend, truncation), at, exact=backend != "fft")


@pytest.mark.parametrize("truncation", [None, 4], ids=["full", "truncated"])
@every_method
def test_strided_inputs_give_the_same(backend: EMABackend, truncation: int | None) -> None:
    assert_layout_does_not_matter(ema_case(9, backend, truncation), [1, 6, 2])


def test_a_truncated_ema_forgets_an_outlier() -> None:
    """Decays near 1, so that whatever stays behind of the outlier stays for good."""
    torch.manual_seed(0)
    values = [torch.full((1, 2, 3), level) for level in (-3.0, -6.0, 1.0, 1.0)]
    x = torch.randn(1, 600, 2)
    x[:, 100] = 1e5
    exact, _ = ema(x.double(), *(part.double() for part in values), truncation=64)
    state, outputs = None, []
    for time in range(600):
        y, state = ema(x[:, time : time + 1], *values, truncation=64, state=state, return_state=True)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1)[:, 200:], exact[:, 200:])
