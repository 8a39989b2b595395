"""Optimizers, their parameter groups, and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tcnca.layers import Linear, ParamOptions
from tcnca.models import SequenceModel
from tcnca.training.config import OptimizerConfig, ScheduleConfig
from tcnca.training.muon import Muon


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Split the parameters into groups, each with its `name`, `weight_decay` and learning-rate factor `lr_mult`.

    Matrices called `weight` are decayed (`matrices`), everything else is not (`rest`), except where a module's
    `param_options` says otherwise: for example, the kernels of a TCN are a group with its own factors.
    """
    options: dict[str, ParamOptions] = {}
    for prefix, module in model.named_modules():
        if hasattr(module, "param_options"):
            options |= {f"{prefix}.{name}".lstrip("."): value for name, value in module.param_options().items()}
    groups: dict[ParamOptions, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decayed = name.endswith("weight") and parameter.ndim > 1
        default = ParamOptions("matrices") if decayed else ParamOptions("rest", wd_mult=0.0)
        groups.setdefault(options.get(name, default), []).append(parameter)
    recipe = {
        "kernels": (config.kernel_lr_mult, config.kernel_wd_mult),
        "ssm": (config.ssm_lr_mult, 1.0),
        "ngrams": (config.ngram_lr_mult, 1.0),
    }
    result = []
    for option, parameters in groups.items():
        lr_mult, wd_mult = recipe.get(option.group, (1.0, 1.0))
        decay = config.weight_decay * option.wd_mult * wd_mult
        group = {"name": option.group, "params": parameters, "weight_decay": decay}
        result.append({**group, "lr_mult": option.lr_mult * lr_mult})
    return result


def build_optimizers(model: SequenceModel, config: OptimizerConfig) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a run, which together train every parameter once."""
    # Several times as fast for large tables of embeddings.
    fused = all(parameter.device.type in ("cuda", "cpu") for parameter in model.parameters())
    groups, optimizers = parameter_groups(model, config), list[torch.optim.Optimizer]()
    if config.name == "muon":
        linears = [module for module in model.layers.modules() if isinstance(module, Linear)]
        hidden = {linear.weight: linear.parts for linear in linears}
        group: dict[str, Any] = {"name": "hidden", "params": list(hidden), "parts": list(hidden.values())}
        group |= {"weight_decay": config.muon_weight_decay, "lr_mult": config.muon_lr / config.lr}
        optimizers.append(Muon([group], config.muon_lr, momentum=config.muon_momentum, beta2=config.muon_beta2))
        for each in groups:
            each["params"] = [parameter for parameter in each["params"] if parameter not in hidden]
    groups = [group for group in groups if group["params"]]
    optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused))
    return optimizers


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
