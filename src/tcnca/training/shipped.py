"""YAML files that come with the library, by their names, and those of users, by their paths."""

from __future__ import annotations

import difflib
import importlib.resources
import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tcnca.errors import ConfigError


class Loader(yaml.SafeLoader):
    """YAML with numbers such as 1e-3, which YAML itself takes for words, and with no key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping, in which the later of two equal keys does not silently take the place of the earlier one."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is given twice", problem_mark=key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def shipped(folder: str) -> list[str]:
    """The names of the files in a folder that comes with the library: `recipes` or `variants`."""
    files = (importlib.resources.files("tcnca.training") / folder).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def read_yaml(name: str, folder: str, what: str) -> dict[Any, Any]:
    """The keys and values of a file: one that comes with the library, by its name, or one of yours, by its path.

    Args:
        name: name or path.
        folder: of those that come with the library.
        what: it is, for messages.
    """
    own = name.endswith((".yaml", ".yml")) or os.sep in name
    source = Path(name) if own else importlib.resources.files("tcnca.training") / folder / f"{name}.yaml"
    try:
        values = yaml.load(source.read_text(encoding="utf-8"), Loader)
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(_not_there(name, own, folder, what)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: is no text ({error.reason} at byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ConfigError(f"{name}: is not YAML: {error.problem}{where}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: is not YAML ({error})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: holds no keys and values")
    return values


def _not_there(name: str, own: bool, folder: str, what: str) -> str:
    if own:
        return f"{what}: there is no file {name}"
    known = shipped(folder)
    close = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{what}: got {name!r}, allowed are a file that ends in .yaml, and {', '.join(known)}{hint}"
