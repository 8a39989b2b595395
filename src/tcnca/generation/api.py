"""Generation of tokens: a language model continues prompts, with a state instead of the whole past."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tcnca.errors import InputError
from tcnca.generation.dispatch import check_rounding, make_step
from tcnca.generation.prefix import PrefixCache
from tcnca.generation.prompts import OnPiece, prefill
from tcnca.generation.sampling import Sampler, SamplingOptions, check_whole, excluded_tokens
from tcnca.generation.step import CacheDtype, Quantization, Step, generating
from tcnca.models import Lengths, SequenceModel
from tcnca.models.model import suggest_arguments
from tcnca.models.prediction import check_language_model
from tcnca.ops import check_lengths, current_context

_suggest = suggest_arguments(
    {
        "input_ids": "prompt",
        "inputs": "prompt",
        "tokens": "max_new_tokens",
        "num_tokens": "max_new_tokens",
        "max_length": "max_new_tokens, without the prompt",
        "attention_mask": "lengths",
        "do_sample": "temperature=0 for the most likely token",
        "num_return_sequences": "num_samples",
        "n": "num_samples",
    }
)


@_suggest
def stream(
    model: SequenceModel,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    num_samples: int = 1,
    lengths: Lengths | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    quantization: Quantization | None = None,
    cache_dtype: CacheDtype | None = None,
    prefix_cache: PrefixCache | None = None,
    on_piece: OnPiece | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of each sequence, `[batch]`, as soon as it is known.

    The cost of a token does not depend on the length of the past, except with full attention. A long prompt is read in
    pieces, in bounded memory. The model runs in evaluation mode, without dropout; its own mode is restored before each
    token is yielded.

    Args:
        model: a language model.
        prompt: `[batch, time]`, at least one token in each row.
        max_new_tokens: number of tokens to generate.
        temperature: of the distribution; 0 takes the most likely token.
        top_k: number of most likely tokens to sample from; by default all.
        top_p: sample from the fewest most likely tokens whose probabilities sum to at least this; by default all.
        min_p: sample from the tokens with at least this share of the probability of the most likely one.
        repetition_penalty: makes tokens of the prompt and of the text so far less likely; 1 for no penalty.
        num_samples: continuations of each prompt, which is read once. Those of one prompt follow each other in the
            batch.
        lengths: `[batch]`, if prompts of several lengths are padded on the right.
        seed: of the random numbers. Those of sample `i` of row `b` depend on the seed, `b` and `i` only, so that up to
            rounding the same sample is drawn with any `num_samples`, on any device.
        generator: of the random numbers, instead of a seed; by default PyTorch's.
        quantization: `int8` to round the weights of matrix products to 8 bits for the generated tokens. The prompt is
            read with the model's own weights.
        cache_dtype: `float8` to round the values of the attention's chunk to 8 bits, on a GPU.
        prefix_cache: reads the prompts, from the longest beginning that it has read before.
        on_piece: is called with each piece of the prompts that was read, `[batch, time]`, and which of its tokens are
            valid; None if all are.
    """
    check_arguments(model, prompt, max_new_tokens, lengths, seed)
    options = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    check_rounding(model, quantization, cache_dtype)
    check_whole("num_samples", num_samples, 1)
    if current_context() is not None:
        raise InputError(
            "model: expected a call outside of ContextParallel, in which a prompt would be a part, got one in it"
        )
    if seed is not None and generator is not None:
        raise InputError("seed, generator: expected at most one of them, got both")
    if prefix_cache is not None:
        prefix_cache.check_model(model)

    def begin() -> tuple[Tensor, Step]:
        """Read the prompt; return the first token, and the step after it."""
        batch, vocab_size = prompt.shape[0] * num_samples, model.embedding.weight.shape[0]
        sampler = Sampler(batch, vocab_size, prompt.device, excluded=excluded_tokens(model), generator=generator)
        seeds = [] if seed is None else [(seed, *divmod(row, num_samples)) for row in range(batch)]
        sampler.assign(range(batch), options, seeds)
        observe = _both(sampler.observe, on_piece)
        if prefix_cache is None:
            last, state = prefill(model, prompt, lengths, observe)
        else:
            last, state = prefix_cache.prefill(prompt, lengths, observe)
        if not bool(torch.isfinite(last.amax())):
            raise InputError("model: expected logits that are numbers, got NaN or infinity; check its weights")
        if num_samples > 1:
            last, state = last.repeat_interleave(num_samples, 0), state.repeat(num_samples)
        step = make_step(
            model, state, sampler, max_new_tokens=max_new_tokens, quantization=quantization, cache_dtype=cache_dtype
        )
        return sampler(last), step

    def tokens() -> Iterator[Tensor]:
        step: Step | None = None
        for _ in range(max_new_tokens):
            # Around each step only: between two tokens the caller has its own modes.
            if step is None:
                with generating(model):
                    token, step = begin()
            else:
                with torch.inference_mode(False), torch.no_grad():
                    token = step.next()
            yield token

    # The checks above run when `stream` is called, the model when its result is iterated.
    return tokens()


@_suggest
def generate(
    model: SequenceModel,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    num_samples: int = 1,
    lengths: Lengths | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    quantization: Quantization | None = None,
    cache_dtype: CacheDtype | None = None,
    prefix_cache: PrefixCache | None = None,
) -> Tensor:
    """Return the tokens that `stream` yields for the same arguments, `[batch × num_samples, max_new_tokens]`."""
    tokens = list(stream(**locals()))
    return torch.stack(tokens, 1) if tokens else prompt.new_zeros(prompt.shape[0] * num_samples, 0, dtype=torch.long)


def check_arguments(
    model: SequenceModel,
    prompt: Tensor,
    max_new_tokens: int,
    lengths: Lengths | None = None,
    seed: int | None = None,
) -> None:
    """Raise an error unless the arguments, those of `stream`, describe something to generate."""
    check_language_model(model)
    check_whole("max_new_tokens", max_new_tokens, 0)
    if seed is not None:
        check_whole("seed", seed)
    model.embedding.check_shape("prompt", prompt)
    device, padding = model.embedding.weight.device, model.embedding.pad_token_id
    if prompt.device != device:
        raise InputError(f"prompt: expected it on {device}, where the model is, got {prompt.device}")
    if lengths is not None:
        host = torch.as_tensor(lengths).cpu()
        check_lengths(host, prompt.shape[0], prompt.shape[1])
        if bool((host < 1).any()):
            raise InputError(f"lengths: expected at least 1 token in each row, got {host.tolist()}")
    elif padding is not None and bool((prompt.long() == padding).all(-1).any()):
        raise InputError(f"prompt: expected at least 1 token in each row, got a row of padding ({padding})")


def _both(first: OnPiece, second: OnPiece | None) -> OnPiece:
    """Return a function that calls both."""

    def call(piece: Tensor, valid: Tensor | None) -> None:
        first(piece, valid)
        if second is not None:
            second(piece, valid)

    return call
