"""Convolutions with sums of decaying exponentials, by matrix products over blocks of time.

This is what `auto` runs without a kernel for the damped EMA, whose decays are real, and for state-space models
(`tcnca.ops.ssm`), whose decays are complex.

Inside a block, outputs are the product of the inputs and a triangular Toeplitz matrix of the kernel. Across blocks,
hidden states are carried: those at the ends of blocks follow the same recurrence, with the decay of a whole block, so
this function calls itself for them.

The form is strictly causal, unlike a Fourier transform, whose rounding spreads over the whole row:

- An output has the same bits whatever later inputs are, infinity and NaN included.
- From the first infinity or NaN on, all outputs of the channel are NaN; in both directions if there are two.
- The error of an output is a few roundings of `Σ |k[l]| · |x[t - l]|`, with `|k[l]|` summed over hidden states: in
  float32 less than 1e-5 of it, beyond the rounding of the coefficients. A large input has no effect on the error where
  it has decayed or has left a truncated kernel. Both directions of two have this bound.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnca.ops.ema.naive import EMACoefficients

Blocks = tuple[int | None, ...]

# Fastest on a CPU: a longer block has more products, a shorter one more states to carry.
BLOCK = 64
SHORT_BLOCK = 32
SHORT_TIME = 512
CARRY_BLOCK = 16
# Complex powers are products of every eighth one and the first eight: sines and cosines take longer.
FINE = 8


def ema_chunked(x: Tensor, coefficients: EMACoefficients, truncation: int | None = None) -> Tensor:
    """Compute the EMA of `x` (`[batch, time, channels]`) block by block."""
    precise = torch.promote_types(x.dtype, coefficients.decay.dtype)
    drive, decay, readout = (part.to(precise) for part in coefficients)
    # Powers by the logarithm, as in `decay_powers`. Sigmoids that round to 1 give a decay of 0.
    log_decay = torch.log(decay.clamp(min=torch.finfo(precise).tiny))
    return convolve_exponentials(x.to(precise), log_decay, drive * readout, truncation).to(x.dtype)


def convolve_exponentials(x: Tensor, log_decay: Tensor, weight: Tensor, truncation: int | None = None) -> Tensor:
    """Convolve each channel with the kernel `Σ_n weight · exp(log_decay · lag)`, or its real part if `x` is real.

    Args:
        x: `[batch, time, channels]`, real or complex, in float32 or better.
        log_decay, weight: `[directions, channels, d_state]`, real or complex; complex if `x` is. One direction is
            causal; with two, the second looks into the future and both see the present.
        truncation: number of lags of the kernel, or None for all.
    """
    if _is_symbolic(x.shape[1]):
        # One graph for all lengths has a fixed number of levels; a million tokens keep the last one short.
        blocks: Blocks = (BLOCK, CARRY_BLOCK, CARRY_BLOCK, None)
    else:
        blocks = (BLOCK if x.shape[1] > SHORT_TIME else SHORT_BLOCK,)
        blocks = (CARRY_BLOCK,) if x.is_complex() else blocks
        truncation = None if truncation is None or truncation >= x.shape[1] else truncation
    if log_decay.is_complex():
        log_decay = log_decay.to(torch.complex128)  # phases of thousands of tokens have no other exact form
    rows = x.permute(2, 0, 1).contiguous()
    return _convolve(rows, log_decay, weight, truncation, blocks).permute(1, 2, 0)


def _is_symbolic(size: int) -> bool:
    """Return whether a graph for all sizes is traced, in which nothing may depend on this one."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return not has_static_value(size)


def _split(time: int, blocks: Blocks) -> tuple[int, int, Blocks]:
    """Return length and number of this level's blocks, and the lengths of blocks of the levels below."""
    block, *rest = blocks
    if block is None:
        return time, 1, ()
    if rest:
        # Two blocks or more, and some padding in any case: a graph would treat one block or no padding specially.
        return block, time // block + 2, tuple(rest)
    return (time, 1, ()) if time <= block else (block, -(-time // block), (CARRY_BLOCK,))


def _convolve(rows: Tensor, log_decay: Tensor, weight: Tensor, truncation: int | None, blocks: Blocks) -> Tensor:
    """Implement `convolve_exponentials`.

    Args:
        rows: `[channels, batch, time]`.
        log_decay, weight: `[directions, channels, d_state]`.
        truncation: number of lags of the kernel, or None for all.
        blocks: length of the blocks of this level and those below, see `_split`.
    """
    channels, batch, time = rows.shape
    # 0, or NaN where an infinity or NaN is seen: the zeros of a triangular matrix would not stop one.
    poison = rows.detach() * 0.0
    poison = poison.cumsum(-1) if log_decay.shape[0] == 1 else poison.sum(-1, keepdim=True)
    rows = torch.where(poison == 0.0, rows, 0.0)
    block, count, rest = _split(time, blocks)
    if count * block != time:
        rows = F.pad(rows, (0, count * block - time))
    rows = rows.view(channels, batch, count, block)

    kernels = list(zip(log_decay, weight, strict=True))
    toeplitz = functools.partial(_toeplitz, block=block, truncation=truncation, real=not rows.is_complex())
    matrices = [toeplitz(*kernel, 0) for kernel in kernels]
    y = torch.bmm(rows.flatten(1, 2), matrices[0] if len(kernels) == 1 else matrices[0] + matrices[1].mT)
    whole = None if truncation is None else truncation // block - 1
    for kernel, future in zip(kernels, (False, True), strict=False):
        if rest and (whole is None or whole > 0):
            y = torch.baddbmm(y, *_other_blocks(rows, *kernel, whole, rest, future))
        for distance in _last_blocks(truncation, block) if rest else ():
            matrix = toeplitz(*kernel, distance)
            y = torch.baddbmm(y, _shift(rows, distance, future).flatten(1, 2), matrix.mT if future else matrix)
    return y.view(channels, batch, count * block)[..., :time] + poison


def _last_blocks(truncation: int | None, block: int) -> list[int]:
    """Return how many blocks away a truncated kernel ends: all lags to blocks in between are part of it."""
    if truncation is None:
        return []
    quotient = truncation // block
    # The least lag between two blocks is from the last token of one to the first of the other.
    return [count for count in (quotient, quotient + 1) if count > 0 and (count - 1) * block + 1 < truncation]


def _shift(rows: Tensor, distance: int, future: bool) -> Tensor:
    """Put each block where the block `distance` blocks earlier was, or later for the past; zeros fill the rest."""
    count = rows.shape[2]
    if torch.compiler.is_compiling():
        # A graph for all lengths may have fewer blocks, which cannot be cropped before they are padded.
        padded = F.pad(rows, (0, 0, 0, distance) if future else (0, 0, distance, 0))
        return padded[:, :, distance:] if future else padded[:, :, :count]
    return F.pad(rows, (0, 0, -distance, distance) if future else (0, 0, distance, -distance))


def _other_blocks(
    rows: Tensor, log_decay: Tensor, weight: Tensor, truncation: int | None, blocks: Blocks, future: bool
) -> tuple[Tensor, Tensor]:
    """Return the hidden states that other blocks leave to each block, and what they are multiplied by to give outputs.

    As `[channels, batch · blocks, d_state]` and `[channels, d_state, block]`; `truncation` is in blocks.
    """
    channels, batch, count, block = rows.shape
    powers = _powers(log_decay, 0, block + 1).to(weight.dtype)
    entering, leaving = powers[..., :-1], powers[..., 1:] * weight.unsqueeze(-1)
    # Of real inputs and outputs, the products are real: two for each complex state.
    paired = powers.is_complex() and not rows.is_complex()
    if paired:
        entering, leaving = _parts(entering).flatten(1, 2), _parts(leaving.conj_physical()).flatten(1, 2)
    entering, leaving = (entering, leaving.flip(-1)) if future else (entering.flip(-1), leaving)
    states = torch.bmm(entering, rows.flatten(1, 2).mT)
    if paired:
        states = torch.view_as_complex(states.view(-1, 2, batch * count).mT.contiguous())
    states = states.view(log_decay.numel(), batch, count)
    states = states.flip(-1) if future else states
    states = F.pad(states, (1, 0))[..., :-1]
    log_decay = log_decay.reshape(1, -1, 1)
    ones = torch.ones_like(log_decay, dtype=weight.dtype)
    states = _convolve(states, log_decay * block, ones, truncation, blocks)
    states = states.flip(-1) if future else states
    states = _parts(states.reshape(channels, -1, batch * count)) if paired else states
    return states.reshape(channels, -1, batch * count).mT, leaving


def _parts(values: Tensor) -> Tensor:
    """Return the real and imaginary parts of `[channels, d_state, any]` as `[channels, d_state, 2, any]`."""
    return torch.view_as_real(values).movedim(-1, 2)


def _toeplitz(
    log_decay: Tensor, weight: Tensor, distance: int, block: int, truncation: int | None, real: bool
) -> Tensor:
    """Return the kernel from each token of a block to each token of the block `distance` blocks later.

    As `[channels, from, to]`, of parameters `[channels, d_state]`; zero where the lag is negative or truncated. With
    `real`, the real part of it.
    """
    first, end = (distance - 1) * block + 1, (distance + 1) * block
    start, stop = max(first, 0), end if truncation is None else min(end, truncation)
    kernel = (_powers(log_decay, start, stop - start).to(weight.dtype) * weight.unsqueeze(-1)).sum(1)
    kernel = F.pad(kernel.real if real else kernel, (start - first, end - stop))
    if _is_symbolic(block):
        # A window of `unfold` has a fixed size.
        place = torch.arange(block, device=kernel.device)
        return kernel[:, place + place.flip(0).unsqueeze(1)]
    return kernel.unfold(-1, block, 1).flip(1)


def _powers(log_decay: Tensor, start: int, length: int) -> Tensor:
    """Return the decay to the powers from `start` on, as `[channels, d_state, length]`."""
    if log_decay.is_complex():
        coarse, fine = (torch.arange(count, device=log_decay.device) for count in (length // FINE + 1, FINE))
        coarse, fine = (torch.exp(log_decay.unsqueeze(-1) * part) for part in (start + FINE * coarse, fine))
        return (coarse.unsqueeze(-1) * fine.unsqueeze(-2)).flatten(-2)[..., :length]
    exponents = torch.arange(start, start + length, device=log_decay.device, dtype=log_decay.dtype)
    return torch.exp(log_decay.unsqueeze(-1) * exponents)
