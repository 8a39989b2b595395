"""Shared setup: one thread per test process, fixed seeds, and an orderly end on SIGTERM."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tcnca", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tcnca")
torch.set_num_threads(1)
_WORKERS: list[int] = []


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the run on SIGTERM as on Ctrl-C, so that fixtures are torn down and workers stop."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # The command line turns KeyboardInterrupt into an exit code: then end after this test.
        session.shouldstop = "received SIGTERM"
        for pid in _WORKERS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    # A worker of pytest-xdist is told to stop only after its current test, and killed ten seconds later.
    _WORKERS.append(node.gateway._io.popen.pid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
