"""Benchmarks: operators, layers and models against their rivals, checked before they are timed."""

from tcnca.bench.entry import DTYPES, Entry, Inputs, Pair, Settings, Subject, Work
from tcnca.bench.floors import Floors, measure_floors
from tcnca.bench.plot import save_plot
from tcnca.bench.ratios import COMPARISONS, Comparison, Goal, ratios_of
from tcnca.bench.report import Report, Result, read_json, write_json
from tcnca.bench.running import SUITES, Watch, entries_of, measure, run_suite
from tcnca.bench.timing import Clock, Times

__all__ = [
    "COMPARISONS",
    "DTYPES",
    "SUITES",
    "Clock",
    "Comparison",
    "Entry",
    "Floors",
    "Goal",
    "Inputs",
    "Pair",
    "Report",
    "Result",
    "Settings",
    "Subject",
    "Times",
    "Watch",
    "Work",
    "entries_of",
    "measure",
    "measure_floors",
    "ratios_of",
    "read_json",
    "run_suite",
    "save_plot",
    "write_json",
]
