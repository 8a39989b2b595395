"""The base class of all streaming states.

A state is a frozen dataclass whose fields are tensors, other states, tuples of these, strings, or None. The first
dimension of every tensor is the batch, which is enough to repeat and reorder sequences, move a state between devices
and count its bytes without knowing what it is for.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

from tcnca.errors import StateError

_FORMAT = "tcnca-state-2"


@dataclasses.dataclass(frozen=True)
class State:
    """Base class of the streaming states.

    Subclasses are frozen dataclasses. They are registered with PyTorch's pytree, so that `torch.compile` and
    `torch.export` support them.
    """

    _sums: ClassVar[frozenset[str]] = frozenset()  # fields that are sums over the whole past

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
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

        Positions keep their dtype, and sums over the past their precision: in half precision they would stop growing.
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

        changed = {}
        for field in dataclasses.fields(self):
            least = self._least_dtype(field.name)
            kind = dtype if dtype is None or least is None else torch.promote_types(dtype, least)
            changed[field.name] = moved(getattr(self, field.name), kind)
        return dataclasses.replace(self, **changed)

    def _least_dtype(self, field: str) -> torch.dtype | None:
        """Return the dtype that a field has at least, or None if it has the dtype of the model."""
        return torch.float32 if field in self._sums else None

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
        batch = self.batch_size
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < batch:
            raise StateError(f"index: expected values from 0 to {batch - 1}, the state's batch, got {index.tolist()}")
        return self.map(lambda tensor: tensor.index_select(0, index.to(tensor.device, torch.long)))

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file."""
        self.check_not_consumed()
        structure = pytree.treespec_dumps(pytree.tree_structure(self))
        names = [None if leaf is None else name for name, leaf in _leaves(self).items()]
        metadata = {"format": _FORMAT, "structure": structure, "names": json.dumps(names)}
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
            raise StateError(f"{path}: expected format {_FORMAT!r}, got {metadata.get('format')!r}")
        try:
            leaves = [None if name is None else tensors[name] for name in json.loads(metadata["names"])]
            state = pytree.tree_unflatten(leaves, pytree.treespec_loads(metadata["structure"]))
        except (KeyError, TypeError, ValueError, NotImplementedError) as error:
            raise StateError(f"{path}: expected a complete state, got a damaged one ({error!r})") from error
        if not isinstance(state, cls):
            raise StateError(f"{path}: expected a {cls.__name__}, got a {type(state).__name__}")
        return state


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
