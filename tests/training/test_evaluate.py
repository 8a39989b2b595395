"""Evaluation in parts gives the scores of whole batches, in bounded memory."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tcnca.data import Batch
from tcnca.models import SequenceModel
from tcnca.training import EvalConfig, evaluate, load_recipe
from tcnca.training.evaluate import eval_precision, join_windows, part_size, split_batch
from tests.training.test_recipes import own_file
from tests.training.tiny import MODEL

SMALL = [change for change in MODEL if not change.startswith("model.dropout")]
MODULE = sys.modules["tcnca.training.evaluate"]
"""The module, not the function of the same name."""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("lm", ["data.task.eval_length=300", "data.task.segments=3"]),
        ("lm", ["data.task.eval_length=300", "carry_state=false", "eval.chunk_size=4"]),
        ("forecast", ["data.task.window=20"]),
        ("regress", []),
        ("classify", []),
        ("retrieve", []),
    ],
    ids=["carried", "not carried", "forecast", "regression", "classes", "pairs"],
)
@pytest.mark.parametrize("tokens", [7, 64, 700])
def test_parts_have_the_score_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, changes: list[str], tokens: int
) -> None:
    own = [f"data={own_file(tmp_path, name)}", "data.task.chunk_size=32"] if name == "lm" else []
    own = own or [f"data={own_file(tmp_path, name)}"]
    recipe = load_recipe(name).override([*own, *SMALL, *changes])
    task = recipe.build_task()
    model = SequenceModel(recipe.model_config(task), task.preprocessing())
    seen: list[int] = []

    def record(_: Any, given: Any, options: dict[str, Any]) -> None:
        seen.append(
            sum(each.shape[0] * each.shape[1] for each in (options["x"], options.get("second")) if each is not None)
        )

    model.register_forward_pre_hook(record, with_kwargs=True)
    split = next(split for split in ("test", "validation", "train") if split in task.data.splits)
    whole = evaluate(model, task, split, recipe.eval)
    longest, seen[:] = max(seen), []
    monkeypatch.setattr(MODULE, "_MAX_CPU_TOKENS", tokens)
    parts = evaluate(model, task, split, recipe.eval)
    assert parts.count == whole.count
    assert parts.value == pytest.approx(whole.value, rel=1e-5)
    streams = name in ("lm", "forecast")
    if longest > tokens:
        assert max(seen) < longest
    assert not streams or max(seen) <= tokens


def test_parts_of_a_batch() -> None:
    inputs = torch.arange(40).reshape(4, 10)
    batch = Batch(inputs=inputs, targets=inputs + 1, lengths=torch.tensor([10, 9, 1, 4]))
    assert part_size(batch, 12) == (1, 10)
    assert part_size(batch, 25) == (2, 10)
    assert [(row, len(part), last) for row, part, last in split_batch(batch, 3, 10)] == [(0, 3, True), (3, 1, True)]
    assert part_size(batch, 7) == (1, 10)
    assert part_size(batch, 7, chunk_size=3) == (1, 6)
    assert part_size(batch, 7, chunk_size=8) == (1, 7)
    pieces = [part for row, part, _ in split_batch(batch, 2, 4) if row == 2]
    assert [last for row, _, last in split_batch(batch, 2, 4) if row == 2] == [False, False, True]
    assert [piece.continues for piece in pieces] == [False, True, True]
    assert [piece.lengths.tolist() for piece in pieces if piece.lengths is not None] == [[1, 4], [0, 0], [0, 0]]
    assert torch.equal(torch.cat([piece.targets for piece in pieces], 1), batch.targets[2:])
    pair = dataclasses.replace(batch, second=inputs)
    assert part_size(pair, 40) == (2, 20)


def test_windows_that_continue_one_another_are_joined() -> None:
    inputs = torch.arange(60).reshape(2, 30)
    lengths = torch.tensor([30, 12])
    whole = Batch(inputs=inputs, targets=inputs + 1, lengths=lengths)
    windows = [whole.window(begin, begin + 10) for begin in (0, 10, 20)]
    other = Batch(inputs=inputs, targets=inputs)
    found = list(join_windows(iter([*windows, other]), 25))
    assert [(joined.batch.inputs.shape[1], joined.done, joined.goes_on) for joined in found] == [
        (20, 2, True),
        (10, 3, False),
        (30, 4, False),
    ]
    first, second, last = (joined.batch for joined in found)
    assert not first.continues
    assert second.continues
    assert torch.equal(torch.cat([first.targets, second.targets], 1), whole.targets)
    assert first.lengths is not None
    assert second.lengths is not None
    assert torch.equal(first.lengths + second.lengths, lengths)
    assert last is other
    full = dataclasses.replace(windows[0], lengths=None)
    joined = Batch.join([full, windows[1]])
    assert joined.lengths is not None
    assert joined.lengths.tolist() == [20, 12]


def test_windows_of_full_attention_and_many_rows_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.arange(60).reshape(2, 30)
    whole = Batch(inputs=inputs, targets=inputs + 1)
    windows = [whole.window(begin, begin + 10) for begin in (0, 10, 20)]

    def widths(longest: int) -> list[int]:
        return [joined.batch.inputs.shape[1] for joined in join_windows(iter(windows), longest)]

    assert widths(30) == [30]
    assert widths(0) == [10, 10, 10]
    monkeypatch.setattr(MODULE, "_MAX_NUMBERS", 45)
    assert widths(30) == [20, 10]


def test_full_attention_reads_windows_of_the_given_length(tmp_path: Path) -> None:
    """Its memory is quadratic in the length of a call."""
    options = ["data.task.eval_length=50", "data.task.segments=1", "model.chunk_size=null", "position=rope"]
    recipe = load_recipe("lm").override([f"data={own_file(tmp_path, 'lm')}", *SMALL, *options])
    task = recipe.build_task()
    model = SequenceModel(recipe.model_config(task), task.preprocessing())
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, __, options: seen.append(options["x"].shape[1]), with_kwargs=True)
    evaluate(model, task, "validation", recipe.eval)
    assert max(seen) == 50
    seen.clear()
    evaluate(model, task, "validation", dataclasses.replace(recipe.eval, chunk_size=8))
    assert max(seen) > 50


def test_progress_is_reported_after_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_MAX_CPU_TOKENS", 64)
    recipe = load_recipe("lm").override([f"data={own_file(tmp_path, 'lm')}", *SMALL, "data.task.segments=4"])
    task = recipe.build_task()
    shares: list[float] = []
    model = SequenceModel(recipe.model_config(task), task.preprocessing())
    evaluate(model, task, "validation", recipe.eval, progress=lambda _, share: shares.append(share or 0.0))
    assert len(shares) > 4
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_scores_have_the_precision_of_the_run_unless_they_are_exact() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert eval_precision(EvalConfig(), "bf16", gpu) == "bf16"
    assert eval_precision(EvalConfig(exact=True), "bf16", gpu) == "float32"
    # In bfloat16 a CPU is slower.
    assert eval_precision(EvalConfig(), "bf16", cpu) == "float32"
