"""`tcnca inspect`: what a model consists of, what a token costs, how far it sees, and what it has learned.

A module of the name of the command would hide the `inspect` of the standard library in this package.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from tcnca import pretrained
from tcnca.cli.completion import complete_preset, complete_run
from tcnca.cli.reporting import Device, Threads, progress_bar
from tcnca.config import check_choice
from tcnca.errors import ConfigError, escape_control, plural, shown
from tcnca.extras import missing, require
from tcnca.files import atomic_write, check_no_links, to_json

if TYPE_CHECKING:
    import torch

    from tcnca.inspection.costs import Costs
    from tcnca.inspection.probes import Influence
    from tcnca.inspection.samples import Sample
    from tcnca.models import SequenceModel

_STDOUT = Path("-")
_LENGTH = 8192
"""Tokens of a sequence where neither a preset nor the data say more."""
_MAP_TOKENS = 256
"""Tokens of an attention map: each is a pixel or more."""
_MAX_FIELD = 2**20
"""Largest receptive field whose lags are counted and drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Subject:
    """The model that is inspected."""

    name: str
    model: SequenceModel
    folder: Path | None
    """Its folder; None for a preset."""
    length: int
    """Tokens of a sequence of its task."""

    @property
    def trained(self) -> bool:
        return self.folder is not None

    def title(self, text: str) -> str:
        """Return the title of a picture that depends on the weights."""
        return f"{text} · {self.name}{'' if self.trained else ' · random weights'}"


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|RUN",
            autocompletion=lambda incomplete: complete_preset(incomplete) + complete_run(incomplete),
            help="A preset that `tcnca models` lists, a run directory, or the folder of a saved model. "
            "(default: the pretrained model)",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the pictures. (default: inspect/ in a run directory, else inspect/MODEL)"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text, or .npy of values, to look at a trained model with. (default: validation data of the run, if "
            "it is on this machine; else a text of the package, or random inputs)",
        ),
    ] = None,
    layers: Annotated[
        str, typer.Option(metavar="N,N", help="Layers whose kernels and attention are drawn. (default: 3 of them)")
    ] = "",
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a sequence, for averages. (default: that of the task, else 8,192)"),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens to measure the effective receptive field on. (default: 1,024 to 4,096, by model size)"
        ),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Whether to draw pictures.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all numbers as JSON; - for standard output.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by validation, not the last.")] = False,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Show what a model consists of, what a token costs, how far it sees, and what it has learned.

    Tables: parameters, operations, bytes and streaming state by part, and the receptive field. Pictures: connectivity
    and coverage of the TCN, effective receptive field, kernels, attention. See docs/inspect.md.
    """
    for option, value in {"--out": out, "--data": data, "--layers": layers or None, "--tokens": tokens}.items():
        if value is not None:
            if not plots:
                raise ConfigError(
                    f"{option}: expected it with pictures only, got it with --no-plots; leave one of them out"
                )
            require("plots", option)
    no_plots = missing("plots") if plots else None

    from tcnca.training.distributed import dist_context
    from tcnca.training.threads import use_threads

    console = Console(emoji=False, highlight=False, stderr=json_file == _STDOUT)
    numbers: dict[str, Any] = {"complete": False}
    with dist_context(device) as dist, use_threads(threads):
        subject = _load(model, dist.device, best)
        subject = subject if length is None else dataclasses.replace(subject, length=length)
        chosen = _parse_layers(layers, len(subject.model.layers))
        if data is not None and not subject.trained:
            raise ConfigError(
                f"--data: expected a trained model, got the preset {subject.name} with random weights; leave it out"
            )
        if data is not None and not data.is_file():
            raise ConfigError(f"--data: expected a file, got {data}, which is none")
        _print_tables(console, subject, numbers)
        try:
            if no_plots is not None:
                console.print(f"no pictures: {no_plots}", markup=False, soft_wrap=True)
            elif plots:
                folder = out or _default_folder(subject)
                for path in _draw(subject, folder, data, chosen, tokens, numbers):
                    numbers.setdefault("pictures", []).append(str(path))
                    console.print(escape_control(f"wrote {path}"), markup=False, soft_wrap=True)
                about = f"Attention and effective receptive field: on {numbers['influence']['data']}."
                console.print(escape_control(about), markup=False, soft_wrap=True)
            numbers["complete"] = True
        finally:
            # Also after Ctrl-C, with what was measured so far.
            if json_file is not None:
                text = to_json(numbers, indent=1) + "\n"
                if json_file == _STDOUT:
                    sys.stdout.write(text)
                else:
                    atomic_write(json_file, text)


def _load(name: str | None, device: torch.device, best: bool) -> _Subject:
    import torch

    from tcnca.inference.loading import load
    from tcnca.models import build, preset, presets
    from tcnca.training.provenance import RECIPE
    from tcnca.training.recipe import load_recipe

    if name is not None and not os.path.isdir(name):
        if os.sep in name or os.path.exists(name):
            raise ConfigError(f"MODEL: expected a preset, a run directory or the folder of a model, got {shown(name)}")
        check_choice("MODEL", name, presets())
        if best:
            raise ConfigError(f"--best: expected a run directory, got the preset {name}; leave it out")
        torch.manual_seed(0)
        found = preset(name)
        return _Subject(name=name, model=build(found).to(device).eval(), folder=None, length=found.length)
    folder = pretrained.FOLDER if name is None else Path(name)
    model = load(folder, device, best=best)
    length = model.preprocessing.max_length or _LENGTH
    if (folder / RECIPE).is_file() and (known := load_recipe(str(folder / RECIPE)).model.get("preset")):
        length = preset(known).length
    return _Subject(
        name=pretrained.NAME if name is None else folder.resolve().name, model=model, folder=folder, length=length
    )


def _parse_layers(text: str, count: int) -> list[int]:
    from tcnca.inspection.probes import default_layers

    if not text:
        return default_layers(count)
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) < count for word in words):
        raise ConfigError(f"--layers: expected numbers from 0 to {count - 1} with commas between, got {shown(text)}")
    return sorted({int(word) for word in words})


def _default_folder(subject: _Subject) -> Path:
    from tcnca.training.checkpoint import CHECKPOINTS

    if subject.folder is not None and (subject.folder / CHECKPOINTS).is_dir():
        check_no_links(subject.folder)
        return subject.folder / "inspect"
    return Path("inspect") / subject.name.replace("/", "-")


# Tables


def _print_tables(console: Console, subject: _Subject, numbers: dict[str, Any]) -> None:
    from tcnca.inspection.costs import mixer_receptive_field, model_costs, stack_receptive_field

    model = subject.model
    costs = model_costs(model, subject.length)
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    fields = {} if model.config.mixer is None else {"mixer": mixer_receptive_field(model)}
    fields["stack"] = stack_receptive_field(model)
    numbers |= {
        "model": subject.name,
        "weights": "trained" if subject.trained else "random",
        "dtype": dtype,
        "length": subject.length,
        "num_layers": len(model.layers),
        "parts": {part: vars(cost) for part, cost in costs.parts.items()},
        "layer": vars(costs.layer),
        "total": vars(costs.total),
        "streams": costs.streams,
        "receptive_field": fields,
    }
    weights = "trained" if subject.trained else "random, as they are initialized"
    console.print(f"# {subject.name}\n", markup=False)
    console.print(f"{dtype} weights, {weights}; averages over sequences of {subject.length:,} tokens\n", markup=False)
    console.print(_costs_table(costs, len(model.layers)))
    table = Table("receptive field", "tokens", box=box.MARKDOWN)
    table.columns[1].justify = "right"
    for name, field in fields.items():
        what = "mixer of a layer" if name == "mixer" else f"whole stack, {plural(len(model.layers), 'layer')}"
        table.add_row(what, "unlimited" if field is None else f"{field:,}")
    console.print(table)
    console.print(
        "Per token: multiply-accumulate operations on average; bytes that generating a token of one sequence moves, "
        "which are all weights it uses and the state it reads or writes, without activations. State: of one sequence."
        if costs.streams
        else "Per token: multiply-accumulate operations on average. A model that is not causal has no streaming state.",
        markup=False,
    )
    console.print()


def _costs_table(costs: Costs, num_layers: int) -> Table:
    table = Table(box=box.MARKDOWN)
    table.add_column("part", no_wrap=True)
    for column in ("parameters", "share", "MMAC/token", "bytes/token", "state"):
        table.add_column(column, justify="right", no_wrap=True)
    total = costs.total
    rows = {part: cost for part, cost in costs.parts.items() if any(vars(cost).values())}
    inner = {} if num_layers == 1 else {f"one of {num_layers} layers": costs.layer}
    for name, cost in {**rows, **inner, "total": total}.items():
        moved, state = (_size(cost.bytes_per_token), _size(cost.state_bytes)) if costs.streams else ("–", "–")
        share = f"{cost.parameters / total.parameters:.1%}"
        table.add_row(name, f"{cost.parameters:,}", share, f"{cost.macs / 1e6:.3f}", moved, state)
    return table


def _size(count: int) -> str:
    """Return a number of bytes as 12.3 kB or 4.56 MB."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


# Pictures


def _draw(
    subject: _Subject,
    folder: Path,
    data: Path | None,
    layers: list[int],
    tokens: int | None,
    numbers: dict[str, Any],
) -> Iterator[Path]:
    """Draw the pictures one by one, and add their numbers. Yield the path of each."""
    from tcnca.inspection.probes import default_tokens
    from tcnca.inspection.samples import find_sample, read_sample

    # Half precision would round what is measured.
    model = subject.model.float()
    count = default_tokens(model, subject.length) if tokens is None else tokens
    sample = read_sample(model, data, count) if data is not None else find_sample(model, subject.folder, count)
    yield from _draw_structure(subject, folder, numbers)
    yield from _draw_responses(subject, folder, layers, numbers)
    yield from _draw_attention(subject, folder, sample, layers, numbers)
    yield from _draw_influence(subject, folder, sample, numbers)


def _draw_structure(subject: _Subject, folder: Path, numbers: dict[str, Any]) -> Iterator[Path]:
    from tcnca.inspection import plots
    from tcnca.inspection.costs import dilated_structure

    structure = dilated_structure(subject.model.config)
    if structure is None or structure.receptive_field > _MAX_FIELD:
        return
    c = structure
    sizes = f"K={c.kernel_size}, f={c.dilation_factor}, D={c.depth}"
    sizes += f", B={c.convolutions}" if c.convolutions > 1 else ""
    title = f"Connectivity of the mixer · {subject.name} · {sizes}"
    yield plots.save(functools.partial(plots.draw_connectivity, c, title), folder / "connectivity.svg")
    lags, counts = structure.lags()
    numbers["coverage"] = {
        "first_lag": int(lags[0]),
        "lags": len(lags),
        "gaps": int((counts == 0).sum()),
        "counts": [int(count) for count in counts],
    }
    title = f"Coverage of lags by the mixer · {subject.name} · {sizes}"
    yield plots.save(functools.partial(plots.draw_coverage, c, title), folder / "coverage.svg")


def _draw_responses(subject: _Subject, folder: Path, layers: list[int], numbers: dict[str, Any]) -> Iterator[Path]:
    from tcnca.inspection import plots
    from tcnca.inspection.costs import dilated_structure
    from tcnca.inspection.probes import impulse_response, layer_mixer, tcn_kernels

    if subject.model.config.mixer is None:
        return
    mixers = {layer: layer_mixer(subject.model, layer) for layer in layers}
    responses = {layer: impulse_response(mixer) for layer, mixer in mixers.items()}
    shares = (0.5, 0.9, 0.99)
    numbers["responses"] = {
        str(layer): {
            "channels": response.channels.tolist(),
            "reach": {str(share): response.reach(share).tolist() for share in shares},
        }
        for layer, response in responses.items()
    }
    title = subject.title("Responses of the mixer to an impulse")
    yield plots.save(functools.partial(plots.draw_responses, responses, title), folder / "responses.png")
    structure = dilated_structure(subject.model.config)
    kernels = {layer: tcn_kernels(mixer) for layer, mixer in mixers.items()}
    found = {layer: kernel for layer, kernel in kernels.items() if kernel is not None}
    if found and structure is not None:
        title = subject.title("Kernels of the TCN")
        yield plots.save(functools.partial(plots.draw_kernels, found, structure, title), folder / "kernels.png")


def _draw_attention(
    subject: _Subject, folder: Path, sample: Sample, layers: list[int], numbers: dict[str, Any]
) -> Iterator[Path]:
    from tcnca.inspection import plots
    from tcnca.inspection.probes import attention_maps, mean_weights, visible_keys

    config = subject.model.config
    if config.attention is None:
        return
    x = sample.x[:, :_MAP_TOKENS]
    maps, visible = attention_maps(subject.model, x, layers), visible_keys(config.attention, config.causal, x.shape[1])
    numbers["attention"] = {"data": sample.about, "tokens": x.shape[1], "layers": {}}
    for layer, weights in maps.items():
        lags, means = mean_weights(weights, visible)
        numbers["attention"]["layers"][str(layer)] = {"first_lag": int(lags[0]), "mean_weights": means.tolist()}
    title = subject.title("Attention weights") + f" · {sample.about}"
    yield plots.save(functools.partial(plots.draw_attention, maps, visible, title), folder / "attention.png")


def _draw_influence(subject: _Subject, folder: Path, sample: Sample, numbers: dict[str, Any]) -> Iterator[Path]:
    from tcnca.inspection import plots
    from tcnca.inspection.probes import influence

    with progress_bar("effective receptive field", unit="derivatives") as progress:
        found = influence(subject.model, sample.x, progress=progress)
    numbers["influence"] = _influence_numbers(found, sample)
    attention, fields = subject.model.config.attention, numbers["receptive_field"]
    marks = {
        "chunk": None if attention is None else attention.chunk_size,
        "receptive field of a mixer": fields.get("mixer"),
        "receptive field": fields["stack"],
    }
    title = subject.title("Effective receptive field")
    draw = functools.partial(plots.draw_influence, found, title, marks, f"{sample.about}, {found.tokens:,} tokens")
    yield plots.save(draw, folder / "receptive-field.png")


def _influence_numbers(found: Influence, sample: Sample) -> dict[str, Any]:
    return {
        "data": sample.about,
        "of": "features of the last layer" if found.pooled else "outputs",
        "tokens": found.tokens,
        "positions": found.positions,
        "first_lag": int(found.lags[0]),
        "norms": found.norms.tolist(),
        "reach": {str(share): found.reach(share) for share in (0.5, 0.9, 0.99)},
    }
