"""The TCN's blocks as operators of PyTorch: `tcnca::tcn_blocks`, its gradient, and a block that continues a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.kernels import ADVICE
from tcnca.ops.tcn.cuda import compiled, plan

_LIBRARY = torch.library.Library("tcnca", "FRAGMENT")
_SETTINGS = "SymInt dilation, SymInt factor, str nonlinearity, bool residual, bool causal, float dropout"
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
    "SymInt dilation, str nonlinearity, bool residual) -> Tensor"
)
_FORWARD = torch.ops.tcnca.tcn_blocks.default
_BACKWARD = torch.ops.tcnca.tcn_blocks_backward.default
_FROM_STATE = torch.ops.tcnca.tcn_block_from_state.default
_BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd
SEEDS = 1 << 62


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
    dropout: float = 0.0,
) -> Tensor:
    """`depth` blocks `x + dropout(nonlinearity(convolution(x)))`; block `i` has dilation `dilation · factor^i`.

    Args:
        x: `[batch, time, channels]` on a GPU, in float32, bfloat16 or float16. Sums are in float32.
        weight: `[depth, channels, kernel_size]` or `[depth, 1, channels, kernel_size]`, up to 64 taps, as in
            `dilated_conv`.
        bias: `[depth, channels]` or `[depth, 1, channels]`.
        lengths: `[batch]`; what lies behind a row's length counts as zero in every block.
        residual: whether blocks have their skip connection.
        dropout: the probability with which a value is dropped, drawn anew in every call.
    """
    seed = torch.randint(SEEDS, (1,), device=x.device) if dropout > 0.0 else None
    wanted = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    keep = wanted and torch.is_grad_enabled()
    settings = (dilation, factor, nonlinearity, residual, causal, dropout)
    # Only plain tensors have an address, by which kernels are chosen; others, fake ones say, are PyTorch's to run.
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return _FORWARD(x, weight, bias, lengths, seed, *settings, keep)[0]
    if keep:
        return _Blocks.apply(x, weight, bias, lengths, seed, settings)
    with _BelowAutograd():
        return _FORWARD(x, weight, bias, lengths, seed, *settings, False)[0]


class _Blocks(torch.autograd.Function):
    """What `register_autograd` below makes of `tcn_blocks`, in a third of the time a call."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lengths: Tensor | None,
        seed: Tensor | None,
        settings: plan.Settings,
    ) -> Tensor:
        keep = not plan.recomputes(plan.lies(x), weight.shape, bias is not None, lengths is not None, settings)
        with _BelowAutograd():
            y, inner = _FORWARD(x, weight, bias, lengths, seed, *settings, keep)
        ctx.save_for_backward(x, inner, weight, bias, lengths, seed)
        ctx.settings = settings
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, ...]:
        x, inner, weight, bias, lengths, seed = ctx.saved_tensors
        given = (slopes[0], x, inner, weight, bias, lengths, seed, *ctx.settings)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            dx, dweight, dbias = _BACKWARD(*given)
        else:
            with _BelowAutograd():
                dx, dweight, dbias = _BACKWARD(*given)
        return dx, dweight, None if bias is None else dbias, None, None, None


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
    return _FROM_STATE(x, weight, bias, lengths, past, position, dilation, nonlinearity, residual)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    dilation: int,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
    dropout: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    weight, bias, lengths = _plain(weight), _plain(bias), _whole(lengths, x.shape[1])
    y, depth = _empty_like(x), weight.shape[0]
    if x.numel() == 0:
        return y, x.new_empty((depth - 1, *x.shape) if keep else 0)
    settings = (dilation, factor, nonlinearity, residual, causal, dropout)
    kernels = plan.forward_plan(plan.lies(x), weight.shape, bias is not None, lengths is not None, settings, keep)
    inner = x.new_empty((depth - 1, *x.shape) if keep else 0)
    scratch = x.new_empty(x.shape) if kernels.scratch and not keep else inner
    kernels.run(
        compiled.stream_of(x.device.index),
        x.data_ptr(),
        weight.data_ptr(),
        _address(bias),
        _address(lengths),
        _address(seed),
        y.data_ptr(),
        scratch.data_ptr(),
    )
    return y, inner


def _backward(
    dy: Tensor,
    x: Tensor,
    inner: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    dilation: int,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    dy = dy if dy.dtype == x.dtype else dy.to(x.dtype)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    if inner.numel() == 0 and weight.shape[0] > 1:
        x, dy = _in_pieces(x), _in_pieces(dy)  # only the kernels can run that need no `inner`
    kind, bias_kind = weight.dtype, weight.dtype if bias is None else bias.dtype
    weight, bias, lengths = _plain(weight), _plain(bias), _whole(lengths, x.shape[1])
    dx, dweight = _empty_like(x), torch.empty_like(weight)
    dbias = weight.new_empty(0) if bias is None else torch.empty_like(bias)
    if x.numel():
        settings = (dilation, factor, nonlinearity, residual, causal, dropout)
        kernels = plan.backward_plan(
            plan.lies(x), plan.lies(dy), weight.shape, bias is not None, lengths is not None, settings
        )
        scratch = torch.empty(kernels.scratch, dtype=torch.uint8, device=x.device)
        kernels.run(
            compiled.stream_of(x.device.index),
            dy.data_ptr(),
            x.data_ptr(),
            inner.data_ptr(),
            weight.data_ptr(),
            _address(bias),
            _address(lengths),
            _address(seed),
            dx.data_ptr(),
            dweight.data_ptr(),
            dbias.data_ptr(),
            scratch.data_ptr(),
        )
    else:
        dweight.zero_()
        dbias.zero_()
    return dx, dweight if kind == dweight.dtype else dweight.to(kind), dbias.to(bias_kind)


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
    y = _empty_like(x)
    past, position = past.contiguous(), position.long().contiguous()
    if x.numel():
        settings = (dilation, 1, nonlinearity, residual, True, 0.0)
        shape = (1, *weight.shape)
        kernel = plan.state_plan(plan.lies(x), past.dtype, shape, bias is not None, lengths is not None, settings)
        kernel.run(
            compiled.stream_of(x.device.index),
            x.data_ptr(),
            weight.data_ptr(),
            _address(bias),
            _address(lengths),
            0,
            y.data_ptr(),
            past.data_ptr(),
            position.data_ptr(),
        )
    return y


def _in_pieces(x: Tensor) -> Tensor:
    return x if plan.in_pieces(plan.lies(x)) else x.clone(memory_format=torch.contiguous_format)


def _plain(parameter: Any) -> Any:
    """Parameters as the kernels read them."""
    return None if parameter is None else parameter.float().contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _whole(lengths: Any, time: int) -> Any:
    """Lengths as the kernels read them: one outside the row would let them read what is not theirs."""
    return None if lengths is None else lengths.long().clamp(0, time).contiguous()


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
    seed: Tensor | None,
    dilation: int,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
    dropout: float,
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
    x, weight, bias, lengths, seed, *settings, keep = inputs
    ctx.save_for_backward(x, output[1], weight, bias, lengths, seed)
    ctx.settings, ctx.keep = settings, keep
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    x, inner, weight, bias, lengths, seed = ctx.saved_tensors
    if dy is None:
        return (None,) * 12
    if not ctx.keep:
        raise KernelError("tcn_blocks: gradients asked of a call with keep=False, allowed is keep=True")
    dx, dweight, dbias = _BACKWARD(dy, x, inner, weight, bias, lengths, seed, *ctx.settings)
    return dx, dweight, None if bias is None else dbias, *(None,) * 9


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    return


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise KernelError(f"gradients of the TCN's gradients: the kernels have none; {ADVICE}")


_LIBRARY.impl("tcn_blocks", _on_device(_forward), "CUDA")
_LIBRARY.impl("tcn_blocks_backward", _on_device(_backward), "CUDA")
_LIBRARY.impl("tcn_block_from_state", _on_device(_from_state), "CUDA")
torch.library.register_fake("tcnca::tcn_blocks", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("tcnca::tcn_blocks_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_fake("tcnca::tcn_block_from_state", _fake_from_state, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_blocks", _gradients, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_blocks_backward", _refuse, setup_context=_save_nothing, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_block_from_state", _refuse, setup_context=_save_nothing, lib=_LIBRARY)
