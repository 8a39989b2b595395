"""Running the kernels of the EMA: which buffers there are, what is started in which order."""

from __future__ import annotations

import torch
from torch import Tensor

from tcnca.ops.ema.scan import plan
from tcnca.ops.triton_kernels.start import Launch

Parameters = tuple[Tensor, ...]


def forward(
    stream: int,
    x: Tensor,
    parameters: Parameters,
    initial: Tensor | None,
    lengths: Tensor | None,
    return_final: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Outputs, the final hidden states or None, the coefficients, and what segments start from, for `backward`."""
    y, final, coefficients = buffers(x, parameters[0], return_final)
    if x.numel() == 0:
        return y, final, coefficients, None
    run = plan.forward(_call(x, parameters, initial, lengths, return_final), x.stride())
    carries = coefficients.new_empty(run.carries)
    count = coefficients if lengths is None else lengths
    run.prepare(stream, *parameters, coefficients)
    run.ends(stream, x, coefficients, carries, count, coefficients)
    run.carry(stream, coefficients, carries, coefficients if initial is None else initial, coefficients)
    _outputs(run.outputs, stream, x, y, coefficients, carries, count, coefficients if final is None else final)
    return y, final, coefficients, carries


def backward(
    stream: int,
    g: Tensor,
    to_final: Tensor | None,
    x: Tensor,
    coefficients: Tensor,
    parameters: Parameters,
    initial: Tensor | None,
    lengths: Tensor | None,
    carries: Tensor | None,
) -> tuple[Tensor, Parameters, Tensor | None]:
    """Gradients of the input, of the parameters and of the initial hidden states (None unless these were given).

    What segments start from is computed again where it was not kept.
    """
    to_x, to_parameters = packed_like(x), tuple([packed_like(part) for part in parameters])
    if x.numel() == 0:
        for part in to_parameters:
            part.zero_()
        return to_x, to_parameters, None if initial is None else packed_like(initial)
    call = _call(x, parameters, initial, lengths, to_final is not None)
    run = plan.backward(call, x.stride(), g.stride(), g.dtype)
    pulls, parts = coefficients.new_empty(run.carries), coefficients.new_empty(run.parts)
    total = coefficients if initial is None else coefficients.new_empty(initial.shape)
    count = coefficients if lengths is None else lengths
    last = coefficients if to_final is None else to_final
    # A gradient of the final states wants the drive in, which a start from nothing left out.
    if carries is None or (initial is None and to_final is not None):
        carries = coefficients.new_empty(run.carries)
        run.ends(stream, x, coefficients, carries, count, coefficients)
        run.carry(stream, coefficients, carries, coefficients if initial is None else initial, coefficients)
    run.pulls(stream, g, coefficients, pulls, count, last)
    run.carry_pulls(stream, coefficients, pulls, coefficients, total)
    _outputs(run.outputs, stream, g, to_x, coefficients, pulls, count, last)
    run.weights(stream, x, g, coefficients, carries, pulls, parts, count, last)
    run.reduce(stream, parts, coefficients, *parameters[:3], *to_parameters)
    if initial is None:
        return to_x, to_parameters, None
    to_initial = coefficients[0, 1] * total
    if to_final is not None and lengths is not None:
        # Where there was no token, the final states are the initial ones.
        to_initial += torch.where((lengths == 0).view(-1, 1, 1), to_final, 0.0)
    return to_x, to_parameters, to_initial.to(initial.dtype)


def packed_like(value: Tensor) -> Tensor:
    """A new tensor of the same shape and type without gaps."""
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def buffers(x: Tensor, delta: Tensor, return_final: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """What `forward` fills: outputs, final hidden states or None, and coefficients."""
    directions, channels, hidden = delta.shape
    final = x.new_empty((x.shape[0], hidden, channels), dtype=torch.float32) if return_final else None
    return packed_like(x), final, x.new_empty((directions, 3, hidden, channels), dtype=torch.float32)


def _call(x: Tensor, parameters: Parameters, initial: Tensor | None, lengths: Tensor | None, final: bool) -> plan.Call:
    delta, alpha, beta, gamma = parameters
    directions, _, hidden = delta.shape
    return plan.Call(
        x.shape,
        directions,
        hidden,
        x.dtype,
        (delta.dtype, alpha.dtype, beta.dtype, gamma.dtype),
        None if initial is None else initial.dtype,
        lengths is not None,
        final,
        x.device.index,
    )


def _outputs(
    steps: tuple[Launch, ...],
    stream: int,
    x: Tensor,
    y: Tensor,
    coefficients: Tensor,
    carries: Tensor,
    count: Tensor,
    final: Tensor,
) -> None:
    """One direction after the other."""
    if len(steps) == 1:
        steps[0](stream, x, y, y, coefficients, carries, count, final)
        return
    # The directions meet in float32, whatever the outputs are.
    between = y if y.dtype == torch.float32 else torch.empty_like(y, dtype=torch.float32)
    steps[0](stream, x, between, between, coefficients, carries, count, final)
    steps[1](stream, x, y, between, coefficients, carries, count, final)
