"""The candidates: all exist, and each computes what its oracle computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tcnca.bench import COMPARISONS, SUITES, BenchCase, Workload, measure
from tcnca.bench.operators import OperatorSize, ema_inputs, published_bidirectional, shifted_tcn
from tcnca.bench.oracle import check_errors, relative_error
from tcnca.errors import ConfigError
from tcnca.ops import ema, receptive_field
from tests.bench.helpers import ROOFLINE, settings, small_cases, timer

CASES = [case for suite in SUITES for case in small_cases(suite)]


def case_id(case: BenchCase) -> str:
    return "-".join([case.suite, case.name, *(str(case.sizes[key]) for key in ("task", "model") if key in case.sizes)])


def test_every_candidate_exists() -> None:
    names = {suite: {case.name for case in CASES if case.suite == suite} for suite in SUITES}
    both = {"tcn", "naive-tcn", "conv", "fft-ema", "fft-ema-cached", "scan-ema"}
    others = {"copy", "fft-ema-16", "scan-ema-16", "attention", "fft-ema-published-bi"}
    assert names["ops"] == both | {f"{name}-bi" for name in both} | others
    for suite in ("layer", "model", "lra"):
        assert names[suite] == {"tcnca", "tcnca-linear", "mega-fft", "mega-scan"}
    assert len({case.sizes["task"] for case in CASES if case.suite == "lra"}) == 6
    keys = [(case.suite, case.name, tuple(case.sizes.items())) for case in CASES]
    assert len(set(keys)) == len(keys)
    # On a CPU this is what the library chooses.
    names["ops"].add("attention-naive")
    for suite, title, slow, fast, _ in COMPARISONS:
        assert {slow.removesuffix("-compiled"), fast.removesuffix("-compiled")} <= names[suite], title


@pytest.mark.parametrize("suite", ["layer", "model"])
def test_candidates_are_also_compiled(suite: str) -> None:
    names = [case.name for case in small_cases(suite, compile=True, only=("mega-fft", "mega-fft-compiled"))]
    assert names == ["mega-fft", "mega-fft-compiled"]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_candidate_agrees_with_its_oracle(case: BenchCase) -> None:
    # A stricter bound than the case's own, which must allow TF32.
    errors = check_errors(*case.build_check(), joint_gradients=case.joint_gradients)
    assert max(errors.values()) < 2e-5
    assert case.tolerance <= 1e-3
    for phase, cost in case.cost.items():
        assert cost.bytes > 0, phase
        assert cost.flops > 0 or case.name == "copy" or phase == "optimizer"


def test_bfloat16_has_a_larger_tolerance() -> None:
    (case,) = small_cases("ops", only=("tcn",), dtype=torch.bfloat16)
    errors = check_errors(*case.build_check(), joint_gradients=False)
    assert 1e-4 < max(errors.values()) < case.tolerance == 2e-2


def test_only_selects_by_name_or_part_of_it() -> None:
    def names(*only: str) -> list[str]:
        return [case.name for case in small_cases("ops", only=only)]

    assert names("tcn", "tcn-bi") == ["tcn", "tcn-bi"]
    assert names("cached") == ["fft-ema-cached", "fft-ema-cached-bi"]
    with pytest.raises(
        ConfigError, match=r"--only: did you mean 'conv'\? expected .*, got 'cnv'; candidates: attention"
    ):
        names("cnv")


@pytest.mark.parametrize("length", [1000, 131_072])
def test_receptive_field_covers_the_sequence(length: int) -> None:
    factor = OperatorSize.covering(settings(), 1, length).dilation_factor
    assert receptive_field(17, factor - 1, 4) < length <= receptive_field(17, factor, 4)


@pytest.mark.parametrize("causal", [True, False])
def test_oracle_of_the_tcn_is_a_chain_of_convolutions(causal: bool) -> None:
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
    size = OperatorSize.covering(settings("ops"), 2, length)
    x, delta, alpha, beta, gamma = ema_inputs(size, causal=False, d_state=8).learned
    exact = (part.double() for part in (delta, alpha, beta, gamma))
    expected = ema(x.double(), *exact, backend="recurrent")[0]
    assert relative_error([published_bidirectional(x, delta, alpha, beta, gamma)], [expected]) < 1e-5


def test_relative_error_is_infinite_for_other_shapes_and_infinities() -> None:
    one = torch.ones(2)
    assert relative_error([one], [torch.ones(3)]) == float("inf")
    assert relative_error([one * float("inf")], [one]) == float("inf")
    assert not relative_error([one * float("nan")], [one]) <= 1.0
    assert relative_error([one], [torch.zeros(2)]) > 1.0
    assert relative_error([1.1 * one], [one]) == pytest.approx(0.1, rel=1e-5)


def test_models_refuse_float16() -> None:
    case = small_cases("layer", dtype=torch.float16)[0]
    with pytest.raises(ConfigError, match="--dtype: expected float32 or bfloat16, got float16"):
        case.build_check()[0].run()


@pytest.mark.parametrize(("length", "status"), [(67, "timed"), (200, "wrong")])
def test_candidate_with_another_dilation_is_wrong(length: int, status: str) -> None:
    """The causal TCN of a longer sequence computes something else on the first tokens."""
    (right,) = small_cases("ops", only=("tcn",))
    (other,) = small_cases("ops", only=("tcn",), lengths=(length,))

    def build_check() -> tuple[Workload, Workload]:
        (_, oracle), (candidate, _) = right.build_check(), other.build_check()
        with torch.no_grad():
            for leaf, source in zip(oracle.leaves, candidate.leaves, strict=True):
                leaf.copy_(source[:, :67] if source.dim() == 3 else source)
        return Workload(lambda: candidate.run()[:, :67]), Workload(oracle.run)

    assert measure(dataclasses.replace(right, build_check=build_check), timer(), ROOFLINE).status == status
