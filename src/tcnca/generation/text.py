"""Generated text: tokens become characters as soon as their bytes are complete, until a stop string appears."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tcnca.errors import InputError, shown
from tcnca.generation.api import stream
from tcnca.models import SequenceModel
from tcnca.models.preprocessing import ADD_BYTE_MAP, to_bytes

_MAX_CHARACTER = 4
"""Bytes of the longest character in UTF-8."""


def stream_text(
    model: SequenceModel,
    prompt: str | bytes,
    max_new_tokens: int,
    *,
    stop: str | bytes | Sequence[str | bytes] = (),
    **options: Any,
) -> Iterator[str]:
    """Yield the continuation of a prompt as text, as soon as whole characters are known.

    Bytes that are not UTF-8 become the replacement character.

    Args:
        model: a language model of bytes or words.
        prompt: a text that is not empty; a `str` is encoded as UTF-8.
        max_new_tokens: number of tokens to generate at most.
        stop: text, or texts, that end the continuation, and are not part of it; like `prompt`.
        options: of `tcnca.stream`, for example `temperature` and `seed`.
    """
    if (count := options.get("num_samples", 1)) != 1:
        raise InputError(f"num_samples: expected 1, got {shown(count)}; use stream_texts for several")
    texts = stream_texts(model, prompt, max_new_tokens, stop=stop, **options)
    return (text for (text,) in texts if text)


def stream_texts(
    model: SequenceModel,
    prompt: str | bytes,
    max_new_tokens: int,
    *,
    stop: str | bytes | Sequence[str | bytes] = (),
    on_end: Callable[[int, Literal["stop", "length"]], None] | None = None,
    **options: Any,
) -> Iterator[list[str | None]]:
    """Yield the new text of each of `num_samples` continuations of a prompt, after each token.

    The text is empty where characters are not complete or may be the beginning of a stop string, and None after the
    end of a continuation. The arguments are those of `stream_text`, and `num_samples`. `on_end` is called with the
    number of a continuation that has ended, and with `stop` if it was by a stop string, else `length`.
    """
    data = to_bytes(prompt, "prompt")
    if not isinstance(stop, Iterable):
        raise InputError(f"stop: expected a text or several, got {shown(stop)}")
    stops = [to_bytes(text, "stop") for text in ([stop] if isinstance(stop, str | bytes) else stop)]
    if not data:
        raise InputError("prompt: expected a text, got an empty one; a newline is the shortest beginning")
    if not all(stops):
        raise InputError("stop: expected texts that are not empty, got an empty one")
    pieces = _token_bytes(model)
    if model.preprocessing.byte_map is None:
        tokens = model.encode(data)
    else:
        tokens = model.preprocessing.encode_bytes(data).unsqueeze(0).to(model.embedding.weight.device)
    # The checks above, and those of `stream`, run when the function is called.
    generated = stream(model, tokens, max_new_tokens, **options)
    continuations = [_Continuation(data, stops) for _ in range(options.get("num_samples", 1))]
    return _texts(generated, continuations, pieces, max_new_tokens, on_end)


def _texts(
    generated: Iterator[Tensor],
    continuations: list[_Continuation],
    pieces: list[bytes],
    max_new_tokens: int,
    on_end: Callable[[int, Literal["stop", "length"]], None] | None,
) -> Iterator[list[str | None]]:
    for number, row in enumerate(_to_host(generated), 1):
        new: list[str | None] = []
        for index, (text, token) in enumerate(zip(continuations, row, strict=True)):
            new.append(None if text.ended else text.feed(pieces[token], number == max_new_tokens))
            if new[-1] is not None and text.ended and on_end is not None:
                on_end(index, "stop" if text.stopped else "length")
        yield new
        if all(text.ended for text in continuations):
            return


def _token_bytes(model: SequenceModel) -> list[bytes]:
    """Return the bytes of each token."""
    byte_map, symbols = model.preprocessing.byte_map, model.preprocessing.symbols
    if model.config.head.generates and byte_map is None and symbols is None:
        raise InputError(f"model: expected a model of text, got one that was saved without a byte map; {ADD_BYTE_MAP}")
    return [bytes([byte]) for byte in byte_map or ()] or [b" " + symbol.encode() for symbol in symbols or ()]


def _to_host(tokens: Iterator[Tensor]) -> Iterator[list[int]]:
    """Yield tokens `[batch]` as numbers. On a GPU, the next step is launched before the numbers are waited for."""
    waiting: tuple[Tensor, torch.cuda.Event] | None = None
    for token in tokens:
        if not token.is_cuda:
            yield token.tolist()
            continue
        copy = torch.empty_like(token, device="cpu", pin_memory=True).copy_(token, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(token.device))
        if waiting is not None:
            waiting[1].synchronize()
            yield waiting[0].tolist()
        waiting = copy, event
    if waiting is not None:
        waiting[1].synchronize()
        yield waiting[0].tolist()


class _Continuation:
    """Turns the bytes of one continuation into text."""

    def __init__(self, prompt: bytes, stops: Sequence[bytes]) -> None:
        self.ended = self.stopped = False
        self._stops, self._held = stops, b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # The prompt may end inside a character, which then is the first one.
        self._decoder.decode(prompt[1 - _MAX_CHARACTER :])

    def feed(self, piece: bytes, last: bool) -> str:
        """Add bytes, and return the text that is complete with them; all of it with the last ones."""
        self._held += piece
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.stopped = bool(found)
        self.ended = self.stopped or last
        if self.ended:
            return self._decoder.decode(self._held[: min(found, default=None)], final=True)
        ready, self._held = _split(self._held, self._stops)
        return self._decoder.decode(ready)


def _split(data: bytes, stops: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Divide data before the longest end that a stop string begins with."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(data)), 0, -1):
        if any(stop.startswith(data[-length:]) for stop in stops):
            return data[:-length], data[-length:]
    return data, b""
