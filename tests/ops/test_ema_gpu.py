"""The Triton scan of the EMA on a GPU: against float64, streamed, compiled, captured, in a whole layer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import tcnca
from tcnca import AttentionConfig, EMAConfig, ModelConfig, ValueInputConfig
from tcnca.errors import KernelError
from tcnca.ops import ema
from tcnca.ops.driver import capture_graph
from tests.comparison import TOLERANCE, assert_close, relative_error
from tests.ops.ema_cases import Case, assert_right, some

pytestmark = pytest.mark.gpu

BRAIN, HALF = torch.bfloat16, torch.float16


# No multiples of a tile, a segment or a group, and multiples of all; every number of states that a kernel rounds up to.
CASES = [
    *(Case(3, time, 33, 16, lengths=True, state=True, final=True) for time in (1, 2, 17, 127, 128, 129, 1000, 4097)),
    *(Case(3, time, 33, 16, lengths=True, omega=True, silu=True) for time in (1, 17, 128, 1000, 4097)),
    *(Case(2, time, 40, 16) for time in (1, 16, 255, 8192)),
    Case(1, 200_000, 17, 16, state=True, final=True, slow=True),
    Case(2, 131_073, 8, 16, lengths=True),
    Case(3, 777, 40, 16, directions=2, lengths=True),
    Case(3, 777, 40, 16, directions=2, lengths=True, omega=True, silu=True),
    Case(2, 300, 40, 16, omega=True),
    Case(2, 300, 40, 16, silu=True, strided=True),
    Case(2, 65_537, 9, 16, directions=2),
    Case(2, 300, 7, 3, directions=2, strided=True),
    Case(3, 129, 65, 5, lengths=True, state=True, final=True, strided=True),
    Case(2, 1000, 30, 24, final=True),
    Case(2, 515, 33, 64, lengths=True, state=True, final=True),
    Case(2, 515, 33, 64, lengths=True, state=True, final=True, omega=True, silu=True),
    Case(2, 100, 513, 1, expanded=True),
    Case(3, 700, 100, 16, lengths=True, state=True, final=True, dtype=BRAIN),
    Case(2, 700, 64, 8, directions=2, lengths=True, dtype=BRAIN, strided=True),
    Case(3, 333, 36, 16, lengths=True, state=True, final=True, dtype=HALF, strided=True),
    Case(4, 8191, 64, 16, dtype=BRAIN, expanded=True),
    Case(4, 8191, 64, 16, directions=2, dtype=BRAIN, expanded=True),
    Case(3, 700, 100, 16, lengths=True, state=True, final=True, omega=True, silu=True, dtype=BRAIN),
    Case(2, 700, 64, 8, directions=2, lengths=True, omega=True, silu=True, dtype=BRAIN, strided=True),
    Case(3, 333, 36, 16, lengths=True, omega=True, silu=True, dtype=HALF, expanded=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_state_and_gradients_are_right(case: Case) -> None:
    assert_right(case, "cuda")


def test_auto_takes_what_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TCNCA_KERNELS", raising=False)
    x, *parameters = some("cuda", (2, 50, 3), *[(1, 3, 4)] * 4)
    triton, fft = (ema(x, *parameters, backend=backend)[0] for backend in ("triton", "fft"))
    assert not torch.equal(triton, fft), "the FFT never has the scan's bits, so one of them did not run"
    assert torch.equal(ema(x, *parameters, backend="auto")[0], triton), "auto did not take the scan"
    cut, expected = (ema(x, *parameters, backend=backend, truncation=7)[0] for backend in ("auto", "fft"))
    assert_close(cut, expected, "truncated")
    exact = [part.double() for part in (x, *parameters)]
    assert_close(ema(*exact, backend="auto")[0], ema(*exact, backend="fft")[0], "float64")
    with pytest.raises(KernelError, match=r"backend: 'triton' cannot run.*torch\.float64"):
        ema(*exact, backend="triton")
    delta, alpha, beta, gamma = parameters
    with pytest.raises(KernelError, match=r"backend: 'triton' cannot run.*expected cuda:0 for all tensors.*got cpu"):
        ema(x, delta.cpu(), alpha, beta, gamma, backend="triton")
    monkeypatch.setenv("TCNCA_KERNELS", "off")
    assert not torch.equal(ema(x, *parameters, backend="auto")[0], triton), "auto took the scan that was switched off"


def test_padding_may_hold_anything() -> None:
    x, *parameters = some("cuda", (3, 300, 5), *[(2, 5, 4)] * 4)
    lengths = torch.tensor([300, 0, 131], device="cuda")
    expected, _ = ema(x, *parameters, backend="triton", lengths=lengths)
    spoilt = x.masked_fill((torch.arange(300, device="cuda") >= lengths.unsqueeze(1)).unsqueeze(-1), float("nan"))
    spoilt.requires_grad_()
    y, _ = ema(spoilt, *parameters, backend="triton", lengths=lengths)
    assert torch.equal(y, expected)
    (gradient,) = torch.autograd.grad(y.sum(), spoilt)
    assert not gradient[1].any()
    assert not gradient[2, 131:].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("inplace", [False, True], ids=["new states", "inplace"])
def test_pieces_equal_one_call(inplace: bool) -> None:
    x, *parameters = some("cuda", (3, 700, 37), *[(1, 37, 16)] * 4)
    whole, last = ema(x, *parameters, backend="triton", return_state=True)
    state, pieces = None, []
    for piece in x.split([1, 1, 5, 300, 1, 128, 264], 1):
        options: dict[str, Any] = {"return_state": True, "inplace": inplace and state is not None}
        y, state = ema(piece, *parameters, backend="triton", state=state, **options)
        pieces.append(y)
    assert state is not None
    assert last is not None
    assert_close(torch.cat(pieces, 1), whole)
    assert_close(state.hidden, last.hidden, "hidden states")
    assert torch.equal(state.position, last.position)


def test_a_state_can_be_used_again() -> None:
    x, *parameters = some("cuda", (2, 90, 5), *[(1, 5, 4)] * 4)
    _, state = ema(x, *parameters, backend="triton", return_state=True)
    assert state is not None
    held = {name: value.clone() for name, value in state.tensors().items()}
    first, _ = ema(x, *parameters, backend="triton", state=state, return_state=True)
    second, _ = ema(x, *parameters, backend="triton", state=state, return_state=True)
    assert torch.equal(first, second)
    assert all(torch.equal(value, held[name]) for name, value in state.tensors().items())


def test_second_derivatives_are_refused() -> None:
    x, *parameters = some("cuda", (2, 9, 3), *[(1, 3, 4)] * 4, requires_grad=True)
    y, _ = ema(x, *parameters, backend="triton")
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(KernelError, match=r"ema_scan_backward: expected first derivatives only"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("streams", [False, True], ids=["from the start", "from state to state"])
def test_opcheck(streams: bool) -> None:
    x, *parameters = some("cuda", (2, 40, 6), *[(1, 6, 4)] * 4, requires_grad=True)
    hidden, omega = some("cuda", (2, 4, 6), (6,), requires_grad=True)
    lengths = torch.tensor([40, 7], device="cuda")
    rest = (hidden, lengths, omega, True, True, True) if streams else (*[None] * 3, *[False] * 3)
    torch.library.opcheck(torch.ops.tcnca.ema_scan.default, (x, *parameters, *rest))


def test_threads_with_their_own_streams() -> None:
    sizes = [(2, 300 + 50 * i, 40) for i in range(4)]
    parameters = some("cuda", *[(1, 40, 16)] * 4)
    inputs = some("cuda", *sizes, *sizes)
    expected = [ema(x, *parameters, backend="triton")[0] for x in inputs]
    torch.cuda.synchronize()
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found[number], _ = ema(inputs[number], *parameters, backend="triton")
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(len(inputs))), "a thread died; its error stands above"
    for number, y in enumerate(expected):
        assert torch.equal(found[number], y), f"thread {number}"


def test_graphs_replay_bit_exactly() -> None:
    x, *parameters, omega = some("cuda", (2, 500, 40), *[(1, 40, 16)] * 4, (40,), requires_grad=True)
    (g,) = some("cuda", (2, 500, 40))

    def step() -> tuple[Tensor, ...]:
        y, _ = ema(x, *parameters, omega=omega, activation="silu", backend="triton")
        return y, *torch.autograd.grad(y, [x, *parameters, omega], g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with capture_graph() as graph:
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    names = ["y", "x", "delta", "alpha", "beta", "gamma", "omega"]
    for name, ours, expected in zip(names, captured, step(), strict=True):
        assert torch.equal(ours, expected), f"{name}: {relative_error(ours, expected):.1e} away"


def test_one_compilation_for_all_lengths() -> None:
    *parameters, omega = some("cuda", *[(1, 40, 16)] * 4, (40,), requires_grad=True)
    options: dict[str, Any] = {"omega": omega, "activation": "silu", "return_state": True}
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    run = torch.compile(
        lambda x: ema(x.sin(), *parameters, backend="auto", **options),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for time in (50, 128, 3000, 4097):
        x = torch.randn(2, time, 40, device="cuda", requires_grad=True)
        y, state = run(x)
        expected, other = ema(x.sin(), *parameters, backend="triton", **options)
        assert_close(y, expected, f"output of {time} tokens")
        assert_close(state.hidden, other.hidden, f"hidden states after {time} tokens")  # type: ignore[union-attr]
        leaves = [x, *parameters, omega]
        ours, theirs = (torch.autograd.grad(part.square().sum(), leaves) for part in (y, expected))
        for name, mine, same in zip(["x", "delta", "alpha", "beta", "gamma", "omega"], ours, theirs, strict=True):
            assert_close(mine, same, f"gradient of {name}, {time} tokens")
    assert counter.frame_count == 1, "another length compiled everything anew"


def mega_layer(backend: Any) -> tcnca.SequenceModel:
    torch.manual_seed(0)
    config = ModelConfig(
        num_layers=1,
        d_model=48,
        d_ff=64,
        mixer=EMAConfig(d_state=16, backend=backend),
        attention=AttentionConfig(d_key=16, d_value=64, chunk_size=32),
        input=ValueInputConfig(features=4),
        head=tcnca.ClassifierHeadConfig(num_classes=5, pooling="none"),
    )
    return tcnca.build(config).cuda().train()


def trained(model: tcnca.SequenceModel, run: Any, half: bool) -> tuple[Tensor, dict[str, Tensor]]:
    x = torch.randn(3, 200, 4, generator=torch.Generator().manual_seed(2)).cuda()
    with torch.autocast("cuda", BRAIN, enabled=half):
        logits = run(x, lengths=torch.tensor([200, 77, 1], device="cuda")).logits
    logits.float().square().mean().backward()
    return logits.detach(), {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_mega_layer_trains_as_by_the_fft(compiled: bool, half: bool) -> None:
    plain, model = mega_layer("fft"), mega_layer("auto")
    run = torch.compile(model, fullgraph=True) if compiled else model
    logits, gradients = trained(model, run, half)
    # Half precision is compared with float32, not with other roundings.
    expected, exact = trained(plain, plain, half=False)
    assert_close(logits.float(), expected, "logits", dtype=BRAIN if half else torch.float32)
    assert gradients.keys() == exact.keys()
    scale = max(float(value.norm()) for value in exact.values())
    allowed = TOLERANCE[BRAIN] if half else 1e-4
    far = {name: float((gradients[name] - value).norm()) / scale for name, value in exact.items()}
    wrong = {name: f"{error:.1e}" for name, error in far.items() if not error <= allowed}
    assert not wrong, f"gradients, relative to the largest one's norm, allowed {allowed:.0e}: {wrong}"
