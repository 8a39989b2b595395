"""The TCN by CUDA kernels: which calls they run, the operators of PyTorch behind them, and the choice of kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.activations import activation
from tcnca.ops.checks import autocasts
from tcnca.ops.dispatch import tensors_reason, transform_reason
from tcnca.ops.driver import Launch, on_device
from tcnca.ops.dropout import dropout
from tcnca.ops.library import register
from tcnca.ops.tcn.cuda import registers, smem, tensor_core, tensor_core_pair
from tcnca.ops.tcn.cuda.call import (
    MAX_KERNEL_SIZE,
    BackwardPointers,
    Call,
    ForwardPointers,
    Layout,
    Settings,
    layout,
)
from tcnca.ops.tcn.naive import TCNCall, TCNState, run_convolutions

MAX_BATCH = 65535  # of one launch
NUM_PLANS = 1024  # that are kept
NUM_SEEDS = 1 << 62

ForwardPlan = smem.Forward | tensor_core_pair.Forward | tensor_core.Forward | registers.Forward
BackwardPlan = smem.Backward | tensor_core.Backward | registers.Backward
_BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd


def unsupported_reason(call: TCNCall) -> str | None:
    """Return why the kernels cannot run a call on any machine, or None if they can."""
    x, state = call.x, call.state
    if x.device.type != "cuda":
        return f"x: expected a CUDA tensor, got one on {x.device}"
    tensors = [x, *call.parameters(), *(() if state is None else state.buffers)]
    reason = tensors_reason(tensors, call.lengths)
    if reason is not None:
        return reason
    if call.weight.shape[-1] > MAX_KERNEL_SIZE:
        return f"kernel_size: expected at most {MAX_KERNEL_SIZE}, got {call.weight.shape[-1]}"
    if x.shape[0] > MAX_BATCH:
        return f"batch: expected at most {MAX_BATCH} sequences, got {x.shape[0]}"
    if state is not None:
        if call.dropout > 0.0:
            return f"dropout: expected 0 after a state, got {call.dropout}"
        if x.shape[1] == 1:
            return "time: expected more than one token after a state, got 1; a kernel would not be faster"
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return "state: expected None where gradients are required, got one; its kernel has no gradient"
    return transform_reason()


def run(call: TCNCall) -> tuple[Tensor, TCNState | None]:
    """Run a call for which there is no `unsupported_reason`.

    All blocks run at once, or one convolution after the other if a norm or the state needs what is between them.
    """
    x, convolutions = call.x, call.weight.shape[1]
    if autocasts(x.device):
        # PyTorch's autocast would only round the convolutions. Here the skip connections are rounded too, so that all
        # blocks read and write half the memory; the linear map after a mixer would round its input anyway.
        x = x.to(torch.get_autocast_dtype(x.device.type))
    fused = call.norm_fn is None and convolutions == 1
    if fused and call.state is None and not call.return_state:
        factors = (call.dilation, call.dilation_factor)
        settings = Settings(*factors, call.activation, call.residual, call.causal, call.dropout)
        return tcn_blocks(x, call.weight, call.bias, call.lengths, settings, call.omega), None
    adds_skip = call.residual and fused
    return run_convolutions(call, x, lambda h, number: _convolve(call, h, number, adds_skip), adds_skip)


def _convolve(call: TCNCall, h: Tensor, number: int, residual: bool) -> Tensor:
    """Run one convolution with its norm, activation and dropout."""
    weight, bias, dilation = call.convolution(number)
    function, probability = (call.activation, call.dropout) if call.norm_fn is None else ("none", 0.0)
    if call.state is None:
        settings = Settings(dilation, 1, function, residual, call.causal, probability)
        h = tcn_blocks(h, weight, bias, call.lengths, settings)
    else:
        past, position = call.state.buffers[number], call.state.position
        h = tcn_block_from_state(h, weight, bias, call.lengths, past, position, dilation, function, residual)
    if call.norm_fn is None:
        return h
    h = activation(call.activation)(call.norm_fn(h, number).to(h.dtype))
    return dropout(h, call.dropout) if call.dropout > 0.0 else h


def tcn_blocks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    settings: Settings,
    omega: Tensor | None = None,
) -> Tensor:
    """Run `depth` blocks of one convolution each; padding counts as zeros in every block.

    Args:
        x: `[batch, time, channels]` on a GPU. Sums are computed in float32.
        weight: `[depth, channels, kernel_size]` or `[depth, 1, channels, kernel_size]`.
        bias: `[depth, channels]` or `[depth, 1, channels]`.
        lengths: `[batch]`.
        settings: see `Settings`.
        omega: `[channels]`; the input times omega is added to the output.
    """
    seed = torch.randint(NUM_SEEDS, (1,), device=x.device) if settings.dropout > 0.0 else None
    requires_grad = any(each is not None and each.requires_grad for each in (x, weight, bias, omega))
    keep = requires_grad and torch.is_grad_enabled()
    # Plans depend on addresses, which only ordinary tensors have; others, such as fake ones, go through the dispatcher.
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return _FORWARD(x, weight, bias, lengths, seed, omega, *settings, keep)[0]
    if keep:
        return _Blocks.apply(x, weight, bias, lengths, seed, omega, settings)
    with _BelowAutograd():
        return _FORWARD(x, weight, bias, lengths, seed, omega, *settings, False)[0]


class _Blocks(torch.autograd.Function):
    """What `register` makes of `tcn_blocks` below, in a third of the time per call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, settings = inputs
        x, weight, bias, lengths, _, omega = tensors
        given = (bias is not None, lengths is not None)
        call = Call(layout(x), weight.shape, *given, settings, omega=omega is not None)
        with _BelowAutograd():
            y, inner = _FORWARD(*tensors, *settings, not recomputes(call))
        ctx.save_for_backward(inner, *tensors)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        arguments = (gradients[0], *ctx.saved_tensors, *ctx.settings)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            dx, dweight, dbias, domega = _BACKWARD(*arguments)
        else:
            with _BelowAutograd():
                dx, dweight, dbias, domega = _BACKWARD(*arguments)
        needed = ctx.needs_input_grad
        return dx, dweight, dbias if needed[2] else None, None, None, domega if needed[5] else None, None


@functools.lru_cache(NUM_PLANS)
def forward_plan(call: Call) -> ForwardPlan:
    """Return the kernels for `tcn_blocks`."""
    # Shared memory pays off: 22 µs forward and 42 µs backward instead of 29 and 62 for one sequence of 8,192 tokens.
    if smem.forward_fits(call):
        return smem.Forward(call)
    if tensor_core_pair.ENABLED and tensor_core_pair.forward_fits(call):
        return tensor_core_pair.Forward(call)
    return tensor_core.Forward(call) if tensor_core.forward_fits(call) else registers.Forward(call)


@functools.lru_cache(NUM_PLANS)
def backward_plan(call: Call, dy: Layout) -> BackwardPlan:
    """Return the kernels for `tcn_blocks_backward`."""
    if smem.backward_fits(call) and dy.aligned16():
        return smem.Backward(call, dy)
    return tensor_core.Backward(call, dy) if tensor_core.backward_fits(call, dy) else registers.Backward(call, dy)


@functools.lru_cache(NUM_PLANS)
def recomputes(call: Call) -> bool:
    """Return whether the gradients do not need the blocks' outputs, if `dy` is aligned to 16 bytes."""
    return smem.backward_fits(call)


@functools.lru_cache(NUM_PLANS)
def state_plan(call: Call, past: torch.dtype) -> Launch:
    """Return the kernel for `tcn_block_from_state`."""
    return registers.forward_launch(call, 0, past)


def _forward(stream: int, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    lengths, seed, omega, *settings, keep = rest
    x, (weight, bias, lengths) = _dense_channels(x), _prepared(weight, bias, lengths, x.shape[1])
    omega = None if omega is None else omega.float().contiguous()
    y, inner = _fake_forward(x, weight, keep)
    if x.numel():
        given = (bias is not None, lengths is not None)
        call = Call(layout(x), weight.shape, *given, Settings(*settings), keep, omega is not None)
        plan = forward_plan(call)
        scratch = x.new_empty(x.shape) if plan.needs_scratch and not keep else inner
        plan.run(stream, ForwardPointers(*map(_address, (x, weight, bias, lengths, seed, omega, y, scratch))))
    return y, inner


def _backward(
    stream: int, dy: Tensor, inner: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    lengths, seed, omega, *settings = rest
    x, dy = _dense_channels(x), _dense_channels(dy if dy.dtype == x.dtype else dy.to(x.dtype))
    if inner.numel() == 0 and weight.shape[0] > 1:
        x, dy = _aligned16(x), _aligned16(dy)  # only the kernels that recompute the outputs can run
    dtypes = [weight.dtype if each is None else each.dtype for each in (weight, bias, omega)]
    weight, bias, lengths = _prepared(weight, bias, lengths, x.shape[1])
    omega = None if omega is None else omega.float().contiguous()
    dx, *sums = _fake_backward(dy, inner, x, weight, bias, lengths, seed, omega)
    if x.numel():
        given = (bias is not None, lengths is not None)
        call = Call(layout(x), weight.shape, *given, Settings(*settings), omega=omega is not None)
        plan = backward_plan(call, layout(dy))
        scratch = torch.empty(plan.scratch, dtype=torch.uint8, device=x.device)
        tensors = (dy, inner, x, weight, bias, lengths, seed, omega, dx, *sums, scratch)
        plan.run(stream, BackwardPointers(*map(_address, tensors)))
    else:
        for each in sums:
            each.zero_()
    return dx, *(each if each.dtype == dtype else each.to(dtype) for each, dtype in zip(sums, dtypes, strict=True))


def _from_state(stream: int, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    lengths, past, position, dilation, function, residual = rest
    x, (weight, bias, lengths) = _dense_channels(x), _prepared(weight, bias, lengths, x.shape[1])
    past = (past if past.dtype == torch.float32 else past.to(x.dtype)).contiguous()
    y, position = _empty_like(x), position.long().contiguous()
    if x.numel():
        settings = Settings(dilation, 1, function, residual, True, 0.0)
        call = Call(layout(x), weight.shape, bias is not None, lengths is not None, settings, keep=False)
        tensors = (x, weight, bias, y, lengths, None, past, position, None, None)
        state_plan(call, past.dtype)(stream, *map(_address, tensors))
    return y


def _dense_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _aligned16(x: Tensor) -> Tensor:
    return x if layout(x).aligned16() else x.clone(memory_format=torch.contiguous_format)


def _prepared(weight: Tensor, bias: Any, lengths: Any, time: int) -> tuple[Tensor, Any, Any]:
    """Return parameters and lengths as the kernels read them.

    Lengths outside of 0 to `time` would let them read foreign memory.
    """
    bias = None if bias is None else bias.float().contiguous()
    lengths = None if lengths is None else lengths.long().clamp(0, time).contiguous()
    return weight.float().contiguous(), bias, lengths


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_forward(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty results; the last argument is `keep`."""
    return _empty_like(x), x.new_empty(weight.shape[0] - 1, *x.shape) if rest[-1] else x.new_empty(0)


def _fake_backward(
    dy: Tensor, inner: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Return empty results; the third argument after `bias` is `omega`."""
    optional = [weight.new_empty(0) if each is None else each.new_empty(each.shape) for each in (bias, rest[2])]
    return _empty_like(x), weight.new_empty(weight.shape), *optional


def _fake_from_state(x: Tensor, *_: Any) -> Tensor:
    return _empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *settings, keep = inputs[6:]
    ctx.save_for_backward(output[1], *inputs[:6])
    ctx.settings, ctx.keep = settings, keep
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 13
    if not ctx.keep:
        raise KernelError("tcn_blocks: expected keep=True where gradients are required, got keep=False")
    dx, dweight, dbias, domega = _BACKWARD(dy, *ctx.saved_tensors, *ctx.settings)
    dbias, domega = (each if ctx.needs_input_grad[place] else None for each, place in ((dbias, 2), (domega, 5)))
    return dx, dweight, dbias, None, None, domega, *(None,) * 7


_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor? lengths"
_SETTINGS = (
    "Tensor? seed, Tensor? omega, "
    "SymInt dilation, SymInt factor, str activation, bool residual, bool causal, float dropout"
)
_BACKWARD = register(
    f"tcn_blocks_backward(Tensor dy, Tensor inner, {_INPUTS}, {_SETTINGS})"
    " -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor domega)",
    on_device(_backward),
    _fake_backward,
    "CUDA",
    "naive",
)
_FORWARD = register(
    f"tcn_blocks({_INPUTS}, {_SETTINGS}, bool keep) -> (Tensor y, Tensor inner)",
    on_device(_forward),
    _fake_forward,
    "CUDA",
    _gradients,
    _save,
)
# One causal block after a state's ring buffer, see `tcnca.ops.ring`.
tcn_block_from_state = register(
    f"tcn_block_from_state({_INPUTS}, Tensor past, Tensor position, SymInt dilation, str activation, bool residual)"
    " -> Tensor",
    on_device(_from_state),
    _fake_from_state,
    "CUDA",
    "naive",
)
