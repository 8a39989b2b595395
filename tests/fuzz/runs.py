"""Run folders: resumed, evaluated and reported."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from tcnca.training import Recipe, evaluate_run, load_recipe, provenance, report
from tcnca.training.logger import read_log
from tests.fuzz import payloads
from tests.fuzz.mutations import Rng, files_in
from tests.fuzz.subject import Attack, Subject, changed, command, entry, fifo, linked, write_table, written
from tests.training import tiny

_RUN = "run"
_PLAIN = r"(?<!recipe\.yaml)$"
"""All files but the recipe: one that asks for a large model or many steps is not damaged."""


def small_recipe() -> Recipe:
    return load_recipe("classify").override(
        tiny.merged(
            *tiny.SMALL, *tiny.MODEL, "data=data.csv", "max_steps=6", "eval.every=2", "checkpoint.every=2", "threads=1"
        )
    )


def _train(stop_after: int = 0) -> None:
    write_table()
    trainer = tiny.TinyTrainer(Path(_RUN), small_recipe(), stop_after=stop_after)
    trainer.fit()
    _without_times(Path(_RUN))


def _without_times(run: Path) -> None:
    """Replace what differs between machines and runs, so that a seed stands for the same case everywhere."""
    for path in files_in(run):
        if path.suffix in (".json", ".jsonl") and path.name != "config.json":
            text = path.read_text(encoding="utf-8")
            path.write_text(re.sub(r"(?<=: )-?\d+(\.\d+(e[-+]?\d+)?|e[-+]?\d+)", "0.125", text), encoding="utf-8")
    path = run / provenance.PROVENANCE
    launches = json.loads(path.read_bytes())
    for launch in launches["launches"]:
        launch.update(versions={"tcnca": "1"}, platform="Linux", commit=None, started="2026-01-01T00:00:00+00:00")
        launch["hardware"] = {"device": "cpu", "name": "CPU", "cores": 2, "threads": 1}
    path.write_text(json.dumps(launches, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(run / "tensorboard", ignore_errors=True)


def _resume() -> None:
    tiny.TinyTrainer(Path(_RUN), load_recipe(f"{_RUN}/recipe.yaml"), resume=True).fit()


def _finished() -> None:
    trainer = tiny.TinyTrainer(Path(_RUN), load_recipe(f"{_RUN}/recipe.yaml"), resume=True)
    result = trainer.fit()
    report.score_rows(result)
    report.cost_rows(result)
    report.write_report(trainer.out, result)


def _evaluate() -> None:
    evaluate_run(Path(_RUN), split="validation", best=True, device="cpu", verbose=False)


def _read_logs() -> None:
    report.mean_speed(read_log(Path(_RUN)))
    report.draw_curves(Path(_RUN), "a run", higher_is_better=True)


def _one_pickle(rng: Rng) -> str:
    """Replace a file of the last checkpoint with a pickle that runs code."""
    last = sorted(Path(_RUN, "checkpoints").glob("step-*"))[-1]
    path = rng.choice([path for path in files_in(last) if path.suffix != ".json"])
    number = rng.randrange(60)
    path.write_bytes(payloads.pickled(number))
    return f"{path}: pickle {number}"


def _all_pickles(rng: Rng) -> str:
    """Replace every file of the optimizers with a pickle that runs code."""
    for path in files_in(Path(_RUN, "checkpoints")):
        if path.suffix not in (".json", ".safetensors"):
            path.write_bytes(payloads.pickled(0))
    for folder in sorted(Path(_RUN, "checkpoints").glob("step-*")):
        (folder / "optimizers").mkdir(exist_ok=True)
        for name in (".metadata", "__0_0.distcp", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
            (folder / "optimizers" / name).write_bytes(payloads.pickled(0))
    return "pickles in all places"


_STATE = "run/checkpoints/step-*5/state.json"


_RUN_LINKS = [
    linked("run/.lock", "a file outside"),
    linked("run/.recipe.yaml", "a file outside"),
    linked("run/log.jsonl", "a file outside"),
    linked("run/checkpoints/.best.json", "a file outside"),
    linked("run/tensorboard", "a folder outside"),
    linked("run/.provenance.json", "a file outside"),
]
_RESUME: list[Attack] = [
    _all_pickles,
    _one_pickle,
    changed(_STATE, lambda _: {}),
    changed(_STATE, entry("state.step", 2**63)),
    changed(_STATE, entry("state.meter", [1])),
    changed(_STATE, entry("state.seconds", "@raw0@")),
    changed(_STATE, lambda _: "@raw5@"),
    changed("run/checkpoints/best.json", entry("checkpoint", "../../../outside/folder")),
    changed("run/checkpoints/best.json", lambda _: "@raw5@"),
    changed("run/provenance.json", lambda _: "@raw5@"),
    fifo("run/recipe.yaml"),
    written("run/recipe.yaml", payloads.ALIAS_BOMB.encode()),
    *_RUN_LINKS,
    _one_pickle,
    _one_pickle,
]
_FINISHED: list[Attack] = [
    changed("run/result.json", lambda _: {}),
    changed("run/result.json", lambda _: []),
    changed("run/result.json", lambda _: "@raw5@"),
    changed("run/result.json", entry("scores", {"test": {}})),
    changed("run/result.json", entry("scores", {"test": {"metric": 1, "value": [], "count": "x"}})),
    changed("run/result.json", entry("best", {"step": None})),
    changed("run/result.json", entry("step", "x")),
    changed("run/provenance.json", lambda value: value["launches"][0].clear()),
    changed("run/provenance.json", lambda _: {"launches": [1]}),
]
_EVAL: list[Attack] = [
    changed("run/checkpoints/step-*6/config.json", entry("model.num_layers", 10**6)),
    changed("run/checkpoints/best.json", entry("checkpoint", 10**30)),
    changed("run/checkpoints/best.json", entry("score", [])),
    written("run/recipe.yaml", payloads.ALIAS_BOMB.encode()),
    linked("run/.eval-test.json", "a file outside"),
    linked("run/.eval-validation-best.json", "a file outside"),
]
_LOG: list[Attack] = [
    written("run/log.jsonl", b'{"step": 1, "loss": "x"}\n{"step": 2, "loss": [1]}\n'),
    written("run/log.jsonl", b'{"step": 1e400}\n{"step": ' + b"9" * 5000 + b"}\n"),
    written("run/log.jsonl", b'{"step": 1, "tokens": "a", "tokens_per_second": 0}\n'),
    written("run/log.jsonl", b'{"step": 1, "tokens": 5, "tokens_per_second": 0}\n'),
    written("run/log.jsonl", b'{"step": 9223372036854775808, "loss": 1e308, "lr": -1e308}\n'),
    written("run/log.jsonl", b'{"step": 1, "split": "validation", "value": "x"}\n'),
    written("run/log.jsonl", b'{"step": 1, "split": [], "value": 1}\n'),
    written("run/log.jsonl", b"[" * 100_000 + b"\n"),
]

_EXPORTED: list[Attack] = [
    linked("run/result.json", "a file outside"),
    linked("run/log.jsonl", "zeros without end"),
    fifo("run/log.jsonl"),
    *_FINISHED,
]
_EXPORT = command("export", "run", "--model", "small", "--dtype", "int8")

_CPU = ("--device", "cpu")
BASES: dict[str, Callable[[], None]] = {"stopped": lambda: _train(stop_after=5), "finished": _train}
SUBJECTS = {
    "resume": Subject(base="stopped", use=_resume, attacks=_RESUME, targets=_PLAIN, share=20),
    "finished": Subject(base="finished", use=_finished, attacks=_FINISHED, targets=r"run/[^/]*\.jsonl?$", share=9),
    "eval": Subject(base="finished", use=_evaluate, attacks=_EVAL, targets=_PLAIN, share=8),
    "log": Subject(base="finished", use=_read_logs, attacks=_LOG, targets=r"log\.jsonl$", share=8),
    "cli-export": Subject(
        base="finished", use=_EXPORT, attacks=_EXPORTED, targets=r"run/[^/]*\.(jsonl?|yaml)$", share=6
    ),
    "cli-train": Subject(
        base="stopped", use=command("train", "run", "--resume", *_CPU), attacks=_RESUME, targets=_PLAIN, share=2
    ),
    "cli-eval": Subject(base="finished", use=command("eval", "run", *_CPU), attacks=_EVAL, targets=_PLAIN, share=2),
}
