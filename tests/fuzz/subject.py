"""A kind of files to attack: how they are damaged, and how they are used."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tcnca.__main__
from tcnca import TcncaError
from tests.fuzz.mutations import Rng, damage, files_in, link, sign, to_json
from tests.fuzz.sandbox import CaseError

T = TypeVar("T")

Attack = Callable[[Rng], str]
"""Damages the files in the working directory, and says how."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A kind of files, and their use."""

    base: str
    """Folder of the undamaged files."""
    use: Callable[[], Any]
    """Use the files in the working directory."""
    attacks: Sequence[Attack] = ()
    """Known attacks, the worst first. The first seeds are these, in order; later ones draw some of them again."""
    targets: str = ""
    """Regular expression for the files that are damaged; empty for all."""
    independent: bool = False
    """Whether the files and folders do not belong together; then undamaged ones are left out, to save time."""
    share: int = 10
    """Cases of the normal suite."""

    def make(self, seed: int, base: Path, case: Path) -> str:
        """Damage the files of a case: a function of the subject and the seed."""
        done = self._damage(seed, base, case)
        for path in sorted(base.iterdir()) if self.independent else ():
            if _same(path, case / path.name):
                shutil.rmtree(case / path.name) if path.is_dir() else (case / path.name).unlink()
        return done

    def _damage(self, seed: int, base: Path, case: Path) -> str:
        rng = Rng(f"{self.base} {self.targets} {seed}")
        files = [path for path in files_in(base) if re.search(self.targets, path.relative_to(base).as_posix())]
        if self.attacks and (seed < len(self.attacks) or not files or rng.random() < 0.15):
            done = self.attacks[seed if seed < len(self.attacks) else rng.randrange(len(self.attacks))](rng)
            sign(base, case)
            return done
        chosen = [rng.choice(files) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        done = "; ".join(damage(rng, path.relative_to(base), files) for path in chosen)
        if rng.random() < 0.7:
            sign(base, case)
        return done


def _same(one: Path, other: Path) -> bool:
    """Return whether two files or folders have the same content."""
    if one.is_dir():
        names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other) if not folder.is_symlink()]
        return len(names) == 2 and names[0] == names[1] and all(_same(one / name, other / name) for name in names[0])
    return other.is_file() and not other.is_symlink() and one.read_bytes() == other.read_bytes()


def written(path: str, content: bytes | Callable[[], bytes]) -> Attack:
    """Return an attack that replaces a file."""

    def attack(rng: Rng) -> str:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).unlink(missing_ok=True)
        Path(path).write_bytes(content if isinstance(content, bytes) else content())
        return f"{path}: replaced"

    return attack


def changed(pattern: str, change: Callable[[Any], Any]) -> Attack:
    """Return an attack that changes the value of a JSON file, the first that matches."""

    def attack(rng: Rng) -> str:
        path = sorted(Path.cwd().glob(pattern))[0].relative_to(Path.cwd())
        value = json.loads(path.read_bytes())
        result = change(value)
        path.write_text(to_json(value if result is None else result), encoding="utf-8")
        return f"{path}: changed"

    return attack


def linked(name: str, target: str) -> Attack:
    """Return an attack that puts a link in the place of a file or folder."""

    def attack(rng: Rng) -> str:
        path = Path(name)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        link(path, target)
        return f"{name}: a link to {target}"

    return attack


def fifo(name: str) -> Attack:
    """Return an attack that puts a FIFO in the place of a file."""

    def attack(rng: Rng) -> str:
        Path(name).unlink(missing_ok=True)
        os.mkfifo(name)
        return f"{name}: a FIFO"

    return attack


def command(*words: str) -> Callable[[], None]:
    """Return the use of files by the command line: it must end with 0 or 1, without a traceback."""

    def use() -> None:
        sys.argv = ["tcnca", *words]
        code: Any = 0
        try:
            tcnca.__main__.main()
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
        sys.stderr.flush()
        output = Path("../output.txt")
        printed = output.read_text(encoding="utf-8", errors="replace") if output.is_file() else ""
        if "Traceback (most recent" in printed:
            raise CaseError("prints a traceback")
        if "please report" in printed.lower() or "TCNCA_DEBUG" in printed:
            raise CaseError("reports an internal error")
        if code not in (0, None, 1):
            raise CaseError(f"ends with exit code {code!r}")

    return use


def entry(name: str, value: Any) -> Callable[[Any], None]:
    """Return a change of one entry of a nested dictionary; names are separated by dots."""

    def change(values: Any) -> None:
        *outer, last = name.split(".")
        for part in outer:
            values = values[part]
        values[last] = value

    return change


def use_each(things: Iterable[T], use: Callable[[T], Any]) -> None:
    """Use all things, and raise the last named error."""
    error: TcncaError | None = None
    for thing in things:
        try:
            use(thing)
        except TcncaError as reason:
            error = reason
    if error is not None:
        raise error


def entries() -> list[str]:
    """Return the names of the files and folders in the working directory."""
    return sorted(path.name for path in Path.cwd().iterdir())


def write_table(path: str = "data.csv") -> None:
    """Write a table of texts with two classes."""
    rows = "".join(f"{'good' if n % 2 else 'bad'} text {n},{'yes' if n % 2 else 'no'}\n" for n in range(60))
    Path(path).write_text("text,label\n" + rows, encoding="utf-8")
