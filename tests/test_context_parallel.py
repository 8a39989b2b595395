"""Context parallelism: several processes that hold parts of a sequence compute what one computes from the whole."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tcnca.layers import (
    AttentionConfig,
    CDILConfig,
    EMAConfig,
    LRUConfig,
    MixerConfig,
    S4DConfig,
    S5Config,
    SGConvConfig,
    TCNConfig,
)
from tcnca.models import (
    ClassifierHeadConfig,
    ModelConfig,
    ModelState,
    PairHeadConfig,
    RegressionHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
)
from tcnca.ops import ContextParallel, current_context
from tests.training.tiny import together

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
TIME = 24
"""Tokens of a row: 12 in each of two processes, 6 in each of four."""
LENGTHS = (17, 5, 24, 0)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and what describes its input."""

    config: ModelConfig
    state: bool = False
    lengths: bool = False
    mask: bool = False
    packed: bool = False


def attention(**changes: Any) -> AttentionConfig:
    return AttentionConfig(**{"d_key": 4, "d_value": 6, "chunk_size": 3, **changes})


def model(mixer: MixerConfig | None, attends: AttentionConfig | None = None, **changes: Any) -> ModelConfig:
    """Return a small language model, or a bidirectional model of real values."""
    fields: dict[str, Any] = {"d_model": 4, "d_ff": 6, "num_layers": 2, "mixer": mixer, "attention": attends}
    fields |= {"gated": False, "input": TokenInputConfig(vocab_size=9)}
    if not changes.get("causal", True):
        fields |= {"input": ValueInputConfig(features=2), "head": RegressionHeadConfig(outputs=3, pooling="none")}
    return ModelConfig(**(fields | changes))


# Halos of 14 tokens or more, longer than a part of 12 and than two parts of 6.
SIZES: dict[str, Any] = {"kernel_size": 3, "dilation_factor": 2, "depth": 3}
RESIDUAL: dict[str, Any] = {"block": "residual", "output": "none", "init": "decay", "norm": "weight"}
LINEAR = TCNConfig(**SIZES, convolutions=2, bias=True)
BATCH = TCNConfig(kernel_size=4, dilation_factor=2, depth=3, block="chain", norm="batch")
FAMILIES: dict[str, tuple[MixerConfig | None, AttentionConfig | None, dict[str, Any]]] = {
    "tcnca": (TCNConfig(**SIZES, **RESIDUAL), attention(), {"gated": True}),
    "tcnca-linear": (TCNConfig(**SIZES), attention(shift_keys=True), {"gated": True}),
    "tcnca-simple": (TCNConfig(**SIZES, **RESIDUAL, convolutions=2), attention(position="rotary"), {}),
    "tcn-mlp": (LINEAR, None, {}),
    "tcn-batch": (BATCH, None, {"norm": "batch"}),
    "mega": (EMAConfig(d_state=3), attention(activation="laplace", qk_norm=True), {"gated": True}),
    "ema-mlp": (EMAConfig(d_state=3, backend="fft"), None, {}),
    "ema-truncated": (EMAConfig(d_state=3, truncation=15), None, {}),
    "s4d": (S4DConfig(d_state=4), None, {"d_ff": 0}),
    "s5": (S5Config(d_state=4), None, {"d_ff": 0}),
    "lru": (LRUConfig(d_state=4), None, {"d_ff": 0}),
    "sgconv": (SGConvConfig(kernel_length=17, piece_size=4), None, {"d_ff": 0}),
    "transformer": (None, attention(chunk_size=None, num_heads=2, position="rope", d_key=8), {}),
    "transformer-bias": (None, attention(chunk_size=None, max_length=80), {}),
    "chunks over borders": (LINEAR, attention(chunk_size=7, shift_keys=True, position="rope"), {"gated": True}),
}
XL = model(None, attention(num_heads=2, memory=True, position="rope", chunk_size=5, d_key=8, d_value=8))
CDIL = model(CDILConfig(depth=3), causal=False, num_layers=1, d_ff=0, norm="none")


def pooled(pooling: Any, **changes: Any) -> ModelConfig:
    return model(LINEAR, head=ClassifierHeadConfig(pooling=pooling, num_classes=3), **changes)


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, (mixer, attends, more) in FAMILIES.items():
        causal, both = model(mixer, attends, **more), model(mixer, attends, causal=False, **more)
        cases[name] = Case(causal)
        cases[f"{name}, state"] = Case(causal, state=True)
        cases[f"{name}, lengths"] = Case(causal, lengths=True, state=True)
        cases[f"{name}, bidirectional"] = Case(both)
        cases[f"{name}, bidirectional, lengths"] = Case(both, lengths=True)
    for name, config in {"transformer-xl": XL, "mean": pooled("mean"), "first": pooled("first"), "last": pooled("last")}.items():
        cases[name] = Case(config)
        cases[f"{name}, state"] = Case(config, state=True)
        cases[f"{name}, lengths"] = Case(config, lengths=True, state=True)
    mega = model(EMAConfig(d_state=3), attention(), gated=True)
    pair = model(EMAConfig(d_state=3), attention(), gated=True, causal=False, input=TokenInputConfig(vocab_size=9), head=PairHeadConfig())
    cases |= {"cdil": Case(CDIL), "cdil, lengths": Case(CDIL, lengths=True)}
    cases |= {"pairs": Case(pair), "pairs, lengths": Case(pair, lengths=True)}
    cases |= {"mask": Case(mega, mask=True), "mask, cdil": Case(CDIL, mask=True), "mask, mean": Case(pooled("mean"), mask=True)}
    cases |= {"packed": Case(mega, packed=True), "packed, cdil": Case(CDIL, packed=True), "packed, last": Case(pooled("last"), packed=True)}
    return cases


CASES = _cases()


def run(net: SequenceModel, x: Tensor, arguments: dict[str, Any], state: ModelState | None, mine: slice, share: float) -> dict[str, Tensor]:
    """Return outputs and gradients of a loss of logits, and of those of five more tokens from the state.

    `mine` is the part of the time axis that the process has, `share` its share of losses that all processes have.
    """
    state = None if state is None else state.map(lambda part: part.clone().requires_grad_(part.is_floating_point()))
    x = x.clone().requires_grad_(x.is_floating_point())
    net.zero_grad()
    output = net(x, **arguments, state=state)
    draw = torch.Generator().manual_seed(1)
    every = output.logits.dim() == 3

    def loss(logits: Tensor, time: int) -> Tensor:
        weights = torch.randn(logits.shape[0], time, logits.shape[-1], generator=draw, dtype=torch.float64).to(logits)
        return (logits * (weights[:, mine if time == TIME else slice(None)] if logits.dim() == 3 else weights[:, 0])).sum()

    total = loss(output.logits, TIME) * (1.0 if every else share)
    found = {"logits": output.logits}
    if output.state is not None:
        found["position"] = next(part for name, part in output.state.tensors().items() if name.endswith("position"))
        context = current_context()
        with context.suspended() if context is not None else contextlib.nullcontext():
            more = torch.randint(0, 9, (len(found["position"]), 5), generator=draw)
            found["next"] = net(more, state=output.state).logits
        total = total + share * loss(found["next"], 5)
    total.backward()
    leaves: dict[str, Tensor] = {**dict(net.named_parameters()), "x": x}
    leaves |= {} if state is None else {f"state.{name}": part for name, part in state.tensors().items()}
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            found[f"gradient of {name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
    return {name: tensor.detach() for name, tensor in found.items()}


def arguments(case: Case, net: SequenceModel, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any], ModelState | None]:
    """Return the whole input of a case."""
    rows = len(LENGTHS) if case.lengths else 1 if case.packed else 2
    tokens = isinstance(case.config.input, TokenInputConfig)

    def draw(time: int) -> Tensor:
        return torch.randint(0, 9, (rows, time)) if tokens else torch.randn(rows, time, 2, dtype=dtype)

    x, given, state = draw(TIME), {}, None
    if case.state:
        state = net(draw(5), lengths=[5, 3, 4, 1][:rows]).state.detach()
    if case.config.head.documents == 2:
        given["second"] = draw(TIME)
    if case.lengths:
        given["lengths"] = torch.tensor(LENGTHS)
        if "second" in given:
            given["lengths2"] = torch.tensor(LENGTHS).flip(0)
    if case.mask:
        given["attention_mask"] = torch.rand(rows, TIME) < 0.6
    if case.packed:
        given["cu_seqlens"] = torch.tensor([0, 7, 8, 8, 21, TIME])
    return x, given, state


def differences(case: Case, context: ContextParallel, dtype: torch.dtype) -> list[str]:
    """Return what one process and several compute differently."""
    torch.manual_seed(0)
    net = SequenceModel(case.config).to(dtype)
    x, given, state = arguments(case, net, dtype)
    expected = run(net, x, given, state, slice(None), 1.0)
    parts = {name: context.shard(value) if name in ("second", "attention_mask") else value for name, value in given.items()}
    width = TIME // context.size
    mine = slice(context.rank * width, (context.rank + 1) * width)
    with context:
        found = run(net, context.shard(x), parts, state, mine, 1.0 / context.size)
    greatest = max(float(tensor.abs().max()) for name, tensor in expected.items() if name.startswith("gradient of "))
    wrong = []
    for name, tensor in expected.items():
        other = found[name]
        if name == "gradient of x" or (name == "logits" and tensor.dim() == 3):
            tensor = tensor[:, mine]
        elif name.startswith("gradient of "):
            dist.all_reduce(other)
        # A gradient that is zero but for rounding, of a bias before a norm, is compared with the others.
        floor = 1e-2 * greatest if name.startswith("gradient of ") else 1e-3
        scale = max(float(tensor.abs().max()), floor) if tensor.numel() else 1.0
        error = float((other - tensor).abs().max()) / scale if other.shape == tensor.shape and tensor.numel() else 0.0
        if other.shape != tensor.shape or not error <= TOLERANCE[dtype]:
            wrong.append(f"{name}: error {error:.1e}, shapes {list(other.shape)} and {list(tensor.shape)}")
    return wrong


def _compare(folder: Path, names: list[str]) -> None:
    """Run cases, and write what is wrong with each."""
    dist.init_process_group("gloo")
    context = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)))
    found: dict[str, list[str]] = {}
    import time
    for name in names:
        print(name, time.time(), time.process_time(), flush=True)
        for dtype in TOLERANCE:
            try:
                found.setdefault(name, []).extend(f"{dtype}, {text}" for text in differences(CASES[name], context, dtype))
            except Exception:
                # The other processes may wait for this one: do not go on.
                found[name] = [traceback.format_exc()]
                break
        (folder / f"{context.rank}.json").write_text(json.dumps(found))
        if "Traceback" in str(found[name]):
            return
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_equal_the_whole(tmp_path: Path, count: int) -> None:
    """Outputs, states and gradients of all parameters, inputs and initial states."""
    codes = together(_compare, tmp_path, list(CASES), count=count)
    wrong = {}
    for rank in range(count):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        wrong |= {f"{name}, rank {rank}": texts for name, texts in found.items() if texts}
        assert wrong or found.keys() == CASES.keys()
    assert not wrong, "\n".join(f"{name}: {'; '.join(texts)}" for name, texts in wrong.items())
    assert codes == [0] * count
