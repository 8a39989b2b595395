"""The base class of all streaming states.

A state is a frozen dataclass whose fields are tensors, other states, tuples of these, strings, or None. The first
dimension of every tensor is the batch, which is enough to repeat and reorder sequences, move a state between devices
and count its bytes without knowing what it is for. A tensor called `position` holds the tokens seen so far.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from tcnca.errors import ConfigError, StateError, TcncaError, shown
from tcnca.files import check_regular, parse_json
from tcnca.ops.checks import has_float64
from tcnca.ops.padding import take_time

_MAX_HEADER = 2**24
"""Bytes of the header of a safetensors file. A tensor takes about a hundred."""
_MAX_DEPTH = 16
"""Levels of states in states, in files."""
MAX_POSITION = 2**53
"""Tokens that a state can have seen."""
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that weights and states can have."""
_CLASSES: dict[str, type[State]] = {}
"""All classes of states, by name: what a file can contain."""


@dataclasses.dataclass(frozen=True)
class State:
    """Base class of the streaming states.

    Subclasses are frozen dataclasses. They are registered with PyTorch's pytree, so that `torch.compile` and
    `torch.export` support them.
    """

    _format: ClassVar[str] = "tcnca-state-3"  # of files; it changes with the fields that they need
    _sums: ClassVar[frozenset[str]] = frozenset()  # fields that are sums over the whole past
    # Fields `[batch, size, channels]` in which a call writes the token at time `t` to slot `t mod size`.
    _rings: ClassVar[frozenset[str]] = frozenset()
    _replaced: ClassVar[bool] = False  # whether a call with inplace=True makes new tensors, and overwrites none

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _CLASSES[cls.__name__] = cls
        # Set before the dataclass decorator would add one that prints every tensor.
        cls.__repr__ = State.__repr__  # type: ignore[method-assign]
        if cls.__module__.startswith("tcnca."):
            # They contain tensors and no code, so `torch.load(weights_only=True)` may read them.
            torch.serialization.add_safe_globals([cls])
        pytree.register_pytree_node(
            cls,
            _flatten,
            functools.partial(_unflatten, cls),
            serialized_type_name=f"tcnca.{cls.__name__}",
            flatten_with_keys_fn=_flatten_with_keys,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={self.batch_size}, nbytes={self.nbytes:,})"

    def consume(self) -> None:
        """Mark this state as consumed: its memory belongs to the next one."""
        object.__setattr__(self, "_consumed", True)

    def check_not_consumed(self) -> None:
        """Raise an error if a call with `inplace=True` has consumed this state."""
        if getattr(self, "_consumed", False):
            raise StateError(
                "state: expected the state that the last call returned, got one that a call with inplace=True has "
                "consumed; clone() it before the call, or omit inplace, to continue from it twice"
            )

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return a new state with `function` applied to every tensor."""
        self.check_not_consumed()
        return pytree.tree_map_only(Tensor, function, self)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its dotted name, for example `layers.0.attention.keys`."""
        return {name: leaf for name, leaf in _leaves(self).items() if leaf is not None}

    @property
    def batch_size(self) -> int:
        """Number of sequences; 0 if the state has no tensors."""
        return next((tensor.shape[0] for tensor in self.tensors().values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the state's tensors; a shared tensor counts once."""
        distinct = {id(tensor): tensor for tensor in self.tensors().values()}
        return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())

    def detach(self) -> Self:
        """Return the same values without their autograd graph. The memory is shared, even with `inplace`."""
        return self.map(torch.Tensor.detach)

    def clone(self) -> Self:
        """Return a copy that shares no memory with this state."""
        return self.map(torch.clone)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return a copy on another device or in another floating dtype, with the arguments of `torch.nn.Module.to`.

        Positions keep their dtype, and sums over the past their precision: with fewer digits they would stop growing.
        """
        self.check_not_consumed()
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self._to(device, dtype, non_blocking)

    def _to(self, device: torch.device | None, dtype: torch.dtype | None, non_blocking: bool) -> Self:
        def moved(value: Any, kind: torch.dtype | None) -> Any:
            if isinstance(value, State):
                return value._to(device, dtype, non_blocking)
            if isinstance(value, tuple):
                return tuple(moved(item, kind) for item in value)
            if not isinstance(value, Tensor):
                return value
            target = kind if kind is not None and value.is_floating_point() else value.dtype
            if target == torch.float64 and not has_float64(value.device if device is None else device):
                target = torch.float32
            return value.to(device=device, dtype=target, non_blocking=non_blocking, copy=True)

        changed = {}
        for field in dataclasses.fields(self):
            least = self._least_dtype(field.name)
            kind = dtype if dtype is None or least is None else torch.promote_types(dtype, least)
            changed[field.name] = moved(getattr(self, field.name), kind)
        return dataclasses.replace(self, **changed)

    def _least_dtype(self, field: str) -> torch.dtype | None:
        """Return the dtype that a field has at least, or None if it has the dtype of the model."""
        return torch.float64 if field in self._sums else None

    def repeat(self, times: int) -> Self:
        """Repeat each sequence `times` times: `[a, b]` becomes `[a, a, b, b]`."""
        if not isinstance(times, int) or times < 1:
            raise StateError(f"times: expected an integer of at least 1, got {times!r}")
        return self.map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def reorder(self, index: Tensor | Sequence[int]) -> Self:
        """Return the sequences `index` (`[new_batch]`, integers below the batch size), in that order."""
        index = torch.as_tensor(index)
        if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise StateError(f"index: expected one dimension of integers, got {list(index.shape)} of {index.dtype}")
        if not self.tensors():
            return self  # a state of a model without parts, for any number of sequences
        batch = self.batch_size
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < batch:
            raise StateError(f"index: expected values from 0 to {batch - 1}, the state's batch, got {index.tolist()}")
        return self.map(lambda tensor: tensor.index_select(0, index.to(tensor.device, torch.long)))

    @classmethod
    def cat(cls, states: Sequence[Self]) -> Self:
        """Return one state with the sequences of several states of one model, in their order."""
        if not states:
            raise StateError("states: expected at least 1, got none")
        for state in states:
            state.check_not_consumed()
        first, *others = (pytree.tree_flatten(state) for state in states)
        if any(structure != first[1] for _, structure in others):
            raise StateError("states: expected states of one model, got those of several")
        parts = zip(first[0], *(leaves for leaves, _ in others), strict=True)
        return pytree.tree_unflatten([None if same[0] is None else _cat(same) for same in parts], first[1])

    def snapshot(self, max_tokens: int) -> Snapshot[Self]:
        """Keep what the next `max_tokens` tokens of each sequence will overwrite, for `rollback`.

        Only calls with `inplace=True` overwrite a state. Without it, the earlier state is the snapshot. A snapshot
        copies `max_tokens + 1` slots of each ring buffer and chunk, where `clone` copies all of them.
        """
        self.check_not_consumed()
        return Snapshot(self, max_tokens)

    def rollback(self, snapshot: Snapshot[Self]) -> Self:
        """Return the state as it was when `snapshot` was made, to the bit, in its own memory.

        This state must have followed from it by calls with `inplace=True` that read at most `max_tokens` tokens of each
        sequence, and cannot be used again. A snapshot can be used several times, until the state is rolled back to an
        earlier one.
        """
        self.check_not_consumed()
        return snapshot.restore(self)

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file."""
        self.check_not_consumed()
        metadata = {"format": self._format, "structure": json.dumps(_encode(self))}
        save_file({name: tensor.contiguous().clone() for name, tensor in self.tensors().items()}, path, metadata)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> Self:
        """Read a state that `save` wrote."""
        tensors, metadata = read_tensors(Path(path), StateError)
        if metadata.get("format") != cls._format:
            raise StateError(f"{path}: expected format {cls._format!r}, got {shown(metadata.get('format'))}")
        try:
            state = _decode(parse_json(metadata.get("structure", "")), tensors, "", 0)
            if not isinstance(state, cls):
                raise StateError(f"expected a {cls.__name__}, got {_described(state)}")
            if tensors:
                raise StateError(f"expected no tensors besides those of the state, got {shown(sorted(tensors))}")
            _check_tensors(state)
        except (StateError, ConfigError) as error:
            raise StateError(f"{path}: {error}") from error
        # Copied: the file may change while it is mapped.
        return state.map(lambda tensor: tensor.to(device, copy=True))


AnyState = TypeVar("AnyState", bound=State)


class Snapshot(Generic[AnyState]):
    """What the next `max_tokens` tokens will overwrite in a state; see `State.snapshot`."""

    def __init__(self, state: AnyState, max_tokens: int) -> None:
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise StateError(f"max_tokens: expected an integer of at least 1, got {max_tokens!r}")
        self.max_tokens = max_tokens
        # The same memory, which calls overwrite or leave alone, but never free.
        self._state = state.map(torch.Tensor.detach)
        # A call of one token also writes the next slot of a row in which that token is padding.
        self._saved = [(part, _save_slots(part, max_tokens + 1)) for part in _overwritten(self._state)]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        copies = [tensor for _, saved in self._saved for tensor in saved if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in copies)

    def restore(self, state: AnyState) -> AnyState:
        """Roll back a state that followed from that of the snapshot; see `State.rollback`."""
        self._check(state)
        for part, (slots, values) in self._saved:
            if slots is None:
                part.tensor.copy_(values)
            else:
                part.tensor.scatter_(1, slots.unsqueeze(-1).expand_as(values), values)
        state.consume()
        return self._state.map(lambda tensor: tensor)

    def _check(self, state: AnyState) -> None:
        now, before = _overwritten(state), self._saved
        if pytree.tree_structure(state) != pytree.tree_structure(self._state) or len(now) != len(before):
            raise StateError("snapshot: expected one of this state, got one of another model")
        positions = [
            (a.tensor, b.tensor, c) for a, (b, (_, c)) in zip(now, before, strict=True) if a.name == "position"
        ]
        if not positions:
            return
        shared = [(new, saved) for new, old, saved in positions if new.data_ptr() == old.data_ptr()]
        if not shared:
            raise StateError(
                "snapshot: expected one of this state, got one of another state; a state continues from a snapshot by "
                "calls with inplace=True, and without it the earlier state is still valid"
            )
        read = shared[0][0] - shared[0][1]
        if bool(((read < 0) | (read > self.max_tokens)).any()):
            raise StateError(
                f"snapshot: expected 0 to {self.max_tokens} tokens (max_tokens) since it was made, got {read.tolist()}"
            )


class _Part(NamedTuple):
    """A tensor of a state; `position` (`[batch]`) says where a ring buffer is written next, and is None for others."""

    name: str
    tensor: Tensor
    position: Tensor | None


def _overwritten(state: State) -> list[_Part]:
    """Return the tensors that calls with `inplace=True` may overwrite."""

    def parts(value: Any, name: str, position: Tensor | None) -> Iterator[_Part]:
        if isinstance(value, Tensor):
            yield _Part(name, value, position)
        elif isinstance(value, tuple):
            for each in value:
                yield from parts(each, name, position)
        elif isinstance(value, State) and not value._replaced:
            for field in dataclasses.fields(value):
                ring = field.name in value._rings
                yield from parts(getattr(value, field.name), field.name, value.position if ring else None)  # type: ignore[attr-defined]

    return list(parts(state, "", None))


def _save_slots(part: _Part, count: int) -> tuple[Tensor | None, Tensor]:
    """Return the next `count` slots of a ring buffer and their values; None and a copy of any other tensor."""
    tensor, size = part.tensor, part.tensor.shape[1] if part.position is not None else 0
    if part.position is None or count >= size:
        return None, tensor.clone()
    slots = (part.position.unsqueeze(1) + torch.arange(count, device=tensor.device)) % size
    return slots, take_time(tensor, slots)


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate along the batch. Caches of full attention have a slot for each token: shorter ones are padded."""
    if tensors[0].dim() == 3:
        slots = max(tensor.shape[1] for tensor in tensors)
        tensors = [F.pad(tensor, (0, 0, 0, slots - tensor.shape[1])) for tensor in tensors]
    return torch.cat(list(tensors))


def read_tensors(path: Path, error: type[TcncaError]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file, mapped and not read, and its metadata; or raise an `error`.

    On Windows they are copies, since a file that is mapped can be neither replaced nor removed there.
    """
    try:
        check_regular(path)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise SafetensorError(f"a header of {size:,} bytes, more than {_MAX_HEADER:,}")
        with safe_open(path, framework="pt") as content:
            names = content.keys()
            tensors = {name: content.get_tensor(name) for name in names}
            if os.name == "nt":
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            return tensors, content.metadata() or {}
    except OSError as reason:
        raise error(f"{path}: cannot be read as safetensors ({reason.strerror or reason})") from reason
    except Exception as reason:  # besides its own error, safetensors raises that of a dtype that PyTorch lacks
        raise error(f"{path}: cannot be read as safetensors ({shown(str(reason))}); is the file complete?") from reason


def _encode(value: Any) -> Any:
    """Return the structure of a state for JSON: a tensor is `true`, since its name is where it stands."""
    match value:
        case State():
            fields = {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return {"state": type(value).__name__, "fields": fields}
        case tuple():
            return [_encode(each) for each in value]
        case Tensor():
            return True
    return value


def _decode(value: Any, tensors: dict[str, Tensor], name: str, depth: int) -> Any:
    """Return what `_encode` encoded, with the tensors, which are removed from `tensors`."""
    if depth > _MAX_DEPTH:
        raise StateError(f"{shown(name)}: expected at most {_MAX_DEPTH} levels of states, got more")
    match value:
        case None | str():
            return value
        case True:
            if name not in tensors:
                raise StateError(f"{shown(name)}: expected a tensor, got none; the file is damaged")
            return tensors.pop(name)
        case list():
            return tuple(_decode(each, tensors, _join(name, str(i)), depth + 1) for i, each in enumerate(value))
        case {"state": str(kind), "fields": dict(fields), **rest} if not rest:
            return _decode_state(kind, fields, tensors, name, depth)
    raise StateError(f"{shown(name)}: expected a part of a state, got {shown(value)}; the file is damaged")


def _decode_state(kind: str, fields: dict[str, Any], tensors: dict[str, Tensor], name: str, depth: int) -> State:
    cls = _CLASSES.get(kind)
    if cls is None:
        raise StateError(f"{shown(name)}: expected one of {', '.join(_CLASSES)}, got {shown(kind)}")
    expected = [field.name for field in dataclasses.fields(cls)]
    # A part with a default may be newer than the file.
    required = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
    if not required <= set(fields) <= set(expected):
        raise StateError(f"{shown(name)}: expected the fields {expected} of a {kind}, got {shown(list(fields))}")
    hints, values = typing.get_type_hints(cls), {}
    for field, value in fields.items():
        place = _join(name, field)
        values[field] = _decode(value, tensors, place, depth + 1)
        if not _fits(values[field], hints[field]):
            raise StateError(f"{shown(place)}: expected {hints[field]}, got {_described(values[field])}")
    return cls(**values)


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _described(value: Any) -> str:
    return f"a {type(value).__name__}"


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of the type of a field of a state."""
    members = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in members)
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(each, members[0]) for each in value)
    return isinstance(value, hint)


def _check_tensors(state: State) -> None:
    """Raise a StateError unless all tensors have one batch size and a dtype of states, and positions are in range."""
    batch: int | None = None
    for name, tensor in state.tensors().items():
        position = name.rpartition(".")[2] == "position"
        dtypes = (torch.int64,) if position else (*FLOAT_DTYPES, torch.int64)
        if tensor.dtype not in dtypes:
            raise StateError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
        if tensor.dim() < 1 or (position and tensor.dim() > 1):
            raise StateError(f"{name}: expected shape [batch{'' if position else ', …'}], got {list(tensor.shape)}")
        batch = tensor.shape[0] if batch is None else batch
        if tensor.shape[0] != batch:
            raise StateError(f"{name}: expected a batch of {batch}, as before, got {tensor.shape[0]}")
        if position and tensor.numel() and not 0 <= int(tensor.min()) <= int(tensor.max()) < MAX_POSITION:
            raise StateError(f"{name}: expected positions from 0 to 2^53, got {shown(tensor.tolist())}")


def _flatten(state: State) -> tuple[list[Any], list[Any]]:
    """Return the fields with tensors, and as context their names and the strings."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    names = [name for name, value in fields.items() if not isinstance(value, str)]
    return [fields[name] for name in names], [names, {k: v for k, v in fields.items() if isinstance(v, str)}]


def _unflatten(cls: type[State], values: Any, context: list[Any]) -> State:
    names, static = context
    return cls(**dict(zip(names, values, strict=True)), **static)


def _flatten_with_keys(state: State) -> tuple[list[tuple[Any, Any]], list[Any]]:
    values, context = _flatten(state)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(context[0], values, strict=True)], context


def _leaves(state: State) -> dict[str, Any]:
    """Return the tensors, and None for missing parts, by dotted name."""
    pairs, _ = pytree.tree_flatten_with_path(state)
    return {".".join(map(_key_name, path)): leaf for path, leaf in pairs}


def _key_name(key: Any) -> str:
    return key.name if isinstance(key, pytree.GetAttrKey) else str(key.idx)
