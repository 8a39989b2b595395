"""On a GPU: batches arrive as they are, and both evaluations count the same bits as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tcnca
from tcnca.data import Batch, Dataset, load_task
from tcnca.data.tasks import LanguageTask
from tests.examples import small_model

pytestmark = pytest.mark.gpu


def bits(model: tcnca.SequenceModel, language: LanguageTask, device: str) -> float:
    """Bits per byte of the test split."""
    model = model.to(device)
    total, count, state = 0.0, 0, None
    with torch.no_grad():
        for host in language.eval_batches("test", 5):
            batch = host.to(device)
            if not batch.continues:
                state = model.initial_state(len(batch))
            logits, state = model(batch.inputs, lengths=batch.lengths, state=state)
            spent, counted = language.metric_sums(logits, batch)
            total, count = total + float(spent), count + int(counted)
    assert count == language.sizes["test"]
    return total / count


@pytest.mark.parametrize("carry_state", [True, False])
@pytest.mark.parametrize("family", ["tcnca", "mega"])
def test_bits_are_those_of_the_cpu(family: str, carry_state: bool) -> None:
    text = np.random.default_rng(0).integers(0, 11, 4000).astype(np.uint8)
    data = Dataset(
        "tiny", {"symbols": list(range(11))}, {"train": {"bytes": text[:3000]}, "test": {"bytes": text[3000:]}}
    )
    language = LanguageTask(data, chunk_size=16, eval_length=64, segments=7, carry_state=carry_state)
    model = small_model(family, dtype=torch.float32)
    assert bits(model, language, "cuda") == pytest.approx(bits(model, language, "cpu"), rel=1e-5)


@pytest.mark.parametrize("name", ["listops", "recall-16"])
def test_pinned_batches_arrive_as_they_are(name: str) -> None:
    batch = load_task(name, stream=True).batch(3, 8, seed=1)
    there = batch.pin_memory().to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert isinstance(there, Batch)
    assert there.inputs.is_cuda
    assert there.targets.is_cuda
    torch.testing.assert_close(there.inputs.cpu(), batch.inputs, rtol=0, atol=0)
    torch.testing.assert_close(there.targets.cpu(), batch.targets, rtol=0, atol=0)
    assert there.tokens == batch.tokens
