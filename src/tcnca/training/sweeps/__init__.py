"""Sweeps: a recipe at every combination of some values and variants, each a run, and a table of what came out."""

from tcnca.training.sweeps.curves import save_curves
from tcnca.training.sweeps.picture import save_picture
from tcnca.training.sweeps.plan import Point, Sweep, plan
from tcnca.training.sweeps.running import outcome, run_sweep
from tcnca.training.sweeps.table import best_group, best_row, read_rows, write_tables
from tcnca.training.sweeps.variants import Variants, load_variants

__all__ = [
    "Point",
    "Sweep",
    "Variants",
    "best_group",
    "best_row",
    "load_variants",
    "outcome",
    "plan",
    "read_rows",
    "run_sweep",
    "save_curves",
    "save_picture",
    "write_tables",
]
