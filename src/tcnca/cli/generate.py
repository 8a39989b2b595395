"""`tcnca generate`: continue a prompt."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from tcnca import pretrained
from tcnca.cli.reporting import Device, OptionalRun, open_stdout, progress_bar
from tcnca.errors import DataError, InputError, escape_control, plural, shown

_LONG_PROMPT = 2**15
"""Bytes of a prompt from which reading it shows a bar."""
_SHOWN_PROMPT = 1000
"""Bytes at the end of a prompt that are shown in a terminal."""
_SMALL_MODEL = 4_000_000
"""Parameters of a model whose steps are too short for several threads to share."""
# The option of each argument in Python.
_OPTIONS = {"max_new_tokens": "--max-tokens", "quantization": "--int8", "cache_dtype": "--float8-cache"} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "num_samples", "stop")
}


def generate(
    model: OptionalRun = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the text to continue; - for standard input.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate at most.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="Randomness of the sampling; 0 takes the most likely token.")
    ] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from this number of most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the fewest most likely tokens with this probability in total.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Sample from tokens with at least this share of the probability of the most likely one."),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Make tokens that have occurred less likely, if above 1.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random numbers. (default: a new one)")] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Number of continuations, counted from 0.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends a continuation, and is not printed; can be repeated.")
    ] = None,
    jsonl: Annotated[
        bool,
        typer.Option(
            "--jsonl",
            help="Print a JSON object per continuation: sample, text, tokens, finish_reason (length, stop, or "
            "cancelled after Ctrl-C) and seed.",
        ),
    ] = False,
    best: Annotated[bool, typer.Option("--best", help="Use the best checkpoint by validation, not the last.")] = False,
    device: Device = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Data type of the weights. (default: as saved)"),
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Round the weights to 8 bits, after the prompt is read: faster.")
    ] = False,
    float8_cache: Annotated[
        bool, typer.Option("--float8-cache", help="Round the values of the attention to 8 bits, on a GPU.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads on a CPU. (default: one for models of fewer than 4 million parameters, else PyTorch's)",
        ),
    ] = None,
) -> None:
    """Continue a prompt with a language model: yours, or the small pretrained one that comes with tcnca.

    The continuation is printed as it is generated, in a terminal after the prompt. The same seed gives the same
    text, and each of several continuations is the same whatever their number.
    """
    text = _read_prompt(prompt, prompt_file, model)
    name = pretrained.NAME if model is None else str(model)
    seed = secrets.randbelow(2**32) if seed is None else seed

    import torch

    from tcnca.generation import stream_texts
    from tcnca.inference.loading import load
    from tcnca.models.prediction import check_language_model
    from tcnca.training.distributed import dist_context
    from tcnca.training.threads import use_threads

    with dist_context(device) as dist, contextlib.ExitStack() as stack, contextlib.ExitStack() as bar:
        language_model = load(model, dist.device, best=best)
        check_language_model(language_model, name)
        # A step reads a few rows of the table of n-grams.
        sizes = {name: parameter.numel() for name, parameter in language_model.named_parameters()}
        size = sum(sizes.values()) - sizes.get("embedding.ngram_weight", 0)
        # Threads that wait for each other at every step are far slower than one on a busy machine.
        small = dist.device.type == "cpu" and size < _SMALL_MODEL
        stack.enter_context(use_threads(threads or (1 if small else None)))
        stack.enter_context(_option_names(name, "--prompt" if prompt_file is None else str(prompt_file)))
        if dtype is not None:
            language_model = language_model.to(getattr(torch, dtype))
        progress = bar.enter_context(progress_bar("reading the prompt", len(text) > _LONG_PROMPT))
        read = 0

        def on_piece(piece: torch.Tensor, _: torch.Tensor | None) -> None:
            nonlocal read
            read += piece.shape[1]
            progress(read, len(text) if language_model.preprocessing.byte_map else None)

        printer = _JSONPrinter(num_samples, seed) if jsonl else _Printer(num_samples, text)
        texts = stream_texts(
            language_model,
            text,
            max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            num_samples=num_samples,
            stop=[_encode(each, "--stop") for each in stop or ()],
            quantization="int8" if int8 else None,
            cache_dtype="float8" if float8_cache else None,
            on_piece=on_piece,
            on_end=printer.end,
        )
        about = f"seed {seed}" + (f", model {name}" if model is None else "")
        _print_texts(texts, printer, bar.close, f"a prompt of {plural(len(text), 'byte')}", about)


def _read_prompt(prompt: str | None, file: Path | None, model: Path | None) -> bytes:
    if (prompt is None) == (file is None):
        got = "neither" if prompt is None else "both"
        text = prompt is None and model is not None and not model.exists()
        hint = f"; {shown(str(model))} was taken for a model, a text needs --prompt" if text else ""
        raise InputError(f"--prompt, --prompt-file: expected one of them, got {got}{hint}")
    if prompt is not None:
        data, name = _encode(prompt, "--prompt"), "--prompt"
    elif str(file) == "-":
        data, name = sys.stdin.buffer.read(), "standard input"
    else:
        assert file is not None
        name = str(file)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}); give a file with a prompt") from error
    if not data:
        raise InputError(
            f"{name}: expected a text to continue, got an empty one; to start from nothing, give a newline: "
            "--prompt $'\\n'"
        )
    return data


def _encode(text: str, option: str) -> bytes:
    """Return an argument as UTF-8. Bytes of a command line that are not UTF-8 are kept."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:  # on Windows, whose arguments are UTF-16
        raise InputError(
            f"{option}: expected valid Unicode, got the unpaired surrogate {text[error.start]!a}; remove it"
        ) from error


@contextlib.contextmanager
def _option_names(model: str, prompt: str) -> Iterator[None]:
    """Name the arguments of the command, not those in Python, in errors."""
    try:
        yield
    except InputError as error:
        name, colon, text = str(error).partition(":")
        option = {**_OPTIONS, "model": model, "prompt": prompt, "text": prompt}.get(name, name)
        text = text.replace(", or None,", ",").replace("expected None for", "expected it off for")
        raise type(error)(option + colon + text) from error


class _Printer:
    """Prints continuations one after the other: the first that has not ended as it grows, the others after it.

    In a terminal, the end of the prompt is printed before each.
    """

    def __init__(self, num_samples: int, prompt: bytes = b"") -> None:
        end = prompt[-_SHOWN_PROMPT:].decode("utf-8", "replace")
        # A cut may leave the rest of a character.
        end = "…" + end.lstrip("\ufffd") if len(prompt) > _SHOWN_PROMPT else end
        self._prompt = escape_control(end, "\n\t")
        self._texts, self._ended = [""] * num_samples, [False] * num_samples
        self._reasons = ["cancelled"] * num_samples
        self._current, self._begun, self._last = 0, False, "\n"
        self._out = open_stdout()

    def add(self, new: list[str | None]) -> None:
        """Add the next piece of each continuation; None after its end."""
        for sample, text in enumerate(new):
            self._texts[sample] += text or ""
            self._ended[sample] |= text is None
        self._print()

    def end(self, sample: int, reason: str) -> None:
        """Note why a continuation has ended."""
        self._reasons[sample] = reason

    def finish(self) -> None:
        """Print all that was not printed yet, and end the line."""
        self._ended = [True] * len(self._texts)
        self._print()
        if self._last != "\n":
            self._write("\n")

    def _print(self) -> None:
        while self._current < len(self._texts):
            if not self._begun and len(self._texts) > 1:
                gap = "" if self._last == "\n" else "\n"
                self._write(f"{gap}== sample {self._current} ==\n")
            if not self._begun and self._prompt and sys.stdout.isatty():
                Console(file=sys.stdout).print(Text(self._prompt, "dim", end=""), soft_wrap=True, end="")
                self._last = self._prompt[-1]
            self._begun = True
            self._write(self._texts[self._current])
            self._texts[self._current] = ""
            if not self._ended[self._current]:
                break
            self._current, self._begun = self._current + 1, False

    def _write(self, text: str) -> None:
        if text:
            self._last = text[-1]
            self._out.write(text)
            self._out.flush()


class _JSONPrinter(_Printer):
    """Prints a JSON object for each continuation when it has ended."""

    def __init__(self, num_samples: int, seed: int) -> None:
        super().__init__(num_samples)
        self._tokens, self._seed = [0] * num_samples, seed

    def add(self, new: list[str | None]) -> None:
        """Add the next piece of each continuation; None after its end."""
        self._tokens = [tokens + (text is not None) for tokens, text in zip(self._tokens, new, strict=True)]
        super().add(new)

    def _print(self) -> None:
        while self._current < len(self._texts) and self._ended[self._current]:
            sample = self._current
            row = {
                "sample": sample,
                "text": self._texts[sample],
                "tokens": self._tokens[sample],
                "finish_reason": self._reasons[sample],
                "seed": self._seed,
            }
            self._write(json.dumps(row, ensure_ascii=False) + "\n")
            self._current += 1


def _print_texts(
    texts: Iterator[list[str | None]], printer: _Printer, end_progress: Callable[[], None], prompt: str, about: str
) -> None:
    counts = [0]
    begin = first = time.perf_counter()
    try:
        for new in texts:
            if len(counts) == 1:
                first = time.perf_counter()
                end_progress()
            counts.append(len(new) - new.count(None))
            printer.add(new)
    finally:
        # On Ctrl-C, too: with what was generated so far.
        if not isinstance(sys.exception(), Exception):
            now = time.perf_counter()
            if len(counts) == 1:  # stopped while the prompt was read
                first = now
                end_progress()
            printer.finish()
            seconds = now - first
            speed = f", {sum(counts[2:]) / seconds:,.0f} tokens/s" if len(counts) > 2 and seconds else ""
            typer.echo(
                f"{plural(sum(counts), 'token')} in {seconds:.2f} s{speed}, after {prompt} in "
                f"{first - begin:.2f} s; {about}",
                err=True,
            )
