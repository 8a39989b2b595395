"""Every recipe, as it is, trains, is evaluated, saved, and gone on with; only its data is tiny."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.data import Task
from tcnca.training import Processes, Recipe, Run, Watch, load_recipe, recipes
from tests.training.test_recipes import own_file
from tests.training.tiny import STREAM, assert_same, weights, write_every_set


class Two(Watch):
    """Stops a run after two updates as a user would, so that its schedule stays as it is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, None)
        self.lines: list[Mapping[str, Any]] = []

    def log(self, numbers: Mapping[str, Any]) -> None:
        self.lines.append(numbers)
        if numbers["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_every_set(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    # Optimizers of full size are not to be left lying about.
    shutil.rmtree(tmp_path, ignore_errors=True)


def on_tiny_data(name: str, sets: Path) -> Recipe:
    """The recipe with other data, fewer examples in a batch, and a line of the log for each update; compiled it would
    need minutes."""
    wanted = load_recipe(name)
    own = [] if wanted.data.source else [f"data={own_file(sets, name)}"]
    tokens = {"enwik8": STREAM["train"], "lm": 4 * 1024}
    size = next((size for key, size in tokens.items() if name.startswith(key)), 1 if "8192" in name else 2)
    # The state of a convolution is as long as what it sees, for every row, however short that is.
    few = ["data.task.segments=3", "eval.batch_size=3"] if name.startswith("enwik8") else []
    return wanted.override([*own, *few, f"data.folder={sets}", f"batch.size={size}", "log_every=1", "compile=false"])


def published_rate(wanted: Recipe, step: int) -> float:
    """The learning rate of one of the first updates, all of which are in the warm-up."""
    start, peak, schedule = wanted.schedule.warmup_start, wanted.optimizer.lr, wanted.schedule
    assert step < schedule.warmup_steps
    return start + (peak - start) * (step / schedule.warmup_steps) ** schedule.warmup_power


def idle(task: Task, model: tcnca.SequenceModel, wanted: Recipe) -> set[str]:
    """Parameters that cannot learn: those of the scores, where the only token that counts is alone in its chunk."""
    attention, last = model.config.attention, f"layers.{model.config.num_layers - 1}.block."
    if not wanted.data.source.startswith("recall") or attention is None:
        return set()
    if attention.chunk_size is None or task.batch(0, wanted.batch.size).inputs.shape[1] % attention.chunk_size != 1:
        return set()
    names = {"attention.bias", "gamma", "beta"} if model.config.gated else {"attention.bias"}
    return {last + name for name in names}


def counted(name: str, task: Task) -> int:
    """Answers in the test split."""
    if name == "forecast":
        return np.asarray(task.data.columns("test")["values"])[:, 1:].size
    return task.sizes["test"]


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
def test_it_trains_and_is_kept(name: str, sets: Path, folder: Path) -> None:
    wanted = on_tiny_data(name, sets)
    watch = Two(folder)
    one = Run(wanted, folder, Processes(), watch)
    before = weights(one.model)
    kinds: set[torch.dtype] = set()
    one.model.register_forward_hook(lambda _, inputs, output: kinds.add(output.logits.dtype))
    result = one.train()
    assert (result.stopped, result.step) == ("SIGTERM", 2)
    assert [line["rate"] for line in watch.lines] == pytest.approx([published_rate(wanted, n) for n in range(2)])
    assert all(math.isfinite(line[value]) for line in watch.lines for value in ("loss", "norm"))
    assert kinds == {torch.bfloat16 if wanted.runtime.precision == "bf16" else torch.float32}

    trained = weights(one.model)
    assert all(tensor.dtype == before[key].dtype for key, tensor in trained.items())
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
    assert any(not torch.equal(tensor, before[key]) for key, tensor in trained.items())
    states = {key: one.optimizer.state[parameter] for key, parameter in one.model.named_parameters()}
    assert {key for key, state in states.items() if not state["exp_avg_sq"].any()} == idle(one.task, one.model, wanted)
    assert {float(state["step"]) for state in states.values()} == {2.0}

    latest = one.checkpoints.latest()
    assert latest is not None
    loaded = tcnca.load(latest)
    assert loaded.config == one.model.config
    assert_same(weights(loaded), trained)

    again = Run(wanted, folder, Processes(), Watch(folder, None))
    again.resume()
    assert again.progress.step == 2
    assert_same(weights(again.model), trained)
    for key, parameter in again.model.named_parameters():
        assert_same(again.optimizer.state[parameter], states[key])
    score = again.evaluate("test")
    assert math.isfinite(score.value)
    assert score.count == counted(name, again.task)


@pytest.mark.parametrize("name", [name for name in recipes() if load_recipe(name).model.get("preset")])
def test_its_preset_fits_the_task(name: str, sets: Path) -> None:
    wanted = on_tiny_data(name, sets)
    task = wanted.build_task()
    config = wanted.model_config(task)
    assert config.causal == task.causal
    assert isinstance(config.head, type(task.head))
    if isinstance(task.input, tcnca.TokenInputConfig):
        assert isinstance(config.input, tcnca.TokenInputConfig)
        assert config.input.vocab_size >= task.input.vocab_size
    else:
        assert config.input == task.input
    assert getattr(config.head, "num_classes", 0) == getattr(task.head, "num_classes", 0)


@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("enwik8")])
def test_bytes_are_read_as_was_published(name: str) -> None:
    """Training in runs of chunks as long as those of the attention; evaluation with longer ones, 12,288 bytes a call,
    the state carried on inside 50 segments."""
    wanted = load_recipe(name)
    attention = (
        tcnca.preset(wanted.model["preset"])
        .model.override(**{key: value for key, value in wanted.model.items() if key != "preset"})
        .attention
    )
    options = wanted.data.task
    assert attention is None or attention.chunk_size == options["chunk_size"]
    if name.endswith(("small", "short")):
        return
    assert (options["chunk_size"], options["eval_length"], options["carry_state"], wanted.eval.batch_size) == (
        2048,
        12_288,
        True,
        50,
    )
    assert wanted.eval.chunk_size == (None if attention is None else 4096)
    assert options["eval_length"] % (wanted.eval.chunk_size or 1) == 0
    assert wanted.batch.size % (4 * options["chunk_size"]) == 0


def refused(name: str, folder: Path, *changes: str) -> str:
    """What the command says of a run that it does not begin."""
    done = CliRunner().invoke(app, ["train", name, "--device", "cpu", "--out", str(folder / "run"), *changes])
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    assert done.output.splitlines()[-1].startswith("Error: ")
    assert not list(folder.glob("run/checkpoints/*"))
    return done.output


@pytest.mark.parametrize("name", [name for name in recipes() if not load_recipe(name).data.stream])
def test_data_that_is_missing(name: str, tmp_path: Path) -> None:
    source = load_recipe(name).data.source
    message = refused(name, tmp_path, f"data.folder={tmp_path}")
    if source:
        assert f"{source}: is not prepared in {tmp_path}; `tcnca data prepare {source} --out {tmp_path}`" in message
    else:
        assert "data.source: got nothing" in message
        assert "give data=NAME or data=FILE" in message
        assert "nothing.csv" in refused(name, tmp_path, f"data={tmp_path / 'nothing.csv'}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lerning_rate=1", "lerning_rate: no such key of a recipe; did you mean optimizer.lr?"),
        ("batch.sise=1", "batch.sise: no such key of a recipe; did you mean batch.size?"),
        ("max_steps=abc", "schedule.max_steps: got 'abc', allowed is a whole number"),
        ("max_steps=2.5", "schedule.max_steps: got 2.5, allowed is a whole number"),
        ("max_steps=true", "schedule.max_steps: got True, allowed is a whole number"),
        ("max_steps=", "schedule.max_steps: got None, allowed is a whole number"),
        ("lr=[1]", "optimizer.lr: got [1], allowed is a number"),
        ("lr={a: 1}", "optimizer.lr: got {'a': 1}, allowed is a number"),
        ("lr=.nan", "optimizer.lr: got nan, allowed is a number"),
        ("betas=0.9", "optimizer.betas: got"),
        ("betas=[a, b]", "optimizer.betas: got"),
        ("betas=null", "optimizer.betas: got"),
        ("precision=fp16", "runtime.precision: got 'fp16', allowed are float32, bf16"),
        ("activation_checkpointing=often", "runtime.activation_checkpointing: got 'often', allowed are True and False"),
        ("checkpoint.minutes=never", "checkpoint.minutes: got 'never', allowed is a number"),
        ("stream=maybe", "data.stream: got 'maybe', allowed are True and False"),
        ("data=[1]", "data.source: got [1], allowed is the name of a set, or a file or folder"),
        ("data.folder=3", "data.folder: got 3"),
        ("data.task=3", "data.task: got 3"),
        ("data.custom=null", "data.custom: got None"),
        ("data.task.sise=3", "sise: no such option of recall-64-10"),
        ("model=3", "preset: got 3, allowed are"),
        ("model=tcnca-enwik", "did you mean tcnca-enwik8?"),
        ("num_layers=deep", "layers: got 'deep', allowed is a whole number"),
        ("model.chunk_size=0", "chunk: got 0, allowed is a whole number of at least 1"),
        ("vocab_size=4", "got a token outside the vocabulary, allowed are 0 to 3"),
    ],
)
def test_keys_and_values_that_are_wrong(tmp_path: Path, change: str, message: str) -> None:
    assert message in refused("recall-small", tmp_path, change)
