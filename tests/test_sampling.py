"""Sampling equals its plain definition, and draws from the distribution that it defines."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tcnca.generation import sampling
from tcnca.generation.sampling import _BLOCK, Sampler, SamplingOptions, choose, penalize

CPU = torch.device("cpu")


def filter_logits(logits: Tensor, options: SamplingOptions) -> Tensor:
    """All rows with the same options."""
    top_k = options.top_k or logits.shape[1]
    top_p = math.inf if options.top_p in (None, 1.0) else options.top_p
    values = torch.tensor([options.temperature, top_k, top_p, options.min_p or 0.0])
    return sampling.filter_logits(logits, *values.unsqueeze(1).expand(-1, len(logits)))


def make_sampler(
    options: SamplingOptions,
    prompts: int,
    num_samples: int,
    vocab_size: int = 40,
    device: torch.device = CPU,
    *,
    excluded: Tensor | None = None,
    seed: int | None = None,
) -> Sampler:
    batch = prompts * num_samples
    sampler = Sampler(batch, vocab_size, device, excluded=excluded)
    seeds = [] if seed is None else [(seed, *divmod(row, num_samples)) for row in range(batch)]
    sampler.assign(range(batch), options, seeds)
    return sampler


def random_logits(seed: int, batch: int = 3, vocab_size: int = 40) -> Tensor:
    return torch.randn(batch, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def plain_shares(row: list[float], options: SamplingOptions) -> list[float]:
    """The probabilities of one row, step by step as in the descriptions of the options."""
    exponentials = [math.exp((logit - max(row)) / options.temperature) for logit in row]
    kept = sorted(range(len(row)), key=lambda token: -row[token])
    if options.top_k is not None:
        kept = kept[: options.top_k]
    if options.top_p is not None:
        total, mass, nucleus = sum(exponentials[token] for token in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += exponentials[token] / total
            if mass >= options.top_p < 1.0:
                break
        kept = nucleus
    if options.min_p is not None:
        kept = [token for token in kept if exponentials[token] >= options.min_p * max(exponentials)]
    total = sum(exponentials[token] for token in kept)
    return [exponentials[token] / total if token in kept else 0.0 for token in range(len(row))]


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 2, 7, 40, 99]),
    top_p=st.sampled_from([None, 0.05, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([None, 0.0, 0.013, 0.4, 1.0]),
)


@given(options=OPTIONS, seed=st.integers(0, 999))
def test_filters_equal_their_plain_definition(options: SamplingOptions, seed: int) -> None:
    logits = random_logits(seed)
    expected = torch.tensor([plain_shares(row.tolist(), options) for row in logits.double()])
    got = filter_logits(logits, options).softmax(-1)
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=1e-6)


def test_tiny_temperatures_take_the_most_likely_token() -> None:
    logits = random_logits(1)
    for temperature in (1e-20, 1e-300):
        shares = filter_logits(logits, SamplingOptions(temperature=temperature)).softmax(-1)
        assert torch.equal(shares.argmax(-1), logits.argmax(-1))
        assert torch.equal(shares.amax(-1), torch.ones(3))


@given(seed=st.integers(0, 99), penalty=st.sampled_from([0.5, 1.3, 4.0]))
def test_penalty_equals_its_plain_definition(seed: int, penalty: float) -> None:
    logits, seen = random_logits(seed), random_logits(seed + 1) > 0
    got = penalize(logits, seen, torch.full((3,), penalty))
    for row, occurred, result in zip(logits.tolist(), seen.tolist(), got.tolist(), strict=True):
        for logit, was_seen, value in zip(row, occurred, result, strict=True):
            expected = logit if not was_seen else logit / penalty if logit > 0 else logit * penalty
            assert math.isclose(value, expected, rel_tol=1e-5)


def test_quantiles_are_those_of_the_distribution() -> None:
    logits = filter_logits(random_logits(5, 1, 30), SamplingOptions(top_p=0.9))
    shares = logits.double().softmax(-1)[0]
    uniform = (torch.arange(20_000) + 0.5) / 20_000
    got = torch.bincount(choose(logits.expand(20_000, -1), uniform), minlength=30) / 20_000
    torch.testing.assert_close(got.double(), shares, rtol=0, atol=1e-4)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-24])
def test_extreme_quantiles_never_choose_an_excluded_token(uniform: float) -> None:
    logits = torch.full((200, 64), -math.inf)
    generator = torch.Generator().manual_seed(0)
    for row in logits:
        row[torch.randperm(64, generator=generator)[:5]] = torch.randn(5, generator=generator) * 8
    token = choose(logits, torch.full((200,), uniform))
    assert bool(logits.gather(1, token.unsqueeze(1)).isfinite().all())


def seeded(seed: int, num_samples: int, prompts: int = 1) -> Sampler:
    return make_sampler(SamplingOptions(), prompts, num_samples, seed=seed)


def drawn(sampler: Sampler, batch: int, steps: int) -> list[list[int]]:
    return [sampler(random_logits(step, 1).expand(batch, -1)).tolist() for step in range(steps)]


def test_a_seeded_sample_does_not_depend_on_the_others() -> None:
    steps = _BLOCK + 50  # also over the end of a block of random numbers
    many, few = np.array(drawn(seeded(7, 5), 5, steps)), np.array(drawn(seeded(7, 2), 2, steps))
    assert np.array_equal(many[:, :2], few)
    assert len({tuple(column) for column in many.T}) == 5
    other = np.array(drawn(seeded(8, 1), 1, steps))
    assert not np.array_equal(many[:, :1], other)
    # Prompts have samples of their own, which do not depend on the number of samples either.
    two = np.array(drawn(seeded(7, 3, prompts=2), 6, 40)), np.array(drawn(seeded(7, 1, prompts=2), 2, 40))
    assert np.array_equal(two[0][:, ::3], two[1])
    assert np.array_equal(two[0][:, 0], many[:40, 0])


def test_penalty_counts_the_prompt_and_what_was_drawn() -> None:
    sampler = make_sampler(SamplingOptions(temperature=0.0, repetition_penalty=100.0), 2, 2, 6, CPU)
    valid = torch.tensor([[True, True], [True, False]])
    sampler.observe(torch.tensor([[5, 4], [3, 2]]), valid)
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]).expand(4, -1)
    # Both samples of each prompt: 5 and 4 have occurred in the first one, 3 in the second one, 2 was padding.
    assert sampler(logits).tolist() == [3, 3, 5, 5]
    assert sampler(logits).tolist() == [2, 2, 4, 4]
    assert sampler(logits).tolist() == [1, 1, 2, 2]


def test_excluded_tokens_are_never_chosen() -> None:
    excluded = torch.arange(40) != 11
    for temperature in (0.0, 1.0):
        sampler = make_sampler(SamplingOptions(temperature=temperature), 1, 3, 40, CPU, excluded=excluded, seed=1)
        assert sampler(random_logits(0)).tolist() == [11, 11, 11]


@pytest.mark.gpu
def test_sampling_does_not_synchronize() -> None:
    device = torch.device("cuda")
    options = SamplingOptions(repetition_penalty=1.2, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)
    excluded, logits = (torch.arange(40) == 3).to(device), random_logits(0).to(device)
    prompt = torch.tensor([[1, 2]], device=device)
    sampler = make_sampler(options, 1, 3, 40, device, excluded=excluded, seed=1)
    host = make_sampler(options, 1, 3, 40, CPU, excluded=excluded.cpu(), seed=1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.observe(prompt)
        tokens = [sampler(logits) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    host.observe(prompt.cpu())
    assert torch.stack(tokens).tolist() == [host(logits.cpu()).tolist() for _ in range(20)]


def test_rows_with_options_of_their_own_equal_those_alone() -> None:
    options = [
        SamplingOptions(temperature=0.0),
        SamplingOptions(top_k=3, repetition_penalty=1.5),
        SamplingOptions(temperature=0.7, top_p=0.6),
        SamplingOptions(min_p=0.2),
        SamplingOptions(temperature=1.3),
    ]
    together = Sampler(len(options), 40, CPU)
    alone = [Sampler(1, 40, CPU) for _ in options]

    def begin(row: int, seed: int) -> None:
        together.assign([row], options[row], [(seed, row)])
        alone[row].assign([0], options[row], [(seed, row)])

    for row in range(len(options)):
        begin(row, 5)
    for number in range(_BLOCK + 60):  # also over the end of a block of random numbers, which greedy rows do not use
        if number in (7, 31):
            begin(number % len(options), number)
        logits = random_logits(number, len(options))
        expected = [sampler(logits[row : row + 1]).item() for row, sampler in enumerate(alone)]
        assert together(logits).tolist() == expected
