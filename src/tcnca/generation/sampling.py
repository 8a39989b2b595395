"""Sampling from a language model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tcnca.errors import InputError
from tcnca.generation.graph import GraphedStep, records
from tcnca.models import LanguageModelHeadConfig, Lengths, SequenceModel
from tcnca.ops import check_tensor, take_time


def stream(
    model: SequenceModel,
    prompt: Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    lengths: Lengths | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield one new token for each sequence at a time, `[batch]`, as soon as it is known.

    The model's state holds all of the past that matters: with chunked attention, or none, a token costs the same
    however long that past is.

    Args:
        model: a language model; put it in evaluation mode first, or its dropout stays on.
        prompt: `[batch, time]`, at least one token a row.
        tokens: how many to generate.
        temperature: of the distribution; 0 takes the most likely token.
        top_k: draw from the so many most likely tokens only.
        lengths: `[batch]`, if prompts of several lengths are padded at the right.
        generator: for the random numbers; by default PyTorch's.
    """
    if not isinstance(model.config.head, LanguageModelHeadConfig):
        raise InputError(f"model: got a {type(model.config.head).__name__}, allowed is a language model")
    if tokens < 0:
        raise InputError(f"tokens: got {tokens}, allowed is 0 or more")
    if not 0.0 <= temperature < math.inf:
        raise InputError(f"temperature: got {temperature}, allowed is 0 or more")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k: got {top_k}, allowed is 1 or more, or None")
    if lengths is not None and bool((torch.as_tensor(lengths) < 1).any()):
        raise InputError(f"lengths: got {torch.as_tensor(lengths).tolist()}, allowed are prompts of 1 or more tokens")
    check_tensor("prompt", prompt)
    prompt = prompt if prompt.is_floating_point() else prompt.long()
    padding = getattr(model.config.input, "pad_token_id", None)
    if lengths is None and padding is not None and bool((prompt == padding).all(-1).any()):
        raise InputError(f"prompt: got a row of padding ({padding}) alone, allowed are prompts of 1 or more tokens")
    return _stream(model, prompt, tokens, temperature, top_k, lengths, generator)


def generate(
    model: SequenceModel,
    prompt: Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    lengths: Lengths | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The `tokens` new tokens of `stream` (same arguments), together: `[batch, tokens]`."""
    drawn = list(
        stream(model, prompt, tokens, temperature=temperature, top_k=top_k, lengths=lengths, generator=generator)
    )
    return torch.stack(drawn, 1) if drawn else prompt.new_zeros(prompt.shape[0], 0)


def _stream(
    model: SequenceModel,
    prompt: Tensor,
    tokens: int,
    temperature: float,
    top_k: int | None,
    lengths: Lengths | None,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    padding = getattr(model.config.input, "pad_token_id", None)
    token, step = None, None
    for _ in range(tokens):
        # A decorator would leave gradients off for the caller between two tokens.
        with torch.no_grad():
            if token is None:
                logits, state = model(prompt, lengths=lengths)
                last = take_time(logits, _last_places(prompt, lengths, padding).unsqueeze(1))[:, 0]
                if records(model, prompt.device, tokens):
                    step = GraphedStep(model, state)
            elif step is not None:
                last = step(token)
            else:
                logits, state = model(token.unsqueeze(1), state=state, inplace=True)
                last = logits[:, -1]
            token = _draw(last, temperature, top_k, padding, generator)
        yield token


def _last_places(prompt: Tensor, lengths: Lengths | None, padding: int | None) -> Tensor:
    """Where each prompt ends, `[batch]`."""
    if lengths is not None:
        return torch.as_tensor(lengths, device=prompt.device).long() - 1
    times = torch.arange(prompt.shape[1], device=prompt.device).expand_as(prompt)
    return (times if padding is None else times.masked_fill(prompt == padding, 0)).amax(1)


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, padding: int | None, generator: torch.Generator | None
) -> Tensor:
    if padding is not None:
        logits = logits.clone()
        logits[:, padding] = float("-inf")
    if temperature == 0.0:
        return logits.argmax(-1)
    # From the largest, so that a small temperature does not overflow.
    logits = (logits.float() - logits.float().amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
