"""Shared setup: one thread per test process, fixed seeds, and an orderly end on SIGTERM."""

from __future__ import annotations

import signal
from types import FrameType

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tcnca", max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tcnca")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    """End the run on SIGTERM as on Ctrl-C, so that fixtures are torn down and workers stop."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
