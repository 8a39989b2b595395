"""The contestants: all are there, and each computes what its oracle computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tcnca.bench import COMPARISONS, SUITES, Entry, Pair, Subject, entries_of, measure
from tcnca.bench.check import errors_of, relative_error
from tcnca.bench.operators import Case, operators, published_bidirectional, shifted_tcn
from tcnca.bench.ops import case_of
from tcnca.errors import ConfigError
from tcnca.ops import ema, receptive_field
from tests.bench.small import CPU, FLOORS, clock, settings

SMALL: dict[str, dict[str, Any]] = {
    "ops": {"lengths": (67,), "batches": (2,), "channels": 5, "kernel_size": 4, "depth": 3},
    "layer": {"lengths": (70,), "batches": (1,)},
    "model": {"lengths": (70,), "batches": (1,), "num_layers": 1},
    "lra": {"lengths": (70,), "batches": (2,), "num_layers": 1},
}


def small(suite: str) -> list[Entry]:
    return entries_of(suite, settings(**SMALL[suite]))


def name_of(entry: Entry) -> str:
    return "-".join([entry.suite, entry.name, *(str(entry.sizes[key]) for key in ("task", "of") if key in entry.sizes)])


ENTRIES = [entry for suite in SUITES for entry in small(suite)]


def test_every_rival_is_there() -> None:
    names = {entry.name for entry in small("ops")}
    assert {"tcn", "plain-tcn", "conv", "fft-ema", "fft-ema-cached", "scan-ema"} <= names
    assert {"tcn-bi", "conv-bi", "fft-ema-bi", "fft-ema-published-bi", "fft-ema-cached-bi", "scan-ema-bi"} <= names
    assert {"copy", "fft-ema-16", "scan-ema-16", "attention"} <= names
    for suite in ("layer", "model", "lra"):
        assert {entry.name for entry in small(suite)} == {"tcnca", "mega-fft", "mega-scan"}
    assert len({entry.sizes["task"] for entry in small("lra")}) == 6


@pytest.mark.parametrize("suite", ["layer", "model"])
def test_compiled_contestants_stand_beside_the_others(suite: str) -> None:
    names = [entry.name for entry in entries_of(suite, settings(**SMALL[suite], compile=True))]
    assert names == [f"{name}{end}" for name in ("tcnca", "mega-fft", "mega-scan") for end in ("", "-compiled")]


def test_no_two_entries_are_the_same() -> None:
    named = [(entry.suite, entry.name, tuple(entry.sizes.items())) for entry in ENTRIES]
    assert len(set(named)) == len(named)


def test_compared_are_contestants_that_exist() -> None:
    names = {suite: {entry.name for entry in small(suite)} for suite in SUITES}
    # On a CPU this is what the library chooses by itself.
    names["ops"].add("attention-plain")
    for comparison in COMPARISONS:
        for name in (comparison.slow, comparison.fast):
            assert name.removesuffix("-compiled") in names[comparison.suite], comparison.title


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_contestant_agrees_with_its_oracle(entry: Entry) -> None:
    # Far more exact than half precision needs, since this is float32.
    assert max(errors_of(entry.pair(), entry.together).values()) < 2e-5


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_floors_follow_from_positive_work(entry: Entry) -> None:
    for part, work in entry.work.items():
        assert work.bytes > 0, part
        assert work.flops > 0 or entry.name == "copy" or part == "update"
    assert entry.tokens > 0
    assert entry.tolerance <= 1e-3
    assert entry.about


def test_half_precision_is_allowed_to_round() -> None:
    entries = entries_of("ops", settings(**SMALL["ops"], only=("tcn",), dtype=torch.bfloat16))
    assert [entry.name for entry in entries] == ["tcn"]
    errors = errors_of(entries[0].pair(), together=False)
    assert 1e-4 < max(errors.values()) < entries[0].tolerance == 2e-2


def test_only_names_contestants_in_full_or_in_part() -> None:
    def names(*only: str) -> list[str]:
        return [entry.name for entry in entries_of("ops", settings(**SMALL["ops"], only=only))]

    assert names("tcn", "tcn-bi") == ["tcn", "tcn-bi"]
    assert names("cached") == ["fft-ema-cached", "fft-ema-cached-bi"]
    with pytest.raises(ConfigError, match=r"--only: got cnn, allowed are attention.*, conv, "):
        names("cnn")


@pytest.mark.parametrize("length", [1000, 8192, 131_072])
def test_dilation_grows_until_the_field_covers_the_sequence(length: int) -> None:
    chosen = case_of(settings(), 1, length)
    assert receptive_field(17, chosen.dilation_factor, 4) >= length
    assert receptive_field(17, chosen.dilation_factor - 1, 4) < length


@pytest.mark.parametrize("causal", [True, False])
def test_oracle_of_the_tcn_is_a_chain_of_convolutions(causal: bool) -> None:
    """By its formula, time by time."""
    x, weight = torch.randn(1, 9, 2).double(), torch.randn(2, 1, 2, 3).double()
    expected = x
    for block, dilation in enumerate((1, 4)):
        before, expected = expected, torch.zeros_like(x)
        for time in range(9):
            for tap in range(3):
                source = time - (tap - (0 if causal else 1)) * dilation
                if 0 <= source < 9:
                    expected[:, time] += weight[block, 0, :, tap] * before[:, source]
    assert relative_error([shifted_tcn(x, weight, 4, causal)], [expected]) < 1e-12


@pytest.mark.parametrize("length", [1, 2, 33])
def test_published_form_is_the_same_ema(length: int) -> None:
    case = Case(
        batch=2, length=length, channels=3, kernel_size=2, depth=2, dilation_factor=2, dtype=torch.float32, device=CPU
    )
    x, delta, alpha, beta, gamma = operators()["fft-ema-bi"].inputs(case).learned
    exact = (part.double() for part in (delta, alpha, beta, gamma))
    expected = ema(x.double(), *exact, backend="recurrent")[0]
    assert relative_error([published_bidirectional(x, delta, alpha, beta, gamma)], [expected]) < 1e-5


def test_relative_error_is_infinite_where_it_must_be() -> None:
    one = torch.ones(2)
    assert relative_error([one], [torch.ones(3)]) == float("inf")
    assert relative_error([one * float("inf")], [one]) == float("inf")
    assert not relative_error([one * float("nan")], [one]) <= 1.0
    assert relative_error([one], [torch.zeros(2)]) > 1.0
    assert relative_error([1.1 * one], [one]) == pytest.approx(0.1, rel=1e-5)


def test_models_refuse_half_precision_without_training() -> None:
    entries = entries_of("layer", settings(**SMALL["layer"], dtype=torch.float16))
    with pytest.raises(ConfigError, match="--dtype: got float16, allowed are float32 and bfloat16"):
        entries[0].pair().subject.run()


def test_contestant_with_another_dilation_is_wrong() -> None:
    """The oracle would see a kernel that looks at other times."""
    chosen = settings(**SMALL["ops"])
    right = next(entry for entry in entries_of("ops", chosen) if entry.name == "tcn")
    case = case_of(chosen, 2, 67)
    other = dataclasses.replace(case, dilation_factor=case.dilation_factor + 1)
    tcn = operators()["tcn"]

    def pair() -> Pair:
        x, weight = tcn.inputs(case).learned
        doubled = x.double(), weight.double()
        return Pair(Subject(lambda: tcn.run(other)(x, weight)), Subject(lambda: tcn.oracle(case)(*doubled)))

    result = measure(dataclasses.replace(right, pair=pair), clock(), FLOORS)
    assert result.status == "wrong"
    assert result.times == {}
