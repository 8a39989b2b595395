"""Packages import only from lower layers, and what `__all__` lists exists."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import tcnca

ROOT = Path(tcnca.__file__).parent
# From the bottom to the top. Packages of one layer do not import each other, except in the first and the last.
LAYERS = (
    ("config", "errors", "extras", "files", "pretrained", "recipes", "signals", "version", "yaml_reader"),
    ("ops",),
    ("layers",),
    ("models",),
    ("data",),
    ("generation", "training"),
    ("bench", "export", "hf", "inference", "inspection"),
    ("report", "search"),
    ("cli", "__init__", "__main__"),
)
PUBLIC = [
    "tcnca",
    *(f"tcnca.{name}" for name in ("ops", "layers", "models", "data", "training", "bench", "search", "inference")),
]


def sources(package: str) -> list[Path]:
    """The files of a package or of a module at the top level; none if it does not exist yet."""
    return sorted([*(ROOT / package).rglob("*.py"), *ROOT.glob(f"{package}.py")])


def imported_packages(path: Path) -> set[str]:
    """The packages of tcnca that a file imports anywhere in it; `__init__` for tcnca itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: expected absolute imports"
            # `from tcnca import ops` imports a package by its name.
            found |= {f"tcnca.{it.name}" for it in node.names} if node.module == "tcnca" else {str(node.module)}
    names = [name.split(".") for name in found if name.split(".")[0] == "tcnca"]
    return {name[1] if len(name) > 1 else "__init__" for name in names}


def test_imports_are_found() -> None:
    """Otherwise the next test would pass for any imports."""
    assert {"ops", "layers"} <= imported_packages(ROOT / "models" / "model.py")
    assert "__init__" in imported_packages(Path(__file__))
    known = {name for layer in LAYERS for name in layer}
    assert {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} <= known


@pytest.mark.parametrize("package", [name for layer in LAYERS for name in layer if sources(name)])
def test_packages_import_only_lower_layers(package: str) -> None:
    (index,) = (index for index, layer in enumerate(LAYERS) if package in layer)
    allowed = {package, *(name for layer in LAYERS[:index] for name in layer)}
    allowed |= set(LAYERS[index]) if index in (0, len(LAYERS) - 1) else set()
    for path in sources(package):
        assert imported_packages(path) <= allowed, path.relative_to(ROOT)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist_and_are_listed_once(name: str) -> None:
    module = importlib.import_module(name)
    assert [each for each in module.__all__ if not hasattr(module, each)] == []
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(module.__all__) <= set(dir(module))
