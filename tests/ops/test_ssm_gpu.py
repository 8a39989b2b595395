"""The Triton kernels of state-space models on a GPU: against float64, streamed, compiled, captured, in whole layers."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import tcnca
from tcnca import ModelConfig, S4DConfig, S5Config, ValueInputConfig
from tcnca.errors import KernelError
from tcnca.ops import diagonal_scan, ssm
from tcnca.ops.driver import capture_graph
from tests.comparison import assert_close, relative_error
from tests.ops.properties import in_pieces
from tests.ops.ssm_cases import Case, assert_right, some_scan, some_ssm

pytestmark = pytest.mark.gpu

BRAIN, HALF = torch.bfloat16, torch.float16

# No multiples of a tile, a segment or a block, and multiples of all; every number of states that a kernel rounds up to.
CASES = [
    *(Case("ssm", 3, time, 33, 16, lengths=True, state=True, final=True) for time in (1, 2, 63, 64, 65, 1000, 4097)),
    *(Case("ssm", 2, time, 64, 32) for time in (1, 16, 255, 8192)),
    Case("ssm", 1, 200_000, 5, 16, state=True, final=True, slow=True),
    Case("ssm", 2, 131_072, 8, 32, slow=True, dtype=BRAIN),
    Case("ssm", 2, 65_537, 8, 32, lengths=True, slow=True),
    Case("ssm", 3, 777, 40, 16, directions=2, lengths=True),
    Case("ssm", 2, 65_537, 9, 4, directions=2),
    Case("ssm", 2, 300, 7, 3, directions=2, strided=True),
    Case("ssm", 3, 129, 65, 5, lengths=True, state=True, final=True, strided=True),
    Case("ssm", 2, 1000, 30, 24, final=True),
    Case("ssm", 2, 515, 33, 64, lengths=True, state=True, final=True),
    Case("ssm", 2, 515, 33, 64, lengths=True, state=True, final=True, dtype=BRAIN),
    Case("ssm", 2, 100, 513, 1, expanded=True),
    Case("ssm", 150, 100, 8, 32, lengths=False),
    Case("ssm", 150, 100, 8, 32, dtype=BRAIN),
    Case("ssm", 3, 700, 128, 32, lengths=True, state=True, final=True, dtype=BRAIN),
    Case("ssm", 2, 700, 64, 8, directions=2, lengths=True, dtype=BRAIN, strided=True),
    Case("ssm", 3, 333, 36, 16, lengths=True, state=True, final=True, dtype=HALF, strided=True),
    Case("ssm", 4, 8191, 64, 32, dtype=BRAIN, expanded=True),
    *(Case("scan", 3, time, 33, lengths=True, state=True, final=True) for time in (2, 15, 16, 17, 128, 1000, 4097)),
    Case("scan", 1, 200_000, 5, state=True, final=True, slow=True),
    Case("scan", 2, 131_073, 40, lengths=True, slow=True),
    Case("scan", 3, 777, 64, directions=2, lengths=True),
    Case("scan", 1, 70_000, 8, directions=2),
    Case("scan", 2, 300, 7, directions=2, strided=True),
    Case("scan", 2, 100, 513, expanded=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_state_and_gradients_are_right(case: Case) -> None:
    assert_right(case, "cuda")


def test_tiles_of_gpus_with_less_shared_memory_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = importlib.import_module("tcnca.ops.ssm.triton_launch")
    monkeypatch.setattr(plan, "max_shared_memory", lambda device: 99 * 1024)
    caches = (plan.ssm_plan, plan.weights_launches)
    for cache in caches:
        cache.cache_clear()
    assert_right(Case("ssm", 2, 515, 33, 64, lengths=True, state=True, final=True, dtype=BRAIN), "cuda")
    for cache in caches:
        cache.cache_clear()


def test_auto_takes_what_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TCNCA_KERNELS", raising=False)
    given, scanned = some_ssm("cuda", 2, 300, 3, 4), some_scan("cuda", 2, 300, 3)
    for run, values, other in ((ssm, given, "chunked"), (diagonal_scan, scanned, "scan")):
        call: Any = run
        triton, plain = (call(*values, backend=backend)[0] for backend in ("triton", other))
        assert not torch.equal(triton, plain), "they never have the same bits, so one of them did not run"
        assert torch.equal(call(*values)[0], triton)
        with monkeypatch.context() as patch:
            patch.setenv("TCNCA_KERNELS", "off")
            assert torch.equal(call(*values)[0], plain)
        exact = [part.to(torch.complex128 if part.is_complex() else torch.float64) for part in values]
        assert torch.equal(call(*exact)[0], call(*exact, backend=other)[0])
        with pytest.raises(KernelError, match=r"backend: 'triton' cannot run.*torch\.float64"):
            call(*exact, backend="triton")
        with pytest.raises(KernelError, match=r"backend: 'triton' cannot run.*expected cuda:0 for all.*got cpu"):
            call(values[0], *(part.cpu() for part in values[1:]), backend="triton")


def test_outputs_do_not_depend_on_the_future() -> None:
    x, *parameters = some_ssm("cuda", 2, 500, 8, 16)
    v, log_decay = some_scan("cuda", 2, 500, 40)
    y, h = ssm(x, *parameters, backend="triton")[0], diagonal_scan(v, log_decay, backend="triton")[0]
    x[:, 300:], v[:, 300:] = 1e6, 1e6
    assert torch.equal(ssm(x, *parameters, backend="triton")[0][:, :300], y[:, :300])
    assert torch.equal(diagonal_scan(v, log_decay, backend="triton")[0][:, :300], h[:, :300])


def test_padding_may_hold_anything() -> None:
    x, *parameters = some_ssm("cuda", 3, 300, 5, 4, 2)
    lengths = torch.tensor([300, 0, 131], device="cuda")
    expected, _ = ssm(x, *parameters, backend="triton", lengths=lengths)
    spoilt = x.masked_fill((torch.arange(300, device="cuda") >= lengths.unsqueeze(1)).unsqueeze(-1), float("nan"))
    spoilt.requires_grad_()
    y, _ = ssm(spoilt, *parameters, backend="triton", lengths=lengths)
    assert torch.equal(y, expected)
    (gradient,) = torch.autograd.grad(y.sum(), spoilt)
    assert not gradient[1].any()
    assert not gradient[2, 131:].any()
    assert gradient[2, :131].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN], ids=str)
def test_pieces_equal_one_call(dtype: torch.dtype) -> None:
    sizes = [1, 1, 5, 300, 1, 128, 264]
    x, *parameters = some_ssm("cuda", 3, 700, 37, 16)
    v, log_decay = some_scan("cuda", 3, 700, 37)

    def run_ssm(x: Tensor, **options: Any) -> Any:
        return ssm(x, *parameters, backend="triton", **options)

    def run_scan(v: Tensor, **options: Any) -> Any:
        h, state = diagonal_scan(torch.view_as_complex(v), log_decay, backend="triton", **options)
        return torch.view_as_real(h), state

    for run, whole in ((run_ssm, x.to(dtype)), (run_scan, torch.view_as_real(v))):
        expected, last = run(whole, return_state=True)
        found, state = in_pieces(partial(run), [whole], sizes)
        assert_close(found, expected)
        assert_close(state.tensors()["hidden"], last.hidden, "hidden states")
        assert torch.equal(state.tensors()["position"], last.position)


@pytest.mark.parametrize("streams", [False, True], ids=["from the start", "from state to state"])
def test_opcheck(streams: bool) -> None:
    draw = partial(torch.randn, device="cuda", requires_grad=True)
    lengths = torch.tensor([40, 7], device="cuda")
    x, log_decay, weight = draw(2, 40, 6), -draw(1, 6, 4, 2).abs(), draw(1, 6, 4, 2)
    inputs = (x, log_decay.detach().requires_grad_(), weight)
    torch.library.opcheck(
        torch.ops.tcnca.ssm.default, (*inputs, *((draw(2, 6, 4, 2), lengths) if streams else (None, None)))
    )
    v, decay = draw(2, 40, 6, 2), (-draw(6, 2).abs()).detach().requires_grad_()
    rest = (draw(2, 6, 2), lengths, False) if streams else (None, None, True)
    torch.library.opcheck(torch.ops.tcnca.diagonal_scan.default, (v, decay, *rest))


def test_graphs_replay_bit_exactly() -> None:
    x, *parameters = (part.requires_grad_() for part in some_ssm("cuda", 2, 500, 40, 16))
    v, log_decay = (part.requires_grad_() for part in some_scan("cuda", 2, 500, 40))
    (g,) = some_ssm("cuda", 2, 500, 40, 16)[:1]

    def step() -> tuple[Tensor, ...]:
        y, _ = ssm(x, *parameters, backend="triton")
        h, _ = diagonal_scan(v, log_decay, backend="triton")
        gradients = torch.autograd.grad([y, h], [x, *parameters, v, log_decay], [g, torch.complex(g, -g)])
        return tuple(torch.view_as_real(part) if part.is_complex() else part for part in (y, h, *gradients))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with capture_graph() as graph:
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        v.copy_(torch.randn_like(v))
    graph.replay()
    names = ["y", "h", "x", "log_decay", "weight", "v", "log_decay of the scan"]
    for name, ours, expected in zip(names, captured, step(), strict=True):
        assert torch.equal(ours, expected), f"{name}: {relative_error(ours, expected):.1e} away"


def test_one_compilation_for_all_lengths() -> None:
    _, *parameters = (part.requires_grad_() for part in some_ssm("cuda", 1, 1, 40, 16))
    _, log_decay = (part.requires_grad_() for part in some_scan("cuda", 1, 1, 40))
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def function(x: Tensor, backend: Any) -> Tensor:
        y, _ = ssm(x.sin(), *parameters, backend=backend)
        h, _ = diagonal_scan(torch.complex(y, x), log_decay, backend=backend)
        return torch.view_as_real(h).sum(-1)

    run = torch.compile(partial(function, backend="triton"), fullgraph=True, dynamic=True, backend=counter)
    for time in (50, 128, 3000, 4097):
        x = torch.randn(2, time, 40, device="cuda", requires_grad=True)
        y, expected = run(x), function(x, "triton")
        assert_close(y, expected, f"output of {time} tokens")
        leaves = [x, *parameters, log_decay]
        ours, theirs = (torch.autograd.grad(part.square().sum(), leaves) for part in (y, expected))
        for name, mine, same in zip(["x", "log_decay", "weight", "other"], ours, theirs, strict=True):
            mine, same = (torch.view_as_real(part) if part.is_complex() else part for part in (mine, same))
            assert_close(mine, same, f"gradient of {name}, {time} tokens")
    assert counter.frame_count == 1, "another length compiled everything anew"


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("kind", [S4DConfig, S5Config])
def test_a_layer_trains_as_without_kernels(kind: Any, causal: bool, half: bool) -> None:
    def trained(backend: str, half: bool) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        config = ModelConfig(
            num_layers=1,
            d_model=48,
            d_ff=64,
            causal=causal,
            gated=False,
            mixer=kind(backend=backend),
            attention=None,
            input=ValueInputConfig(features=4),
            head=tcnca.ClassifierHeadConfig(num_classes=5, pooling="none" if causal else "mean"),
        )
        model = tcnca.build(config).cuda().train()
        x = torch.randn(3, 200, 4, generator=torch.Generator().manual_seed(2)).cuda()
        with torch.autocast("cuda", BRAIN, enabled=half):
            logits = model(x, lengths=torch.tensor([200, 77, 1], device="cuda")).logits
        logits.float().square().mean().backward()
        return logits.detach(), {name: part.grad for name, part in model.named_parameters() if part.grad is not None}

    logits, gradients = trained("triton", half)
    # Half precision is compared with float32, not with other roundings.
    expected, exact = trained("chunked" if kind is S4DConfig else "scan", False)
    assert_close(logits.float(), expected, "logits", dtype=BRAIN if half else torch.float32)
    scale = max(float(value.norm()) for value in exact.values())
    allowed = 2e-2 if half else 1e-4
    far = {name: float((gradients[name] - value).norm()) / scale for name, value in exact.items()}
    wrong = {name: f"{error:.1e}" for name, error in far.items() if not error <= allowed}
    assert not wrong, f"gradients, relative to the largest one's norm, allowed {allowed:.0e}: {wrong}"
