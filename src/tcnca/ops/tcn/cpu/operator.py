"""The TCN on the CPU as an operator of PyTorch, `tcnca::tcn_cpu`, and its gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.tcn.cpu import blocks, refold
from tcnca.ops.tcn.cpu.blocks import Blocks
from tcnca.ops.tcn.cpu.fold import slabs
from tcnca.ops.tcn.cpu.memory import borrowed
from tcnca.ops.tcn.plain import plain_tcn

_LIBRARY = torch.library.Library("tcnca", "FRAGMENT")
_SETTINGS = "SymInt factor, str nonlinearity, bool residual, bool causal"
_LIBRARY.define(
    f"tcn_cpu(Tensor x, Tensor weight, Tensor? bias, Tensor? lengths, {_SETTINGS}, bool keep)"
    " -> (Tensor y, Tensor inner)"
)
_LIBRARY.define(
    f"tcn_cpu_backward(Tensor dy, Tensor? dinner, Tensor x, Tensor weight, Tensor? bias, Tensor? lengths, {_SETTINGS})"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)"
)


def tcn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    factor: int = 2,
    nonlinearity: str = "silu",
    residual: bool = True,
    causal: bool = True,
    keep: bool = False,
) -> tuple[Tensor, Tensor]:
    """`tcnca.ops.tcn` without state, from which its arguments are.

    Its gradients need nothing but `x` and the parameters: they compute again what lies between the convolutions.

    Returns:
        `y`, and with `keep` the inputs of all convolutions but the first, `[any, batch, time, channels]`.
    """
    return torch.ops.tcnca.tcn_cpu.default(x, weight, bias, lengths, factor, nonlinearity, residual, causal, keep)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape)
    inner = x.new_empty(weight.shape[0] * weight.shape[1] - 1, *x.shape) if keep else x.new_empty(0)
    settings = (factor, nonlinearity, residual, causal)
    with borrowed(x) as memory, _own_types():
        for slab, plan in _slabs(x, weight, bias, lengths, *settings):
            part = x[slab]
            if not keep and refold.refolds(plan, part):
                refold.forward(plan, part, y[slab], memory)
                continue
            between = inner[:, *slab] if keep else blocks.between(plan, part, memory, in_turns=True)
            blocks.forward(plan, part, [*between, y[slab]], memory)
    return y, inner


def _backward(
    dy: Tensor,
    dinner: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dkernels = x.new_empty(x.shape), weight.new_zeros(weight.shape)
    dbias = weight.new_zeros(0) if bias is None else bias.new_zeros(bias.shape)
    count = weight.shape[0] * weight.shape[1]
    settings = (factor, nonlinearity, residual, causal)
    with borrowed(x) as memory, _own_types():
        for slab, plan in _slabs(x, weight, bias, lengths, *settings):
            part, channels = x[slab], slab[2]
            between = blocks.between(plan, part, memory, in_turns=False)
            blocks.forward(plan, part, between, memory)
            blocks.backward(
                plan,
                dy[slab],
                [part, *between],
                [None] * count if dinner is None else [None, *dinner[:, *slab]],
                dx[slab],
                dkernels[:, :, channels].flatten(0, 1).unbind(),
                [None] * count if bias is None else dbias[:, :, channels].flatten(0, 1).unbind(),
                memory,
            )
    return dx, dkernels.flip(-1), dbias


_Slab = tuple[slice, slice, slice]


def _slabs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
) -> Iterator[tuple[_Slab, Blocks]]:
    """Where the slabs of `x` are, and the blocks of each."""
    kernels = weight.flip(-1)
    real = None if lengths is None else lengths.tolist()
    for sequences, channels in slabs(x.shape):
        plan = blocks.blocks_of(
            kernels[:, :, channels],
            None if bias is None else bias[:, :, channels],
            None if real is None else real[sequences],
            factor,
            nonlinearity,
            residual,
            causal,
            x.shape[1],
        )
        yield (sequences, slice(None), channels), plan


def _own_types() -> contextlib.AbstractContextManager[None]:
    """Autocast must not round what lies inside an operator."""
    on = torch.is_autocast_enabled("cpu")
    return torch.autocast("cpu", enabled=False) if on else contextlib.nullcontext()


def _fake_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor]:
    count = weight.shape[0] * weight.shape[1]
    return x.new_empty(x.shape), x.new_empty(count - 1, *x.shape) if settings[-1] else x.new_empty(0)


def _fake_backward(
    dy: Tensor, dinner: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, lengths, *settings, keep = inputs
    ctx.save_for_backward(x, weight, bias, lengths)
    ctx.settings, ctx.keep = settings, keep
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dinner: Tensor | None) -> tuple[Any, ...]:
    x, weight, bias, lengths = ctx.saved_tensors
    dinner = dinner if ctx.keep else None
    if dy is None and dinner is None:
        return (None,) * 9
    if torch.is_grad_enabled() and dinner is None:
        return *_differentiable(dy, x, weight, bias, lengths, *ctx.settings), *(None,) * 6
    dy = x.new_zeros(x.shape) if dy is None else dy
    found = torch.ops.tcnca.tcn_cpu_backward.default(dy, dinner, x, weight, bias, lengths, *ctx.settings)
    dx, dweight, dbias = found
    return dx, dweight, None if bias is None else dbias, *(None,) * 6


def _differentiable(
    dy: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    factor: int,
    nonlinearity: str,
    residual: bool,
    causal: bool,
) -> list[Tensor | None]:
    """The gradients in plain PyTorch, which has gradients of them too."""
    y, _ = plain_tcn(
        x,
        weight,
        factor,
        bias=bias,
        nonlinearity=nonlinearity,
        residual=residual,
        causal=causal,
        lengths=lengths,
    )
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(y, leaves, dy, create_graph=True, allow_unused=True))
    return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in (x, weight, bias)]


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    return


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise KernelError(
        "gradients of the gradients of a TCN's state: the CPU's fast path has none; "
        "TCNCA_KERNELS=plain in the environment does without it"
    )


_LIBRARY.impl("tcn_cpu", _forward, "CPU")
_LIBRARY.impl("tcn_cpu_backward", _backward, "CPU")
torch.library.register_fake("tcnca::tcn_cpu", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("tcnca::tcn_cpu_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_cpu", _gradients, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("tcnca::tcn_cpu_backward", _refuse, setup_context=_save_nothing, lib=_LIBRARY)
