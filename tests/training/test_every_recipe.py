"""Every recipe fits its data and builds; one of each family is trained at full size, on tiny data."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.data import Task
from tcnca.layers import TCNConfig
from tcnca.recipes import builtin
from tcnca.training import Recipe, load_recipe
from tests.training.test_recipes import own_file
from tests.training.tiny import STREAM, TinyTrainer, assert_same, losses, weights, write_every_set

# Each mixer, head, input, norm and attention, the smallest that has it; the others only with `make test-all`.
TRAINED = {
    "enwik8-small",
    "listops-tcnca",
    "text-mega",
    "retrieval-tcnca-linear",
    "pathx-tcn-mlp",
    "recall-64-20-tcnca-simple",
    "listops-s4d",
    "listops-s5",
    "listops-lru",
    "listops-sgconv",
    "retrieval-cdil",
    "retrieval-transformer",
    "lm",
    "forecast",
    "regress",
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_every_set(folder)
    return folder


def on_tiny_data(name: str, sets: Path) -> Recipe:
    """Return the recipe with other data and fewer examples in a batch."""
    wanted = load_recipe(name).for_device("cuda")
    own = [] if wanted.data.source else [f"data={own_file(sets, name)}"]
    tokens = {"enwik8": STREAM["train"], "lm": 4 * 1024, "finetune": 4 * 1024}
    size = next((size for key, size in tokens.items() if name.startswith(key)), 1 if "8192" in name else 2)
    # The state of a convolution is as long as its receptive field, for every row, however short that is.
    few = ["data.task.segments=3", "eval.batch_size=3"] if name.startswith("enwik8") else []
    if name in ("lm", "finetune"):
        few = ["precision=float32", *(["num_layers=2"] if name == "lm" else [])]
    return wanted.override([*own, *few, f"data.folder={sets}", f"batch.size={size}"])


def without_gradient(task: Task, model: tcnca.SequenceModel, wanted: Recipe) -> set[str]:
    """Parameters that cannot learn: those of the scores, where the only token that counts is alone in its chunk."""
    attention, last = model.config.attention, f"layers.{model.config.num_layers - 1}."
    if not wanted.data.source.startswith("recall") or attention is None:
        return set()
    if attention.chunk_size is None or task.batch(0, wanted.batch.size).inputs.shape[1] % attention.chunk_size != 1:
        return set()
    names = ("attention.bias", "gamma", "beta") if model.config.gated else ("attention.bias",)
    return {name for name, _ in model.named_parameters() if name.startswith(last) and name.endswith(names)}


def answers(name: str, task: Task) -> int:
    """Count the answers in the test split."""
    if name == "forecast":
        return np.asarray(task.data.columns("test")["values"])[:, 1:].size
    return task.sizes["test"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in TRAINED else pytest.mark.slow) for name in builtin()]
)
def test_it_trains_and_is_evaluated(name: str, sets: Path, tmp_path: Path) -> None:
    steps = ["max_steps=2", "warmup_steps=1", "log_every=1", "eval.every=0", "checkpoint.every=0"]
    wanted = on_tiny_data(name, sets).override(steps)
    trainer = TinyTrainer(tmp_path, wanted)
    score = trainer.fit().scores["test"]
    assert all(math.isfinite(loss) for loss in losses(tmp_path).values())
    model = trainer.model
    states = {parameter: state for each in trainer.optimizers for parameter, state in each.state.items()}
    moments = {  # the second moment of AdamW, the momentum of Muon
        key: states[each].get("exp_avg_sq", states[each].get("momentum")) for key, each in model.named_parameters()
    }
    idle = {key for key, moment in moments.items() if not moment.any()}
    assert idle == without_gradient(trainer.task, model, wanted)
    assert all(torch.isfinite(tensor).all() for tensor in weights(model).values())
    assert math.isfinite(score.value)
    assert score.count == answers(name, trainer.task)
    assert_same(weights(tcnca.load(tmp_path)), weights(model))


@pytest.mark.parametrize("name", builtin())
def test_it_fits_its_data_and_builds(name: str, sets: Path) -> None:
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
    with torch.device("meta"):
        assert tcnca.SequenceModel(config).config == config


@pytest.mark.parametrize("name", [name for name in builtin() if name.startswith("enwik8")])
def test_enwik8_is_read_as_published(name: str) -> None:
    """Training rows are as long as several chunks of the attention; evaluation has longer chunks and carries state."""
    wanted = load_recipe(name)
    attention, options = wanted.model_config().attention, wanted.data.task
    if "transformer" in name:
        xl = name.endswith("xl")
        assert attention is not None
        assert (options["chunk_size"], attention.chunk_size) == (512, 512 if xl else None)
        assert wanted.batch.size == 22 * 512
        assert options["chunks_per_row"] == [11 if xl else 1]
        assert (options["eval_length"], options["carry_state"]) == ((12_288, True) if xl else (512, False))
        return
    assert attention is None or attention.chunk_size == options["chunk_size"]
    if name.endswith(("small", "short")):
        return
    assert options["carry_state"]
    assert wanted.eval.batch_size == 50
    if name.startswith("enwik8-fast"):
        assert (options["eval_length"], wanted.eval.chunk_size) == (16_384, 8192)
        mixer = wanted.model_config().mixer
        # Most tokens of a row have what a TCN reads before them.
        assert not isinstance(mixer, TCNConfig) or mixer.receptive_field < options["chunk_size"] / 2
        return
    if name == "enwik8-pretrained":  # what is loaded is what is trained and evaluated
        assert wanted.eval.chunk_size == options["chunk_size"] == 2048
        return
    assert options["eval_length"] == 12_288
    assert options["chunk_size"] == 2048
    assert wanted.eval.chunk_size == (None if attention is None else 4096)
    assert wanted.batch.size % (4 * options["chunk_size"]) == 0


def refused(name: str, folder: Path, *changes: str) -> str:
    """Return what the command says of a run that it does not begin."""
    done = CliRunner().invoke(app, ["train", name, "--device", "cpu", "--out", str(folder / "run"), *changes])
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    assert done.output.splitlines()[-1].startswith("Error: ")
    assert not list(folder.glob("run/checkpoints/*"))
    return done.output


@pytest.mark.parametrize("name", ["enwik8-tcnca", "text-mega", "classify"])
def test_missing_data_is_named(name: str, tmp_path: Path) -> None:
    source = load_recipe(name).data.source
    message = refused(name, tmp_path, f"data.folder={tmp_path}")
    if source:
        assert f"tcnca data prepare {source} --out {tmp_path}" in message
    else:
        assert "data.source: expected a data set or a file, got nothing; give data=NAME or data=FILE" in message
        assert "nothing.csv" in refused(name, tmp_path, f"data={tmp_path / 'nothing.csv'}")


def test_wrong_keys_and_values_are_named(tmp_path: Path) -> None:
    assert "did you mean batch.size?" in refused("recall-small", tmp_path, "batch.sise=1")
    assert "model.num_layers: " in refused("recall-small", tmp_path, "num_layers=deep")
