"""The storeys of the package stay apart, its files stay short, and what is public is documented."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tcnca

ROOT = Path(tcnca.__file__).parent
LINES = 400

# What each storey may import of the package, itself included.
STOREYS = {
    "errors": set[str](),
    "ops": {"config", "errors", "ops"},
    "layers": {"config", "errors", "ops", "layers"},
    "models": {"config", "errors", "ops", "layers", "models"},
    "data": {"config", "errors", "version", "ops", "layers", "models", "data"},
    "training": {"config", "errors", "version", "ops", "layers", "models", "data", "training"},
    "bench": {"config", "errors", "ops", "layers", "models", "data", "training", "bench"},
}
PUBLIC = ["tcnca", "tcnca.ops", "tcnca.layers", "tcnca.models", "tcnca.data", "tcnca.training", "tcnca.bench"]


def sources(storey: str = "") -> list[Path]:
    """The files of a storey, which is a folder or a single file."""
    place = ROOT / storey if storey else ROOT
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """The parts of the package that a file imports, anywhere in it; `.` for the package itself."""
    package = ["tcnca", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            # `from tcnca import ops` imports a part by its name.
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "tcnca" else {module}
    inside = [name.split(".") for name in found if name.split(".")[0] == "tcnca"]
    return {name[1] if len(name) > 1 else "." for name in inside}


def test_imports_are_found() -> None:
    """Otherwise the tests below would pass whatever the files import."""
    assert "errors" in imported(ROOT / "layers" / "tcn.py")
    assert {"ops", "layers", "models"} <= imported(ROOT / "models" / "model.py")
    assert len(sources("ops")) > 5


@pytest.mark.parametrize("storey", STOREYS)
def test_storey_knows_only_those_below(storey: str) -> None:
    for path in sources(storey):
        assert imported(path) <= STOREYS[storey], name_of(path)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_file_is_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES


def public(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_exist_and_are_listed_once(name: str) -> None:
    module = importlib.import_module(name)
    assert set(public(module)) == set(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


def undocumented(name: str, value: Any) -> list[str]:
    """Whatever of a public name has no docstring of its own: itself, its methods and properties."""
    if not (inspect.isclass(value) or inspect.isroutine(value)) or not value.__module__.startswith("tcnca"):
        return []
    missing = [] if has_docstring(value) else [name]
    if inspect.isclass(value):
        for key, member in vars(value).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not key.startswith("_") and inspect.isfunction(function) and not function.__doc__:
                missing.append(f"{name}.{key}")
    return missing


def has_docstring(value: Any) -> bool:
    """Whether it has one that was written: dataclasses and named tuples get one made up from their fields."""
    text: str = (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
    return text != "" and not text.startswith(f"{value.__name__}(")


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_have_docstrings(module: str) -> None:
    loaded = importlib.import_module(module)
    assert loaded.__doc__
    assert [gap for name, value in public(loaded).items() for gap in undocumented(name, value)] == []


def test_gaps_in_the_documentation_are_found() -> None:
    """Otherwise the test above would pass whatever is missing."""

    @dataclasses.dataclass
    class Bare:
        field: int = 0

        def method(self) -> None: ...

        @property
        def value(self) -> int:
            return 0

    Bare.__module__ = "tcnca.example"
    assert undocumented("Bare", Bare) == ["Bare", "Bare.method", "Bare.value"]


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_file_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_fields_of_configurations_are_documented(path: Path) -> None:
    """Every field of a public frozen dataclass of keywords is followed by a docstring that says what it is."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and is_configuration(node):
            for place, statement in enumerate(node.body):
                if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                    following = node.body[place + 1] if place + 1 < len(node.body) else None
                    documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                    assert documented, f"{node.name}.{ast.unparse(statement.target)}"


def is_configuration(node: ast.ClassDef) -> bool:
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return "kw_only=True" in decorators and not node.name.startswith("_") and node.name in tcnca.__all__
