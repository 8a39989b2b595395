"""The code of docs/data.md runs as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tcnca

DOCS = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TCNCA_DATA", raising=False)
    rows = (f"{'good' if number % 2 else 'bad'} film {number},{number % 2}" for number in range(100))
    Path("reviews.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    tcnca.data.prepare_dataset("reviews", origin="reviews.csv")
    (code,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert "range(1000)" in code
    exec(code.replace("range(1000)", "range(2)"), {})
    assert "accuracy" in capsys.readouterr().out
