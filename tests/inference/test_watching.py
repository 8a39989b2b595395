"""Logs that grow, are truncated and rotated: each line is read once, scored, and printed if it is unusual."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import tcnca
from tcnca import (
    ClassifierHeadConfig,
    DataError,
    InputError,
    Preprocessing,
    SequenceModel,
    StateError,
    TokenInputConfig,
)
from tcnca.cli import app
from tcnca.inference.scoring import UNKNOWN_BITS
from tcnca.inference.watching import (
    _PIECE,
    _WARM_UP,
    FileTail,
    LogWatch,
    Piece,
    PipeTail,
    UnusualLine,
    WatchState,
)
from tests.examples import small_model
from tests.inference.models import text_model

runner = CliRunner()
LINES = [b"%d: line of a log\n" % number for number in range(30)]
BANNER = b"equal lines\n" * 140
"""Longer than the beginning by which files are recognized."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return tcnca.save(text_model(), tmp_path_factory.mktemp("text"))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "app.log"


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the files of all tails at the end of a test."""
    tails, make = list[FileTail](), FileTail.__init__

    def made(tail: FileTail, *arguments: Any) -> None:
        tails.append(tail)
        make(tail, *arguments)

    monkeypatch.setattr(FileTail, "__init__", made)
    yield
    for tail in tails:
        if hasattr(tail, "_file"):
            tail.close()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def read_all(tail: FileTail | PipeTail) -> bytes:
    return b"".join(piece.data for piece in iter(tail.read, None))


# Files.


def test_a_line_is_read_when_it_is_complete(log: Path) -> None:
    tail = FileTail(log)
    assert tail.read() is None
    append(log, b"one\ntw")
    assert tail.read() == Piece(b"one\n", 0, 1)
    assert tail.read() is None
    append(log, b"o\nthree\n\n")
    assert tail.read() == Piece(b"two\nthree\n\n", 4, 2)
    assert tail.read() is None
    assert tail.line == 5


def test_a_truncated_file_is_read_from_its_start(log: Path) -> None:
    tail = FileTail(log)
    append(log, b"one\ntwo\nhal")
    read_all(tail)
    log.write_bytes(b"")
    assert tail.read() is None
    append(log, b"new\n")
    assert tail.read() == Piece(b"new\n", 0, 1)
    log.write_bytes(b"another beginning, longer than what was there\n")
    assert tail.read() == Piece(b"another beginning, longer than what was there\n", 0, 1)


def test_a_rotated_file_is_read_to_its_end(log: Path) -> None:
    tail = FileTail(log)
    append(log, b"one\n")
    read_all(tail)
    log.rename(f"{log}.1")
    append(Path(f"{log}.1"), b"two\n")
    assert tail.read() == Piece(b"two\n", 4, 2)
    log.touch()
    append(Path(f"{log}.1"), b"three\nhalf")
    assert read_all(tail) == b"three\n"  # the writer may still use the old file
    append(log, b"new\n")
    assert tail.read() == Piece(b"half", 14, 4)
    assert tail.read() == Piece(b"new\n", 0, 1)


def test_the_rest_of_a_file_that_was_copied_and_truncated_is_read(log: Path) -> None:
    tail = FileTail(log)
    append(log, b"one\n")
    read_all(tail)
    append(log, b"two\n")
    shutil.copy(log, f"{log}.1")
    log.write_bytes(b"")
    assert read_all(tail) == b"two\n"
    append(log, b"new\n")
    assert tail.read() == Piece(b"new\n", 0, 1)


@pytest.mark.parametrize("moved", ["", "renamed", "copied", "replaced"])
def test_reading_continues_after_a_stop(log: Path, moved: str) -> None:
    tail = FileTail(log)
    append(log, b"one\ntw")
    read_all(tail)
    append(log, b"o\n")
    if moved == "renamed":
        log.rename(log.with_name("app.log-20261116"))
    elif moved == "copied":
        shutil.copy(log, f"{log}.1")
    if moved:
        log.write_bytes(b"new\n")
    log.with_name("app.log.2.gz").write_bytes(b"\x1f\x8b")
    os.mkfifo(f"{log}.pipe")
    resumed = FileTail(log, tail.state())
    assert resumed.continues == (moved != "replaced")
    assert read_all(resumed) == {"": b"two\n", "replaced": b"new\n"}.get(moved, b"two\nnew\n")


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("moved", ["renamed", "copied", "replaced"])
def test_files_with_the_same_beginning_are_told_apart(log: Path, moved: str, stopped: bool) -> None:
    log.write_bytes(BANNER + b"old\n" * 200)
    tail = FileTail(log)
    read_all(tail)
    state = tail.state()
    append(log, b"rest\n")
    if moved == "renamed":
        log.rename(f"{log}.1")
    elif moved == "copied":
        shutil.copy(log, f"{log}.1")
    new = BANNER + b"new\n" * 300
    log.write_bytes(new)
    # An older file, which comes first by name and has the same beginning too.
    log.with_name("app.log.0").write_bytes(BANNER + b"other\n" * 300)
    os.utime(log.with_name("app.log.0"), (0, 0))
    if stopped:
        tail = FileTail(log, state)
        assert tail.continues == (moved != "replaced")
    first = tail.read()
    assert first == (Piece(new, 0, 1) if moved == "replaced" else Piece(b"rest\n", len(BANNER) + 800, 341))
    assert read_all(tail) == (b"" if moved == "replaced" else new)


def test_of_equal_files_the_same_one_is_continued(log: Path) -> None:
    log.write_bytes(BANNER)
    tail = FileTail(log)
    read_all(tail)
    log.rename(f"{log}.1")
    append(Path(f"{log}.1"), b"old\n")
    log.write_bytes(BANNER + b"new\n")
    log.with_name("app.log.0").write_bytes(BANNER + b"older\n")
    os.utime(log.with_name("app.log.0"), (0, 0))
    assert read_all(FileTail(log, tail.state())) == b"old\n" + BANNER + b"new\n"


def test_files_of_several_rotations_are_read_in_order(log: Path) -> None:
    log.write_bytes(b"one\n")
    tail = FileTail(log)
    read_all(tail)
    append(log, b"two\n")
    # By name, a number or a date, these are in another order.
    names = ["app.log.4", "app.log.5", "app.log.2", "app.log-20261116", "app.log.1"]
    log.rename(log.with_name(names[1]))
    log.with_name(names[0]).write_bytes(b"older\n")
    for name in names[2:]:
        log.with_name(name).write_bytes(name.encode())
    for name in ("app.log.copy", "app.log.3.gz", "app.log.state", "app.logs.1"):
        log.with_name(name).write_bytes(b"not rotated\n")
    log.with_name("app.log.3").touch()
    shutil.copy(log.with_name(names[1]), log.with_name("app.log.6"))
    for time_, name in enumerate([*names[:2], "app.log.6", *names[2:]]):
        os.utime(log.with_name(name), (time_, time_))
    log.write_bytes(b"new\n")
    resumed = FileTail(log, tail.state())
    pieces = list(iter(resumed.read, None))
    assert [piece.data for piece in pieces] == [b"two\n", *(name.encode() for name in names[2:]), b"new\n"]
    assert [(piece.offset, piece.line) for piece in pieces] == [(4, 2), *[(0, 1)] * 4]


def test_a_file_of_which_nothing_was_read_is_continued(log: Path) -> None:
    log.write_bytes(b"half")
    tail = FileTail(log)
    assert tail.read() is None
    append(log, b" a line\n")
    log.rename(f"{log}.1")
    log.write_bytes(b"new\n")
    assert read_all(FileTail(log, tail.state())) == b"half a line\nnew\n"


def test_a_file_that_is_missing_at_the_start_is_continued(log: Path) -> None:
    log.write_bytes(b"one\ntwo\n")
    tail = FileTail(log)
    read_all(tail)
    kept = log.rename(log.with_name("kept"))
    resumed = FileTail(log, tail.state())
    assert (resumed.read(), resumed.continues) == (None, False)
    resumed = FileTail(log, resumed.state())
    assert resumed.read() is None
    kept.rename(log)
    append(log, b"three\n")
    assert resumed.read() == Piece(b"three\n", 8, 3)
    assert int(resumed.state().offset) == 14
    kept = log.rename(log.with_name("kept"))
    resumed = FileTail(log, resumed.state())
    log.write_bytes(b"another file\n")
    assert resumed.read() == Piece(b"another file\n", 0, 1)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_file_behind_a_link_is_read_to_its_end(log: Path, stopped: bool) -> None:
    folder = log.with_name("data")
    folder.mkdir()
    file = folder / "real.log"
    log.symlink_to(file)
    file.write_bytes(b"one\n")
    tail = FileTail(log)
    read_all(tail)
    append(file, b"two\n")
    for number, content in enumerate((b"three\n", b"four\n")):
        rotated = file.rename(folder / f"real.log.{2 - number}")
        os.utime(rotated, (number, number))
        file.write_bytes(content)
    assert read_all(FileTail(log, tail.state()) if stopped else tail) == b"two\nthree\nfour\n"


@given(
    actions=st.lists(
        st.one_of(
            st.binary(max_size=6).map(lambda data: data.replace(b"\x00", b"\n")),
            st.sampled_from(["read", "resume", "rename", "copy"]),
        ),
        max_size=30,
    ),
)
def test_each_byte_is_read_once(actions: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log, read, written, files = Path(folder, "log"), b"", b"", 0
        tail = FileTail(log)
        for action in [b"begin\n", "read", *actions, b"\nend\n"]:
            if isinstance(action, bytes):
                append(log, action)
                written += action
                continue
            if action == "resume":
                tail = FileTail(log, tail.state())
            if action in ("rename", "copy"):
                files += 1
                if action == "rename":
                    log.rename(f"{log}.{files}")
                else:
                    shutil.copy(log, f"{log}.{files}")
                    log.write_bytes(b"")
                os.utime(f"{log}.{files}", (files, files))
                append(log, b"file %d\n" % files)
                written += b"file %d\n" % files
                continue
            read += read_all(tail)
        read += read_all(tail)
        assert read == written


def test_long_lines_are_divided(log: Path) -> None:
    log.write_bytes(b"x" * (_PIECE + 5) + b"\nend\n")
    tail = FileTail(log)
    pieces = [(len(piece.data), piece.line) for piece in iter(tail.read, None)]
    assert (pieces, tail.line) == ([(_PIECE, 1), (10, 1)], 3)
    found = [(each.place.line, each.place.text[-3:]) for each in read_lines(watched(log, text_model(), threshold=0))]
    assert found == [(1, b"xxx"), (1, b"xxx"), (2, b"end")]


def test_a_pipe_ends_with_its_last_line() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as file:
        tail = PipeTail(file)
        assert tail.read() is None
        os.write(writer, b"one\ntw")
        assert tail.read() == Piece(b"one\n", 0, 1)
        os.write(writer, b"o\nthree")
        assert tail.read() == Piece(b"two\n", 4, 2)
        assert not tail.ended
        os.close(writer)
        assert tail.read() == Piece(b"three", 8, 3)
        assert (tail.read(), tail.ended) == (None, True)


def test_files_that_cannot_be_read_are_not_continued(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotated file, or a folder, of another user; as root, the tests could read it."""
    tail = FileTail(log)
    append(log, b"one\n")
    read_all(tail)
    state, opened = tail.state(), Path.open
    log.rename(f"{log}.1")
    log.write_bytes(b"new\n")

    def refused(path: Path, *arguments: Any, **options: Any) -> Any:
        if path != log:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)
    assert read_all(FileTail(log, state)) == b"new\n"
    monkeypatch.setattr(Path, "iterdir", refused)
    monkeypatch.setattr(Path, "open", opened)
    assert read_all(FileTail(log, state)) == b"new\n"


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(DataError, match=r"cannot be read \(not a regular file\); give a file, or - for a pipe$"):
            FileTail(tmp_path / name).read()


# Scores.


def watched(log: Path, model: SequenceModel, **options: Any) -> LogWatch:
    return LogWatch(model, FileTail(log), **options)


def read_lines(watch: LogWatch) -> list[UnusualLine]:
    return [line for lines in iter(watch.read, None) for line in lines]


def test_lines_have_the_bits_of_their_bytes(log: Path) -> None:
    model = text_model()
    log.write_bytes(b"".join(LINES) + b"not complete")
    found = watched(log, model, threshold=0).read()
    assert found is not None
    bits = tcnca.score(model, b"".join(LINES))
    offset = 0
    for line, (place, limit) in zip(LINES, found, strict=True):
        assert (place.text, place.offset, place.length, limit) == (line[:-1], offset, len(line), 0)
        assert place.bits == pytest.approx(bits[offset : offset + len(line)].sum(), rel=1e-5)
        offset += len(line)
    assert [place.line for place, _ in found] == list(range(1, 31))


def test_bytes_that_the_model_does_not_know_do_not_end_a_watch(log: Path) -> None:
    model = text_model(b"\nab")
    log.write_bytes(b"ab\na\xff\xffb\n")
    found = watched(log, model, threshold=0).read()
    assert found is not None
    bits = tcnca.score(model, b"ab\nab\n")
    assert found[1].place.bits == pytest.approx(bits[3:].sum() + 2 * UNKNOWN_BITS)
    assert found[1].place.length == 5


def unusual(log: Path, scores: list[float], **options: Any) -> list[int]:
    """The unusual lines among lines of one byte with given scores."""
    log.write_bytes(b"\n" * len(scores))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tcnca.inference.watching.score_bytes", lambda stream, data: np.array(scores[: len(data)]))
        found = watched(log, text_model(), **options).read()
    assert found is not None
    return [each.place.line for each in found]


def test_a_line_is_unusual_above_the_mean_of_those_before_it(log: Path) -> None:
    normal = [*np.random.default_rng(0).normal(1, 0.2, _WARM_UP + 100)]
    high = len(normal) + 1
    # After one of a hundred bits the next is still unusual, and what comes often enough is not.
    assert unusual(log, [*normal, 100.0, 2.5, 1.0]) == [high, high + 1]
    assert unusual(log, [*normal, 1.5, 1.0], z_score=2)[-1] == high
    assert unusual(log, [*normal, 1.5, 1.0], z_score=20) == []
    assert unusual(log, [*normal, 1.5], threshold=1.4)[-1] == high
    found = unusual(log, [*normal, *[2.5] * 1000])
    assert found
    assert found[-1] < high + 500
    assert unusual(log, [100.0, 1.0] * 20) == []
    assert unusual(log, [1.0] * 200 + [1.2, 1.5]) == [202]


def test_a_watch_continues_exactly(log: Path, tmp_path: Path) -> None:
    model = text_model()
    whole, resumed = watched(log, model, threshold=0), watched(log, model, threshold=0)
    for line in LINES:
        append(log, line)
        resumed.save(tmp_path / "state")
        state = WatchState.load(tmp_path / "state")
        resumed = LogWatch(model, FileTail(log, state.tail), threshold=0, state=state)
        assert resumed.read() == whole.read()
    assert resumed.state().usual.equal(whole.state().usual)


def test_states_that_do_not_fit_are_refused(log: Path) -> None:
    model = text_model()
    state = watched(log, model).state()
    with pytest.raises(StateError, match=r"^usual: expected torch.float64 of shape \[1, 3\]"):
        watched(log, model, state=dataclasses.replace(state, usual=torch.full((1, 3), torch.nan, dtype=torch.float64)))
    assert state.tail is not None
    for name, value in (("offset", [-1]), ("offset", [[0]]), ("line", [0])):
        changes: dict[str, Any] = {name: torch.tensor(value)}
        with pytest.raises(StateError, match=rf"^tail\.{name}: expected torch.int64 of shape \[1\]"):
            FileTail(log, dataclasses.replace(state.tail, **changes))
    with pytest.raises(StateError, match=r"got one of a model with other weights"):
        watched(log, text_model(), state=state)
    with pytest.raises(InputError, match=r"^attention.chunk_size: expected chunks"):
        watched(log, text_model(family="mega-full"))


# The command.


def run(*arguments: Any, stdin: bytes | None = None) -> Any:
    return runner.invoke(app, ["watch", *map(str, arguments)], input=stdin, env={"COLUMNS": "200"})


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def assert_same_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["text"] for row in found] == [row["text"] for row in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def process(folder: Path, log: Path, state: Path, out: Path) -> subprocess.Popen[bytes]:
    options = ("--state", state, "--threshold", "0", "--jsonl", "--save-every", "0.1", "--device", "cpu")
    command = [sys.executable, "-m", "tcnca", "watch", *map(str, (folder, log, *options))]
    with out.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def feed(log: Path, lines: list[bytes], out: Path, last: bytes) -> None:
    """Append lines in halves, as a writer with a buffer does, until the last is printed."""
    data = b"".join(lines)
    for begin in range(0, len(data), 50):
        append(log, data[begin : begin + 50])
        time.sleep(0.01)
    wait_until(lambda: last.strip() in out.read_bytes())


def test_a_stopped_watch_continues(folder: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        """Write lines the first time that the watch waits, and stop it the second time."""
        if log.exists():
            os.kill(os.getpid(), signal.SIGTERM)
        append(log, b"".join(LINES[:12]) + LINES[12][:5])

    monkeypatch.setattr("tcnca.cli.watch.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    options = ("--state", tmp_path / "app.state", "--threshold", 0, "--jsonl")
    first = run(folder, log, *options)
    assert (first.exit_code, first.stderr) == (128 + signal.SIGTERM, f"waiting for {log}\nstopped by SIGTERM\n")
    log.write_bytes(b"".join(LINES))
    second = run(folder, log, *options, "--once")
    assert second.stderr == f"continuing at line 13 of {log}\n"
    whole = run(folder, log, "--once", "--threshold", 0, "--jsonl")
    assert_same_rows(rows(first.stdout + second.stdout), rows(whole.stdout))
    assert len(rows(whole.stdout)) == len(LINES)


@pytest.mark.slow
def test_a_stopped_watch_continues_in_another_process(folder: Path, log: Path, tmp_path: Path) -> None:
    state, out = tmp_path / "app.state", tmp_path / "out"
    watch = process(folder, log, state, out)
    assert watch.stderr is not None
    with watch.stderr as stderr:
        assert stderr.readline() == f"waiting for {log}\n".encode()
        feed(log, LINES[:12], out, LINES[11])
        append(log, LINES[12][:5])
        watch.send_signal(signal.SIGTERM)
        assert watch.wait(60) == 128 + signal.SIGTERM
        assert stderr.read() == b"stopped by SIGTERM\n"
    append(log, LINES[12][5:] + b"".join(LINES[13:]))
    second = run(folder, log, "--state", state, "--once", "--threshold", 0, "--jsonl")
    assert second.stderr == f"continuing at line 13 of {log}\n"
    whole = run(folder, log, "--once", "--threshold", 0, "--jsonl")
    assert_same_rows(rows(out.read_text() + second.stdout), rows(whole.stdout))
    assert len(rows(whole.stdout)) == len(LINES)


@pytest.mark.slow
def test_a_killed_watch_repeats_few_lines_and_misses_none(folder: Path, log: Path, tmp_path: Path) -> None:
    state, outs = tmp_path / "app.state", [tmp_path / f"out{part}" for part in range(3)]
    for part, out in enumerate(outs):
        watch = process(folder, log, state, out)
        feed(log, LINES[part * 10 : part * 10 + 10], out, LINES[part * 10 + 9])
        watch.kill()
        watch.communicate()
        if part == 1:
            log.rename(f"{log}.1")
    found = [row["text"] for out in outs for row in rows(out.read_text())]
    assert list(dict.fromkeys(found)) == [line.decode().strip() for line in LINES]
    assert len(found) < 2 * len(LINES)


def test_text_of_unusual_lines(folder: Path, log: Path) -> None:
    log.write_bytes(b"a \x1b[31mred\tline\n")
    result = run(folder, log, "--once", "--threshold", 0.1)
    assert result.exit_code == 0, result.output
    score = tcnca.score(tcnca.load(folder), b"a [31mred").mean()
    assert score > 0.1
    assert result.stdout.endswith(f" {log}:1: a \\x1b[31mred\tline\n")
    assert run(folder, log, "--once").stdout == ""


def test_lines_of_standard_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo")
    os.close(writer)
    with open(reader, "rb") as file:
        monkeypatch.setattr("tcnca.cli.watch._stdin", lambda: file)
        result = run(folder, "-", "--threshold", 0, "--once", "--jsonl")
    assert [row["text"] for row in rows(result.stdout)] == ["one", "two"]


def test_lines_that_are_there_can_be_skipped(folder: Path, log: Path, tmp_path: Path) -> None:
    log.write_bytes(b"old\nlines\n")
    options = ("--state", tmp_path / "state", "--threshold", 0, "--once", "--from-end")
    assert run(folder, log, *options).stdout == ""
    append(log, b"new\n")
    assert run(folder, log, *options).stdout.endswith(f" {log}:3: new\n")


def test_mistakes_are_answered(folder: Path, log: Path, tmp_path: Path) -> None:
    log.write_bytes(b"a\n")
    classifier = tcnca.save(text_model(head=ClassifierHeadConfig()), tmp_path / "classifier")
    other = tcnca.save(text_model(), tmp_path / "other")
    model = small_model(dtype=torch.float32, input=TokenInputConfig(vocab_size=2))
    model.preprocessing = Preprocessing(task="recall", symbols=("a", "b"))
    words = tcnca.save(model, tmp_path / "words")
    state = tmp_path / "state"
    assert run(other, log, "--once", "--state", state).exit_code == 0
    (tmp_path / "text").write_text("no state", encoding="utf-8")
    for arguments, message in {
        (folder, tmp_path / "nowhere"): f"{tmp_path}/nowhere: expected a file to watch, got nothing of this name",
        (folder, tmp_path): f"{tmp_path}: cannot be read (not a regular file); give a file, or - for a pipe",
        (folder, log, "--threshold", 1, "--z-score", 3): "--threshold, --z-score: expected one of them, got both",
        (words, log): f"{words}: expected a language model of bytes, got one of words",
        (folder, log, "--state", log): f"--state: expected a file of its own, got {log}",
        (folder, log, "--state", ""): "--state: expected a file of its own, got .",
        (classifier, log): f"{classifier}: expected a language model, got a classifier; use tcnca predict",
        (
            folder,
            log,
            "--state",
            state,
        ): f"{state}: state: expected one of this model, got one of a model with other weights",
        (folder, log, "--state", tmp_path / "text"): f"{tmp_path}/text: cannot be read as safetensors",
    }.items():
        result = run(*arguments, "--once")
        assert result.exit_code == 1, arguments
        assert f"Error: {message}" in result.stderr


def test_a_new_file_with_the_same_beginning_is_read_from_its_first_line(
    folder: Path, log: Path, tmp_path: Path
) -> None:
    options = ("--once", "--state", tmp_path / "state", "--threshold", 0, "--jsonl")
    log.write_bytes(BANNER + b"old\n" * 20)
    assert len(rows(run(folder, log, *options).stdout)) == 160
    log.rename(f"{log}.1")
    log.write_bytes(BANNER + b"new\n" * 30)
    result = run(folder, log, *options)
    assert result.stderr == f"continuing at line 161 of {log}\n"
    assert [row["line"] for row in rows(result.stdout)] == list(range(1, 171))
    log.write_bytes(BANNER + b"again\n" * 40)
    result = run(folder, log, *options)
    assert result.stderr == f"{log}: another file than that of the saved state; starting at its first line\n"
    assert [row["line"] for row in rows(result.stdout)] == list(range(1, 181))


def test_a_state_is_that_of_one_path(folder: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(log.parent)
    log.write_bytes(b"one\n")
    options = ("--once", "--state", "state", "--threshold", 0, "--jsonl")
    assert run(folder, log.name, *options).exit_code == 0
    append(log, b"two\n")
    for name in ("apq.log", "-"):
        Path("apq.log").write_bytes(b"one\ntwo\n")
        result = run(folder, name, *options)
        expected = "-" if name == "-" else log.with_name(name)
        message = (
            f"--state: expected the state of {expected}, got that of {log}; give another --state, or remove the file"
        )
        assert (result.exit_code, result.stdout, result.stderr.strip()) == (1, "", f"Error: {message}")
    assert [row["text"] for row in rows(run(folder, log, *options).stdout)] == ["two"]
    Path("state").unlink()
    for _ in range(2):
        with open(log, "rb") as file:
            monkeypatch.setattr("tcnca.cli.watch._stdin", lambda: file)
            assert len(rows(run(folder, "-", *options).stdout)) == 2
    result = run(folder, log, *options)
    assert f"--state: expected the state of {log}, got that of -; give another" in result.stderr


def test_a_state_that_cannot_be_read_can_be_removed(folder: Path, log: Path, tmp_path: Path) -> None:
    log.write_bytes(b"a\n")
    state = tmp_path / "state"
    run(folder, log, "--once", "--state", state)
    content = state.read_bytes()
    earlier = content.replace(WatchState._format.encode(), b"tcnca-state-3")
    for damaged, reason in {
        content[:-1]: f"{state}: cannot be read as safetensors (",
        earlier: f"{state}: expected format 'tcnca-watch-2', got 'tcnca-state-3'",
        content.replace(b"StreamState", b"StreamStats"): f"{state}: 'stream': expected one of ",
    }.items():
        state.write_bytes(damaged)
        result = run(folder, log, "--once", "--state", state)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {reason}")
        assert result.stderr.endswith("; remove the file to start again\n")
        assert "?" not in result.stderr


def test_one_watch_uses_a_state(folder: Path, log: Path, tmp_path: Path) -> None:
    from tcnca.files import file_lock

    log.write_bytes(b"a\n")
    with file_lock(tmp_path / ".state.lock"):
        result = run(folder, log, "--once", "--state", tmp_path / "state")
    assert result.exit_code == 1
    assert "state: expected one watch with this state, got another that is running" in result.stderr
