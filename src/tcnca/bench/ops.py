"""`tcnca bench ops`: the TCN against the EMA over the length of the sequence, as in the paper's Figure 2."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from tcnca.bench.attention import attention_entries
from tcnca.bench.check import TOLERANCE
from tcnca.bench.entry import Entry, Settings
from tcnca.bench.functions import function_entry
from tcnca.bench.operators import Case, Operator, operators
from tcnca.layers import TCNConfig

GPU_LENGTHS = (512, 2048, 8192, 16_384, 32_768, 65_536, 131_072)
CPU_LENGTHS = (1024, 8192, 32_768)
GPU_BATCHES, CPU_BATCHES = (1, 8), (1,)
_CHECKED_ROWS, _CHECKED_ON_CPU = 2, 8192


def ops_entries(settings: Settings) -> list[Entry]:
    """Every operator at every size, and the attention of some models."""
    return [*_operator_entries(settings), *attention_entries(settings)]


def _operator_entries(settings: Settings) -> Iterator[Entry]:
    on_gpu = settings.device.type == "cuda"
    for batch in settings.batches or (GPU_BATCHES if on_gpu else CPU_BATCHES):
        for length in settings.lengths or (GPU_LENGTHS if on_gpu else CPU_LENGTHS):
            case = case_of(settings, batch, length)
            for operator in operators().values():
                yield _entry(operator, case)


def case_of(settings: Settings, batch: int, length: int) -> Case:
    """A size, with the least dilation factor whose receptive field covers the sequence."""
    config = TCNConfig.covering(length, kernel_size=settings.kernel_size, depth=settings.depth)
    return Case(
        batch=batch,
        length=length,
        channels=settings.channels,
        kernel_size=settings.kernel_size,
        depth=settings.depth,
        dilation_factor=config.dilation_factor,
        dtype=settings.dtype,
        device=settings.device,
    )


def _entry(operator: Operator, case: Case) -> Entry:
    cheap = case.length if case.device.type == "cuda" else _CHECKED_ON_CPU
    length = min(case.length, cheap if operator.max_length is None else operator.max_length)
    small = dataclasses.replace(case, batch=min(case.batch, _CHECKED_ROWS), length=length)
    return function_entry(
        suite="ops",
        name=operator.name,
        label=operator.label,
        about=operator.about,
        sizes={"batch": case.batch, "length": case.length, "dilation_factor": case.dilation_factor},
        tokens=case.batch * case.length,
        inputs=lambda checking: operator.inputs(small if checking else case),
        run=operator.run(case),
        oracle=operator.oracle(case),
        work=operator.work(case),
        tolerance=TOLERANCE[case.dtype],
    )
