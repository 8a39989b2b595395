"""The built-in recipes and variants: their names, what they are, and how their YAML files are read.

This package does not import PyTorch, so that the command line can list recipes, and answer a misspelled one, at once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from tcnca.config import closest
from tcnca.errors import ConfigError, shown
from tcnca.yaml_reader import read_yaml

FAMILIES: dict[str, str] = {
    "tcnca": "TCNCA (paper): residual TCN and chunked attention, joined by MEGA's gates",
    "tcnca-linear": "TCNCA-linear (ours, recommended): TCNCA with a linear chain of dilated convolutions",
    "tcnca-simple": "TCNCA-simple (paper): TCN, chunked attention and MLP with plain residual connections",
    "mega": "MEGA (baseline, Ma et al.): EMA in place of the TCN",
    "tcn-mlp": "TCN-MLP (paper): the TCN and the MLP, without attention",
    "ema-mlp": "EMA-MLP (paper): the EMA and the MLP, without attention",
    "transformer": "Transformer (baseline, Vaswani et al.): attention of several heads over the whole sequence",
    "transformer-xl": "Transformer-XL (baseline, Dai et al.): attention in chunks, each of which sees the one before",
    "s4d": "S4D (baseline, Gu et al.): a diagonal state-space model for each channel, without attention",
    "s5": "S5 (baseline, Smith et al.): one diagonal state-space model for all channels, without attention",
    "lru": "LRU (baseline, Orvieto et al.): linear recurrence with complex decays, without attention",
    "sgconv": "SGConv (baseline, Li et al.): a long convolution for each channel, without attention",
    "cdil": "CDIL-CNN (baseline, Cheng et al.): circular dilated convolutions that mix channels",
}
"""What each family of models is, and whether it is the paper's or ours."""

_FOLDERS = {"recipe": Path(__file__).parent, "variants": Path(__file__).parent / "variants"}

_MAX_EXTENDS = 8
"""Recipes of which each extends the next. Names of files can form cycles in many ways, and each file takes time."""


def builtin(what: Literal["recipe", "variants"] = "recipe") -> list[str]:
    """Return the names of the built-in recipes or variants. Files that only others extend begin with `_`."""
    names = [path.stem for path in _FOLDERS[what].glob("*.yaml") if not path.stem.startswith("_")]
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])


def descriptions() -> dict[str, dict[str, str]]:
    """Return what each built-in recipe is, in groups."""
    groups: dict[str, dict[str, str]] = {
        "Your own data: `tcnca train NAME data=FILE`": {},
        "Small: minutes on a laptop": {},
        "EnWik8": {},
        "Long-Range Arena": {},
        "Associative recall": {},
    }
    own, small, enwik8, arena, recall = groups.values()
    for name in builtin():
        layers = read_recipe(name)
        if name.endswith("-small"):
            group = small
        elif "-" not in name:
            group = own
        else:
            group = {"enwik8": enwik8, "recall": recall}.get(name.partition("-")[0], arena)
        group[name] = layers[-1].get("about", "")
    return groups


def find(name: str, what: Literal["recipe", "variants"] = "recipe", near: Path | None = None) -> Path:
    """Return the file of a built-in recipe or of variants, by name, or of a user's, by path.

    Args:
        name: name or path; a path ends in .yaml or .yml or has a folder in it.
        what: it names.
        near: folder to which a path is relative; None for the working directory.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name or os.sep in name:
        path = Path(name) if near is None else near / name
        if not os.path.isfile(path):  # False, and not an error, for names that are too long
            raise ConfigError(f"{what}: expected a file, got {shown(str(path))[1:-1]}, which does not exist")
        return path
    path = _FOLDERS[what] / f"{name}.yaml"
    if os.path.isfile(path):
        return path
    known = builtin(what)
    close = closest(name, known)
    if close:
        raise ConfigError(f"{what}: did you mean {close}? Got {name!r}")
    listed = "a name that `tcnca recipes` lists" if what == "recipe" else f"one of {', '.join(known)}"
    raise ConfigError(f"{what}: expected {listed}, or a file that ends in .yaml, got {shown(name)}")


def read_recipe(name: str) -> list[dict[str, Any]]:
    """Return the layers of a recipe: first that which it `extends` in the end, last the recipe itself.

    `extends: NAME` names a built-in recipe, and `extends: FILE.yaml` a file next to the one that says so.
    """
    layers: list[dict[str, Any]] = []
    seen: list[Path] = []
    path, label = find(name), name
    while True:
        if path in seen:
            names = " extends ".join(each.stem for each in [*seen, path])
            raise ConfigError(f"{name}: expected recipes that extend others, got a cycle: {names}")
        if len(seen) == _MAX_EXTENDS:
            raise ConfigError(
                f"{name}: expected at most {_MAX_EXTENDS} recipes of which each extends the next, got more"
            )
        seen.append(path)
        values = read_yaml(path, label)
        parent = values.pop("extends", None)
        layers.insert(0, values)
        if parent is None:
            return layers
        if not isinstance(parent, str):
            raise ConfigError(f"{label}: extends: expected the name or file of a recipe, got {shown(parent)}")
        try:
            path = find(parent, near=path.parent)
        except ConfigError as error:
            raise ConfigError(f"{label}: extends: {error}") from error
        label = parent
