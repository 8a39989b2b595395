"""The tables of `tcnca bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tcnca.bench import Report, Result
from tcnca.bench.ratios import reached
from tcnca.bench.report import EAGER, GRAPH, short_time

# The optimizer's update is next to nothing, and part of the step.
_PARTS = ("inference", "forward", "backward", "step")
_HOW = {GRAPH: "on the device", EAGER: "as called"}
_WORDS = {"dilation_factor": "f"}


def sizes_text(sizes: Mapping[str, int | str]) -> str:
    """A size for people: batch 8, length 131072, f 20."""
    return ", ".join(f"{_WORDS.get(name, name)} {value}" for name, value in sizes.items())


def reasons(entries: Sequence[Result]) -> list[str]:
    """Why some were not timed, or not as a graph; what is the same at several sizes is said once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for entry in entries:
        if entry.reason:
            found.setdefault((entry.label, entry.status, entry.reason), []).append(sizes_text(entry.sizes))
    return [
        f"{label} ({sizes[0] if len(sizes) == 1 else f'at {len(sizes)} sizes'}): {status}; {reason}"
        for (label, status, reason), sizes in found.items()
    ]


def entry_tables(report: Report) -> list[Table]:
    """One table for each size: medians, shares of the floor, memory and error."""
    sizes: list[dict[str, int | str]] = []
    for entry in report.entries:
        if entry.sizes not in sizes:
            sizes.append(entry.sizes)
    return [_entry_table(size, [entry for entry in report.entries if entry.sizes == size]) for size in sizes]


def _entry_table(sizes: dict[str, int | str], entries: Sequence[Result]) -> Table:
    parts = [part for part in _PARTS if any(part in entry.times for entry in entries)]
    replayed = any(GRAPH in ways for entry in entries for ways in entry.times.values())
    hows = (EAGER, GRAPH) if replayed else (EAGER,)
    held = any(entry.peak_bytes is not None for entry in entries)
    table = Table(title=sizes_text(sizes), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    # Nothing is kept from wrapping: in a narrow terminal that would leave no room for the names.
    table.add_column("contestant", overflow="fold")
    for part in parts:
        for how in hows:
            table.add_column(f"{part}\n{_HOW[how]}" if replayed else part, justify="right")
    table.add_column("of the floor, %" if not parts else f"% of floor\n{' / '.join(parts)}", justify="right")
    if held:
        table.add_column("peak\nmemory", justify="right")
    table.add_column("error", justify="right")
    for entry in entries:
        if entry.status != "timed":
            table.add_row(Text(entry.label), Text(entry.status, style="yellow"))
            continue
        times = [_time(entry, part, how) for part in parts for how in hows]
        shares = " / ".join(_percent(entry.share(part)) for part in parts)
        memory = [_bytes(entry.peak_bytes)] if held else []
        cells = [*times, shares, *memory, f"{max(entry.errors.values(), default=0):.0e}"]
        table.add_row(Text(entry.label), *cells)
    return table


def _time(entry: Result, part: str, how: str) -> str:
    return ("~" if unsteady(entry, part, how) else "") + short_time(entry.seconds(part, how))


def unsteady(entry: Result, part: str, how: str) -> bool:
    """Whether half of the runs were further apart than half of the median: something else was at work."""
    times = entry.times.get(part, {}).get(how)
    return times is not None and times.high - times.low > 0.5 * times.median


def _percent(share: float | None) -> str:
    if share is None:
        return "–"
    return f"{100 * share:.2g}" if share < 1 else f"{100 * share:.0f}"


def _bytes(count: int | None) -> str:
    if count is None:
        return "–"
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def ratio_table(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """What is how many times faster, beside the paper's numbers and the goals: the longest sequences and all goals."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in _chosen(rows):
        groups.setdefault((row["title"], _size(row["sizes"])), []).append(row)
    if not groups:
        return None
    aimed = any(row["goal"] is not None for row in rows)
    told = any(row["paper"] is not None for row in rows)
    hows = [how for how in (GRAPH, EAGER) if any(row["how"] == how for row in rows)]
    table = Table(title="Ratios", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    # Nothing is kept from wrapping: in a narrow terminal that would leave no room for what the numbers are of.
    table.add_column("what", overflow="fold")
    table.add_column("part")
    for name in [*(["paper"] if told else []), *(["goal", "stretch"] if aimed else [])]:
        table.add_column(name, justify="right")
    for how in hows:
        table.add_column(_HOW[how] if len(hows) > 1 else "measured", justify="right")
    for (title, size), members in groups.items():
        parts = list(dict.fromkeys(row["part"] for row in members))
        aims = [*(["paper"] if told else []), *(["goal", "stretch"] if aimed else [])]
        cells = [Text(_joined(members, parts, aim)) for aim in aims]
        cells += [_measured(members, parts, how) for how in hows]
        table.add_row(Text(f"{title}, {size}"), Text(" / ".join(parts)), *cells)
    return table


def _chosen(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of operators at many sizes, those at which there are goals, the paper's, and the longest of each batch."""
    max_length: dict[tuple[str, Any], int] = {}
    for row in rows:
        key = row["title"], row["sizes"].get("batch")
        max_length[key] = max(max_length.get(key, 0), int(row["sizes"].get("length", 0)))
    aimed = {sizes_text(row["sizes"]) for row in rows if row["goal"] is not None}
    return [
        row
        for row in rows
        if row["suite"] != "ops"
        or row["paper"] is not None
        or sizes_text(row["sizes"]) in aimed
        or int(row["sizes"].get("length", 0)) == max_length[row["title"], row["sizes"].get("batch")]
    ]


def _size(sizes: Mapping[str, int | str]) -> str:
    """A size in few characters: 8 × 131072, or text, 32 × 4096."""
    named = [str(sizes[name]) for name in ("task", "of") if name in sizes]
    counted = " × ".join(str(sizes[name]) for name in ("batch", "length") if name in sizes)
    return ", ".join([*named, *([counted] if counted else [])])


def _joined(members: Sequence[Mapping[str, Any]], parts: Sequence[str], aim: str) -> str:
    found = {row["part"]: row[aim] for row in members}
    if all(found.get(part) is None for part in parts):
        return ""
    return " / ".join("–" if found.get(part) is None else _short(found[part]) for part in parts)


def _measured(members: Sequence[Mapping[str, Any]], parts: Sequence[str], how: str) -> Text:
    """The numbers, green where a goal is reached and red where it is not."""
    found = {row["part"]: row for row in members if row["how"] == how}
    text = Text()
    for part in parts:
        text.append(" / " if text else "")
        row = found.get(part)
        style = {True: "green", False: "red", None: ""}[None if row is None else reached(row, "goal")]
        text.append("–" if row is None else _number(row), style=style)
    return text


def _number(row: Mapping[str, Any]) -> str:
    value = float(row["value"])
    return _short(round(value)) if row["unit"] == "tokens/s" else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _short(value: float) -> str:
    """Large numbers in thousands, which is as exact as they were measured."""
    return f"{value / 1e3:,.0f} k" if value >= 1e5 else f"{value:,.10g}"
