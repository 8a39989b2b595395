"""Calls of the TCN with which its backends are compared."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tcnca.ops import TCNState, tcn, zero_padding
from tests.comparison import assert_close

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    shape: tuple[int, int, int] = (2, 100, 16)
    kernel_size: int = 5
    factor: int = 3
    depth: int = 3
    convolutions: int = 1
    bias: bool = False
    omega: bool = False
    activation: str = "silu"
    residual: bool = True
    causal: bool = True
    lengths: tuple[int, ...] | None = None
    strided: bool = False
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def valid(self) -> Tensor | None:
        return None if self.lengths is None else torch.tensor(self.lengths, device=self.device)

    def leaves(self) -> list[Tensor]:
        """Return x, the kernels and, as far as the call has them, biases and omega."""
        batch, time, channels = self.shape
        room = (batch, time + 3, channels + 16) if self.strided else self.shape
        x = torch.randn(room, device=self.device).to(self.dtype)
        x = x[:, 2 : time + 2, 8 : channels + 8] if self.strided else x
        many = (self.depth, self.convolutions, channels)
        weight = torch.randn(*many, self.kernel_size, device=self.device) / self.kernel_size**0.5
        parts = [x, weight, torch.randn(*many, device=self.device)] if self.bias else [x, weight]
        parts += [torch.randn(channels, device=self.device)] if self.omega else []
        return [part.to(self.dtype).detach().requires_grad_() for part in parts]

    def call(self, leaves: list[Tensor], backend: str, **options: Any) -> tuple[Tensor, TCNState | None]:
        names = ("activation", "residual", "causal")
        options |= {name: getattr(self, name) for name in names} | {"lengths": self.valid(), "backend": backend}
        options |= {"bias": leaves[2] if self.bias else None, "omega": leaves[-1] if self.omega else None}
        return tcn(leaves[0], leaves[1], self.factor, **options)


def exact(leaves: list[Tensor]) -> list[Tensor]:
    """Return the leaves in float64."""
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


# Calls of the kernels. 16-bit numbers with channels in multiples of 8 go to the tensor cores, others to the registers;
# short sequences with few channels go to shared memory.
_kernel_case = partial(Case, shape=(2, 300, 16), dtype=BF16)

KERNEL_CASES = {
    "one token": _kernel_case(shape=(1, 1, 8)),
    "odd time": _kernel_case(shape=(3, 1001, 72), kernel_size=17, depth=4, factor=5),
    "bias and lengths": _kernel_case(bias=True, lengths=(300, 41)),
    "empty rows": _kernel_case(bias=True, lengths=(0, 0)),
    "bidirectional": _kernel_case(causal=False, kernel_size=17, bias=True, lengths=(7, 300)),
    "even and bidirectional": _kernel_case(causal=False, kernel_size=4, dtype=FP16),
    "strided": _kernel_case(strided=True, lengths=(300, 299)),
    "dilation beyond time": _kernel_case(shape=(2, 20, 8), factor=50, depth=3),
    "no skip": _kernel_case(residual=False, activation="none", dtype=FP16),
    "kernel of one": _kernel_case(kernel_size=1, bias=True),
    "kernel of 18": _kernel_case(kernel_size=18, depth=2, bias=True, lengths=(300, 123)),
    "kernel of 33": _kernel_case(kernel_size=33, depth=2),
    "kernel of 49, bidirectional": _kernel_case(
        shape=(3, 400, 40), kernel_size=49, depth=2, causal=False, bias=True, dtype=FP16
    ),
    "kernel of 64": _kernel_case(shape=(3, 1001, 72), kernel_size=64, factor=5, bias=True, lengths=(1001, 1, 600)),
    "kernel of 64, no skip": _kernel_case(kernel_size=64, residual=False, activation="none", strided=True),
    "many rows": _kernel_case(shape=(300, 40, 16)),
    "two convolutions": _kernel_case(convolutions=2, bias=True, lengths=(300, 5)),
    "odd channels": _kernel_case(shape=(2, 300, 7), bias=True, lengths=(1, 300)),
    "even channels": _kernel_case(shape=(2, 300, 6), strided=True),
    "float32": _kernel_case(dtype=FP32, bias=True, strided=True, lengths=(300, 150)),
    "float32, bidirectional": _kernel_case(dtype=FP32, causal=False, kernel_size=17, activation="gelu"),
    "float32, 64 taps": _kernel_case(dtype=FP32, kernel_size=64, depth=1, causal=False, lengths=(30, 300)),
    "float32, dilation beyond time": _kernel_case(dtype=FP32, shape=(1, 50, 3), factor=1000, depth=3),
    "float32, gelu_tanh": _kernel_case(dtype=FP32, activation="gelu_tanh", convolutions=2),
    "float32, relu": _kernel_case(dtype=FP32, activation="relu"),
    "more blocks than one launch runs": _kernel_case(depth=14, factor=1),
    "short chains of unequal lengths": _kernel_case(
        shape=(2, 1700, 72), kernel_size=17, factor=100, depth=2, bias=True
    ),
    "many groups of channels": _kernel_case(shape=(3, 170, 136), kernel_size=17, factor=10, lengths=(170, 3, 99)),
    "in shared memory": _kernel_case(shape=(1, 4099, 64), kernel_size=17, factor=8, depth=4),
    "in shared memory, bidirectional": _kernel_case(
        shape=(1, 301, 16), kernel_size=4, causal=False, bias=True, lengths=(200,), dtype=FP16
    ),
    "in shared memory, float32": _kernel_case(
        shape=(1, 700, 8), kernel_size=17, factor=600, depth=2, dtype=FP32, activation="gelu", strided=True
    ),
    "in shared memory, no skip": _kernel_case(shape=(1, 50, 24), kernel_size=24, residual=False, bias=True, dtype=FP32),
    "in shared memory, one token": _kernel_case(shape=(1, 1, 8), kernel_size=1, bias=True),
}

DROPOUT_CASES = {
    "tensor cores": _kernel_case(shape=(2, 1001, 72), kernel_size=17, factor=5, bias=True),
    "tensor cores, bidirectional": _kernel_case(shape=(3, 170, 136), kernel_size=9, causal=False, dtype=FP16),
    "registers": _kernel_case(shape=(2, 300, 7), bias=True),
    "registers, float32": _kernel_case(dtype=FP32, kernel_size=17, causal=False),
    "tensor cores, 33 taps": _kernel_case(kernel_size=33, depth=2),
    "registers and tensor cores": _kernel_case(shape=(2, 300, 40), kernel_size=63, depth=2, causal=False, bias=True),
    "shared memory": _kernel_case(shape=(1, 1001, 16), kernel_size=17, factor=5, bias=True),
}


def outputs_and_gradients(case: Case, leaves: list[Tensor], dy: Tensor, backend: str) -> list[Tensor]:
    """Return the output of valid tokens, and the gradients of all leaves."""
    y, state = case.call(leaves, backend)
    assert state is None
    assert y.dtype == leaves[0].dtype
    assert torch.isfinite(y).all()
    gradients = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    assert [part.dtype for part in gradients] == [part.dtype for part in leaves]
    return [zero_padding(y.detach(), case.valid()), zero_padding(gradients[0], case.valid()), *gradients[1:]]


def assert_exact(case: Case) -> None:
    """Fail unless the kernels' outputs and gradients are those of float64, and the same bits again."""
    leaves = case.leaves()
    # A model does not use the padding's output, so it has no gradient.
    dy = zero_padding(torch.randn(case.shape, device=case.device).to(case.dtype), case.valid())
    ours, again = outputs_and_gradients(case, leaves, dy, "cuda"), outputs_and_gradients(case, leaves, dy, "cuda")
    expected = outputs_and_gradients(case, exact(leaves), dy, "naive")
    for number, (part, same, truth) in enumerate(zip(ours, again, expected, strict=True)):
        assert torch.equal(part, same)
        assert_close(part, truth, f"part {number}")


def assert_same_dropout(case: Case) -> None:
    """Fail unless forward and backward pass drop what the seed says."""
    dropout, seed = 0.3, 0x123456789ABCDEF
    leaves = case.leaves()
    truths = exact(leaves)
    seeds = torch.tensor([seed], device=case.device)
    settings = (1, case.factor, "silu", True, case.causal, dropout, True)
    bias, omega = leaves[2] if case.bias else None, leaves[-1] if case.omega else None
    y, _ = torch.ops.tcnca.tcn_blocks.default(leaves[0], leaves[1], bias, None, seeds, omega, *settings)
    truth = truths[0]
    for layer in range(case.depth):
        taps = torch.zeros(1, 1, case.shape[2], (case.kernel_size - 1) * case.factor**layer + 1).to(truth)
        taps[..., :: case.factor**layer] = truths[1][layer]
        offset = truths[2][layer, None] if case.bias else None
        added, _ = tcn(truth, taps, 1, bias=offset, causal=case.causal, residual=False, backend="naive")
        truth = truth + added * _mask(seed, layer, case.shape, dropout).to(truth)
    truth = truth + truths[-1] * truths[0] if case.omega else truth
    assert_close(y, truth)
    dy = torch.randn(case.shape, device=case.device).to(case.dtype)
    ours, theirs = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(truth, truths, dy.double())
    for number, (part, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_close(part, other, f"part {number}")


def _hash(x: Tensor) -> Tensor:
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def _mask(seed: int, layer: int, shape: tuple[int, int, int], dropout: float) -> Tensor:
    """Return what a block's values are multiplied by: 32-bit arithmetic in 64 bits, on whole tensors."""
    batch, time, channels = shape
    low, high = torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32)
    rows = _hash(torch.arange(batch) + 0x85EBCA6B & 0xFFFFFFFF)
    first = _hash(low ^ _hash(layer * 0x9E3779B9 + rows & 0xFFFFFFFF))[:, None, None]
    second = _hash(high + _hash(first ^ 0xC2B2AE35) & 0xFFFFFFFF)
    channel = torch.arange(channels)
    x = torch.arange(time)[:, None] * ((channels + 3) // 4) + channel // 4 + first & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D + second & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    x = x ^ x >> 16
    y = x * 0x9E3779B1 & 0xFFFFFFFF
    x = torch.where(channel % 4 < 2, x, y ^ y >> 16)
    dropped = round(dropout * 65536)
    kept = torch.where(channel % 2 == 1, x >> 16, x & 0xFFFF) >= dropped
    return kept.double() * (65536 / (65536 - dropped))
