"""Sweeps: a recipe at every combination of some values, each an ordinary run, and a table of what came out."""

from tcnca.training.sweeps.picture import save_picture
from tcnca.training.sweeps.plan import Point, Sweep, plan
from tcnca.training.sweeps.running import outcome, run_sweep
from tcnca.training.sweeps.table import best_row, read_rows, write_tables

__all__ = ["Point", "Sweep", "best_row", "outcome", "plan", "read_rows", "run_sweep", "save_picture", "write_tables"]
