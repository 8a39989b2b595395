"""Running the kernels of chunked attention: which buffers there are and what is started in which order."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.ops.attention.triton import plan, tiles
from tcnca.ops.triton_kernels.start import ALIGNMENT, on_device, packed


class Given(NamedTuple):
    """The tensors of a call as the kernels read them; the queries stand in for those that there are not."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    lengths: Tensor
    seed: Tensor


def prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    seed: Tensor | None,
    chunk: int,
    causal: bool,
    function: str,
    dropout: float,
) -> tuple[plan.Call, Given]:
    """What a call is like, and its tensors: rows evenly apart, a bias in the units of the scores."""
    reach = None
    if bias is not None:
        reach = (bias.shape[0] + 1) // 2
        # Behind the end there are as many numbers as a block has keys.
        bias = F.pad(bias.float() * (math.log2(math.e) if function == "softmax" else 1.0), (0, tiles.MOST))
    if lengths is not None:
        lengths = packed(lengths if lengths.dtype in (torch.int32, torch.int64) else lengths.long())
    q, k, v = rows(q), rows(k), rows(v)
    batch, time, width = q.shape
    call = plan.Call(
        batch,
        time,
        width,
        v.shape[2],
        (q.stride(1), k.stride(1), v.stride(1)),
        q.dtype,
        reach,
        None if lengths is None else lengths.dtype,
        chunk,
        causal,
        function,
        dropout,
        q.device.index,
    )
    return call, Given(q, k, v, *(q if part is None else part for part in (bias, lengths, seed)))


def rows(x: Tensor) -> Tensor:
    """`x`, or a copy, so that its rows are evenly apart and without gaps and that the first is aligned."""
    even = x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if even and x.data_ptr() % ALIGNMENT == 0 else x.clone(memory_format=torch.contiguous_format)


@on_device
def forward(stream: int, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The output, and the softmax's normalizer, `[batch, time]`; empty for the other functions."""
    return outputs(stream, *prepared(q, *rest))


def outputs(stream: int, call: plan.Call, given: Given) -> tuple[Tensor, Tensor]:
    """What `forward` returns."""
    out = given.v.new_empty(given.v.shape)
    kept = (call.batch, call.time) if call.function == "softmax" else (0,)
    normalizer = out.new_empty(kept, dtype=torch.float32)
    run = plan.forward(call)
    if run.normalize is not None:
        run.normalize(stream, *given, out, normalizer)
    run.attend(stream, *given, out, normalizer)
    return out, normalizer


@on_device
def backward(
    stream: int, dy: Tensor, out: Tensor, normalizer: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values and bias; the last is empty unless `rest` ends in True."""
    *inputs, to_bias = rest
    call, given = prepared(*inputs)
    dy, normalizer = rows(dy.to(call.dtype)), packed(normalizer)
    run = plan.backward(call, dy.stride(1), to_bias)
    sums = normalizer
    if run.sums is not None:
        sums = torch.empty_like(normalizer)
        run.sums(stream, dy, packed(out), sums)
    return gradients(stream, call, run, given, dy, normalizer, sums, to_bias)


def gradients(
    stream: int,
    call: plan.Call,
    run: plan.Backward,
    given: Given,
    dy: Tensor,
    normalizer: Tensor,
    sums: Tensor,
    to_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `backward` returns, slab by slab."""
    q, k, v, *optional = given
    dq, dk, dv = q.new_empty(q.shape), q.new_empty(q.shape), v.new_empty(v.shape)
    precise = torch.float32
    so_far = q.new_empty(q.shape if run.cut else (0,), dtype=precise)
    weights, slopes = q.new_empty((2, run.held))
    found = q.new_zeros(run.distances, dtype=precise)
    for part in run.parts:
        part.scores(stream, q, k, v, dy, *optional, normalizer, sums, weights, slopes)
        part.values(stream, weights, dy, given.lengths, so_far, dv)
        part.keys(stream, slopes, q, given.lengths, so_far, dk)
        part.queries(stream, slopes, k, given.lengths, so_far, dq)
        if part.bias is not None:
            part.bias(stream, slopes, given.lengths, found)
    return dq, dk, dv, to_bias_of(found, call) if to_bias else found.flatten()


def to_bias_of(found: Tensor, call: plan.Call) -> Tensor:
    """The gradient of the bias, of all of its reach, from what `bias_gradient` finds."""
    assert call.reach is not None
    later, earlier = found.sum(0).flip(0).unbind(1)
    total = (F.pad(later, (0, 0, 1, 0)) + F.pad(earlier, (0, 0, 0, 1))).flatten()
    begin = call.blocks(later.shape[1]) * later.shape[1] - call.span + 1
    seen = total[begin : begin + 2 * call.span - 1]
    beyond = call.reach - call.span
    return F.pad(seen, (beyond, beyond + 2 * call.span - 1 - seen.shape[0]))
