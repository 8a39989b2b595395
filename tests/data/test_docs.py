"""The code of docs/data.md runs as shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tcnca
from tests.examples import small_config

DOCS = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TCNCA_DATA", raising=False)
    rows = (f"{'good' if number % 2 else 'bad'} film {number},{number % 2}" for number in range(100))
    Path("reviews.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    tcnca.data.prepare_dataset("reviews", origin="reviews.csv")
    loop, carried = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert "range(1000)" in loop
    names: dict[str, Any] = {"torch": torch, "tcnca": tcnca}
    exec(loop.replace("range(1000)", "range(2)"), names)
    assert capsys.readouterr().out.startswith("accuracy tensor(")

    Path("book.txt").write_text("so many words " * 200, encoding="utf-8")
    task = tcnca.data.load_task("book.txt", eval_length=16, segments=3)
    names = {"task": task, "model": tcnca.build(small_config(vocab_size=256))}
    exec(carried, names)
    assert names["batch"].continues
    assert names["state"].batch_size == 3
