"""The operators that compete: forms of the TCN and of the EMA, stripped to what the paper compares.

Without residual connections, non-linearities and norms, that is: a chain of dilated convolutions against a sum of
decaying exponentials. Each has an oracle in float64 that goes another way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.bench.entry import Inputs, Work
from tcnca.layers import EMA, EMAConfig
from tcnca.ops import ema, ema_kernel, tcn

Function = Callable[..., Tensor]

_SHORT = 2048
"""Tokens up to which the states of an EMA are kept in float64 for every step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The size of an operator's input, and the structure that goes with it."""

    batch: int
    length: int
    channels: int
    kernel_size: int
    depth: int
    dilation_factor: int
    dtype: torch.dtype
    device: torch.device

    @property
    def elements(self) -> int:
        """Numbers in the input."""
        return self.batch * self.length * self.channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operator:
    """One way to compute something."""

    name: str
    label: str
    about: str
    inputs: Callable[[Case], Inputs]
    """Random inputs."""
    run: Callable[[Case], Function]
    """The function of them."""
    oracle: Callable[[Case], Function]
    """The same of them in float64, by other means."""
    work: Callable[[Case], dict[str, Work]]
    max_length: int | None = None
    """Tokens up to which the oracle is cheap; None for any number."""


def operators() -> dict[str, Operator]:
    """All of them, by name."""
    found = [copy_operator()]
    for causal in (True, False):
        found += [tcn_operator(causal), plain_operator(causal), conv_operator(causal)]
        found += [fft_operator(causal), cached_operator(causal), scan_operator(causal)]
    found += [published_operator(), fft_operator(True, 16), scan_operator(True, 16)]
    return {each.name: each for each in found}


def tcn_operator(causal: bool) -> Operator:
    """`tcnca.ops.tcn` as it chooses to run."""
    return Operator(
        name=_named("tcn", causal),
        label=_labeled("TCN", causal),
        about="the library's TCN, by the fastest way that it has here",
        inputs=_tcn_inputs,
        run=lambda case: lambda x, weight: _bare_tcn(x, weight, case, causal, "auto"),
        oracle=lambda case: lambda x, weight: shifted_tcn(x, weight, case.dilation_factor, causal),
        work=_tcn_work,
    )


def plain_operator(causal: bool) -> Operator:
    """`tcnca.ops.tcn` without kernels of its own."""
    return dataclasses.replace(
        tcn_operator(causal),
        name=_named("plain-tcn", causal),
        label=_labeled("TCN, plain", causal),
        about="the library's TCN in plain PyTorch, channels last",
        run=lambda case: lambda x, weight: _bare_tcn(x, weight, case, causal, "naive"),
    )


def conv_operator(causal: bool) -> Operator:
    """PyTorch's dilated convolutions as one would write them."""
    return Operator(
        name=_named("conv", causal),
        label=_labeled("PyTorch's convolutions", causal),
        about="padding and torch.nn.functional.conv1d with a group a channel, channels first, no transposes",
        inputs=lambda case: _channels_first(_tcn_inputs(case)),
        run=lambda case: lambda x, weight: torch_convolutions(x, weight, case.dilation_factor, causal),
        oracle=lambda case: lambda x, weight: shifted_tcn(x.mT, weight, case.dilation_factor, causal).mT,
        work=_tcn_work,
    )


def fft_operator(causal: bool, hidden: int = 8) -> Operator:
    """The EMA as a convolution in the frequency domain."""
    return Operator(
        name=_named("fft-ema", causal, hidden),
        label=_labeled("FFT-EMA", causal, hidden),
        about="the library's EMA by FFT, the kernel made anew in every call",
        inputs=lambda case: _ema_inputs(case, causal, hidden),
        run=lambda case: lambda x, *parameters: ema(x, *parameters, backend="fft")[0],
        oracle=lambda case: lambda x, *parameters: ema(x, *parameters, backend="scan")[0],
        work=lambda case: _ema_work(case, causal, hidden),
        max_length=_SHORT,
    )


def cached_operator(causal: bool) -> Operator:
    """The same with a kernel made beforehand, as for inference. It has no gradient but that of its input."""
    return dataclasses.replace(
        fft_operator(causal),
        name=_named("fft-ema-cached", causal),
        label=_labeled("FFT-EMA, kernel kept", causal),
        about="the library's EMA by FFT with a kernel that was made beforehand; no gradient of its parameters",
        run=lambda case: lambda x, kernel, *parameters: ema(x, *parameters, backend="fft", kernel=kernel)[0],
        oracle=lambda case: lambda x, _, *parameters: ema(x, *parameters, backend="scan")[0],
        inputs=lambda case: _with_kernel(_ema_inputs(case, causal, 8)),
    )


def published_operator() -> Operator:
    """The bidirectional EMA with the padding of MEGA's published code."""
    return dataclasses.replace(
        fft_operator(causal=False),
        name="fft-ema-published-bi",
        label="FFT-EMA as published, bidirectional",
        about="a two-sided kernel over padded input, in a transform of 4 · length - 2 as in MEGA's code",
        run=lambda case: published_bidirectional,
    )


def scan_operator(causal: bool, hidden: int = 8) -> Operator:
    """The EMA as a parallel scan; its oracle is the transform in float64, at any length."""
    return dataclasses.replace(
        fft_operator(causal, hidden),
        name=_named("scan-ema", causal, hidden),
        label=_labeled("scan-EMA", causal, hidden),
        about="the library's EMA as a scan: fused on a GPU, in plain PyTorch with the states of all times elsewhere",
        run=lambda case: lambda x, *parameters: ema(x, *parameters, backend="triton" if x.is_cuda else "scan")[0],
        oracle=lambda case: lambda x, *parameters: ema(x, *parameters, backend="fft")[0],
        max_length=None,
    )


def copy_operator() -> Operator:
    """A copy of the input, which is the floor of one pass over memory."""
    return Operator(
        name="copy",
        label="copy of the tensor",
        about="reads the input once and writes it once",
        inputs=lambda case: Inputs((), (_sequence(case),)),
        run=lambda case: torch.clone,
        oracle=lambda case: torch.clone,
        work=lambda case: {"forward": Work(2 * case.elements * case.dtype.itemsize, 0)},
    )


def shifted_tcn(x: Tensor, weight: Tensor, dilation_factor: int, causal: bool) -> Tensor:
    """Dilated convolutions as sums of shifted inputs, one after the other."""
    time, taps = x.shape[1], weight.shape[-1]
    for block in range(weight.shape[0]):
        dilation = dilation_factor**block
        center = 0 if causal else (taps - 1) // 2
        total = torch.zeros_like(x)
        for tap in range(taps):
            lag = (tap - center) * dilation
            if abs(lag) < time:
                seen = x[:, : time - lag] if lag >= 0 else x[:, -lag:]
                total = total + weight[block, 0, :, tap] * F.pad(seen, (0, 0, max(lag, 0), max(-lag, 0)))
        x = total
    return x


def torch_convolutions(x: Tensor, weight: Tensor, dilation_factor: int, causal: bool) -> Tensor:
    """`x` is `[batch, channels, time]`, `weight` as for `tcnca.ops.tcn`, the oldest tap first."""
    taps = weight.shape[-1]
    for block in range(weight.shape[0]):
        dilation = dilation_factor**block
        future = 0 if causal else (taps - 1) // 2 * dilation
        padded = F.pad(x, ((taps - 1) * dilation - future, future))
        kernels = weight[block, 0].flip(-1).unsqueeze(1)
        x = F.conv1d(padded, kernels, dilation=dilation, groups=x.shape[1])
    return x


def published_bidirectional(x: Tensor, *parameters: Tensor) -> Tensor:
    """Both directions as one kernel of `2 · time - 1` lags, input padded by as many, and twice that for no wrap."""
    time = x.shape[1]
    past, future = _kernel(parameters, time)
    kernel = F.pad(past, (time - 1, 0)) + F.pad(future.flip(-1), (0, time - 1))
    rows = F.pad(x.float().mT, (time - 1, 0))
    size = 2 * (2 * time - 1)
    spectrum = torch.fft.rfft(rows, n=size) * torch.fft.rfft(kernel, n=size)
    return torch.fft.irfft(spectrum, n=size)[..., 2 * time - 2 : 3 * time - 2].mT.to(x.dtype)


def _named(name: str, causal: bool, hidden: int = 8) -> str:
    return name + ("" if hidden == 8 else f"-{hidden}") + ("" if causal else "-bi")


def _labeled(label: str, causal: bool, hidden: int = 8) -> str:
    return label + ("" if hidden == 8 else f", N={hidden}") + (", causal" if causal else ", bidirectional")


def _sequence(case: Case) -> Tensor:
    return torch.randn(case.batch, case.length, case.channels, dtype=case.dtype, device=case.device)


def _tcn_inputs(case: Case) -> Inputs:
    # So scaled, the output of every convolution is about as large as its input.
    weight = torch.randn(case.depth, 1, case.channels, case.kernel_size, device=case.device) * case.kernel_size**-0.5
    return Inputs((_sequence(case), weight.to(case.dtype)))


def _channels_first(inputs: Inputs) -> Inputs:
    x, weight = inputs.learned
    return Inputs((x.mT.contiguous(), weight))


def _bare_tcn(x: Tensor, weight: Tensor, case: Case, causal: bool, backend: str) -> Tensor:
    bare: dict[str, Any] = {"activation": "none", "residual": False, "causal": causal, "backend": backend}
    return tcn(x, weight, case.dilation_factor, **bare)[0]


def _ema_inputs(case: Case, causal: bool, hidden: int) -> Inputs:
    module = EMA(case.channels, EMAConfig(d_state=hidden), causal).to(case.device)
    # Parameters stay in float32, as in training with half precision.
    parameters = (part.detach() for part in (module.delta, module.alpha, module.beta, module.gamma))
    return Inputs((_sequence(case), *parameters))


def _with_kernel(inputs: Inputs) -> Inputs:
    x, *parameters = inputs.learned
    return Inputs((x,), (_kernel(parameters, x.shape[1]), *parameters))


def _kernel(parameters: Sequence[Tensor], length: int) -> Tensor:
    delta, alpha, beta, gamma = parameters
    return ema_kernel(delta, alpha, beta, gamma, length)


def _tcn_work(case: Case) -> dict[str, Work]:
    products = 2 * case.kernel_size * case.depth * case.elements
    tensor = case.elements * case.dtype.itemsize
    # Backwards: input and gradient read, its gradient written; gradients of inputs and of weights.
    return {"forward": Work(2 * tensor, products), "backward": Work(3 * tensor, 2 * products)}


def _ema_work(case: Case, causal: bool, hidden: int) -> dict[str, Work]:
    # By the recurrence: three multiplications and additions for each hidden state and token.
    products = 2 * 3 * hidden * (1 if causal else 2) * case.elements
    tensor = case.elements * case.dtype.itemsize
    return {"forward": Work(2 * tensor, products), "backward": Work(3 * tensor, 2 * products)}
