"""Steps with given tokens equal the parallel forward pass, over long sequences and whatever happens to the state."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tcnca import Batcher, SequenceModel
from tcnca.generation import Request
from tcnca.generation.dispatch import GraphedStep, ModelStep
from tcnca.generation.fused import FusedStep
from tcnca.generation.packed import PackedStep
from tcnca.generation.step import Step
from tcnca.models import ModelState
from tests.comparison import assert_close
from tests.examples import VOCABULARY, small_model

MakeStep = Callable[[SequenceModel, ModelState], Step]
FAMILIES = pytest.mark.parametrize("family", ["tcnca", "tcnca-simple", "mega", "tcn-mlp", "ema-mlp"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
STEPS = pytest.mark.parametrize(
    ("make", "device"),
    [
        pytest.param(ModelStep, "cpu", id="model"),
        pytest.param(
            PackedStep, "cpu", id="packed", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs Numba")
        ),
        pytest.param(FusedStep, "cuda", id="fused", marks=pytest.mark.gpu),
        pytest.param(GraphedStep, "cuda", id="graphed", marks=pytest.mark.gpu),
    ],
)


class Forced:
    """Takes steps with the tokens of given sequences, and compares the logits with those of the parallel forward.

    The parallel forward is that of the same weights in float64: in bfloat16, it differs from that as much as steps do.

    Args:
        model: the model.
        sequences: tokens, `[time]` each.
    """

    def __init__(self, model: SequenceModel, sequences: list[Tensor]) -> None:
        self.model, self.sequences = model, sequences
        precise = deepcopy(model).double()
        self.expected = [precise(x.unsqueeze(0), return_state=False).logits[0] for x in sequences]
        self.rows: list[list[int]] = []  # sequence and position

    def read(self, *sizes: tuple[int, int]) -> ModelState:
        """Return the state after the first tokens of some sequences: their numbers, and how many tokens."""
        tokens = pad_sequence([self.sequences[number][:length] for number, length in sizes], batch_first=True)
        state = self.model(tokens, lengths=[length for _, length in sizes]).state
        assert state is not None
        return state

    def run(self, step: Step, count: int, what: str) -> None:
        """Take `count` steps with the next tokens of each row."""
        tokens = torch.stack([self.sequences[number][place : place + count] for number, place in self.rows])
        logits = torch.stack([step(token).clone() for token in tokens.unbind(1)], 1)
        expected = torch.stack([self.expected[number][place : place + count] for number, place in self.rows])
        assert_close(logits, expected, what)
        for row in self.rows:
            row[1] += count


@FAMILIES
@DTYPES
@STEPS
@pytest.mark.parametrize("time", [64, pytest.param(20_000, marks=pytest.mark.slow)])
@torch.no_grad()
def test_steps_equal_the_parallel_forward(
    family: str, dtype: torch.dtype, make: MakeStep, device: str, time: int, tmp_path: Path
) -> None:
    model = small_model(family, dtype).to(device)
    part = time // 8
    forced = Forced(model, list(torch.randint(VOCABULARY, (4, time), device=device)))
    forced.rows = [[0, 2], [1, 1]]
    step = make(model, forced.read((0, 2), (1, 1)))
    forced.run(step, 2 * part, "steps")

    step.state().save(tmp_path / "state.safetensors")
    step = make(model, ModelState.load(tmp_path / "state.safetensors", device))
    forced.run(step, part, "after saving")

    state = step.state()
    snapshot = state.snapshot(9)
    for size in (1, 1, 5, 2):  # tokens that are taken back
        state = model(torch.randint(VOCABULARY, (2, size), device=device), state=state, inplace=True).state
    step = make(model, state.rollback(snapshot))
    forced.run(step, part, "after rolling back")

    step = make(model, step.state().reorder([1, 0]))
    forced.rows.reverse()
    forced.run(step, part, "after reordering")

    # A sequence joins the others, one leaves and another one takes its row.
    step = make(model, step.state().reorder([0, 1, 0]))
    step.load(2, forced.read((2, 5)))
    forced.rows.append([2, 5])
    forced.run(step, part, "after joining")
    step.load(0, forced.read((3, 1)))
    forced.rows[0] = [3, 1]
    forced.run(step, time - forced.rows[1][1], "after leaving")
    assert forced.rows[1] == [0, time]


@DTYPES
@torch.no_grad()
def test_steps_of_full_attention_equal_the_parallel_forward(dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_model("mega-full", dtype)
    forced = Forced(model, list(torch.randint(VOCABULARY, (2, 60))))
    forced.rows = [[0, 2], [1, 1]]
    step = ModelStep(model, forced.read((0, 2), (1, 1)))
    forced.run(step, 20, "steps")
    step.state().save(tmp_path / "state.safetensors")
    step = ModelStep(model, ModelState.load(tmp_path / "state.safetensors").reorder([1, 0]))
    forced.rows.reverse()
    forced.run(step, 38, "after saving and reordering")


class ForcedSampler:
    """A sampler that chooses the next token of the sequence in each slot, and compares what it would choose from."""

    def __init__(self, batcher: Batcher, forced: Forced) -> None:
        self.batcher, self.forced = batcher, forced
        self.found: dict[Request, list[Tensor]] = {}

    def assign(self, *_: Any) -> None:
        """Do nothing."""

    def observe(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def __call__(self, logits: Tensor) -> Tensor:
        tokens = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        reading = [request for request, _ in self.batcher._reading]
        for slot, request in enumerate(self.batcher._slots):
            if request is not None and request not in reading:
                assert request.seed is not None  # the number of the sequence
                self.found.setdefault(request, []).append(logits[slot].clone())
                tokens[slot] = self.forced.sequences[request.seed][len(request.prompt) + len(request.tokens)]
        return tokens


@FAMILIES
@DTYPES
@STEPS
@pytest.mark.parametrize("time", [64, pytest.param(2_000, marks=pytest.mark.slow)])
@torch.no_grad()
def test_continuous_batches_equal_the_parallel_forward(
    family: str, dtype: torch.dtype, make: MakeStep, device: str, time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long sequence, and short ones that join and leave around it."""
    monkeypatch.setattr("tcnca.generation.batching.make_step", lambda model, state, **_: make(model, state))
    model = small_model(family, dtype).to(device)
    lengths = [time] + [64] * 19
    forced = Forced(model, [torch.randint(VOCABULARY, (length,), device=device) for length in lengths])
    batcher = Batcher(model, 5, prefill_tokens=7)
    sampler = ForcedSampler(batcher, forced)
    batcher._sampler = sampler  # type: ignore[assignment]
    batcher.submit(forced.sequences[0][:3], time - 3, seed=0)
    for number in range(1, len(lengths)):
        batcher.submit(forced.sequences[number][: 1 + 5 * number % 17], 3 + 7 * number % 23, seed=number)
        for _ in range(number % 4):
            batcher.step()
    for _ in batcher:
        pass
    assert len(sampler.found) == len(lengths)
    found, expected = [], []
    for request, logits in sampler.found.items():
        assert request.finish_reason == "length"
        begin = len(request.prompt) - 1
        found.append(torch.stack(logits))
        expected.append(forced.expected[request.seed or 0][begin : begin + request.max_new_tokens])
    assert_close(found[0], expected[0], "the long sequence")
    assert_close(torch.cat(found[1:]), torch.cat(expected[1:]), "the others")
