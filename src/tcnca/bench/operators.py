"""`tcnca bench ops`: TCN against EMA over the sequence length, as in the paper's Figure 2, and other operators.

TCN and EMA are reduced to what the paper compares, without residual connections, non-linearities and norms: a chain of
dilated convolutions against a sum of decaying exponentials. Every candidate has a float64 oracle with another
algorithm.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.bench.case import TOLERANCE, BenchCase, Settings, Workload
from tcnca.bench.timing import Cost
from tcnca.layers import EMA, AttentionConfig, EMAConfig, S4DConfig, TCNConfig
from tcnca.models import preset
from tcnca.ops import attend, chunked_attention, diagonal_scan, ema, ema_kernel, fft_convolve, offset_bias, ssm, tcn

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
# Lengths, batch sizes, channels and complex states at which state-space models are measured.
_SSM_SIZES, _CPU_SSM_SIZES = ((8192, 131_072), (8,), 512, 32), ((2048,), (1,), 16, 8)
_CHECK_LENGTH_OF_SSM = 8192

Function = Callable[..., Tensor]


class OperatorSize(NamedTuple):
    """Size of an operator's input, and the TCN's dilation factor."""

    settings: Settings
    batch: int
    length: int
    dilation_factor: int

    @classmethod
    def covering(cls, settings: Settings, batch: int, length: int) -> OperatorSize:
        """Choose the smallest dilation factor whose receptive field covers the sequence."""
        config = TCNConfig.covering(length, kernel_size=settings.kernel_size, depth=settings.depth)
        return cls(settings, batch, length, config.dilation_factor)

    def sequence(self) -> Tensor:
        """Draw a random input."""
        shape, settings = (self.batch, self.length, self.settings.channels), self.settings
        return torch.randn(shape, dtype=settings.dtype, device=settings.device)


def ops_cases(settings: Settings) -> list[BenchCase]:
    """Return every operator at every size, state-space models, and the attention of some models."""
    found: list[BenchCase] = []
    for batch in settings.batches or (GPU_BATCHES if settings.on_gpu else CPU_BATCHES):
        for length in settings.lengths or (GPU_LENGTHS if settings.on_gpu else CPU_LENGTHS):
            size = OperatorSize.covering(settings, batch, length)
            copy = "copy", "copy of the tensor"
            found.append(_case(size, *copy, lambda size: [size.sequence()], torch.clone, torch.clone, 0, learned=0))
            for causal in (True, False):
                found += [*_tcn_cases(size, causal), *_ema_cases(size, causal)]
            found += _ema_cases(size, True, 16)
    return [*found, *_ssm_cases(settings), *_attention_cases(settings)]


def function_case(
    *,
    dtype: torch.dtype,
    inputs: Callable[[bool], Sequence[Tensor]],
    run: Function,
    oracle: Function,
    learned: int | None = None,
    **fields: Any,
) -> BenchCase:
    """Build a case from a function of tensors.

    Args:
        dtype: dtype of the inputs, which decides the tolerance.
        inputs: draws the arguments; called with True for the check, where they may be smaller.
        run: the function to measure.
        oracle: the reference, called with the same arguments in float64.
        learned: how many of the first arguments get gradients; None for all.
        fields: other fields of `BenchCase`.
    """

    def workload(function: Function, tensors: Sequence[Tensor]) -> Workload:
        leaves = tuple(tensor.detach().requires_grad_() for tensor in tensors[:learned])
        return Workload(lambda: function(*leaves, *tensors[len(leaves) :]), leaves)

    def build_check() -> tuple[Workload, Workload]:
        drawn = inputs(True)
        return workload(run, drawn), workload(oracle, [tensor.double() for tensor in drawn])

    fields = {"tolerance": TOLERANCE[dtype], **fields}
    return BenchCase(build=lambda: workload(run, inputs(False)), build_check=build_check, **fields)


def _case(
    size: OperatorSize,
    name: str,
    label: str,
    inputs: Callable[[OperatorSize], Sequence[Tensor]],
    run: Function,
    oracle: Function,
    flops_per_element: float,
    *,
    check_length: int | None = None,
    learned: int | None = None,
) -> BenchCase:
    """Build the case of an operator on a sequence. `check_length` limits the length of the check."""
    settings, batch, length, factor = size
    limit = check_length or (length if settings.on_gpu else _CHECK_LENGTH_ON_CPU)
    small = size._replace(batch=min(batch, _CHECK_BATCH), length=min(length, limit))
    elements = batch * length * settings.channels
    nbytes, flops = elements * settings.dtype.itemsize, flops_per_element * elements
    # The backward pass reads input and gradient, and computes two gradients.
    cost = {"forward": Cost(2 * nbytes, flops), "backward": Cost(3 * nbytes, 2 * flops)}
    return function_case(
        dtype=settings.dtype,
        inputs=lambda checking: inputs(small if checking else size),
        run=run,
        oracle=oracle,
        learned=learned,
        name=name,
        label=label,
        sizes={"batch": batch, "length": length, "dilation_factor": factor},
        tokens=batch * length,
        cost=cost,
    )


def _direction(causal: bool) -> tuple[str, str]:
    """Return the endings of name and label."""
    return ("", ", causal") if causal else ("-bi", ", bidirectional")


def _tcn_cases(size: OperatorSize, causal: bool) -> Iterator[BenchCase]:
    """Yield the library's TCN, also with a skip connection and naive, and PyTorch's convolutions."""
    settings, factor = size.settings, size.dilation_factor
    suffix, direction = _direction(causal)
    flops = 2 * settings.kernel_size * settings.depth

    def inputs(size: OperatorSize) -> list[Tensor]:
        # With this scale, the output of a convolution is about as large as its input.
        weight = torch.randn(settings.depth, 1, settings.channels, settings.kernel_size, device=settings.device)
        return [size.sequence(), (weight * settings.kernel_size**-0.5).to(settings.dtype)]

    def channels_first(size: OperatorSize) -> list[Tensor]:
        x, weight = inputs(size)
        return [x.mT.contiguous(), weight]

    def with_omega(size: OperatorSize) -> list[Tensor]:
        return [*inputs(size), torch.randn(settings.channels, device=settings.device).to(settings.dtype)]

    def run(x: Tensor, weight: Tensor, omega: Tensor | None = None, backend: Any = "auto") -> Tensor:
        options: dict[str, Any] = {"activation": "none", "residual": False, "causal": causal, "backend": backend}
        return tcn(x, weight, factor, omega=omega, **options)[0]

    def skip_oracle(x: Tensor, weight: Tensor, omega: Tensor) -> Tensor:
        return oracle(x, weight) + omega * x

    def oracle(x: Tensor, weight: Tensor) -> Tensor:
        return shifted_tcn(x, weight, factor, causal)

    naive = functools.partial(run, backend="naive")
    convolutions = functools.partial(torch_convolutions, dilation_factor=factor, causal=causal)
    yield _case(size, f"tcn{suffix}", f"TCN{direction}", inputs, run, oracle, flops)
    yield _case(size, f"tcn-skip{suffix}", f"TCN with skip{direction}", with_omega, run, skip_oracle, flops + 2)
    yield _case(size, f"naive-tcn{suffix}", f"TCN, naive{direction}", inputs, naive, oracle, flops)
    name, label = f"conv{suffix}", f"PyTorch's convolutions{direction}"
    yield _case(size, name, label, channels_first, convolutions, lambda x, w: oracle(x.mT, w).mT, flops)


def _ema_cases(size: OperatorSize, causal: bool, d_state: int = 8) -> Iterator[BenchCase]:
    """Yield the EMA by FFT, as a scan and, with 8 states, with skip and SiLU, with a cached kernel and as published."""
    suffix, direction = _direction(causal)
    if d_state != 8:
        suffix, direction = f"-{d_state}{suffix}", f", N={d_state}{direction}"
    # Three multiply-adds of the recurrence for each hidden state and token.
    flops = 2 * 3 * d_state * (1 if causal else 2)

    def inputs(size: OperatorSize) -> list[Tensor]:
        return ema_inputs(size, causal, d_state)

    def with_kernel(size: OperatorSize) -> list[Tensor]:
        x, *parameters = inputs(size)
        return [x, _kernel(parameters, size.length), *parameters]

    def with_omega(size: OperatorSize) -> list[Tensor]:
        return [*inputs(size), torch.randn(size.settings.channels, device=size.settings.device)]

    def run(x: Tensor, *parameters: Tensor, backend: Any, **options: Any) -> Tensor:
        delta, alpha, beta, gamma = parameters
        return ema(x, delta, alpha, beta, gamma, backend=backend, **options)[0]

    def with_skip(x: Tensor, *parameters: Tensor) -> Tensor:
        *others, omega = parameters
        return fastest(x, *others, omega=omega, activation="silu")

    def skip_oracle(x: Tensor, *parameters: Tensor) -> Tensor:
        *others, omega = parameters
        return F.silu(fft(x, *others) + omega * x)

    def cached(x: Tensor, kernel: Tensor, *parameters: Tensor) -> Tensor:
        return fft_convolve(x, kernel)

    def cached_oracle(x: Tensor, kernel: Tensor, *parameters: Tensor) -> Tensor:
        return scan(x, *parameters)

    fft, scan, fused = (functools.partial(run, backend=backend) for backend in ("fft", "scan", "triton"))
    limit = _CHECK_LENGTH_OF_SCAN
    yield _case(size, f"fft-ema{suffix}", f"FFT-EMA{direction}", inputs, fft, scan, flops, check_length=limit)
    fastest = fused if size.settings.on_gpu else scan
    yield _case(size, f"scan-ema{suffix}", f"scan-EMA{direction}", inputs, fastest, fft, flops)
    if d_state == 8:
        named = f"scan-ema-skip{suffix}", f"scan-EMA with skip and SiLU{direction}"
        yield _case(size, *named, with_omega, with_skip, skip_oracle, flops + 2)
        named = f"fft-ema-cached{suffix}", f"FFT-EMA, cached kernel{direction}"
        # The kernel is a constant here, as in inference.
        yield _case(size, *named, with_kernel, cached, cached_oracle, flops, check_length=limit, learned=1)
    if d_state == 8 and not causal:
        named = f"fft-ema-published{suffix}", f"FFT-EMA as published{direction}"
        yield _case(size, *named, inputs, published_bidirectional, scan, flops, check_length=limit)


def ema_inputs(size: OperatorSize, causal: bool, d_state: int) -> list[Tensor]:
    """Draw a sequence and the parameters of an EMA, which stay in float32 as in mixed-precision training."""
    module = EMA(size.settings.channels, EMAConfig(d_state=d_state), causal).to(size.settings.device)
    return [size.sequence(), *(part.detach() for part in (module.delta, module.alpha, module.beta, module.gamma))]


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


def _ssm_cases(settings: Settings) -> Iterator[BenchCase]:
    """Yield S4D's operator and the recurrence of S5 and the LRU, each by its fastest backend and by another one."""
    lengths, batches, channels, d_state = _SSM_SIZES if settings.on_gpu else _CPU_SSM_SIZES
    for batch in settings.batches or batches:
        for length in settings.lengths or lengths:
            sizes = {"batch": batch, "length": length, "channels": channels, "d_state": d_state}
            fast, scan = ("triton", "triton") if settings.on_gpu else ("chunked", "scan")
            yield _ssm_case(settings, sizes, "ssm", "state-space model", fast, "fft")
            yield _ssm_case(settings, sizes, "fft-ssm", "state-space model by FFT", "fft", "chunked")
            yield _scan_case(settings, sizes, "diagonal-scan", "diagonal scan", scan)
            # On a CPU that is what the library chooses.
            if settings.on_gpu:
                yield _scan_case(settings, sizes, "diagonal-scan-pytorch", "diagonal scan, PyTorch", "scan")


def _ssm_parameters(settings: Settings, channels: int, d_state: int) -> list[Tensor]:
    """Return logarithms of decays and weights of a new S4D, `[1, channels, d_state, 2]`."""
    module = S4DConfig(d_state=2 * d_state).build(channels).to(settings.device)
    a = torch.complex(-module.log_damping.detach().exp(), module.frequency.detach())
    log_decay = a * module.log_dt.detach().exp().unsqueeze(-1)
    weight = 2.0 * torch.view_as_complex(module.c.detach()) * torch.expm1(log_decay) / a
    return [torch.view_as_real(log_decay.unsqueeze(0)), torch.view_as_real(weight)]


def _ssm_case(
    settings: Settings, sizes: Mapping[str, Any], name: str, label: str, backend: Any, oracle: Any
) -> BenchCase:
    batch, length, channels, d_state = sizes.values()

    def inputs(checking: bool) -> list[Tensor]:
        rows, time = (min(batch, _CHECK_BATCH), min(length, _CHECK_LENGTH_OF_SSM)) if checking else (batch, length)
        x = torch.randn(rows, time, channels, dtype=settings.dtype, device=settings.device)
        return [x, *_ssm_parameters(settings, channels, d_state)]

    def run(x: Tensor, log_decay: Tensor, weight: Tensor, backend: Any = backend) -> Tensor:
        return ssm(x, torch.view_as_complex(log_decay), torch.view_as_complex(weight), backend=backend)[0]

    elements = batch * length * channels
    # A complex product and the real part of one, for each state and token.
    nbytes, flops = elements * settings.dtype.itemsize, 2 * 6 * d_state * elements
    return function_case(
        dtype=settings.dtype,
        inputs=inputs,
        run=run,
        oracle=functools.partial(run, backend=oracle),
        name=name,
        label=label,
        sizes=sizes,
        tokens=batch * length,
        cost={"forward": Cost(2 * nbytes, flops), "backward": Cost(3 * nbytes, 2 * flops)},
    )


def _scan_case(settings: Settings, sizes: Mapping[str, Any], name: str, label: str, backend: Any) -> BenchCase:
    """Build a case with as many states as channels, in complex64 whatever the dtype of the others."""
    batch, length, states, _ = sizes.values()

    def inputs(checking: bool) -> list[Tensor]:
        rows, time = (min(batch, _CHECK_BATCH), min(length, _CHECK_LENGTH_OF_SSM)) if checking else (batch, length)
        log_decay, _ = _ssm_parameters(settings, states, 2)
        # The second state of each channel of an S4D, as the first does not turn.
        return [torch.randn(rows, time, states, 2, device=settings.device), log_decay[0, :, 1].contiguous()]

    def run(v: Tensor, log_decay: Tensor, backend: Any = backend) -> Tensor:
        h, _ = diagonal_scan(torch.view_as_complex(v), torch.view_as_complex(log_decay), backend=backend)
        return torch.view_as_real(h)

    elements = batch * length * states
    nbytes, flops = 8 * elements, 2 * 4 * elements
    return function_case(
        dtype=torch.float32,
        inputs=inputs,
        run=run,
        oracle=functools.partial(run, backend="recurrent" if backend == "scan" else "scan"),
        name=name,
        label=label,
        sizes=sizes,
        tokens=batch * length,
        cost={"forward": Cost(2 * nbytes, flops), "backward": Cost(3 * nbytes, 2 * flops)},
    )


def _attention_cases(settings: Settings) -> Iterator[BenchCase]:
    """Yield the attention of three models with the library's backend and, on a GPU, with the naive one."""
    for model, size in _ATTENTION_MODELS.items():
        config = preset(f"tcnca-{model}").model
        batch, length = size if settings.on_gpu else _CPU_ATTENTION_SIZE
        assert config.attention is not None
        chunk = min(config.attention.chunk_size or length, length if settings.on_gpu else _CPU_CHUNK_SIZE)
        attention = dataclasses.replace(config.attention, chunk_size=chunk)
        sizes = {"model": model, "batch": batch, "length": length, "chunk_size": chunk}
        yield _attention_case(settings, attention, config.causal, sizes, "attention", "chunked attention", "auto")
        # On a CPU the naive backend is what the library chooses.
        if settings.on_gpu:
            name, label = "attention-naive", "chunked attention, naive"
            yield _attention_case(settings, attention, config.causal, sizes, name, label, "naive")


def _attention_case(
    settings: Settings,
    config: AttentionConfig,
    causal: bool,
    sizes: Mapping[str, Any],
    name: str,
    label: str,
    backend: Any,
) -> BenchCase:
    batch, length, chunk = sizes["batch"], sizes["length"], sizes["chunk_size"]
    options: dict[str, Any] = {"chunk_size": chunk, "causal": causal, "activation": config.activation}

    def inputs(checking: bool) -> list[Tensor]:
        rows, time = (1, min(length, _CHECK_CHUNKS * chunk)) if checking else (batch, length)
        widths = (config.d_key, config.d_key, config.d_value)
        qkv = [torch.randn(rows, time, width, dtype=settings.dtype, device=settings.device) for width in widths]
        # The bias is a parameter, which stays in float32.
        return [*qkv, torch.randn(2 * chunk - 1, device=settings.device)]

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return chunked_attention(q, k, v, bias=bias, backend=backend, **options)[0]

    keys = (chunk + 1) / 2 if causal else chunk
    d_key, d_value, tokens = config.d_key, config.d_value, batch * length
    nbytes = 2 * tokens * (d_key + d_value) * settings.dtype.itemsize
    # Backward: the scores again, and the gradients of weights, values, queries and keys.
    cost = {
        "forward": Cost(nbytes, 2 * tokens * keys * (d_key + d_value)),
        "backward": Cost(2 * nbytes, 2 * tokens * keys * (3 * d_key + 2 * d_value)),
    }
    return function_case(
        dtype=settings.dtype,
        inputs=inputs,
        run=run,
        oracle=functools.partial(dense_attention, **options),
        name=name,
        label=label,
        sizes=sizes,
        tokens=tokens,
        cost=cost,
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
