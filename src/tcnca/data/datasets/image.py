"""Image of Long-Range Arena: classify a grayscale CIFAR-10 image, read pixel by pixel."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tcnca.data.archives import (
    DOWNLOAD_AGAIN,
    archive_errors,
    compression,
    iter_members,
    open_decompressed,
    read_all,
)
from tcnca.data.datasets.spec import DatasetSpec, Download
from tcnca.data.npy import array_errors, list_arrays, read_member
from tcnca.data.schema import Content
from tcnca.data.tasks import ClassificationTask
from tcnca.errors import DataError
from tcnca.models.pickles import read_pickle

CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
COUNTS = {"train": 50_000, "test": 10_000}
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
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
_MAX_BATCH = 2**25
"""Bytes of a batch, which is read into memory; the published ones have 31 million."""
_MAX_ARRAYS = 2**28
"""Bytes of an npz that is compressed again, and of each of its arrays."""

Arrays = dict[str, NDArray[np.uint8]]


def read(origin: Path, *, unverified: bool = False) -> Content:
    """Read the archive or folder of the Python or binary version, an npz, or a folder that has one.

    The npz, which may be compressed again, has the arrays `train_images`, `train_labels`, `test_images` and
    `test_labels`; its images are in grayscale or color. The last tenth of the training images is the validation split.
    """
    path = _find(origin)
    archive = _open_arrays(path)
    arrays = _read_batches(path) if archive is None else _read_arrays(path, archive)
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
    if origin.is_file():
        return origin
    for folder in _FOLDERS:
        if any((origin / folder / f"{name}{suffix}").is_file() for name in BATCHES for suffix in ("", ".bin")):
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


def _open_arrays(path: Path) -> zipfile.ZipFile | None:
    """Open an npz, possibly compressed again; return None for anything else."""
    if path.is_dir():
        return None
    with archive_errors(path):
        if compression(path) == "zip":
            file: Any = path
        else:
            with open_decompressed(path) as reader:
                start = reader.read(4)
                if start != b"PK\x03\x04":
                    return None
                file = io.BytesIO(start + read_all(reader, path, _MAX_ARRAYS))
        archive = zipfile.ZipFile(file)
        return archive if any(name.endswith(".npy") for name in archive.namelist()) else None


def _read_arrays(path: Path, archive: zipfile.ZipFile) -> Arrays:
    """Read the arrays of an npz and convert the images to grayscale."""
    arrays: Arrays = {}
    with array_errors(path, "save it again with np.savez"):
        members = list_arrays(archive)
    for name in DIGESTS:
        if name not in members:
            raise DataError(f"{path}: expected the arrays {', '.join(DIGESTS)}, got no {name}; add it")
        where = f"{path}: {name}"
        if members[name].file_size > _MAX_ARRAYS:
            raise DataError(f"{where}: expected at most {_MAX_ARRAYS:,} bytes, got {members[name].file_size:,}")
        with array_errors(where, "save it as uint8"):
            array = read_member(archive, members[name])
        if name.endswith("labels"):
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise DataError(f"{where}: expected integers of shape [images], got {array.dtype} {array.shape}")
            arrays[name] = _labels(array, where)
        elif array.dtype == np.uint8 and array.shape[1:] in ((_SIDE, _SIDE), (_SIDE, _SIDE, 3)):
            arrays[name] = array if array.ndim == 3 else gray(*np.moveaxis(array, -1, 0))
        else:
            raise DataError(
                f"{where}: expected uint8 of shape [images, 32, 32] or [images, 32, 32, 3], got {array.dtype} "
                f"{array.shape}"
            )
    return arrays


def _labels(labels: Any, where: str) -> NDArray[np.uint8]:
    array = np.asarray(labels, np.int64)
    wrong = np.flatnonzero((array < 0) | (array >= len(CLASS_NAMES)))
    if len(wrong):
        raise DataError(
            f"{where}: expected labels 0 to 9, got {array[wrong[0]]} for image {wrong[0]:,}; {DOWNLOAD_AGAIN}"
        )
    return array.astype(np.uint8)


def _read_batches(path: Path) -> Arrays:
    """Read the batches of the Python or binary version and convert the images to grayscale."""
    batches: dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]] = {}
    for name, reader in iter_members(path):
        batch, dot, suffix = name.rpartition("/")[2].partition(".")
        if batch in BATCHES and dot + suffix in ("", ".bin"):
            where = f"{path}: {name}"
            data = read_all(reader, where, _MAX_BATCH)
            batches[batch] = _binary(data, where) if suffix else _pickled(data, where)
    missing = [batch for batch in BATCHES if batch not in batches]
    if missing:
        raise DataError(f"{path}: is incomplete, {', '.join(missing)} not found; download it again")
    train, test = [batches[batch] for batch in BATCHES if batch != "test_batch"], batches["test_batch"]
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


def _pickled(data: bytes, where: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    try:
        content = read_pickle(data)
        array, labels = content["data"], content["labels"]
        _, (count, width), _, fortran_order, pixels = array.state
        fits = width == 3 * _PIXELS and not fortran_order and type(pixels) is str and len(pixels) == count * width
        fits = fits and type(labels) is list and all(type(label) is int and abs(label) < 2**31 for label in labels)
        values = np.frombuffer(pixels.encode("latin-1"), np.uint8)
    except Exception as error:  # any part can be missing or of another type
        raise DataError(
            f"{where}: expected a batch of CIFAR-10, got another pickle ({str(error)[:200]}); download it again"
        ) from error
    if not fits:
        raise DataError(f"{where}: expected uint8 of shape [images, 3072] and labels, got others; download it again")
    return _planes(values), _labels(labels, where)


def _planes(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return gray(*np.moveaxis(pixels.reshape(-1, 3, _SIDE, _SIDE), 1, 0))


def _check(path: Path, arrays: Arrays, unverified: bool) -> bool:
    for split, count in COUNTS.items():
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if len(images) != len(labels):
            raise DataError(
                f"{path}: expected {len(images):,} labels in {split}, got {len(labels):,}; {DOWNLOAD_AGAIN}"
            )
        if len(images) != count and not unverified:
            raise DataError(f"{path}: expected {count:,} images in {split}, got {len(images):,}; {DOWNLOAD_AGAIN}")
        if len(images) < 2:
            raise DataError(f"{path}: expected at least 2 images in {split}, got {len(images)}; add images")
    for name, expected in DIGESTS.items():
        found = hashlib.sha256(arrays[name].tobytes()).hexdigest()
        if found != expected:
            if not unverified:
                raise DataError(
                    f"{path}: expected the checksum {expected} of {name} in gray, got {found}; {DOWNLOAD_AGAIN}"
                )
            return False
    return True


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
            checksum="sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            size=170_498_071,
        ),
    ),
)
