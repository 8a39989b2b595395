"""Benchmarks of operators, layers and models. Every candidate is checked against float64 before it is timed."""

from tcnca.bench.case import Settings
from tcnca.bench.plot import save_plot
from tcnca.bench.report import Ratio, Report, Result, read_json, write_json
from tcnca.bench.runner import SUITES, bench_cases, measure, run_suite

__all__ = [
    "SUITES",
    "Ratio",
    "Report",
    "Result",
    "Settings",
    "bench_cases",
    "measure",
    "read_json",
    "run_suite",
    "save_plot",
    "write_json",
]
