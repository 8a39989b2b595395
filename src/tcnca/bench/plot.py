"""Pictures of what was measured: times over the length for operators, bars for layers and models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcnca.bench.bars import BASE, draw_bars
from tcnca.bench.lines import draw_lines, drawable
from tcnca.bench.report import Report
from tcnca.errors import ConfigError
from tcnca.training.files import atomic_path
from tcnca.training.report import STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")


def check_picture(path: Path) -> None:
    """Raise a ConfigError unless a picture can be written under this name."""
    if path.suffix.lstrip(".").lower() not in FORMATS:
        endings = ", ".join(f".{name}" for name in FORMATS)
        raise ConfigError(f"--plot: got {path}, allowed are names that end in {endings}")


def save_plot(path: Path, report: Report) -> Path | None:
    """Draw a report, in the format that the name's ending says; None, and no picture, if there is nothing to draw."""
    check_picture(path)
    timed = [result for result in report.entries if result.status == "timed"]
    if not (drawable(report) if report.suite == "ops" else timed):
        return None
    if report.suite == "lra" and all(result.name != BASE for result in timed):
        return None
    # Loading matplotlib takes a while, which nothing else should wait for.
    import matplotlib.style

    # What people have set for their own plots is not for this one.
    with matplotlib.style.context(["default", STYLE]), atomic_path(path) as draft:
        draw(report).savefig(draft, dpi=200, format=path.suffix.lstrip(".").lower())
    return path


def draw(report: Report) -> Figure:
    """The picture of a report."""
    figure = draw_lines(report) if report.suite == "ops" else draw_bars(report)
    figure.suptitle(title_of(report), fontsize=10, fontweight="bold", x=0.01, ha="left")
    return figure


def title_of(report: Report) -> str:
    """What, on what, how."""
    settings: Mapping[str, Any] = report.settings
    what = {
        "ops": f"Operators, {settings['channels']} channels, K={settings['kernel_size']}, D={settings['depth']}",
        "layer": "One layer of the EnWik8 models",
        "model": "A step of training of the EnWik8 models",
        "lra": "Encoders of Long-Range Arena",
    }[report.suite]
    ending = " (stopped before its end)" if report.stopped else ""
    return f"{what} · {report.hardware['name']} · {settings['dtype']}{ending}"
