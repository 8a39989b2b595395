"""Typed, checked configurations. Errors name the field, what was expected and what it got."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
from typing import Any

import numpy as np

from tcnca.errors import ConfigError


class Config:
    """Base of the configurations.

    Numbers of NumPy's become plain ones, and the text under each field, which `help` would not show, is added to the
    docstring of the class.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        texts: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            texts |= _field_texts(base) if issubclass(base, Config) else {}
        if texts:
            lines = "".join(f"\n    {name}: {text}" for name, text in texts.items())
            cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nFields:{lines}\n"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, np.generic):
                object.__setattr__(self, field.name, value.item())


def _field_texts(cls: type) -> dict[str, str]:
    """The string that follows each field in the source of a class; nothing if there is no source."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    texts = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, text in itertools.pairwise(statements):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                texts[name] = " ".join(words.split())
    return texts


def check_at_least(name: str, value: Any, least: int) -> None:
    """Raise a ConfigError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: got {value!r}, allowed is a whole number of at least {least}")


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise a ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name}: got {value!r}, allowed are {', '.join(allowed)}")


def check_probability(name: str, value: Any) -> None:
    """Raise a ConfigError unless `value` can be a dropout probability."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ConfigError(f"{name}: got {value!r}, allowed is a number from 0 up to, not including, 1")


def check_flag(name: str, value: Any) -> None:
    """Raise a ConfigError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: got {value!r}, allowed are True and False")


def check_not_negative(name: str, value: Any) -> None:
    """Raise a ConfigError unless `value` is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigError(f"{name}: got {value!r}, allowed is a number of at least 0")


def check_share(name: str, value: Any) -> None:
    """Raise a ConfigError unless `value` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"{name}: got {value!r}, allowed is a number from 0 to 1")
