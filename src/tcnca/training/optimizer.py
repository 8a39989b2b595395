"""Optimizers, their parameter groups, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tcnca.layers import EMA, TCN
from tcnca.training.config import OptimizerConfig, ScheduleConfig


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Split the parameters into groups, each with its `name`, `weight_decay` and learning-rate factor `lr_mult`.

    `matrices` are decayed; `kernels`, the convolution kernels of a TCN, have factors of their own; `rest`, which is
    norms, biases, EMA, position biases and the scales of queries and keys, is not decayed.
    """
    kernels, rest = set[int](), set[int]()
    for module in model.modules():
        if isinstance(module, TCN):
            kernels.add(id(module.weight))
        if isinstance(module, EMA):
            rest |= {id(parameter) for parameter in module.parameters()}
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "kernels": [], "rest": []}
    for name, parameter in model.named_parameters():
        if id(parameter) in kernels:
            groups["kernels"].append(parameter)
        elif id(parameter) not in rest and name.endswith("weight") and parameter.ndim > 1:
            groups["matrices"].append(parameter)
        else:
            groups["rest"].append(parameter)
    wd_mult = {"matrices": 1.0, "kernels": config.kernel_wd_mult, "rest": 0.0}
    lr_mult = {"matrices": 1.0, "kernels": config.kernel_lr_mult, "rest": 1.0}
    return [
        {"name": name, "params": group, "weight_decay": wd_mult[name] * config.weight_decay, "lr_mult": lr_mult[name]}
        for name, group in groups.items()
        if group
    ]


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a run, which together train every parameter once."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    groups = parameter_groups(model, config)
    return [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=on_gpu)]


def set_lr(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of every group to `lr` times the factor of the group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]


def scheduled_lr(progress: float, peak: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate when a share `progress` of the run, from 0 to 1, is done.

    The run is measured in steps or, with a time budget, in seconds; the curve is the same.
    """
    progress = min(max(progress, 0.0), 1.0)
    warmup = schedule.effective_warmup_steps / schedule.max_steps
    if progress < warmup:
        return schedule.warmup_start + (peak - schedule.warmup_start) * (progress / warmup) ** schedule.warmup_power
    if warmup >= 1.0:
        return peak
    left = 1.0 - (progress - warmup) / (1.0 - warmup)
    end = schedule.end * peak
    if schedule.kind == "cosine":
        return end + (peak - end) * (1.0 - math.cos(math.pi * left)) / 2
    if schedule.kind == "wsd":
        left = min(left * (1.0 - warmup) / schedule.decay, 1.0) if schedule.decay > 0 else float(left > 0)
    return end + (peak - end) * left
