"""Triton's interpreter, which runs kernels on the CPU.

Triton decides when it defines kernels whether they are interpreted, so such tests run in a process of their own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata

import pytest

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"


def _why_not() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton"
    triton, numpy = (tuple(map(int, metadata.version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        return "needs Triton 3.7: the interpreters before it cannot loop with NumPy 2.4"
    return None


with_interpreter = pytest.mark.skipif(_why_not() is not None, reason=_why_not() or "")
not_interpreted = pytest.mark.skipif(INSIDE, reason="the interpreter runs kernels on a CPU")


def interpret(*arguments: str) -> None:
    """Run Python with these arguments and the interpreter, and expect that all went well."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
