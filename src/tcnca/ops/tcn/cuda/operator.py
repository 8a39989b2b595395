"""The TCN's blocks as operators of PyTorch: `tcnca::tcn_blocks`, its gradient, and a block that continues a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.tcn.cuda import compiled, plan, rings

_LIBRARY = torch.library.Library("tcnca", "FRAGMENT")
_SETTINGS = "SymInt dilation, SymInt factor, str nonlinearity, bool residual, bool causal"
_LIBRARY.define(
    f"tcn_blocks(Tensor x, Tensor weight, Tensor? bias, Tensor? lengths, {_SETTINGS}, bool keep)"
    " -> (Tensor y, Tensor inner)"
)
_LIBRARY.define(
    "tcn_blocks_backward(Tensor dy, Tensor x, Tensor inner, Tensor weight, Tensor? bias, Tensor? lengths, "
    f"{_SETTINGS}) -> (Tensor dx, Tensor dweight, Tensor dbias)"
)
_LIBRARY.define(
    "tcn_block_from_state(Tensor x, Tensor weight, Tensor? bias, Tensor? lengths, Tensor past, Tensor position, "
    "SymInt dilation, str nonlinearity, bool residual) -> Tensor"
)


def tcn_blocks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    dilation: int = 1,
    factor: int = 2,
    nonlinearity: str = "silu",
    residual: bool = True,
    causal: bool = True,
) -> Tensor:
    """`depth` blocks `x + nonlinearity(convolution(x))`; block `i` has dilation `dilation · factor^i`.

    Args:
        x: `[batch, time, channels]` on a GPU, in float32, bfloat16 or float16. Sums are in float32.
        weight: `[depth, channels, kernel_size]`, up to 64 taps, as in `dilated_conv`.
        bias: `[depth, channels]`.
        lengths: `[batch]`; what lies behind a row's length counts as zero in every block.
        residual: whether blocks have their skip connection.
    """
    parameters = (x, weight) if bias is None else (x, weight, bias)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in parameters)
    y, _ = torch.ops.tcnca.tcn_blocks.default(
        x, weight, bias, lengths, dilation, factor, nonlinearity, residual, causal, keep
    )
    return y


def tcn_block_from_state(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    past: Tensor,
    position: Tensor,
    *,
    dilation: int,
    nonlinearity: str = "silu",
    residual: bool = True,
) -> Tensor:
    """One causal block whose past lies in a ring buffer (see `tcnca.ops.ring`). It has no gradient."""
    return torch.ops.tcnca.tcn_block_from_state.default(
        x, weight, bias, lengths, past, position, dilation, nonlinearity, residual
    )


def _empty_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _inner_slots(depth: int, keep: bool) -> int:
    """Intermediate outputs that need memory: all for the gradients, two that take turns without them."""
    return depth - 1 if keep else min(depth - 1, 2)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    dilation: int,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    weight, bias, lengths = _plain(weight), _plain(bias), _whole(lengths, x.shape[1])
    block = plan.block_of(x, weight, bias, lengths, nonlinearity, residual, causal)
    y = _empty_like(x)
    inner = x.new_empty(_inner_slots(weight.shape[0], keep), *x.shape)
    if x.numel():
        plan.run_forward(x, weight, bias, lengths, block, dilation, factor, y, inner)
    return y, inner if keep else x.new_empty(0)


def _backward(
    dy: Tensor,
    x: Tensor,
    inner: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    dilation: int,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    dy = dy.to(x.dtype)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    kind, bias_kind = weight.dtype, weight.dtype if bias is None else bias.dtype
    weight, bias, lengths = _plain(weight), _plain(bias), _whole(lengths, x.shape[1])
    block = plan.block_of(x, weight, bias, lengths, nonlinearity, residual, causal)
    dx = _empty_like(x)
    dweight = torch.empty_like(weight)
    dbias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    if x.numel():
        plan.run_backward(dy, x, inner, weight, bias, lengths, block, dilation, factor, dx, dweight, dbias)
    else:
        dweight.zero_()
        dbias.zero_()
    return dx, dweight.to(kind), dbias.to(bias_kind)


def _from_state(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    past: Tensor,
    position: Tensor,
    dilation: int,
    nonlinearity: str,
    residual: bool,
) -> Tensor:
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    past = past if past.dtype == torch.float32 else past.to(x.dtype)
    weight, bias, lengths = _plain(weight), _plain(bias), _whole(lengths, x.shape[1])
    block = plan.block_of(x, weight, bias, lengths, nonlinearity, residual, True)
    y = _empty_like(x)
    past, position = past.contiguous(), position.long().contiguous()
    if x.numel():
        rings.ring_forward(x, weight, bias, lengths, block, dilation, y, past, position)
    return y


def _plain(parameter: Any) -> Any:
    """Parameters as the kernels read them."""
    return None if parameter is None else parameter.float().contiguous()


def _whole(lengths: Any, time: int) -> Any:
    """Lengths as the kernels read them: one beyond the row's end would let them read what is not theirs."""
    return None if lengths is None else lengths.long().clamp(max=time).contiguous()


def _on_device(function: Any) -> Any:
    def run(first: Tensor, *rest: Any) -> Any:
        # Launches go to the current device, which need not be the tensors'.
        if first.device.index == torch.cuda.current_device():
            compiled.enter(first.device.index)
            return function(first, *rest)
        with torch.cuda.device(first.device):
            compiled.enter(first.device.index)
            return function(first, *rest)

    return run


def _fake_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    dilation: int,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return _empty_like(x), x.new_empty(weight.shape[0] - 1, *x.shape) if keep else x.new_empty(0)


def _fake_backward(
    dy: Tensor, x: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return _empty_like(x), weight.new_empty(weight.shape), dbias


def _fake_from_state(x: Tensor, *_: Any) -> Tensor:
    return _empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, lengths, *settings, keep = inputs
    ctx.save_for_backward(x, output[1], weight, bias, lengths)
    ctx.settings, ctx.keep = settings, keep
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    x, inner, weight, bias, lengths = ctx.saved_tensors
    if dy is None:
        return (None,) * 10
    if not ctx.keep:
        raise KernelError("tcn_blocks: gradients asked of a call with keep=False, allowed is keep=True")
    dx, dweight, dbias = torch.ops.tcnca.tcn_blocks_backward.default(dy, x, inner, weight, bias, lengths, *ctx.settings)
    return dx, dweight, None if bias is None else dbias, *(None,) * 7


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    return


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise KernelError(f"gradients of the TCN's gradients: the kernels have none; {compiled.ADVICE}")


_LIBRARY.impl("tcn_blocks", _on_device(_forward), "CUDA")
_LIBRARY.impl("tcn_blocks_backward", _on_device(_backward), "CUDA")
_LIBRARY.impl("tcn_block_from_state", _on_device(_from_state), "CUDA")
torch.library.register_fake("tcnca::tcn_blocks", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("tcnca::tcn_blocks_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_fake("tcnca::tcn_block_from_state", _fake_from_state, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_blocks", _gradients, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_blocks_backward", _refuse, setup_context=_save_nothing, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_block_from_state", _refuse, setup_context=_save_nothing, lib=_LIBRARY)
