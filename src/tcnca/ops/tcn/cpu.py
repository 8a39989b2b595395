"""The TCN on the CPU by oneDNN's depthwise convolutions of folded sequences.

It exists because it is 1.4 to 7.5 times as fast forward and 3.4 to 4.6 times backward as F.conv1d, on two cores.

A convolution of dilation `d` never mixes the `d` rows of times `phase, phase + d, phase + 2 d, …`, and has no dilation
along a row. A sequence that is folded into these rows, channels last, has the layout of oneDNN's fast convolutions.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcnca.ops.checks import autocasts
from tcnca.ops.dispatch import transform_reason
from tcnca.ops.library import register
from tcnca.ops.padding import zero_padding
from tcnca.ops.ring import common_position, extend_ring, read_ring, ring_views
from tcnca.ops.tcn.naive import TCNCall, TCNState, naive_tcn, run_convolutions

MIN_NUMBERS = 1 << 15  # of x, below which this is not faster
# Only measured on these processors, on which oneDNN has its fast convolutions.
FAST_HERE = torch.backends.mkldnn.is_available() and platform.machine().lower() in ("x86_64", "amd64")
SLAB = 1 << 20  # numbers of x that go through all blocks together, which bounds the memory
MIN_CHANNELS = 32  # of a slab; the weights' gradients of fewer channels take half as long again

_aten: Any = torch.ops.aten


def unsupported_reason(call: TCNCall) -> str | None:
    """Return why this backend cannot run a call, or None if it can."""
    x = call.x
    for tensor in (x, *call.parameters(), call.lengths):
        if tensor is not None and tensor.device.type != "cpu":
            return f"device: expected the CPU for all tensors, got {tensor.device}"
    if call.norm_fn is not None:
        return "norm_fn: expected None, got one"
    if call.dropout > 0.0:
        return f"dropout: expected 0, got {call.dropout}"
    if call.state is not None:
        differentiated = (x, *call.parameters(), *call.state.buffers)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiated):
            return "state: expected None where gradients are computed, got one"
        if torch.compiler.is_compiling():
            return "state: expected None in a compiled graph, got one"
    if x.dtype not in (torch.float32, torch.float64):
        return f"dtype: expected float32 or float64, got {x.dtype}"
    if autocasts(x.device):
        return "autocast: expected it off, got it on"
    return transform_reason()


def should_use(call: TCNCall) -> bool:
    """Return whether this backend is expected to be faster than PyTorch's own operators."""
    x = call.x
    if x.device.type != "cpu" or x.dtype != torch.float32 or not FAST_HERE:
        return False
    # A compiled graph should not depend on the length.
    return torch.compiler.is_compiling() or x.numel() >= MIN_NUMBERS


def run(call: TCNCall) -> tuple[Tensor, TCNState | None]:
    """Run a call for which there is no `unsupported_reason`."""
    options = (call.activation, call.causal)
    if not call.return_state and call.state is None:
        factors = (call.dilation, call.dilation_factor)
        inputs = (call.x, call.weight, call.bias, call.lengths, call.omega)
        return _FORWARD(*inputs, *factors, *options, call.residual), None
    adds_skip = call.residual and call.weight.shape[1] == 1

    def convolve(h: Tensor, number: int) -> Tensor:
        if call.state is not None:
            return _continue(call, call.state, h, number, adds_skip)
        weight, bias, dilation = call.convolution(number)
        return _FORWARD(h, weight, bias, call.lengths, None, dilation, 1, *options, adds_skip)

    return run_convolutions(call, call.x, convolve, adds_skip)


def _continue(call: TCNCall, state: TCNState, h: Tensor, number: int, adds_skip: bool) -> Tensor:
    """Run a convolution after the inputs in its ring buffer, and what follows it."""
    weight, bias, dilation = call.convolution(number)
    if weight.shape[3] > 1 and h.shape[1] <= dilation:
        return _read_taps(call, state, h, number, adds_skip)
    x, buffer, y = zero_padding(h, call.lengths), state.buffers[number], torch.empty_like(h)
    for part in _parts(x.shape[0], buffer.shape[1] + x.shape[1], x.shape[2]):
        rows, _, channels = part
        inputs = extend_ring(buffer[part], state.position[rows], x[part]).to(x.dtype)
        # Rows of times that are a multiple of the dilation apart; those of the state come first.
        folded = _fold(inputs, dilation, 0, 0)
        folded = _correlate(folded, weight[0, 0, channels].flip(1), None if bias is None else bias[0, 0, channels])
        _ACTIVATIONS[call.activation].apply(folded)
        _unfold(folded, h[part] if adds_skip else None, y[part])
    return y


def _read_taps(call: TCNCall, state: TCNState, h: Tensor, number: int, adds_skip: bool) -> Tensor:
    """Run a convolution of which no token is the input of another one: folding would read the whole ring buffer."""
    weight, bias, dilation = call.convolution(number)
    x, buffer, taps = zero_padding(h, call.lengths), state.buffers[number], weight[0, 0].t().contiguous()
    y = x * taps[0] if bias is None else torch.addcmul(bias[0, 0], x, taps[0])
    time, lags = x.shape[1], range(1, len(taps))
    if (seen := common_position(state.position)) is not None:
        for lag in lags:
            _add_products(y, ring_views(buffer, seen - lag * dilation, time), taps[lag])
    else:
        ages = torch.tensor(lags).unsqueeze(1) * dilation - torch.arange(time)
        for part in _parts(x.shape[0], ages.numel(), x.shape[2]):
            rows, _, channels = part
            past = read_ring(buffer[part], state.position[rows], ages.flatten()).to(x.dtype)
            products = past.unflatten(1, ages.shape).mul_(taps[1:, channels].unsqueeze(1))
            y[part] += products.sum(1)
    _ACTIVATIONS[call.activation].apply(y)
    return y.add_(h) if adds_skip else y


def _add_products(y: Tensor, parts: tuple[Tensor, Tensor], tap: Tensor) -> None:
    """Add to `y` the products of `tap` (`[channels]`) and two parts of a ring buffer, which follow each other."""
    first, second = parts
    y[:, : first.shape[1]].addcmul_(first.to(y.dtype), tap)
    if second.shape[1]:
        y[:, first.shape[1] :].addcmul_(second.to(y.dtype), tap)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, *rest: Any) -> Tensor:
    omega, *settings = rest
    y = x.new_empty(x.shape)
    with torch.autocast("cpu", enabled=False):
        for part, slab in _slabs(x, weight, bias, lengths, *settings):
            slab.forward(x[part], y[part])
            if omega is not None:
                y[part].addcmul_(x[part], omega[part[2]])
    return y


def _backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    lengths, omega, *settings = rest
    dx, dkernels, dbias, domega = _fake_backward(dy, x, weight, bias, *rest)
    for sums in (dkernels, dbias, domega):
        sums.zero_()
    with torch.autocast("cpu", enabled=False):
        for part, slab in _slabs(x, weight, bias, lengths, *settings):
            inputs = slab.forward(x[part], None)
            channels = part[2]
            dtaps = dkernels[:, :, channels].flatten(0, 1).unbind()
            dbiases = None if bias is None else dbias[:, :, channels].flatten(0, 1).unbind()
            dx[part] = slab.backward(dy[part], inputs, dtaps, dbiases)
            if omega is not None:
                dx[part].addcmul_(dy[part], omega[channels])
                domega[channels] += (dy[part] * x[part]).sum((0, 1))
    return dx, dkernels.flip(-1), dbias, domega


_Part = tuple[slice, slice, slice]


def _slabs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    dilation: int,
    factor: int,
    activation: str,
    causal: bool,
    residual: bool,
) -> Iterator[tuple[_Part, _Slab]]:
    """Yield the sequences and channels that go through all blocks together, and their blocks."""
    kernels, counts = weight.flip(-1), None if lengths is None else lengths.tolist()
    for part in _parts(*x.shape):
        rows, _, columns = part
        convolutions = []
        for block, index in itertools.product(*map(range, weight.shape[:2])):
            kernel, offset = kernels[block, index, columns], None if bias is None else bias[block, index, columns]
            convolutions.append(_used_taps(kernel, offset, dilation * factor**block, x.shape[1], causal))
        valid = None if counts is None else counts[rows]
        yield part, _Slab(convolutions, _ACTIVATIONS[activation], weight.shape[1], residual, valid)


def _parts(batch: int, time: int, channels: int) -> Iterator[_Part]:
    """Yield sequences and channels of which at most `SLAB` numbers, or one sequence, are computed together."""
    width = min(channels, max(SLAB // time // MIN_CHANNELS, 1) * MIN_CHANNELS)
    height = max(SLAB // (time * width), 1)
    for top in range(0, batch, height):
        for left in range(0, channels, width):
            rows, columns = slice(top, min(top + height, batch)), slice(left, min(left + width, channels))
            yield rows, slice(None), columns


class _Convolution(NamedTuple):
    """The taps of a convolution that connect two tokens of a sequence, oldest first.

    kernel: `[channels, taps]`, from `past` dilations back to `future` dilations ahead.
    used: the taps' place in the whole kernel, oldest first.
    """

    kernel: Tensor
    bias: Tensor | None
    dilation: int
    used: slice
    past: int
    future: int


def _used_taps(kernel: Tensor, bias: Tensor | None, dilation: int, time: int, causal: bool) -> _Convolution:
    size = kernel.shape[1]
    future = 0 if causal else (size - 1) // 2
    past, reach = size - 1 - future, (time - 1) // dilation
    used = slice(max(past - reach, 0), size - max(future - reach, 0))
    past, future = min(past, reach), min(future, reach)
    # A single tap does not depend on the dilation, and rows are longest for the smallest.
    return _Convolution(kernel[:, used], bias, dilation if past + future else 1, used, past, future)


class _Activation(NamedTuple):
    """An activation in place, and its gradient: from that of the result and the argument, in place of the argument."""

    apply: Callable[[Tensor], object]
    differentiate: Callable[[Tensor, Tensor], object]


def _gelu(approximate: str) -> _Activation:
    return _Activation(
        lambda h: _aten.gelu_.default(h, approximate=approximate),
        lambda dy, h: _aten.gelu_backward.grad_input(dy, h, approximate=approximate, grad_input=h),
    )


_ACTIVATIONS: dict[str, _Activation] = {
    "silu": _Activation(_aten.silu_.default, lambda dy, h: _aten.silu_backward.grad_input(dy, h, grad_input=h)),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "relu": _Activation(torch.relu_, lambda dy, h: _aten.threshold_backward.grad_input(dy, h, 0, grad_input=h)),
    "none": _Activation(lambda h: h, lambda dy, h: h.copy_(dy)),
}


class _Slab(NamedTuple):
    """All blocks for some sequences and channels; `lengths` are those of the sequences."""

    convolutions: list[_Convolution]
    activation: _Activation
    convolutions_per_block: int
    residual: bool
    lengths: list[int] | None

    def forward(self, x: Tensor, y: Tensor | None) -> list[Tensor]:
        """Write the output to `y`; without `y`, return the inputs of all convolutions."""
        inputs: list[Tensor] = []
        h = skip = x
        for number, convolution in enumerate(self.convolutions):
            ends = (number + 1) % self.convolutions_per_block == 0
            last = number + 1 == len(self.convolutions)
            source = h if self.lengths is None else self._clear_padding(h.clone())
            if y is None:
                inputs.append(source)
                if last:
                    break
            rows = _fold(source, convolution.dilation, convolution.past, convolution.future)
            folded = _correlate(rows, convolution.kernel, convolution.bias)
            self.activation.apply(folded)
            target = y if last and y is not None else x.new_empty(x.shape)
            h = _unfold(folded, skip if ends and self.residual else None, target)
            skip = h if ends else skip
        return inputs

    def backward(
        self, dy: Tensor, inputs: list[Tensor], dkernels: tuple[Tensor, ...], dbiases: tuple[Tensor, ...] | None
    ) -> Tensor:
        """Return the gradient of `x`, and add to those of the parameters; `inputs` are those of the convolutions."""
        dh = dskip = dy
        for number in reversed(range(len(inputs))):
            kernel, bias, dilation, used, past, future = self.convolutions[number]
            rows = _fold(inputs[number], dilation, past, future)
            dz = _correlate(rows, kernel, bias)
            for gradient, argument in _pairs(dh, dz):
                self.activation.differentiate(gradient, argument)
            _zero_missing(dz, dh.shape[1], 0)
            dkernels[number][:, used] += _kernel_gradient(dz, rows, kernel)
            if dbiases is not None:
                dbiases[number].add_(dz.sum((0, 1, 2)))
            begins = number % self.convolutions_per_block == 0
            skip = dskip if begins and self.residual else None
            spread = torch.nn.functional.pad(dz, (0, 0, future, past))
            dsource = _correlate(spread, kernel.flip(1), None)
            if self.lengths is None:
                dh = _unfold(dsource, skip, dy.new_empty(dy.shape))
            else:
                # Padding reaches the skip connection, but no convolution.
                dh = self._clear_padding(_unfold(dsource, None, dy.new_empty(dy.shape)))
                dh = dh if skip is None else dh.add_(skip)
            dskip = dh if begins else dskip
        return dh

    def _clear_padding(self, x: Tensor) -> Tensor:
        for row, length in enumerate(self.lengths or ()):
            x[row, length:].zero_()
        return x


def _fold(x: Tensor, dilation: int, before: int, after: int) -> Tensor:
    """Return `[batch, time, channels]` as rows `[batch, dilation, tokens, channels]`, with zeros before and after."""
    batch, time, channels = x.shape
    tokens = -(-time // dilation)
    rows = x.new_empty(batch, dilation, before + tokens + after, channels)
    rows[:, :, :before].zero_()
    rows[:, :, before + tokens :].zero_()
    _zero_missing(rows, time, before)
    for source, target in _pairs(x, rows[:, :, before : before + tokens]):
        target.copy_(source)
    return rows


def _unfold(rows: Tensor, skip: Tensor | None, x: Tensor) -> Tensor:
    """Write rows `[batch, dilation, tokens, channels]`, added to `skip`, to `x`, `[batch, time, channels]`."""
    pairs = _pairs(x, rows)
    others = [None] * len(pairs) if skip is None else [other for other, _ in _pairs(skip, rows)]
    for (target, source), other in zip(pairs, others, strict=True):
        if other is None:
            target.copy_(source)
        else:
            torch.add(other, source, out=target)
    return x


def _pairs(x: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the same elements of `[batch, time, channels]` and of rows: tokens of all rows, and the last of some."""
    dilation = rows.shape[1]
    whole, rest = divmod(x.shape[1], dilation)
    pairs = [(x[:, : whole * dilation].unflatten(1, (whole, dilation)).transpose(1, 2), rows[:, :, :whole])]
    if rest:
        pairs.append((x[:, whole * dilation :], rows[:, :rest, whole]))
    return pairs


def _zero_missing(rows: Tensor, time: int, before: int) -> None:
    """Write zeros where rows lack the last token that others have."""
    whole, rest = divmod(time, rows.shape[1])
    if rest:
        rows[:, rest:, before + whole].zero_()


def _correlate(rows: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve rows `[…, tokens, channels]` to `[…, tokens - taps + 1, channels]`."""
    batch, phases, tokens, channels = rows.shape
    taps = kernel.shape[1]
    if taps == 1:  # PyTorch does not use oneDNN for one tap on a single thread
        return rows * kernel[:, 0] if bias is None else torch.addcmul(bias, rows, kernel[:, 0])
    image = rows.view(batch * phases, 1, tokens, channels).permute(0, 3, 1, 2)
    y = torch.conv2d(image, kernel.reshape(channels, 1, 1, taps), bias, groups=channels)
    return y.permute(0, 2, 3, 1).reshape(batch, phases, tokens - taps + 1, channels)


def _kernel_gradient(dz: Tensor, rows: Tensor, kernel: Tensor) -> Tensor:
    """Return the gradient of `kernel` in `_correlate(rows, kernel)`, given that of the result."""
    channels, taps = kernel.shape
    if taps == 1:
        return (dz * rows).sum((0, 1, 2)).unsqueeze(1)
    # PyTorch's kernel is many times faster for images one token wide than for images one token high.
    dz, rows = (part.reshape(-1, part.shape[2], 1, channels).permute(0, 3, 1, 2) for part in (dz, rows))
    image, geometry = kernel.reshape(channels, 1, taps, 1), ((1, 1), (0, 0), (1, 1), False, (0, 0))
    found = _aten.convolution_backward.default(dz, rows, image, None, *geometry, channels, (False, True, False))
    return found[1].reshape(channels, taps)


def _fake_forward(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    optional = [weight.new_empty(0 if each is None else each.shape) for each in (bias, rest[1])]
    return x.new_empty(x.shape), weight.new_empty(weight.shape), *optional


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])  # what is between the convolutions is recomputed
    ctx.settings = inputs[5:]


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    gradients = _differentiable if torch.is_grad_enabled() else _BACKWARD
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes them
    dx, dweight, dbias, domega = gradients(dy, *saved, *ctx.settings)
    dbias, domega = None if saved[2] is None else dbias, None if saved[4] is None else domega
    return dx, dweight, dbias, None, domega, *(None,) * 5


def _differentiable(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Tensor | None, *rest: Any
) -> list[Tensor | None]:
    """Return the gradients by PyTorch's own operators, which have gradients as well."""
    omega, *settings = rest
    names = ("dilation", "dilation_factor", "activation", "causal", "residual")
    options = dict(zip(names, settings, strict=True))
    y, _ = naive_tcn(TCNCall(x=x, weight=weight, bias=bias, lengths=lengths, omega=omega, **options))
    inputs = (x, weight, bias, omega)
    leaves = [leaf for leaf in inputs if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(y, leaves, dy, create_graph=True, allow_unused=True))
    return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in inputs]


_INPUTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? lengths, Tensor? omega, "
    "SymInt dilation, SymInt factor, str activation, bool causal, bool residual"
)
_BACKWARD = register(
    f"tcn_cpu_backward(Tensor dy, {_INPUTS}) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor domega)",
    _backward,
    _fake_backward,
    "CPU",
    "naive",
)
_FORWARD = register(f"tcn_cpu({_INPUTS}) -> Tensor", _forward, _fake_forward, "CPU", _gradients, _save)
