"""What a case must not do, done on purpose: the sandbox has to notice it."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import payloads
from tests.fuzz.mutations import OUTSIDE
from tests.fuzz.subject import Subject

_SECRET = Path("..", OUTSIDE, "secret.txt")


def _append() -> None:
    with _SECRET.open("a") as file:
        file.write("more")


def _write_by_link() -> None:
    Path("link").symlink_to(_SECRET)
    Path("link").write_text("other")


def _grow() -> None:
    bytearray(b"1") * (2**30 + 2**28)


def _raise() -> None:
    raise KeyError("x")


MISBEHAVIOR: dict[str, tuple[Callable[[], object], str]] = {
    "unpickles": (lambda: pickle.loads(payloads.pickled(0)), "runs code: pickle.find_class"),
    "evaluates": (lambda: eval(f"{payloads.MARKER!r}"), "runs code: compile"),
    "starts-a-program": (lambda: os.system("true"), "runs code: os.system"),
    "writes-outside": (_append, "writes outside: open"),
    "writes-by-a-link": (_write_by_link, "writes outside: open"),
    "moves-from-outside": (lambda: _SECRET.replace("secret.txt"), "writes outside: os.rename"),
    "leaves-a-marker": (lambda: Path(payloads.MARKER).touch(), "runs code: the marker exists"),
    "grows": (_grow, "grows over"),
    "raises": (_raise, "raises KeyError"),
    "ends": (lambda: os._exit(3), "ends with status"),
    "hangs": (lambda: time.sleep(60), "hangs over"),
}
SUBJECTS = {name: Subject(base="tables", use=use) for name, (use, _) in MISBEHAVIOR.items()}
