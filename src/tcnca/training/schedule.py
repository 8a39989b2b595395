"""The learning rate over a run, as a function of how much of the run is done.

The run is measured in updates, or, where it must end at a given time, in seconds: the same curve is laid over either.
"""

from __future__ import annotations

import math

from tcnca.training.config import ScheduleConfig


def scheduled_lr(done: float, peak: float, schedule: ScheduleConfig) -> float:
    """The learning rate when a share `done` of the run, from 0 to 1, is over.

    The warm-up takes its share of the run: `warmup_steps` of `max_steps`.
    """
    done = min(max(done, 0.0), 1.0)
    warmup = schedule.effective_warmup_steps / schedule.max_steps
    if done < warmup:
        return schedule.warmup_start + (peak - schedule.warmup_start) * (done / warmup) ** schedule.warmup_power
    if warmup >= 1.0:
        return peak
    left = 1.0 - (done - warmup) / (1.0 - warmup)
    end = schedule.end * peak
    if schedule.kind == "cosine":
        return end + (peak - end) * (1.0 - math.cos(math.pi * left)) / 2
    if schedule.kind == "wsd":
        left = min(left * (1.0 - warmup) / schedule.decay, 1.0) if schedule.decay > 0 else float(left > 0)
    return end + (peak - end) * left
