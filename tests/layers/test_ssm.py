"""S4D, S5 and the LRU: their definitions written out, their initialization, and models with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tcnca
from tcnca import LRU, S4D, S5, ConfigError, LRUConfig, S4DConfig, S5Config, SequenceModel, StateError
from tcnca.layers import GLUOutput, Linear, Mixer, MixerConfig
from tcnca.layers.s5 import hippo_eigenvectors
from tcnca.models import summarize
from tcnca.training import OptimizerConfig, build_optimizers, parameter_groups
from tests.comparison import assert_close
from tests.examples import ATTENTION, VOCABULARY, small_config, small_model
from tests.layers import formulas
from tests.layers.checks import assert_compiles, assert_gradients
from tests.models.gradients import assert_gradients_close, gradients

KINDS: dict[str, MixerConfig] = {
    "s4d": S4DConfig(d_state=6),
    "s5": S5Config(d_state=8, blocks=2),
    "lru": LRUConfig(d_state=3),
}
MIXERS = pytest.mark.parametrize("kind", KINDS)
DIRECTIONS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
OUTPUTS = pytest.mark.parametrize("output", ["none", "activation", "glu", "gate"])
TIME = 40


def build(kind: str, causal: bool = True, **changes: Any) -> Mixer:
    """Return a mixer of five channels in float64, far from its initial values."""
    mixer = KINDS[kind].override(changes).build(5, causal).double()
    formulas.scramble(mixer)
    return mixer


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def finished(module: Any, y: Tensor) -> Tensor:
    """The output of a mixer, from the `y` of the state-space model."""
    kind = module.config.output
    if kind == "none":
        return y
    bent = F.gelu(y)
    if kind == "activation":
        return bent
    weight, bias = module.output.linear.weight, module.output.linear.bias
    if kind == "gate":
        return y / (1 + torch.exp(-(bent @ weight.T + bias)))
    a, b = (bent @ weight.T + bias).chunk(2, -1)
    return a / (1 + torch.exp(-b))


def convolved(x: Tensor, kernels: list[Tensor]) -> Tensor:
    """The first kernel (`[channels, lags]`) over the past, the second over the future; both see the present."""
    y, time = torch.zeros_like(x), x.shape[1]
    for lag in range(time):
        y[:, lag:] += kernels[0][:, lag] * x[:, : time - lag]
        if len(kernels) == 2:
            y[:, : time - lag] += kernels[1][:, lag] * x[:, lag:]
    return y


def s4d_kernel(module: S4D, direction: int, length: int) -> Tensor:
    """`k_l = 2 Re Σ_n C_n (exp(Δ A_n) - 1) / A_n · exp(l Δ A_n)`."""
    a = -module.log_damping.exp() + 1j * module.frequency
    dt, c = module.log_dt.exp().unsqueeze(-1), module.c[direction, ..., 0] + 1j * module.c[direction, ..., 1]
    taps = [2 * (c * ((dt * a).exp() - 1) / a * (lag * dt * a).exp()).sum(-1).real for lag in range(length)]
    return torch.stack(taps, -1)


@OUTPUTS
@DIRECTIONS
@torch.no_grad()
def test_s4d_equals_its_formula(causal: bool, output: str) -> None:
    module, x = build("s4d", causal, output=output), draw(2, TIME, 5)
    assert isinstance(module, S4D)
    kernels = [s4d_kernel(module, direction, TIME) for direction in range(1 if causal else 2)]
    assert_close(module(x), finished(module, convolved(x, kernels) + module.d * x))


def recurrent(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`h[t] = A h[t - 1] + B x[t]`, `y = C h` with dense matrices."""
    h, outputs = torch.zeros(len(x), len(a), dtype=a.dtype), []
    for now in x.unbind(1):
        h = h @ a.T + now.to(a.dtype) @ b.T
        outputs.append(h @ c.T)
    return torch.stack(outputs, 1)


def both_ways(module: Any, x: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The recurrence with each C, the second from the end, and what follows."""
    c = torch.complex(module.c[..., 0], module.c[..., 1])
    y = run(x, c[0])
    if len(c) == 2:
        y = y + run(x.flip(1), c[1]).flip(1)
    return finished(module, y + module.d * x)


@OUTPUTS
@DIRECTIONS
@torch.no_grad()
def test_s5_equals_its_definition(causal: bool, output: str) -> None:
    module, x = build("s5", causal, output=output), draw(2, TIME, 5)
    assert isinstance(module, S5)
    eigenvalues, dt = torch.complex(module.real, module.imag), module.log_dt.exp()
    a = torch.diag((eigenvalues * dt).exp())
    b = (
        torch.linalg.inv(torch.diag(eigenvalues))
        @ (a - torch.eye(4))
        @ torch.complex(module.b[..., 0], module.b[..., 1])
    )
    assert_close(module(x), both_ways(module, x, lambda u, c: 2 * recurrent(u, a, b, c).real))


@OUTPUTS
@DIRECTIONS
@torch.no_grad()
def test_lru_equals_its_definition(causal: bool, output: str) -> None:
    module, x = build("lru", causal, output=output), draw(2, TIME, 5)
    assert isinstance(module, LRU)
    a = torch.diag((-module.nu.exp() + 1j * module.theta.exp()).exp())
    b = module.gamma.exp().unsqueeze(-1) * torch.complex(module.b[..., 0], module.b[..., 1])
    assert_close(module(x), both_ways(module, x, lambda u, c: recurrent(u, a, b, c).real))


def hippo(size: int) -> Tensor:
    """HiPPO-LegS and its normal part, `A + p pᵀ`, number by number."""
    normal = torch.zeros(size, size, dtype=torch.float64)
    for n in range(size):
        for k in range(size):
            a = -math.sqrt((2 * n + 1) * (2 * k + 1)) if n > k else -(n + 1) if n == k else 0
            normal[n, k] = a + math.sqrt((n + 0.5) * (k + 0.5))
    return normal


@pytest.mark.parametrize("size", [2, 8, 64])
def test_hippo_eigenvalues(size: int) -> None:
    eigenvalues, vectors = hippo_eigenvectors(size)
    assert eigenvalues.shape == (size // 2,)
    assert bool((eigenvalues.imag > 0).all())
    normal = hippo(size).to(torch.complex128)
    torch.testing.assert_close(normal @ vectors, vectors * eigenvalues)
    torch.testing.assert_close(vectors.mH @ vectors, torch.eye(size // 2, dtype=torch.complex128))
    # Of all eigenvalues, these are one of each conjugate pair, and their real part is -1/2.
    found = torch.cat([eigenvalues, eigenvalues.conj()])
    expected = torch.linalg.eigvals(normal)
    torch.testing.assert_close(found[found.imag.argsort()], expected[expected.imag.argsort()], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(eigenvalues.real, torch.full_like(eigenvalues.real, -0.5))


@torch.no_grad()
def test_s5_starts_as_the_real_system_of_hippo_blocks() -> None:
    """In the basis of its eigenvectors, the module computes what dense, real matrices compute."""
    size, width, dt = 6, 3, 0.07
    module = S5(width, d_state=2 * size, blocks=2, output="none").double()
    module.log_dt.fill_(math.log(dt))
    b, c = draw(2 * size, width), draw(width, 2 * size)
    _, vectors = hippo_eigenvectors(size)
    basis = torch.block_diag(vectors, vectors)
    module.b.copy_(torch.view_as_real(basis.mH @ b.to(basis.dtype)))
    module.c.copy_(torch.view_as_real(c.to(basis.dtype) @ basis).unsqueeze(0))
    a = torch.block_diag(hippo(size), hippo(size))
    step = torch.linalg.matrix_exp(a * dt)
    x = draw(2, TIME, width)
    expected = recurrent(x, step, torch.linalg.solve(a, (step - torch.eye(2 * size)) @ b), c) + module.d * x
    # The eigenvalues are parameters in float32 at first.
    assert_close(module(x), expected, dtype=torch.float32)


def test_initialization_of_s4d() -> None:
    module = S4D(200, d_state=8, dt_min=0.01, dt_max=0.5)
    torch.testing.assert_close(-module.log_damping.exp(), torch.full((200, 4), -0.5))
    torch.testing.assert_close(module.frequency[3].detach(), math.pi * torch.arange(4.0))
    dt = module.log_dt.detach().exp()
    assert 0.01 <= float(dt.min()) < 0.012
    assert 0.4 < float(dt.max()) <= 0.5
    # Uniform in the logarithm.
    assert float(module.log_dt.detach().mean()) == pytest.approx(math.log(0.01 * 0.5) / 2, abs=0.4)
    assert float(module.c.detach().square().sum(-1).mean()) == pytest.approx(1.0, rel=0.2)
    assert float(module.d.detach().std()) == pytest.approx(1.0, rel=0.2)


def test_initialization_of_s5() -> None:
    module, one = S5(100, d_state=64, blocks=4), hippo_eigenvectors(16)[0]
    torch.testing.assert_close(torch.complex(module.real, module.imag), one.repeat(4).to(torch.complex64))
    # A unitary basis keeps the sizes: real B and complex C are of variance 1/64 before it.
    assert float(module.b.detach().square().sum(-1).mean()) == pytest.approx(1 / 64, rel=0.1)
    assert float(module.c.detach().square().sum(-1).mean()) == pytest.approx(2 / 64, rel=0.1)


def test_initialization_of_the_lru() -> None:
    module = LRU(64, d_state=1000, r_min=0.8, r_max=0.95, max_phase=0.3)
    size = torch.exp(-module.nu.detach().exp())
    assert 0.8 <= float(size.min()) < 0.81
    assert 0.94 < float(size.max()) < 0.951
    # Uniform in the ring: half of the area is outside the root mean square of both radii.
    assert float((size.square() < (0.8**2 + 0.95**2) / 2).float().mean()) == pytest.approx(0.5, abs=0.08)
    assert 0.29 < float(module.theta.detach().exp().max()) <= 0.3001
    torch.testing.assert_close(module.gamma.detach().exp(), (1 - size.square()).sqrt(), rtol=1e-4, atol=1e-4)
    assert float(module.b.detach().std()) == pytest.approx(128**-0.5, rel=0.05)
    assert float(module.c.detach().std()) == pytest.approx(1000**-0.5, rel=0.05)
    assert bool(torch.isfinite(LRU(4, d_state=1000).nu).all()), "a ring that is the whole disk"


@MIXERS
@torch.no_grad()
def test_any_pieces_equal_one_call(kind: str) -> None:
    module, x = build(kind), draw(2, TIME, 5)
    expected = module(x)
    for _ in range(5):
        cuts = sorted({0, TIME, *torch.randint(1, TIME, (4,)).tolist()})
        state, pieces = None, []
        for start, end in itertools.pairwise(cuts):
            y, state = module(x[:, start:end], state=state, return_state=True)
            pieces.append(y)
        assert_close(torch.cat(pieces, 1), expected, f"cut at {cuts}")


@MIXERS
@DIRECTIONS
def test_padding_does_not_matter(kind: str, causal: bool) -> None:
    module, x, lengths = build(kind, causal), draw(3, 20, 5), [20, 0, 7]
    padded = x.clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = torch.nan
    y = module(padded, lengths=torch.tensor(lengths))
    together = torch.cat([y[row, :length] for row, length in enumerate(lengths)])
    alone = torch.cat([module(x[row : row + 1, :length])[0] for row, length in enumerate(lengths) if length])
    assert_close(together, alone)
    found, expected = (gradients(part.square().sum(), module) for part in (together, alone))
    assert_gradients_close(found, expected)


@MIXERS
def test_a_causal_mixer_does_not_see_the_future(kind: str) -> None:
    module, x = build(kind), draw(1, TIME, 5).requires_grad_()
    (gradient,) = torch.autograd.grad(module(x)[:, 20].sum(), x)
    assert bool(gradient[:, :21].any(-1).all())
    assert not gradient[:, 21:].any()
    other = build(kind, causal=False)
    (gradient,) = torch.autograd.grad(other(x)[:, 20].sum(), x)
    assert bool(gradient.any(-1).all())


@MIXERS
@DIRECTIONS
def test_gradcheck(kind: str, causal: bool) -> None:
    module = KINDS[kind].override(d_state=4 if kind == "s5" else 2).build(2, causal).double()
    formulas.scramble(module)
    assert_gradients(module)


@MIXERS
@torch.no_grad()
def test_half_precision_only_rounds_inputs_and_outputs(kind: str) -> None:
    """Decays of 0.999 and a thousand tokens would be lost in half precision."""
    module = KINDS[kind].build(8)
    x = torch.randn(2, 1000, 8).bfloat16()
    expected = module(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(module(x), expected, dtype=torch.bfloat16)
        y, state = module(x[:, :600], return_state=True)
        rest, _ = module(x[:, 600:], state=state)
    assert state.hidden.dtype == torch.float32
    assert_close(torch.cat([y, rest], 1), expected, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "causal"),
    [
        ("s4d", True),
        # S5 and the LRU share their code, and each graph takes seconds.
        ("s5", False),
        pytest.param("s4d", False, marks=pytest.mark.slow),
        pytest.param("lru", True, marks=pytest.mark.slow),
    ],
)
def test_compiles_without_graph_breaks(kind: str, causal: bool) -> None:
    module = build(kind, causal)
    assert_compiles(module)
    if causal:
        assert_compiles(module, state=module.initial_state(2))


@pytest.mark.parametrize("kind", ["s4d", pytest.param("lru", marks=pytest.mark.slow)])
@torch.no_grad()
def test_one_graph_for_all_lengths(kind: str) -> None:
    torch.compiler.reset()
    module, graphs = build(kind), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)
    for time in (9, 10, 64, 65, 200):
        x = draw(2, time, 5)
        assert_close(compiled(x), module(x), f"{time} tokens")
    assert len(graphs) == 1
    torch.compiler.reset()


@MIXERS
def test_states_of_other_sizes_are_named(kind: str) -> None:
    other = KINDS[kind].override(d_state=16).build(5)
    with pytest.raises(StateError, match=r"^state\.hidden: expected shape \[2, .*, 2\], got \[2, "):
        KINDS[kind].build(5)(torch.randn(2, 3, 5), state=other.initial_state(2))


@MIXERS
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "residual"])
def test_models_train_stream_generate_and_are_saved(kind: str, gated: bool, tmp_path: Path) -> None:
    attention = ATTENTION if gated else None
    config = small_config(mixer=KINDS[kind], attention=attention, gated=gated, d_ff=0)
    assert tcnca.ModelConfig.from_dict(config.to_dict()) == config
    model, x = small_model(config, torch.float32), torch.randint(VOCABULARY, (2, 15))
    loss = F.cross_entropy(model(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    assert all(bool(gradient.any()) for gradient in gradients(loss, model).values())
    with torch.no_grad():
        expected = model(x).logits
        loaded = tcnca.load(tcnca.save(model, tmp_path / "model"))
        assert torch.equal(loaded(x).logits, expected)
        state = model(x[:, :6]).state
        assert state is not None
        state.save(tmp_path / "state.safetensors")
        state = tcnca.ModelState.load(tmp_path / "state.safetensors")
        both = tcnca.ModelState.cat([state, state.reorder([1, 0])])
        assert_close(model(x[:, 6:].repeat(2, 1), state=both).logits[:2], expected[:, 6:])
        tokens = tcnca.generate(loaded, x, 5, temperature=0.0)
        everything = torch.cat([x, tokens], 1)
        assert torch.equal(model(everything).logits[:, 14:-1].argmax(-1), tokens)
    summary = summarize(config, 15)
    assert summary.receptive_field is None
    assert summary.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert summary.state_bytes == model.initial_state(1).nbytes


@MIXERS
def test_dropout_acts_in_training_only(kind: str) -> None:
    module, x = KINDS[kind].override(dropout=0.5).build(5), torch.randn(2, TIME, 5)
    assert not torch.equal(module(x), module(x))
    assert torch.equal(module.eval()(x), module(x))
    with pytest.raises(ConfigError, match=r"^dropout: expected 0 with output 'none'"):
        KINDS[kind].override(dropout=0.5, output="none")


@pytest.mark.parametrize(("kind", "factor"), [("s4d", 0.1), ("s5", 0.25), ("lru", 0.5)])
def test_state_space_parameters_are_a_group(kind: str, factor: float) -> None:
    model = SequenceModel(small_config("ema-mlp", mixer=KINDS[kind]))
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, ssm_lr_mult=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group["name"]: group for group in parameter_groups(model, config)}
    assert (groups["ssm"]["lr_mult"], groups["ssm"]["weight_decay"]) == (factor * 0.5, 0.0)
    held = {
        name: {names[id(each)].rpartition("mixer.")[2] for each in group["params"]} for name, group in groups.items()
    }
    own = {
        "s4d": {"log_dt", "log_damping", "frequency"},
        "s5": {"real", "imag", "log_dt", "b"},
        "lru": {"nu", "theta", "gamma", "b"},
    }
    assert held["ssm"] == own[kind]
    assert {"c", "output.linear.weight"} <= held["matrices"]
    assert "d" in held["rest"]
    # The linear maps of outputs are hidden matrices for Muon.
    muon, _ = build_optimizers(model, OptimizerConfig(name="muon"))
    outputs = [module for module in model.modules() if isinstance(module, GLUOutput)]
    assert len(outputs) == 2
    assert all(isinstance(each.linear, Linear) for each in outputs)
    assert {id(each.linear.weight) for each in outputs} <= {id(each) for each in muon.param_groups[0]["params"]}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: S4DConfig(d_state=5), r"^d_state: expected an even number"),
        (lambda: S4DConfig(dt_min=0.1, dt_max=0.01), r"^dt_min, dt_max: expected dt_min <= dt_max, got 0.1 and 0.01"),
        (lambda: S5Config(d_state=6, blocks=2), r"^d_state, blocks: expected an even number of at most 1024"),
        (lambda: S5Config(d_state=2**20), r"^d_state, blocks: .*got 1048576 states and 1 blocks"),
        (lambda: LRUConfig(r_min=0.9, r_max=0.5), r"^r_min, r_max: expected r_min <= r_max"),
        (lambda: LRUConfig(r_max=1.5), r"r_max: expected"),
        (lambda: LRUConfig(max_phase=7.0), r"max_phase: expected"),
    ],
)
def test_wrong_configurations_are_named(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()
