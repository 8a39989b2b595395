"""What tests of data share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "".join(f"review {n},{'good' if n % 2 else 'bad'}\n" for n in range(60)))
    return path
