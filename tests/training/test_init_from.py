"""`init_from`: runs that start from the weights of another model."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tcnca
from tcnca import ConfigError, Preprocessing
from tcnca.models import LanguageModelHeadConfig, ModelConfig
from tcnca.search.halving import recipe_model
from tcnca.training import Recipe, evaluate, evaluate_run, load_recipe
from tcnca.training.comparison import read_runs
from tcnca.training.evaluate import Score
from tcnca.training.logger import Meter, read_log
from tcnca.training.provenance import read_launches
from tcnca.training.report import comparable_validations
from tcnca.training.sweeps import plan
from tests.training.test_recipes import own_file
from tests.training.tiny import TinyTrainer, assert_same, latest, log, losses, weights

SIZES = {"num_layers": 2, "d_model": 16, "d_ff": 16, "d_key": 8, "d_value": 16, "chunk_size": 32}
STEPS = ["max_steps=8", "warmup_steps=1", "log_every=1", "eval.every=4", "checkpoint.every=4", "eval.max_batches=2"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A language model with a head of its own, and dropout."""
    torch.manual_seed(0)
    config = tcnca.preset("tcnca-linear-enwik8").model.override(
        {**SIZES, "vocab_size": 256, "dropout": 0.25, "tie_embeddings": False}
    )
    known = Preprocessing(task="language", byte_map=tuple(range(256)))
    return tcnca.save(tcnca.SequenceModel(config, known), tmp_path / "source")


def finetune(folder: Path, source: Path, *changes: str) -> Recipe:
    text = [f"data={own_file(folder, 'lm')}", "data.task.chunk_size=32", "batch.size=256"]
    return load_recipe("finetune").override([*text, *STEPS, f"init_from={source}", *changes])


def initialized(recipe: Recipe) -> tuple[tcnca.SequenceModel, bool]:
    """Return the model that a run starts with, and whether it has the head of the source."""
    task = recipe.build_task()
    model = tcnca.SequenceModel(recipe.model_config(task), task.preprocessing())
    return model, recipe.initialize(model, recipe.load_source())


def validations(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["value"]) for line in log(folder) if line.get("split") == "validation"]


def test_a_run_starts_from_the_weights_and_the_structure(tmp_path: Path, source: Path) -> None:
    model, same_head = initialized(finetune(tmp_path, source, "model.dropout=0.1"))
    before = tcnca.load(source)
    assert same_head
    assert_same(weights(model), weights(before))
    assert model.config == before.config.override({"dropout": 0.1})
    assert model.config.head == LanguageModelHeadConfig(tie_embeddings=False)


def test_the_model_is_validated_before_training_and_learns(tmp_path: Path, source: Path) -> None:
    trainer = TinyTrainer(tmp_path / "run", finetune(tmp_path, source, "lr=0.01"))
    result = trainer.fit()
    scores = dict(validations(tmp_path / "run"))
    eval_config = trainer.recipe.eval
    start = evaluate(tcnca.load(source), trainer.task, "validation", eval_config, max_batches=eval_config.batches)
    assert list(scores) == [0, 4, 8]
    assert scores[0] == pytest.approx(start.value, abs=1e-9)
    assert result.scores["validation"].value < scores[0] - 0.5


def test_weights_that_only_get_worse_are_not_the_best(tmp_path: Path, source: Path) -> None:
    TinyTrainer(tmp_path / "good", finetune(tmp_path, source, "lr=0.01")).fit()
    folder = tmp_path / "bad"
    TinyTrainer(folder, finetune(tmp_path, tmp_path / "good", "lr=3", "max_grad_norm=0")).fit()
    assert_same(weights(tcnca.load(folder, best=True)), weights(tcnca.load(tmp_path / "good")))


def test_the_last_model_of_a_short_run_can_be_the_best(tmp_path: Path, source: Path) -> None:
    """Validations during training read fewer batches than the last one, which is not comparable with them."""
    limits = ["eval.batch_size=1", "eval.batches=1", "eval.max_batches=3", "data.task.eval_length=35"]
    changes = ["lr=0.01", "eval.every=100", *limits]
    trainer = TinyTrainer(tmp_path / "run", finetune(tmp_path, source, *changes))
    trainer.fit()
    assert_same(weights(tcnca.load(tmp_path / "run", best=True)), weights(trainer.model))
    counts = [line["count"] for line in log(tmp_path / "run") if line.get("split") == "validation"]
    assert counts == [counts[0], counts[0], 3 * counts[0]]  # at the start, at the end, and of the score in the report
    assert [line["count"] for line in comparable_validations(read_log(tmp_path / "run"))] == counts[:2]


def test_the_first_validation_does_not_use_up_the_budget(tmp_path: Path, source: Path) -> None:
    """The schedule of a budget follows the time, and would begin after its warm-up."""
    trainer = TinyTrainer(tmp_path / "run", finetune(tmp_path, source), budget=1.0)
    validate = trainer._validate

    def slowly(meter: Any) -> None:
        time.sleep(1.0 if trainer.state.step == 0 else 0.0)
        validate(meter)

    trainer._validate = slowly  # type: ignore[method-assign]
    trainer.fit()
    assert trainer.state.step > 0
    assert trainer.lrs[0] < 1e-4


def test_the_first_validation_is_not_in_the_speed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = TinyTrainer(tmp_path / "run", finetune(tmp_path, source))
    evaluate, pause, paused = trainer._evaluate, Meter.pause, list[bool]()

    @contextlib.contextmanager
    def counted(meter: Meter) -> Iterator[None]:
        paused.append(True)
        with pause(meter):
            yield
        paused.pop()

    def checked(*arguments: Any) -> Score:
        assert paused or trainer.state.step == 8, "only the evaluation at the end is after the last log line"
        return evaluate(*arguments)

    monkeypatch.setattr(Meter, "pause", counted)
    trainer._evaluate = checked  # type: ignore[assignment, method-assign]
    trainer.fit()


def test_a_source_without_weights_is_named(tmp_path: Path, source: Path) -> None:
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"^init_from: .*model\.safetensors"):
        TinyTrainer(tmp_path / "run", finetune(tmp_path, source)).fit()


def test_a_bidirectional_source_of_a_language_model_is_named(tmp_path: Path) -> None:
    data = [f"data={own_file(tmp_path, 'classify')}", "batch.size=4", "model.causal=false"]
    sizes = [f"model.{key}={value}" for key, value in SIZES.items()]
    TinyTrainer(tmp_path / "first", load_recipe("classify").override([*data, *STEPS, *sizes])).fit()
    with pytest.raises(ConfigError, match=r"^init_from: expected a causal model for a language model, got a bidirect"):
        initialized(finetune(tmp_path, tmp_path / "first"))


def test_a_sweep_checks_the_source(tmp_path: Path, source: Path) -> None:
    text = [f"data={own_file(tmp_path, 'lm')}", "data.task.chunk_size=32", f"init_from={source}"]
    assert len(plan("finetune", [*text, "lr=1e-4,1e-3"], tmp_path / "rates").points) == 2
    with pytest.raises(ConfigError, match=r"^d_ff=8: init_from: .*: d_ff: expected 8, as the new model has, got"):
        plan("finetune", [*text, "d_ff=8,16"], tmp_path / "sizes")
    with pytest.raises(ConfigError, match=r"^--train: expected a recipe without init_from"):
        recipe_model("finetune", text, "cpu")


def test_files_of_recipes_replace_the_model_of_those_they_extend(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: lm\ninit_from: pretrained\nmodel: {dropout: 0.2}\n")
    (tmp_path / "next.yaml").write_text("extends: mine.yaml\nmodel: {ff_dropout: 0.1}\n")
    recipe = load_recipe(str(tmp_path / "next.yaml"))
    assert recipe.for_device("cpu").model == {"dropout": 0.2, "ff_dropout": 0.1}
    # Another model to start from keeps what is changed.
    assert recipe.override(["init_from=runs/lm"]).model == recipe.model
    assert recipe.batch == load_recipe("lm").batch


def test_the_pretrained_model_has_two_names() -> None:
    recipe = load_recipe("finetune")
    assert recipe.override(["init_from=pretrained/enwik8"]).model_config() == recipe.model_config()


def test_evaluation_does_not_start_from_another_model(tmp_path: Path, source: Path) -> None:
    TinyTrainer(tmp_path / "run", finetune(tmp_path, source)).fit()
    with pytest.raises(ConfigError, match=r"^init_from: is fixed by training"):
        evaluate_run(tmp_path / "run", ["init_from=pretrained"], verbose=False)


def test_the_time_to_a_score_is_zero_where_the_start_has_it(tmp_path: Path, source: Path) -> None:
    TinyTrainer(tmp_path / "run", finetune(tmp_path, source)).fit()
    (run,) = read_runs([tmp_path / "run"])
    assert run.seconds_to(100.0) == 0.0


@pytest.mark.parametrize("stop", [0, 1, 6])
def test_a_stopped_run_resumes_exactly_and_without_the_source(tmp_path: Path, source: Path, stop: int) -> None:
    recipe, folder = finetune(tmp_path, source), tmp_path / "run"
    whole = TinyTrainer(tmp_path / "whole", recipe)
    whole.fit()
    first = TinyTrainer(folder, recipe, stop_after=stop)
    if stop == 0:  # in the middle of the first step
        first.before_step = lambda _: pytest.fail("killed", pytrace=False)
        with pytest.raises(pytest.fail.Exception):
            first.fit()
    else:
        first.fit()
    assert latest(folder).name == f"step-{stop:09}"
    launches = read_launches(folder)
    assert launches[0].init_weights == hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    shutil.rmtree(source)  # everything is in the checkpoint
    resumed = TinyTrainer(folder, recipe, resume=True)
    resumed.fit()
    assert_same(weights(resumed.model), weights(whole.model))
    assert losses(folder) == losses(tmp_path / "whole")
    assert validations(folder) == validations(tmp_path / "whole")


def test_another_head_is_new(tmp_path: Path, source: Path) -> None:
    data = [f"data={own_file(tmp_path, 'classify')}", "batch.size=4"]
    recipe = load_recipe("classify").override([*data, *STEPS, f"init_from={source}"])
    (model, same_head), before = initialized(recipe), weights(tcnca.load(source))
    assert not same_head
    assert model.config.causal
    assert isinstance(model.config.head, tcnca.ClassifierHeadConfig)
    body = {name: tensor for name, tensor in weights(model).items() if not name.startswith("head.")}
    assert_same(body, {name: before[name] for name in body})
    first = TinyTrainer(tmp_path / "first", recipe)
    first.fit()
    # The head of the same classes is taken over, also with other settings.
    again, same_head = initialized(recipe.override([f"init_from={tmp_path / 'first'}", "head.pooling=last"]))
    assert same_head
    assert_same(weights(again), weights(first.model))


def test_values_are_standardized_by_the_new_data(tmp_path: Path) -> None:
    def recipe(name: str, scale: float, *changes: str) -> Recipe:
        values = np.random.default_rng(0).normal(size=(40, 30, 2)) * scale
        np.savez(tmp_path / f"{name}.npz", values=values, targets=values.mean((1, 2)))
        sizes = [f"{key}={value}" for key, value in SIZES.items() if key != "chunk_size"]
        return load_recipe("regress").override(
            [f"data={tmp_path / name}.npz", "batch.size=4", *STEPS, *sizes, *changes]
        )

    first = TinyTrainer(tmp_path / "first", recipe("one", 1.0))
    first.fit()
    other = recipe("hundred", 100.0).override([f"init_from={tmp_path / 'first'}"])
    second, _ = initialized(other)
    fresh, before = weights(tcnca.SequenceModel(second.config, second.preprocessing)), weights(first.model)
    assert not torch.allclose(fresh["embedding.standardize.std"], before["embedding.standardize.std"], rtol=0.5)
    expected = {name: fresh[name] if ".standardize." in name else tensor for name, tensor in before.items()}
    assert_same(weights(second), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["init_from=nothing"], r"^init_from: nothing: expected a run directory or a saved model, got no such folder"),
        (
            ["num_layers=3"],
            r"^init_from: .*source: num_layers: expected 3, as the new model has, got 2; expected data of the kind",
        ),
        (
            ["d_ff=8"],
            r"^init_from: .*: d_ff: expected 8, as the new model has, got 16; expected data of the kind that it was",
        ),
        (["ngram_sizes=[2]"], r"^init_from: .*: input\.ngram_sizes: expected \[2\], as the new model has, got \[\];"),
        (["model=mega-text"], r"^model\.preset: expected none with init_from, .*, got mega-text"),
        (["model.d_modle=3"], r"d_modle: did you mean model\.d_model\?"),
        (["model.dropout=2"], r"^model\.dropout: expected a number in \[0, 1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_does_not_fit_is_named(tmp_path: Path, source: Path, changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TinyTrainer(tmp_path / "run", finetune(tmp_path, source, *changes)).fit()
    assert not (tmp_path / "run").exists()


def test_tokens_of_other_bytes_are_refused(tmp_path: Path, source: Path) -> None:
    model = tcnca.load(source)
    model.preprocessing = Preprocessing(task="language", byte_map=tuple(range(255, -1, -1)))
    tcnca.save(model, source)
    with pytest.raises(
        ConfigError, match=r"^init_from: .*: expected a model with the tokens of the data, got one with"
    ):
        TinyTrainer(tmp_path / "run", finetune(tmp_path, source)).fit()


def test_the_model_of_a_recipe_is_replaced() -> None:
    recipe = load_recipe("lm").override(["init_from=pretrained", "model.dropout=0.2"])
    assert recipe.model == {"dropout": 0.2}
    assert recipe.for_device("cpu").model == {"dropout": 0.2}
    config: ModelConfig = recipe.for_device("cpu").model_config()
    assert config == tcnca.load().config.override({"dropout": 0.2})
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    plain: Any = load_recipe("lm").override(["init_from=null"])
    assert plain == load_recipe("lm")
