"""Continuous batching: sequences join and leave a running batch at every token."""

from __future__ import annotations

import dataclasses
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tcnca.config import closest
from tcnca.errors import InputError
from tcnca.generation.api import check_arguments
from tcnca.generation.dispatch import check_rounding, has_fixed_state, make_step
from tcnca.generation.prefix import Prefix, PrefixCache
from tcnca.generation.sampling import Sampler, SamplingOptions, check_whole, excluded_tokens
from tcnca.generation.step import CacheDtype, Quantization, Step, generating
from tcnca.models import ModelState, SequenceModel
from tcnca.models.preprocessing import to_bytes

FinishReason = Literal["length", "stop", "cancelled", "error"]
Tokens = Tensor | Sequence[int] | str | bytes

SHRINK_STEPS = 16
"""Steps after which a batch with too many free rows shrinks. Building a step costs about as much as this number."""
_GREEDY = SamplingOptions(temperature=0.0)


class Request:
    """A sequence that a `Batcher` generates. Iterating over it yields its tokens, and runs the batch as needed."""

    def __init__(
        self,
        batcher: Batcher,
        prompt: Tensor,
        max_new_tokens: int,
        options: SamplingOptions,
        seed: int | None,
        stop: list[list[int]],
    ) -> None:
        self.prompt, self.max_new_tokens = prompt, max_new_tokens
        self.options, self.seed, self.stop = options, seed, stop
        self.tokens: list[int] = []
        """The tokens so far, without the prompt. A stop sequence is the end of them."""
        self.finish_reason: FinishReason | None = None
        """Why there are no more tokens; None while there may be."""
        self.error: BaseException | None = None
        """What went wrong, if `finish_reason` is `error`."""
        self._batcher = batcher

    def __repr__(self) -> str:
        return f"Request(prompt={len(self.prompt)}, tokens={len(self.tokens)}, finish_reason={self.finish_reason!r})"

    @property
    def finished(self) -> bool:
        """Whether there are no more tokens."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The tokens so far as text, of a model that has a byte map or symbols."""
        return self._batcher.model.decode(torch.tensor(self.tokens, dtype=torch.long)).decode(errors="replace")

    def __iter__(self) -> Iterator[int]:
        sent = 0
        while True:
            while sent < len(self.tokens):
                yield self.tokens[sent]
                sent += 1
            if self.finished:
                break
            self._batcher.step()
        if self.error is not None:
            raise self.error

    def result(self) -> list[int]:
        """Run the batch until this sequence is complete, and return its tokens."""
        return list(self)

    def cancel(self) -> None:
        """End this sequence, which leaves the batch. The tokens so far remain."""
        if not self.finished:
            self._batcher._finish(self, "cancelled")
            self._batcher._release()

    def _ending(self) -> FinishReason | None:
        """Return why the last token is the end, or None if it is not."""
        if any(self.tokens[-len(stop) :] == stop for stop in self.stop):
            return "stop"
        return "length" if len(self.tokens) >= self.max_new_tokens else None


class Batcher:
    """Generates many sequences in one batch, which they join and leave at any token.

    Each sequence has its own prompt, options, seed and end, and its tokens are those that it would get alone, up to
    rounding. Prompts are read in pieces between the steps, so that a long one does not hold up the others. One thread
    at a time may use it. The weights of the model must not change while sequences are unfinished.

    ```
    batcher = Batcher(model, max_batch_size=32, temperature=0.8)
    for prompt in prompts:
        batcher.submit(prompt, max_new_tokens=100)
    for request, token in batcher:
        ...
    ```

    Args:
        model: a language model. The state of its attention, if it has any, must have a fixed size, that of a chunk.
        max_batch_size: sequences that are generated at once; others wait. The batch is as large as needed, in powers of
            two.
        prefill_tokens: tokens of prompts that are read between two steps, about.
        prefix_cache: reads the prompts, from the longest beginning that it has read before.
        quantization: as in `tcnca.stream`.
        cache_dtype: as in `tcnca.stream`.
        options: defaults of the options of sequences: `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`,
            as in `tcnca.stream`.
    """

    def __init__(
        self,
        model: SequenceModel,
        max_batch_size: int = 16,
        *,
        prefill_tokens: int = 2048,
        prefix_cache: PrefixCache | None = None,
        quantization: Quantization | None = None,
        cache_dtype: CacheDtype | None = None,
        **options: Any,
    ) -> None:
        check_whole("max_batch_size", max_batch_size, 1)
        check_whole("prefill_tokens", prefill_tokens, 1)
        if prefix_cache is not None:
            prefix_cache.check_model(model)
        check_rounding(model, quantization, cache_dtype)
        if model.config.attention is not None and not has_fixed_state(model):
            raise InputError("model: expected attention in chunks, got full attention, whose state grows; use generate")
        self.model, self.max_batch_size, self.prefill_tokens = model, max_batch_size, prefill_tokens
        self.options = _replace(SamplingOptions(), options)
        self._rounding: dict[str, Any] = {"quantization": quantization, "cache_dtype": cache_dtype}
        if prefix_cache is None:
            prefix_cache = PrefixCache(model, max_bytes=0, block_size=prefill_tokens)
        self._cache = prefix_cache
        self._waiting: deque[Request] = deque()
        self._reading: deque[tuple[Request, Iterator[tuple[int, Prefix]]]] = deque()
        # A sequence that is read or generated has a slot in the sampler, and one that is generated a row in the step.
        self._slots: list[Request | None] = [None] * max_batch_size
        self._rows: list[Request | None] = []
        self._step: Step | None = None
        self._steps_with_room = 0
        weight = model.embedding.weight
        with generating(model):
            self._sampler = Sampler(max_batch_size, len(weight), weight.device, excluded=excluded_tokens(model))
            self._sampler.assign(range(max_batch_size), _GREEDY)
            # By slot.
            self._tokens = torch.zeros(max_batch_size, dtype=torch.long, device=weight.device)
            self._logits = torch.zeros(max_batch_size, len(weight), dtype=weight.dtype, device=weight.device)
        # The slot of each row, and the row of each slot; None when they have changed.
        self._places: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """Return the number of unfinished sequences."""
        return len(self._waiting) + sum(request is not None for request in self._slots)

    def __iter__(self) -> Iterator[tuple[Request, int]]:
        """Yield tokens as they come, until all sequences are complete; further ones can be submitted meanwhile.

        A sequence whose prompt cannot be read has no tokens: its `finish_reason` is `"error"`, and `error` says why.
        """
        while len(self):
            for request, token in self.step():
                if request.finish_reason != "cancelled":
                    yield request, token

    def submit(
        self,
        prompt: Tokens,
        max_new_tokens: int,
        *,
        seed: int | None = None,
        stop: int | str | bytes | Tensor | Sequence[int | Tokens] = (),
        **options: Any,
    ) -> Request:
        """Add a sequence, which is generated by `step`, or by iterating over the batcher or over the sequence.

        Args:
            prompt: tokens `[time]`, at least one; or a text, for a model with a byte map or symbols.
            max_new_tokens: number of tokens to generate at most.
            seed: of the random numbers, which are those of `tcnca.generate` with the same seed.
            stop: a text or token, or several texts, tokens or sequences of tokens, that end the sequence.
            options: those of sampling that differ from the defaults of the batcher.
        """
        tokens, chosen = self._encode("prompt", prompt), _replace(self.options, options)
        device = self.model.embedding.weight.device
        check_arguments(self.model, tokens.unsqueeze(0).to(device), max_new_tokens, seed=seed)
        self.model.embedding.check_values("prompt", tokens)
        if self.model.embedding.pad_token_id is not None:
            tokens = tokens[tokens != self.model.embedding.pad_token_id]
        given: Any = [stop] if isinstance(stop, int | str | bytes) else stop
        stops = [self._encode("stop", each) for each in given]
        if not all(len(each) for each in stops):
            raise InputError("stop: expected at least 1 token, got none")
        request = Request(self, tokens, max_new_tokens, chosen, seed, [each.tolist() for each in stops])
        if max_new_tokens:
            self._waiting.append(request)
        else:
            request.finish_reason = "length"
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Generate a token of each sequence whose prompt has been read, and read on in other prompts.

        Returns:
            The new tokens, in any order; none while no prompt has been read.
        """
        with generating(self.model):
            try:
                return self._generate()
            except BaseException as error:
                # Their states may be partly overwritten, or lost. Prompts that are being read have their own.
                reading = [request for request, _ in self._reading]
                for request in self._slots:
                    if request is not None and request not in reading:
                        self._finish(request, "error", error)
                self._release()
                raise

    def _generate(self) -> list[tuple[Request, int]]:
        running = [request for request in self._rows if request is not None]
        if running:
            self._run()
        joining = self._read_prompts()
        if not running and not joining:
            return []
        self._tokens = self._sampler(self._logits)
        drawn, new = self._tokens.tolist(), []
        for request in (*running, *joining):
            token = drawn[self._slots.index(request)]
            request.tokens.append(token)
            new.append((request, token))
            ending = request._ending()
            if ending is not None:
                self._finish(request, ending)
        self._join({request: state for request, state in joining.items() if not request.finished})
        self._shrink()
        return new

    def _run(self) -> None:
        """Take a step, and put the logits of each row where the sampler expects them."""
        assert self._step is not None
        if self._places is None:
            slots = [0 if request is None else self._slots.index(request) for request in self._rows]
            rows = [self._rows.index(request) if request in self._rows else 0 for request in self._slots]
            device = self._tokens.device
            self._places = torch.tensor(slots, device=device), torch.tensor(rows, device=device)
        slot_of_row, row_of_slot = self._places
        logits = self._step(self._tokens.index_select(0, slot_of_row))
        torch.index_select(logits.to(self._logits.dtype), 0, row_of_slot, out=self._logits)

    def _read_prompts(self) -> dict[Request, ModelState]:
        """Read about `prefill_tokens` tokens of prompts; return those that are complete, with their states."""
        budget, complete = self.prefill_tokens, dict[Request, ModelState]()
        while budget > 0:
            while self._waiting and None in self._slots:
                request = self._waiting.popleft()
                self._slots[self._slots.index(None)] = request
                self._reading.append((request, self._cache.pieces(request.prompt, self.prefill_tokens)))
            if not self._reading:
                break
            # In turns, so that a short prompt does not wait for a long one.
            request, pieces = self._reading.popleft()
            try:
                count, prefix = next(pieces)
            except Exception as error:
                self._finish(request, "error", error)
                continue
            budget -= count
            if prefix.length < len(request.prompt):
                self._reading.append((request, pieces))
                continue
            slot, seeds = self._slots.index(request), [] if request.seed is None else [(request.seed, 0, 0)]
            self._sampler.assign([slot], request.options, seeds)
            prompt = request.prompt.unsqueeze(0).to(self._tokens.device)
            self._sampler.observe(prompt, rows=slice(slot, slot + 1))
            self._logits[slot] = prefix.logits[0]
            complete[request] = prefix.state
        return complete

    def _join(self, joining: dict[Request, ModelState]) -> None:
        """Load sequences into free rows, of which there are made enough."""
        for request, state in joining.items():
            if None not in self._rows:
                self._resize(len(joining) + sum(row is not None and row not in joining for row in self._rows), state)
            row = self._rows.index(None)
            assert self._step is not None
            self._step.load(row, state)
            self._rows[row], self._places = request, None

    def _shrink(self) -> None:
        """Drop free rows that have not been needed for some time."""
        self._release()
        used = sum(request is not None for request in self._rows)
        self._steps_with_room = self._steps_with_room + 1 if self._size(used) < len(self._rows) else 0
        if self._steps_with_room >= SHRINK_STEPS:
            self._resize(used)
            self._steps_with_room = 0

    def _release(self) -> None:
        """Free the memory of the step if no sequence uses it."""
        if all(request is None for request in self._rows):
            self._step, self._rows = None, []

    def _size(self, used: int) -> int:
        return min(1 << max(used - 1, 0).bit_length(), self.max_batch_size)

    def _resize(self, used: int, example: ModelState | None = None) -> None:
        """Make room for `used` sequences. Free rows continue from any state; from the example if there is no other."""
        size, kept = self._size(used), [row for row, request in enumerate(self._rows) if request is not None]
        if kept:
            assert self._step is not None
            state = self._step.state().reorder((kept + kept[:1] * size)[:size])
            self._step = None  # frees its memory before the next one takes as much
        else:
            assert example is not None
            state = example.repeat(size)
        self._step = make_step(self.model, state, **self._rounding)
        self._rows, self._places = [self._rows[row] for row in kept] + [None] * (size - len(kept)), None

    def _finish(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> None:
        request.finish_reason, request.error = reason, error
        if error is not None:
            # What the failed call has allocated would live as long as the request.
            traceback.clear_frames(error.__traceback__)
        if request in self._waiting:
            self._waiting.remove(request)
        self._reading = deque(each for each in self._reading if each[0] is not request)
        if request in self._slots:
            slot = self._slots.index(request)
            self._slots[slot] = None
            self._sampler.assign([slot], _GREEDY)
        if request in self._rows:
            self._rows[self._rows.index(request)], self._places = None, None

    def _encode(self, name: str, value: int | Tokens) -> Tensor:
        """Return tokens `[time]` on the CPU."""
        if isinstance(value, str | bytes):
            return self.model.encode(to_bytes(value, name))[0].cpu()
        tokens = torch.atleast_1d(torch.as_tensor(value)).cpu()
        if tokens.dim() == 2 and len(tokens) == 1:
            tokens = tokens[0]
        if tokens.dim() != 1:
            raise InputError(f"{name}: expected shape [time], got {list(tokens.shape)}")
        return tokens if tokens.is_floating_point() or tokens.dtype == torch.bool else tokens.long()


def _replace(base: SamplingOptions, options: dict[str, Any]) -> SamplingOptions:
    """Return `base` with some options changed."""
    known = [field.name for field in dataclasses.fields(base)]
    for name in options:
        if name not in known:
            answer = closest(name, known) or f"one of {', '.join(known)}"
            raise InputError(f"{name}: no such argument; use {answer}")
    return dataclasses.replace(base, **options)
