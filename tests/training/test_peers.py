"""An error on one of two processes ends both, with one message each, and never leaves the other one waiting."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch

from tcnca.cli import app
from tcnca.errors import TrainingError
from tcnca.training import Trainer, trainer
from tests.training.tiny import arguments, together

Place = Literal["setup", "record", "batches", "step", "save", "evaluate", "finish"]
End = Literal["error", "bug", "killed"]
METHODS = {"setup": "setup", "record": "_record", "batches": "_load_batches", "step": "_step", "save": "_save"}
SURVIVOR = "Error: another process of the run has ended"
"""Start of the message of the process without an error."""


def _end(end: End) -> None:
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise TrainingError("made by a test") if end == "error" else KeyError("made by a test")


def _break(place: Place, end: End) -> None:
    """Make this process fail at a place."""
    if place == "finish":
        Trainer._result = lambda *_: _end(end)  # type: ignore[method-assign,assignment]
        return
    owner: Any = trainer if place == "evaluate" else Trainer
    name = METHODS.get(place, place)
    whole = getattr(owner, name)

    def broken(*given: Any, **more: Any) -> Any:
        late = place in ("setup", "record") or (place == "evaluate" and given[2] == "test")
        state = getattr(given[0], "state", None)
        if late or (place != "evaluate" and state is not None and state.step >= 4):
            _end(end)
        return whole(*given, **more)

    setattr(owner, name, broken)


def _train(folder: Path, parallel: str, place: Place, rank: int, end: End) -> None:
    """Train in a process of two, of which one fails; what it prints goes to a file."""
    torch.set_num_threads(1)
    mine = int(os.environ["RANK"])
    if mine == rank:
        _break(place, end)
    with (folder / f"{mine}.txt").open("w") as file, contextlib.redirect_stderr(file):
        app(arguments(folder / "run", f"parallel={parallel}"))


def check(folder: Path, parallel: str, place: Place, rank: int, end: End) -> None:
    folder.mkdir()
    codes = together(_train, folder, parallel, place, rank, end)
    texts = [(folder / f"{each}.txt").read_text() for each in range(2)]
    assert codes[1 - rank] == 1, texts
    assert codes[rank] == {"error": 1, "bug": 70, "killed": -signal.SIGKILL}[end], texts
    survivor = texts[1 - rank]
    assert survivor.startswith(SURVIVOR), survivor
    assert survivor.count("Error: ") == 1, survivor
    assert "--resume" in survivor, survivor
    assert all("Traceback" not in text for text in texts), texts
    expected = {"error": "Error: made by a test", "bug": "This is a bug in tcnca", "killed": ""}[end]
    assert expected in texts[rank]


@pytest.mark.parametrize(
    ("place", "rank", "end"),
    [("step", 1, "killed"), ("record", 0, "error"), ("evaluate", 1, "bug")],
)
def test_a_process_that_ends_ends_the_others(tmp_path: Path, place: Place, rank: int, end: End) -> None:
    check(tmp_path / "one", "ddp", place, rank, end)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "parallel"), [(0, "fsdp"), (1, "ddp")])
@pytest.mark.parametrize("place", get_args(Place))
def test_processes_end_from_every_place(tmp_path: Path, place: Place, rank: int, parallel: str) -> None:
    for end in get_args(End):
        check(tmp_path / end, parallel, place, rank, end)
