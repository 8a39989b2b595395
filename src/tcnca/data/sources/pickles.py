"""Reading CIFAR-10's pickled batches without running anything that a pickle may ask for."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnca.errors import DataError

_PIXELS = 3 * 32 * 32


def load_batch(data: bytes, where: str) -> tuple[NDArray[np.uint8], list[int]]:
    """Pixels `[images, 3072]` and labels of a batch."""
    try:
        batch = _Unpickler(data, where).load()
    except DataError:
        raise
    except Exception as error:
        # A damaged pickle can raise nearly anything.
        raise DataError(f"{where}: cannot be unpickled ({error}); fetch it again") from error
    if not isinstance(batch, dict):
        raise DataError(f"{where}: holds a {type(batch).__name__}, expected is a dictionary; fetch it again")
    # Python 2 wrote the names as bytes.
    named = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
    pixels, labels = named.get("data"), named.get("labels")
    if not isinstance(pixels, _Array) or pixels.array.shape[1:] != (_PIXELS,):
        raise DataError(f"{where}: has no data of bytes [images, {_PIXELS:,}]; fetch it again")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError(f"{where}: has no labels that are a list of whole numbers; fetch it again")
    if len(labels) != len(pixels.array):
        raise DataError(f"{where}: has {len(pixels.array):,} images and {len(labels):,} labels; fetch it again")
    return pixels.array, labels


class _Bytes:
    """Stands for NumPy's type of bytes. NumPy's own would take any state, and call bytes objects to be followed."""

    def __setstate__(self, state: object) -> None:
        """Nothing that a pickle says of it is needed."""


class _Array:
    """Stands for an array, which becomes one of bytes by its state."""

    array: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def __setstate__(self, state: tuple[object, tuple[int, ...], object, object, bytes]) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Bytes) or not isinstance(raw, bytes):
            raise ValueError("an array that does not hold bytes")
        self.array = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Unpickler(pickle.Unpickler):
    """Makes arrays of bytes, and nothing else."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name in the pickle."""
        allowed = {
            # Called with a type, a shape and a letter, none of which the array keeps.
            "numpy.core.multiarray._reconstruct": lambda *_: _Array(),
            "numpy._core.multiarray._reconstruct": lambda *_: _Array(),
            "numpy.ndarray": _Array,
            "numpy.dtype": self._dtype,
            "_codecs.encode": self._encode,
        }
        if f"{module}.{name}" not in allowed:
            raise DataError(
                f"{self._where}: wants to call {module}.{name}, which no batch of CIFAR-10 does; it may be malicious, "
                "delete it and fetch it again"
            )
        return allowed[f"{module}.{name}"]

    def _dtype(self, name: str | bytes, align: object = False, copy: object = True) -> _Bytes:
        if name not in ("u1", b"u1"):
            raise DataError(f"{self._where}: holds an array of {name!r}, expected are bytes; fetch it again")
        return _Bytes()

    def _encode(self, text: str, encoding: str | bytes) -> bytes:
        if encoding not in ("latin1", b"latin1"):
            raise DataError(f"{self._where}: holds bytes in the encoding {encoding!r}; fetch it again")
        return text.encode("latin1")
