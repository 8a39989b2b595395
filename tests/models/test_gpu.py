"""On a GPU: the same numbers as on the CPU, streaming, compilation, half precision."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import tcnca
from tcnca import AttentionConfig, ClassifierHeadConfig, EMAConfig, TCNConfig, ValueInputConfig
from tests.comparison import assert_close
from tests.examples import FAMILY, VARIANTS, VOCABULARY, small_model

pytestmark = pytest.mark.gpu

DTYPES = [torch.float64, torch.float32]
MODELS = [*FAMILY, "transformer-full", "transformer-xl"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_logits_and_gradients_are_those_of_the_cpu(family: str, dtype: torch.dtype) -> None:
    tokens = torch.randint(VOCABULARY, (3, 37))
    lengths = torch.tensor([37, 20, 1])
    results = []
    model = small_model(VARIANTS[family], dtype=dtype)
    for device in ("cpu", "cuda"):
        copy = tcnca.build(model.config).to(device, dtype).eval()
        copy.load_state_dict(model.state_dict())
        logits = copy(tokens.to(device), lengths=lengths.to(device)).logits
        logits.square().mean().backward()
        results.append((logits, {name: part.grad for name, part in copy.named_parameters()}))
    (on_cpu, cpu_grads), (on_gpu, gpu_grads) = results
    assert_close(on_gpu.cpu(), on_cpu, "logits", dtype)
    for name, grad in cpu_grads.items():
        assert grad is not None
        other = gpu_grads[name]
        assert other is not None
        # Sums over all tokens: a gradient near zero is compared with the largest of all.
        scale = max(float(part.norm()) for part in cpu_grads.values() if part is not None)
        assert float((other.cpu() - grad).norm()) <= scale * (1e-11 if dtype == torch.float64 else 1e-4), name


@pytest.mark.parametrize("family", MODELS)
def test_streaming_equals_one_call(family: str) -> None:
    model = small_model(VARIANTS[family]).cuda()
    tokens = torch.randint(VOCABULARY, (3, 41), device="cuda")
    with torch.no_grad():
        whole = model(tokens).logits
        state, pieces, begin = None, [], 0
        for size in (1, 1, 5, 13, 1, 7, 13):
            out = model(tokens[:, begin : begin + size], state=state, inplace=state is not None)
            pieces.append(out.logits)
            state, begin = out.state, begin + size
    assert_close(torch.cat(pieces, 1), whole)


def test_states_move_between_devices() -> None:
    model = small_model()
    tokens = torch.randint(VOCABULARY, (2, 9))
    whole = model(tokens).logits[:, 5:]
    state = model(tokens[:, :5]).state
    assert state is not None
    model.cuda()
    with pytest.raises(tcnca.StateError, match=r"state\.to"):
        model(tokens[:, 5:].cuda(), state=state)
    assert_close(model(tokens[:, 5:].cuda(), state=state.to("cuda")).logits.cpu(), whole)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY)
def test_compiles_without_graph_breaks(family: str) -> None:
    model = small_model(family, dtype=torch.float32).cuda()
    tokens = torch.randint(VOCABULARY, (2, 24), device="cuda")
    expected = model(tokens).logits
    expected.square().mean().backward()
    gradients = {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)
    logits = compiled(tokens).logits
    logits.square().mean().backward()
    assert_close(logits, expected)
    scale = max(float(grad.norm()) for grad in gradients.values())
    for name, part in model.named_parameters():
        assert part.grad is not None
        assert float((part.grad - gradients[name]).norm()) <= 1e-4 * scale, name


@pytest.mark.parametrize(
    "mixer", [TCNConfig(kernel_size=5, dilation_factor=3, depth=3), EMAConfig(d_state=8)], ids=["tcn", "ema"]
)
def test_autocast_stays_near_float32(mixer: TCNConfig | EMAConfig) -> None:
    torch.manual_seed(0)
    model = tcnca.build(
        tcnca.ModelConfig(
            num_layers=2,
            d_model=64,
            d_ff=128,
            mixer=mixer,
            attention=AttentionConfig(d_key=32, d_value=128, chunk_size=64),
            input=ValueInputConfig(features=4),
            head=ClassifierHeadConfig(num_classes=5, pooling="none"),
        )
    )
    model = model.cuda().eval()
    x = torch.randn(4, 300, 4, device="cuda")
    with torch.no_grad():
        exact = model(x).logits
        with torch.autocast("cuda", torch.bfloat16):
            rough = model(x).logits
    assert_close(rough.float(), exact, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("model(torch.full((1, 4), 99, device='cuda'))", "of the vocabulary"),
        ("model(torch.zeros(1, 4, dtype=torch.long, device='cuda'), lengths=torch.tensor([7]).cuda())", "lengths"),
    ],
    ids=["token", "length"],
)
def test_bad_values_stop_the_device(call: str, words: str) -> None:
    # In a process of its own: a failed assertion leaves the device unusable.
    code = (
        f"import torch, tcnca\nmodel = tcnca.build('tcnca-simple-recall-64').cuda()\n{call}\ntorch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert words in done.stderr
