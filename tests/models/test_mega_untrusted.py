"""Checkpoints of MEGA that are made to hang, crash or fill the memory give a CheckpointError within seconds."""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tcnca import CheckpointError, SequenceModel, load_mega_checkpoint
from tests.models.limits import limited
from tests.models.mega_files import CLASSIFIER, LANGUAGE_MODEL, random_weights, write

LM, LRA = LANGUAGE_MODEL, CLASSIFIER
HUGE = (10**6, 10**9, 2**31, 2**40, 2**62, 2**63, 10**30, -(10**30))
GAMMA = "decoder.layers.0.mega_layer.gamma"


def load_or_refuse(path: Path) -> SequenceModel | None:
    """Return the model, or None after an error with a short message."""
    try:
        with limited(seconds=1.0):
            return load_mega_checkpoint(path)
    except CheckpointError as error:
        message = str(error)
    assert message.startswith(str(path))
    assert len(message) < 3000
    return None


@pytest.mark.parametrize("base", [LM, LRA, {**LM, "decoder_chunk_size": -1}], ids=["lm", "lra", "full"])
def test_sizes_that_the_weights_do_not_have(base: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights(base)
    harmless = {"truncation_length", "decoder_chunk_size", "chunk_size", "max_positions", "max_target_positions"}
    for name, value in base.items():
        if type(value) is int:
            for size in HUGE:
                model = load_or_refuse(write(tmp_path / "huge.pt", {**base, name: size}, weights))
                assert model is None or name in harmless, name


class Plain:
    """A class that is not allowed."""


VALUES: dict[str, Any] = {
    "class": argparse.Namespace,
    "dict class": collections.OrderedDict,
    "function": torch._utils._rebuild_tensor_v2,
    "tensor": torch.zeros(3),
    "list": [1, 2],
    "dict": {"a": 1},
    "namespace": argparse.Namespace(a=1),
    "bytes": b"xyz",
    "text": "x" * 10**5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "digits": 10**600,
    "negative": -5,
    "none": None,
    "truth": True,
}


@pytest.mark.parametrize("case", VALUES, ids=lambda name: name.replace(" ", "-"))
def test_arguments_of_any_type_and_none_is_called(case: str, tmp_path: Path) -> None:
    weights = {id(base): random_weights(base) for base in (LM, LRA)}
    for base in (LM, LRA):
        for name in base:
            load_or_refuse(write(tmp_path / "value.pt", {**base, name: VALUES[case]}, weights[id(base)]))
    load_or_refuse(
        write(tmp_path / "value.pt", {"arch": "mega_sc_raw", "encoder_embed_dim": VALUES[case]}, weights[id(LRA)])
    )
    assert load_or_refuse(write(tmp_path / "value.pt", {**LM, "unused": VALUES[case]}, weights[id(LM)])) is not None


def test_containers_that_contain_themselves_or_are_deep(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    for value in (loop, deep):
        path = write(tmp_path / "loop.pt", {**LM, "decoder_layers": value}, random_weights(LM), more=value)
        with pytest.raises(CheckpointError, match=r"args\.decoder_layers: expected a number or a text, got a list"):
            load_mega_checkpoint(path)


def test_names_that_are_no_texts(tmp_path: Path) -> None:
    args = argparse.Namespace(**LM)
    vars(args)[3] = 4  # type: ignore[index]
    model: dict[Any, Any] = dict(random_weights(LM))
    for content in (
        {"args": args, "model": random_weights(LM)},
        {"args": argparse.Namespace(**LM), "model": {**model, 3: torch.zeros(2)}},
        {"args": argparse.Namespace(**LM), "model": {**model, None: torch.zeros(2)}},
        {"args": argparse.Namespace(**LM), "model": {**model, ("a", "b"): torch.zeros(2)}},
    ):
        torch.save(content, tmp_path / "names.pt")
        with pytest.raises(CheckpointError, match=r"names\.pt: .*texts"):
            load_mega_checkpoint(tmp_path / "names.pt")


WEIGHTS: dict[str, Callable[[], Any]] = {
    "expanded": lambda: torch.zeros(1).expand(10**12),
    "expanded matrix": lambda: torch.zeros(2, 1).expand(2, 2**40),
    "sparse": lambda: torch.zeros(2, 4).to_sparse(),
    "compressed": lambda: torch.zeros(2, 4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(2, 4), 0.1, 0, torch.qint8),
    "meta": lambda: torch.zeros(2**40, device="meta"),
    "complex": lambda: torch.zeros(2, 4, dtype=torch.complex64),
    "bool": lambda: torch.zeros(2, 4, dtype=torch.bool),
    "int": lambda: torch.zeros(2, 4, dtype=torch.int32),
    "float8": lambda: torch.zeros(2, 4).to(torch.float8_e4m3fn),
    "empty": lambda: torch.zeros(0, 4),
    "empty and huge": lambda: torch.zeros(1).expand(2**62)[:0].expand(2**40, 0),
    "scalar": lambda: torch.tensor(1.0),
    "none": lambda: None,
    "text": lambda: "x",
    "list": lambda: [torch.zeros(2, 4)],
    "namespace": lambda: argparse.Namespace(),
}


@pytest.mark.parametrize("case", WEIGHTS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.filterwarnings("ignore")
def test_weights_of_any_kind(case: str, tmp_path: Path) -> None:
    path = write(tmp_path / "weight.pt", LM, {**random_weights(LM), GAMMA: WEIGHTS[case]()})
    with limited(seconds=2.0), pytest.raises(CheckpointError, match=r"weight\.pt: .*(gamma|could run code)"):
        load_mega_checkpoint(path)


def test_parameters_views_and_transposed_weights_are_read(tmp_path: Path) -> None:
    weights: dict[str, Any] = random_weights(LM)
    expected = weights[GAMMA].clone()
    for same in (
        torch.nn.Parameter(expected),
        torch.cat([torch.ones(3, 4), expected, torch.ones(1, 4)])[3:5],
        expected.t().contiguous().t(),
        torch.stack([expected, expected], -1)[..., 1],
    ):
        path = write(tmp_path / "views.pt", LM, {**weights, GAMMA: same})
        assert torch.equal(load_mega_checkpoint(path).get_parameter("layers.0.block.gamma"), expected)


def test_many_weights_that_share_their_values(tmp_path: Path) -> None:
    shared = torch.zeros(200_000)
    many: dict[str, Tensor] = {f"decoder.layers.{i}.mega_layer.gamma": shared for i in range(5000)}
    path = write(tmp_path / "shared.pt", LM, {**random_weights(LM), **many})
    with limited(seconds=5.0), pytest.raises(CheckpointError, match="expected weights with values of their own"):
        load_mega_checkpoint(path)


def rewrite(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """Write the archive again with other entries."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in parts.items():
            archive.writestr(name, change(name, data))
    return path


def with_pickle(path: Path, content: bytes) -> Path:
    write(path, LM, random_weights(LM))
    return rewrite(path, lambda name, data: content if name.endswith("data.pkl") else data)


PICKLES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read as a pickle"),
    "no end": (b"\x80\x02}", "cannot be read as a pickle"),
    "nothing": (b"\x80\x02.", "cannot be read as a pickle"),
    # The hash of the key would exhaust the stack: `torch.load` ends with a segmentation fault.
    "tuple as key": (b"\x80\x02})" + b"\x85" * 2 * 10**5 + b"K\x01s.", "args: expected a Namespace"),
    "deep tuple": (b"\x80\x02)" + b"\x85" * 2 * 10**5 + b".", "args: expected a Namespace, got a tuple"),
    "deep call": (b"\x80\x02)" + b"cnumpy\ndtype\nq\x00)R" + b"\x85h\x00R" * 10**5 + b".", "cannot be read|expected a"),
    "marks": (b"\x80\x02" + b"(" * 2 * 10**5 + b".", "cannot be read as a pickle"),
    "memo": (b"\x80\x02}r\xff\xff\xff\x7f.", "args: expected a Namespace, got a NoneType"),
    "memo read": (b"\x80\x02h\x05.", "cannot be read as a pickle"),
    "long string": (b"\x80\x02X\xff\xff\xff\x7fabc.", "cannot be read as a pickle"),
    "bytes": (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "cannot be read as a pickle"),
    "global": (b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.", r"could run code \(found: os\.system"),
    "stack global": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "cannot be read as a pickle"),
    "instance": (b"(ios\nsystem\n.", "cannot be read as a pickle"),
    "long name": (b"\x80\x02c" + b"x" * 2 * 10**5 + b"\ny\n.", "could run code"),
    "call of a value": (b"\x80\x02K\x01)R.", "cannot be read as a pickle"),
    "large": (b"\x80\x02" + b"N" * 2**21 + b".", "more than 2,097,152 instructions"),
}


@pytest.mark.parametrize("case", PICKLES, ids=lambda name: name.replace(" ", "-"))
def test_pickles_that_attack_their_reader(case: str, tmp_path: Path) -> None:
    content, message = PICKLES[case]
    path = with_pickle(tmp_path / "bad.pt", content)
    with limited(seconds=8.0), pytest.raises(CheckpointError, match=rf"bad\.pt: .*({message})") as caught:
        load_mega_checkpoint(path)
    assert len(str(caught.value)) < 2000


def test_doubling_references_stay_small(tmp_path: Path) -> None:
    value: Any = "x"
    for _ in range(200):
        value = [value, value]
    path = write(tmp_path / "laughs.pt", {**LM, "arch": value}, random_weights(LM))
    with limited(seconds=1.0), pytest.raises(CheckpointError, match=r"args\.arch: expected a number or a text"):
        load_mega_checkpoint(path)


def test_archives_that_claim_more_than_they_have(tmp_path: Path) -> None:
    path = write(tmp_path / "zip.pt", LM, {**random_weights(LM), "decoder.x": torch.zeros(2**24)})
    rewrite(path, lambda name, data: data, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**5 * 2
    with limited(seconds=1.0), pytest.raises(CheckpointError, match="which compresses nothing, got compressed entries"):
        load_mega_checkpoint(path)
    # The sizes in the directory: first one of two, then both.
    write(path, LM, random_weights(LM))
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\x01\x02")
    for offset, message in ((20, "expected entries of one size"), (24, "expected entries of together at most")):
        content[place + offset : place + offset + 4] = (2**31).to_bytes(4, "little")
        path.write_bytes(content)
        with limited(seconds=1.0), pytest.raises(CheckpointError, match=message):
            load_mega_checkpoint(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/b", "c")
    with pytest.raises(CheckpointError, match=r"one folder with data\.pkl"):
        load_mega_checkpoint(path)


def test_old_formats(tmp_path: Path) -> None:
    content = {"args": argparse.Namespace(**LM), "model": random_weights(LM)}
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(content))
    with tarfile.open(tmp_path / "tar.pt", "w") as archive:
        for name in ("storages", "tensors", "pickle"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
    for name in ("old.pt", "plain.pt", "tar.pt"):
        with limited(seconds=1.0), pytest.raises(CheckpointError, match=r"PyTorch before 1\.6"):
            load_mega_checkpoint(tmp_path / name)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        with limited(seconds=1.0), pytest.raises(CheckpointError, match="not a regular file"):
            load_mega_checkpoint(path)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_damaged_checkpoints_are_refused_or_read(count: int, tmp_path: Path) -> None:
    generator, path = random.Random(0), tmp_path / "damaged.pt"
    write(path, LM, random_weights(LM))
    with zipfile.ZipFile(path) as archive:
        instructions = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    whole, refused = path.read_bytes(), 0
    for number in range(count):
        # Half of the cases are valid archives with a damaged pickle, which the checksum would hide otherwise.
        damaged = bytearray(instructions if number % 2 else whole)
        for _ in range(generator.randint(1, 3)):
            place = generator.randrange(len(damaged))
            damaged[place : place + generator.choice([0, 1, 1, 9])] = generator.randbytes(
                generator.choice([0, 1, 1, 3])
            )
        if number % 2:
            with_pickle(path, bytes(damaged))
        else:
            path.write_bytes(damaged)
        refused += load_or_refuse(path) is None
    assert refused > 0.7 * count
