"""Image of Long-Range Arena: classify a grayscale CIFAR-10 image, read pixel by pixel."""

from __future__ import annotations

import hashlib
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnca.data.archives import (
    RETRY,
    archive_errors,
    check_exists,
    compression,
    iter_members,
    open_decompressed,
    read_limited,
)
from tcnca.data.datasets.spec import DatasetSpec, Download
from tcnca.data.schema import Content
from tcnca.data.tasks import ClassificationTask
from tcnca.errors import DataError

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
COUNTS = {"train": 50_000, "test": 10_000}
# Published md5 sums of the pickled files.
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
# sha256 of the grayscale pixels and of the labels as bytes, in the published order.
DIGESTS = {
    "train_images": "f346c5f19e1cde45025299d0b5224a35d90eebcae6b08126508785ecb7953bcb",
    "train_labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "test_images": "da6570c8fc30598084b7026f0db9189359f487774fe45dee03ff80287878c887",
    "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}

_FOLDERS = ("", "cifar-10-batches-py", "cifar-10-batches-bin")
_ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz")
_SIDE = 32
_PIXELS = _SIDE * _SIDE
_RECORD = 1 + 3 * _PIXELS
_MAX_BATCH = 1 << 26
_MAX_ARRAYS = 1 << 29

Arrays = dict[str, NDArray[np.uint8]]


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read the archive or folder of the Python or binary version, an npz, or a folder that has one.

    The npz, which may be compressed again, has the arrays `train_images`, `train_labels`, `test_images` and
    `test_labels`; its images are in grayscale or color. The last tenth of the training images is the validation split.
    """
    path = _find(origin)
    arrays = _read_arrays(path) if _has_arrays(path) else _read_batches(path, unverified)
    verified = _check(path, arrays, unverified)
    images, labels = arrays["train_images"], arrays["train_labels"].astype(np.int64)
    cut = len(images) * 9 // 10
    return Content(
        kind="classification",
        splits={
            "train": [{"pixels": images[:cut], "labels": labels[:cut]}],
            "validation": [{"pixels": images[cut:], "labels": labels[cut:]}],
            "test": [{"pixels": arrays["test_images"], "labels": arrays["test_labels"].astype(np.int64)}],
        },
        origin=path.resolve().name,
        verified=verified,
        metadata={"class_names": list(CLASS_NAMES)},
    )


def gray(red: NDArray[np.uint8], green: NDArray[np.uint8], blue: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Compute the luma of ITU-R 601 in the fixed-point arithmetic of Pillow, which is the same on every machine."""
    sums = 19595 * red.astype(np.uint32) + 38470 * green.astype(np.uint32) + 7471 * blue.astype(np.uint32)
    return ((sums + 32768) >> 16).astype(np.uint8)


def _find(origin: Path) -> Path:
    check_exists(origin)
    if origin.is_file():
        return origin
    for folder in _FOLDERS:
        if any((origin / folder / f"{name}{suffix}").is_file() for name in MD5 for suffix in ("", ".bin")):
            return origin / folder
    for name in _ARCHIVES:
        if (origin / name).is_file():
            return origin / name
    found = sorted(path for path in origin.glob("*.npz*") if path.is_file())
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none of them"
        raise DataError(
            f"{origin}: expected data_batch_1, {', '.join(_ARCHIVES)} or one .npz, got {names}; give the file or "
            "folder itself"
        )
    return found[0]


def _has_arrays(path: Path) -> bool:
    """Return whether the file is an npz, possibly compressed again."""
    if path.is_dir():
        return False
    if compression(path) == "zip":
        with archive_errors(path), zipfile.ZipFile(path) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())
    with open_decompressed(path) as reader:
        return reader.read(4) == b"PK\x03\x04"


def _read_arrays(path: Path) -> Arrays:
    """Read the arrays of an npz and convert the images to grayscale."""
    if compression(path) == "zip":
        file = io.BytesIO(path.read_bytes())
    else:
        with open_decompressed(path) as reader:
            file = io.BytesIO(read_limited(reader, path, _MAX_ARRAYS))
    arrays: Arrays = {}
    with archive_errors(path), zipfile.ZipFile(file) as archive:
        size = sum(info.file_size for info in archive.infolist())
        if size > _MAX_ARRAYS:
            raise DataError(
                f"{path}: expected at most {_MAX_ARRAYS:,} bytes, got {size:,}; check that it is the right file"
            )
        for name in DIGESTS:
            if f"{name}.npy" not in archive.namelist():
                raise DataError(f"{path}: expected the arrays {', '.join(DIGESTS)}, got no {name}; add it")
            with archive.open(f"{name}.npy") as member:
                arrays[name] = _array(member, f"{path}: {name}")
    return arrays


def _array(member: Any, where: str) -> NDArray[np.uint8]:
    try:
        array = np.lib.format.read_array(member, allow_pickle=False)
    except (ValueError, EOFError, MemoryError, SyntaxError) as error:
        raise DataError(f"{where}: is not a plain array ({error}); save it as uint8") from error
    if where.endswith("labels"):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(f"{where}: expected integers of shape [images], got {array.dtype} of shape {array.shape}")
        return _labels(array, where)
    if array.dtype != np.uint8 or array.shape[1:] not in ((_SIDE, _SIDE), (_SIDE, _SIDE, 3)):
        raise DataError(
            f"{where}: expected uint8 of shape [images, 32, 32] or [images, 32, 32, 3], got {array.dtype} of shape "
            f"{array.shape}"
        )
    if array.ndim == 3:
        return array
    # In parts, since the sums need four times the memory of the pixels.
    return np.concatenate([gray(*np.moveaxis(part, -1, 0)) for part in np.array_split(array, 1 + len(array) // 10_000)])


def _labels(labels: Any, where: str) -> NDArray[np.uint8]:
    array = np.asarray(labels)
    wrong = np.flatnonzero((array < 0) | (array >= len(CLASS_NAMES)))
    if len(wrong):
        raise DataError(f"{where}: expected labels 0 to 9, got {array[wrong[0]]} for image {wrong[0]:,}; {RETRY}")
    return array.astype(np.uint8)


def _read_batches(path: Path, unverified: bool) -> Arrays:
    """Read the batches of the Python or binary version and convert the images to grayscale."""
    batches: dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]] = {}
    for name, reader in iter_members(path):
        batch, dot, suffix = name.rpartition("/")[2].partition(".")
        if batch in MD5 and dot + suffix in ("", ".bin"):
            where = f"{path}: {name}"
            data = read_limited(reader, where, _MAX_BATCH)
            batches[batch] = _binary(data, where) if suffix else _pickled(data, batch, where, unverified)
    missing = [batch for batch in MD5 if batch not in batches]
    if missing:
        raise DataError(f"{path}: is incomplete, {', '.join(missing)} not found; download it again")
    train, test = [batches[batch] for batch in MD5 if batch != "test_batch"], batches["test_batch"]
    return {
        "train_images": np.concatenate([images for images, _ in train]),
        "train_labels": np.concatenate([labels for _, labels in train]),
        "test_images": test[0],
        "test_labels": test[1],
    }


def _binary(data: bytes, where: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if not data or len(data) % _RECORD:
        raise DataError(
            f"{where}: expected a multiple of {_RECORD:,} bytes (a label and 32×32 pixels of three bytes), got "
            f"{len(data):,}; download it again"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    return _planes(records[:, 1:]), _labels(records[:, 0], where)


def _pickled(data: bytes, batch: str, where: str, unverified: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != MD5[batch] and not unverified:
        raise DataError(f"{where}: expected the md5 checksum {MD5[batch]}, got {found}; {RETRY}")
    pixels, labels = unpickle_batch(data, where)
    return _planes(pixels), _labels(labels, where)


def _planes(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return gray(*np.moveaxis(pixels.reshape(-1, 3, _SIDE, _SIDE), 1, 0))


def _check(path: Path, arrays: Arrays, unverified: bool) -> bool:
    for split, count in COUNTS.items():
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if len(images) != len(labels):
            raise DataError(f"{path}: expected {len(images):,} labels in {split}, got {len(labels):,}; {RETRY}")
        if len(images) != count and not unverified:
            raise DataError(f"{path}: expected {count:,} images in {split}, got {len(images):,}; {RETRY}")
        if len(images) < 2:
            raise DataError(f"{path}: expected at least 2 images in {split}, got {len(images)}; add images")
    for name, expected in DIGESTS.items():
        found = hashlib.sha256(arrays[name].tobytes()).hexdigest()
        if found != expected:
            if not unverified:
                raise DataError(f"{path}: expected the checksum {expected} of {name} in gray, got {found}; {RETRY}")
            return False
    return True


def unpickle_batch(data: bytes, where: str) -> tuple[NDArray[np.uint8], list[int]]:
    """Return pixels `[images, 3072]` and labels of a pickled batch without executing what the pickle asks for."""
    try:
        batch = _SafeUnpickler(data, where).load()
    except DataError:
        raise
    except Exception as error:
        # A damaged pickle can raise almost anything.
        raise DataError(f"{where}: cannot be unpickled ({error}); download it again") from error
    if not isinstance(batch, dict):
        raise DataError(f"{where}: expected a dictionary, got a {type(batch).__name__}; download it again")
    # Python 2 wrote the names as bytes.
    named = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
    pixels, labels = named.get("data"), named.get("labels")
    if not isinstance(pixels, _Array) or pixels.array.shape[1:] != (3 * _PIXELS,):
        raise DataError(f"{where}: expected data of bytes [images, {3 * _PIXELS:,}]; download it again")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError(f"{where}: expected labels that are a list of integers; download it again")
    if len(labels) != len(pixels.array):
        raise DataError(f"{where}: expected {len(pixels.array):,} labels, got {len(labels):,}; download it again")
    return pixels.array, labels


class _ByteType:
    """Replaces NumPy's dtype of bytes, which would accept any state, including references to bytes objects."""

    def __setstate__(self, state: object) -> None:
        """Ignore the state."""


class _Array:
    """Replaces an array; its state becomes an array of bytes."""

    array: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def __setstate__(self, state: tuple[object, tuple[int, ...], object, object, bytes]) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _ByteType) or not isinstance(raw, bytes):
            raise ValueError("an array that does not hold bytes")
        self.array = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _SafeUnpickler(pickle.Unpickler):
    """Creates arrays of bytes, and nothing else."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name in the pickle."""
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
                f"{self._where}: calls {module}.{name}, which no batch of CIFAR-10 does; it may be malicious, delete "
                "it and download it again"
            )
        return allowed[f"{module}.{name}"]

    def _dtype(self, name: str | bytes, align: object = False, copy: object = True) -> _ByteType:
        if name not in ("u1", b"u1"):
            raise DataError(f"{self._where}: expected an array of bytes, got {name!r}; download it again")
        return _ByteType()

    def _encode(self, text: str, encoding: str | bytes) -> bytes:
        if encoding not in ("latin1", b"latin1"):
            raise DataError(f"{self._where}: expected bytes as latin1, got {encoding!r}; download it again")
        return text.encode("latin1")


IMAGE = DatasetSpec(
    name="image",
    title="Image (Long-Range Arena)",
    description="classify a grayscale 32×32 image (CIFAR-10), 1024 pixels in a row",
    source="cs.toronto.edu, 170 MB",
    sizes={"train": 45_000, "validation": 5_000, "test": 10_000},
    disk_bytes=62_000_000,
    task=ClassificationTask,
    metadata={"mean": 0.48, "std": 0.24},
    read=read,
    accepted_files="cifar-10-python.tar.gz or cifar-10-binary.tar.gz, their folders, or an .npz",
    downloads=(
        Download(
            url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            filename="cifar-10-python.tar.gz",
            checksum="md5:c58f30108f718f92721af3b95e74349a",
            size=170_498_071,
        ),
    ),
)
