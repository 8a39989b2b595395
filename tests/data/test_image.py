"""CIFAR-10 gives the same grayscale images from every format, and nothing in a pickle is executed."""

from __future__ import annotations

import hashlib
import io
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tcnca.data.datasets import image
from tcnca.errors import DataError
from tests.data.helpers import (
    TARS,
    Files,
    assert_same_content,
    packed,
    python2_batch,
    split,
    tarred,
    write,
    written,
    zipped,
)
from tests.models.limits import limited

NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
BATCH = 4
TOTAL = BATCH * len(NAMES)
COLOR = np.random.default_rng(0).integers(0, 256, (TOTAL, 32, 32, 3), dtype=np.uint8)
LABELS = np.arange(TOTAL, dtype=np.uint8) % 10
GRAY = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in COLOR])
TRAIN = TOTAL - BATCH


def batch(place: int) -> tuple[NDArray[np.uint8], list[int]]:
    """Planes of red, green and blue as rows, and labels."""
    part = slice(place * BATCH, (place + 1) * BATCH)
    return np.moveaxis(COLOR[part], 3, 1).reshape(BATCH, 3072), LABELS[part].tolist()


def pickled(prefix: str = "") -> Files:
    files = {f"{prefix}{name}": python2_batch(*batch(place)) for place, name in enumerate(NAMES)}
    return files | {f"{prefix}batches.meta": b"cos\nsystem\n(S'false'\ntR."}


def binary(prefix: str = "") -> Files:
    files = {}
    for place, name in enumerate(NAMES):
        pixels, labels = batch(place)
        records = (bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True))
        files[f"{prefix}{name}.bin"] = b"".join(records)
    return files


def arrays(images: NDArray[Any], labels: NDArray[Any] = LABELS, **changes: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    named = {
        "train_images": images[:TRAIN],
        "train_labels": labels[:TRAIN],
        "test_images": images[TRAIN:],
        "test_labels": labels[TRAIN:],
    }
    np.savez_compressed(buffer, allow_pickle=True, **(named | changes))
    return buffer.getvalue()


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tiny images be the published ones."""
    parts = {"train_images": GRAY[:TRAIN], "train_labels": LABELS[:TRAIN]}
    parts |= {"test_images": GRAY[TRAIN:], "test_labels": LABELS[TRAIN:]}
    sums = {name: hashlib.sha256(part.tobytes()).hexdigest() for name, part in parts.items()}
    monkeypatch.setattr(image, "DIGESTS", sums)
    monkeypatch.setattr(image, "COUNTS", {"train": TRAIN, "test": BATCH})


def test_gray_equals_pillow() -> None:
    """On colors that include every rounding: all of red and green against a few of blue."""
    red, green = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    for value in (0, 1, 37, 128, 254, 255):
        blue = np.full_like(red, value)
        expected = np.asarray(Image.fromarray(np.stack([red, green, blue], axis=-1)).convert("L"))
        np.testing.assert_array_equal(image.gray(red, green, blue), expected)


@pytest.mark.usefixtures("published")
def test_splits(tmp_path: Path) -> None:
    content = image.read(written(tmp_path / "cifar.npz", arrays(COLOR)))
    assert (content.kind, content.verified, content.origin) == ("classification", True, "cifar.npz")
    assert content.metadata["class_names"] == list(image.CLASS_NAMES)
    places = {"train": slice(0, 18), "validation": slice(18, 20), "test": slice(20, 24)}
    for name, place in places.items():
        columns = split(content, name)
        pixels, labels = np.asarray(columns["pixels"]), np.asarray(columns["labels"])
        assert pixels.dtype == np.uint8
        assert labels.dtype == np.int64
        np.testing.assert_array_equal(pixels, GRAY[place])
        np.testing.assert_array_equal(labels, LABELS[place])


@pytest.mark.usefixtures("published")
def test_every_format_gives_the_same_images(tmp_path: Path) -> None:
    expected = image.read(written(tmp_path / "gray" / "cifar.npz", arrays(GRAY)))
    forms = [
        tmp_path / "gray",
        written(tmp_path / "color.npz", arrays(COLOR, LABELS.astype(np.int64))),
        write(tmp_path / "given", pickled()),
        write(tmp_path / "given binary", binary()),
        write(tmp_path / "parent", pickled("cifar-10-batches-py/")),
        write(tmp_path / "parent binary", binary("cifar-10-batches-bin/")),
        written(tmp_path / "fetched" / "cifar-10-python.tar.gz", tarred(pickled("cifar-10-batches-py/"), ".gz")).parent,
        written(tmp_path / "one.zip", zipped(binary("cifar-10-batches-bin/"))),
    ]
    forms += [written(tmp_path / f"one.npz{packing}", packed(arrays(GRAY), packing)) for packing in (".xz", ".gz")]
    for ending in TARS:
        packing = ending.removeprefix(".tar")
        forms.append(written(tmp_path / f"one{ending}", tarred(pickled("cifar-10-batches-py/"), packing)))
        forms.append(written(tmp_path / f"binary{ending}", tarred(binary("cifar-10-batches-bin/"), packing)))
    for form in forms:
        content = image.read(form)
        assert content.verified, form
        assert_same_content(content, expected)


class Evil:
    """Writes a file on being unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


HUGE = 2**31 - 1
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
BAD_PICKLES = {
    "list": pickle.dumps([1], 2),
    "no array": pickle.dumps({b"data": [1], b"labels": [1]}, 2),
    "marks": b"\x80\x02" + b"(" * 1000 + b".",
    "truncated": python2_batch(*batch(0))[:-100],
    "width": python2_batch(batch(0)[0][:, 1:], batch(0)[1]),
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b".",
    "huge memo": b"\x80\x02Nr" + struct.pack("<I", HUGE) + b".",
    "huge array": b"\x80\x02" + ARRAY + number(HUGE) + number(HUGE) + b"\x86U\x01b\x87R.",
    "change of a global": b"\x80\x02cnumpy\nndarray\n}U\x04name" + number(1) + b"sb.",
    # The hash of a nested tuple exhausts the stack of the process.
    "tuple as key": b"\x80\x02})" + b"\x85" * 2 * 10**5 + b"K\x01s.",
    "set of a tuple": b"\x80\x04()" + b"\x85" * 2 * 10**5 + b"\x91.",
    "huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**32) + b".",
    "many instructions": b"\x80\x02" + b"N" * 2**22 + b".",
    "labels": python2_batch(*batch(0)).replace(b"labels](", b"labels](N"),
}


@pytest.mark.parametrize("unverified", [False, True])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickle_is_not_executed(tmp_path: Path, unverified: bool, protocol: int) -> None:
    trace = tmp_path / "trace"
    evil = pickle.dumps({b"data": Evil(trace), b"labels": [1]}, protocol)
    pickle.loads(evil)
    assert trace.exists()
    trace.unlink()
    with pytest.raises(
        DataError, match=r"data_batch_1: expected a batch of CIFAR-10, got another pickle \(cannot be read"
    ):
        image.read(write(tmp_path / "evil", dict.fromkeys(NAMES, evil)), unverified=unverified)
    assert not trace.exists()


@pytest.mark.parametrize("name", BAD_PICKLES)
def test_odd_pickle_is_refused(tmp_path: Path, name: str) -> None:
    odd = r"data_batch_1: expected .*, got .*; download it again"
    with limited(seconds=8.0), pytest.raises(DataError, match=odd):
        image.read(write(tmp_path / "odd", dict.fromkeys(NAMES, BAD_PICKLES[name])), unverified=True)


@pytest.mark.usefixtures("published")
def test_changed_pickle_needs_unverified(tmp_path: Path) -> None:
    pixels, labels = batch(0)
    folder = write(tmp_path, {**pickled(), "data_batch_1": python2_batch(pixels[::-1], labels)})
    with pytest.raises(DataError, match=r"expected the checksum .* of train_images in gray"):
        image.read(folder)
    assert not image.read(folder, unverified=True).verified


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("name", ["train_images", "train_labels", "test_images", "test_labels"])
def test_changed_arrays_are_refused(tmp_path: Path, name: str) -> None:
    whole = GRAY if name.endswith("images") else LABELS
    part = (whole[:TRAIN] if name.startswith("train") else whole[TRAIN:]).copy()
    part.flat[-1] = (int(part.flat[-1]) + 1) % 10
    path = written(tmp_path / "changed.npz", arrays(GRAY, **{name: part}))
    with pytest.raises(
        DataError, match=rf"changed\.npz: expected the checksum .* of {name} in gray, got .*--unverified"
    ):
        image.read(path)
    assert not image.read(path, unverified=True).verified


def test_other_counts_need_unverified(tmp_path: Path) -> None:
    path = written(tmp_path / "few.npz", arrays(GRAY))
    with pytest.raises(DataError, match="expected 50,000 images in train, got 20"):
        image.read(path)
    assert not image.read(path, unverified=True).verified


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_images": GRAY[:TRAIN].astype(np.float32)},
            r"train_images: expected uint8 .*, got float32 \(20, 32, 32\)",
        ),
        ({"train_images": GRAY[:TRAIN, 1:]}, r"train_images: expected uint8 .*, got uint8 \(20, 31, 32\)"),
        (
            {"train_labels": LABELS[:TRAIN].astype(np.float64)},
            r"train_labels: expected integers .*, got float64 \(20,\)",
        ),
        ({"test_labels": np.array([0, 1, -1, 2])}, "test_labels: expected labels 0 to 9, got -1 for image 2"),
        ({"test_labels": LABELS[:3]}, "expected 4 labels in test, got 3"),
        ({"test_images": GRAY[:1], "test_labels": LABELS[:1]}, "expected at least 2 images in test, got 1"),
        (
            {"train_labels": np.array([{}] * TRAIN)},
            "train_labels: cannot be read .*got object",
        ),
    ],
    ids=["floats", "shape", "label kind", "label", "count", "few", "objects"],
)
def test_invalid_arrays_are_refused(tmp_path: Path, changes: dict[str, NDArray[Any]], message: str) -> None:
    path = written(tmp_path / "odd.npz", arrays(GRAY, LABELS, **changes))
    with pytest.raises(DataError, match=rf"odd\.npz: {message}"):
        image.read(path, unverified=True)


@pytest.mark.parametrize("data", [b"", bytes(3072), bytes(3074)])
def test_binary_batch_of_wrong_size_is_refused(tmp_path: Path, data: bytes) -> None:
    folder = write(tmp_path, binary())
    (folder / "data_batch_2.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"data_batch_2\.bin: expected a multiple of 3,073 bytes"):
        image.read(folder, unverified=True)


def test_ambiguous_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"or one \.npz, got none of them"):
        image.read(tmp_path)
    written(tmp_path / "a.npz", arrays(GRAY))
    written(tmp_path / "b.npz.xz", packed(arrays(GRAY), ".xz"))
    with pytest.raises(DataError, match=r"or one \.npz, got a\.npz, b\.npz\.xz"):
        image.read(tmp_path)


@pytest.mark.usefixtures("published")
def test_missing_batches_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, pickled())
    (folder / "data_batch_3").unlink()
    (folder / "test_batch").unlink()
    with pytest.raises(DataError, match="is incomplete, data_batch_3, test_batch not found"):
        image.read(folder)
