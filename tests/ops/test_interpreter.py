"""Run the interpreted tests of all Triton kernels in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.interpreter import not_interpreted, unsupported_reason

FILES = [
    str(Path(__file__).with_name(f"test_{name}_triton.py")) for name in ("ema", "ssm", "attention", "steps", "sampling")
]


@not_interpreted
@pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
@pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_are_right_in_the_interpreter(marker: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marker, *FILES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
