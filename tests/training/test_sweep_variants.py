"""Variants are compared with everything else equal, by names, over seeds, and with the curves of all runs."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tcnca.cli import app
from tcnca.errors import ConfigError
from tcnca.training import load_recipe
from tcnca.training.recipe import same_key
from tcnca.training.shipped import shipped
from tcnca.training.sweeps.curves import draw_curves, read_curve, save_curves
from tcnca.training.sweeps.picture import draw
from tcnca.training.sweeps.plan import Sweep, plan
from tcnca.training.sweeps.table import Row, best_group, best_row, chosen, grouped, write_tables
from tcnca.training.sweeps.variants import load_variants
from tests.training.tiny import MODEL, SMALL, log, recipe, write_every_set

FILE = """
about: One line.
recipe: recall-64-10-mega
variants:
  plain: []
  wide: [d_model=48, 'betas=[0.9, 0.99]']
  none: [model.mixer=null]
"""


def written(folder: Path, text: str = FILE) -> str:
    path = folder / "some.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def planned(folder: Path, *changes: str, text: str = FILE, only: Sequence[str] = (), **more: Any) -> Sweep:
    variants = load_variants(written(folder, text), only)
    return plan("recall-small", changes, folder / "sweep", variants=variants, **more)


def test_each_variant_meets_all_values(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "seed=0,1", "max_steps=200", jobs=2)
    names = [f"variant={name},seed={seed}" for name in ("plain", "wide", "none") for seed in (0, 1)]
    assert [point.folder.name for point in sweep.points] == names
    wide = ["d_model=48", "betas=[0.9, 0.99]", "seed=1", "max_steps=200"]
    assert sweep.points[3].changes == wide
    assert sweep.train_command(sweep.points[3]) == ["train", "recall-small", *wide]
    assert sweep.points[3].recipe == load_recipe("recall-small").override(wide)
    assert sweep.points[0].recipe == load_recipe("recall-small").override(["seed=0", "max_steps=200"])
    assert (sweep.varied, sweep.compared, sweep.seed) == (["variant", "seed"], ["variant"], "seed")
    end = f"seed=0,1 max_steps=200 --variants {tmp_path}/some.yaml --out {tmp_path}/sweep --jobs 2"
    assert sweep.command == f"tcnca sweep recall-small {end}"


def test_a_variant_may_need_what_is_given_beside_it(tmp_path: Path) -> None:
    (point,) = planned(tmp_path, "warmup_steps=5", text="variants: {short: [max_steps=20]}").points
    assert (point.recipe.schedule.max_steps, point.recipe.schedule.warmup_steps) == (20, 5)
    with pytest.raises(ConfigError, match=r"variant short: schedule\.warmup"):
        planned(tmp_path, text="variants: {short: [max_steps=20]}")


def test_some_are_picked_and_keep_their_names(tmp_path: Path) -> None:
    sweep = planned(tmp_path, only=["none", "plain"])
    assert [point.folder.name for point in sweep.points] == ["variant=plain", "variant=none"]
    assert f"--variants {tmp_path}/some.yaml --only plain,none" in sweep.command
    # Also where there is but one, so that the next one finds room beside it.
    (alone,) = planned(tmp_path, only=["wide"]).points
    assert alone.folder.name == "variant=wide"


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ("[a]", r"some\.yaml: variants: got \['a'\], allowed are names with lists"),
        ("{}", "variants: got {}"),
        ("{a: }", r"variant a: got None, allowed is a list .*\[\] changes nothing"),
        ("{a: num_layers=2}", "variant a: got 'num_layers=2', allowed is a list"),
        ("{a: [layers]}", "variant a: got 'layers', allowed is key=value"),
        ("{a: [betas=[0.9]]}", "is not YAML"),
        ("{a: [layers: 2]}", "variant a: got {'layers': 2}, allowed is key=value"),
        ("{no: [], yes: []}", "got False for a name, .*quotes"),
        ("{'a,b': []}", "got 'a,b' for a name, allowed are a letter"),
        ("{'1e-3': []}", "got '1e-3' for a name"),
        ("{a: [], a: [num_layers=1]}", "the key a is given twice in line 1"),
        ("{a: [], b: [lyers=1]}", r"variant b: lyers: no such key .*model\.layers\?.* for recall-64-10-mega\)"),
        ("{a: [lr=fast]}", r"variant a: optimizer\.lr: got 'fast'"),
        ("{a: [d_model=1, model.width=2]}", "variant a: width: is given again under another name"),
        ("{a: [model.lyers=1]}", r"variant=a seed=0: .*did you mean layers\?.* for recall-64-10-mega\)"),
        ("{a: [num_layers=1], b: [model.layers=1]}", "variant: got a and b, which are the same"),
        ("{a: [], b: [model.mixer.convolutions=1]}", "variant=b seed=0: is the same as variant=a seed=0"),
        ("{a: [], b: [batch.seed=1]}", r"variant b: changes batch\.seed, and seed is given as well"),
    ],
)
def test_mistakes_name_the_variant_before_anything_runs(tmp_path: Path, variants: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, "seed=0", text=f"variants: {variants}\nrecipe: recall-64-10-mega\n")
    assert not (tmp_path / "sweep").exists()


def test_other_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"variants: got 'mixer', allowed are .*; did you mean mixers\?"):
        load_variants("mixer")
    with pytest.raises(ConfigError, match=r"variants: there is no file nothing\.yaml"):
        load_variants("nothing.yaml")
    with pytest.raises(ConfigError, match=r"abuot: no such key .* about, recipe, variants"):
        load_variants(written(tmp_path, "abuot: x\nvariants: {a: []}"))
    with pytest.raises(ConfigError, match=r"only: got 'plane', allowed are plain, wide, none; did you mean plain\?"):
        load_variants(written(tmp_path), ["plane"])
    with pytest.raises(ConfigError, match=r"variant: got plain, .*--only"):
        planned(tmp_path, "variant=plain")
    with pytest.raises(ConfigError, match="lerning_rate: no such key"):
        planned(tmp_path, "lerning_rate=1,2")
    # The recipe warms up over more updates than that, in whichever variant.
    with pytest.raises(ConfigError, match=r"^schedule\.warmup: got"):
        planned(tmp_path, "max_steps=20")
    alone = CliRunner().invoke(app, ["sweep", "recall-small", "seed=1,2", "--only", "a"])
    assert alone.exit_code == 1
    assert "only: got a, allowed is a choice of variants" in alone.output


def test_keys_are_the_same_by_any_name() -> None:
    assert same_key("kernel_size", "model.mixer.kernel_size")
    assert same_key("model", "model.preset")
    assert same_key("seed", "batch.seed")
    # The model's own is another than that of its part.
    assert not same_key("dropout", "model.mixer.dropout")
    assert not same_key("model.head.hidden", "model.mixer.d_state")
    assert not same_key("eval.every", "checkpoint.every")


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    write_every_set(folder)
    return folder


@pytest.mark.parametrize("name", shipped("variants"))
def test_variants_of_the_library_fit_their_recipe(name: str, sets: Path, tmp_path: Path) -> None:
    variants = load_variants(name)
    assert variants.about
    sweep = plan(variants.recipe, [f"data.folder={sets}", "seed=0,1"], tmp_path, variants=variants)
    assert len(sweep.points) == 2 * len(variants.changes)


def finished(sweep: Sweep, scores: Sequence[float | None]) -> list[Row]:
    """Rows of runs with these scores on the validation split, and a half of them on the other; None has failed."""
    found = zip(sweep.points, scores, strict=True)
    return [
        Row(point=point, state="failed", error="broken")
        if score is None
        else Row(point=point, state="done", scores={"validation": score, "test": score / 2})
        for point, score in found
    ]


def test_the_choice_is_by_the_mean_over_seeds(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "batch.seed=0,1,2")
    # The best single run is of a variant with a worse mean, and the best mean of one that has failed once.
    scores = [0.5, 0.6, 0.65, 0.9, 0.1, 0.2, 0.8, 0.8, None]
    rows = finished(sweep, scores)
    best = best_group(sweep, rows)
    assert best is not None
    assert best.rows == rows[:3]
    assert best_row(sweep, rows) is rows[3]
    assert [group.rows[0].point.values["variant"] for group in grouped(sweep, rows)] == ["plain", "wide", "none"]
    said = chosen(sweep, rows)
    assert "greatest mean validation accuracy over 3 seeds, 0.5833: variant=plain. Its mean test" in said
    assert f"accuracy is {statistics.fmean([0.25, 0.3, 0.325]):.4f}" in said
    sweep.folder.mkdir()
    write_tables(sweep, rows)
    page = (sweep.folder / "sweep.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page[page.index("Over seeds:") :].splitlines() if "|" in line]
    assert lines[0] == ["variant", "seeds", "mean validation", "standard deviation"]
    assert lines[2] == [f"**{text}**" for text in ("plain", "3", "0.5833", "0.0764")]
    assert lines[3:] == [["wide", "3", "0.4000", "0.4359"], ["none", "2 of 3", "0.8000", "0.0000"]]
    assert "One line.\n\n- plain: the recipe as it is\n- wide: `d_model=48 betas=[0.9, 0.99]`" in page
    assert page.count("    tcnca train recall-small batch.seed=") == 3
    rings = [line for line in draw(sweep, rows).axes[0].get_lines() if line.get_markeredgecolor() == "black"]
    assert [float(np.asarray(ring.get_xdata())[0]) for ring in rings] == scores[:3]
    # None is chosen before all is known; the picture has what there is.
    few = finished(sweep, [0.5, None, None] * 3)
    assert best_group(sweep, few) is None
    assert chosen(sweep, few) == "None is chosen, as none has a score for every seed."
    picture = draw(sweep, few)
    assert len(picture.axes[0].get_yticks()) == 3
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["validation", "test", "failed"]


def test_without_several_seeds_there_is_no_second_table(tmp_path: Path) -> None:
    sweep = planned(tmp_path, "seed=3")
    sweep.folder.mkdir()
    write_tables(sweep, finished(sweep, [0.1, 0.2, 0.3]))
    page = (sweep.folder / "sweep.md").read_text()
    assert "Over seeds" not in page
    assert "Chosen by the greatest validation accuracy, 0.3000: variant=none." in page


def logged(folder: Path, seconds: float, scores: Sequence[float | None]) -> None:
    """A log with a line for each ten updates and a validation after each fifteen; compiling took a minute."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {"step": step, "seconds": 60 + seconds * step, "loss": 1.0} for step in range(10, 101, 10)
    ]
    lines += [{"step": 15 * n, "split": "validation", "score": score} for n, score in enumerate(scores, 1)]
    lines += [{"step": 15 * len(scores), "split": "test", "score": 0.0}]
    lines.sort(key=lambda line: line["step"])
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_curves_are_over_updates_and_over_time(tmp_path: Path) -> None:
    sweep = dataclasses.replace(planned(tmp_path, "seed=0,1"), higher_is_better=False)
    for place, point in enumerate(sweep.points[:4]):
        logged(point.folder, 0.5 + place, [9.0 + place, 3.0, None, 2.5 + place, 2.0 + place])
    curve = read_curve(sweep, sweep.points[1])
    assert curve.name == "plain"
    assert curve.updates.tolist() == [15, 30, 45, 60, 75]
    # Between lines of the log, and without what came before the first, at ten updates.
    assert curve.seconds.tolist() == pytest.approx([7.5, 30.0, 52.5, 75.0, 97.5])
    assert curve.scores.tolist() == pytest.approx([10.0, 3.0, math.nan, 3.5, 3.0], nan_ok=True)

    curves = [read_curve(sweep, point) for point in sweep.points[:4]]
    figure = draw_curves(sweep, curves)
    over_updates, over_time = figure.axes
    assert (over_updates.get_xlabel(), over_time.get_xlabel()) == ("max_steps", "seconds after the first updates")
    assert over_updates.get_ylabel() == "validation accuracy"
    for axes, name in ((over_updates, "max_steps"), (over_time, "seconds")):
        lines = [line for line in axes.get_lines() if line.get_marker() == "None"]
        for line, drawn in zip(lines, curves, strict=True):
            np.testing.assert_array_equal(np.asarray(line.get_xydata()).T, [getattr(drawn, name), drawn.scores])
        colors = [line.get_color() for line in lines]
        assert colors[0] == colors[1] != colors[2] == colors[3]
    # From the best score to the worst end; the beginning is cut off.
    low, high = over_updates.get_ylim()
    assert (low, high) == pytest.approx((1.82, 5.18))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["wide  4.500", "plain  2.500"]
    assert save_curves(sweep) == sweep.folder / "curves.png"


def test_curves_show_runs_that_end_worse_than_they_began(tmp_path: Path) -> None:
    sweep = dataclasses.replace(planned(tmp_path), higher_is_better=False)
    for point, scores in zip(sweep.points, ([5.0, 3.0, 2.0], [5.0, 3.0, 2.5], [5.0, 8.0, 9.0]), strict=True):
        logged(point.folder, 1.0, scores)
    over_updates, _ = draw_curves(sweep, [read_curve(sweep, point) for point in sweep.points]).axes
    low, high = over_updates.get_ylim()
    assert low < 2.0
    assert high > 9.0


def test_curves_of_many_runs_are_not_drawn(tmp_path: Path) -> None:
    many = plan("recall-small", [f"seed={','.join(map(str, range(25)))}"], tmp_path / "many")
    few = plan("recall-small", [f"seed={','.join(map(str, range(24)))}"], tmp_path / "few")
    assert save_curves(few) is None
    for sweep in (many, few):
        logged(sweep.points[0].folder, 1.0, [0.5])
    assert (save_curves(many), save_curves(few)) == (None, tmp_path / "few" / "curves.png")


def test_help_and_dry_run_show_variants(tmp_path: Path) -> None:
    shown = " ".join(CliRunner().invoke(app, ["sweep", "--help"]).output.split())
    assert "tcnca sweep enwik8-short seed=0,1 --variants mixers --only ema,tcn" in shown
    arguments = ["sweep", "recall-small", "--variants", written(tmp_path), "--out", str(tmp_path / "sweep")]
    done = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert done.exit_code == 0, done.output
    # They were made for another recipe.
    note, *found = [shlex.split(line) for line in done.output.splitlines()]
    assert (note[0], note[-1]) == ("note:", "recall-small")
    start = ["waiting", "tcnca", "train", "recall-small"]
    assert found == [
        [*start, *changes, "--out", f"{tmp_path}/sweep/variant={name}"]
        for name, changes in load_variants(written(tmp_path)).changes.items()
    ]


@pytest.mark.slow
def test_a_real_sweep_of_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "sweep"
    file = written(tmp_path, "variants: {plain: [], none: [model.mixer=null], two: [convolutions=2]}")
    start = ["sweep", "recall-small", *SMALL, *MODEL, "seed=0,1", "--variants", file]
    arguments = [*start, "--device", "cpu", "--out", str(folder), "--jobs", "2"]
    done = CliRunner().invoke(app, [*arguments, "--only", "none,plain"])
    assert done.exit_code == 0, done.output
    assert "sweep.csv, sweep.md, sweep.png, curves.png" in done.output
    assert re.search(r"Over seeds\s+variant +seeds +mean validation +standard deviation", done.output)
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file_of_rows:
        rows = list(csv.DictReader(file_of_rows))
    assert next(iter(rows[0])) == "variant"
    assert [(row["variant"], row["seed"]) for row in rows] == [(a, b) for a in ("plain", "none") for b in "01"]
    assert load_recipe(f"{rows[3]['folder']}/recipe.yaml") == recipe("model.mixer=null", "seed=1")
    last = log(folder / "variant=none,seed=1")[-2]
    assert (last["split"], last["score"]) == ("validation", float(rows[3]["validation"]))
    with Image.open(folder / "curves.png") as picture:
        assert picture.width > 1000
    # The same with one more goes on with that one.
    more = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert [line.split()[0] for line in more.output.splitlines()] == ["done"] * 4 + ["waiting"] * 2
