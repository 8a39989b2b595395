"""Sweeps: a recipe at every combination of some values and variants, each a run, with tables and figures of all."""

from tcnca.training.sweeps.plan import Point, Sweep, Variants, load_variants, plan
from tcnca.training.sweeps.plots import save_curves, save_scores
from tcnca.training.sweeps.results import Row, read_rows, to_markdown, write_tables
from tcnca.training.sweeps.runner import run_sweep

__all__ = [
    "Point",
    "Row",
    "Sweep",
    "Variants",
    "load_variants",
    "plan",
    "read_rows",
    "run_sweep",
    "save_curves",
    "save_scores",
    "to_markdown",
    "write_tables",
]
