"""Recipes, changes of them on the command line, variants of sweeps, and reports of benchmarks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import tcnca.recipes
from tcnca.cli.models import printed
from tcnca.training import load_recipe, sweeps
from tests.fuzz import payloads
from tests.fuzz.mutations import Rng
from tests.fuzz.runs import small_recipe
from tests.fuzz.subject import Attack, Subject, command, write_table, written

_KEYS = (
    *("lr", "num_layers", "d_model", "seed", "model.preset", "model", "data", "about", "betas", "max_steps", "cpu"),
    *("model.mixer", "model.mixer.depth", "model.attention", "model.attention.chunk_size", "data.task", "data.custom"),
    *("dropout", "data.kind", "checkpoint.keep", "eval.batch_size", "model.head", "model.input", "compile", "threads"),
    *("optimizer", "schedule.kind", "extends", "", ".", "a.b.c", "__class__", "model.__class__", "kernel_size", "ä"),
)
_TEXTS = (
    *("2001-13-45", "0x_", "0b_", "[1]", "{a: 1}", "[]", "{}", "", "null", "true", "1e400", ".nan", "-.inf", "-1", "0"),
    *(
        "9" * 400,
        "9" * 5000,
        "1e-400",
        "2**64",
        str(2**64),
        str(2**63),
        "*a",
        "&a [*a]",
        "!!python/name:os.system",
        "'",
    ),
    *("[" * 10_000, "{a: " * 3000, "x" * 100_000, "\ud800", "a\0b", "1:60:60", "!!int x", "? a", "!!binary x", "- - -"),
    *(
        "[1, 2]",
        "[0.9, 0.99, 1]",
        "['a']",
        "0.5",
        "1",
        "tcnca-text",
        "mega-recall-64",
        "../../etc/passwd",
        "1_000",
        "%",
    ),
)


def _make_recipe() -> None:
    Path("recipe.yaml").write_text(small_recipe().to_yaml(), encoding="utf-8")
    shutil.copy(Path(tcnca.recipes.__file__).parent / "variants" / "mixers.yaml", "variants.yaml")
    Path("changes.json").write_text("[]", encoding="utf-8")
    write_table()


def _use_recipe() -> None:
    recipe = load_recipe("recipe.yaml")
    recipe.validate()
    recipe.for_device("cpu").to_yaml()
    printed("recipe.yaml", [])


def _use_changes() -> None:
    changes = json.loads(Path("changes.json").read_bytes())
    recipe = load_recipe("recall-small").override(changes)
    recipe.validate()
    recipe.for_device("cpu").to_yaml()


def _change(rng: Rng) -> str:
    """Draw one or two changes of a recipe."""
    changes = [f"{rng.choice(_KEYS)}={rng.choice(_TEXTS)}" for _ in range(rng.choice([1, 1, 2]))]
    Path("changes.json").write_text(json.dumps(changes), encoding="utf-8")
    return f"changes {str(changes)[:200]!a}"


def _changes(*changes: str) -> Attack:
    return written("changes.json", json.dumps(changes).encode())


def _use_variants() -> None:
    variants = sweeps.load_variants("variants.yaml")
    sweeps.plan("classify", ["data=data.csv", "lr=1e-3,1e-2"], Path("sweep"), variants=variants, device="cpu")


_RECIPES: list[Attack] = [written("recipe.yaml", text.encode(errors="surrogatepass")) for text in payloads.YAML_TEXTS]


def _make_bench() -> None:
    values = json.loads((Path(__file__).parents[2] / "results" / "speed" / "ops.json").read_bytes())
    values["results"], values["ratios"] = values["results"][:3], values["ratios"][:3]
    Path("report.json").write_text(json.dumps(values), encoding="utf-8")


_DRY_RUN = command("sweep", "classify", "data=data.csv", "--variants", "variants.yaml", "--dry-run", "--device", "cpu")
_CHANGES: list[Attack] = [
    _changes("about=2001-13-45"),
    _changes("about=0x_"),
    _changes("model.preset=[1]"),
    _changes("seed=18446744073709551616"),
    _changes("lr=&a [*a]"),
    *[_change] * 20,
]
BASES: dict[str, Callable[[], None]] = {"recipes": _make_recipe, "bench": _make_bench}
SUBJECTS = {
    "recipe": Subject(base="recipes", use=_use_recipe, attacks=_RECIPES, targets=r"recipe\.yaml$", share=18),
    "changes": Subject(base="recipes", use=_use_changes, attacks=_CHANGES, targets="^$", share=8),
    "variants": Subject(base="recipes", use=_use_variants, targets=r"variants\.yaml$", share=4),
    "bench": Subject(base="bench", use=command("bench", "show", "report.json"), share=3),
    "cli-recipes": Subject(
        base="recipes", use=command("recipes", "recipe.yaml"), attacks=_RECIPES, targets=r"recipe\.yaml$", share=2
    ),
    "cli-sweep": Subject(base="recipes", use=_DRY_RUN, targets=r"variants\.yaml$", share=1),
}
