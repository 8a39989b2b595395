"""Optional packages: a missing one is named with the command that installs it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tcnca.errors import ConfigError, MissingPackageError, shown

EXTRAS = {
    "cpu": ("numba",),
    "download": ("requests", "urllib3"),
    "hf": ("transformers",),
    "onnx": ("onnx", "onnxscript"),
    "plots": ("matplotlib", "PIL"),
    "tensorboard": ("tensorboard",),
}
"""The modules that each extra of the package installs for the library to import."""
PLOT_FORMATS = (".png", ".svg", ".pdf")
"""Endings of files that plots are written to."""


def missing(extra: str) -> str | None:
    """Return which module of an extra is not installed and how to install it, or None if none is missing."""
    for module in EXTRAS[extra]:
        if find_spec(module) is None:
            return f"{module} is not installed; pip install 'tcnca[{extra}]'"
    return None


def require(extra: str, what: str) -> None:
    """Raise a MissingPackageError if an extra is not installed.

    Args:
        extra: name of the extra.
        what: the option, function or file that needs it.
    """
    reason = missing(extra)
    if reason is not None:
        raise MissingPackageError(f"{what}: {reason}")


def check_plot_path(path: Path) -> None:
    """Raise an error unless the file of `--plot` has a supported format, and matplotlib is installed."""
    if path.suffix.lower() not in PLOT_FORMATS:
        formats = ", ".join(PLOT_FORMATS)
        raise ConfigError(f"--plot: expected a file name that ends in one of {formats}, got {shown(str(path))}")
    require("plots", "--plot")
