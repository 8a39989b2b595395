"""Sampling: how the next token is chosen from logits, on the device of the logits and without synchronization."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from tcnca.data.rng import CounterRNG
from tcnca.errors import InputError

_BLOCK = 1024
"""Random numbers of a sequence that are copied to the device at once."""
_MIN_TEMPERATURE = 1e-30
"""Lower temperatures would be 0 in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The distribution of the next token, in the order in which its options are applied."""

    repetition_penalty: float = 1.0
    """Divides positive logits of the tokens that have occurred, and multiplies negative ones (Keskar et al., 2019)."""
    temperature: float = 1.0
    """Divides all logits; 0 takes the most likely token."""
    top_k: int | None = None
    """Number of most likely tokens to sample from; None for all."""
    top_p: float | None = None
    """Sample from the fewest most likely tokens whose probabilities sum to at least this."""
    min_p: float | None = None
    """Sample from the tokens with at least this share of the probability of the most likely one."""

    def __post_init__(self) -> None:
        if not 0.0 < self.repetition_penalty < math.inf:
            raise InputError(
                f"repetition_penalty: expected a number above 0, 1 for no penalty, got {self.repetition_penalty}"
            )
        if not 0.0 <= self.temperature < math.inf:
            raise InputError(f"temperature: expected a number of at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k: expected at least 1, or None, got {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p: expected a number above 0 and at most 1, or None, got {self.top_p}")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise InputError(f"min_p: expected a number from 0 to 1, or None, got {self.min_p}")


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that were `seen` (`[batch, vocab_size]`, true) less likely."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(logits: Tensor, options: SamplingOptions) -> Tensor:
    """Return logits `[batch, vocab_size]` of the distribution to sample from, `-inf` for tokens that it excludes."""
    # Relative to the largest, so that a small temperature does not overflow.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(options.temperature, _MIN_TEMPERATURE)
    if options.top_k is not None and options.top_k < logits.shape[-1]:
        least = logits.topk(options.top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if options.top_p is not None and options.top_p < 1.0:
        ordered, order = torch.sort(logits, stable=True, dim=-1, descending=True)
        shares = ordered.softmax(-1)
        # Tokens are kept until the more likely ones have enough probability, so that the first always is.
        removed = shares.cumsum(-1) - shares >= options.top_p
        logits = logits.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -math.inf)
    if options.min_p:
        logits = logits.masked_fill(logits < math.log(options.min_p), -math.inf)
    return logits


def choose(logits: Tensor, uniform: Tensor) -> Tensor:
    """Return the token `[batch]` at the quantile `uniform` (`[batch]`, in [0, 1)) of each distribution."""
    shares = logits.softmax(-1)
    # The last token before which less than `uniform` is. Rounding never leads to a token of probability 0.
    reached = (shares.cumsum(-1) - shares <= uniform.unsqueeze(-1)) & (shares > 0)
    return (reached * torch.arange(logits.shape[-1], device=logits.device)).amax(-1)


class Sampler:
    """Chooses the next token of each sequence of a batch.

    Without a seed, random numbers come from a generator of PyTorch. With one, those of a sequence depend on the seed,
    on its prompt's row and on its number among the samples of that prompt only: on no other sequence and no device.

    Args:
        options: the distribution.
        prompts: number of prompts.
        num_samples: number of sequences of each prompt; those of one prompt follow each other.
        vocab_size: number of tokens.
        device: of the logits.
        excluded: tokens that are never chosen, `[vocab_size]`, true; None for none.
        seed: of the random numbers.
        generator: of the random numbers, if there is no seed; None for PyTorch's.
    """

    def __init__(
        self,
        options: SamplingOptions,
        prompts: int,
        num_samples: int,
        vocab_size: int,
        device: torch.device,
        *,
        excluded: Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.options, self._num_samples, self._generator = options, num_samples, generator
        self._excluded = excluded
        self._seen: Tensor | None = None
        if options.repetition_penalty != 1.0:
            self._seen = torch.zeros(prompts * num_samples, vocab_size, dtype=torch.bool, device=device)
        keys = [] if seed is None else [(seed, row, sample) for row in range(prompts) for sample in range(num_samples)]
        self._streams = [CounterRNG("generate", *key) for key in keys]
        self._block: Tensor | None = None
        self._used = 0

    def observe(self, tokens: Tensor, valid: Tensor | None = None) -> None:
        """Count tokens of the prompts, `[prompts, time]`, as seen; only those that are `valid`, if given."""
        if self._seen is not None:
            occurs = self._seen.new_zeros(tokens.shape[0], self._seen.shape[1], dtype=torch.int32)
            ones = torch.ones_like(tokens, dtype=torch.int32) if valid is None else valid.int()
            occurs.scatter_reduce_(1, tokens * (ones > 0), ones, "amax")
            self._seen |= (occurs > 0).repeat_interleave(self._num_samples, 0)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the next token `[batch]` for logits `[batch, vocab_size]`, and count it as seen."""
        logits = logits.float()
        if self._seen is not None:
            logits = penalize(logits, self._seen, self.options.repetition_penalty)
        if self._excluded is not None:
            logits = logits.masked_fill(self._excluded, -math.inf)
        if self.options.temperature == 0.0:
            token = logits.argmax(-1)
        else:
            token = choose(filter_logits(logits, self.options), self._uniform(logits))
        if self._seen is not None:
            self._seen.scatter_(1, token.unsqueeze(1), True)
        return token

    def _uniform(self, logits: Tensor) -> Tensor:
        if not self._streams:
            return torch.rand(logits.shape[0], generator=self._generator, device=logits.device)
        place = self._used % _BLOCK
        if place == 0:
            # In 24 bits: float32 would round larger ones up to 1.
            numbers = np.stack([np.floor(stream.uniform(_BLOCK) * 2.0**24) * 2.0**-24 for stream in self._streams], 1)
            self._block = torch.from_numpy(numbers.astype(np.float32)).to(logits.device, non_blocking=True)
        self._used += 1
        assert self._block is not None
        return self._block[place]
