"""The pretrained model that comes with the package: its files, and the commands that use it when no run is given."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tcnca
from tcnca import ConfigError, pretrained
from tcnca.cli import app
from tcnca.data.schema import Columns
from tcnca.inference import export_model
from tcnca.training import evaluate_run, load_recipe
from tcnca.training.report import read_result
from tests.training.tiny import fit, write_set

runner = CliRunner()
EXPORTED = {"config.json", "model.safetensors", "recipe.yaml", "result.json", "log.jsonl"}
MAX_BYTES = 12_000_000
MAX_BITS = 1.3
"""Bits per byte of the text below, which are 1.10; an untrained model needs 8."""
MAX_REPEATED_BITS = 0.5
"""Bits per byte of the same text right after it, which the model copies at 0.38."""
TEXT = (
    "The river rises in the mountains in the north of the country, and flows through three cities before it reaches "
    "the sea. In the nineteenth century, a railway was built along its banks, and the population of the region began "
    "to grow. Today the area is known for its universities, its music and its wine.\n"
)
TEXTS = {split: {"bytes": np.frombuffer(TEXT.encode() * 5, np.uint8)} for split in ("train", "validation", "test")}


def run(*arguments: Any, stdin: bytes | None = None) -> Any:
    return runner.invoke(app, list(map(str, arguments)), input=stdin, env={"COLUMNS": "200"})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    fit(folder)
    return folder


@pytest.fixture
def _prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EnWik8 of a few sentences."""
    splits: dict[str, Columns] = dict(TEXTS)
    write_set(tmp_path / "data", "enwik8", "language", splits, symbols=sorted(set(TEXT.encode())))
    monkeypatch.setenv("TCNCA_DATA", str(tmp_path / "data"))


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    """No command writes into the package."""
    before = files(pretrained.FOLDER)
    yield
    assert files(pretrained.FOLDER) == before


def test_it_is_complete_and_small() -> None:
    found = files(pretrained.FOLDER)
    assert {*EXPORTED, "eval-test.json"} == set(found)
    assert sum(map(len, found.values())) <= MAX_BYTES
    assert json.loads(found["config.json"])["dtype"] == "int8"
    # Nothing of the machine it was trained on.
    recipe = load_recipe(str(pretrained.FOLDER / "recipe.yaml"))
    assert (recipe.data.source, recipe.data.folder) == ("enwik8", None)
    assert not any(b"/" in text for name, text in found.items() if name in ("recipe.yaml", "result.json"))


def test_it_is_part_of_the_package() -> None:
    """What the build includes, by the patterns of its configuration."""
    root = Path(tcnca.__file__).parent
    path = root.parents[1] / "pyproject.toml"
    if not path.is_file():
        pytest.skip("not a checkout")
    patterns = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]["tcnca"]
    included = {found for pattern in patterns for found in root.glob(pattern)}
    assert set(pretrained.FOLDER.iterdir()) <= included


def test_load_without_a_folder() -> None:
    model = tcnca.load()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert model.preprocessing.byte_map == tuple(range(256))
    attention = model.config.attention
    assert attention is not None
    # What is loaded is what was trained and evaluated.
    recipe = load_recipe(str(pretrained.FOLDER / "recipe.yaml"))
    assert attention.chunk_size == recipe.eval.chunk_size == recipe.model_config().attention.chunk_size  # type: ignore[union-attr]
    with pytest.raises(tcnca.CheckpointError, match="pretrained/enwik8: has no best checkpoint, only a model"):
        tcnca.load(best=True)


def test_it_has_learned_english() -> None:
    model = tcnca.load()
    bits = tcnca.score(model, TEXT)
    assert float(bits.mean()) < MAX_BITS
    assert float(tcnca.score(model, TEXT * 2)[len(TEXT) :].mean()) < MAX_REPEATED_BITS
    shuffled = "".join(np.random.default_rng(0).permutation(list(TEXT)))
    assert float(tcnca.score(model, shuffled).mean()) > 1.3 * float(bits.mean())
    letters = "".join(tcnca.stream_text(model, "The history of ", 100, temperature=0.5, seed=0))
    assert sum(letter.isalpha() or letter in " .,[]'" for letter in letters) > 80


def test_generate_without_a_run() -> None:
    result = run("generate", "--prompt", "The history of ", "--max-tokens", 20, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip("\n") == "".join(tcnca.stream_text(tcnca.load(), "The history of ", 20, seed=3)).rstrip(
        "\n"
    )
    assert result.stderr.rstrip().endswith("; seed 3, model pretrained/enwik8")
    # All bytes are known, also those that EnWik8 does not have.
    assert run("generate", "--prompt", "a\r\n\x00\U000e0041", "--max-tokens", 1).exit_code == 0
    assert "--prompt, --prompt-file: expected one of them, got neither" in run("generate").stderr
    assert "seed 3, model" not in run("generate", pretrained.FOLDER, "--prompt", "a", "--seed", 3).stderr


def test_score_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"other\r\ntext\x00")
    result = run("score", tmp_path / "a.txt", tmp_path / "b.txt", "--json", tmp_path / "scores.json")
    assert result.exit_code == 0, result.output
    scores = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))["scores"]
    assert [score["run"] for score in scores] == ["pretrained/enwik8"] * 2
    assert [Path(score["file"]).name for score in scores] == ["a.txt", "b.txt"]
    assert [score["unknown_bytes"] for score in scores] == [0, 0]
    assert scores[0]["bits_per_byte"] == pytest.approx(float(tcnca.score(tcnca.load(), TEXT).mean()), rel=1e-5)
    assert "pretrained/enwik8" in run("score", "-", stdin=TEXT.encode()).stdout
    # With a run, the pretrained model is not used.
    tcnca.save(tcnca.load(), tmp_path / "own")
    assert "pretrained" not in run("score", tmp_path / "own", tmp_path / "b.txt").stdout


def test_a_misspelled_run_is_not_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, encoding="utf-8")
    result = run("score", tmp_path / "rnus" / "lm", tmp_path / "a.txt")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"Error: {tmp_path}/rnus/lm: expected a run directory or a text to score, got nothing"
    )
    result = run("score", tmp_path, tmp_path / "a.txt")
    assert result.stderr.startswith(f"Error: {tmp_path}: expected a run directory or a saved model, got a folder")
    result = run("score", pretrained.FOLDER)
    assert "expected a text after the runs, got none" in result.stderr
    result = run("score", pretrained.FOLDER / "model.safetensors", tmp_path / "a.txt")
    assert "model.safetensors: expected a run directory or a text to score, got weights" in result.stderr


@pytest.mark.usefixtures("_prepared")
def test_eval_without_a_run() -> None:
    few = ["data.task.segments=1", "eval.batch_size=1"]
    result = run("eval", *few, "--device", "cpu")
    assert result.exit_code == 0, result.output
    score = evaluate_run(None, few, device="cpu", verbose=False)
    assert f"pretrained/enwik8, test: bits per byte {score.value:.4f} (of {score.count:,})" in result.stdout
    assert score.count == 5 * len(TEXT)
    bits = tcnca.score(tcnca.load(), TEXT * 5)
    assert score.value == pytest.approx(float(bits.mean()), abs=1e-4)


@pytest.mark.usefixtures("_prepared")
def test_eval_refuses_other_tokens_than_those_of_training(tmp_path: Path) -> None:
    result = run("eval", "data.task.all_bytes=false", "--device", "cpu")
    assert result.exit_code == 1
    assert (
        "data: expected the byte values that pretrained/enwik8 was trained with as tokens, got others" in result.stderr
    )
    assert "pretrained/enwik8: has no best checkpoint; leave out --best" in run("eval", "--best").stderr
    assert "runs/lr=0.1: expected a run directory" in run("eval", "runs/lr=0.1").stderr


def test_eval_says_how_to_prepare_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCNCA_DATA", str(tmp_path))
    result = run("eval")
    assert result.exit_code == 1
    assert f"run `tcnca data prepare enwik8 --out {tmp_path}`" in result.stderr
    assert "runs/nothing: expected a run directory" in run("eval", "runs/nothing").stderr
    assert "model: is fixed by training" in run("eval", "num_layers=2").stderr


def test_export_keeps_what_eval_and_compare_need(trained: Path, tmp_path: Path) -> None:
    result = run("export", trained, "--model", tmp_path / "small", "--dtype", "int8")
    assert result.exit_code == 0, result.output
    assert f"tcnca eval {tmp_path}/small" in result.stdout
    assert set(files(tmp_path / "small")) == EXPORTED
    whole, small = tcnca.load(trained), tcnca.load(tmp_path / "small")
    assert small.config == whole.config
    assert small.preprocessing == whole.preprocessing
    x = torch.randint(4, (2, 9))
    with torch.no_grad():
        assert (small(x).logits - whole(x).logits).norm() < 0.05 * whole(x).logits.norm()
    for split in ("validation", "test"):
        expected = evaluate_run(trained, split=split, device="cpu", verbose=False)
        got = evaluate_run(tmp_path / "small", split=split, device="cpu", verbose=False)
        assert got.count == expected.count
        assert got.value == pytest.approx(expected.value, abs=0.02)
    assert "small, test: accuracy" in run("eval", tmp_path / "small", "--device", "cpu").stdout
    assert json.loads((tmp_path / "small" / "eval-test.json").read_text(encoding="utf-8"))["checkpoint"] == "small"
    compared = run("compare", trained, tmp_path / "small").stdout.splitlines()
    cells = [
        [cell.strip() for cell in line.split("|")][2:] for line in compared if line.startswith(("| run ", "| small "))
    ]
    assert "12" in cells[-1]


def test_export_keeps_the_dtype_and_only_scores_of_its_weights(trained: Path, tmp_path: Path) -> None:
    export_model(trained, tmp_path / "best", "int8", best=True)
    result = read_result(tmp_path / "best")
    assert result is not None
    assert result.scores == {}, "those of the last weights"
    printed = run("export", tmp_path / "best", "--model", tmp_path / "again").stdout
    assert "weights in int8" in printed
    assert files(tmp_path / "again") == files(tmp_path / "best")
    export_model(trained, tmp_path / "again", force=True)
    x = torch.randint(4, (2, 9))
    with torch.no_grad():
        assert torch.equal(tcnca.load(tmp_path / "again")(x).logits, tcnca.load(trained)(x).logits)


def test_export_does_not_carry_the_folder_of_the_data(trained: Path, tmp_path: Path) -> None:
    moved = tmp_path / "run"
    shutil.copytree(trained, moved)
    recipe = load_recipe(str(moved / "recipe.yaml")).override({"data.folder": "/home/me/data"})
    (moved / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    export_model(moved, tmp_path / "small")
    assert load_recipe(str(tmp_path / "small" / "recipe.yaml")) == recipe.override({"data.folder": None})


def test_export_of_a_run_that_is_not_finished_or_of_a_saved_model(tmp_path: Path) -> None:
    fit(tmp_path / "stopped", stop_after=5)
    export_model(tmp_path / "stopped", tmp_path / "small", "bfloat16")
    assert set(files(tmp_path / "small")) == {"config.json", "model.safetensors", "recipe.yaml", "log.jsonl"}
    tcnca.save(tcnca.load(tmp_path / "small"), tmp_path / "saved")
    # Nothing of the model that was there before, nor of its evaluation.
    (tmp_path / "small" / "eval-test.json").write_text("{}", encoding="utf-8")
    result = run("export", tmp_path / "saved", "--model", tmp_path / "small", "--force")
    assert result.exit_code == 0, result.output
    assert "tcnca eval" not in result.stdout
    assert set(files(tmp_path / "small")) == {"config.json", "model.safetensors"}


def test_export_of_the_pretrained_model_is_the_pretrained_model(tmp_path: Path) -> None:
    """Rounding twice is rounding once."""
    export_model(None, tmp_path / "copy")
    copied, original = files(tmp_path / "copy"), files(pretrained.FOLDER)
    assert set(copied) == EXPORTED
    for name in ("model.safetensors", "log.jsonl", "result.json"):
        assert copied[name] == original[name], name
    # The other two list fields that models did not have when it was trained.
    recipes = [load_recipe(str(folder / "recipe.yaml")) for folder in (tmp_path / "copy", pretrained.FOLDER)]
    assert recipes[0] == recipes[1]
    assert tcnca.load(tmp_path / "copy").config == tcnca.load().config


def test_mistakes_of_export_are_answered(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"architectures": ["OtherModel"]}', encoding="utf-8")
    (tmp_path / "other" / "log.jsonl").write_text("{}", encoding="utf-8")
    untouched = files(tmp_path / "other")
    checkpoint = next((trained / "checkpoints").glob("step-*"))
    export_model(trained, tmp_path / "model")
    model = ("--model", tmp_path / "new")
    for arguments, message in (
        ((), "--onnx, --model, --hf: expected one of them, got none"),
        (
            ("--onnx", tmp_path / "a.onnx", *model),
            "--onnx, --model, --hf: expected one of them, got --onnx and --model",
        ),
        (("--onnx", tmp_path / "a.onnx", "--dtype", "int8"), "--dtype: expected it with --model"),
        (("--hf", tmp_path / "hf", "--dtype", "int8"), "--dtype: expected it with --model, got --hf"),
        (("--hf", tmp_path / "hf", "--length", 3), "--length: expected it with --onnx, got --hf"),
        ((*model, "--length", 3), "--length: expected it with --onnx"),
        ((*model, "--sequence"), "--step: expected it with --onnx"),
        (("--model", tmp_path / "full"), f"{tmp_path}/full: expected a new folder for the model, got one with 'thesis"),
        (("--model", tmp_path / "full", "--force"), f"{tmp_path}/full: expected a new folder for the model, got one w"),
        (("--model", trained, "--force"), f"{trained}: expected a new folder for the model, got one with '.lock'"),
        (("--model", checkpoint, "--force"), f"{checkpoint}: expected a new folder for the model, got one with 'opt"),
        (("--model", tmp_path / "other", "--force"), f"{tmp_path}/other/config.json: format: expected 'tcnca-model-2'"),
        (("--model", tmp_path / "model"), f"{tmp_path}/model: expected a new folder for the model, got one that exis"),
        (("--model", tmp_path / "full" / "thesis.txt"), f"{tmp_path}/full/thesis.txt: expected a folder to create"),
    ):
        result = run("export", trained, *arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {message}")
    assert not (tmp_path / "new").exists()
    assert files(tmp_path / "other") == untouched
    with pytest.raises(ConfigError, match="expected a new folder for the model, got one that exists"):
        export_model(tmp_path / "model", tmp_path / "model")
    # A damaged run leaves no half of a model.
    shutil.copytree(trained, tmp_path / "damaged")
    (tmp_path / "damaged" / "recipe.yaml").write_text("model: [", encoding="utf-8")
    assert run("export", tmp_path / "damaged", *model).exit_code == 1
    assert not (tmp_path / "new").exists()
    assert run("export", tmp_path / "nothing", *model).exit_code == 1
