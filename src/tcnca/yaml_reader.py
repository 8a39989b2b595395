"""The reader of YAML: recipes, variants, and the values of KEY=VALUE.

It takes texts from others: nothing in them is executed, and time and memory are bounded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml

from tcnca.errors import ConfigError, shown

_MAX_YAML = 2**15
"""Characters a YAML text may have. Recipes have a few thousand; the parser needs a second for this many."""
_MAX_DEPTH = 50
"""Lists and dictionaries that may be inside of each other."""


class _YamlLoader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, None is null and a date is a text.

    A key that is given twice is an error, and so is an alias: a few nested ones expand to gigabytes.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse aliases, and values that are nested too deeply."""
        problem = "aliases (*name) are not allowed" if self.check_event(yaml.AliasEvent) else ""
        problem = "it is nested too deeply" if self.depth > _MAX_DEPTH else problem
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; one that cannot be is an error of YAML with its place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
            problem = f"{shown(node.value)} is not a value"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a second value for a key, which would silently replace the first."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {shown(key.value)[1:-1]} is given twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_TAG = "tag:yaml.org,2002:"
# PyYAML reads 010 as 8, 1:30 as 90 and 1_000 as 1000. Here numbers are those of YAML 1.2.
_YamlLoader.yaml_implicit_resolvers = {
    first: [pair for pair in resolvers if pair[0].removeprefix(_TAG) not in ("timestamp", "int", "float")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_YamlLoader.add_implicit_resolver(f"{_TAG}int", _INTEGER, list("-+0123456789"))
_YamlLoader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))
_YamlLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"None$"), ["N"])


def parse_yaml(text: str) -> Any:
    """Return the value that a text of YAML stands for, or raise a ConfigError that says what is wrong and where."""
    if len(text) > _MAX_YAML:
        raise ConfigError(f"expected YAML of at most {_MAX_YAML:,} characters, got {len(text):,}")
    try:
        return yaml.load(text, _YamlLoader)
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f", in line {error.problem_mark.line + 1}"
        raise ConfigError(f"expected YAML ({error.problem}{where})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"expected YAML ({' '.join(str(error).split())})") from error


def read_yaml(path: Path, label: str = "") -> dict[str, Any]:
    """Return the keys and values of a YAML file; errors begin with `label`, by default the path."""
    label = label or str(path)
    try:
        # The limit is in characters, of which none has more than four bytes.
        with path.open("rb") as file:
            values = parse_yaml(file.read(4 * _MAX_YAML + 1).decode())
        if not isinstance(values, dict):
            raise ConfigError(f"expected keys and values, got {shown(values)}")
        for key in values:
            if not isinstance(key, str):
                raise ConfigError(f"key {shown(key)}: expected a text, got {shown(key)}")
        return values
    except OSError as error:
        raise ConfigError(f"{label}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label}: expected text, got {error.reason} at byte {error.start}") from error
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error


def parse_value(text: str) -> Any:
    """Return the value that a text of the command line stands for."""
    try:
        return parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{str(error).replace(', in line 1)', ')')}, got {shown(text)}") from error


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Return the keys and values of texts such as `lr=1e-3`. The last value of a key counts."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            example = f"data={shown(text)[1:-1]}" if os.path.isfile(text) else "lr=0.001"
            raise ConfigError(f"{shown(text)[1:-1]}: expected KEY=VALUE, got no value; for example {example}")
        key = key.strip()
        if not value.strip():
            raise ConfigError(f"{shown(key)[1:-1]}: expected a value after the equals sign, got nothing")
        try:
            found[key] = parse_value(value)
        except ConfigError as error:
            raise ConfigError(f"{shown(key)[1:-1]}: {error}") from error
    return found
