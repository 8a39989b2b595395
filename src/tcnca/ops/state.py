"""What every streaming state has in common.

A state is a frozen dataclass whose fields are tensors, other states, tuples of these, or None.
Every tensor has the batch as its first dimension, which is all that is needed to repeat and
reorder hypotheses, move between devices and count bytes without knowing what a state is for.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from tcnca.errors import StateError

_FORMAT = "tcnca-state-1"


@dataclasses.dataclass(frozen=True)
class State:
    """Base of the streaming states.

    Subclasses are frozen dataclasses. They register themselves with PyTorch's pytree, so that
    `torch.compile` and `torch.export` see through them, and by name, so that `load` finds them.
    """

    _classes: ClassVar[dict[str, type[State]]] = {}
    _sums: ClassVar[frozenset[str]] = frozenset()  # fields that sum over the whole past

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Set before the dataclass decorator would add one that prints every tensor.
        cls.__repr__ = State.__repr__  # type: ignore[method-assign]
        State._classes[cls.__name__] = cls
        if cls.__module__.startswith("tcnca."):
            # Ours hold tensors and nothing that runs: `torch.load` may read them without trusting the file.
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
        """Mark this state as used up: its memory belongs to the one that followed it."""
        object.__setattr__(self, "_consumed", True)

    def check_not_consumed(self) -> None:
        """Raise an error if this state was used up by a call with `inplace=True`."""
        if getattr(self, "_consumed", False):
            raise StateError(
                "state: was used up by a call with inplace=True, allowed is the state that call returned; "
                "clone() a state before, or leave inplace out, to go on from it twice"
            )

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A new state with `function` applied to every tensor."""
        self.check_not_consumed()
        changed = {field.name: _map(getattr(self, field.name), function) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **changed)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its dotted name, for example `layers.0.attention.keys`."""
        return dict(_walk(self, ""))

    @property
    def batch_size(self) -> int:
        """Number of sequences that the state belongs to; 0 if it holds nothing."""
        return next((tensor.shape[0] for tensor in self.tensors().values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes held by the state's tensors, a tensor shared by several parts counted once."""
        distinct = {id(tensor): tensor for tensor in self.tensors().values()}
        return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())

    def detach(self) -> Self:
        """The same values, cut from the graph that computed them. The memory is shared, also with `inplace`."""
        return self.map(torch.Tensor.detach)

    def clone(self) -> Self:
        """A copy that shares no memory with this state."""
        return self.map(torch.clone)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """A copy on another device or of another floating type, with the arguments of `torch.nn.Module.to`.

        Positions keep their type, and sums over the whole past stay in float32 at least: they would stop growing
        in half precision.
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
            return value.to(device=device, dtype=target, non_blocking=non_blocking, copy=True)

        wide = None if dtype is None else torch.promote_types(dtype, torch.float32)
        names = [field.name for field in dataclasses.fields(self)]
        changed = {name: moved(getattr(self, name), wide if name in self._sums else dtype) for name in names}
        return dataclasses.replace(self, **changed)

    def repeat(self, times: int) -> Self:
        """Repeat each sequence `times` times, side by side: `[a, b]` becomes `[a, a, b, b]`."""
        if not isinstance(times, int) or times < 1:
            raise StateError(f"times: got {times!r}, allowed is a whole number of at least 1")
        return self.map(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def reorder(self, index: Tensor | Sequence[int]) -> Self:
        """Take the sequences `index` (`[new_batch]`, whole numbers below the batch size), in that order."""
        index = torch.as_tensor(index)
        if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise StateError(
                f"index: got shape {list(index.shape)} of {index.dtype}, allowed is one dimension of whole numbers"
            )
        batch = self.batch_size
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < batch:
            raise StateError(f"index: got values {index.tolist()}, allowed are 0 to {batch - 1}, the state's batch")
        return self.map(lambda tensor: tensor.index_select(0, index.to(tensor.device, torch.long)))

    def save(self, path: str | Path) -> None:
        """Write the state to one safetensors file."""
        self.check_not_consumed()
        metadata = {"format": _FORMAT, "structure": json.dumps(_describe(self))}
        save_file({name: tensor.contiguous().clone() for name, tensor in self.tensors().items()}, path, metadata)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> Self:
        """Read a state that `save` wrote."""
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        except (OSError, SafetensorError) as error:
            raise StateError(f"{path}: cannot be read as safetensors ({error})") from error
        if metadata.get("format") != _FORMAT:
            raise StateError(f"{path}: got format {metadata.get('format')!r}, allowed is {_FORMAT!r}")
        try:
            state = _rebuild(json.loads(metadata["structure"]), "", tensors)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise StateError(f"{path}: is no whole state: {error!r} does not fit its structure") from error
        if not isinstance(state, cls):
            raise StateError(f"{path}: got a {type(state).__name__}, allowed is a {cls.__name__}")
        return state


def _flatten(state: State) -> tuple[list[Any], list[Any]]:
    """The fields that hold tensors, and as context their names and whatever else the state holds (strings)."""
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    names = [name for name, value in fields.items() if not isinstance(value, str)]
    return [fields[name] for name in names], [names, {k: v for k, v in fields.items() if isinstance(v, str)}]


def _unflatten(cls: type[State], values: Any, context: list[Any]) -> State:
    names, static = context
    return cls(**dict(zip(names, values, strict=True)), **static)


def _flatten_with_keys(state: State) -> tuple[list[tuple[Any, Any]], list[Any]]:
    values, context = _flatten(state)
    return [(pytree.GetAttrKey(name), value) for name, value in zip(context[0], values, strict=True)], context


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, State):
        return value.map(function)
    if isinstance(value, tuple):
        return tuple(_map(item, function) for item in value)
    return value


def _walk(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, State):
        for field in dataclasses.fields(value):
            yield from _walk(getattr(value, field.name), f"{name}.{field.name}".lstrip("."))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _walk(item, f"{name}.{index}".lstrip("."))


def _describe(value: Any) -> Any:
    """The structure of a state as JSON, its tensors left out."""
    if isinstance(value, State):
        fields = {field.name: _describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"state": type(value).__name__, "fields": fields}
    if isinstance(value, tuple):
        return [_describe(item) for item in value]
    if isinstance(value, Tensor):
        return {"tensor": True}
    return value


def _rebuild(described: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(described, list):
        return tuple(_rebuild(item, f"{name}.{index}".lstrip("."), tensors) for index, item in enumerate(described))
    if isinstance(described, dict) and "tensor" in described:
        return tensors[name]
    if isinstance(described, dict):
        cls = State._classes.get(described["state"])
        if cls is None:
            raise StateError(f"state: got kind {described['state']!r}, allowed are {sorted(State._classes)}")
        fields = cast(dict[str, Any], described["fields"])
        return cls(**{key: _rebuild(item, f"{name}.{key}".lstrip("."), tensors) for key, item in fields.items()})
    return described
