"""Synchronized batch norm: two processes with half a batch each equal one process with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from tcnca import ClassifierHeadConfig, SequenceModel
from tcnca.layers import BatchNorm
from tcnca.ops import length_mask
from tests.comparison import assert_close
from tests.examples import VOCABULARY, small_config
from tests.models.gradients import assert_gradients_close

WIDTH, TIME, PROCESSES = 5, 6, 2
# Shares of different sizes, so that a mean of means would be wrong; one row has nothing real in it.
SHARES = (slice(0, 3), slice(3, 5))
LENGTHS = torch.tensor([6, 2, 4, 3, 0])


def _layer() -> nn.Module:
    torch.manual_seed(1)
    norm = BatchNorm(WIDTH, synchronized=True).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn_like(parameter))
    return norm


def _model() -> SequenceModel:
    torch.manual_seed(2)
    head = ClassifierHeadConfig(num_classes=3, pooling="none")
    return SequenceModel(small_config("tcnca-simple", norm="sync_batch", causal=False, head=head)).double().train()


def _values() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(LENGTHS), TIME, WIDTH, dtype=torch.float64, generator=generator) * 2 + 1
    tokens = torch.randint(VOCABULARY, (len(LENGTHS), TIME), generator=generator)
    return x, tokens, torch.randn(len(LENGTHS), TIME, 1, dtype=torch.float64, generator=generator)


def _train(share: slice) -> dict[str, dict[str, Tensor]]:
    """Outputs, gradients and statistics after a step on the rows of `share`."""
    x, tokens, weights = _values()
    x, tokens, weights, lengths = (part[share] for part in (x, tokens, weights, LENGTHS))
    weights = weights * length_mask(lengths, TIME).unsqueeze(-1)
    norm, model = _layer(), _model()
    x = x.clone().requires_grad_()
    outputs = {"norm": norm(x, lengths), "model": model(tokens, lengths=lengths).logits}
    for output in outputs.values():
        (output * weights).sum().backward()
    assert x.grad is not None
    modules: dict[str, nn.Module] = {"norm": norm, "model": model}
    return {
        "rows": {"gradient of x": x.grad, **{name: (y * (weights != 0)).detach() for name, y in outputs.items()}},
        "gradients": {
            f"{kind}.{name}": parameter.grad
            for kind, module in modules.items()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        },
        "statistics": {
            f"{kind}.{name}": buffer for kind, module in modules.items() for name, buffer in module.named_buffers()
        },
    }


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = (Path(folder) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=PROCESSES)
    torch.save(_train(SHARES[rank]), Path(folder) / f"{rank}.pt")
    # Who leaves first takes the connections along.
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_equal_one_with_the_joined_batch(tmp_path: Path) -> None:
    spawn(_process, (str(tmp_path),), nprocs=PROCESSES)
    shares: list[dict[str, Any]] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(PROCESSES)]
    joined = _train(slice(None))
    for name, expected in joined["rows"].items():
        assert_close(torch.cat([share["rows"][name] for share in shares]), expected, name)
    summed = {name: sum(share["gradients"][name] for share in shares) for name in joined["gradients"]}
    assert_gradients_close(summed, joined["gradients"])
    for name, expected in joined["statistics"].items():
        for rank, share in enumerate(shares):
            assert_close(share["statistics"][name].double(), expected.double(), f"{name} of process {rank}")


def test_without_a_process_group_it_is_plain_batch_norm() -> None:
    x = _values()[0]
    plain, synchronized = BatchNorm(WIDTH).double(), BatchNorm(WIDTH, synchronized=True).double()
    assert_close(synchronized(x, LENGTHS), plain(x, LENGTHS))
    assert_close(synchronized.running_var, plain.running_var, "running_var")
