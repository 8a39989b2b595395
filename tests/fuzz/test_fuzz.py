"""Damaged and hostile files give a named error or a valid result, within limits, and nothing in them is executed.

A failure prints the subject, the seed and what was damaged, and keeps the files. To run one case again, or a range:

    TCNCA_FUZZ=resume:17 pytest tests/fuzz
    TCNCA_FUZZ=model:0-5000 pytest tests/fuzz

A seed stands for the same case on every machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.misbehavior import MISBEHAVIOR
from tests.fuzz.sandbox import Report
from tests.fuzz.subjects import SUBJECTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and Linux's limits of memory")

CHOSEN = os.environ.get("TCNCA_FUZZ", "")
TIMES = 15
"""The slow test has so many times more cases."""
SHOWN = 10
"""Failures that are printed in full."""


class Server:
    """A process that runs cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(folder), "COLUMNS": "100"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.sandbox", str(folder)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready\n"

    def run(self, subject: str, seed: int) -> Report:
        """Run a case."""
        assert self.process.stdin is not None
        print(subject, seed, file=self.process.stdin, flush=True)
        return Report(**json.loads(self._answer()))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("fuzz"))
    yield started
    started.close()


def check(server: Server, subject: str, seeds: range) -> None:
    failed = [report for seed in seeds if (report := server.run(subject, seed)).failed]
    texts = [
        f"{report.subject}:{report.seed} {report.outcome}\n"
        f"damaged: {report.done}\n"
        f"files:   {server.folder / f'{report.subject}-{report.seed}'}\n"
        f"again:   TCNCA_FUZZ={report.subject}:{report.seed} pytest tests/fuzz\n"
        f"{report.detail}"
        for report in failed[:SHOWN]
    ]
    others = [f"{report.subject}:{report.seed} {report.outcome}" for report in failed[SHOWN:]]
    assert not failed, f"{len(failed)} of {len(seeds)} cases failed\n\n" + "\n\n".join([*texts, *others])


_HANGS = pytest.param("hangs", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [_HANGS if name == "hangs" else name for name in MISBEHAVIOR])
def test_the_sandbox_notices(server: Server, name: str) -> None:
    outcome = server.run(name, 0).outcome
    assert outcome.startswith(MISBEHAVIOR[name][1]), outcome


@pytest.mark.skipif(bool(CHOSEN), reason="TCNCA_FUZZ chooses other cases")
@pytest.mark.parametrize("subject", SUBJECTS)
def test_damaged_files(server: Server, subject: str) -> None:
    check(server, subject, range(SUBJECTS[subject].share))


@pytest.mark.slow
@pytest.mark.skipif(bool(CHOSEN), reason="TCNCA_FUZZ chooses other cases")
@pytest.mark.parametrize("subject", SUBJECTS)
def test_many_damaged_files(server: Server, subject: str) -> None:
    share = SUBJECTS[subject].share
    check(server, subject, range(share, TIMES * share))


@pytest.mark.skipif(not CHOSEN, reason="TCNCA_FUZZ chooses no cases")
def test_chosen_cases(server: Server) -> None:
    subject, _, seeds = CHOSEN.partition(":")
    first, _, last = seeds.partition("-")
    check(server, subject, range(int(first), int(last or first) + 1))
