"""Generation: a language model continues a prompt token by token, with a state instead of the whole past."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tcnca.errors import InputError
from tcnca.generation.fused import CacheDtype, FusedStep, Quantization
from tcnca.generation.fused import unsupported_reason as fused_reason
from tcnca.generation.packed import PackedStep
from tcnca.generation.prompts import OnPiece, prefill
from tcnca.generation.sampling import Sampler, SamplingOptions
from tcnca.generation.step import positions, unsupported_reason
from tcnca.generation.text import stream_text, stream_texts
from tcnca.models import Lengths, ModelState, SequenceModel, evaluating
from tcnca.models.model import suggest_arguments
from tcnca.ops import check_lengths
from tcnca.ops.driver import capture_graph

__all__ = ["generate", "stream", "stream_text", "stream_texts"]

MIN_GRAPH_TOKENS = 8
"""Capturing a CUDA graph costs about as much as this number of steps."""
_WARM_UP_STEPS = 2
"""Steps on the captured stream, in which libraries allocate their workspaces."""

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
        on_piece: is called with each piece of the prompts that was read, `[batch, time]`, and which of its tokens are
            valid; None if all are.
    """
    if not model.config.head.generates:
        raise InputError(f"model: expected a language model, got one with a {type(model.config.head).__name__}")
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens: expected at least 0, got {max_new_tokens}")
    options = SamplingOptions(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    for name, value, expected in (("quantization", quantization, "int8"), ("cache_dtype", cache_dtype, "float8")):
        if value not in (None, expected):
            raise InputError(f"{name}: expected {expected!r} or None, got {value!r}")
    if quantization is not None or cache_dtype is not None:
        _check_rounding(model, cache_dtype)
    if num_samples < 1:
        raise InputError(f"num_samples: expected at least 1, got {num_samples}")
    if seed is not None and generator is not None:
        raise InputError("seed, generator: expected at most one of them, got both")
    model.embedding.check_shape("prompt", prompt)
    if lengths is not None:
        host = torch.as_tensor(lengths).cpu()
        check_lengths(host, prompt.shape[0], prompt.shape[1])
        if bool((host < 1).any()):
            raise InputError(f"lengths: expected at least 1 token in each row, got {host.tolist()}")
    padding = model.embedding.pad_token_id
    if lengths is None and padding is not None and bool((prompt == padding).all(-1).any()):
        raise InputError(f"prompt: expected at least 1 token in each row, got a row of padding ({padding})")

    def tokens() -> Iterator[Tensor]:
        token, step = None, None
        for _ in range(max_new_tokens):
            # Around each step only: between two tokens the caller has its own modes.
            with torch.no_grad(), evaluating(model):
                if token is None:
                    batch, vocab_size = prompt.shape[0] * num_samples, model.embedding.weight.shape[0]
                    sampler = Sampler(
                        batch, vocab_size, prompt.device, excluded=excluded_tokens(model), generator=generator
                    )
                    seeds = [] if seed is None else [(seed, *divmod(row, num_samples)) for row in range(batch)]
                    sampler.assign(range(batch), options, seeds)
                    last, state = prefill(model, prompt, lengths, _both(sampler.observe, on_piece))
                    if num_samples > 1:
                        last, state = last.repeat_interleave(num_samples, 0), state.repeat(num_samples)
                    step = _make_step(model, state, max_new_tokens, sampler, quantization, cache_dtype)
                    token = sampler(last)
                elif isinstance(step, FusedStep) and sampler.fused:
                    token = step.next()
                elif step is not None:
                    token = sampler(step(token))
                else:
                    logits, state = model(token.unsqueeze(1), state=state, inplace=True)
                    token = sampler(logits[:, -1])
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
) -> Tensor:
    """Return the tokens that `stream` yields for the same arguments, `[batch × num_samples, max_new_tokens]`."""
    tokens = list(stream(**locals()))
    return torch.stack(tokens, 1) if tokens else prompt.new_zeros(prompt.shape[0] * num_samples, 0)


def _both(first: OnPiece, second: OnPiece | None) -> OnPiece:
    """Return a function that calls both."""

    def call(piece: Tensor, valid: Tensor | None) -> None:
        first(piece, valid)
        if second is not None:
            second(piece, valid)

    return call


def excluded_tokens(model: SequenceModel) -> Tensor | None:
    """Return which tokens are never generated, `[vocab_size]`: the padding, and those that mean no text."""
    preprocessing, vocab_size = model.preprocessing, model.embedding.weight.shape[0]
    known = preprocessing.byte_map or preprocessing.symbols
    first, padding = len(known) if known else vocab_size, model.embedding.pad_token_id
    if first == vocab_size and padding is None:
        return None
    tokens = torch.arange(vocab_size, device=model.embedding.weight.device)
    return (tokens >= first) | (tokens == (-1 if padding is None else padding))


def _check_rounding(model: SequenceModel, cache_dtype: CacheDtype | None) -> None:
    """Raise an error if generation cannot round weights or the cache of this model."""
    state = model.initial_state(1)
    device = model.embedding.weight.device
    if device.type == "cpu":
        reason = unsupported_reason(model, state)
        if cache_dtype is not None:
            reason = "cache_dtype: expected None on a CPU"
    else:
        reason = fused_reason(model, state, cache_dtype)
    if reason is not None:
        raise InputError(f"quantization, cache_dtype: expected None for this model; {reason}")


def _make_step(
    model: SequenceModel,
    state: ModelState,
    max_new_tokens: int,
    sampler: Sampler,
    quantization: Quantization | None,
    cache_dtype: CacheDtype | None,
) -> FusedStep | GraphedStep | PackedStep | None:
    """Return a faster step than the model's own, or None if there is none."""
    device = model.embedding.weight.device
    many = max_new_tokens >= MIN_GRAPH_TOKENS
    # Weights that autocast has converted live for one replay only.
    if torch.is_autocast_enabled(device.type):
        return None
    if device.type == "cpu":
        if unsupported_reason(model, state) is not None:
            return None
        position = positions(state)
        return PackedStep(model, state) if bool((position == position[0]).all()) else None
    if many and fused_reason(model, state) is None:
        return FusedStep(model, state, sampler, quantization=quantization, cache_dtype=cache_dtype)
    return GraphedStep(model, state) if should_capture(model, device, max_new_tokens) else None


def should_capture(model: SequenceModel, device: torch.device, max_new_tokens: int) -> bool:
    """Whether a CUDA graph can generate the tokens, and is faster."""
    mixer, attention = model.config.mixer, model.config.attention
    # The state of full attention grows, and a model of feed-forward nets has none.
    fixed = mixer is not None if attention is None else attention.chunk_size is not None
    long = max_new_tokens >= MIN_GRAPH_TOKENS
    # Weights that autocast has converted live for one replay only.
    return device.type == "cuda" and long and fixed and not torch.is_autocast_enabled("cuda")


class GraphedStep:
    """A step of one token as a CUDA graph: a few hundred small kernels with one launch.

    Maps the tokens `[batch]` to the logits of the next ones, `[batch, vocab_size]`. The memory of the given state is
    reused, and the logits are overwritten by the next step.
    """

    def __init__(self, model: SequenceModel, state: ModelState) -> None:
        before = state.tensors()
        self._token = next(iter(before.values())).new_zeros(state.batch_size, dtype=torch.long)
        with torch.cuda.device(self._token.device):
            # PyTorch's default capture stream belongs to the device of the first capture.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_STEPS):
                    model(self._token.unsqueeze(1), state=state.clone(), inplace=True)
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads, for example one that pins memory, may continue: the capture concerns this thread only.
            with capture_graph(stream, error_mode="thread_local") as self._graph:
                logits, after = model(self._token.unsqueeze(1), state=state, inplace=True)
                assert after is not None
                for name, tensor in after.tensors().items():
                    if tensor.data_ptr() != before[name].data_ptr():
                        before[name].copy_(tensor)
        # Replays read and write this memory, so it must stay alive.
        self._held = before, after
        self._logits = logits[:, -1]

    def __call__(self, token: Tensor) -> Tensor:
        """Run the step."""
        self._token.copy_(token)
        self._graph.replay()
        return self._logits
