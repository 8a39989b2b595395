"""The runs behind the paper's tables, their results, and the report of both."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import shutil
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tcnca.cli import app
from tcnca.cli import reproduce as command
from tcnca.errors import ConfigError, DataError
from tcnca.report import page, results, runs, tables
from tcnca.report.page import BEGIN, END, fill_summary, summary, write_report
from tcnca.report.results import (
    RunResult,
    cell_recipe,
    read_results,
    read_run_result,
    result_path,
    results_of,
    write_result,
)
from tcnca.report.runs import select_runs
from tcnca.report.tables import TABLES, Cell, Table
from tcnca.training import load_recipe
from tests.training.tiny import MODEL, SMALL

TINY = (*SMALL, *MODEL, "runtime.threads=1")


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=True)


def tiny_table() -> Table:
    cells = (
        Cell(row="TCNCA", column="16", paper=50.0, recipe="recall-small", changes=TINY),
        Cell(row="MEGA", column="16", paper=12.5),
    )
    return Table(name="tiny", title="Tiny <table>", source="Table 9", metric="accuracy", cells=cells)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Table:
    """The only table, with one small run."""
    found = {"tiny": tiny_table()}
    for module in (tables, results, runs, page, command):
        monkeypatch.setattr(module, "TABLES", found)
    return found["tiny"]


def run_result(table: Table, cell: Cell, score: float, **changes: object) -> RunResult:
    result = RunResult(
        table=table.name,
        row=cell.row,
        column=cell.column,
        recipe=cell.recipe,
        changes=list(cell.changes),
        settings=cell_recipe(cell, int(changes.get("seed", 0)), "cpu").to_dict(),  # type: ignore[call-overload]
        seed=0,
        budget=None,
        command="tcnca train <recipe>",
        scores={"validation": score, "test": score},
        answers={"validation": 10, "test": 10},
        steps=12,
        tokens=120,
        seconds=3.0,
        tokens_per_second=40.0,
        memory_gib=None,
        parameters=100,
        curve=[[6, 1.5, score / 2], [12, 3.0, score]],
        hardware=[{"device": "cpu", "name": "A <CPU>", "cores": 2}],
        versions={"torch": "2"},
        commits=[],
        started="2026-01-01T00:00:00+00:00",
    )
    return dataclasses.replace(result, **changes)  # type: ignore[arg-type]


def test_every_run_of_the_tables_is_a_valid_recipe() -> None:
    without = []
    for table in TABLES.values():
        assert len(table.cells) == len(table.rows) * len(table.columns)
        assert len({cell.name for cell in table.cells}) == len(table.cells)
        for cell in table.cells:
            if cell.recipe:
                load_recipe(cell.recipe).override(cell.changes).validate()
            else:
                without.append((cell.row, cell.column))
    # Nothing is published for these.
    assert without == [("CDIL-CNN", "ListOps"), ("CDIL-CNN", "Path-X")]


def test_values_of_the_paper_are_in_the_units_of_their_table() -> None:
    for table in TABLES.values():
        low, high = (12.0, 100.0) if table.higher_is_better else (1.0, 2.0)
        values = [cell.paper for cell in table.cells if cell.paper is not None]
        assert values
        assert all(low <= value <= high for value in values)


def test_averages_are_of_whole_rows(tmp_path: Path) -> None:
    table = TABLES["lra"]
    papers = {row: [cell.paper for cell in table.cells if cell.row == row] for row in table.rows}
    for row, average in table.averages.items():
        # The paper rounds both.
        assert statistics.fmean(value for value in papers[row] if value is not None) == pytest.approx(
            average, abs=0.051
        )
    cells = [cell for cell in table.cells if cell.row == "TCNCA"]

    def shown() -> str:
        lines = write_report(tmp_path, tmp_path)[1].read_text(encoding="utf-8").splitlines()
        row = next(line for line in lines if line.startswith("| TCNCA ") and line.count("|") == 9)
        return row.split("|")[-2].strip()

    for score, cell in enumerate(cells):
        assert shown() == "not run (85.5)"
        result = run_result(table, cell, score / 10, budget=cell.budget)
        write_result(result_path(tmp_path, table, cell, cell.budget, 0), result)
    assert shown() == "25.0 (85.5)"


def test_runs_in_minutes_warm_up_alike() -> None:
    """With a budget, only the share of the warm-up in the steps matters."""
    for table in TABLES.values():
        for cell in table.cells:
            if cell.budget is None or not cell.recipe or "recipe)" in cell.row:
                continue
            published = load_recipe(cell.recipe)
            recipe = published.override(cell.changes)
            if cell.column == "Text":
                assert (recipe.optimizer, recipe.schedule) == (published.optimizer, published.schedule), cell
            else:
                assert recipe.schedule.warmup_steps / recipe.schedule.max_steps == pytest.approx(0.025), cell


def test_rows_and_columns_are_selected_by_name(tmp_path: Path) -> None:
    def selected(*only: str) -> set[tuple[str, str]]:
        found = select_runs(["lra"], only, results=tmp_path, runs=tmp_path)
        return {(run.cell.row, run.cell.column) for run in found}

    assert len(selected()) == 58
    assert selected("image", "TCNCA", "mega-chunk") == {("TCNCA", "Image"), ("MEGA-chunk", "Image")}
    assert selected("cdil-cnn") == {("CDIL-CNN", name) for name in ("Text", "Retrieval", "Image", "Pathfinder")}
    with pytest.raises(ConfigError, match=r"--only.*got imagenet"):
        selected("imagenet")
    with pytest.raises(ConfigError, match="--budget: expected none with enwik8"):
        select_runs(["lra", "enwik8"], budget=90.0, results=tmp_path, runs=tmp_path)


def test_commands_have_changes_budget_and_seed(tmp_path: Path) -> None:
    (run,) = select_runs(["lra"], ["image", "tcnca"], seeds=[3], budget=90.0, results=tmp_path, runs=tmp_path / "runs")
    assert run.command("cpu")[:2] == ["train", "image-tcnca"]
    assert run.command("cpu")[-5:] == ["batch.seed=3", "--budget", "90s", "--device", "cpu"]
    assert run.path == tmp_path / "lra" / "tcnca,image,90s,seed=3.json"
    assert run.folder == tmp_path / "runs" / "lra" / "tcnca,image,90s,seed=3"


def test_a_cell_shows_its_largest_budget_and_all_seeds(tmp_path: Path) -> None:
    table = TABLES["lra"]
    cell = table.cells[0]
    made = [
        run_result(table, cell, 0.1, budget=60.0),
        run_result(table, cell, 0.5, budget=600.0, started="2026-01-01T00:00:00+00:00"),
        run_result(table, cell, 0.6, budget=600.0, started="2026-01-02T00:00:00+00:00"),
        run_result(table, cell, 0.8, budget=600.0, seed=1),
        run_result(table, cell, 0.9, budget=900.0, settings={"optimizer": {"lr": 0.5}}),  # of an earlier recipe
        run_result(table, cell, 0.9, budget=900.0, settings={"optimizer": {"speed": 0.5}}),  # with a key that is gone
        run_result(table, table.cells[1], 0.95, budget=900.0),
        run_result(table, cell, 0.99, budget=600.0, seed=2, hardware=[{"device": "cpu", "name": "Another"}]),
    ]
    # The runs on another machine are older.
    made[-1] = dataclasses.replace(made[-1], started="2025-01-01T00:00:00+00:00")
    assert [each.scores["test"] for each in results_of(made, table, cell)] == [0.6, 0.8]
    value = page.cell_value(table, cell, made)
    assert value.ours == pytest.approx(70.0)
    assert value.cost.startswith("mean of 2 seeds, 0:10:00, A <CPU>")
    assert value.spread == pytest.approx(14.142, abs=1e-3)


def test_all_steps_are_more_than_any_budget_and_columns_of_times_are_exact() -> None:
    recall, enwik8 = TABLES["recall-10"], TABLES["enwik8"]
    made = [run_result(recall, recall.cells[0], 0.9), run_result(recall, recall.cells[0], 0.1, budget=10.0)]
    assert [each.scores["test"] for each in results_of(made, recall, recall.cells[0])] == [0.9]
    cell = enwik8.cells[0]
    made = [run_result(enwik8, cell, 1.2, budget=cell.budget), run_result(enwik8, cell, 1.1, budget=1200.0)]
    assert [each.scores["test"] for each in results_of(made, enwik8, cell)] == [1.2]


def test_a_score_that_is_not_a_number_is_shown(tmp_path: Path, tiny: Table) -> None:
    result = run_result(tiny, tiny.cells[0], 0.5, scores={"test": None})
    write_result(result_path(tmp_path, tiny, tiny.cells[0], None, 0), result)
    assert read_results(tmp_path) == [result]
    text = write_report(tmp_path, tmp_path)[1].read_text(encoding="utf-8")
    assert text.count("not finite") == 2  # in its cell and in the list of all runs
    assert "| nan" not in text


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    table = TABLES["enwik8"]
    result = run_result(table, table.cells[0], 1.25, budget=330.0, evaluations={"state not carried": 1.5})
    path = result_path(tmp_path, table, table.cells[0], 330.0, 0)
    write_result(path, result)
    assert read_results(tmp_path) == [result]
    path.write_text(path.read_text().replace('"steps": 12', '"steps": "many"'))
    with pytest.raises(DataError, match="steps"):
        read_run_result(path)


class _Tags(html.parser.HTMLParser):
    """Collects what a page opens, closes and refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_no_network_and_shows_what_was_not_run(tmp_path: Path, tiny: Table) -> None:
    write_result(result_path(tmp_path, tiny, tiny.cells[0], None, 0), run_result(tiny, tiny.cells[0], 0.456))
    html_path, markdown_path = write_report(tmp_path, tmp_path)
    text = html_path.read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(text)
    assert not tags.open
    assert all(link.startswith("#") for link in tags.links)
    assert "<table>Tiny" not in text
    assert "Tiny &lt;table&gt;" in text
    assert "<b>45.6</b>" in text
    assert "paper 50.0" in text
    assert "A &lt;CPU&gt;" in text
    assert "tcnca train &lt;recipe&gt;" in text
    assert "<svg" in text
    lines = markdown_path.read_text(encoding="utf-8").splitlines()
    assert any(re.match(r"\| TCNCA +\| 45\.6 \(50\.0; 12 steps, A <CPU>, 2 threads\) \|", line) for line in lines)
    # So do the paper's run times, none of which is measured.
    assert any(re.match(r"\| TCNCA over MEGA by FFT .*\| 1\.373× +\| not run +\| not run", line) for line in lines)
    assert any(re.match(r"\| MEGA +\| – \(12\.5\) +\|", line) for line in lines)
    assert (tmp_path / "figures" / "tiny.svg").is_file()
    # Without the result, the cell says that it was not run, and there is no figure.
    for path in (tmp_path / "tiny").iterdir():
        path.unlink()
    text = write_report(tmp_path, tmp_path / "empty")[0].read_text(encoding="utf-8")
    assert "<span class='none'>not run</span>" in text
    assert "<svg" not in text
    assert "0 of 1" in text


def test_a_readme_is_filled_between_its_marks(tmp_path: Path, tiny: Table) -> None:
    write_result(result_path(tmp_path, tiny, tiny.cells[0], None, 0), run_result(tiny, tiny.cells[0], 0.456))
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    assert fill_summary(readme, tmp_path)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert summary(read_results(tmp_path)) in text
    assert "| 45.6 " in text
    assert not fill_summary(readme, tmp_path)
    readme.write_text("no marks", encoding="utf-8")
    with pytest.raises(ConfigError, match="expected the lines"):
        fill_summary(readme, tmp_path)


def test_a_table_is_run_resumed_and_reported(tmp_path: Path, tiny: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "tiny", "--device", "cpu"]
    dry = invoke(*words, "--dry-run")
    assert dry.exit_code == 0
    assert dry.stdout.startswith("waiting  tcnca train recall-small data=recall-16")
    # A run that was stopped is continued only if asked to, as by `tcnca train`.
    folder = tmp_path / "runs" / "reproduce" / "tiny" / "tcnca,16"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(load_recipe("recall-small").override(TINY).for_device("cpu").to_yaml())
    refused = invoke(*words)
    assert refused.exit_code == 1
    assert "continue with --resume" in refused.output
    first = invoke(*words, "--resume")
    assert first.exit_code == 0, first.output
    path = tmp_path / "results" / "tiny" / "tcnca,16.json"
    result = read_run_result(path)
    trained = json.loads((folder / "result.json").read_text())
    assert result.scores == {split: score["value"] for split, score in trained["scores"].items()}
    assert result.steps == 12
    assert [step for step, *_ in result.curve] == [6, 12]
    assert result.command.startswith("tcnca train recall-small data=recall-16")
    # What is done is not repeated, and a result that was lost is collected again.
    before = path.read_bytes()
    again = invoke(*words)
    assert again.exit_code == 0
    assert "1 already done" in again.output
    path.unlink()
    assert invoke(*words).exit_code == 0
    assert path.read_bytes() == before
    assert "1 done" in invoke("reproduce").output
    # A run of another definition of the cell is neither taken for one of this, nor continued.
    path.unlink()
    (folder / "recipe.yaml").write_text(load_recipe("recall-small").override([*TINY, "lr=0.5"]).to_yaml())
    assert invoke(*words, "--dry-run").output.startswith("outdated")
    outdated = invoke(*words, "--resume")
    assert outdated.exit_code == 1
    assert "holds a run of another recipe" in outdated.output
    assert not path.exists()
    path.write_bytes(before)
    shown = invoke("report")
    assert shown.exit_code == 0
    assert shown.output.split() == ["results/report.html", "results/report.md"]


def test_each_benchmark_has_its_own_figure(tmp_path: Path) -> None:
    """Also two of one suite; one that was stopped before it measured anything has none."""
    speed = Path(__file__).parents[2] / "results" / "speed" / "model.json"
    content = json.loads(speed.read_text(encoding="utf-8"))
    (tmp_path / "speed").mkdir()
    shutil.copy(speed, tmp_path / "speed" / "one.json")
    for name, changes in (
        ("two", {"hardware": {**content["hardware"], "name": "a laptop"}}),
        ("none", {"results": []}),
    ):
        (tmp_path / "speed" / f"{name}.json").write_text(json.dumps({**content, **changes}), encoding="utf-8")
    page, text = (path.read_text(encoding="utf-8") for path in write_report(tmp_path, tmp_path))
    assert re.findall(r"figures/(speed-.*)\.svg", text) == ["speed-one", "speed-two"]
    assert page.count("<figure><svg") == 2
    assert "a laptop" in (tmp_path / "figures" / "speed-two.svg").read_text(encoding="utf-8")
    assert "speed/none.json" in text


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "file"
    file.touch()
    for words, message in (
        (["reproduce", "figure-9"], "TABLE: expected one of recall-10"),
        (["reproduce", "lra", "--seeds", "a"], "--seeds: expected numbers"),
        (["reproduce", "lra", "--seeds", "-1"], "--seeds: expected numbers"),
        (["reproduce", "lra", "--budget", "soon"], "--budget"),
        (["reproduce", "speed", "--only", "tcnca"], "--only: expected names"),
        (["reproduce", "recall-10", "--results", f"{file}/results"], "--results: "),
        (["report", str(tmp_path / "none")], "expected the folder that"),
    ):
        result = invoke(*words)
        assert result.exit_code == 1
        assert message in result.output


def test_the_report_is_up_to_date(tmp_path: Path) -> None:
    """Otherwise run `tcnca report --readme README.md`."""
    committed, folder = Path(__file__).parents[2] / "results", tmp_path / "results"
    assert summary(read_results(committed)) in (committed.parent / "README.md").read_text(encoding="utf-8")
    shutil.copytree(committed, folder, ignore=shutil.ignore_patterns("report.*", "figures"))
    page, text = (path.read_text(encoding="utf-8") for path in write_report(folder, folder))
    assert text == (committed / "report.md").read_text(encoding="utf-8")
    figures = re.findall(r"!\[.*\]\((figures/.*\.svg)\)", text)
    assert {"figures/speed-ops.svg", "figures/speed-model.svg"} <= set(figures)
    assert all((committed / name).is_file() and (folder / name).is_file() for name in figures)
    assert page.count("<figure><svg") == len(figures)
