"""The TCN by CUDA kernels: which calls they run, the operators of PyTorch behind them, and the choice of kernels."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.activations import activation
from tcnca.ops.checks import autocasts
from tcnca.ops.dispatch import HINT, transform_reason
from tcnca.ops.driver import Launch, on_device
from tcnca.ops.dropout import dropout
from tcnca.ops.tcn.cuda import registers, smem, tensor_core
from tcnca.ops.tcn.cuda.call import (
    DTYPES,
    MAX_KERNEL_SIZE,
    BackwardPointers,
    ForwardPointers,
    Layout,
    Settings,
    layout,
    make_call,
)
from tcnca.ops.tcn.naive import TCNSpec, TCNState, next_state

MAX_BATCH = 65535  # of one launch
NUM_PLANS = 1024  # that are kept
NUM_SEEDS = 1 << 62

_LIBRARY = torch.library.Library("tcnca", "FRAGMENT")
_SETTINGS = "SymInt dilation, SymInt factor, str activation, bool residual, bool causal, float dropout"
_LIBRARY.define(
    f"tcn_blocks(Tensor x, Tensor weight, Tensor? bias, Tensor? lengths, Tensor? seed, {_SETTINGS}, bool keep)"
    " -> (Tensor y, Tensor inner)"
)
_LIBRARY.define(
    "tcn_blocks_backward(Tensor dy, Tensor x, Tensor inner, Tensor weight, Tensor? bias, Tensor? lengths, "
    f"Tensor? seed, {_SETTINGS}) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
_LIBRARY.define(
    "tcn_block_from_state(Tensor x, Tensor weight, Tensor? bias, Tensor? lengths, Tensor past, Tensor position, "
    "SymInt dilation, str activation, bool residual) -> Tensor"
)
_FORWARD = torch.ops.tcnca.tcn_blocks.default
_BACKWARD = torch.ops.tcnca.tcn_blocks_backward.default
_BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd


def unsupported_reason(spec: TCNSpec) -> str | None:
    """Return why the kernels cannot run a call on any machine, or None if they can."""
    x, parameters, state = spec.x, spec.parameters(), spec.state
    if x.device.type != "cuda":
        return f"x: expected a CUDA tensor, got one on {x.device}"
    buffers = [] if state is None else [*state.buffers]
    for tensor in [*parameters, *buffers] if spec.lengths is None else [*parameters, *buffers, spec.lengths]:
        if tensor.device != x.device:
            return f"device: expected all tensors on {x.device} like x, got one on {tensor.device}"
    for tensor in [x, *parameters, *buffers]:
        if tensor.dtype not in DTYPES:
            return f"dtype: expected float32, bfloat16 or float16, got {tensor.dtype}"
    if spec.weight.shape[-1] > MAX_KERNEL_SIZE:
        return f"kernel_size: expected at most {MAX_KERNEL_SIZE}, got {spec.weight.shape[-1]}"
    if x.shape[0] > MAX_BATCH:
        return f"batch: expected at most {MAX_BATCH} sequences, got {x.shape[0]}"
    if state is not None:
        if spec.dropout > 0.0:
            return f"dropout: expected 0 after a state, got {spec.dropout}"
        if x.shape[1] == 1:
            return "time: expected more than one token after a state, got 1; a kernel would not be faster"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in [x, *parameters, *buffers]):
            return "state: expected None where gradients are required, got one; its kernel has no gradient"
    return transform_reason()


def should_use(spec: TCNSpec) -> bool:
    """Return whether the kernels are expected to be faster than PyTorch's own operators."""
    return spec.x.device.type == "cuda"


def run(spec: TCNSpec) -> tuple[Tensor, TCNState | None]:
    """Run a call for which there is no `unsupported_reason`.

    All blocks run at once, or one convolution after the other if a norm or the state needs what is between them.
    """
    x, (depth, convolutions) = spec.x, spec.weight.shape[:2]
    if autocasts(x.device):
        # PyTorch's autocast would only round the convolutions. Here the skip connections are rounded too, so that all
        # blocks read and write half the memory; the linear map after a mixer would round its input anyway.
        x = x.to(torch.get_autocast_dtype(x.device.type))
    fused = spec.norm_fn is None
    if fused and convolutions == 1 and spec.state is None and not spec.return_state:
        settings = Settings(1, spec.dilation_factor, spec.activation, spec.residual, spec.causal, spec.dropout)
        return tcn_blocks(x, spec.weight, spec.bias, spec.lengths, settings), None
    function = activation(spec.activation)
    skip_inside = spec.residual and convolutions == 1 and fused  # the kernel adds the skip connection
    inputs: list[Tensor] = []  # of each convolution, for the state
    for block in range(depth):
        h = x
        for index in range(convolutions):
            if spec.return_state:
                inputs.append(h if inputs else spec.x)
            h = _convolution(spec, h, block, index, skip_inside)
            if spec.norm_fn is not None:
                h = function(spec.norm_fn(h, block * convolutions + index).to(h.dtype))
                h = dropout(h, spec.dropout) if spec.dropout > 0.0 else h
        x = x + h if spec.residual and not skip_inside else h
    return x, next_state(spec, inputs) if spec.return_state else None


def _convolution(spec: TCNSpec, h: Tensor, block: int, index: int, residual: bool) -> Tensor:
    """Run one convolution and, unless there is a norm, its activation and dropout."""
    weight, bias, dilation = spec.convolution(block, index)
    function, probability = (spec.activation, spec.dropout) if spec.norm_fn is None else ("none", 0.0)
    if spec.state is None:
        settings = Settings(dilation, 1, function, residual, spec.causal, probability)
        biases = None if bias is None else bias.unsqueeze(0)
        return tcn_blocks(h, weight.unsqueeze(0), biases, spec.lengths, settings)
    past = spec.state.buffers[block * spec.weight.shape[1] + index]
    return tcn_block_from_state(h, weight, bias, spec.lengths, past, spec.state.position, dilation, function, residual)


def tcn_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, settings: Settings) -> Tensor:
    """Run `depth` blocks of one convolution each; padding counts as zeros in every block.

    Args:
        x: `[batch, time, channels]` on a GPU. Sums are computed in float32.
        weight: `[depth, channels, kernel_size]` or `[depth, 1, channels, kernel_size]`.
        bias: `[depth, channels]` or `[depth, 1, channels]`.
        lengths: `[batch]`.
        settings: see `Settings`.
    """
    seed = torch.randint(NUM_SEEDS, (1,), device=x.device) if settings.dropout > 0.0 else None
    requires_grad = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    keep = requires_grad and torch.is_grad_enabled()
    # Plans depend on addresses, which only ordinary tensors have; others, such as fake ones, go through the dispatcher.
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return _FORWARD(x, weight, bias, lengths, seed, *settings, keep)[0]
    if keep:
        return _Blocks.apply(x, weight, bias, lengths, seed, settings)
    with _BelowAutograd():
        return _FORWARD(x, weight, bias, lengths, seed, *settings, False)[0]


# One causal block after a state's ring buffer, see `tcnca.ops.ring`; without gradient.
tcn_block_from_state: Any = torch.ops.tcnca.tcn_block_from_state.default


class _Blocks(torch.autograd.Function):
    """What `register_autograd` makes of `tcn_blocks` below, in a third of the time per call."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lengths: Tensor | None,
        seed: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        keep = not recomputes(layout(x), weight.shape, bias is not None, lengths is not None, settings)
        with _BelowAutograd():
            y, inner = _FORWARD(x, weight, bias, lengths, seed, *settings, keep)
        ctx.save_for_backward(x, inner, weight, bias, lengths, seed)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, inner, weight, bias, lengths, seed = ctx.saved_tensors
        arguments = (gradients[0], x, inner, weight, bias, lengths, seed, *ctx.settings)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            dx, dweight, dbias = _BACKWARD(*arguments)
        else:
            with _BelowAutograd():
                dx, dweight, dbias = _BACKWARD(*arguments)
        return dx, dweight, None if bias is None else dbias, None, None, None


class ForwardPlan(Protocol):
    """Kernels that are ready to launch; `needs_scratch` asks for a tensor of x's size if no outputs are kept."""

    needs_scratch: bool

    def run(self, stream: int, p: ForwardPointers) -> None: ...  # noqa: D102


class BackwardPlan(Protocol):
    """Kernels that are ready to launch, and the bytes of scratch that they need."""

    scratch: int

    def run(self, stream: int, p: BackwardPointers) -> None: ...  # noqa: D102


@functools.lru_cache(NUM_PLANS)
def forward_plan(
    x: Layout, weight: tuple[int, ...], bias: bool, lengths: bool, settings: Settings, keep: bool
) -> ForwardPlan:
    """Return the kernels for `tcn_blocks`, given the shape of `weight` and whether there are biases and lengths."""
    call = make_call(x, weight, bias, lengths, settings, keep)
    # Shared memory pays off: 22 µs forward and 42 µs backward instead of 29 and 62 for one sequence of 8,192 tokens.
    if smem.forward_fits(call):
        return smem.Forward(call)
    return tensor_core.Forward(call) if tensor_core.forward_fits(call) else registers.Forward(call)


@functools.lru_cache(NUM_PLANS)
def backward_plan(
    x: Layout, dy: Layout, weight: tuple[int, ...], bias: bool, lengths: bool, settings: Settings
) -> BackwardPlan:
    """Return the kernels for `tcn_blocks_backward`."""
    call = make_call(x, weight, bias, lengths, settings)
    if smem.backward_fits(call) and dy.aligned16():
        return smem.Backward(call, dy)
    return tensor_core.Backward(call, dy) if tensor_core.backward_fits(call, dy) else registers.Backward(call, dy)


@functools.lru_cache(NUM_PLANS)
def recomputes(x: Layout, weight: tuple[int, ...], bias: bool, lengths: bool, settings: Settings) -> bool:
    """Return whether the gradients do not need the blocks' outputs, if `dy` is aligned to 16 bytes."""
    return smem.backward_fits(make_call(x, weight, bias, lengths, settings))


@functools.lru_cache(NUM_PLANS)
def state_plan(
    x: Layout, past: torch.dtype, weight: tuple[int, ...], bias: bool, lengths: bool, settings: Settings
) -> Launch:
    """Return the kernel for `tcn_block_from_state`."""
    return registers.forward_launch(make_call(x, weight, bias, lengths, settings, keep=False), 0, past)


def _forward(
    stream: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    *settings, keep = rest
    x = _dense_channels(x)
    weight, bias, lengths = _float32(weight), _float32(bias), _clamped(lengths, x.shape[1])
    y, inner = _fake_forward(x, weight, keep)
    if x.numel() == 0:
        return y, inner
    given = (weight.shape, bias is not None, lengths is not None, Settings(*settings))
    plan = forward_plan(layout(x), *given, keep)
    scratch = x.new_empty(x.shape) if plan.needs_scratch and not keep else inner
    plan.run(stream, ForwardPointers(*map(_address, (x, weight, bias, lengths, seed, y, scratch))))
    return y, inner


def _backward(
    stream: int,
    dy: Tensor,
    x: Tensor,
    inner: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    x, dy = _dense_channels(x), _dense_channels(dy if dy.dtype == x.dtype else dy.to(x.dtype))
    if inner.numel() == 0 and weight.shape[0] > 1:
        x, dy = _aligned16(x), _aligned16(dy)  # only the kernels that recompute the outputs can run
    dtype, bias_dtype = weight.dtype, weight.dtype if bias is None else bias.dtype
    weight, bias, lengths = _float32(weight), _float32(bias), _clamped(lengths, x.shape[1])
    dx, dweight, dbias = _fake_backward(dy, x, inner, weight, bias)
    if x.numel():
        given = (weight.shape, bias is not None, lengths is not None, Settings(*settings))
        plan = backward_plan(layout(x), layout(dy), *given)
        scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=x.device)
        tensors = (dy, x, inner, weight, bias, lengths, seed, dx, dweight, dbias, scratch)
        plan.run(stream, BackwardPointers(*map(_address, tensors)))
    else:
        dweight.zero_()
        dbias.zero_()
    return dx, dweight if dtype == dweight.dtype else dweight.to(dtype), dbias.to(bias_dtype)


def _from_state(
    stream: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    past: Tensor,
    position: Tensor,
    dilation: int,
    function: str,
    residual: bool,
) -> Tensor:
    x = _dense_channels(x)
    past = (past if past.dtype == torch.float32 else past.to(x.dtype)).contiguous()
    weight, bias, lengths = _float32(weight), _float32(bias), _clamped(lengths, x.shape[1])
    y, position = _empty_like(x), position.long().contiguous()
    if x.numel():
        given = ((1, *weight.shape), bias is not None, lengths is not None)
        launch = state_plan(layout(x), past.dtype, *given, Settings(dilation, 1, function, residual, True, 0.0))
        launch(stream, *map(_address, (x, weight, bias, y, lengths, None, past, position)))
    return y


def _dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _aligned16(x: Tensor) -> Tensor:
    return x if layout(x).aligned16() else x.clone(memory_format=torch.contiguous_format)


def _float32(parameter: Any) -> Any:
    """Return a parameter as the kernels read it."""
    return None if parameter is None else parameter.float().contiguous()


def _clamped(lengths: Any, time: int) -> Any:
    """Return lengths as the kernels read them: one outside of 0 to `time` would let them read foreign memory."""
    return None if lengths is None else lengths.long().clamp(0, time).contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_forward(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty results; the last argument is `keep`."""
    return _empty_like(x), x.new_empty(weight.shape[0] - 1, *x.shape) if rest[-1] else x.new_empty(0)


def _fake_backward(
    dy: Tensor, x: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return _empty_like(x), weight.new_empty(weight.shape), dbias


def _fake_from_state(x: Tensor, *_: Any) -> Tensor:
    return _empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, lengths, seed, *settings, keep = inputs
    ctx.save_for_backward(x, output[1], weight, bias, lengths, seed)
    ctx.settings, ctx.keep = settings, keep
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    x, inner, weight, bias, lengths, seed = ctx.saved_tensors
    if dy is None:
        return (None,) * 12
    if not ctx.keep:
        raise KernelError("tcn_blocks: expected keep=True where gradients are required, got keep=False")
    dx, dweight, dbias = _BACKWARD(dy, x, inner, weight, bias, lengths, seed, *ctx.settings)
    return dx, dweight, None if bias is None else dbias, *(None,) * 9


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    return


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise KernelError(f"second derivatives of the TCN: not supported by the backend 'cuda'; {HINT}")


_LIBRARY.impl("tcn_blocks", on_device(_forward), "CUDA")
_LIBRARY.impl("tcn_blocks_backward", on_device(_backward), "CUDA")
_LIBRARY.impl("tcn_block_from_state", on_device(_from_state), "CUDA")
torch.library.register_fake("tcnca::tcn_blocks", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("tcnca::tcn_blocks_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_fake("tcnca::tcn_block_from_state", _fake_from_state, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_blocks", _gradients, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_blocks_backward", _refuse, setup_context=_save_nothing, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_block_from_state", _refuse, setup_context=_save_nothing, lib=_LIBRARY)
