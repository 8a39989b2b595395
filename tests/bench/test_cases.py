"""The candidates: all exist, and each computes what its oracle computes."""

from __future__ import annotations

import pytest
import torch

from tcnca.bench import SUITES
from tcnca.bench.case import BenchCase, relative_error
from tcnca.bench.report import COMPARISONS
from tcnca.errors import ConfigError
from tests.bench.helpers import small_cases

CASES = [(suite, case) for suite in SUITES for case in small_cases(suite)]


def case_id(suite: str, case: BenchCase) -> str:
    return "-".join([suite, case.name, *(str(case.sizes[key]) for key in ("task", "model") if key in case.sizes)])


def test_every_candidate_exists() -> None:
    names = {suite: {case.name for it, case in CASES if it == suite} for suite in SUITES}
    both = {"tcn", "tcn-skip", "naive-tcn", "conv", "fft-ema", "fft-ema-cached", "scan-ema", "scan-ema-skip"}
    others = {"copy", "fft-ema-16", "scan-ema-16", "attention", "fft-ema-published-bi"}
    others |= {"ssm", "fft-ssm", "diagonal-scan"}
    assert names["ops"] == both | {f"{name}-bi" for name in both} | others
    for suite in ("layer", "model", "lra"):
        more = {"transformer"} if suite == "model" else set()
        assert names[suite] == {"tcnca", "tcnca-linear", "mega-fft", "mega-scan"} | more
    steps = {f"{family}{kind}" for family in ("tcnca", "tcnca-linear", "mega") for kind in ("", "-int8", "-model")}
    assert names["generate"] == steps
    assert len({case.sizes["task"] for suite, case in CASES if suite == "lra"}) == 6
    keys = [(suite, case.name, tuple(case.sizes.items())) for suite, case in CASES]
    assert len(set(keys)) == len(keys)
    # On a CPU this is what the library chooses.
    names["ops"] |= {"attention-naive", "diagonal-scan-pytorch"}
    # Models of others need a GPU.
    names["model"] |= {"gated-deltanet", "mamba2"}
    for suite, title, slow, fast, _ in COMPARISONS:
        assert {slow.removesuffix("-compiled"), fast.removesuffix("-compiled")} <= names[suite], title


@pytest.mark.parametrize("suite", ["layer", "model"])
def test_candidates_are_also_compiled(suite: str) -> None:
    names = [case.name for case in small_cases(suite, compile=True, only=("mega-fft", "mega-fft-compiled"))]
    assert names == ["mega-fft", "mega-fft-compiled"]


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[case_id(*each) for each in CASES])
def test_candidate_agrees_with_its_oracle(case: BenchCase) -> None:
    # A stricter bound than the case's own, which must allow TF32.
    int8 = case.name.endswith("-int8")
    assert max(case.check_errors().values()) < (0.03 if int8 else 2e-5)
    assert case.tolerance <= (0.1 if int8 else 1e-3)
    for phase, cost in case.cost.items():
        assert cost.bytes > 0, phase
        assert cost.flops > 0 or case.name == "copy" or phase == "optimizer"


def test_bfloat16_has_a_larger_tolerance() -> None:
    (case,) = small_cases("ops", only=("tcn",), dtype=torch.bfloat16)
    assert 1e-4 < max(case.check_errors().values()) < case.tolerance == 2e-2


def test_only_selects_by_name_or_part_of_it() -> None:
    def names(*only: str) -> list[str]:
        return [case.name for case in small_cases("ops", only=only)]

    assert names("tcn", "tcn-bi") == ["tcn", "tcn-bi"]
    assert names("cached") == ["fft-ema-cached", "fft-ema-cached-bi"]
    with pytest.raises(ConfigError, match=r"--only: did you mean conv\? expected .*, got 'cnv'; see attention"):
        names("cnv")


def test_relative_error_is_infinite_for_other_shapes_and_infinities() -> None:
    one = torch.ones(2)
    assert relative_error([one], [torch.ones(3)]) == float("inf")
    assert relative_error([one * float("inf")], [one]) == float("inf")
    assert not relative_error([one * float("nan")], [one]) <= 1.0
    assert relative_error([one], [torch.zeros(2)]) > 1.0
    assert relative_error([1.1 * one], [one]) == pytest.approx(0.1, rel=1e-5)


def test_models_refuse_float16() -> None:
    with pytest.raises(ConfigError, match="--dtype: expected float32 or bfloat16, got float16"):
        small_cases("layer", dtype=torch.float16)
