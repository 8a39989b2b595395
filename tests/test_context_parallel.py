"""Context parallelism: several processes that hold parts of a sequence compute what one computes from the whole."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import io
import itertools
import json
import os
import re
import resource
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import tcnca
from tcnca.errors import ConfigError, InputError
from tcnca.layers import (
    EMA,
    AttentionConfig,
    CDILConfig,
    EMAConfig,
    LRUConfig,
    Mixer,
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
from tcnca.ops import ContextParallel, State, current_context, ema
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
NGRAMS = TokenInputConfig(vocab_size=9, ngram_sizes=(2, 9), ngram_buckets=20, ngram_dropout=0.0)
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
    for name, config in {
        "transformer-xl": XL,
        "mean": pooled("mean"),
        "first": pooled("first"),
        "last": pooled("last"),
        # N-grams that reach over two parts.
        "ngrams": model(LINEAR, input=NGRAMS),
    }.items():
        cases[name] = Case(config)
        cases[f"{name}, state"] = Case(config, state=True)
        cases[f"{name}, lengths"] = Case(config, lengths=True, state=True)
    mega = model(EMAConfig(d_state=3), attention(), gated=True)
    pair = model(
        EMAConfig(d_state=3),
        attention(),
        gated=True,
        causal=False,
        input=TokenInputConfig(vocab_size=9),
        head=PairHeadConfig(),
    )
    cases |= {"cdil": Case(CDIL), "cdil, lengths": Case(CDIL, lengths=True)}
    cases |= {"pairs": Case(pair), "pairs, lengths": Case(pair, lengths=True)}
    cases |= {
        "mask": Case(mega, mask=True),
        "mask, cdil": Case(CDIL, mask=True),
        "mask, mean": Case(pooled("mean"), mask=True),
    }
    cases |= {
        "packed": Case(mega, packed=True),
        "packed, cdil": Case(CDIL, packed=True),
        "packed, last": Case(pooled("last"), packed=True),
    }
    return cases


CASES = _cases()


def run(
    net: SequenceModel, x: Tensor, arguments: dict[str, Any], state: ModelState | None, mine: slice, share: float
) -> dict[str, Tensor]:
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
        return (
            logits * (weights[:, mine if time == TIME else slice(None)] if logits.dim() == 3 else weights[:, 0])
        ).sum()

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
    for parameter in net.parameters():
        if not parameter.any():  # what starts as zero, such as the embeddings of n-grams
            torch.nn.init.normal_(parameter, std=0.1)
    x, given, state = arguments(case, net, dtype)
    expected = run(net, x, given, state, slice(None), 1.0)
    parts = {
        name: context.shard(value) if name in ("second", "attention_mask") else value for name, value in given.items()
    }
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
        # A gradient that is zero but for rounding, of a bias before a norm over the batch, is compared with the others.
        floor = 1e-2 * greatest if case.config.norm == "batch" else 1e-3
        scale = max(float(tensor.abs().max()), floor) if tensor.numel() else 1.0
        error = float((other - tensor).abs().max()) / scale if other.shape == tensor.shape and tensor.numel() else 0.0
        if other.shape != tensor.shape or not error <= TOLERANCE[dtype]:
            wrong.append(f"{name}: error {error:.1e}, shapes {list(other.shape)} and {list(tensor.shape)}")
    return wrong


def _compare(folder: Path, names: list[str], dtypes: list[torch.dtype]) -> None:
    """Run cases, and write what is wrong with each."""
    dist.init_process_group("gloo")
    context = ContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)))
    found: dict[str, str] = {}
    for name, dtype in itertools.product(names, dtypes):
        try:
            found[f"{name}, {dtype}"] = "; ".join(differences(CASES[name], context, dtype))
        except Exception:
            # The other processes may wait for this one: do not go on.
            found[f"{name}, {dtype}"] = traceback.format_exc()
            break
    (folder / f"{context.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def compare(folder: Path, names: list[str], dtypes: list[torch.dtype], count: int) -> None:
    codes = together(_compare, folder, names, dtypes, count=count)
    results = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    wrong = {f"{name} on {rank}": text for rank, each in enumerate(results) for name, text in each.items() if text}
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())
    assert codes == [0] * count
    assert [len(each) for each in results] == [len(names) * len(dtypes)] * count


QUICK = [name for name, case in CASES.items() if case.lengths or case.mask or case.packed]


def test_parts_equal_the_whole(tmp_path: Path) -> None:
    """Outputs, states and gradients of all parameters, inputs and initial states."""
    compare(tmp_path, QUICK, [torch.float64], 2)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(8))
@pytest.mark.parametrize("count", [2, 4])
def test_all_parts_equal_the_whole(tmp_path: Path, count: int, share: int) -> None:
    compare(tmp_path, list(CASES)[share::8], list(TOLERANCE), count)


class Unprepared(EMA):
    """A mixer without a limit of what it sees, and without exchanges."""

    halo = Mixer.halo


@dataclasses.dataclass(frozen=True)
class LastState(State):
    last: Tensor


class LastConfig(MixerConfig, kind="token-before"):
    """Add the token before, with a state that has no position."""

    def build(self, d_model: int, causal: bool = True) -> Last:
        return Last(d_model, self, causal)


class Last(Mixer):
    state_class = LastState
    receptive_field = 2
    signature = "Last"

    def mix(self, x: Tensor, lengths: Any, state: Any, return_state: bool, inplace: bool) -> tuple[Tensor, Any]:
        assert lengths is None
        last = x.new_zeros(x.shape[0], self.d_model) if state is None else state.last
        return x + torch.cat([last.unsqueeze(1), x[:, :-1]], 1), LastState(x[:, -1]) if return_state else None

    def initial_state(self, batch: int) -> LastState:
        return LastState(torch.zeros(batch, self.d_model))

    def macs(self, length: int) -> int:
        return 0


def _misuse() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    context, net = ContextParallel(mesh), SequenceModel(CASES["ema-truncated"].config)
    assert (context.rank, context.size) == (dist.get_rank(), 2)
    with pytest.raises(InputError, match="expected a multiple of 2 tokens"):
        context.shard(torch.zeros(1, 5))
    torch.testing.assert_close(context.unshard(context.shard(torch.arange(6)[None])), torch.arange(6)[None])
    with context:
        assert current_context() is context
        with pytest.raises(InputError, match="expected as many tokens in all processes"):
            net(torch.zeros(1, 5 + context.rank, dtype=torch.long))
        with pytest.raises(InputError, match="truncation: expected None in a context"):
            ema(torch.zeros(1, 4, 3), *torch.zeros(4, 1, 3, 2), truncation=2)
        with pytest.raises(InputError, match="lengths: expected values from 0 to 8"):
            net(torch.zeros(1, 4, dtype=torch.long), lengths=[9])
        with pytest.raises(ConfigError, match="mixer: expected one with a limited receptive field"):
            Unprepared(4)(torch.zeros(1, 4, 4))
        with pytest.raises(InputError, match="expected a call outside of ContextParallel"):
            tcnca.generate(net, torch.zeros(1, 4, dtype=torch.long), 2)
    assert current_context() is None
    x, plain = torch.randn(1, 8, 4), LastConfig().build(4)
    y, state = plain(x, return_state=True)
    with context:
        part, new = plain(context.shard(x), return_state=True)
    torch.testing.assert_close((part, new.last), (context.shard(y), state.last))
    # Lower precision, and layers that are computed again in the backward pass.
    x = torch.randint(0, 9, (2, TIME))
    for mixer, attends, changes in FAMILIES.values():
        net = SequenceModel(model(mixer, attends, **changes)).eval()
        with torch.autocast("cpu", torch.bfloat16):
            expected = context.shard(net(x).logits)
            with context:
                logits = net(context.shard(x)).logits
        torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.05)
    net = SequenceModel(CASES["chunks over borders"].config)
    gradients = []
    for recomputed in (False, True):
        net.zero_grad()
        for layer in net.layers if recomputed else ():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        with context:
            net(context.shard(x), return_state=False).logits.square().sum().backward()
        gradients.append([torch.as_tensor(parameter.grad).clone() for parameter in net.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    dist.barrier()
    dist.destroy_process_group()


def test_misuse_is_answered_and_precision_and_checkpointing_work() -> None:
    with pytest.raises(ConfigError, match="mesh: expected a DeviceMesh or a ProcessGroup, got a str"):
        ContextParallel("cuda")  # type: ignore[arg-type]
    assert together(_misuse) == [0, 0]


def _documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text(encoding="utf-8")
    blocks = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    gradients = [torch.as_tensor(parameter.grad).clone() for parameter in names["model"].parameters()]
    names["model"].zero_grad()
    tokens = names["tokens"]
    logits, _ = names["model"](tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for parameter, gradient in zip(names["model"].parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).abs().max() <= 1e-5 * gradient.abs().max(), parameter.shape
    dist.barrier()
    dist.destroy_process_group()
    # The table has the numbers that the code prints.
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(blocks[1], {})
    rows = [row.strip("| ").split(" | ") for row in text.splitlines() if re.match(r"\| \d+ \| [\d,]+ \| \d+ ms", row)]
    for row, line in zip(rows, output.getvalue().splitlines(), strict=True):
        gpus, each, compute, exchange, share, reduction, twice = map(float, line.split())
        assert row == [
            *(f"{gpus:.0f}", f"{each:,.0f}", f"{1e3 * compute:.0f} ms", f"{1e3 * exchange:.1f} ms"),
            *(f"{100 * share:.1f} %", f"{1e3 * reduction:.1f} ms", f"{100 * twice:.0f} %"),
        ]


def test_the_documentation_is_right() -> None:
    assert together(_documented) == [0, 0]


def _compiled() -> None:
    """Run compiled layers, which are compiled once."""
    dist.init_process_group("gloo")
    context = ContextParallel(init_device_mesh("cpu", (2,)))
    for name in ("tcnca", "tcnca-linear", "mega", "s5", "tcn-batch"):
        net, x = SequenceModel(CASES[name].config), torch.randint(0, 9, (2, TIME))
        with context:
            expected = net(context.shard(x), return_state=False).logits
        for layer in net.layers:
            layer.compile(dynamic=False, backend="aot_eager")
        for step in range(3):
            with context, torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                logits = net(context.shard(x), return_state=False).logits
                logits.sum().backward()
            torch.testing.assert_close(logits, expected)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_compiled_layers_exchange_too() -> None:
    assert together(_compiled) == [0, 0]


LONG = 2**20
"""Tokens of one row."""


def _long_step(folder: Path) -> None:
    """Run a forward and backward pass over a long row, and write the peak of memory, in bytes."""
    torch.manual_seed(0)
    # Give all memory that is freed back to the system at once, also that of parts: M_MMAP_THRESHOLD is -3.
    ctypes.CDLL(None).mallopt(-3, 2**16)
    # Halos of 2,728 tokens.
    mixer, attends = TCNConfig(kernel_size=9, dilation_factor=4, depth=5), attention(d_value=16, chunk_size=64)
    fields: dict[str, Any] = {"d_model": 16, "d_ff": 32, "mixer": mixer, "attention": attends, "num_layers": 2}
    net = SequenceModel(ModelConfig(**fields, input=TokenInputConfig(vocab_size=16)))
    x, count = torch.randint(0, 16, (1, LONG)), int(os.environ.get("WORLD_SIZE", "1"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    context = None
    if count > 1:
        dist.init_process_group("gloo")
        context = ContextParallel(init_device_mesh("cpu", (count,)))
        x = context.shard(x)
    with context or contextlib.nullcontext():
        logits = net(x, return_state=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())
        loss.backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    loss = loss.detach()
    if context is not None:
        dist.all_reduce(loss)
    found = {"peak": peak, "before": before, "loss": float(loss) / count}
    (folder / f"{count}-{0 if context is None else context.rank}.json").write_text(json.dumps(found))
    if context is not None:
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_million_tokens_take_a_third_of_the_memory_on_four_processes(tmp_path: Path) -> None:
    for count in (1, 4):
        assert together(_long_step, tmp_path, count=count) == [0] * count
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    one = found.pop("1-0")
    parts = list(found.values())
    assert len(parts) == 4
    print({"one process": one, "four processes": parts})
    assert max(part["peak"] for part in parts) <= 0.35 * one["peak"]
    assert parts[0]["loss"] == pytest.approx(one["loss"], rel=1e-5)
