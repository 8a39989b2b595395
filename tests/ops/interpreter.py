"""Run tests of kernels in Triton's interpreter, on the CPU.

Triton decides when it defines kernels whether they are interpreted, so these tests run in another process, which
`test_interpreter.py` starts.
"""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def unsupported_reason() -> str | None:
    """Return why the interpreter cannot run here, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton"
    triton, numpy = (tuple(map(int, metadata.version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return "needs Triton 3.7: the interpreters before it cannot loop with NumPy 2.4"
    return None


interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_interpreter.py starts")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="the interpreter runs kernels on a CPU")
