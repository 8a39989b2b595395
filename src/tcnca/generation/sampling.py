"""Sampling: how the next token is chosen from logits, on the device of the logits and without synchronization."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tcnca.data.rng import CounterRNG
from tcnca.errors import InputError
from tcnca.models import SequenceModel
from tcnca.ops.dispatch import INTERPRETED, KERNEL_DTYPES, kernels_enabled, should_use
from tcnca.ops.driver import on_device

_BLOCK = 1024
"""Random numbers of a sequence that are copied to the device at once."""
MAX_SORTED = 1024
"""Largest vocabulary that the kernel sorts."""
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
        if self.top_k is not None:
            check_whole("top_k", self.top_k, 1)
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InputError(f"top_p: expected a number above 0 and at most 1, or None, got {self.top_p}")
        if self.min_p is not None and not 0.0 <= self.min_p <= 1.0:
            raise InputError(f"min_p: expected a number from 0 to 1, or None, got {self.min_p}")


def check_whole(name: str, value: object, least: int | None = None) -> None:
    """Raise an InputError unless a value is a whole number, of at least `least`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or (least is not None and value < least):
        expected = "a whole number" if least is None else f"a whole number of at least {least}"
        raise InputError(f"{name}: expected {expected}, got {value!r}")


def excluded_tokens(model: SequenceModel) -> Tensor | None:
    """Return which tokens are never generated, `[vocab_size]`: the padding, and those that mean no text."""
    preprocessing, vocab_size = model.preprocessing, model.embedding.weight.shape[0]
    known = preprocessing.byte_map or preprocessing.symbols
    first, padding = len(known) if known else vocab_size, model.embedding.pad_token_id
    if first == vocab_size and padding is None:
        return None
    tokens = torch.arange(vocab_size, device=model.embedding.weight.device)
    return (tokens >= first) | (tokens == (-1 if padding is None else padding))


def penalize(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Make tokens that were `seen` (`[batch, vocab_size]`, true) less likely; `penalty` is `[batch]`."""
    penalty = penalty.unsqueeze(1)
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return logits `[batch, vocab_size]` of the distribution to sample from, `-inf` for tokens that it excludes.

    The options are `[batch]`; `top_p` is infinite for no limit. Tokens as likely as the least likely one that is kept
    are kept, too.
    """
    # Relative to the largest, so that a small temperature does not overflow.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=_MIN_TEMPERATURE).unsqueeze(1)
    ordered = logits.sort(-1, descending=True).values
    least = ordered.gather(1, top_k.long().clamp(1, logits.shape[1]).unsqueeze(1) - 1)
    ordered = ordered.masked_fill(ordered < least, -math.inf)
    shares = ordered.softmax(-1)
    # Tokens are kept until the more likely ones have enough probability, so that the first always is.
    kept = shares.cumsum(-1) - shares < top_p.unsqueeze(1)
    least = torch.maximum(least, ordered.masked_fill(~kept, 0.0).amin(-1, keepdim=True))
    return logits.masked_fill((logits < least) | (logits.exp() < min_p.unsqueeze(1)), -math.inf)


def choose(logits: Tensor, uniform: Tensor) -> Tensor:
    """Return the token `[batch]` at the quantile `uniform` (`[batch]`, in [0, 1)) of each distribution."""
    shares = logits.softmax(-1)
    # The last token before which less than `uniform` is. Rounding never leads to a token of probability 0.
    reached = (shares.cumsum(-1) - shares <= uniform.unsqueeze(-1)) & (shares > 0)
    return (reached * torch.arange(logits.shape[-1], device=logits.device)).amax(-1)


class Sampler:
    """Chooses the next token of each sequence of a batch, each with its own options and random numbers.

    Args:
        batch: number of sequences.
        vocab_size: number of tokens.
        device: of the logits.
        excluded: tokens that are never chosen, `[vocab_size]`, true; None for none.
        generator: of the random numbers of sequences without a seed; None for PyTorch's.
    """

    def __init__(
        self,
        batch: int,
        vocab_size: int,
        device: torch.device,
        *,
        excluded: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.device, self.vocab_size, self._generator = device, vocab_size, generator
        self._on_gpu = device.type == "cuda"
        self._excludes = excluded is not None
        self._excluded = torch.zeros(vocab_size, dtype=torch.bool, device=device) if excluded is None else excluded
        self._options = [SamplingOptions()] * batch
        self._streams: list[CounterRNG | None] = [None] * batch
        self._values = torch.empty(batch, 5, device=device)
        self._seen = torch.zeros(batch, vocab_size, dtype=torch.bool, device=device)
        self._uniforms = torch.empty(batch, _BLOCK, device=device)
        self._used = torch.zeros(batch, 1, dtype=torch.long, device=device)
        # Tokens so far, those after which the random numbers of each row end, and the first of these.
        self._step, self._ends, self._next = 0, [0] * batch, 0
        self.token = torch.zeros(batch, dtype=torch.long, device=device)
        self._kernel: tuple[Any, list[Tensor]] | None = None
        enabled = INTERPRETED or (kernels_enabled() and should_use("triton", device, "sampling"))
        self.fused = enabled and vocab_size <= MAX_SORTED
        self.assign(range(batch), SamplingOptions())

    def assign(self, rows: Sequence[int], options: SamplingOptions, seeds: Sequence[tuple[int, ...]] = ()) -> None:
        """Begin new sequences.

        Args:
            rows: the rows of the batch.
            options: the distribution.
            seeds: of the random numbers of each row, which then depend on no other row and no device. Without seeds,
                they come from the generator.
        """
        for number, row in enumerate(rows):
            self._options[row], self._ends[row], self._next = options, self._step, self._step
            self._streams[row] = CounterRNG("generate", *seeds[number]) if seeds else None
        index = torch.tensor(rows, dtype=torch.long).to(self.device, non_blocking=self._on_gpu)
        values = torch.tensor(
            [
                options.repetition_penalty,
                options.temperature,
                min(options.top_k or self.vocab_size, self.vocab_size),
                math.inf if options.top_p in (None, 1.0) else options.top_p,
                options.min_p or 0.0,
            ]
        ).to(self.device, non_blocking=self._on_gpu)
        self._values.index_copy_(0, index, values.expand(len(rows), -1))
        self._seen.index_fill_(0, index, False)
        self._greedy = all(each.temperature == 0.0 for each in self._options)
        # Whether a row samples from anything but the softmax of its logits.
        plain = SamplingOptions()
        self._filters = any(dataclasses.replace(each, repetition_penalty=1.0) != plain for each in self._options)
        self._penalizes = any(each.repetition_penalty != 1.0 for each in self._options)

    def observe(self, tokens: Tensor, valid: Tensor | None = None, rows: slice = slice(None)) -> None:
        """Count tokens of prompts as seen.

        Args:
            tokens: `[prompts, time]`. Each prompt belongs to as many rows as each other, which follow each other.
            valid: which tokens count, `[prompts, time]`; None for all.
            rows: the rows of the batch; by default all.
        """
        if self._penalizes:
            occurs = torch.zeros(tokens.shape[0], self.vocab_size, dtype=torch.int32, device=self.device)
            ones = torch.ones_like(tokens, dtype=torch.int32) if valid is None else valid.int()
            occurs.scatter_reduce_(1, tokens * (ones > 0), ones, "amax")
            seen = self._seen[rows]
            seen |= (occurs > 0).repeat_interleave(len(seen) // len(tokens), 0)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the next token `[batch]` for logits `[batch, vocab_size]`, and count it as seen."""
        self.prepare()
        self.launch(logits)
        return self.token.clone()

    def prepare(self) -> None:
        """Provide random numbers for one token of each row; to be called before each `launch`."""
        if self._step >= self._next and not self._greedy:
            sampled = [row for row, options in enumerate(self._options) if options.temperature > 0.0]
            empty = [row for row in sampled if self._ends[row] <= self._step]
            seeded = {row: stream for row in empty if (stream := self._streams[row]) is not None}
            if seeded:
                # In 24 bits: float32 would round larger ones up to 1.
                drawn = [np.floor(stream.uniform(_BLOCK) * 2.0**24) * 2.0**-24 for stream in seeded.values()]
                self._refill(list(seeded), torch.from_numpy(np.stack(drawn).astype(np.float32)))
            others = [row for row in empty if self._streams[row] is None]
            if others:
                self._refill(others, torch.rand(len(others), _BLOCK, generator=self._generator, device=self.device))
            self._next = min(self._ends[row] for row in sampled)
        self._step += 1

    def _refill(self, rows: list[int], numbers: Tensor) -> None:
        index = torch.tensor(rows).to(self.device, non_blocking=self._on_gpu)
        self._uniforms.index_copy_(0, index, numbers.to(self.device, non_blocking=self._on_gpu))
        self._used.index_fill_(0, index, 0)
        for row in rows:
            self._ends[row] = self._step + _BLOCK

    def launch(self, logits: Tensor) -> None:
        """Write the next tokens to `token`. A CUDA graph can capture it if `fused`."""
        if self.fused and logits.dtype in KERNEL_DTYPES:
            logits = logits.contiguous()
            if self._kernel is None or self._kernel[1][0].data_ptr() != logits.data_ptr():
                self._kernel = self._make_kernel(logits)
            launch, tensors = self._kernel
            launch(*tensors)
            return
        penalty, temperature, top_k, top_p, min_p = self._values.unbind(1)
        logits = logits.float()
        if self._penalizes:
            logits = penalize(logits, self._seen, penalty)
        if self._excludes:
            logits = logits.masked_fill(self._excluded, -math.inf)
        if self._greedy:
            token = logits.argmax(-1)
        else:
            filtered = filter_logits(logits, temperature, top_k, top_p, min_p) if self._filters else logits
            token = choose(filtered, self._uniforms.gather(1, self._used).squeeze(1))
            if self._filters:
                token = torch.where(temperature == 0.0, logits.argmax(-1), token)
            self._used += (temperature != 0.0).unsqueeze(1)
        if self._penalizes:
            self._seen.scatter_(1, token.unsqueeze(1), True)
        self.token.copy_(token)

    def _make_kernel(self, logits: Tensor) -> tuple[Any, list[Tensor]]:
        from tcnca.ops.decoding import kernels
        from tcnca.ops.launcher import Launch

        bits = self._excluded.view(torch.int8), self._seen.view(torch.int8)
        tensors = [logits, self._values, *bits, self._uniforms, self._used, self.token]
        launch = Launch(
            kernels.sample,
            (len(logits), 1),
            tuple(tensor.dtype for tensor in tensors),
            (_MIN_TEMPERATURE,),
            {
                "SIZE": self.vocab_size,
                "COLUMNS": 1 << max(self.vocab_size - 1, 0).bit_length(),
                "BLOCK": _BLOCK,
                "PDL": False,
            },
            device=None if self.device.type == "cpu" else self.device.index or 0,
            num_warps=4,
        )
        return on_device(launch), tensors
