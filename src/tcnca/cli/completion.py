"""What the shell completes: names of recipes and presets, run directories, devices. Without PyTorch, so at once."""

from __future__ import annotations

import re
from pathlib import Path

from tcnca import recipes

_MAX_FOLDERS = 200
"""Run directories that are listed."""
_RUN_FILES = ("recipe.yaml", "model.safetensors")
"""Files of a run directory, or of a folder with a saved model."""


def complete_recipe(incomplete: str) -> list[str]:
    """Return recipes that begin so; the shell completes names of files if there are none."""
    return _starting(recipes.builtin(), incomplete)


def complete_variants(incomplete: str) -> list[str]:
    """Return built-in variants that begin so."""
    return _starting(recipes.builtin("variants"), incomplete)


def complete_preset(incomplete: str) -> list[str]:
    """Return presets that begin so. They are imported with PyTorch, but each has a recipe, whose name says which."""
    pattern = rf"(\w+|recall-\d+)(?:-\d+)?-({'|'.join(recipes.FAMILIES)})"
    found = [re.fullmatch(pattern, name) for name in recipes.builtin()]
    return _starting(list(dict.fromkeys(f"{match[2]}-{match[1]}" for match in found if match)), incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Return run directories that begin so: in `runs`, or next to what is typed."""
    typed = Path(incomplete)
    folders = [typed if incomplete.endswith(("/", "\\")) else typed.parent]
    folders += [] if incomplete.startswith("runs") else [Path("runs")]
    found: list[str] = []
    for folder in folders:
        try:
            names = sorted(folder.iterdir())[:_MAX_FOLDERS]
        except OSError:
            continue
        found += [str(path) for path in names if any((path / name).is_file() for name in _RUN_FILES)]
    return _starting(found, incomplete)


def complete_device(incomplete: str) -> list[str]:
    """Return kinds of devices that begin so."""
    return _starting(["cpu", "cuda", "mps"], incomplete)


def _starting(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
