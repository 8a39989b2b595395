"""The sampling kernel chooses the tokens that PyTorch's operators choose."""

from __future__ import annotations

import pytest
import torch

from tcnca.generation.sampling import Sampler, SamplingOptions
from tests.ops.interpreter import interpreted
from tests.test_sampling import CPU, random_logits


def assert_the_kernel_equals_pytorch(device: torch.device, steps: int, sizes: tuple[int, ...]) -> None:
    options = [
        SamplingOptions(temperature=0.0),
        SamplingOptions(),
        SamplingOptions(temperature=0.7, top_k=3, repetition_penalty=1.5),
        SamplingOptions(top_p=0.6),
        SamplingOptions(min_p=0.2, temperature=1.5),
        SamplingOptions(top_k=7, top_p=0.9, min_p=0.05),
    ]
    for size in sizes:
        kernel, plain = (
            Sampler(len(options), size, device, excluded=torch.arange(size, device=device) == 1) for _ in "ab"
        )
        plain.fused = False
        assert kernel.fused
        for sampler in (kernel, plain):
            for row, each in enumerate(options):
                sampler.assign([row], each, [(row,)])
        for number in range(steps):
            # With equal logits, as they occur in 16 bits.
            logits = (random_logits(number, len(options), size) * 4).round().div(4).to(device)
            assert kernel(logits).tolist() == plain(logits).tolist()


@interpreted
def test_the_kernel_equals_pytorch_in_the_interpreter() -> None:
    assert_the_kernel_equals_pytorch(CPU, 4, (40,))


@pytest.mark.gpu
def test_the_kernel_equals_pytorch() -> None:
    assert_the_kernel_equals_pytorch(torch.device("cuda"), 200, (2, 40, 256, 1000))
