"""What is attacked: every kind of file that tcnca reads."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch

from tests.fuzz import data, inference, models, recipes, runs

SUBJECTS = {**runs.SUBJECTS, **models.SUBJECTS, **recipes.SUBJECTS, **data.SUBJECTS, **inference.SUBJECTS}
BASES = {**runs.BASES, **models.BASES, **recipes.BASES, **data.BASES, **inference.BASES}
"""How the undamaged files are made, by the library itself."""
IMPORTED = ".imported"
"""File with the names of the modules that the subjects import."""


def make_bases(folder: Path) -> None:
    """Make the undamaged files of all subjects, and use them, which must give valid results."""
    for name, make in BASES.items():
        (folder / name).mkdir(parents=True)
        os.chdir(folder / name)
        torch.manual_seed(0)
        make()
    for name, subject in SUBJECTS.items():
        shutil.copytree(folder / subject.base, folder / ".tried" / name)
        os.chdir(folder / ".tried" / name)
        subject.use()
    shutil.rmtree(folder / ".tried")
    (folder / IMPORTED).write_text("\n".join(sys.modules), encoding="utf-8")
