"""The report: all tables with the paper's values and ours, as Markdown and as one page of HTML, with figures."""

from __future__ import annotations

import functools
import html
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tcnca.bench.plot import save_plot
from tcnca.bench.report import MODES, PUBLISHED, Report, format_sizes, read_json
from tcnca.errors import ConfigError, plural
from tcnca.extras import require
from tcnca.files import atomic_write
from tcnca.report.results import RunResult, describe_hardware, read_results, results_of, speed_paths
from tcnca.report.tables import SPEED, TABLES, Cell, Table
from tcnca.training.report import GRAY, duration, markdown_table, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HTML, MARKDOWN, FIGURES = "report.html", "report.md", "figures"
BEGIN, END = "<!-- tcnca report: begin -->", "<!-- tcnca report: end -->"
"""Lines of a README between which the summary is written."""
_NONE = "–"
_NO_CELL = Cell(row="", column="")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #999; }
small, .none { color: #666; } .none { font-size: .85em; } td b { font-size: 1.05em; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; }
code { background: #f4f4f4; padding: .1em .3em; } details table { font-size: .85em; } .wide { overflow-x: auto; }
"""


class Value(NamedTuple):
    """What a cell of the report shows."""

    paper: float | None
    ours: float | None
    """Mean over seeds."""
    spread: float | None
    """Standard deviation over seeds, if there are several."""
    cost: str
    """What a run was given: time or steps, and the machine; and the number of seeds if there are several."""
    runnable: bool


def cell_value(table: Table, cell: Cell, results: Sequence[RunResult]) -> Value:
    """Return what the report shows of a cell."""
    found = [each for each in results_of(results, table, cell) if "test" in each.scores]
    scores = [math.nan if (score := each.scores["test"]) is None else table.scale * score for each in found]
    return Value(
        paper=cell.paper,
        ours=statistics.fmean(scores) if scores else None,
        spread=statistics.stdev(scores) if len(scores) > 1 else None,
        cost=(f"mean of {len(found)} seeds, " if found[1:] else "") + found[0].cost if found else "",
        runnable=bool(cell.recipe),
    )


def _values(table: Table, results: Sequence[RunResult]) -> tuple[list[str], dict[str, list[Value]]]:
    """Return the titles of a table's columns and the values of its rows, with their means if the paper has them."""
    rows = {row: [cell_value(table, cell, results) for cell in table.cells if cell.row == row] for row in table.rows}
    if not table.averages:
        return table.columns, rows
    for row, values in rows.items():
        ours = [value.ours for value in values if value.ours is not None]
        mean = statistics.fmean(ours) if len(ours) == len(values) else None
        runnable = all(value.runnable for value in values)
        values.append(Value(paper=table.averages.get(row), ours=mean, spread=None, cost="", runnable=runnable))
    return [*table.columns, "average"], rows


def write_report(folder: Path, out: Path) -> tuple[Path, Path]:
    """Write `report.html` and `report.md` from the results in a folder. Returns both paths."""
    require("plots", "figures of the report")
    results = read_results(folder)
    speed = {_relative(path, out): read_json(path) for path in speed_paths(folder)}
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    pictures = {}
    for table in TABLES.values():
        values = {cell: cell_value(table, cell, results) for cell in table.cells}
        if any(value.ours is not None for value in values.values()):
            figure = out / FIGURES / f"{table.name}.svg"
            save_figure(functools.partial(_figure, table, values, results), figure)
            pictures[table.name] = figure.read_text(encoding="utf-8")
    for path, report in speed.items():
        figure = out / FIGURES / _speed_figure(path)
        if save_plot(figure, report):
            pictures[path] = figure.read_text(encoding="utf-8")
    atomic_write(out / MARKDOWN, _markdown(results, speed, pictures))
    atomic_write(out / HTML, _html(results, speed, pictures))
    return out / HTML, out / MARKDOWN


def summary(results: Sequence[RunResult]) -> str:
    """Return one table in Markdown, with a line for each task that was run: the paper's values and ours."""
    families = {"TCNCA": ("TCNCA", "TCNCA-simple"), "TCNCA-linear": ("TCNCA-linear",), "MEGA": ("MEGA", "MEGA-chunk")}
    body = []
    for table in TABLES.values():
        for column in table.columns:
            values = {}
            for family, rows in families.items():
                cells = [cell for cell in table.cells if cell.column == column and cell.row in rows]
                values[family] = cell_value(table, cells[0] if cells else _NO_CELL, results)
            if table.name == "attention" or all(value.ours is None for value in values.values()):
                continue
            papers = [_number(table, values[family].paper) for family in ("TCNCA", "MEGA")]
            ours = [_ours(table, value, "not run") for value in values.values()]
            costs = dict.fromkeys(value.cost for value in values.values() if value.cost)
            body.append([f"{table.title}, {column}", *papers, *ours, "; ".join(costs) or _NONE])
    titles = ["task", "TCNCA (paper)", "MEGA (paper)", *families, "how ours was trained"]
    return markdown_table(titles, body)


def fill_summary(path: Path, folder: Path) -> bool:
    """Write the summary between the marks of a README. Returns whether that changed it."""
    before = path.read_text(encoding="utf-8")
    start, begin, rest = before.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path}: expected the lines {BEGIN} and {END}, between which the table is written")
    text = f"{start}{BEGIN}\n\n{summary(read_results(folder))}\n\n{END}{after}"
    if text != before:
        atomic_write(path, text)
    return text != before


# Texts of numbers


def _number(table: Table, value: float | None) -> str:
    if value is None:
        return _NONE
    if table.higher_is_better:
        return f"{value:.1f}" if round(value, 1) == round(value, 2) else f"{value:.2f}"
    return f"{value:.4f}".rstrip("0").rstrip(".")


def _score(table: Table, score: float | None) -> str:
    return _ours(table, Value(None, math.nan if score is None else table.scale * score, None, "", True), "")


def _ours(table: Table, value: Value, missing: str) -> str:
    if value.ours is None:
        return missing if value.runnable else _NONE
    if not math.isfinite(value.ours):
        return "not finite"
    digits = 1 if table.higher_is_better else 4
    spread = "" if value.spread is None else f" ± {value.spread:.{digits}f}"
    return f"{value.ours:.{digits}f}{spread}"


def _relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path, out)).as_posix()


def _short_commit(commit: str) -> str:
    """Return the first digits of a commit, and `+changes` if the source had changes that were not committed."""
    name, plus, changes = commit.partition("+")
    return name[:12] + plus + changes


def _all_runs(table: Table, results: Sequence[RunResult]) -> Iterator[list[str]]:
    """Yield a line for each result of a table, also of those that its cells do not show."""
    for each in results:
        if each.table == table.name:
            shown = [_score(table, score) for score in each.scores.values()]
            more = [f"{name} {_score(table, score)}" for name, score in each.evaluations.items()]
            shared = f" ({each.jobs} at a time)" if each.jobs > 1 else ""
            yield [
                each.row,
                each.column,
                str(each.seed),
                " / ".join(shown) + (f" ({', '.join(more)})" if more else ""),
                f"{each.steps:,}",
                f"{each.tokens:,}",
                duration(each.seconds),
                _NONE if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}{shared}",
                f"{each.parameters:,}",
                _NONE if each.memory_gib is None else f"{each.memory_gib:.1f}",
                each.cost,
                ", ".join(map(_short_commit, each.commits)) or _NONE,
                each.command,
            ]


_RUN_TITLES = [
    "model",
    "column",
    "seed",
    "validation / test",
    "steps",
    "tokens",
    "time",
    "tokens/s",
    "parameters",
    "GiB",
    "given",
    "commit",
    "command",
]


def _speed_rows(reports: Sequence[Report]) -> list[list[str]]:
    """Return a line for each number of the paper, with ours as a CUDA graph and as called."""
    rows = []
    for goal in PUBLISHED:
        ours = dict.fromkeys(MODES, "not run")
        machines = []
        for report in reports:
            for ratio in report.ratios:
                if (ratio.title, ratio.phase) == (goal.title, goal.phase) and goal.sizes.items() <= ratio.sizes.items():
                    ours[ratio.mode] = f"{ratio.value:.2f}×"
                    machines.append(describe_hardware(report.hardware))
        machine = ", ".join(dict.fromkeys(machines)) or _NONE
        rows.append([goal.title, format_sizes(goal.sizes), goal.phase, f"{goal.paper:g}×", *ours.values(), machine])
    return rows


def _about_speed(report: Report) -> str:
    """Return when a benchmark was measured, of which commit, and whether it was stopped before its end."""
    commit = f", commit {_short_commit(report.commit)}" if report.commit else ""
    ending = ", stopped before its end" if report.interrupted else ""
    return f"measured on {report.started[:10]}{commit}{ending}"


def _speed_figure(path: str) -> str:
    return f"{SPEED}-{Path(path).stem}.svg"


_SPEED_TITLES = ["what", "sizes", "phase", "paper (V100)", "ours, CUDA graph", "ours, as called", "machine"]
_SPEED_ABOUT = "Ratios of run times; above 1 the first of the two is faster."


def _intro(results: Sequence[RunResult]) -> str:
    cells = [(table, cell) for table in TABLES.values() for cell in table.cells if cell.recipe]
    done = sum(bool(results_of(results, table, cell)) for table, cell in cells)
    return (
        f"The tables of the TCNCA paper (Terzić et al., 2023) beside what this library measures: {done} of "
        f"{len(cells)} cells were run. Each shows our score on test, the paper's value, and what our run was given. "
        "A cell that was not run says so. Scores that are worse than the paper's are shown like the others."
    )


# Markdown


def _markdown(results: Sequence[RunResult], speed: dict[str, Report], pictures: dict[str, str]) -> str:
    parts = ["# The paper's results and ours", _intro(results)]
    for table in TABLES.values():
        parts += [
            f"## {table.title}",
            f"{table.source} of the paper. {table.about} Ours (the paper's; what ours was given).",
        ]
        columns, rows = _values(table, results)
        body = [[row, *(_markdown_cell(table, value) for value in values)] for row, values in rows.items()]
        parts.append(markdown_table(["", *columns], body))
        if table.name in pictures:
            parts.append(f"![{table.title}: ours and the paper's]({FIGURES}/{table.name}.svg)")
        if runs := list(_all_runs(table, results)):
            parts += ["All runs:", markdown_table(_RUN_TITLES, [[*line[:-1], f"`{line[-1]}`"] for line in runs])]
    parts += ["## Speed", _SPEED_ABOUT, markdown_table(_SPEED_TITLES, _speed_rows(list(speed.values())))]
    for path, report in speed.items():
        parts.append(f"[{path}]({path}), {_about_speed(report)}: `{report.command}`")
        if path in pictures:
            parts.append(f"![{SPEED}, {report.suite}]({FIGURES}/{_speed_figure(path)})")
    parts += [f"Repeat a table with `tcnca reproduce NAME`: {', '.join([*TABLES, SPEED])}."]
    return "\n\n".join(parts) + "\n"


def _markdown_cell(table: Table, value: Value) -> str:
    notes = [_number(table, value.paper)] if value.paper is not None else []
    notes += [value.cost] if value.cost else []
    ours = _ours(table, value, "not run")
    return f"{ours} ({'; '.join(notes)})" if notes else ours


# HTML


def _html(results: Sequence[RunResult], speed: dict[str, Report], pictures: dict[str, str]) -> str:
    parts = [f"<h1>The paper's results and ours</h1><p>{html.escape(_intro(results))}</p>"]
    for table in TABLES.values():
        about = f"{table.source} of the paper. {table.about}"
        parts.append(f"<h2 id='{table.name}'>{html.escape(table.title)}</h2><p>{_code(about)}</p>")
        columns, rows = _values(table, results)
        body = [[html.escape(row), *(_html_cell(table, value) for value in values)] for row, values in rows.items()]
        parts.append(_html_table(["", *columns], body))
        if table.name in pictures:
            parts.append(_html_figure(pictures[table.name]))
        if runs := list(_all_runs(table, results)):
            lines = [
                [html.escape(text) for text in line[:-1]] + [f"<code>{html.escape(line[-1])}</code>"] for line in runs
            ]
            inner = _html_table(_RUN_TITLES, lines)
            parts.append(
                f"<details><summary>{plural(len(runs), 'run')}</summary><div class='wide'>{inner}</div></details>"
            )
    lines = [[html.escape(text) for text in line] for line in _speed_rows(list(speed.values()))]
    parts.append(f"<h2 id='speed'>Speed</h2><p>{_SPEED_ABOUT}</p>{_html_table(_SPEED_TITLES, lines)}")
    for path, report in speed.items():
        link, command = html.escape(path), html.escape(report.command)
        about = html.escape(_about_speed(report))
        parts.append(f"<p><a href='{link}'>{link}</a>, {about}: <code>{command}</code></p>")
        if path in pictures:
            parts.append(_html_figure(pictures[path]))
    names = ", ".join([*TABLES, SPEED])
    parts.append(f"<p>Repeat a table with <code>tcnca reproduce NAME</code>: {html.escape(names)}.</p>")
    head = f"<meta charset='utf-8'><title>TCNCA: the paper's results and ours</title><style>{_STYLE}</style>"
    meta = "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    return f"<!doctype html>\n<html lang='en'><head>{head}{meta}</head><body>\n{chr(10).join(parts)}\n</body></html>\n"


def _code(text: str) -> str:
    """Return HTML of a text in which code is between backquotes."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def _html_cell(table: Table, value: Value) -> str:
    notes = [f"paper {_number(table, value.paper)}"] if value.paper is not None else []
    notes += [html.escape(value.cost)] if value.cost else []
    missing = "<span class='none'>not run</span>"
    ours = f"<b>{_ours(table, value, '')}</b>" if value.ours is not None else missing if value.runnable else _NONE
    return f"{ours}<br><small>{'<br>'.join(notes)}</small>"


def _html_table(titles: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    rows = "".join(f"<tr>{''.join(f'<td>{text}</td>' for text in line)}</tr>\n" for line in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table>"


def _html_figure(picture: str) -> str:
    return f"<figure>{picture[picture.index('<svg') :]}</figure>"


# Figures


def _figure(table: Table, values: dict[Cell, Value], results: Sequence[RunResult]) -> Figure:
    """Draw ours and the paper's values, and the validations of our runs."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    colors = {row: f"C{index % 10}" for index, row in enumerate(table.rows)}
    drawn = [
        row for row in table.rows if any(cell.row == row and value.ours is not None for cell, value in values.items())
    ]
    columns = [
        name for name in table.columns if any(c.column == name and v.ours is not None for c, v in values.items())
    ]
    figure = Figure(figsize=(9.6, 6.2), layout="constrained")
    grid = figure.add_gridspec(2, len(columns))
    top = figure.add_subplot(grid[0, :])
    width = 0.8 / max(len(drawn), 1)
    for cell, value in values.items():
        if cell.row in drawn and cell.column in columns:
            x = columns.index(cell.column) + width * (drawn.index(cell.row) - (len(drawn) - 1) / 2)
            if value.paper is not None:
                top.plot([x], [value.paper], "o", markersize=8, markerfacecolor="none", color=colors[cell.row])
            if value.ours is not None:
                top.errorbar([x], [value.ours], [value.spread or 0.0], fmt="o", markersize=5, color=colors[cell.row])
    top.set_xticks(range(len(columns)), columns)
    top.set_ylabel("accuracy, %" if table.higher_is_better else table.metric, color=GRAY)
    top.grid(axis="y", alpha=0.25)
    if table.higher_is_better:
        top.set_ylim(top=min(top.get_ylim()[1], 101.0))
    for index, column in enumerate(columns):
        axes = figure.add_subplot(grid[1, index])
        lows = []
        for row in drawn:
            cell = next(cell for cell in table.cells if (cell.row, cell.column) == (row, column))
            for result in results_of(results, table, cell):
                known = [(time, score) for _, time, score in result.curve if time is not None and score is not None]
                points = [(time / 60, table.scale * score) for time, score in known]
                if points:
                    axes.plot(*zip(*points, strict=True), color=colors[row], marker="o", markersize=1.5, linewidth=1)
                    lows += [score for _, score in points[len(points) // 4 :]]
        if lows and not table.higher_is_better:
            margin = 0.05 * (max(lows) - min(lows)) or 0.01
            axes.set_ylim(min(lows) - margin, max(lows) + margin)
        if table.higher_is_better:
            axes.set_ylim(top=min(axes.get_ylim()[1], 101.0))
        axes.set_title(f"validation, {column}", loc="left", fontsize=9)
        axes.set_xlabel("minutes", color=GRAY)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
    handles = [Line2D([], [], marker="o", linestyle="", color=colors[row], label=row) for row in drawn]
    handles += [
        Line2D([], [], marker="o", linestyle="", color=GRAY, label="ours"),
        Line2D([], [], marker="o", linestyle="", color=GRAY, markerfacecolor="none", markersize=8, label="paper"),
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return figure
