"""The files of a checkpoint: nothing in them is executed, what was altered is refused, and any optimizer fits."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import tcnca
from tcnca.cli import app
from tcnca.errors import CheckpointError, TrainingError
from tcnca.training import CheckpointManager, DistContext, OptimizerConfig, TrainState, build_optimizers, evaluate_run
from tests.training.tiny import arguments, assert_same, fit, latest, weights

CHANGES = ["max_steps=4", "checkpoint.every=2", "checkpoint.keep=9", "eval.every=2", "eval.batches=1"]
STATE, SHARD, OTHER_SHARD = "state.json", "optimizers-00000.safetensors", "optimizers-00001.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is not finished, so that it can be resumed."""
    folder = tmp_path_factory.mktemp("run") / "run"
    fit(folder, *CHANGES)
    (folder / "result.json").unlink()
    shutil.rmtree(latest(folder))
    CheckpointManager(folder / "checkpoints", 9, DistContext()).mark_best(latest(folder), 0.0)
    return folder


@pytest.fixture
def place(tmp_path: Path, run: Path) -> Path:
    """A copy of the last checkpoint of the run."""
    copy = tmp_path / "checkpoints" / latest(run).name
    shutil.copytree(latest(run), copy)
    return copy


# Malicious files.


class _Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


def payloads(marker: Path, scratch: Path) -> list[bytes]:
    """Return pickles as `pickle` and `torch.save` write them, which do execute."""
    torch.save(_Payload(marker), scratch)
    for load in (lambda: pickle.loads(pickle.dumps(_Payload(marker))), lambda: torch.load(scratch, weights_only=False)):
        load()
        marker.rmdir()
    return [pickle.dumps(_Payload(marker)), scratch.read_bytes()]


def test_pickles_next_to_the_files_are_not_executed(tmp_path: Path, run: Path) -> None:
    folder, marker = tmp_path / "run", tmp_path / "marker"
    names = [".metadata", "__0_0.distcp", "optimizers.pt", "optimizers.pkl", "model.pt", "pytorch_model.bin"]
    for payload in payloads(marker, tmp_path / "scratch.pt"):
        shutil.copytree(run, folder)
        for parent in (folder, folder / "checkpoints", latest(folder), latest(folder) / "optimizers"):
            parent.mkdir(exist_ok=True)
            for name in names:
                (parent / name).write_bytes(payload)
        for words in (["eval", str(folder), "--best"], [*arguments(folder, *CHANGES), "--resume"]):
            assert CliRunner().invoke(app, words).exit_code == 0
        tcnca.load(latest(folder))
        assert not marker.exists()
        shutil.rmtree(folder)


def test_pickles_in_place_of_the_files_are_not_executed(tmp_path: Path, run: Path) -> None:
    folder, marker = tmp_path / "run", tmp_path / "marker"
    kinds = payloads(marker, tmp_path / "scratch.pt")
    kept = (".json", ".jsonl", ".safetensors", ".yaml")
    files = [path.relative_to(run) for path in sorted(run.rglob("*")) if path.suffix in kept]
    assert len(files) >= 10
    for number, name in enumerate(files):
        shutil.copytree(run, folder)
        (folder / name).write_bytes(kinds[number % 2])
        if name.parts[0] == "checkpoints" and (folder / name).parent == latest(folder):
            # As someone would who alters a file on purpose.
            seal(latest(folder))
        for model in (folder, latest(folder)):
            _error(tcnca.load, model)
        for best in (False, True):
            _error(evaluate_run, folder, best=best, verbose=False)
        error = _error(fit, folder, *CHANGES, resume=True)
        assert not marker.exists(), name
        if name.name in (STATE, SHARD) and name.parent == latest(run).relative_to(run):
            assert isinstance(error, CheckpointError), name
        shutil.rmtree(folder)


def _error(call: Callable[..., object], *given: Any, **named: Any) -> Exception | None:
    try:
        call(*given, **named)
    except Exception as error:  # Other tests check the errors of every file.
        return error
    return None


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path: Path, run: Path) -> None:
    """It consists of pickles."""
    folder, marker = tmp_path / "run", tmp_path / "marker"
    shutil.copytree(run, folder)
    place = latest(folder)
    (payload, _), old = payloads(marker, tmp_path / "scratch.pt"), place / "optimizers"
    (place / SHARD).unlink()
    old.mkdir()
    names = (".metadata", "__0_0.distcp")
    for name in names:
        (old / name).write_bytes(payload)
    state = {"step": 2, "seconds": 1.0, "data": "", "score": None, "meter": {}, "compile_seconds": 0.0}
    files = {f"optimizers/{name}": hashlib.sha256(payload).hexdigest() for name in names}
    (place / STATE).write_text(json.dumps({**state, "files": files}))
    done = CliRunner().invoke(app, [*arguments(folder, *CHANGES), "--resume"])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert f"Error: {place / STATE}: expected the keys format, state, files" in done.output
    assert "if another version of tcnca wrote it, resume with that version or train again" in done.output
    assert not marker.exists()
    # The model can still be used.
    tcnca.load(place)


# Altered files.


def load(place: Path) -> None:
    """Restore a checkpoint into a new model."""
    torch.manual_seed(1)
    model = tcnca.load(place).train()
    optimizers = build_optimizers(model, OptimizerConfig())
    CheckpointManager(place.parent, 1, DistContext()).load(place, model, optimizers)


def seal(place: Path, names: Iterable[str] = ()) -> None:
    """Correct the checksums of a checkpoint that was altered, as far as its state can be read."""
    try:
        content = json.loads((place / STATE).read_text())
    except ValueError:
        return
    for name in {*content["files"], *names}:
        content["files"][name] = hashlib.sha256((place / name).read_bytes()).hexdigest()
    (place / STATE).write_text(json.dumps(content))


Tensors = dict[str, torch.Tensor]
NAME = "0.state.layers.0.feed_forward.up.weight.exp_avg"


def _rename(tensors: Tensors, rows: dict[str, Any]) -> None:
    tensors[NAME + "s"] = tensors.pop(NAME)


def _swap_parameters(tensors: Tensors, rows: dict[str, Any]) -> None:
    tensors["1" + NAME[1:]] = tensors.pop(NAME)


def _drop(tensors: Tensors, rows: dict[str, Any]) -> None:
    del tensors[NAME]


def _drop_group(tensors: Tensors, rows: dict[str, Any]) -> None:
    del tensors["0.groups.0.lr"]


def _add(tensors: Tensors, rows: dict[str, Any]) -> None:
    tensors[NAME + "2"] = tensors[NAME].clone()


def _cut(tensors: Tensors, rows: dict[str, Any]) -> None:
    tensors[NAME] = tensors[NAME][1:].contiguous()


def _grow(tensors: Tensors, rows: dict[str, Any]) -> None:
    tensors[NAME] = torch.cat([tensors[NAME]] * 2)


def _transpose(tensors: Tensors, rows: dict[str, Any]) -> None:
    tensors[NAME] = tensors[NAME][:, :-1].contiguous()


def _flatten(tensors: Tensors, rows: dict[str, Any]) -> None:
    tensors[NAME] = torch.tensor(1.0)


def _cast(tensors: Tensors, rows: dict[str, Any]) -> None:
    tensors[NAME] = tensors[NAME].double()


def _cast_number(tensors: Tensors, rows: dict[str, Any]) -> None:
    tensors["0.groups.0.lr"] = torch.tensor([1])


def _shift(by: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    def shift(tensors: Tensors, rows: dict[str, Any]) -> None:
        rows[NAME] = by

    return shift


SHARD_CHANGES = {
    "renamed": (_rename, "missing"),
    "of another optimizer": (_swap_parameters, "missing"),
    "dropped": (_drop, "missing"),
    "dropped number": (_drop_group, "missing"),
    "added": (_add, "unknown"),
    "fewer rows": (_cut, "expected 8 rows, got 7"),
    "more rows": (_grow, "expected 8 rows, got 16"),
    "other columns": (_transpose, "expected rows of"),
    "no rows": (_flatten, "expected rows of"),
    "another type": (_cast, "in torch.float32"),
    "another type of number": (_cast_number, "in torch.float64"),
    "a gap": (_shift(1), "expected row 0, got 1"),
    "a negative row": (_shift(-1), "expected row 0, got -1"),
    "a huge row": (_shift(10**100), "expected row 0, got 1000"),
    "a row that is text": (_shift("0"), "expected an integer"),
    "rows that are nested": (_shift(json.loads("[" * 500 + "]" * 500)), "expected"),
}


@pytest.mark.parametrize("name", SHARD_CHANGES)
def test_altered_optimizers_are_refused(place: Path, name: str) -> None:
    load(place)
    change, message = SHARD_CHANGES[name]
    tensors = load_file(place / SHARD)
    rows: dict[str, Any] = {}
    change(tensors, rows)
    save_file(tensors, place / SHARD, {"rows": json.dumps(rows)})
    seal(place)
    with pytest.raises(CheckpointError, match=message) as error:
        load(place)
    assert str(error.value).startswith(str(place))
    assert "remove this checkpoint" in str(error.value)


@pytest.mark.parametrize("rows", [None, "", "{", "[]", "null", "[" * 100_000])
def test_an_altered_header_is_refused(place: Path, rows: str | None) -> None:
    save_file(load_file(place / SHARD), place / SHARD, None if rows is None else {"rows": rows})
    seal(place)
    with pytest.raises(CheckpointError, match=SHARD):
        load(place)


def test_shards_that_overlap_or_are_missing_are_refused(place: Path) -> None:
    shutil.copy(place / SHARD, place / OTHER_SHARD)
    seal(place, [OTHER_SHARD])
    with pytest.raises(CheckpointError, match=r"expected row .*, got 0"):
        load(place)
    # Every other row of the file is as it should be.
    tensors = load_file(place / SHARD)
    save_file({NAME: tensors[NAME][:4].contiguous()}, place / SHARD, {"rows": "{}"})
    tensors[NAME] = tensors[NAME][4:].contiguous()
    save_file(tensors, place / OTHER_SHARD, {"rows": json.dumps({NAME: 4})})
    seal(place)
    load(place)
    content = json.loads((place / STATE).read_text())
    del content["files"][SHARD]
    (place / STATE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="expected row 0, got 4"):
        load(place)


METER = {"loss": 1.0, "grad_norm": None, "tokens": 9, "steps": 1, "skipped": 0, "seconds": 1.0}
STATE_CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a step that is text": lambda content: content["state"].update(step="2"),
    "a negative step": lambda content: content["state"].update(step=-2),
    "another step": lambda content: content["state"].update(step=3),
    "a huge step": lambda content: content["state"].update(step=10**400),
    "infinite seconds": lambda content: content["state"].update(seconds=float("inf")),
    "too many seconds": lambda content: content["state"].update(seconds=1e308),
    "no state": lambda content: content.pop("state"),
    "no files": lambda content: content.pop("files"),
    "another format": lambda content: content.update(format="tcnca-checkpoint-1"),
    "an unknown key": lambda content: content["state"].update(code="import os"),
    "a meter that is text": lambda content: content["state"].update(meter="0"),
    "a meter with another key": lambda content: content["state"].update(meter=[{"loss": 1.0}]),
    "a meter with negative steps": lambda content: content["state"].update(meter=[{**METER, "steps": -1}]),
    "a meter with too many tokens": lambda content: content["state"].update(meter=[{**METER, "tokens": 10**300}]),
    "a file outside": lambda content: content["files"].update({"../x.safetensors": ""}),
    "an absolute file": lambda content: content["files"].update({"/optimizers-00000.safetensors": ""}),
    "a shard outside": lambda content: content["files"].update({"optimizers-1/../../x.safetensors": ""}),
    "a file of another kind": lambda content: content["files"].update({"optimizers-00000.pkl": ""}),
    "no weights": lambda content: content["files"].pop("model.safetensors"),
    "no optimizers": lambda content: content["files"].pop(SHARD),
    "a checksum that is a number": lambda content: content["files"].update({SHARD: 1}),
    "another checksum": lambda content: content["files"].update({SHARD: "0" * 64}),
}


@pytest.mark.parametrize("name", STATE_CHANGES)
def test_an_altered_state_is_refused(place: Path, name: str) -> None:
    content = json.loads((place / STATE).read_text())
    STATE_CHANGES[name](content)
    (place / STATE).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="remove this checkpoint") as error:
        load(place)
    assert str(error.value).startswith(str(place))


@pytest.mark.parametrize(
    "content",
    [
        *({"checkpoint": name, "score": 1.0} for name in ("..", "../step-000000002", "/tmp", "", "step-", "step-1/..")),
        {"checkpoint": ["step-000000002"], "score": 1.0},
        {"checkpoint": "step-000000002", "score": "1"},
        {"checkpoint": "step-000000002", "score": float("nan")},
        {"checkpoint": "step-000000002"},
        {"checkpoint": "step-000000002", "score": 1.0, "more": 1},
        [],
    ],
)
def test_an_altered_best_is_refused(place: Path, content: Any) -> None:
    checkpoints = CheckpointManager(place.parent, 1, DistContext())
    checkpoints.mark_best(place, 0.5)
    assert (checkpoints.best(), checkpoints.best_score()) == (place, 0.5)
    (place.parent / "best.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"best\.json: .*; remove it"):
        checkpoints.best()


# Optimizers of any kind.


class _Odd(torch.optim.Optimizer):
    """Has state of every type, and numbers in its groups that change."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"total": 0.0, "count": 0, "flag": True, "names": ("a", "b")})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["total"], group["count"] = group["total"] + 0.1, group["count"] + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["calls"] = state.get("calls", 0) + 1
                    state["sum"] = state.get("sum", 0.0) + float(parameter.grad.sum())
                    state["half"] = state.get("half", 0.0) + parameter.grad.bfloat16()
                    state["nothing"] = None
                    state["maximum"] = parameter.grad.abs().max()


def _optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [
        torch.optim.SGD(parameters[:3], lr=0.1, momentum=0.9),
        _Odd(parameters[3:5]),
        torch.optim.AdamW(parameters[5:], lr=0.1, amsgrad=True),
    ]


def _step(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer], steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("steps", [0, 3])
def test_several_optimizers_of_any_kind(tmp_path: Path, place: Path, steps: int) -> None:
    first, second = tcnca.load(place), tcnca.load(place)
    one, other = _optimizers(first), _optimizers(second)
    _step(first, one, steps)
    checkpoints = CheckpointManager(tmp_path / "odd", 1, DistContext())
    saved = checkpoints.save(first, one, TrainState(step=steps))
    checkpoints.load(saved, second, other)
    # Whether an optimizer takes its first step or a later one follows from its state.
    for before, after in zip(one, other, strict=True):
        assert len(before.state) == len(after.state)
    for model, optimizers in ((first, one), (second, other)):
        _step(model, optimizers, 2)
    assert_same(weights(first), weights(second))
    for before, after in zip(one, other, strict=True):
        for left, right in zip(before.param_groups, after.param_groups, strict=True):
            assert {key: left[key] for key in left if key != "params"} == {
                key: right[key] for key in right if key != "params"
            }
            for a, b in zip(left["params"], right["params"], strict=True):
                assert before.state[a].keys() == after.state[b].keys()
                for key, value in before.state[a].items():
                    same = after.state[b][key]
                    assert type(value) is type(same)
                    assert value.equal(same) and value.dtype == same.dtype if torch.is_tensor(value) else value == same


def test_files_have_the_permissions_of_others(place: Path) -> None:
    assert len({(place / name).stat().st_mode for name in (STATE, SHARD, "model.safetensors")}) == 1
    with safe_open(place / SHARD, framework="pt") as file:
        assert set(file.metadata()) == {"rows"}


@pytest.mark.parametrize("name", ["log.jsonl", "tensorboard", ".recipe.yaml", ".lock", "checkpoints/best.json"])
def test_links_in_a_run_directory_are_not_written_to(tmp_path: Path, run: Path, name: str) -> None:
    copy, target = tmp_path / "run", tmp_path / "target"
    shutil.copytree(run, copy)
    target.write_text("mine")
    link = copy / name
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    for use in (lambda: fit(copy, *CHANGES, resume=True), lambda: evaluate_run(copy, verbose=False)):
        with pytest.raises(TrainingError, match="expected no links"):
            use()
    assert target.read_text() == "mine"


def test_a_damaged_checkpoint_is_named_and_not_skipped(tmp_path: Path, run: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    weights_file = latest(copy) / "model.safetensors"
    content = weights_file.read_bytes()
    weights_file.write_bytes(content[:-8] + bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is damaged"):
        evaluate_run(copy, verbose=False)
    weights_file.write_bytes(content)
    (latest(copy) / STATE).unlink()
    for use in (lambda: fit(copy, *CHANGES, resume=True), lambda: evaluate_run(copy, verbose=False)):
        with pytest.raises(CheckpointError, match=r"state\.json: is missing, or cannot be read"):
            use()


def test_the_log_has_no_steps_twice_after_a_resume(tmp_path: Path, run: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    line = (copy / "log.jsonl").read_text().splitlines()[-1]
    with (copy / "log.jsonl").open("a") as log:
        log.write(json.dumps({**json.loads(line), "step": 99}) + "\n")
    fit(copy, *CHANGES, resume=True)
    lines = [json.loads(text) for text in (copy / "log.jsonl").read_text().splitlines()]
    keys = [(each["step"], each.get("split"), each.get("count")) for each in lines]
    assert len(keys) == len(set(keys))
    assert keys[-1][0] == max(step for step, _, _ in keys) == 4
