"""`tcnca data`: prepare, list and show sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tcnca.cli.reporting import Watcher, explained, say
from tcnca.data import CustomOptions, Dataset, Entry, data_folder, entries, entry, summarize_data
from tcnca.data import prepare as prepare_set
from tcnca.data.columns import count
from tcnca.data.datasets import known
from tcnca.data.load import example_set
from tcnca.data.schema import SPLITS, Kind
from tcnca.data.show import save_pictures, shown
from tcnca.data.store import MANIFEST, read_manifest
from tcnca.errors import TcncaError
from tcnca.training.distributed import available_cores

app = typer.Typer(
    name="data", help="Data sets: EnWik8, Long-Range Arena, associative recall, and your own.", no_args_is_help=True
)

_Folder = Annotated[
    Path | None, typer.Option("--data", help="Folder with prepared sets. (default: $TCNCA_DATA, or else data)")
]


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="A set that `tcnca data list` shows, or a name for data of your own.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder that gets the set. (default: $TCNCA_DATA, or else data)")
    ] = None,
    origin: Annotated[
        Path | None, typer.Option("--from", help="File or folder to read, instead of fetching from the public source.")
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Training examples (EnWik8: bytes), other splits in proportion. (default: published)"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a set that is made, or of how your own data is split.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that make a set; it does not depend on them. (default: all)")
    ] = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Accept files that are not the published ones.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Prepare again what is there already.")] = False,
    kind: Annotated[
        str | None,
        typer.Option(
            help="Your own data: language, classification, pairs, regression or forecast. (default: found out)"
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Your own table: column with the (first) text.")] = None,
    second: Annotated[str | None, typer.Option(help="Your own table: column with the second text.")] = None,
    label: Annotated[str | None, typer.Option(help="Your own table: column with the class.")] = None,
    split: Annotated[str | None, typer.Option(help="Your own table: column that says train, validation, test.")] = None,
    values: Annotated[str | None, typer.Option(help="Your own .npz: array with the sequences.")] = None,
    labels: Annotated[str | None, typer.Option(help="Your own .npz: array with the classes.")] = None,
    targets: Annotated[str | None, typer.Option(help="Your own .npz: array with the numbers to predict.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Your own .npz: array with the lengths.")] = None,
    validation: Annotated[float, typer.Option(help="Your own data: share to validate on, if not given.")] = 0.05,
    test: Annotated[float, typer.Option(help="Your own data: share to test on, if not given.")] = 0.05,
) -> None:
    """Fetch, read or make a set, check it, and store it so that training maps it into memory.

    `tcnca data prepare listops`, `tcnca data prepare text --from aclImdb_v1.tar.gz`, or with data of your own
    `tcnca data prepare reviews --from reviews.csv --text body --label stars`.
    """
    console = Console(emoji=False, highlight=False)
    workers = workers or available_cores()
    with explained("stopped; the same command goes on from here"), Watcher(console) as watcher:
        own = CustomOptions(
            kind=cast(Kind | None, kind),
            text=text,
            second=second,
            label=label,
            split=split,
            values=values,
            labels=labels,
            targets=targets,
            lengths=lengths,
            validation=validation,
            test=test,
            seed=seed,
        )
        prepared = prepare_set(
            name,
            out,
            origin=origin,
            size=size,
            seed=seed,
            workers=workers,
            unverified=unverified,
            force=force,
            custom=own,
            watch=watcher,
        )
    if not prepared.new:
        say(console, f"{prepared.folder} is there already; --force prepares it again")
    making = f"making {prepared.data.name}"
    done, seconds = watcher.amount(making)
    if done:
        rate = f"{done / max(seconds, 1e-9):,.0f} a second"
        say(console, f"made {done:,} examples in {seconds:.1f} s, {rate}, workers: {workers}")
    _print_summary(console, prepared.data)
    say(console, f"ready in {prepared.folder}")


@app.command("list")
def list_sets(
    folder: _Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the sets: what they are, how large, where they come from, and which are prepared."""
    folder = folder or data_folder()
    rows = [*(_known_row(known_set, folder) for known_set in entries()), *_other_rows(folder)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console(emoji=False, highlight=False)
    say(console, f"Prepared sets are in {folder}. Sizes: train / validation / test.\n")
    about = ("", "")
    for row in rows:
        sizes = " / ".join(f"{row['sizes'][split]:,}" if split in row["sizes"] else "–" for split in SPLITS)
        state = _COLORS.get(row["prepared"].split(",")[0], "{}").format(row["prepared"])
        disk = f"{row['bytes'] / 1e6:,.1f} MB" if row["bytes"] >= 1e5 else f"{row['bytes'] / 1e3:,.1f} kB"
        console.print(f"[bold]{escape(row['name']):<16}[/]{sizes:>36}{disk:>12}   {state}", soft_wrap=True)
        # Said once for sets that differ in their numbers only.
        if (row["about"], row["source"]) != about:
            console.print(f"  [dim]{escape(row['about'])}; {escape(row['source'])}[/]", soft_wrap=True)
        about = (row["about"], row["source"])
    say(console, "\nrecall-LENGTH-VOCABULARY can have any even length and an even vocabulary from 4 to 256.")


_CLASSES = 20
_COLORS = {"yes": "[green]{}[/]", "begun": "[yellow]{}[/]", "damaged": "[red]{}[/]"}


def _known_row(known_set: Entry, folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": known_set.name,
        "about": known_set.about,
        "sizes": dict(known_set.sizes),
        "bytes": known_set.disk,
        "source": known_set.source,
        "prepared": _state(folder / known_set.name),
    }
    return {**row, **_found(folder / known_set.name)} if row["prepared"].startswith("yes") else row


def _found(folder: Path) -> dict[str, Any]:
    """What a set that is prepared really holds."""
    data = Dataset.open(folder)
    return {
        "sizes": {split: count(columns) for split, columns in data.splits.items()},
        "bytes": sum(file["bytes"] for file in data.manifest["files"].values()),
    }


def _other_rows(folder: Path) -> list[dict[str, Any]]:
    """Sets of your own, and known ones that are prepared with other parameters than those listed anyway."""
    rows, listed = [], {known_set.name for known_set in entries()}
    for path in sorted(folder.glob(f"*/{MANIFEST}")):
        own = path.parent
        if own.name in listed:
            continue
        if known(own.name):
            rows.append(_known_row(entry(own.name), folder))
            continue
        row = {"name": own.name, "about": "your own", "sizes": {}, "bytes": 0, "source": "", "prepared": _state(own)}
        if row["prepared"] != "damaged":
            manifest = read_manifest(own)
            row |= {"about": f"your own: {manifest['kind']}", "source": manifest["origin"], **_found(own)}
        rows.append(row)
    return rows


def _state(folder: Path) -> str:
    if not (folder / MANIFEST).exists():
        return "begun" if folder.with_name(f".{folder.name}.shards").exists() else "no"
    try:
        manifest = Dataset.open(folder).manifest
    except TcncaError:
        return "damaged"
    if manifest["request"].get("size") is not None:
        return "yes, another size"
    return "yes" if manifest["verified"] or "set" not in manifest else "yes, unverified"


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A prepared set, or one that is made.")],
    folder: _Folder = None,
    split: Annotated[str, typer.Option(help="Which split.")] = "train",
    index: Annotated[int, typer.Option(help="The first example to show; for a language model, the byte.")] = 0,
    number: Annotated[int, typer.Option("--count", min=1, help="How many examples.")] = 3,
    whole: Annotated[bool, typer.Option("--whole", help="Show long texts to their end.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="File for the pictures. (default: NAME-SPLIT.png)", show_default=False)
    ] = None,
) -> None:
    """Show examples: text with its label, expressions with their value, pictures in the terminal and in a file."""
    console = Console(emoji=False, highlight=False)
    with explained():
        data = example_set(name, folder or data_folder(), split, max(index + number, 1))
        last = index + 1 if data.manifest["kind"] == "language" else min(index + number, count(data.columns(split)))
        examples = [shown(data, split, place, console.width, whole) for place in range(index, max(last, index + 1))]
        for example in examples:
            console.print(f"[bold]{escape(example.title)}[/]", soft_wrap=True)
            say(console, f"{example.body}\n")
        if any(example.picture is not None for example in examples):
            path = picture or Path(f"{data.name}-{split}.png")
            save_pictures(path, examples)
            say(console, f"pictures are in {path}")
        elif picture is not None:
            say(console, f"{data.name} has no pictures")


def _print_summary(console: Console, data: Dataset) -> None:
    facts = data.manifest
    checked = "the published set, verified" if facts["verified"] else "not verified"
    checked = "a part of the published set" if facts["part"] else checked
    made = "made here" if "generator" in facts else checked
    language = facts["kind"] == "language"
    own = f"{data.name}: {facts['kind']}, from {facts['origin']}"
    title = f"{facts['title']}: {made}" if "set" in facts else own
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("split", no_wrap=True)
    for column in ("bytes", "symbols") if language else ("examples", "shortest", "mean", "longest", "symbols"):
        table.add_column(column, justify="right", no_wrap=True)
    summaries = summarize_data(data)
    for split, numbers in summaries.items():
        lengths = f"{numbers.shortest:,}", f"{numbers.mean:,.1f}", f"{numbers.longest:,}"
        symbols = "–" if numbers.symbols is None else str(numbers.symbols)
        table.add_row(split, f"{numbers.examples:,}", *(() if language else lengths), symbols)
    console.print(table)
    for split, numbers in summaries.items():
        classes = [f"{name} {number:,}" for name, number in numbers.classes.items()]
        if classes:
            more = f" and {len(classes) - _CLASSES} more" if len(classes) > _CLASSES else ""
            console.print(f"{split}: {', '.join(classes[:_CLASSES])}{more}", markup=False)
