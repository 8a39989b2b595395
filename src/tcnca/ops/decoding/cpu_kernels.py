"""Numba kernels of one decoding step on a CPU: the next token of each sequence of a batch, in float32.

Arrays are contiguous, `[batch, channels]` unless said otherwise, and overwritten in place. Every row of the batch is
at its own `position`, the number of tokens before this one. A step of few sequences is limited by the memory that it
reads, so `linear` and `attend` also exist for several threads, each of which reads its own part.
"""

# Numba's language is not typed.
# mypy: ignore-errors

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

ACTIVATIONS = {"none": 0, "silu": 1, "relu": 2, "gelu": 3, "gelu_tanh": 4}
NORMS = {"layer": 0, "rms": 1, "batch": 2}

_SERIAL = {"cache": True, "fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy"}
# Loops over `prange` run in parallel, nothing else, which would take longer to compile. Parallel kernels are functions
# of their own, since Numba's cache does not tell apart two compilations of one function.
_PARALLEL = _SERIAL | {
    "parallel": {
        "prange": True,
        "comprehension": False,
        "reduction": False,
        "inplace_binop": False,
        "setitem": False,
        "numpy": False,
        "stencil": False,
        "fusion": False,
    }
}

ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
LOG2_E = np.float32(math.log2(math.e))
# The logarithm of 2 in two parts, of which the first has few bits, so that products with it are exact.
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(math.log(2.0) - 0.693359375)
# Coefficients of the exponential series, whose error is below the precision of float32 for |r| ≤ ln(2) / 2.
E2, E3, E4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
E5, E6, E7 = np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)
SMALLEST, LARGEST = np.float32(-87.0), np.float32(88.0)
SQRT_HALF, GELU_CUBE = np.float32(math.sqrt(0.5)), np.float32(0.044715)
GELU_SCALE = np.float32(2.0 * math.sqrt(2.0 / math.pi))


@njit(inline="always")
def exp(x):
    """Return the exponential to three units in the last place, without a branch: loops over it are vectorized."""
    x = min(max(x, SMALLEST), LARGEST)
    n = np.floor(x * LOG2_E + HALF)
    r = x - n * LN2_HIGH - n * LN2_LOW
    p = (((((E7 * r + E6) * r + E5) * r + E4) * r + E3) * r + E2) * r * r + r + ONE
    return p * np.int32((np.int32(n) + 127) << 23).view(np.float32)


@njit(inline="always")
def sigmoid(x):
    """Return the logistic function."""
    return ONE / (ONE + exp(-x))


@njit(**_SERIAL)
def activate(x, kind):
    """Apply the activation function of `ACTIVATIONS` to `x` (`[channels]`)."""
    if kind == 1:
        for i in range(len(x)):
            x[i] *= sigmoid(x[i])
    elif kind == 2:
        for i in range(len(x)):
            x[i] = max(x[i], ZERO)
    elif kind == 3:
        for i in range(len(x)):
            x[i] *= HALF * (ONE + np.float32(math.erf(x[i] * SQRT_HALF)))
    elif kind == 4:
        # tanh(y) = 2 σ(2y) - 1
        for i in range(len(x)):
            x[i] *= sigmoid(GELU_SCALE * (x[i] + GELU_CUBE * x[i] * x[i] * x[i]))


@njit(**_SERIAL)
def normalize(x, kind, weight, bias, eps, y):
    """Write the norm of `NORMS` of `x` to `y`, which can be `x`.

    The statistics of a batch norm are part of `weight` and `bias`.
    """
    batch, width = x.shape
    for b in range(batch):
        mean, factor = ZERO, ONE
        if kind == 0:
            total = ZERO
            for i in range(width):
                total += x[b, i]
            mean = total / np.float32(width)
        if kind != 2:
            squares = ZERO
            for i in range(width):
                squares += (x[b, i] - mean) * (x[b, i] - mean)
            factor = ONE / np.sqrt(squares / np.float32(width) + eps)
        for i in range(width):
            y[b, i] = (x[b, i] - mean) * factor * weight[i] + bias[i]


@njit(**_SERIAL)
def tcn(x, ring, position, dilations, weight, bias, gain, omega, residual, kind, output_kind, hidden, y):
    """Take a step of a TCN.

    Args:
        x: the input.
        ring: `[batch, cells, channels]`, the ring buffers of the inputs of all blocks, one after the other.
        position: `[batch]`.
        dilations: `[blocks]`.
        weight: `[blocks, kernel_size, channels]`, from the newest input to the oldest.
        bias: `[blocks, channels]`.
        gain: `[blocks, channels]`, of the activation that is added to the output of a block; no blocks for none.
        omega: `[channels]`, of the input that is added to the output.
        residual: whether a block adds the activation of its convolution to its input.
        kind: the activation function of the blocks.
        output_kind: that of the output.
        hidden: `[channels]`, scratch memory.
        y: the output.
    """
    batch, width = x.shape
    blocks, taps, _ = weight.shape
    for b in range(batch):
        for i in range(width):
            y[b, i] = x[b, i]
        first = 0
        for block in range(blocks):
            size = (taps - 1) * dilations[block]
            for i in range(width):
                hidden[i] = bias[block, i] + weight[block, 0, i] * y[b, i]
            for tap in range(1, taps):
                cell = first + (position[b] - tap * dilations[block]) % size
                for i in range(width):
                    hidden[i] += weight[block, tap, i] * ring[b, cell, i]
            if size:
                cell = first + position[b] % size
                for i in range(width):
                    ring[b, cell, i] = y[b, i]
            first += size
            if residual:
                activate(hidden, kind)
                for i in range(width):
                    y[b, i] += hidden[i]
                continue
            for i in range(width):
                y[b, i] = hidden[i]
            if len(gain):
                activate(hidden, kind)
                for i in range(width):
                    y[b, i] += gain[block, i] * hidden[i]
        for i in range(width):
            y[b, i] += omega[i] * x[b, i]
        activate(y[b], output_kind)


@njit(**_SERIAL)
def ema(x, hidden, drive, decay, readout, omega, output_kind, y):
    """Take a step of an EMA with the states `hidden`, `[batch, channels, states]`."""
    batch, width, states = hidden.shape
    for b in range(batch):
        for i in range(width):
            total = omega[i] * x[b, i]
            for n in range(states):
                hidden[b, i, n] = decay[i, n] * hidden[b, i, n] + drive[i, n] * x[b, i]
                total += readout[i, n] * hidden[b, i, n]
            y[b, i] = total
        activate(y[b], output_kind)


@njit(**_SERIAL)
def _rows(x, weight, scale, bias, y, start, accumulate, kind, first_active, last_active, first, last):
    """Compute the outputs from `first` to `last` of `linear`."""
    batch, width = x.shape
    for o in range(first, last):
        b = 0
        while b + 4 <= batch:
            s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
            for i in range(width):
                w = np.float32(weight[o, i])
                s0 += w * x[b, i]
                s1 += w * x[b + 1, i]
                s2 += w * x[b + 2, i]
                s3 += w * x[b + 3, i]
            for k, s in enumerate((s0, s1, s2, s3)):
                before = y[b + k, start + o] if accumulate else ZERO
                y[b + k, start + o] = before + s * scale[o] + bias[o]
            b += 4
        while b < batch:
            s = ZERO
            for i in range(width):
                s += np.float32(weight[o, i]) * x[b, i]
            before = y[b, start + o] if accumulate else ZERO
            y[b, start + o] = before + s * scale[o] + bias[o]
            b += 1
    for b in range(batch):
        activate(y[b, start + max(first, first_active) : start + max(first, min(last, last_active))], kind)


@njit(**_SERIAL)
def linear(x, weight, scale, bias, y, start, accumulate, kind, first_active, last_active, threads):
    """Write the product with a matrix, and the activation of some outputs.

    Args:
        x: the input.
        weight: `[outputs, inputs]`, float32 or int8.
        scale: `[outputs]`, of the rows of the matrix.
        bias: `[outputs]`.
        y: where the outputs are written to, from column `start` on.
        start: see `y`.
        accumulate: whether to add to what is there.
        kind: the activation function of the outputs from `first_active` to `last_active`.
        first_active: see `kind`.
        last_active: see `kind`.
        threads: number of threads of `parallel_linear`.
    """
    _rows(x, weight, scale, bias, y, start, accumulate, kind, first_active, last_active, 0, len(weight))


@njit(**_PARALLEL)
def parallel_linear(x, weight, scale, bias, y, start, accumulate, kind, first_active, last_active, threads):
    """Compute `linear` with several threads."""
    outputs = len(weight)
    for part in prange(threads):
        first, last = part * outputs // threads, (part + 1) * outputs // threads
        _rows(x, weight, scale, bias, y, start, accumulate, kind, first_active, last_active, first, last)


@njit(**_SERIAL)
def _store(position, query, key, source, start, rotation, keys, values):
    """Rotate queries and keys, and write keys and values to the chunk."""
    for b in range(len(query)):
        place = position[b] % keys.shape[1]
        half = rotation.shape[2]
        for i in range(half):
            sine, cosine = rotation[0, place, i], rotation[1, place, i]
            q0, q1, k0, k1 = query[b, i], query[b, half + i], key[b, i], key[b, half + i]
            query[b, i], query[b, half + i] = q0 * cosine - q1 * sine, q1 * cosine + q0 * sine
            key[b, i], key[b, half + i] = k0 * cosine - k1 * sine, k1 * cosine + k0 * sine
        for i in range(keys.shape[2]):
            keys[b, place, i] = key[b, i]
        for i in range(values.shape[2]):
            values[b, place, i] = source[b, start + i]


@njit(**_SERIAL)
def _attend_part(query, keys, values, bias, position, part, scores, sums, partial):
    """Attend to one part of a chunk: write the sum of its values, and the maximum and sum of its weights."""
    parts, y = len(partial), partial[part]
    place = position % len(keys)
    first, last = part * (place + 1) // parts, (part + 1) * (place + 1) // parts
    largest = np.float32(-np.inf)
    for slot in range(first, last):
        score = bias[len(keys) - 1 - place + slot]
        for i in range(len(query)):
            score += query[i] * keys[slot, i]
        scores[slot] = score
        largest = max(largest, score)
    total = ZERO
    for slot in range(first, last):
        scores[slot] = exp(scores[slot] - largest)
        total += scores[slot]
    for i in range(len(y)):
        y[i] = ZERO
    slot = first
    while slot + 4 <= last:
        w0, w1, w2, w3 = scores[slot], scores[slot + 1], scores[slot + 2], scores[slot + 3]
        for i in range(len(y)):
            y[i] += (
                w0 * values[slot, i] + w1 * values[slot + 1, i] + w2 * values[slot + 2, i] + w3 * values[slot + 3, i]
            )
        slot += 4
    while slot < last:
        for i in range(len(y)):
            y[i] += scores[slot] * values[slot, i]
        slot += 1
    sums[part, 0], sums[part, 1] = largest, total


@njit(**_SERIAL)
def _merge(gates, start, sums, partial, y):
    """Write the attention of the whole chunk, times a gate, from those of its parts."""
    batch, parts, width = partial.shape
    for b in range(batch):
        largest = sums[b, 0, 0]
        for part in range(1, parts):
            largest = max(largest, sums[b, part, 0])
        total = ZERO
        for part in range(parts):
            sums[b, part, 0] = exp(sums[b, part, 0] - largest)
            total += sums[b, part, 0] * sums[b, part, 1]
        for part in range(parts):
            factor = sums[b, part, 0] / total
            for i in range(width):
                y[b, i] = factor * partial[b, part, i] + (y[b, i] if part else ZERO)
        for i in range(width):
            y[b, i] *= gates[b, start + i]


@njit(**_SERIAL)
def attend(
    position, query, key, source, first_value, gates, first_gate, rotation, bias, keys, values, scores, sums, partial, y
):
    """Attend to the chunk so far, by the softmax.

    Args:
        position: `[batch]`.
        query: the queries, scaled. They are rotated in place.
        key: the keys, likewise.
        source: the values of this token, from column `first_value` on.
        first_value: see `source`.
        gates: the factors of the output, from column `first_gate` on.
        first_gate: see `gates`.
        rotation: `[2, chunk_size, pairs]`, sines and cosines of the rotation of each slot.
        bias: `[chunk_size]`, of the most distant key to the query's own.
        keys: `[batch, chunk_size, d_key]`.
        values: `[batch, chunk_size, d_value]`.
        scores: `[batch, chunk_size]`, scratch memory, as what follows.
        sums: `[batch, parts, 2]`.
        partial: `[batch, parts, d_value]`. As many parts of a chunk are read in parallel.
        y: `[batch, d_value]`.
    """
    _store(position, query, key, source, first_value, rotation, keys, values)
    batch, parts, _ = partial.shape
    for task in range(batch * parts):
        b, part = task // parts, task % parts
        _attend_part(query[b], keys[b], values[b], bias, position[b], part, scores[b], sums[b], partial[b])
    _merge(gates, first_gate, sums, partial, y)


@njit(**_PARALLEL)
def parallel_attend(
    position, query, key, source, first_value, gates, first_gate, rotation, bias, keys, values, scores, sums, partial, y
):
    """Compute `attend` with several threads."""
    _store(position, query, key, source, first_value, rotation, keys, values)
    batch, parts, _ = partial.shape
    for task in prange(batch * parts):
        b, part = task // parts, task % parts
        _attend_part(query[b], keys[b], values[b], bias, position[b], part, scores[b], sums[b], partial[b])
    _merge(gates, first_gate, sums, partial, y)


@njit(**_SERIAL)
def transform(source, first_query, first_key, gamma, beta, query, key):
    """Write queries and keys: diagonal transforms of columns of `source`, from `first_query` and `first_key` on."""
    batch, width = query.shape
    for b in range(batch):
        for i in range(width):
            query[b, i] = source[b, first_query + i] * gamma[0, i] + beta[0, i]
            key[b, i] = source[b, first_key + i] * gamma[1, i] + beta[1, i]


@njit(**_SERIAL)
def exchange(x, y):
    """Exchange the values of two arrays."""
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[b, i], y[b, i] = y[b, i], x[b, i]


@njit(**_SERIAL)
def update(x, gates, first_gate, first_candidate, kind):
    """Move `x` towards the activation of the candidate by the sigmoid of the gate, both columns of `gates`."""
    batch, width = x.shape
    for b in range(batch):
        activate(gates[b, first_candidate : first_candidate + width], kind)
        for i in range(width):
            x[b, i] += sigmoid(gates[b, first_gate + i]) * (gates[b, first_candidate + i] - x[b, i])
