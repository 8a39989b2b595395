"""Variants: named sets of changes to a recipe, to be compared with everything else equal."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any

from tcnca.errors import ConfigError
from tcnca.recipes import find, read_yaml

VARIANT = "variant"
"""What stands for a key where the value is the name of a variant."""

_KEYS = ("about", "recipe", "variants")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variants:
    """Named sets of changes."""

    name: str
    """Name or file, as it was given."""
    about: str = ""
    """What is compared, for people."""
    recipe: str = ""
    """The recipe that they were made for; they may fit others."""
    only: tuple[str, ...] = ()
    """The variants that were picked; none, if all are meant."""
    changes: dict[str, list[str]]
    """For each variant that is meant, what it changes."""

    @property
    def arguments(self) -> list[str]:
        """What names them on the command line."""
        return ["--variants", self.name, *(["--only", ",".join(self.only)] if self.only else [])]

    def advice(self, recipe: str) -> str:
        """What to say where they do not fit a recipe, if they were made for another one."""
        return "" if self.recipe in ("", recipe) else f" (the variants of {self.name} are for {self.recipe})"


def load_variants(name: str, only: Sequence[str] = ()) -> Variants:
    """Variants that come with the library, by their name, or those of a file of yours, by its path.

    Args:
        name: name or file.
        only: the variants that are wanted; none for all.
    """
    values = read_yaml(find(name, "variants"), name)
    try:
        for key in values:
            if key not in _KEYS:
                raise ConfigError(f"{key}: no such key of a file of variants, allowed are {', '.join(_KEYS)}")
        found = values.get("variants")
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"variants: got {found!r}, allowed are names with lists of changes")
        changes = {_named(each): _listed(each, texts) for each, texts in found.items()}
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    about, recipe = (str(values.get(key) or "") for key in ("about", "recipe"))
    wanted = {each: changes[each] for each in _picked(changes, only)}
    return Variants(name=name, about=about, recipe=recipe, only=tuple(wanted) if only else (), changes=wanted)


def _named(name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"variants: got {name!r} for a name, which YAML takes for no word; put it into quotes")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"variants: got {name!r} for a name, allowed are a letter and then letters, digits and _.+-")
    return name


def _listed(name: str, texts: Any) -> list[str]:
    if not isinstance(texts, list):
        raise ConfigError(f"variant {name}: got {texts!r}, allowed is a list such as [num_layers=4]; [] changes nothing")
    for text in texts:
        if not isinstance(text, str) or "=" not in text:
            raise ConfigError(f"variant {name}: got {text!r}, allowed is key=value; in quotes, if it has a comma")
    return texts


def _picked(changes: dict[str, list[str]], only: Sequence[str]) -> list[str]:
    """The names that are wanted, in the order of the file."""
    for name in only:
        if name not in changes:
            close = difflib.get_close_matches(name, changes, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"only: got {name!r}, allowed are {', '.join(changes)}{hint}")
    return [name for name in changes if name in only or not only]
