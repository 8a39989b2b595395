"""Tiny sets and runs: enough for all that training does, in a second or so."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from tcnca.cli import app
from tcnca.data import get_dataset, list_datasets
from tcnca.data.datasets.recall import Recall
from tcnca.data.schema import SPLITS, Column, Columns, Kind, Ragged
from tcnca.data.store import DatasetWriter
from tcnca.training import Checkpoints, Processes, Recipe, Run, Watch, load_recipe

SMALL = [
    "data=recall-16",
    "max_steps=12",
    "warmup_steps=4",
    "batch.size=12",
    "log_every=3",
    "eval.every=6",
    "checkpoint.every=4",
]
MODEL = ["num_layers=1", "d_model=8", "d_ff=8", "d_key=4", "d_value=8", "model.chunk_size=8", "model.dropout=0.1"]
Death = Literal["before", "within", "full", "short"]
"""Killed before a step, or in the middle of the next file; no more space for files, or for the rest of the next."""
CUT = 10
"""Bytes of a file that are written before the process is killed."""
PATIENCE = 120.0
"""Seconds that a process may take."""
EXAMPLES = 4
"""Examples of each split of a tiny set."""
STREAM = {"train": 600, "validation": 150, "test": 150}
"""Bytes of the splits of a tiny EnWik8."""


def recipe(*changes: str) -> Recipe:
    """A recipe of a second."""
    return load_recipe("recall-small").override([*SMALL, *MODEL, *changes])


def run(folder: Path, wanted: Recipe, **more: Any) -> Run:
    """A run in this process, and without a word."""
    return Run(wanted, folder, Processes(), Watch(folder, None), **more)


def arguments(folder: Path, *more: str, recipe: str = "recall-small") -> list[str]:
    """What to give to `tcnca` to train a recipe of a second."""
    small = [*SMALL, *MODEL] if recipe == "recall-small" else []
    return ["train", recipe, "--device", "cpu", "--out", str(folder), *small, *more]


def environment() -> dict[str, str]:
    """For processes that are started."""
    # They share few cores.
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all that a model has learned."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0, msg=name)


def latest(folder: Path) -> Path:
    """The last checkpoint of a run."""
    found = Checkpoints(folder / "checkpoints", 1, Processes()).latest()
    assert found is not None
    return found


def log(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """The losses of a run, by update; one that was computed twice must be the same."""
    found: dict[int, float] = {}
    for line in log(folder):
        if "loss" in line:
            assert found.setdefault(line["step"], line["loss"]) == line["loss"], line
    return found


def write_set(folder: Path, name: str, kind: Kind, splits: Mapping[str, Columns], **facts: Any) -> None:
    """Store a set as if it were prepared."""
    known = get_dataset(name)
    made = {} if known.generator is None else {"version": known.generator.version}
    with DatasetWriter(folder / name) as writer:
        for split, columns in splits.items():
            writer.append(split, columns)
        writer.commit({"dataset": name, "kind": kind, "title": known.title, **known.metadata, **made, **facts})


def write_every_set(folder: Path) -> None:
    """Sets of a few examples, of the kinds, vocabularies and classes of the published ones."""
    draw = np.random.default_rng(0)

    def sequences(vocab_size: int) -> Ragged:
        # Of different lengths, and some longer than a chunk.
        lengths = draw.permutation(np.linspace(20, 200, EXAMPLES).astype(int))
        return Ragged.from_arrays([draw.integers(0, vocab_size, length, np.uint8) for length in lengths])

    def classes(count: int, splits: tuple[str, ...] = SPLITS, **columns: Any) -> dict[str, dict[str, Column]]:
        made = {split: {name: make() for name, make in columns.items()} for split in splits}
        return {split: {**made[split], "labels": draw.integers(0, count, EXAMPLES)} for split in splits}

    def pixels(side: int) -> Any:
        return lambda: draw.integers(0, 256, (EXAMPLES, side, side), np.uint8)

    symbols = list(range(10, 215))
    stream = {split: {"bytes": draw.choice(symbols, size).astype(np.uint8)} for split, size in STREAM.items()}
    write_set(folder, "enwik8", "language", stream, symbols=symbols)
    write_set(folder, "listops", "classification", classes(10, tokens=lambda: sequences(15)))
    binary = {"class_names": ["no", "yes"]}
    text = classes(2, ("train", "test"), tokens=lambda: sequences(256))
    write_set(folder, "text", "classification", text, **binary)
    pairs = classes(2, first=lambda: sequences(256), second=lambda: sequences(256))
    write_set(folder, "retrieval", "pairs", pairs, **binary)
    names = {"class_names": [str(number) for number in range(10)]}
    write_set(folder, "image", "classification", classes(10, pixels=pixels(32)), **names)
    write_set(folder, "pathfinder", "classification", classes(2, pixels=pixels(32)))
    write_set(folder, "pathx", "classification", classes(2, pixels=pixels(32)))
    for known in list_datasets():
        if isinstance(known.generator, Recall):
            length, vocabulary = known.generator.length, known.generator.vocab_size
            # Long ones take long, and two are as good as more.
            made = {
                split: {
                    "tokens": draw.integers(0, vocabulary, (2, length + 1), np.uint8),
                    "labels": draw.integers(0, vocabulary, 2),
                }
                for split in SPLITS
            }
            write_set(folder, known.name, "classification", made)


def process(target: Callable[..., None], *given: Any) -> BaseProcess:
    """A process of its own, which begins where all that takes long is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch._dynamo", "tcnca.cli", "tests.training.tiny"])
    return context.Process(target=target, args=given)


def ended(*children: BaseProcess) -> list[int | None]:
    """How processes end, when they have done all; those that wait for ever are killed."""
    for child in children:
        child.start()
    for child in children:
        child.join(PATIENCE)
        child.kill()
        child.join()
    return [child.exitcode for child in children]


def command(given: list[str], settings: Mapping[str, str] | None = None) -> None:
    """`tcnca`, as what a process does."""
    torch.set_num_threads(1)
    os.environ.update(settings or {})
    app(given)


def together(target: Callable[..., None], *given: Any, count: int = 2) -> list[int | None]:
    """How processes end that are started as `torchrun` starts them; each is told last who it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return ended(*(process(target, *given, settings if count > 1 else {}) for settings in ranks))


class Step(NamedTuple):
    """Something that is done to the file system."""

    event: str
    path: str
    writes: bool


class Witness:
    """Sees each step that a process takes to change a run's recipe or checkpoints, and strikes at one of them."""

    def __init__(self, folder: Path, instant: int, death: Death) -> None:
        self.folder, self.instant, self.death = folder, instant, death
        self.steps: list[Step] = []
        self.full = False

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(given[2], int) and bool(given[2] & (os.O_WRONLY | os.O_RDWR))
        if not writes and event not in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"):
            return
        path = os.fsdecode(given[0]) if isinstance(given[0], str | bytes | os.PathLike) else ""
        inside = path.removeprefix(f"{self.folder}/") if path.startswith(str(self.folder)) else ""
        # Whoever removes a whole folder names the files in it alone.
        alone = event in ("os.remove", "os.rmdir") and "/" not in path
        if alone or inside.startswith(("checkpoints", "recipe.yaml", ".recipe.yaml")):
            self.steps.append(Step(event, inside or path, writes))
            if len(self.steps) == self.instant + 1:
                self._strike()
        if self.full and inside and (writes or event == "os.mkdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _strike(self) -> None:
        self.full = self.death == "full"
        if self.death == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.death in ("within", "short"):
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if self.death == "within" else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (CUT, resource.RLIM_INFINITY))
