"""Benchmarks of operators, layers and models. Every candidate is checked against float64 before it is timed."""

from tcnca.bench.case import DTYPES, BenchCase, Settings, Workload
from tcnca.bench.plot import save_plot
from tcnca.bench.report import COMPARISONS, Ratio, Report, Result, compute_ratios, read_json, write_json
from tcnca.bench.roofline import Cost, Roofline, measure_roofline
from tcnca.bench.runner import SUITES, bench_cases, measure, run_suite
from tcnca.bench.timing import Timer, Timing

__all__ = [
    "COMPARISONS",
    "DTYPES",
    "SUITES",
    "BenchCase",
    "Cost",
    "Ratio",
    "Report",
    "Result",
    "Roofline",
    "Settings",
    "Timer",
    "Timing",
    "Workload",
    "bench_cases",
    "compute_ratios",
    "measure",
    "measure_roofline",
    "read_json",
    "run_suite",
    "save_plot",
    "write_json",
]
