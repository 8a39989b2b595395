"""Tiny data sets and runs: all that training does, in a second or so."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from tcnca.cli import app
from tcnca.data import Batch, get_dataset, list_datasets
from tcnca.data.datasets.recall import Recall
from tcnca.data.schema import SPLITS, Column, Columns, Kind, Ragged
from tcnca.data.store import DatasetWriter
from tcnca.training import CheckpointManager, DistContext, Recipe, Trainer, load_recipe
from tcnca.training.logger import StepOutput

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
"""Killed before an operation, or in the middle of the next file; no space for files, or for the rest of the next."""
CUT = 10
"""Bytes of a file that are written before the process is killed."""
PATIENCE = 120.0
"""Time limit of a process, in seconds."""
EXAMPLES = 4
"""Examples of each split of a tiny data set."""
STREAM = {"train": 600, "validation": 150, "test": 150}
"""Bytes of the splits of a tiny EnWik8."""


class Clock:
    """A clock that only a test moves; it replaces the module `time` of another module."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    monotonic = time

    def tick(self, seconds: float) -> None:
        self.now += seconds


def merged(*changes: str) -> list[str]:
    """Return changes of which later ones replace earlier ones of the same key."""
    return list({change.partition("=")[0]: change for change in changes}.values())


def changed(*changes: str) -> list[str]:
    """Return the changes that make a recipe tiny, with others in their place."""
    return merged(*SMALL, *MODEL, *changes)


def recipe(*changes: str) -> Recipe:
    """Return a recipe that trains in a second."""
    return load_recipe("recall-small").override(changed(*changes))


class TinyTrainer(Trainer):
    """A silent trainer on the CPU that draws no curves, and whose steps and setup a test can change."""

    def __init__(self, folder: Path, wanted: Recipe | None = None, *, stop_after: int = 0, **more: Any) -> None:
        """`stop_after` sends SIGTERM during that step."""
        super().__init__(wanted or recipe(), folder, device="cpu", verbose=False, **more)
        self.stop_after = stop_after
        self.lrs: list[float] = []
        self.after_setup: Callable[[TinyTrainer], None] = lambda _: None
        self.before_step: Callable[[TinyTrainer], None] = lambda _: None

    def setup(self) -> None:
        super().setup()
        self.after_setup(self)

    def _draw_curves(self) -> None:
        """Save the time; the command draws them."""

    def _step(self, lr: float, batches: Future[list[Batch]]) -> StepOutput:
        self.lrs.append(lr)
        self.before_step(self)
        if self.state.step + 1 == self.stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
        return super()._step(lr, batches)


def fit(folder: Path, *changes: str, **more: Any) -> TinyTrainer:
    """Train a tiny recipe in this process."""
    trainer = TinyTrainer(folder, recipe(*changes), **more)
    trainer.fit()
    return trainer


def arguments(folder: Path, *more: str) -> list[str]:
    """Return the arguments of `tcnca` that train a tiny recipe."""
    changes = [word for word in more if "=" in word and not word.startswith("-")]
    options = [word for word in more if word not in changes]
    return ["train", "recall-small", "--device", "cpu", "--out", str(folder), *changed(*changes), *options]


def environment() -> dict[str, str]:
    """Return the environment of started processes, which share few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the weights of a model."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Check that weights are equal bit for bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0, msg=name)


def latest(folder: Path) -> Path:
    """Return the last checkpoint of a run."""
    found = CheckpointManager(folder / "checkpoints", 1, DistContext()).latest()
    assert found is not None
    return found


def log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """Return the losses of a run by step; one that was computed twice must be the same."""
    found: dict[int, float] = {}
    for line in log(folder):
        if "loss" in line:
            assert found.setdefault(line["step"], line["loss"]) == line["loss"], line
    return found


def write_set(folder: Path, name: str, kind: Kind, splits: Mapping[str, Columns], **facts: Any) -> None:
    """Store a data set as if it were prepared."""
    known = get_dataset(name)
    made = {} if known.generator is None else {"version": known.generator.version}
    with DatasetWriter(folder / name) as writer:
        for split, columns in splits.items():
            writer.append(split, columns)
        writer.commit({"dataset": name, "kind": kind, "title": known.title, **known.metadata, **made, **facts})


def write_every_set(folder: Path) -> None:
    """Write data sets of a few examples, with the kinds, vocabularies and classes of the published ones."""
    draw = np.random.default_rng(0)

    def sequences(vocab_size: int) -> Ragged:
        # Of different lengths, and some longer than a chunk.
        lengths = draw.permutation(np.linspace(20, 200, EXAMPLES).astype(int))
        return Ragged.from_bytes(draw.integers(0, vocab_size, length, np.uint8).tobytes() for length in lengths)

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
    """Return a process that is forked from a server, which has imported everything slow once."""
    context = multiprocessing.get_context("forkserver")
    slow = ["pytest", "torch._dynamo", "matplotlib.style", "matplotlib.backends.backend_agg"]
    slow += ["matplotlib.figure", "tensorboard.summary.writer.record_writer", "tensorboard.compat.proto.summary_pb2"]
    context.set_forkserver_preload([*slow, "tcnca.cli", "tests.training.tiny"])
    return context.Process(target=target, args=given)


def ended(*children: BaseProcess) -> list[int | None]:
    """Start processes and return their exit codes; those that do not end in time are killed."""
    try:
        for child in children:
            child.start()
        for child in children:
            child.join(PATIENCE)
    finally:
        # Also after Ctrl-C: the interpreter waits for its processes at the end.
        for child in children:
            if child.pid is not None:
                child.kill()
                child.join()
    return [child.exitcode for child in children]


def command(words: list[str]) -> None:
    """Run `tcnca`, in a process."""
    app(words)


def together(target: Callable[..., None], *given: Any, count: int = 2) -> list[int | None]:
    """Return the exit codes of processes that are started as by `torchrun`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return ended(*(process(_with_environment, settings if count > 1 else {}, target, *given) for settings in ranks))


def _with_environment(settings: Mapping[str, str], target: Callable[..., None], *given: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(settings)
    target(*given)


class Operation(NamedTuple):
    """A change of the file system."""

    event: str
    path: str
    writes: bool


class Saboteur:
    """Sees every change in a run directory, and kills the process or fills the disk at one of them."""

    def __init__(self, folder: Path, instant: int, death: Death) -> None:
        self.folder, self.instant, self.death = folder, instant, death
        self.operations: list[Operation] = []
        self.full = False

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(given[2], int) and bool(given[2] & (os.O_WRONLY | os.O_RDWR))
        if not writes and event not in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"):
            return
        path = os.fsdecode(given[0]) if isinstance(given[0], str | bytes | os.PathLike) else ""
        inside = path.removeprefix(f"{self.folder}/") if path.startswith(f"{self.folder}/") else ""
        # `rmtree` names the files in a directory without their parent.
        relative = event in ("os.remove", "os.rmdir") and "/" not in path
        if relative or (inside and not inside.startswith(("log.jsonl", "tensorboard", ".lock"))):
            self.operations.append(Operation(event, inside or path, writes))
            if len(self.operations) == self.instant + 1:
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
