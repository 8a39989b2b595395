"""Text as it is generated: whole characters, stop strings, and the command `tcnca generate`."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tcnca
from tcnca import ClassifierHeadConfig, InputError, Preprocessing, SequenceModel, TokenInputConfig, VocabularyError
from tcnca.cli import app
from tcnca.cli.generate import _Printer
from tcnca.errors import escape_control
from tcnca.generation.text import _Continuation
from tests.examples import small_model
from tests.inference.models import saved, text_model

runner = CliRunner()
ASCII = bytes(range(32, 127))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return tcnca.save(text_model(), tmp_path_factory.mktemp("text"))


def run(folder: Path, *arguments: str, stdin: bytes | None = None) -> Any:
    return runner.invoke(app, ["generate", str(folder), *arguments], input=stdin, env={"COLUMNS": "200"})


def fed(data: bytes, prompt: bytes = b"x", stops: tuple[bytes, ...] = ()) -> list[str]:
    """The text after each byte."""
    text, found = _Continuation(prompt, stops), []
    for place in range(len(data)):
        found.append(text.feed(data[place : place + 1], place == len(data) - 1))
        if text.ended:
            break
    return found


def test_characters_appear_when_they_are_whole() -> None:
    assert fed("aé€😀b".encode()) == ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]


def test_bytes_that_are_not_utf8_become_the_replacement_character() -> None:
    assert "".join(fed(b"a\xffb\xe2\x82c")) == "a\ufffdb\ufffdc"
    assert "".join(fed(b"ab\xe2\x82")) == "ab\ufffd"


def test_a_character_can_begin_in_the_prompt() -> None:
    euro = "€".encode()
    for cut in (1, 2):
        assert "".join(fed(euro[cut:] + b"a", prompt=b"cost " + euro[:cut])) == "€a"
    assert "".join(fed(b"a", prompt="cost €".encode())) == "a"


@pytest.mark.parametrize(
    ("data", "stops", "expected"),
    [
        (b"one two three", (b"two",), "one "),
        (b"one two three", (b"three", b"ne"), "o"),
        (b"aaab", (b"aab",), "a"),
        (b"one tw", (b"two",), "one tw"),
        ("a€b".encode(), ("€".encode(),), "a"),
        (b"line\nnext", (b"\n",), "line"),
    ],
)
def test_stop_strings_end_the_text_and_are_not_part_of_it(data: bytes, stops: tuple[bytes, ...], expected: str) -> None:
    assert "".join(fed(data, stops=stops)) == expected


def test_stream_text_is_the_text_of_the_tokens() -> None:
    model = text_model(ASCII)
    tokens = tcnca.generate(model, model.encode("Once"), 40, seed=3, top_p=0.9)
    expected = model.decode(tokens).decode("utf-8", "replace")
    assert "".join(tcnca.stream_text(model, "Once", 40, seed=3, top_p=0.9)) == expected
    stop = expected[20:22]
    assert "".join(tcnca.stream_text(model, b"Once", 40, seed=3, top_p=0.9, stop=stop)) == expected.partition(stop)[0]


def test_stream_texts_ends_with_the_last_continuation() -> None:
    model = text_model(ASCII)
    columns = zip(*tcnca.stream_texts(model, "a", 30, seed=1, num_samples=3), strict=True)
    whole = ["".join(filter(None, column)) for column in columns]
    stop = [text[5 * (index + 1)] for index, text in enumerate(whole)]
    steps = list(tcnca.stream_texts(model, "a", 30, seed=1, num_samples=3, stop=stop))
    assert len(steps) < 30
    for index, text in enumerate(whole):
        column = [step[index] for step in steps]
        end = min(text.find(each) for each in stop if each in text)
        assert "".join(filter(None, column)) == text[:end]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "prompt: expected a text, got an empty one"),
        ({"stop": ["a", ""]}, "stop: expected texts that are not empty"),
        ({"prompt": "a\ud800"}, r"prompt: expected valid Unicode, got the unpaired surrogate '\\ud800'; remove it"),
        ({"prompt": None}, "prompt: expected a text, got None"),
        ({"stop": "\udcff"}, r"stop: expected valid Unicode, got the unpaired surrogate '\\udcff'"),
        ({"stop": [1]}, "stop: expected a text, got 1"),
        ({"stop": None}, "stop: expected a text or several, got None"),
        ({"num_samples": 2}, "num_samples: expected 1, got 2; use stream_texts"),
        ({"num_samples": 0}, "num_samples: expected 1, got 0"),
        ({"top_p": 2.0}, "top_p: expected"),
    ],
)
def test_errors_come_with_the_call(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        tcnca.stream_text(text_model(), **{"prompt": "a", "max_new_tokens": 3, **arguments})


def test_models_without_text_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"^model: expected a model of text, got one that was saved without a byte map"
    ):
        tcnca.stream_text(small_model(), "a", 3)
    with pytest.raises(InputError, match=r"^model: expected a language model, got a classifier; use tcnca predict"):
        tcnca.stream_text(text_model(head=ClassifierHeadConfig()), "a", 3)
    with pytest.raises(VocabularyError, match=r"expected the 3 bytes that occur .*got b'xy', .*offset 2; remove them$"):
        tcnca.stream_text(text_model(b"abc"), "abyx", 3)


def test_models_of_words_generate_words() -> None:
    model = small_model()
    model.preprocessing = Preprocessing(symbols=("one", "two", *map(str, range(9))))
    text = "".join(tcnca.stream_text(model, "one two", 4, seed=0))
    assert len(text.split()) == 4
    assert set(text.split()) <= set(model.preprocessing.symbols or ())


def test_the_command_prints_the_continuation_and_the_speed(folder: Path, tmp_path: Path) -> None:
    expected = "".join(tcnca.stream_text(tcnca.load(folder), "Hello\n", 30, seed=5, top_k=20, min_p=0.001))
    options = ("--max-tokens", "30", "--seed", "5", "--top-k", "20", "--min-p", "0.001")
    result = run(folder, "--prompt", "Hello\n", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.removesuffix("\n") + "\n"
    speed = r"30 tokens in [\d.]+ s, [\d,]+ tokens/s, after a prompt of 6 bytes in [\d.]+ s; seed 5\n"
    assert re.fullmatch(speed, result.stderr)
    (tmp_path / "prompt.txt").write_text("Hello\n", encoding="utf-8")
    assert run(folder, "--prompt-file", str(tmp_path / "prompt.txt"), *options).stdout == result.stdout
    assert run(folder, "--prompt-file", "-", *options, stdin=b"Hello\n").stdout == result.stdout


def test_samples_do_not_depend_on_their_number(folder: Path) -> None:
    options = ("--prompt", "Hello", "--max-tokens", "25", "--seed", "2")
    texts = {}
    for count in (2, 3):
        output = run(folder, *options, "--num-samples", str(count)).stdout
        texts[count] = [part.rstrip("\n") for part in re.split(r"\n?== sample \d ==\n", output)]
    assert len(texts[3]) == 4
    assert texts[3][:3] == texts[2]
    assert texts[2][1] == run(folder, *options).stdout.rstrip("\n")


def test_json_lines_have_a_continuation_each(folder: Path) -> None:
    options = ("--prompt", "Hello", "--max-tokens", "25", "--seed", "2", "--num-samples", "2")
    rows = [json.loads(line) for line in run(folder, *options, "--jsonl").stdout.splitlines()]
    texts = [part.rstrip("\n") for part in re.split(r"\n?== sample \d ==\n", run(folder, *options).stdout)]
    assert [row.pop("text").rstrip("\n") for row in rows] == texts[1:]
    assert rows == [{"sample": sample, "tokens": 25, "finish_reason": "length", "seed": 2} for sample in range(2)]
    text = json.loads(run(folder, *options, "--jsonl", "--num-samples", "1").stdout)["text"]
    row = json.loads(run(folder, *options, "--jsonl", "--num-samples", "1", "--stop", text[10]).stdout)
    assert row["text"] == text.partition(text[10])[0]
    assert row["tokens"] < 25
    assert row["finish_reason"] == "stop"


def test_stop_strings_can_be_bytes_that_are_not_utf8(folder: Path) -> None:
    result = run(folder, "--prompt", "a", "--max-tokens", "9", "--stop", "\udcff", "--jsonl")
    assert result.exit_code == 0, result.stderr
    stop = tcnca.stream_text(text_model(b"\xff"), b"\xff", 9, stop=b"\xff")
    assert "".join(stop) == ""


def test_a_stop_string_at_the_last_token_is_the_reason_of_the_end() -> None:
    model, ends = text_model(ASCII), list[tuple[int, str]]()
    (text,) = ("".join(filter(None, column)) for column in zip(*tcnca.stream_texts(model, "a", 9, seed=1), strict=True))
    stop = next(text[place:] for place in range(8, -1, -1) if text.count(text[place:]) == 1)
    list(tcnca.stream_texts(model, "a", 9, seed=1, stop=stop, on_end=lambda *end: ends.append(end)))
    list(tcnca.stream_texts(model, "a", 8, seed=1, stop=stop, on_end=lambda *end: ends.append(end)))
    assert ends == [(0, "stop"), (0, "length")]


def test_small_models_run_on_one_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used, before = [], torch.get_num_threads()

    def stream(*_: Any, **__: Any) -> Iterator[list[str | None]]:
        used.append(torch.get_num_threads())
        yield ["x"]

    monkeypatch.setattr("tcnca.generation.stream_texts", stream)
    torch.set_num_threads(2)
    try:
        for options in ((), ("--threads", "3")):
            assert run(folder, "--prompt", "a", "--device", "cpu", *options).exit_code == 0
        monkeypatch.setattr("tcnca.cli.generate._SMALL_MODEL", 1)
        assert run(folder, "--prompt", "a", "--device", "cpu").exit_code == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert used == [1, 3, 2]


def test_weights_and_cache_can_have_fewer_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def stream(model: SequenceModel, *_: Any, **options: Any) -> Iterator[list[str | None]]:
        found.append((model.embedding.weight.dtype, options["quantization"], options["cache_dtype"]))
        yield ["x"]

    monkeypatch.setattr("tcnca.generation.stream_texts", stream)
    for options in ((), ("--dtype", "bfloat16"), ("--int8",), ("--float8-cache",)):
        assert run(folder, "--prompt", "a", *options).exit_code == 0
    full, half = torch.float32, torch.bfloat16
    assert found == [(full, None, None), (half, None, None), (full, "int8", None), (full, None, "float8")]


def test_a_new_seed_is_printed_and_repeats_the_text(folder: Path) -> None:
    first = run(folder, "--prompt", "Hello", "--max-tokens", "20")
    (seed,) = re.findall(r"seed (\d+)", first.stderr)
    assert run(folder, "--prompt", "Hello", "--max-tokens", "20", "--seed", seed).stdout == first.stdout


def test_ctrl_c_prints_what_was_generated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Iterator[list[str | None]]:
        yield ["one ", "uno "]
        yield ["two", "dos"]
        raise KeyboardInterrupt

    monkeypatch.setattr("tcnca.generation.stream_texts", interrupted)
    result = run(folder, "--prompt", "x", "--num-samples", "2", "--seed", "0")
    assert result.exit_code == 130
    assert result.stdout == "== sample 0 ==\none two\n== sample 1 ==\nuno dos\n"
    assert result.stderr.startswith("4 tokens in ")
    assert result.stderr.endswith("\nstopped by SIGINT\n")
    rows = run(folder, "--prompt", "x", "--num-samples", "2", "--jsonl").stdout.splitlines()
    assert [json.loads(row)["finish_reason"] for row in rows] == ["cancelled", "cancelled"]


def test_a_long_prompt_shows_how_much_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    @contextlib.contextmanager
    def bar(what: str, shows: bool) -> Iterator[Any]:
        seen.append(shows)
        yield lambda *done: seen.append(done)
        seen.append("ended")

    monkeypatch.setattr("tcnca.cli.generate.progress_bar", bar)
    monkeypatch.setattr("tcnca.generation.prompts.PREFILL_TOKENS", 2**14)
    result = run(folder, "--prompt-file", "-", "--max-tokens", "2", stdin=b"a" * 40_000)
    assert result.exit_code == 0, result.output
    assert seen == [True, (16_384, 40_000), (32_768, 40_000), (40_000, 40_000), "ended"]
    seen.clear()
    assert run(folder, "--prompt", "a", "--max-tokens", "2").exit_code == 0
    assert seen[0] is False


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_do_not_drive_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert escape_control("a\x1b[2J\tb\r\n\x9b\x7f é", "\n\t") == "a\\x1b[2J\tb\\r\n\\x9b\\x7f é"
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    printer = _Printer(1)
    printer.add(["ready\x1b[2J"])
    assert terminal.getvalue() == "ready\\x1b[2J"
    printer.finish()
    assert terminal.getvalue().endswith("J\n")


def test_a_terminal_shows_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    printer = _Printer(2, b"The [b]city\x1b[2J of")
    printer.add([" Rome", " Oslo"])
    printer.finish()
    prompt = "\x1b[2mThe [b]city\\x1b[2J of\x1b[0m"
    assert terminal.getvalue() == f"== sample 0 ==\n{prompt} Rome\n== sample 1 ==\n{prompt} Oslo\n"

    terminal.truncate(0)
    printer = _Printer(1, b"ab" + "é".encode() * 500 + b"\n")
    printer.add(["x"])
    assert re.sub(r"\x1b\[\d+m|\0", "", terminal.getvalue()) == "…" + "é" * 499 + "\nx"

    monkeypatch.setattr("sys.stdout", file := io.StringIO())
    printer = _Printer(1, b"The city of")
    printer.add([" Rome"])
    assert file.getvalue() == " Rome"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "--prompt: expected a text to continue, got an empty one; to start from nothing, "),
        ((), "--prompt, --prompt-file: expected one of them, got neither"),
        (("--prompt", "a", "--prompt-file", "b"), "--prompt, --prompt-file: expected one of them, got both"),
        (("--prompt-file", "nowhere.txt"), "nowhere.txt: cannot be read (No such file or directory)"),
        (("--prompt-file", "-"), "standard input: expected a text to continue, got an empty one"),
        (("--prompt", "a", "--top-p", "7"), "--top-p: expected a number above 0 and at most 1, got 7.0"),
        (("--prompt", "a", "--top-k", "0"), "--top-k: expected a whole number of at least 1, got 0"),
        (("--prompt", "a", "--float8-cache", "--device", "cpu"), "--float8-cache: expected it off for this model; "),
        (("--prompt", "a", "--temperature", "-1"), "--temperature: expected a number of at least 0, got -1.0"),
        (("--prompt", "a", "--repetition-penalty", "nan"), "--repetition-penalty: expected a number above 0"),
        (("--prompt", "a", "--stop", ""), "--stop: expected texts that are not empty"),
        (("--prompt", "a", "--stop", "b\ud800"), "--stop: expected valid Unicode, got the unpaired surrogate"),
        (("--prompt", "\ud800"), "--prompt: expected valid Unicode, got the unpaired surrogate '\\ud800'; remove it"),
    ],
)
def test_mistakes_are_answered(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(folder, *arguments, stdin=b"")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {message}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_wrong_models_are_answered(tmp_path: Path) -> None:
    tcnca.save(text_model(head=ClassifierHeadConfig()), tmp_path / "classifier")
    saved("forecast", tmp_path / "forecast")
    tcnca.save(text_model(b"abc"), tmp_path / "narrow")
    tcnca.save(small_model(dtype=torch.float32, input=TokenInputConfig(vocab_size=256)), tmp_path / "bare")
    for name, message in {
        "nothing": f"{tmp_path}/nothing: expected a run directory or a saved model, got no such folder",
        "classifier": f"{tmp_path}/classifier: expected a language model, got a classifier; use tcnca predict, or "
        "train one with tcnca train lm",
        "forecast": f"{tmp_path}/forecast: expected a language model, got a forecast model; use tcnca predict",
        "bare": f"{tmp_path}/bare: expected a model of text, got one that was saved without a byte map; if its tokens "
        "are bytes, load it in Python, set model.preprocessing = tcnca.Preprocessing(byte_map=tuple(range(256))), ",
        "narrow": "--prompt: expected the 3 bytes that occur in the training data",
    }.items():
        result = run(tmp_path / name, "--prompt", "lol")
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {message}")
    model = tcnca.load(tmp_path / "bare")
    model.preprocessing = Preprocessing(byte_map=tuple(range(256)))
    tcnca.save(model, tmp_path / "bare")
    result = run(tmp_path / "bare", "--prompt", "\n", "--max-tokens", "1")
    assert result.exit_code == 0
    assert re.match(r"1 token in .* after a prompt of 1 byte in ", result.stderr)
