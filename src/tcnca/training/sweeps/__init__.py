"""Sweeps: a recipe at every combination of some values and variants, each a run, with tables and figures of all."""

from tcnca.training.sweeps.plan import Point, Sweep, Variants, load_variants, plan
from tcnca.training.sweeps.plots import save_curves, save_scores
from tcnca.training.sweeps.runner import point_state, run_sweep
from tcnca.training.sweeps.tables import best_group, best_row, read_rows, write_tables

__all__ = [
    "Point",
    "Sweep",
    "Variants",
    "best_group",
    "best_row",
    "load_variants",
    "plan",
    "point_state",
    "read_rows",
    "run_sweep",
    "save_curves",
    "save_scores",
    "write_tables",
]
