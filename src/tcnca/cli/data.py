"""`tcnca data`: prepare, list and show data sets."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tcnca.cli.boundary import continue_with
from tcnca.cli.reporting import ProgressReporter
from tcnca.errors import TcncaError, plural
from tcnca.extras import missing

if TYPE_CHECKING:
    from tcnca.data import Dataset

app = typer.Typer(
    name="data", help="Data sets: EnWik8, Long-Range Arena, associative recall, and your own.", no_args_is_help=True
)

_Folder = Annotated[
    Path | None, typer.Option("--data", help="Folder of prepared data sets. (default: $TCNCA_DATA, or else data)")
]


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="A data set of `tcnca data list`, or a name for your own data.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the data set. (default: $TCNCA_DATA, or else data)")
    ] = None,
    origin: Annotated[
        Path | None, typer.Option("--from", help="File or folder to read, instead of downloading the public files.")
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Training examples (EnWik8: bytes), other splits in proportion. (default: published)"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a generated data set, or of the splits of your own data.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes for generating; the result does not depend on it. (default: all)"),
    ] = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Accept files that differ from the published ones.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Prepare again even if it is already prepared.")] = False,
    kind: Annotated[
        str | None,
        typer.Option(help="Your data: language, classification, pairs, regression or forecast. (default: inferred)"),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Your table: column of the (first) text.")] = None,
    second: Annotated[str | None, typer.Option(help="Your table: column of the second text.")] = None,
    label: Annotated[
        str | None, typer.Option(help="Your table: column of the class of a text or of a row of numbers.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Your table: column with train, validation or test.")] = None,
    values: Annotated[
        str | None, typer.Option(help="Your .npz: array of the sequences; your table: columns of numbers, as a,b,c.")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="Your .npz: array of the classes.")] = None,
    targets: Annotated[
        str | None, typer.Option(help="Your .npz: array of the values to predict; your table: columns.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Your .npz: array of the lengths.")] = None,
    validation: Annotated[float, typer.Option(help="Your data: fraction for validation, if not given.")] = 0.05,
    test: Annotated[float, typer.Option(help="Your data: fraction for testing, if not given.")] = 0.05,
) -> None:
    """Download, read or generate a data set, check it, and store it for training.

    `tcnca data prepare listops`, `tcnca data prepare text --from aclImdb_v1.tar.gz`, or for your own data
    `tcnca data prepare reviews --from reviews.csv --text body --label stars` or
    `tcnca data prepare weather --from weather.csv --kind forecast`.
    """
    options = locals()
    console = Console(emoji=False, highlight=False)
    with continue_with("the same command continues from here"), ProgressReporter(console) as reporter:
        from tcnca.data import CustomOptions, prepare_dataset
        from tcnca.training.distributed import available_cores

        custom = CustomOptions(**{field.name: options[field.name] for field in dataclasses.fields(CustomOptions)})
        prepared = prepare_dataset(
            name,
            out,
            origin=origin,
            size=size,
            seed=seed,
            workers=workers or available_cores(),
            unverified=unverified,
            force=force,
            custom=custom,
            progress=reporter,
        )
    if not prepared.new:
        typer.echo(f"{prepared.folder} is already prepared; --force prepares it again")
    _print_summary(console, prepared.data)
    typer.echo(f"ready in {prepared.folder}")


@app.command("list")
def list_command(
    folder: _Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the data sets: description, size, source, and which are prepared."""
    from tcnca.data import data_folder
    from tcnca.data.schema import SPLITS

    folder = folder or data_folder()
    rows = _rows(folder)
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    console = Console(emoji=False, highlight=False)
    typer.echo(f"Prepared data sets are in {folder}. Sizes: train / validation / test.\n")
    last = ("", "")
    for row in rows:
        sizes = " / ".join(f"{row['sizes'][split]:,}" if split in row["sizes"] else "–" for split in SPLITS)
        state = _COLORS.get(row["prepared"].split(",")[0], "{}").format(row["prepared"])
        if row["problem"]:
            console.print(f"[bold]{escape(row['name']):<16}[/] {state}: {escape(row['problem'])}", soft_wrap=True)
            continue
        disk = f"{row['bytes'] / 1e6:,.1f} MB" if row["bytes"] >= 1e5 else f"{row['bytes'] / 1e3:,.1f} kB"
        console.print(f"[bold]{escape(row['name']):<16}[/]{sizes:>36}{disk:>12}   {state}", soft_wrap=True)
        # Print the description once for data sets that differ only in their sizes.
        if (row["description"], row["source"]) != last:
            console.print(f"  [dim]{escape(row['description'])}; {escape(row['source'])}[/]", soft_wrap=True)
        last = (row["description"], row["source"])
    typer.echo("\nrecall-LENGTH-VOCAB_SIZE accepts any even length and an even vocabulary size from 4 to 256.")


_MAX_CLASSES = 20
_COLORS = {"yes": "[green]{}[/]", "begun": "[yellow]{}[/]", "damaged": "[red]{}[/]"}


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Describe the data sets of the registry and all others that are prepared."""
    from tcnca.data import get_dataset, list_datasets
    from tcnca.data.datasets import is_dataset
    from tcnca.data.manifest import MANIFEST
    from tcnca.data.show import plain_text

    prepared = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
    rows = []
    for name in dict.fromkeys([*(spec.name for spec in list_datasets()), *prepared]):
        row: dict[str, Any] = {"name": name, "description": "your own", "sizes": {}, "bytes": 0, "source": ""}
        row |= {"prepared": "begun" if (folder / f".{name}.shards").exists() else "no", "problem": ""}
        # One data set that cannot be read must not hide the others.
        try:
            if is_dataset(name):
                spec = get_dataset(name)
                row |= {"description": spec.description, "sizes": dict(spec.sizes), "bytes": spec.disk_bytes}
                row["source"] = spec.source
            row |= _describe_prepared(folder / name) if name in prepared else {}
        except TcncaError as error:
            row |= {"prepared": "damaged", "problem": str(error)}
        rows.append({key: plain_text(value) if isinstance(value, str) else value for key, value in row.items()})
    return rows


def _describe_prepared(folder: Path) -> dict[str, Any]:
    """Return what a prepared data set changes in its row."""
    from tcnca.data import Dataset
    from tcnca.data.schema import num_examples

    data = Dataset.open(folder)
    manifest = data.manifest
    row = {
        "sizes": {split: num_examples(columns) for split, columns in data.splits.items()},
        "bytes": sum(file["bytes"] for file in manifest["files"].values()),
        "prepared": "yes",
    }
    if manifest.get("dataset") is None:
        return {**row, "description": f"your own: {manifest['kind']}", "source": manifest.get("origin", "")}
    if manifest.get("request", {}).get("size") is not None:
        return {**row, "prepared": "yes, another size"}
    return row if manifest.get("verified") else {**row, "prepared": "yes, unverified"}


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A prepared or generated data set.")],
    folder: _Folder = None,
    split: Annotated[str, typer.Option(help="Split.")] = "train",
    index: Annotated[int, typer.Option(help="First example to show; for a language model, first byte.")] = 0,
    number: Annotated[int, typer.Option("--count", min=1, help="Number of examples.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="Do not truncate long texts.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="File for images. (default: NAME-SPLIT.png)", show_default=False)
    ] = None,
) -> None:
    """Show examples: text with its label, expressions with their value, images in the terminal and in a file."""
    console = Console(emoji=False, highlight=False)
    from tcnca.data import data_folder
    from tcnca.data.load import load_examples
    from tcnca.data.schema import num_examples
    from tcnca.data.show import render_example, save_images

    data = load_examples(name, folder or data_folder(), split, max(index + number, 1))
    total = num_examples(data.columns(split))
    last = index + 1 if data.manifest["kind"] == "language" else min(index + number, total)
    examples = [render_example(data, split, i, console.width, full) for i in range(index, max(last, index + 1))]
    for example in examples:
        console.print(f"[bold]{escape(example.title)}[/]", soft_wrap=True)
        typer.echo(f"{example.body}\n")
    if any(example.image is not None for example in examples):
        path = picture or Path(f"{data.name}-{split}.png")
        reason = missing("plots")
        if reason is not None and picture is None:
            typer.echo(f"images are not saved: {reason}")
            return
        save_images(path, examples)
        typer.echo(f"images are in {path}")
    elif picture is not None:
        typer.echo(f"{data.name} has no images")


def _print_summary(console: Console, data: Dataset) -> None:
    from tcnca.data import summarize_data
    from tcnca.data.custom.options import describe_columns
    from tcnca.data.schema import shape_warning, value_shape
    from tcnca.data.show import plain_text

    manifest = data.manifest
    title = manifest.get("title", data.name)
    if manifest.get("dataset") is None:
        title = f"{data.name}: {manifest['kind']}, from {manifest.get('origin', '')}"
    elif "generator" in manifest:
        title = f"{title}: generated"
    elif manifest.get("part"):
        title = f"{title}: a part of the published data set"
    else:
        title = f"{title}: {'the published data set, verified' if manifest.get('verified') else 'not verified'}"
    language = manifest["kind"] == "language"
    table = Table(title=escape(plain_text(title)), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("split", no_wrap=True)
    for column in ("bytes", "symbols") if language else ("examples", "shortest", "mean", "longest", "symbols"):
        table.add_column(column, justify="right", no_wrap=True)
    summaries = summarize_data(data)
    for split, summary in summaries.items():
        lengths = f"{summary.shortest:,}", f"{summary.mean:,.1f}", f"{summary.longest:,}"
        symbols = "–" if summary.symbols is None else str(summary.symbols)
        table.add_row(split, f"{summary.examples:,}", *(() if language else lengths), symbols)
    console.print(table)
    train = data.columns("train")
    if (shape := value_shape(train)) is not None:
        typer.echo(f"{plural(shape[0], 'time step')} of {plural(shape[1], 'feature')}")
    if columns := describe_columns(manifest):
        typer.echo(columns)
    if warning := shape_warning(train):
        typer.echo(f"warning: {warning}")
    for split, summary in summaries.items():
        classes = [f"{name} {count:,}" for name, count in summary.class_counts.items()]
        if classes:
            more = f" and {len(classes) - _MAX_CLASSES} more" if len(classes) > _MAX_CLASSES else ""
            listed = plain_text(", ".join(classes[:_MAX_CLASSES]))
            console.print(f"{split}: {listed}{more}", markup=False)
