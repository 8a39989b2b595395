"""A run gives the same result however it is interrupted, and keeps what it promises."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import io
import json
import os
import pickle
import shutil
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from typer.testing import CliRunner, Result

import tcnca
from tcnca.cli import app
from tcnca.cli import train as cli_train
from tcnca.errors import CheckpointError, ConfigError, DataError, TrainingError
from tcnca.files import file_lock
from tcnca.training import DistContext, Score, Trainer, distributed, evaluate, load_recipe, read_log, trainer
from tcnca.training.checkpoint import read_state
from tcnca.training.distributed import parallelize
from tcnca.training.logger import LogConsole
from tests.examples import VOCABULARY, small_model
from tests.training.tiny import Clock, TinyTrainer, arguments, assert_same, changed, fit, latest, recipe, weights


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize(
    ("after", "changes"),
    [
        (1, []),
        (5, ["grad_accum_steps=3"]),
        (7, ["initial_size=4", "grow_at=0.5"]),
        (8, ["model=mega-recall-64", "optimizer=muon", "muon_beta2=0.9"]),
    ],
    ids=str,
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, after: int, changes: list[str]) -> None:
    whole = fit(tmp_path / "whole", *changes)
    first = TinyTrainer(tmp_path / "parts", recipe(*changes), stop_after=after)
    result = first.fit()
    assert (result.stopped, result.step) == ("SIGTERM", after)
    second = TinyTrainer(tmp_path / "parts", recipe(*changes), resume=True)
    assert second.fit().step == 12
    assert len(second.lrs) == 12 - after
    assert_same(weights(second.model), weights(whole.model))
    # The saved model is the trained one, in the run directory and in its last checkpoint.
    for place in (tmp_path / "parts", latest(tmp_path / "parts")):
        assert_same(weights(tcnca.load(place)), weights(whole.model))


def test_stopped_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer, too, continues as one that has done nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "catch_signals", lambda: contextlib.nullcontext(["SIGTERM"]))
        assert TinyTrainer(tmp_path / "parts").fit().step == 0
    assert_same(weights(fit(tmp_path / "parts", resume=True).model), weights(fit(tmp_path / "whole").model))


@pytest.mark.parametrize("after", [4, 7])
def test_log_lines_do_not_depend_on_where_a_run_stopped(tmp_path: Path, after: int) -> None:
    changes = ("log_every=5", "checkpoint.every=0", "eval.every=0", "max_steps=13")
    fit(tmp_path / "whole", *changes)
    fit(tmp_path / "parts", *changes, stop_after=after)
    fit(tmp_path / "parts", *changes, resume=True)
    logs = [
        {line["step"]: (line["loss"], line["grad_norm"], line["tokens"]) for line in read_log(folder) if "loss" in line}
        for folder in (tmp_path / "whole", tmp_path / "parts")
    ]
    assert list(logs[0]) == [5, 10, 13]
    assert logs[0] == logs[1]


def test_several_optimizers_are_saved_and_restored(tmp_path: Path) -> None:
    """Each has its own state and factor of the learning rate."""

    def split(one: TinyTrainer) -> None:
        matrices, *others = one.optimizers[0].param_groups
        groups = [{"params": group["params"], "lr_mult": 1.0} for group in others]
        sgd = torch.optim.SGD([{"params": matrices["params"], "lr_mult": 0.1}], lr=1e-3, momentum=0.9)
        one.optimizers = [torch.optim.AdamW(groups, lr=1e-3), sgd]

    models = []
    for name, stops in (("whole", [0]), ("parts", [5, 9, 0])):
        for number, stop_after in enumerate(stops):
            one = TinyTrainer(tmp_path / name, stop_after=stop_after, resume=number > 0)
            one.after_setup = split
            one.fit()
        adam, sgd = one.optimizers
        assert sgd.param_groups[0]["lr"] == pytest.approx(0.1 * adam.param_groups[0]["lr"])
        models.append(weights(one.model))
    assert_same(*models)


@pytest.mark.parametrize("timed", [False, True], ids=["steps", "seconds"])
def test_batches_grow_and_continue_in_the_data(tmp_path: Path, clock: Clock, timed: bool) -> None:
    trainer = TinyTrainer(
        tmp_path / "run", recipe("initial_size=4", "grow_at=0.5", "max_steps=6"), budget=60.0 if timed else None
    )
    trainer.before_step = lambda _: clock.tick(10.0)
    trainer.after_setup = lambda one: setattr(one.task, "batch", functools.partial(record, one.task.batch))
    read: list[tuple[int, int]] = []

    def record(batch: Any, index: int, size: int, *more: Any) -> Any:
        read.append((size, index))
        return batch(index, size, *more)

    assert trainer.fit().step == 6
    small, large = [each for each in read if each[0] == 4], [each for each in read if each[0] == 12]
    assert read == small + large
    # The time is known a step later than the number of steps, as the next batch is loaded meanwhile.
    assert small == [(4, index) for index in range(4 if timed else 3)]
    # Three batches of 4 are one of 12, and of a fourth one two thirds of a batch are left out.
    first = 2 if timed else 1
    assert large == [(12, first + index) for index in range(len(large))]
    assert trainer.state.grown_at == len(small)


def test_accumulation_equals_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    first, *others = (
        fit(tmp_path / n, "model.dropout=0", f"grad_accum_steps={n}", "max_steps=4", "eval.every=0") for n in "134"
    )
    for other in others:
        for name, tensor in weights(first.model).items():
            torch.testing.assert_close(weights(other.model)[name], tensor, rtol=1e-4, atol=1e-6)


def test_activation_checkpointing_changes_nothing(tmp_path: Path) -> None:
    plain, again = (fit(tmp_path / on, f"activation_checkpointing={on}", "max_steps=4") for on in ("false", "true"))
    assert_same(weights(plain.model), weights(again.model))


def test_cheap_activation_checkpointing_is_per_run_and_needs_compiled_layers() -> None:
    kept = dataclasses.replace(recipe().runtime, compile=True)
    cheap = dataclasses.replace(kept, activation_checkpointing="cheap")
    for runtime, share in ((kept, 1.0), (cheap, 0.9), (kept, 1.0)):
        parallelize(small_model(), runtime, DistContext())
        assert torch._functorch.config.activation_memory_budget == share
    with pytest.raises(ConfigError, match=r"runtime\.activation_checkpointing"):
        recipe("activation_checkpointing=cheap")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_are_compiled_once_for_rows_of_all_lengths(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    runtime = dataclasses.replace(recipe().runtime, compile=True, activation_checkpointing=checkpointing)
    model = small_model("tcnca", torch.float32, num_layers=3)
    plain = copy.deepcopy(model)
    compiled = parallelize(model, runtime, DistContext(), dynamic=True)
    for shape in ((2, 24), (3, 16), (4, 12)):
        x = torch.randint(VOCABULARY, shape)
        torch.testing.assert_close(compiled(x, return_state=False), plain(x, return_state=False))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    # A copy has its own weights, and can be saved.
    x = torch.randint(VOCABULARY, (2, 8))
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with torch.no_grad():
        model.embedding.weight.zero_()
        for parameter in model.layers.parameters():
            parameter.zero_()
        torch.testing.assert_close(copied(x, return_state=False), plain(x, return_state=False))


@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_kernels_are_compiled_in_the_background_without_changing_the_run(
    tmp_path: Path, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a layer runs forward and backward, with shapes of the first batch."""
    seen: list[tuple[bool, torch.Size]] = []

    def record(layer: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if threading.current_thread() is not threading.main_thread():
            inputs[0].register_hook(lambda grad: seen.append((layer.training, grad.shape)))

    def preload(one: TinyTrainer) -> None:
        if one.state.step == 0:
            one.model.layers[0].register_forward_pre_hook(record)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "set_rng_state", lambda state: pytest.fail("the thread sets the random state"))
                one._preload_kernels(one._load_batches(12, 0)[0]).join()

    changes = ("model.dropout=0.1", "max_steps=3", f"activation_checkpointing={checkpointing}")
    one = TinyTrainer(tmp_path / "preloaded", recipe(*changes))
    one.before_step = preload
    one.fit()
    assert seen == [(False, torch.Size([*one._load_batches(12, 0)[0].inputs.shape, one.model.config.d_model]))]
    plain = fit(tmp_path / "plain", *changes)
    assert_same(weights(one.model), weights(plain.model))


def test_compiled_code_is_kept_for_later_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setattr(distributed, "_start_compiler", lambda: None)
    monkeypatch.setenv("TCNCA_CACHE", str(tmp_path / "cache"))
    for chosen in (tmp_path / "chosen", None):
        if chosen is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, str(chosen))
        distributed.preload_compiler()
        assert Path(os.environ[name]) == (chosen or tmp_path / "cache" / "inductor")
    # Where nothing can be written, PyTorch's own default remains.
    monkeypatch.delenv(name)
    monkeypatch.setenv("TCNCA_CACHE", os.devnull)
    distributed.preload_compiler()
    assert not os.environ.get(name, "").startswith((str(tmp_path), os.devnull))


@pytest.mark.parametrize("options", [[], ["--device", "cpu"], ["--print-config"]], ids=str)
def test_a_gpu_is_initialized_only_to_train_on_it(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called = threading.Event()
    monkeypatch.setattr(cli_train, "_create_gpu_context", called.set)
    invoke("train", "recall-small", "no_such_key=1", *options)
    assert called.wait(0.0 if options else 10.0) == (not options)


def test_the_context_of_a_gpu_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    driver = types.SimpleNamespace(
        cuInit=lambda flags: calls.append(("init", flags)),
        cuDevicePrimaryCtxRetain=lambda context, device: calls.append(("retain", device)),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("LOCAL_RANK", "3")
    cli_train._create_gpu_context()
    assert calls == [("init", 0), ("retain", 3)]

    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    cli_train._create_gpu_context()


def test_last_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    one = fit(tmp_path, "checkpoint.every=2", "checkpoint.keep=2")
    best = one.checkpoints.best()
    assert best is not None
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert {"step-000000010", "step-000000012", best.name, "best.json"} == kept
    # The best checkpoint has the weights that were validated.
    score = evaluate(tcnca.load(best), one.task, "validation")
    assert score.value == pytest.approx(one.checkpoints.best_score())
    # One that is gone is replaced.
    for place in (tmp_path / "checkpoints").glob("step-*"):
        shutil.rmtree(place)
    assert one.checkpoints.best_score() is None
    (tmp_path / "result.json").unlink()
    assert fit(tmp_path, "checkpoint.every=2", "checkpoint.keep=2", resume=True).checkpoints.best() is not None


@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_a_non_finite_loss_stops_the_run_or_is_skipped(tmp_path: Path, nonfinite: str) -> None:
    # Logged so rarely that the validation after the step comes first.
    one = TinyTrainer(tmp_path, recipe(f"nonfinite={nonfinite}", "log_every=50"))

    def poison(one: TinyTrainer) -> None:
        factor = torch.nan if one.state.step == 5 else 1.0
        one.task.loss = lambda logits, batch: type(one.task).loss(one.task, logits, batch) * factor  # type: ignore[method-assign]

    one.before_step = poison
    if nonfinite == "skip":
        one.fit()
        assert all(torch.isfinite(tensor).all() for tensor in weights(one.model).values())
        return
    with pytest.raises(TrainingError, match=r"step 5: .*seed 0, step 5\); the last good checkpoint is .*step-0+4"):
        one.fit()
    assert one.checkpoints.best() is None
    assert all(torch.isfinite(tensor).all() for tensor in weights(tcnca.load(latest(tmp_path))).values())


def skipping(folder: Path, poisoned: range, *changes: str) -> tuple[TinyTrainer, dict[str, Any]]:
    """A run of 12 steps, some of which read what is not finite, and the only line of its log."""
    rare = ["log_every=12", "eval.every=0", "checkpoint.every=0"]
    one = TinyTrainer(folder, recipe("nonfinite=skip", *rare, *changes))

    def hook(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * torch.nan if one.model.training and one.state.step in poisoned else output

    def register(one: TinyTrainer) -> None:
        one.model.embedding.register_forward_hook(hook)

    one.after_setup = register
    one.fit()
    (line,) = [line for line in read_log(folder) if "loss" in line]
    return one, line


def test_skipped_steps_leave_no_trace(tmp_path: Path) -> None:
    still = ["lr=0", "schedule.warmup_start=0", "model.dropout=0"]
    _, plain = skipping(tmp_path / "plain", range(0), *still)
    _, half = skipping(tmp_path / "half", range(6), *still)
    assert "skipped_steps" not in plain
    assert half["skipped_steps"] == 6
    # The model does not change, and twelve batches are much like six: the loss would be half if skipped steps counted.
    assert half["loss"] == pytest.approx(plain["loss"], rel=0.1)
    assert half["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.3)
    one, line = skipping(tmp_path / "all", range(12), "norm=batch")
    assert (line["skipped_steps"], line["loss"]) == (12, None)
    assert any("running_mean" in name for name in weights(one.model))
    assert all(torch.isfinite(tensor).all() for tensor in weights(one.model).values())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(trainer, "time", made)
    return made


def test_a_budget_ends_in_time_at_the_final_rate(tmp_path: Path, clock: Clock) -> None:
    """Validations are part of it, however many steps there is time for."""
    wanted = recipe("max_steps=8", "warmup_steps=1", "eval.every=60", "checkpoint.every=0", "log_every=1")
    one = TinyTrainer(tmp_path, wanted, budget=3.0)
    one.before_step = lambda _: clock.tick(0.0301)
    measure = one._evaluate

    def slow(split: str, max_batches: int | None = None) -> Score:
        clock.tick(0.5)
        return measure(split, max_batches)

    one._evaluate = slow  # type: ignore[method-assign]
    result = one.fit()
    assert 3.0 <= result.seconds < 3.0301
    # A validation of half a second leaves time for this.
    assert result.step == 84
    assert max(one.lrs) > 0.9 * wanted.optimizer.lr
    assert one.lrs[-1] < 0.05 * wanted.optimizer.lr
    assert [line["step"] for line in read_log(tmp_path) if line.get("split") == "validation"] == [60, 84]


def test_compile_time_is_not_warm_up_time(tmp_path: Path, clock: Clock) -> None:
    """With a budget, the schedule starts when the first steps are compiled."""
    one = TinyTrainer(tmp_path, recipe("max_steps=1000", "warmup_steps=500", "eval.every=0"), budget=3.0)
    one.after_setup = lambda one: setattr(one, "compiled", True)
    one.before_step = lambda one: clock.tick(0.4 if one.state.step < 3 else 0.02)
    result = one.fit()
    assert 3.0 <= result.seconds < 3.02
    # Nearly half of the time is gone, and the learning rate has not started to rise.
    assert max(one.lrs[:4]) < 0.05 * one.recipe.optimizer.lr
    assert max(one.lrs) > 0.9 * one.recipe.optimizer.lr


def test_all_processes_leave_out_the_same_compile_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise their learning rates, and with them their weights, would differ."""

    class Slower(DistContext):
        """Stands for several processes, of which another needs ten seconds longer for everything."""

        def all_reduce_max(self, values: Tensor) -> Tensor:
            return values + 10 if values.dtype == torch.float64 and values.ndim == 0 and values > 0 else values

    monkeypatch.setattr(trainer, "dist_context", lambda _: contextlib.nullcontext(Slower()))
    one = TinyTrainer(tmp_path, recipe("max_steps=4", "eval.every=0"))
    one.after_setup = lambda one: setattr(one, "compiled", True)
    one.fit()
    assert one.state.compile_seconds > 30


def test_the_budget_of_a_resumed_run_need_not_be_given(tmp_path: Path, clock: Clock) -> None:
    for resume, stop_after in ((False, 3), (True, 0)):
        one = TinyTrainer(tmp_path, recipe(), budget=None if resume else 1.5, resume=resume, stop_after=stop_after)
        one.before_step = lambda _: clock.tick(0.1001)
        result = one.fit()
        if not resume:
            other = invoke(*arguments(tmp_path, "--resume", "--budget", "9s"))
            assert other.exit_code == 1
            assert "--budget: expected the budget that" in other.output
            assert "(a budget of 1.5s)" in other.output
    assert (one.budget, result.step) == (1.5, 15)
    assert "the run is finished" in invoke(*arguments(tmp_path, "--resume", "--budget", "1.5s")).output


def test_other_recipes_and_changed_data_are_refused(tmp_path: Path) -> None:
    rows = [f"{word * 5} {number},{word}" for number in range(20) for word in ("yes", "no")]
    table = tmp_path / "my.csv"
    table.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    wanted = load_recipe("classify").override(changed(f"data={table}", "eval.every=0"))
    assert wanted.build_task().data.digest == wanted.build_task().data.digest != ""
    TinyTrainer(tmp_path / "run", wanted, stop_after=5).fit()
    with pytest.raises(CheckpointError, match="was started with another recipe, which differs in optimizer"):
        TinyTrainer(tmp_path / "run", wanted.override(["lr=0.5"]), resume=True).fit()
    TinyTrainer(tmp_path / "run", wanted, resume=True, stop_after=7).fit()
    table.write_text("\n".join(["text,label", *rows[:-2], "other,yes", "another,no"]), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"was started with other data than .*my.csv has now"):
        TinyTrainer(tmp_path / "run", wanted, resume=True).fit()


def test_a_saved_model_answers_on_raw_inputs(tmp_path: Path) -> None:
    """Normalization and class names are saved with the run."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    # The classes differ in their mean, which is nothing compared with the offset.
    values = (1000 + 100 * (rng.normal(size=(200, 16, 1)) + 4 * labels[:, None, None])).astype(np.float32)
    np.savez(tmp_path / "my.npz", values=values, labels=labels)
    given = [f"data={tmp_path / 'my.npz'}", "max_steps=60", "lr=0.01", "batch.size=32", "eval.every=0"]
    trainer = TinyTrainer(tmp_path / "run", load_recipe("classify").override(changed(*given)))
    assert trainer.fit().scores["test"].value > 0.9
    model = tcnca.load(tmp_path / "run")
    assert model.preprocessing == trainer.task.preprocessing()
    with torch.no_grad():
        answers = model(torch.from_numpy(values), return_state=False).logits.argmax(-1)
    assert (answers.numpy() == labels).mean() > 0.9


def test_python_and_the_command_write_the_same_directory(tmp_path: Path) -> None:
    words = [word for word in arguments(tmp_path / "command") if word != "data=recall-16"]
    done = invoke(*words, "--data", "recall-16")
    assert done.exit_code == 0, done.output
    result = Trainer(recipe(), tmp_path / "python", device="cpu", verbose=False).fit()
    names = [
        sorted(str(path.relative_to(folder)).partition("tfevents")[0] for path in folder.rglob("*"))
        for folder in (tmp_path / "command", tmp_path / "python")
    ]
    assert names[0] == names[1]
    for name in ("recipe.yaml", "model.safetensors", "config.json"):
        assert (tmp_path / "python" / name).read_bytes() == (tmp_path / "command" / name).read_bytes()
    values = json.loads((tmp_path / "command" / "result.json").read_text())
    assert {split: score.value for split, score in result.scores.items()} == {
        split: score["value"] for split, score in values["scores"].items()
    }
    # What makes the run again from Python is its recipe.
    (launch,) = json.loads((tmp_path / "python" / "provenance.json").read_text())["launches"]
    assert launch["command"] == f"tcnca train {tmp_path / 'python' / 'recipe.yaml'}"


def test_the_model_is_saved_before_the_final_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "evaluate", interrupted)
        stopped = invoke(*arguments(tmp_path, "eval.every=0"))
    assert stopped.exit_code == 130
    assert "stopped by SIGINT; continue with\ntcnca train recall-small " in stopped.output
    assert_same(weights(tcnca.load(tmp_path)), weights(tcnca.load(latest(tmp_path))))
    resumed = invoke(*arguments(tmp_path, "eval.every=0", "--resume"))
    assert resumed.exit_code == 0, resumed.output
    assert json.loads((tmp_path / "result.json").read_text())["step"] == 12


def test_evaluations_are_limited(tmp_path: Path) -> None:
    task = recipe().build_task()
    model = tcnca.SequenceModel(recipe().model_config(task))
    shares: list[float | None] = []
    config = dataclasses.replace(recipe().eval, batch_size=100)
    some = evaluate(model, task, "test", config, max_batches=2, progress=lambda _, share: shares.append(share))
    assert (some.count, shares) == (200, [0.5, 1.0])
    shares.clear()
    assert evaluate(model, task, "test", config, progress=lambda _, share: shares.append(share)).count == 500
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_short_runs_are_warned_of_if_a_budget_made_them_short(tmp_path: Path) -> None:
    short = invoke(*arguments(tmp_path / "short", "max_steps=20", "warmup_steps=40", "eval.every=0"))
    assert "warning" not in short.output
    assert f"training in {tmp_path / 'short'}: 20 steps (warm-up 2), " in short.output
    budget = invoke(*arguments(tmp_path / "budget", "eval.every=0", "--budget", "0.05s"))
    assert "fitted into the budget of 0.05s, too few to learn much" in budget.output


def test_train_and_eval_commands(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    wanted = arguments(tmp_path / "run")
    printed = invoke(*wanted, "--print-config")
    assert printed.exit_code == 0, printed.output
    assert "max_steps: 12" in printed.output
    # What cannot be trained is an error.
    for change in ("d_model=0", "data.task.no_such_option=1"):
        assert invoke(*arguments(tmp_path / "run", change), "--print-config").exit_code == 1
    assert not (tmp_path / "run").exists()
    done = invoke(*wanted)
    assert done.exit_code == 0, done.output
    again = invoke(*wanted)
    assert again.exit_code == 1
    assert "already holds a run; continue it with --resume" in again.output
    score = json.loads((tmp_path / "run" / "result.json").read_text())["scores"]["test"]["value"]
    assert f"test: accuracy {score:.4f} (of 500), 95 % interval 0." in invoke("eval", run, "--device", "cpu").output
    for words, message in [
        (["eval", str(tmp_path)], "expected a run directory, as `tcnca train` writes it"),
        (["eval", run, "num_layers=4"], "model: is fixed by training; only keys of data, eval and runtime"),
        (["eval", run, "--device", "tpu"], "--device: expected cpu, cuda or mps, got tpu"),
        ([*arguments(tmp_path / "other"), "--device", "tpu"], "--device: expected cpu"),
        ([*wanted, "--budget", "soon"], "--budget: expected a time such as 90s, 20m or 2h, got 'soon'"),
        ([*wanted, "--lr", "1e-3"], "Error: --lr: did you mean lr=1e-3?"),
        ([*wanted, "--batch-size=4"], "Error: --batch-size: did you mean batch_size=4?"),
        ([*wanted, "--buget", "1m"], "Error: --buget: did you mean --budget?"),
    ]:
        refused = invoke(*words)
        assert refused.exit_code == 1, refused.output
        assert message in refused.output.splitlines()[0]
    # A score that cannot be written is printed all the same.
    (tmp_path / "run" / "eval-test.json").unlink()
    (tmp_path / "run" / "eval-test.json" / "in the way").mkdir(parents=True)
    unwritten = invoke("eval", run, "--device", "cpu")
    assert unwritten.exit_code == 0
    assert f"test: accuracy {score:.4f}" in unwritten.output
    assert "warning: the score was not saved: " in unwritten.output


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_wrong_input_is_named_before_the_run_directory(tmp_path: Path) -> None:
    run, folder, pipe = tmp_path / "run", tmp_path / "empty", tmp_path / "pipe"
    run.mkdir()
    (run / "recipe.yaml").touch()
    os.mkfifo(pipe)
    stored = ("stream=false", f"data.folder={folder}")
    for changes, message in [
        ((*stored, "data=no-such.csv"), "no-such.csv: no such file; check the path"),
        ((*stored, f"data={pipe}"), "expected a file or a folder, got a pipe or a device"),
        (stored, "recall-16: is not prepared in"),
        (("data=no-such-set",), "'no-such-set'"),
        (("data=''",), "data.source: expected a data set or a file, got nothing"),
        (("d_model=0",), "d_model: expected"),
        ((), "already holds a run"),
    ]:
        refused = invoke(*arguments(run, *changes))
        assert refused.exit_code == 1
        assert message in refused.output, changes


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    with file_lock(tmp_path / ".lock"):
        for words in (arguments(tmp_path), ["sweep", "recall-small", "seed=1,2", "--out", str(tmp_path)]):
            refused = invoke(*words)
            assert refused.exit_code == 1
            assert "another process is active in this directory; wait for it, or choose another --out" in refused.output

    def start_another(one: TinyTrainer) -> None:
        one.out.mkdir()
        (one.out / "recipe.yaml").write_text("about: of another", encoding="utf-8")

    late = TinyTrainer(tmp_path / "run")
    late.after_setup = start_another
    with pytest.raises(ConfigError, match="already holds a run"):
        late.fit()
    assert (tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8") == "about: of another"


def test_a_full_disk_behind_safetensors_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("tcnca.training.checkpoint.save_file", full)
    with pytest.raises(DataError, match=r"checkpoints: the disk is full; free some space"):
        fit(tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("names", [("run\udcff", "tiny"), ("run", "tiny\udcff")])
def test_names_that_are_not_utf8_are_refused_at_the_start(tmp_path: Path, names: tuple[str, str]) -> None:
    out, name = names
    with pytest.raises(ConfigError, match=r"expected names in UTF-8, got '.*\\udcff'"):
        Trainer(recipe(), tmp_path / out, name=name)


def test_unusable_data_leaves_no_directory(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text("words,mood\na,1\nb,2\n")
    refused = invoke("train", "classify", f"data={tmp_path / 'odd.csv'}", "--out", str(tmp_path / "run"))
    assert refused.exit_code == 1
    assert "data.custom.text" in refused.output
    assert not (tmp_path / "run").exists()


class _Closed(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_run_whose_output_nobody_reads_saves_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "LogConsole", lambda quiet: LogConsole(file=_Closed()))
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    stopped = TinyTrainer(tmp_path, recipe("checkpoint.every=0"))
    assert stopped.fit().stopped == "SIGPIPE"
    assert read_state(latest(tmp_path)).step == 0
