"""Adam with decoupled weight decay, and which parameters it treats how."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tcnca.layers import ParamOptions
from tcnca.training.config import OptimizerConfig


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
    recipe = {"kernels": (config.kernel_lr_mult, config.kernel_wd_mult)}
    result = []
    for option, parameters in groups.items():
        lr_mult, wd_mult = recipe.get(option.group, (1.0, 1.0))
        decay = config.weight_decay * option.wd_mult * wd_mult
        group = {"name": option.group, "params": parameters, "weight_decay": decay}
        result.append({**group, "lr_mult": option.lr_mult * lr_mult})
    return result


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of a run; `set_rate` gives it its learning rate."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    groups = parameter_groups(model, config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=on_gpu)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of each group: `rate` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_mult"]
