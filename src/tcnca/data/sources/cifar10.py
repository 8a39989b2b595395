"""CIFAR-10 in gray: Long-Range Arena's Image."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnca.data.schema import Content
from tcnca.data.sources.archives import (
    CURE,
    check_exists,
    compression,
    damage_reported,
    members,
    open_plain,
    read_all,
)
from tcnca.data.sources.pickles import load_batch
from tcnca.data.sources.published import Download
from tcnca.errors import DataError

DOWNLOADS: tuple[Download, ...] = (
    Download(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        filename="cifar-10-python.tar.gz",
        checksum="md5:c58f30108f718f92721af3b95e74349a",
        size=170_498_071,
    ),
)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
COUNTS = {"train": 50_000, "test": 10_000}
# Published with the set, of the files that are pickled.
MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
# sha256 of the gray pixels and of the labels as bytes, in the published order.
DIGESTS = {
    "train_images": "f346c5f19e1cde45025299d0b5224a35d90eebcae6b08126508785ecb7953bcb",
    "train_labels": "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
    "test_images": "da6570c8fc30598084b7026f0db9189359f487774fe45dee03ff80287878c887",
    "test_labels": "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
}

_PLACES = ("", "cifar-10-batches-py", "cifar-10-batches-bin")
_ARCHIVES = ("cifar-10-python.tar.gz", "cifar-10-binary.tar.gz")
_SIDE = 32
_PIXELS = _SIDE * _SIDE
_RECORD = 1 + 3 * _PIXELS
_LARGEST_BATCH = 1 << 26
_LARGEST_ARRAYS = 1 << 29

Arrays = dict[str, NDArray[np.uint8]]


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read the archive or folder of the Python or binary version, or a file of arrays, or a folder that has one.

    The file of arrays is an npz, which may be compressed again, with `train_images`, `train_labels`, `test_images` and
    `test_labels`; its images are gray or in color. The last tenth of the training images is the validation split.
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
        facts={"class_names": list(CLASSES)},
    )


def gray(red: NDArray[np.uint8], green: NDArray[np.uint8], blue: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Brightness as ITU-R 601 weighs it, in the fixed point that Pillow uses, which makes it the same everywhere."""
    sums = 19595 * red.astype(np.uint32) + 38470 * green.astype(np.uint32) + 7471 * blue.astype(np.uint32)
    return ((sums + 32768) >> 16).astype(np.uint8)


def _find(origin: Path) -> Path:
    check_exists(origin)
    if origin.is_file():
        return origin
    for place in _PLACES:
        if any((origin / place / f"{name}{ending}").is_file() for name in MD5 for ending in ("", ".bin")):
            return origin / place
    for name in _ARCHIVES:
        if (origin / name).is_file():
            return origin / name
    found = sorted(path for path in origin.glob("*.npz*") if path.is_file())
    if len(found) != 1:
        some = "none" if not found else ", ".join(path.name for path in found)
        raise DataError(
            f"{origin}: has neither data_batch_1 nor {' nor '.join(_ARCHIVES)}, and not one .npz (found: {some}); give "
            "the file or folder itself"
        )
    return found[0]


def _has_arrays(path: Path) -> bool:
    """Whether it is an npz, which is a zip of arrays, compressed again or not."""
    if path.is_dir():
        return False
    if compression(path) == "zip":
        with damage_reported(path), zipfile.ZipFile(path) as archive:
            return any(name.endswith(".npy") for name in archive.namelist())
    with open_plain(path) as reader:
        return reader.read(4) == b"PK\x03\x04"


def _read_arrays(path: Path) -> Arrays:
    """The arrays of an npz, the images made gray."""
    if compression(path) == "zip":
        file = io.BytesIO(path.read_bytes())
    else:
        with open_plain(path) as reader:
            file = io.BytesIO(read_all(reader, path, _LARGEST_ARRAYS))
    arrays: Arrays = {}
    with damage_reported(path), zipfile.ZipFile(file) as archive:
        size = sum(info.file_size for info in archive.infolist())
        if size > _LARGEST_ARRAYS:
            raise DataError(
                f"{path}: unpacks to {size:,} bytes, allowed are {_LARGEST_ARRAYS:,}; is it the right file?"
            )
        for name in DIGESTS:
            if f"{name}.npy" not in archive.namelist():
                raise DataError(f"{path}: has no array {name}, expected are {', '.join(DIGESTS)}; add it")
            with archive.open(f"{name}.npy") as member:
                arrays[name] = _array(member, f"{path}: {name}")
    return arrays


def _array(member: Any, where: str) -> NDArray[np.uint8]:
    try:
        array = np.lib.format.read_array(member, allow_pickle=False)
    except (ValueError, EOFError, MemoryError, SyntaxError) as error:
        raise DataError(f"{where}: is no plain array ({error}); save it as uint8") from error
    if where.endswith("labels"):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(f"{where}: is {array.dtype} of shape {array.shape}, expected are whole numbers [images]")
        return _labels(array, where)
    if array.dtype != np.uint8 or array.shape[1:] not in ((_SIDE, _SIDE), (_SIDE, _SIDE, 3)):
        raise DataError(
            f"{where}: is {array.dtype} of shape {array.shape}, expected is uint8 [images, 32, 32] or "
            "[images, 32, 32, 3]"
        )
    if array.ndim == 3:
        return array
    # Bit by bit, since the sums are four times as large as the pixels.
    return np.concatenate([gray(*np.moveaxis(part, -1, 0)) for part in np.array_split(array, 1 + len(array) // 10_000)])


def _labels(labels: Any, where: str) -> NDArray[np.uint8]:
    array = np.asarray(labels)
    wrong = np.flatnonzero((array < 0) | (array >= len(CLASSES)))
    if len(wrong):
        raise DataError(f"{where}: image {wrong[0]:,} has the label {array[wrong[0]]}, allowed are 0 to 9; {CURE}")
    return array.astype(np.uint8)


def _read_batches(path: Path, unverified: bool) -> Arrays:
    """The batches of the Python or binary version, the images made gray."""
    batches: dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]] = {}
    for name, reader in members(path):
        batch, dot, ending = name.rpartition("/")[2].partition(".")
        if batch in MD5 and dot + ending in ("", ".bin"):
            where = f"{path}: {name}"
            data = read_all(reader, where, _LARGEST_BATCH)
            batches[batch] = _binary(data, where) if ending else _pickled(data, batch, where, unverified)
    missing = [batch for batch in MD5 if batch not in batches]
    if missing:
        raise DataError(f"{path}: has no {', '.join(missing)}; it is not whole, fetch it again")
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
            f"{where}: has {len(data):,} bytes, expected is a multiple of {_RECORD:,}: a label and 32×32 pixels of "
            "three bytes; fetch it again"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    return _planes(records[:, 1:]), _labels(records[:, 0], where)


def _pickled(data: bytes, batch: str, where: str, unverified: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    # A pickle can run whatever it likes on being read, so this comes first.
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != MD5[batch] and not unverified:
        raise DataError(f"{where}: has the md5 checksum {found}, published is {MD5[batch]}; {CURE}")
    pixels, labels = load_batch(data, where)
    return _planes(pixels), _labels(labels, where)


def _planes(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return gray(*np.moveaxis(pixels.reshape(-1, 3, _SIDE, _SIDE), 1, 0))


def _check(path: Path, arrays: Arrays, unverified: bool) -> bool:
    for split, count in COUNTS.items():
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if len(images) != len(labels):
            raise DataError(f"{path}: has {len(images):,} images and {len(labels):,} labels in {split}; fetch it again")
        if len(images) != count and not unverified:
            raise DataError(f"{path}: has {len(images):,} images in {split}, the published set has {count:,}; {CURE}")
        if len(images) < 2:
            raise DataError(f"{path}: has {len(images)} images in {split}, at least 2 are needed; use more images")
    for name, expected in DIGESTS.items():
        found = hashlib.sha256(arrays[name].tobytes()).hexdigest()
        if found != expected:
            if not unverified:
                raise DataError(f"{path}: {name} have the checksum {found} in gray, published are {expected}; {CURE}")
            return False
    return True
