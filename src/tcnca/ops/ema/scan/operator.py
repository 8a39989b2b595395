"""The fused scan of an EMA as operators of PyTorch: `tcnca::ema_scan` and its gradient, run at once or recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tcnca.errors import KernelError
from tcnca.ops.ema.scan import launch
from tcnca.ops.kernels import ADVICE, INTERPRETED
from tcnca.ops.triton_kernels.start import on_device, packed

_LIBRARY = torch.library.Library("tcnca", "FRAGMENT")
_PARAMETERS = "Tensor delta, Tensor alpha, Tensor beta, Tensor gamma, Tensor? initial, Tensor? lengths"
_LIBRARY.define(
    f"ema_scan(Tensor x, {_PARAMETERS}, bool return_final) -> (Tensor y, Tensor final, Tensor coefficients)"
)
_LIBRARY.define(
    f"ema_scan_backward(Tensor g, Tensor? to_final, Tensor x, Tensor coefficients, {_PARAMETERS})"
    " -> (Tensor to_x, Tensor to_delta, Tensor to_alpha, Tensor to_beta, Tensor to_gamma, Tensor to_initial)"
)


def scan(
    x: Tensor,
    delta: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    return_final: bool,
) -> tuple[Tensor, Tensor | None]:
    """Outputs, and the final hidden states or None. Hidden states are `[batch, hidden, channels]`."""
    given = (x, delta, alpha, beta, gamma, initial, lengths, return_final)
    # Subclasses stand for tensors that are elsewhere, or nowhere; a mode wants to see operators.
    if (
        torch.compiler.is_compiling()
        or type(x) not in (Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        y, final, _ = torch.ops.tcnca.ema_scan.default(*given)
        return y, final if return_final else None
    # The registered operator does the same, but takes longer to start than its kernels take to run.
    if torch.is_grad_enabled():
        found: tuple[Tensor, Tensor | None] = _Scan.apply(*given)
        return found
    return _forward(*given)[:2]


@on_device
def _forward(
    stream: int,
    x: Tensor,
    delta: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    return_final: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Outputs, final hidden states or None, coefficients, and what segments start from."""
    parameters = (packed(delta), packed(alpha), packed(beta), packed(gamma))
    return launch.forward(stream, x, parameters, _packed(initial), _whole(lengths), return_final)


@on_device
def _backward(
    stream: int,
    g: Tensor,
    to_final: Tensor | None,
    x: Tensor,
    coefficients: Tensor,
    delta: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    carries: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of all that has one, in the order of the arguments; None for `initial` if there is none."""
    parameters = (packed(delta), packed(alpha), packed(beta), packed(gamma))
    to_x, to_parameters, to_initial = launch.backward(
        stream,
        g,
        _packed(to_final),
        x,
        packed(coefficients),
        parameters,
        _packed(initial),
        _whole(lengths),
        carries,
    )
    return to_x, *to_parameters, to_initial


def _packed(value: Tensor | None) -> Tensor | None:
    return None if value is None else packed(value)


def _whole(lengths: Tensor | None) -> Tensor | None:
    return None if lengths is None else lengths.long().contiguous()


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        y, final, coefficients, carries = _forward(*given)
        ctx.save_for_backward(given[0], coefficients, *given[1:7], carries)
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        g, to_final = gradients
        x, *others = ctx.saved_tensors
        g = torch.zeros_like(x) if g is None else g
        if torch.is_grad_enabled():
            # Whoever differentiates twice gets the registered operator's error, not a derivative of zero.
            found = torch.ops.tcnca.ema_scan_backward.default(g, to_final, x, *others[:-1])
            return *found[:5], None if others[5] is None else found[5], None, None
        return *_backward(g, to_final, x, *others), None, None


def _present(x: Tensor, found: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """What an operator returns: empty for what there is not."""
    return tuple([x.new_empty(0, dtype=torch.float32) if part is None else part for part in found])


def _run_forward(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return _present(x, _forward(x, *given)[:3])


def _run_backward(g: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return _present(g, _backward(g, *given))


def _fake_forward(x: Tensor, delta: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return _present(x, launch.buffers(x, delta, given[-1]))


def _fake_backward(g: Tensor, to_final: Tensor | None, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    _, *parameters, initial, _ = given
    parts = (x, *parameters, initial)
    return _present(x, tuple([None if part is None else launch.packed_like(part) for part in parts]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[2], *inputs[1:7])
    ctx.return_final = inputs[7]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, g: Tensor | None, to_final: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *others = ctx.saved_tensors
    g = torch.zeros_like(x) if g is None else g
    found = torch.ops.tcnca.ema_scan_backward.default(g, to_final if ctx.return_final else None, x, *others)
    return *found[:5], None if others[5] is None else found[5], None, None


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    return


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise KernelError(f"gradients of the EMA's gradients: the fused scan has none; take method='fft', or {ADVICE}")


_KEY = "CPU" if INTERPRETED else "CUDA"
_LIBRARY.impl("ema_scan", _run_forward, _KEY)
_LIBRARY.impl("ema_scan_backward", _run_backward, _KEY)
torch.library.register_fake("tcnca::ema_scan", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("tcnca::ema_scan_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("tcnca::ema_scan", _gradients, setup_context=_save, lib=_LIBRARY)
torch.library.register_autograd("tcnca::ema_scan_backward", _refuse, setup_context=_save_nothing, lib=_LIBRARY)
