"""Adam with decoupled weight decay, and which parameters it treats how."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tcnca.layers import EMA, TCN
from tcnca.training.config import OptimizerConfig


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The model's parameters in three groups, each with its `name`, `weight_decay` and factor `rate`.

    `matrices` are decayed; `kernels`, those of the TCN, have factors of their own; `rest`, that is norms, biases, EMA,
    position biases and the scales of queries and keys, is not decayed.
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
    decay = {"matrices": 1.0, "kernels": config.kernel_wd_mult, "rest": 0.0}
    rate = {"matrices": 1.0, "kernels": config.kernel_lr_mult, "rest": 1.0}
    return [
        {"name": name, "params": group, "weight_decay": decay[name] * config.weight_decay, "rate": rate[name]}
        for name, group in groups.items()
        if group
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of a run; `set_rate` gives it its learning rate."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    groups = parameter_groups(model, config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=on_gpu)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of each group: `rate` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["rate"]
