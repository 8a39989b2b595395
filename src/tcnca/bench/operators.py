"""`tcnca bench ops`: TCN against EMA over the sequence length, as in the paper's Figure 2, and chunked attention.

TCN and EMA are reduced to what the paper compares, without residual connections, non-linearities and norms: a chain of
dilated convolutions against a sum of decaying exponentials. Every candidate has a
float64 oracle with another algorithm.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.bench.case import BenchCase, Settings, Workload
from tcnca.bench.oracle import TOLERANCE
from tcnca.bench.roofline import Cost
from tcnca.layers import EMA, AttentionConfig, EMAConfig, TCNConfig
from tcnca.models import preset
from tcnca.ops import attend, chunked_attention, ema, ema_kernel, offset_bias, tcn

GPU_LENGTHS = (512, 2048, 8192, 16_384, 32_768, 65_536, 131_072)
CPU_LENGTHS = (1024, 8192, 32_768)
GPU_BATCHES, CPU_BATCHES = (1, 8), (1,)
_CHECK_BATCH, _CHECK_LENGTH_ON_CPU = 2, 8192
_CHECK_LENGTH_OF_SCAN = 2048
"""Limit for oracles that hold the EMA states of all time steps in float64."""

# Models whose attention is measured, with batch size and length on a GPU.
_ATTENTION_MODELS = {"enwik8": (8, 8192), "text": (32, 4096), "pathx": (16, 16384)}
_CPU_ATTENTION_SIZE, _CPU_CHUNK_SIZE = (1, 2048), 512
_CHECK_CHUNKS = 2
# Endings of name and label, for causal and bidirectional operators.
_DIRECTIONS = {True: ("", ", causal"), False: ("-bi", ", bidirectional")}

Function = Callable[..., Tensor]


class Inputs(NamedTuple):
    """Arguments of an operator, in this order; only the learned ones get gradients."""

    learned: tuple[Tensor, ...]
    fixed: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorSize:
    """Size of an operator's input and of the TCN's kernels."""

    batch: int
    length: int
    channels: int
    kernel_size: int
    depth: int
    dilation_factor: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def covering(cls, settings: Settings, batch: int, length: int) -> OperatorSize:
        """Choose the smallest dilation factor whose receptive field covers the sequence."""
        kernel: dict[str, int] = {"kernel_size": settings.kernel_size, "depth": settings.depth}
        return cls(
            batch=batch,
            length=length,
            channels=settings.channels,
            dilation_factor=TCNConfig.covering(length, **kernel).dilation_factor,
            dtype=settings.dtype,
            device=settings.device,
            **kernel,
        )

    def sequence(self) -> Tensor:
        """Draw a random input."""
        return torch.randn(self.batch, self.length, self.channels, dtype=self.dtype, device=self.device)

    def cost(self, flops_per_element: float) -> dict[str, Cost]:
        """Minimal cost. The backward pass reads input and gradient, and computes two gradients."""
        elements = self.batch * self.length * self.channels
        size, flops = elements * self.dtype.itemsize, flops_per_element * elements
        return {"forward": Cost(2 * size, flops), "backward": Cost(3 * size, 2 * flops)}


def ops_cases(settings: Settings) -> list[BenchCase]:
    """Return every operator at every size, and the attention of some models."""
    on_gpu = settings.device.type == "cuda"
    found: list[BenchCase] = []
    for batch in settings.batches or (GPU_BATCHES if on_gpu else CPU_BATCHES):
        for length in settings.lengths or (GPU_LENGTHS if on_gpu else CPU_LENGTHS):
            size = OperatorSize.covering(settings, batch, length)
            found.append(_copy_case(size))
            for causal in (True, False):
                found += [*_tcn_cases(size, causal), *_ema_cases(size, causal)]
            found += _ema_cases(size, True, 16)
    return [*found, *_attention_cases(settings)]


def function_case(
    *, dtype: torch.dtype, inputs: Callable[[bool], Inputs], run: Function, oracle: Function, **fields: Any
) -> BenchCase:
    """Build a case of suite `ops` from a function of tensors.

    Args:
        dtype: dtype of the inputs, which decides the tolerance.
        inputs: draws the arguments; called with True for the check, where they may be smaller.
        run: the function to measure.
        oracle: the reference, called with the same arguments in float64.
        fields: other fields of `BenchCase`.
    """

    def build_check() -> tuple[Workload, Workload]:
        drawn = inputs(True)
        exact = Inputs(*(tuple(tensor.double() for tensor in tensors) for tensors in drawn))
        return _workload(run, drawn), _workload(oracle, exact)

    fields = {"suite": "ops", "tolerance": TOLERANCE[dtype], **fields}
    return BenchCase(build=lambda: _workload(run, inputs(False)), build_check=build_check, **fields)


def _workload(function: Function, inputs: Inputs) -> Workload:
    learned = tuple(tensor.detach().requires_grad_() for tensor in inputs.learned)
    return Workload(lambda: function(*learned, *inputs.fixed), learned)


def _case(
    size: OperatorSize,
    suffix: str,
    direction: str,
    name: str,
    label: str,
    description: str,
    inputs: Callable[[OperatorSize], Inputs],
    run: Function,
    oracle: Function,
    cost: Mapping[str, Cost],
    check_length: int | None = None,
) -> BenchCase:
    """Build the case of an operator. `check_length` limits the length of the check."""
    limit = check_length or (size.length if size.device.type == "cuda" else _CHECK_LENGTH_ON_CPU)
    small = dataclasses.replace(size, batch=min(size.batch, _CHECK_BATCH), length=min(size.length, limit))
    return function_case(
        dtype=size.dtype,
        inputs=lambda checking: inputs(small if checking else size),
        run=run,
        oracle=oracle,
        name=name + suffix,
        label=label + direction,
        description=description,
        sizes={"batch": size.batch, "length": size.length, "dilation_factor": size.dilation_factor},
        tokens=size.batch * size.length,
        cost=cost,
    )


def _copy_case(size: OperatorSize) -> BenchCase:
    label, description = "copy of the tensor", "reads the input once and writes it once"
    cost = {"forward": size.cost(0)["forward"]}

    def inputs(size: OperatorSize) -> Inputs:
        return Inputs((), (size.sequence(),))

    return _case(size, "", "", "copy", label, description, inputs, torch.clone, torch.clone, cost)


def _tcn_cases(size: OperatorSize, causal: bool) -> Iterator[BenchCase]:
    """Yield the library's TCN with its fastest and its naive backend, and PyTorch's convolutions."""
    factor, cost = size.dilation_factor, size.cost(2 * size.kernel_size * size.depth)

    def inputs(size: OperatorSize) -> Inputs:
        # With this scale, the output of a convolution is about as large as its input.
        weight = torch.randn(size.depth, 1, size.channels, size.kernel_size, device=size.device)
        return Inputs((size.sequence(), (weight * size.kernel_size**-0.5).to(size.dtype)))

    def channels_first(size: OperatorSize) -> Inputs:
        x, weight = inputs(size).learned
        return Inputs((x.mT.contiguous(), weight))

    def run(x: Tensor, weight: Tensor, backend: str = "auto") -> Tensor:
        bare: dict[str, Any] = {"activation": "none", "residual": False, "causal": causal, "backend": backend}
        return tcn(x, weight, factor, **bare)[0]

    def naive(x: Tensor, weight: Tensor) -> Tensor:
        return run(x, weight, "naive")

    def convolutions(x: Tensor, weight: Tensor) -> Tensor:
        return torch_convolutions(x, weight, factor, causal)

    def oracle(x: Tensor, weight: Tensor) -> Tensor:
        return shifted_tcn(x, weight, factor, causal)

    def transposed(x: Tensor, weight: Tensor) -> Tensor:
        return oracle(x.mT, weight).mT

    case = functools.partial(_case, size, *_DIRECTIONS[causal])
    yield case("tcn", "TCN", "the library's TCN with the fastest available backend", inputs, run, oracle, cost)
    description = "the library's TCN in plain PyTorch, channels last"
    yield case("naive-tcn", "TCN, naive", description, inputs, naive, oracle, cost)
    description = "padding and depthwise torch.nn.functional.conv1d, channels first, no transposes"
    yield case("conv", "PyTorch's convolutions", description, channels_first, convolutions, transposed, cost)


def _ema_cases(size: OperatorSize, causal: bool, d_state: int = 8) -> Iterator[BenchCase]:
    """Yield the EMA by FFT, as a scan and, with 8 hidden states, with a cached kernel and as published."""
    # Three multiply-adds of the recurrence for each hidden state and token.
    cost = size.cost(2 * 3 * d_state * (1 if causal else 2))

    def inputs(size: OperatorSize) -> Inputs:
        return ema_inputs(size, causal, d_state)

    def with_kernel(size: OperatorSize) -> Inputs:
        x, *parameters = inputs(size).learned
        return Inputs((x,), (_kernel(parameters, size.length), *parameters))

    def fft(x: Tensor, *parameters: Tensor) -> Tensor:
        return ema(x, *parameters, backend="fft")[0]

    def cached(x: Tensor, kernel: Tensor, *parameters: Tensor) -> Tensor:
        return ema(x, *parameters, backend="fft", kernel=kernel)[0]

    def scan(x: Tensor, *parameters: Tensor) -> Tensor:
        return ema(x, *parameters, backend="scan")[0]

    def cached_oracle(x: Tensor, kernel: Tensor, *parameters: Tensor) -> Tensor:
        return scan(x, *parameters)

    def fused(x: Tensor, *parameters: Tensor) -> Tensor:
        return ema(x, *parameters, backend="triton" if x.is_cuda else "scan")[0]

    case = functools.partial(_case, size, *_DIRECTIONS[causal])
    end, label = ("", "") if d_state == 8 else (f"-{d_state}", f", N={d_state}")
    limit = _CHECK_LENGTH_OF_SCAN
    description = "the library's EMA by FFT, the kernel computed in every call"
    yield case(f"fft-ema{end}", f"FFT-EMA{label}", description, inputs, fft, scan, cost, limit)
    description = "the library's EMA as a scan: fused on a GPU, otherwise in plain PyTorch with all states in memory"
    yield case(f"scan-ema{end}", f"scan-EMA{label}", description, inputs, fused, fft, cost)
    if d_state == 8:
        description = "the library's EMA by FFT with a cached kernel, as in inference; no gradients of its parameters"
        label = "FFT-EMA, cached kernel"
        yield case("fft-ema-cached", label, description, with_kernel, cached, cached_oracle, cost, limit)
    if d_state == 8 and not causal:
        description = "a two-sided kernel over padded input, with transforms of 4 · length - 2 as in MEGA's code"
        label, published = "FFT-EMA as published", published_bidirectional
        yield case("fft-ema-published", label, description, inputs, published, scan, cost, limit)


def ema_inputs(size: OperatorSize, causal: bool, d_state: int) -> Inputs:
    """Draw a sequence and the parameters of an EMA, which stay in float32 as in mixed-precision training."""
    module = EMA(size.channels, EMAConfig(d_state=d_state), causal).to(size.device)
    parameters = (module.delta, module.alpha, module.beta, module.gamma)
    return Inputs((size.sequence(), *(parameter.detach() for parameter in parameters)))


def _kernel(parameters: Sequence[Tensor], length: int) -> Tensor:
    delta, alpha, beta, gamma = parameters
    return ema_kernel(delta, alpha, beta, gamma, length)


def shifted_tcn(x: Tensor, weight: Tensor, dilation_factor: int, causal: bool) -> Tensor:
    """Compute consecutive dilated convolutions as sums of shifted inputs."""
    time, taps = x.shape[1], weight.shape[-1]
    for block in range(weight.shape[0]):
        dilation = dilation_factor**block
        center = 0 if causal else (taps - 1) // 2
        total = torch.zeros_like(x)
        for tap in range(taps):
            lag = (tap - center) * dilation
            if abs(lag) < time:
                shifted = x[:, : time - lag] if lag >= 0 else x[:, -lag:]
                total = total + weight[block, 0, :, tap] * F.pad(shifted, (0, 0, max(lag, 0), max(-lag, 0)))
        x = total
    return x


def torch_convolutions(x: Tensor, weight: Tensor, dilation_factor: int, causal: bool) -> Tensor:
    """Compute the same with PyTorch; `x` is `[batch, channels, time]`, `weight` as for `tcnca.ops.tcn`."""
    taps = weight.shape[-1]
    for block in range(weight.shape[0]):
        dilation = dilation_factor**block
        future = 0 if causal else (taps - 1) // 2 * dilation
        padded = F.pad(x, ((taps - 1) * dilation - future, future))
        kernels = weight[block, 0].flip(-1).unsqueeze(1)
        x = F.conv1d(padded, kernels, dilation=dilation, groups=x.shape[1])
    return x


def published_bidirectional(x: Tensor, *parameters: Tensor) -> Tensor:
    """Compute both directions as one kernel of `2 · time - 1` lags over padded input, with MEGA's transform length."""
    time = x.shape[1]
    past, future = _kernel(parameters, time)
    kernel = F.pad(past, (time - 1, 0)) + F.pad(future.flip(-1), (0, time - 1))
    rows = F.pad(x.float().mT, (time - 1, 0))
    size = 2 * (2 * time - 1)
    spectrum = torch.fft.rfft(rows, n=size) * torch.fft.rfft(kernel, n=size)
    return torch.fft.irfft(spectrum, n=size)[..., 2 * time - 2 : 3 * time - 2].mT.to(x.dtype)


def _attention_cases(settings: Settings) -> Iterator[BenchCase]:
    """Yield the attention of three models with the library's backend and, on a GPU, with the naive one."""
    on_gpu = settings.device.type == "cuda"
    for model, size in _ATTENTION_MODELS.items():
        config = preset(f"tcnca-{model}").model
        batch, length = size if on_gpu else _CPU_ATTENTION_SIZE
        assert config.attention is not None
        chunk = min(config.attention.chunk_size or length, length if on_gpu else _CPU_CHUNK_SIZE)
        attention = dataclasses.replace(config.attention, chunk_size=chunk)
        sizes = {"model": model, "batch": batch, "length": length, "chunk_size": chunk}
        # On a CPU the naive backend is what the library chooses.
        for backend in ("auto", "naive") if on_gpu else ("auto",):
            yield _attention_case(settings, attention, config.causal, backend, sizes)


def _attention_case(
    settings: Settings, config: AttentionConfig, causal: bool, backend: Any, sizes: Mapping[str, Any]
) -> BenchCase:
    batch, length, chunk = sizes["batch"], sizes["length"], sizes["chunk_size"]

    def inputs(checking: bool) -> Inputs:
        rows, time = (1, min(length, _CHECK_CHUNKS * chunk)) if checking else (batch, length)
        kind: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device}
        widths = (config.d_key, config.d_key, config.d_value)
        q, k, v = (torch.randn(rows, time, width, **kind) for width in widths)
        # The bias is a parameter, which stays in float32.
        return Inputs((q, k, v, torch.randn(2 * chunk - 1, device=settings.device)))

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"chunk_size": chunk, "causal": causal, "activation": config.activation}
        return chunked_attention(q, k, v, bias=bias, backend=backend, **options)[0]

    naive = backend != "auto"
    return function_case(
        dtype=settings.dtype,
        inputs=inputs,
        run=run,
        oracle=lambda *tensors: dense_attention(
            *tensors, chunk_size=chunk, causal=causal, activation=config.activation
        ),
        name="attention-naive" if naive else "attention",
        label="chunked attention, naive" if naive else "chunked attention",
        description=f"chunks of {chunk}, d_key {config.d_key}, d_value {config.d_value}, {config.activation}, "
        f"{'causal' if causal else 'bidirectional'}, {'naive' if naive else 'fastest'} backend",
        sizes=sizes,
        tokens=batch * length,
        cost=_attention_cost(config, causal, batch * length, chunk, settings.dtype),
    )


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, chunk_size: int, causal: bool, activation: Any
) -> Tensor:
    """Compute attention between all tokens, with a mask that hides other chunks."""
    position = torch.arange(q.shape[1], device=q.device)
    chunk = position // chunk_size
    mask = chunk == chunk.unsqueeze(1)
    if causal:
        mask = mask & (position <= position.unsqueeze(1))
    return attend(q, k, v, activation=activation, bias=offset_bias(bias, position, position), mask=mask)


def _attention_cost(
    config: AttentionConfig, causal: bool, tokens: int, chunk: int, dtype: torch.dtype
) -> dict[str, Cost]:
    keys = (chunk + 1) / 2 if causal else chunk
    size = tokens * 2 * (config.d_key + config.d_value) * dtype.itemsize
    # Backward: the scores again, and the gradients of weights, values, queries and keys.
    return {
        "forward": Cost(size, 2 * tokens * keys * (config.d_key + config.d_value)),
        "backward": Cost(2 * size, 2 * tokens * keys * (3 * config.d_key + 2 * config.d_value)),
    }
