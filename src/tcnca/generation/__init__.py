"""Generation: a language model continues a prompt token by token, with a state instead of the whole past."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tcnca.errors import InputError
from tcnca.models import Lengths, ModelState, SequenceModel
from tcnca.models.model import suggest_arguments
from tcnca.ops import check_tensor, take_time
from tcnca.ops.driver import capture_graph

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
    lengths: Lengths | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of each sequence, `[batch]`, as soon as it is known.

    The cost of a token does not depend on the length of the past, except with full attention. The model runs in
    evaluation mode, without dropout; its own mode is restored before each token is yielded.

    Args:
        model: a language model.
        prompt: `[batch, time]`, at least one token in each row.
        max_new_tokens: number of tokens to generate.
        temperature: of the distribution; 0 takes the most likely token.
        top_k: number of most likely tokens to sample from; by default all.
        lengths: `[batch]`, if prompts of several lengths are padded on the right.
        generator: of the random numbers; by default PyTorch's.
    """
    if not model.config.head.generates:
        raise InputError(f"model: expected a language model, got one with a {type(model.config.head).__name__}")
    if max_new_tokens < 0:
        raise InputError(f"max_new_tokens: expected at least 0, got {max_new_tokens}")
    if not 0.0 <= temperature < math.inf:
        raise InputError(f"temperature: expected a number of at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k: expected at least 1, or None, got {top_k}")
    if lengths is not None and bool((torch.as_tensor(lengths) < 1).any()):
        raise InputError(f"lengths: expected at least 1 token in each row, got {torch.as_tensor(lengths).tolist()}")
    check_tensor("prompt", prompt)
    prompt = prompt if prompt.is_floating_point() else prompt.long()
    padding = model.embedding.pad_token_id
    if lengths is None and padding is not None and bool((prompt == padding).all(-1).any()):
        raise InputError(f"prompt: expected at least 1 token in each row, got a row of padding ({padding})")

    def tokens() -> Iterator[Tensor]:
        token, step = None, None
        for _ in range(max_new_tokens):
            # Around each step only: between two tokens the caller has its own modes.
            with torch.no_grad(), _evaluating(model):
                if token is None:
                    logits, state = model(prompt, lengths=lengths)
                    last = take_time(logits, _last_index(prompt, lengths, padding).unsqueeze(1))[:, 0]
                    if should_capture(model, prompt.device, max_new_tokens):
                        step = GraphedStep(model, state)
                elif step is not None:
                    last = step(token)
                else:
                    logits, state = model(token.unsqueeze(1), state=state, inplace=True)
                    last = logits[:, -1]
                token = _sample(last, temperature, top_k, padding, generator)
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
    lengths: Lengths | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the tokens that `stream` yields for the same arguments, `[batch, max_new_tokens]`."""
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "lengths": lengths, "generator": generator}
    tokens = list(stream(model, prompt, max_new_tokens, **options))
    return torch.stack(tokens, 1) if tokens else prompt.new_zeros(prompt.shape[0], 0)


@contextlib.contextmanager
def _evaluating(model: SequenceModel) -> Iterator[None]:
    """Put the model in evaluation mode, and those of its modules that were in training mode back."""
    training = [module for module in model.modules() if module.training] if model.training else []
    try:
        if training:
            model.eval()
        yield
    finally:
        for module in training:
            module.training = True


def _last_index(prompt: Tensor, lengths: Lengths | None, padding: int | None) -> Tensor:
    """Return the index of the last token of each prompt, `[batch]`."""
    if lengths is not None:
        return torch.as_tensor(lengths, device=prompt.device).long() - 1
    times = torch.arange(prompt.shape[1], device=prompt.device).expand_as(prompt)
    return (times if padding is None else times.masked_fill(prompt == padding, 0)).amax(1)


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, padding: int | None, generator: torch.Generator | None
) -> Tensor:
    if padding is not None:
        logits = logits.clone()
        logits[:, padding] = float("-inf")
    if temperature == 0.0:
        return logits.argmax(-1)
    # Relative to the largest, so that a small temperature does not overflow.
    logits = (logits.float() - logits.float().amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


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
