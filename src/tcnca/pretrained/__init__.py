"""The pretrained model that comes with the package, TCNCA-linear on the bytes of EnWik8: see docs/model-card.md.

Its folder is one that `tcnca export RUN --model FOLDER --dtype int8` writes.
"""

from __future__ import annotations

from pathlib import Path

NAME = "pretrained/enwik8"
"""What it is called in output."""
FOLDER = Path(__file__).parent / "enwik8"
