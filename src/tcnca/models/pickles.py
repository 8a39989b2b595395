"""Reads pickles, and files of `torch.save`, as data: what they name is not imported, what they call is not called.

`torch.load(weights_only=True)` does not run code either, but small files can crash it (a key that is a deeply nested
tuple) or fill the memory (compressed entries, tensors larger than the file). Here a pickle is a list of instructions
that builds dictionaries, lists, tuples and plain values; a class is its name and a call is a record of it.
"""

from __future__ import annotations

import dataclasses
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcnca.errors import CheckpointError, shown
from tcnca.files import check_regular

_MAX_PICKLE = 2**25
"""Bytes of the pickle in a file of `torch.save`, whose tensors are in other entries."""
_MAX_INSTRUCTIONS = 2**21
"""Instructions of a pickle, which take about 3 s. A tensor has about 40."""
_DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
# Names of plain values besides those of storages. None of them is imported; of others, a file is refused.
_KNOWN = {
    "__builtin__.bytearray",
    "__builtin__.complex",
    "__builtin__.set",
    "_codecs.encode",
    "argparse.Namespace",
    "collections.OrderedDict",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor_v2",
    *map(str, _DTYPES.values()),
}


class Name(NamedTuple):
    """The name of a class or function."""

    name: str


class Storage(NamedTuple):
    """The values of tensors, in an entry of the file."""

    kind: Any
    key: Any


@dataclasses.dataclass(eq=False, repr=False)
class Call:
    """A call of a class or function: the object that it would return."""

    name: str
    args: Any
    state: Any = None
    """What the object would be given by `__setstate__`."""


def describe(value: Any) -> str:
    """Return what a value of a file is, for messages."""
    return f"a {value.name}" if isinstance(value, Call | Name) else f"a {type(value).__name__}"


class TorchFile:
    """A file of `torch.save`; a context manager.

    content: the object that was saved, with a `Call` for each object that is not a plain value.
    """

    def __init__(self, path: Path) -> None:
        try:
            check_regular(path)
            self._size = path.stat().st_size
            self._zip = zipfile.ZipFile(path)
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror or error})") from error
        except Exception as error:  # damaged archives can fail anywhere
            raise CheckpointError(
                f"cannot be read as a zip archive of torch.save ({error}). Files of PyTorch before 1.6 are in another "
                "format: call torch.serialization.add_safe_globals([argparse.Namespace]), read the file with "
                "torch.load(…, weights_only=True) and write it again with torch.save"
            ) from error
        try:
            self._entries = self._check_entries()
            self._storages: dict[str, bytearray] = {}
            self.content = read_pickle(self._read("data.pkl"))
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def tensor(self, name: str, value: Any) -> Tensor:
        """Return a tensor of the content; `name` is named in errors."""
        if isinstance(value, Call) and value.name == "torch._utils._rebuild_parameter" and type(value.args) is tuple:
            value = value.args[0] if value.args else None
        if not isinstance(value, Call) or value.name != "torch._utils._rebuild_tensor_v2":
            raise CheckpointError(f"{name}: expected a tensor, got {describe(value)}")
        match value.args:
            case (Storage(Name(kind), str(key)), int(offset), tuple(shape), tuple(strides), *_) if kind in _DTYPES:
                sizes = [offset, *shape, *strides]
                if all(type(size) is int and 0 <= size <= self._size for size in sizes) and len(shape) == len(strides):
                    return self._view(name, _DTYPES[kind], key, offset, shape, strides)
        raise CheckpointError(f"{name}: expected a dense tensor of numbers, got {shown(value.args)}")

    def _view(
        self, name: str, dtype: torch.dtype, key: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> Tensor:
        """Return a tensor whose shape and strides have been compared with the size of its storage."""
        entry, number, last = self._entries.get(f"data/{key}"), 1, offset
        for size, stride in zip(shape, strides, strict=True):
            number *= size
            last += (size - 1) * stride
        held = 0 if entry is None else entry.file_size // dtype.itemsize
        # The number of values is compared too: with strides of 0 a few stand for any number.
        if entry is None or number > held or (number and last >= held):
            raise CheckpointError(
                f"{name}: expected a tensor inside of its storage of {held} values, got shape {shown(shape)} with "
                f"strides {shown(strides)} from {shown(offset)}"
            )
        if not number:
            return torch.empty(shape, dtype=dtype)
        if key not in self._storages:
            self._storages[key] = bytearray(self._read(f"data/{key}"))
        values = torch.frombuffer(self._storages[key], dtype=dtype, count=held)
        return values.as_strided(shape, strides, offset).clone()

    def _check_entries(self) -> dict[str, zipfile.ZipInfo]:
        """Return the entries of the archive by their names in its folder, if they can be read in bounded memory."""
        infos = self._zip.infolist()
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise CheckpointError("expected a file of torch.save, which compresses nothing, got compressed entries")
        if any(info.file_size != info.compress_size for info in infos):
            raise CheckpointError("expected entries of one size, got some with another size than they have in the file")
        if sum(info.file_size for info in infos) > self._size:
            raise CheckpointError(f"expected entries of together at most {self._size:,} bytes, the file's, got more")
        entries = {info.filename.partition("/")[2]: info for info in infos}
        if len(entries) != len(infos) or "data.pkl" not in entries:
            raise CheckpointError("expected a file of torch.save, one folder with data.pkl, got another archive")
        if entries["data.pkl"].file_size > _MAX_PICKLE:
            size = entries["data.pkl"].file_size
            raise CheckpointError(f"data.pkl: expected at most {_MAX_PICKLE:,} bytes, got {size:,}")
        return entries

    def _read(self, name: str) -> bytes:
        try:
            return self._zip.read(self._entries[name])
        except Exception as error:  # damaged archives can fail anywhere
            raise CheckpointError(f"{name}: cannot be read ({error}); is the file complete?") from error


def read_pickle(content: bytes) -> Any:
    """Return the object that a pickle of protocol 2 stands for, with a `Call` for each that is not a plain value.

    A string of Python 2 is a text of which each character is a byte. A key that is no plain value, whose hash could be
    expensive or exhaust the stack, is a `Call`, which is equal to nothing else.
    """
    try:
        return _run(content)
    except CheckpointError:
        raise
    except Exception as error:  # any instruction can be wrong
        raise CheckpointError(f"cannot be read as a pickle ({shown(str(error))[1:-1]})") from error


_ARGUMENTS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "BINSTRING"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_KEYS = (str, int, float, bool, type(None))
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _run(content: bytes) -> Any:
    """Run the instructions of pickle protocol 2, the one of `torch.save`."""
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}
    argument: Any
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        name = opcode.name
        if number == _MAX_INSTRUCTIONS:
            raise ValueError(f"more than {_MAX_INSTRUCTIONS:,} instructions")
        if name in _ARGUMENTS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "MARK":
            marks.append(stack)
            stack = []
        elif name in ("TUPLE", "APPENDS", "SETITEMS"):
            items, stack = stack, marks.pop()
            _add(stack, name, items)
        elif name in ("APPEND", "SETITEM"):
            count = 1 if name == "APPEND" else 2
            items = stack[-count:]
            del stack[-count:]
            _add(stack, f"{name}S", items)
        elif name == "GLOBAL":
            stack.append(_known(argument.replace(" ", ".", 1)))
        elif name in ("REDUCE", "NEWOBJ"):
            args, function = stack.pop(), stack.pop()
            if not isinstance(function, Name):
                raise TypeError("a call of a value")
            empty = function.name == "collections.OrderedDict" and args == ()
            stack.append({} if empty else Call(function.name, args))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Call):
                stack[-1].state = state
        elif name == "BINPERSID":
            _, kind, key, _, _ = stack.pop()
            stack.append(Storage(kind, key))
        elif name == "STOP":
            return stack.pop()
        elif name != "PROTO":
            raise ValueError(f"the instruction {name}")
    raise ValueError("no end")


def _add(stack: list[Any], name: str, items: list[Any]) -> None:
    """Push a tuple of `items`, or add them to the list or dictionary on the stack."""
    if name == "TUPLE":
        stack.append(tuple(items))
    elif name == "APPENDS":
        if type(stack[-1]) is not list:
            raise TypeError("values of no list")
        stack[-1].extend(items)
    else:
        if type(stack[-1]) is not dict:
            raise TypeError("keys of no dictionary")
        keys = (key if type(key) in _KEYS else Call("key", key) for key in items[::2])
        stack[-1].update(zip(keys, items[1::2], strict=True))


def _known(name: str) -> Name:
    if name not in _KNOWN and not (name.startswith("torch.") and name.endswith("Storage")):
        raise CheckpointError(
            "cannot be read as tensors, arrays, plain values and a namespace of arguments. Anything else is refused, "
            f"because loading it could run code (found: {shown(name)[1:-1]})"
        )
    return Name(name)
