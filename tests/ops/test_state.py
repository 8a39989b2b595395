"""What all streaming states support: move, copy, repeat, reorder, save, and use as a pytree."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from tcnca import StateError
from tcnca.ops import AttentionState, EMAState, State, TCNState, chunked_attention, ema, tcn
from tests.comparison import assert_close
from tests.ops.properties import assert_bit_equal, leaf

BATCH = 3
AnyState = TypeVar("AnyState", bound=State)


@dataclasses.dataclass(frozen=True)
class NestedExampleState(State):
    """States in states and in tuples, a missing part, and a string."""

    inner: TCNState
    parts: tuple[State | None, ...]
    kind: str


def tcn_state(depth: int = 2) -> TCNState:
    return _state(tcn(leaf(BATCH, 7, 2), leaf(depth, 1, 2, 3), 2, return_state=True))


def ema_state(truncation: int | None) -> EMAState:
    parameters = [leaf(1, 2, 3) for _ in range(4)]
    return _state(ema(leaf(BATCH, 7, 2), *parameters, truncation=truncation, return_state=True))


def attention_state() -> AttentionState:
    q, k, v = leaf(BATCH, 7, 2), leaf(BATCH, 7, 2), leaf(BATCH, 7, 3)
    return _state(chunked_attention(q, k, v, chunk_size=4, return_state=True))


def _state(result: tuple[Tensor, AnyState | None]) -> AnyState:
    assert result[1] is not None
    return result[1]


STATES: dict[str, Callable[[], State]] = {
    "tcn": tcn_state,
    "ema": lambda: ema_state(None),
    "truncated ema": lambda: ema_state(4),
    "attention": attention_state,
    "nested": lambda: NestedExampleState(tcn_state(1), (ema_state(None), None, tcn_state()), "example"),
}


@pytest.fixture(params=STATES, ids=lambda name: name.replace(" ", "-"))
def state(request: pytest.FixtureRequest) -> State:
    return STATES[request.param]()


def test_tensors_have_dotted_names() -> None:
    assert list(STATES["nested"]().tensors()) == [
        "inner.buffers.0",
        "inner.position",
        "parts.0.hidden",
        "parts.0.position",
        "parts.2.buffers.0",
        "parts.2.buffers.1",
        "parts.2.position",
    ]


def test_map_reaches_every_tensor_and_keeps_the_rest(state: State) -> None:
    doubled = state.map(lambda tensor: tensor * 2)
    assert type(doubled) is type(state)
    for name, tensor in state.tensors().items():
        assert torch.equal(doubled.tensors()[name], tensor * 2)
    if isinstance(doubled, NestedExampleState):
        assert (doubled.kind, doubled.parts[1]) == ("example", None)


def test_detach_and_clone(state: State) -> None:
    assert any(tensor.requires_grad for tensor in state.tensors().values())
    detached, copied = state.detach(), state.clone()
    assert not any(tensor.requires_grad for tensor in detached.tensors().values())
    assert any(tensor.requires_grad for tensor in copied.tensors().values())
    assert_bit_equal(detached, state)
    assert_bit_equal(copied, state)
    before = detached.clone()
    for tensor in copied.detach().tensors().values():
        tensor.add_(1)
    assert_bit_equal(state, before)


def test_to_changes_floating_dtypes_and_keeps_positions(state: State) -> None:
    moved = state.to("cpu", torch.bfloat16)
    for name, tensor in moved.tensors().items():
        expected = state.tensors()[name]
        # A sum over the whole past would stop growing in half precision, and a truncated one is subtracted from.
        wide = torch.float64 if "window" in moved.tensors() else torch.float32
        floating = wide if name.endswith("hidden") else torch.bfloat16
        assert tensor.dtype == (floating if expected.is_floating_point() else torch.long), name
        assert torch.equal(tensor, expected.to(tensor.dtype))


def test_to_copies_and_moves_everything(state: State) -> None:
    before = state.detach().clone()
    for tensor in state.to("cpu").detach().tensors().values():
        tensor.add_(1)
    assert_bit_equal(state, before)
    moved = state.to("meta").tensors()
    assert {tensor.device.type for tensor in moved.values()} == {"meta"}
    assert {n: t.dtype for n, t in moved.items()} == {n: t.dtype for n, t in state.tensors().items()}


def test_repeat_puts_copies_next_to_each_other(state: State) -> None:
    repeated = state.repeat(2)
    assert repeated.batch_size == 2 * BATCH
    for name, tensor in repeated.tensors().items():
        assert torch.equal(tensor, state.tensors()[name][[0, 0, 1, 1, 2, 2]])


@pytest.mark.parametrize(
    ("index", "dtype"),
    [([2, 0, 1], torch.int64), ([1, 1], torch.int32), ([0], torch.uint8), ([], torch.int64)],
    ids=str,
)
def test_reorder_takes_rows_in_the_given_order(state: State, index: list[int], dtype: torch.dtype) -> None:
    reordered = state.reorder(torch.tensor(index, dtype=dtype))
    assert reordered.batch_size == len(index)
    for name, tensor in reordered.tensors().items():
        assert torch.equal(tensor, state.tensors()[name][index])


def test_reordered_rows_continue_as_their_own() -> None:
    x, weight = torch.randn(BATCH, 9, 2), torch.randn(1, 1, 2, 3)
    whole, _ = tcn(x, weight, 2)
    state = _state(tcn(x[:, :5], weight, 2, lengths=torch.tensor([5, 5, 5]), return_state=True))
    index = torch.tensor([2, 0, 0])
    y, _ = tcn(x[index, 5:], weight, 2, state=state.reorder(index))
    assert_close(y, whole[index, 5:])


def test_nbytes_counts_shared_tensors_once() -> None:
    state = tcn_state(1)
    # A float64 buffer of 2 slots and 2 channels, and a 64-bit position.
    assert state.nbytes == BATCH * (2 * 2 * 8 + 8)
    assert state.to(torch.bfloat16).nbytes == BATCH * (2 * 2 * 2 + 8)
    assert TCNState(state.buffers * 2, state.position).nbytes == state.nbytes


def test_save_and_load_keep_everything(state: State, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    state.detach().save(path)
    for loaded in (State.load(path), type(state).load(path), State.load(str(path), device=torch.device("cpu"))):
        assert type(loaded) is type(state)
        assert_bit_equal(loaded, state.detach())
        if isinstance(loaded, NestedExampleState):
            assert (loaded.kind, loaded.parts[1]) == ("example", None)


def test_save_takes_tensors_that_share_memory(tmp_path: Path) -> None:
    buffer = torch.randn(BATCH, 8, 2)
    state = TCNState((buffer, buffer, buffer[:, :4], buffer.transpose(1, 2)), torch.arange(BATCH))
    state.save(tmp_path / "state")
    assert_bit_equal(State.load(tmp_path / "state"), state)


def test_pytree_round_trip(state: State) -> None:
    leaves, spec = pytree.tree_flatten(state)
    again = pytree.tree_unflatten(leaves, spec)
    assert type(again) is type(state)
    assert_bit_equal(again, state)
    assert pytree.tree_flatten(again)[1] == spec
    written = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert_bit_equal(pytree.tree_unflatten(leaves, written), state)


def test_repeat_needs_a_count() -> None:
    with pytest.raises(StateError, match=r"times: expected an integer of at least 1, got 0"):
        tcn_state(1).repeat(0)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.tensor([0.0, 1.0]), "index: expected one dimension of integers, got [2] of torch.float32"),
        (torch.tensor([[0], [1]]), "index: expected one dimension of integers, got [2, 1] of torch.int64"),
        (torch.tensor([-1, 0]), "index: expected values from 0 to 2, the state's batch, got [-1, 0]"),
    ],
    ids=["fractions", "two dimensions", "negative"],
)
def test_reorder_says_what_is_wrong(index: Tensor, message: str) -> None:
    with pytest.raises(StateError, match=re.escape(message)):
        tcn_state(1).reorder(index)


def test_load_refuses_other_files_and_states(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    with pytest.raises(StateError, match=r"file\.safetensors: cannot be read as safetensors"):
        State.load(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(StateError, match=r"file\.safetensors: cannot be read as safetensors"):
        State.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(StateError, match=r"file\.safetensors: expected format 'tcnca-state-3', got None"):
        State.load(path)
    state = tcn_state(1).detach()
    state.save(path)
    with pytest.raises(StateError, match=r"file\.safetensors: expected a EMAState, got a TCNState"):
        EMAState.load(path)


def test_load_reads_files_without_a_newer_part(tmp_path: Path) -> None:
    state = AttentionState(torch.randn(BATCH, 4, 2), torch.randn(BATCH, 4, 3), torch.arange(BATCH))
    structure = '{"state": "AttentionState", "fields": {"keys": true, "values": true, "position": true}}'
    save_file(state.tensors(), tmp_path / "state", {"format": "tcnca-state-3", "structure": structure})
    assert_bit_equal(State.load(tmp_path / "state"), state)


STRUCTURE = '{"state": "TCNState", "fields": {"buffers": [true], "position": true}}'
DAMAGES: dict[str, tuple[str, dict[str, Tensor], str]] = {
    "no JSON": ("{", {}, "expected JSON"),
    "deep": ("[" * 50_000 + "]" * 50_000, {}, "nested too deeply"),
    "levels": ("[" * 40 + "]" * 40, {}, "expected at most 16 levels of states"),
    "number": ("3", {}, "expected a part of a state, got 3"),
    "list": ("[]", {}, "expected a State, got a tuple"),
    "unknown class": (STRUCTURE.replace("TCNState", "OrderedDict"), {}, "expected one of .*got 'OrderedDict'"),
    "module": (STRUCTURE.replace("TCNState", "os.system"), {}, "expected one of .*got 'os.system'"),
    "base class": ('{"state": "State", "fields": {}}', {}, "expected one of .*got 'State'"),
    "other class": (STRUCTURE.replace("TCNState", "EMAState"), {}, "expected the fields .* of a EMAState"),
    "field": (STRUCTURE.replace("position", "_consumed"), {}, r"expected the fields \['buffers', 'position'\]"),
    "more": (STRUCTURE.replace("}}", '}, "x": 1}'), {}, "expected a part of a state"),
    "type": (STRUCTURE.replace("[true]", "true"), {"buffers": torch.zeros(3, 2, 2)}, "'buffers': expected tuple"),
    "text": (STRUCTURE.replace("[true]", '["x"]'), {}, "'buffers': expected tuple"),
    "missing part": (STRUCTURE.replace("true}", "null}"), {}, "'position': expected .*Tensor.*, got a NoneType"),
    "missing tensor": (STRUCTURE.replace("[true]", "[true, true]"), {}, "'buffers.1': expected a tensor, got none"),
    "more tensors": (STRUCTURE, {f"x{i}": torch.zeros(1) for i in range(2000)}, "expected no tensors besides"),
    "batch": (STRUCTURE, {"buffers.0": torch.zeros(2, 2, 2)}, "position: expected a batch of 2, as before, got 3"),
    "scalar": (STRUCTURE, {"position": torch.tensor(3)}, r"position: expected shape \[batch\], got \[\]"),
    "negative": (STRUCTURE, {"position": torch.tensor([0, -1, 0])}, r"position: expected positions from 0 .*-1"),
    "far": (STRUCTURE, {"position": torch.tensor([0, 2**62, 0])}, "position: expected positions from 0"),
    "float position": (STRUCTURE, {"position": torch.zeros(3)}, "position: expected torch.int64, got torch.float32"),
    "float8": (STRUCTURE, {"buffers.0": torch.zeros(3, 2, 2).to(torch.float8_e4m3fn)}, "buffers.0: expected .*float8"),
    "complex": (STRUCTURE, {"buffers.0": torch.zeros(3, 2, 2, dtype=torch.complex64)}, "buffers.0: expected .*complex"),
}


@pytest.mark.parametrize("case", DAMAGES, ids=lambda name: name.replace(" ", "-"))
def test_load_refuses_altered_states(case: str, tmp_path: Path) -> None:
    structure, changes, message = DAMAGES[case]
    path = tmp_path / "state"
    tensors = tcn_state(1).detach().tensors() | changes
    save_file(tensors, path, {"format": "tcnca-state-3", "structure": structure})
    with pytest.raises(StateError, match=rf"state: .*{message}") as caught:
        State.load(path)
    assert len(str(caught.value)) < 2000


def test_load_refuses_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        with pytest.raises(StateError, match="cannot be read as safetensors"):
            State.load(path)
    (tmp_path / "header").write_bytes((2**40).to_bytes(8, "little") + b"{")
    with pytest.raises(StateError, match="a header of 1,099,511,627,776 bytes"):
        State.load(tmp_path / "header")


def mutations(content: bytes, count: int) -> Iterator[bytes]:
    """Yield damaged copies of a file: each byte of its header changed, then bytes changed, removed or added."""
    header = 8 + int.from_bytes(content[:8], "little")
    generator = random.Random(0)
    for place in range(min(header, count)):
        yield content[:place] + bytes([content[place] ^ (1 << generator.randrange(8))]) + content[place + 1 :]
    for _ in range(count):
        damaged = bytearray(content)
        for _ in range(generator.randint(1, 4)):
            place = generator.randrange(min(header + 16, len(damaged)))
            size = generator.choice([0, 1, 1, 1, 8])
            damaged[place : place + size] = generator.randbytes(generator.choice([0, 1, 1, 3]))
        yield bytes(damaged)


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_or_read(count: int, tmp_path: Path) -> None:
    path, whole = tmp_path / "state", STATES["nested"]().detach()
    whole.save(path)
    refused = 0
    for content in mutations(path.read_bytes(), count):
        path.write_bytes(content)
        try:
            loaded = State.load(path)
        except StateError:
            refused += 1
        else:
            assert type(loaded) is type(whole)
    assert refused > 0.7 * count


@dataclasses.dataclass(frozen=True)
class EmptyExampleState(State):
    """No tensors."""

    part: State | None
    kind: str


def test_state_without_tensors(tmp_path: Path) -> None:
    state = EmptyExampleState(None, "nothing")
    state.save(tmp_path / "state")
    results = [state.reorder([1, 0]), state.repeat(3), state.clone(), state.detach(), state.to(torch.float64)]
    for result in [*results, State.load(tmp_path / "state")]:
        assert result == state
    assert (state.batch_size, state.nbytes) == (0, 0)
