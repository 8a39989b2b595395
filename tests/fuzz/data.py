"""Prepared data sets, the user's own files, published archives, and shards of generated data sets."""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tcnca.cli.data import _rows
from tcnca.data import CustomOptions, Dataset, get_dataset, load_task, prepare_dataset
from tcnca.data.generate import generate
from tcnca.data.show import render_example, summarize_data
from tests.data.helpers import packed, tarred, zipped
from tests.fuzz import payloads
from tests.fuzz.mutations import Rng
from tests.fuzz.subject import (
    Attack,
    Subject,
    changed,
    command,
    entries,
    entry,
    fifo,
    linked,
    use_each,
    write_table,
    written,
)

# Prepared data sets.


def _make_datasets() -> None:
    write_table()
    prepare_dataset("table", ".", origin="data.csv")
    Path("data.csv").unlink()
    np.save("series.npy", np.arange(400.0).reshape(200, 2))
    prepare_dataset("series", ".", origin="series.npy")
    Path("series.npy").unlink()
    Path("stream.txt").write_bytes(bytes(range(32, 128)) * 20)
    prepare_dataset("stream", ".", origin="stream.txt")
    Path("stream.txt").unlink()
    Path("files").mkdir()
    os.chdir("files")
    _make_archives()
    os.chdir("..")
    for name in ("image", "retrieval"):
        prepare_dataset(name, ".", origin=Path("files", name), unverified=True)
    shutil.rmtree("files")
    prepare_dataset("recall-16", ".", size=20)
    for path in Path.cwd().glob(".*"):
        path.unlink()
    for path in Path.cwd().glob("*/manifest.json"):
        path.write_text(
            re.sub(r"last changed [^\"]*", "last changed", path.read_text(encoding="utf-8")), encoding="utf-8"
        )


def _use_dataset(name: str) -> None:
    data = Dataset.open(Path(name))
    summarize_data(data)
    for split in data.splits:
        render_example(data, split, 0)
    _use_file(name)


def _use_file(name: str) -> None:
    custom = CustomOptions(kind="forecast") if name == "series.csv" else None
    task = load_task(Path(name).absolute(), custom=custom)
    task.preprocessing()
    task.batch(0, 1000 if task.kind == "language" else 2, 0)


def _use_datasets() -> None:
    json.dumps(_rows(Path()))
    use_each(entries(), _use_dataset)


_DATASETS: list[Attack] = [
    changed("table/manifest.json", lambda _: {"format": 2}),
    changed("table/manifest.json", lambda _: {"format": 2, "splits": {}, "files": {}}),
    changed("table/manifest.json", lambda _: {"format": 2, "splits": {"train": {}}, "files": {}}),
    changed("table/manifest.json", lambda _: "@raw5@"),
    changed("table/manifest.json", entry("kind", ["classification"])),
    changed("table/manifest.json", entry("kind", "language")),
    changed("table/manifest.json", entry("class_names", None)),
    changed("table/manifest.json", entry("class_names", [])),
    changed("table/manifest.json", entry("dataset", "enwik8")),
    changed("table/manifest.json", entry("dataset", [1])),
    changed("table/manifest.json", entry("request", None)),
    changed("table/manifest.json", entry("origin", None)),
    changed("table/manifest.json", entry("splits", {"../../outside/x": ["tokens"]})),
    changed("image/manifest.json", entry("mean", "x")),
    changed("image/manifest.json", entry("std", 0)),
    changed("series/manifest.json", entry("std", [0, "@raw2@"])),
    changed("series/manifest.json", entry("value_columns", ["", "\x1b[2J", 3])),
    changed("series/manifest.json", entry("value_columns", ["x" * 10**5] * 99)),
    changed("stream/manifest.json", entry("symbols", {})),
    changed("recall-16-10/manifest.json", entry("symbols", 5)),
    written("table/train.tokens.npy", lambda: payloads.object_array(0)),
    written("table/train.tokens.offsets.npy", lambda: payloads.npy("<i8", (55,), bytes(range(1, 56)) * 8)),
    written("series/train.values.npy", lambda: payloads.npy("<f4", (1, 10**12, 2))),
    written("table/train.labels.npy", lambda: payloads.npy("<i8", (54,), b"\xff" * 8 * 54)),
    fifo("table/manifest.json"),
    fifo("table/train.tokens.npy"),
]


# The user's own files.


def _make_arrays() -> None:
    rng = np.random.default_rng(0)
    np.save("series.npy", rng.normal(size=(120, 3)))
    np.savez("classes.npz", values=rng.normal(size=(40, 6, 2)), labels=np.arange(40) % 4, lengths=np.full(40, 5))
    np.savez_compressed("targets.npz", values=rng.normal(size=(40, 6)), targets=rng.normal(size=(40, 2)))


def _make_tables() -> None:
    write_table()
    lines = [json.dumps({"text": f"text {n}", "label": n % 3, "more": [n]}) for n in range(60)]
    Path("lines.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [f"{n},{n / 7:.3f},{n % 5},{n % 3}\n" for n in range(60)]
    Path("numbers.csv").write_text("id,a,b,label\n" + "".join(rows), encoding="utf-8")
    Path("series.csv").write_text("date;heat;rain\n" + "".join(f"2024-01-{n};{n},5;{n}\n" for n in range(10, 30)))


def _use_files() -> None:
    use_each(entries(), _use_file)


def _arrays(**arrays: bytes) -> bytes:
    return zipped({f"{name}.npy": data for name, data in arrays.items()})


def _lzma(rng: Rng) -> str:
    """Compress an .npz with LZMA, and damage it."""
    path = Path("targets.npz")
    data = bytearray(payloads.repacked(path.read_bytes(), zipfile.ZIP_LZMA))
    data[60 + rng.randrange(100)] ^= 255
    path.write_bytes(bytes(data))
    return "targets.npz: damaged LZMA"


_ARRAYS: list[Attack] = [
    _lzma,
    _lzma,
    _lzma,
    written("series.npy", lambda: payloads.object_array(0)),
    written("series.npy", lambda: payloads.npy("<f4", (10**12,))),
    written("series.npy", lambda: payloads.npy("|S2147483647", (3,), bytes(30))),
    written("series.npy", b"\x93NUMPY\x01\x00v\x00" + b"(" * 118),
    written("series.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{}"),
    written("series.npy", b"\x93NUMPY\x01\x00\x40\x00" + b"{'descr': '<f4', 'shape': " + b"-" * 37 + b"1"),
    written("classes.npz", lambda: payloads.zip_bomb("values.npy", payloads.npy("<f4", (2**29 + 2**26, 1)))),
    written("classes.npz", lambda: _arrays(values=payloads.object_array(1), labels=payloads.object_array(2))),
    written("classes.npz", lambda: payloads.raw_zip("values.npy", bytes(40), 2**31, 0, 1)),
    written("classes.npz", lambda: payloads.pickled(0)),
    fifo("classes.npz"),
    fifo("series.npy"),
    linked("series.npy", "zeros without end"),
]
_TABLES: list[Attack] = [
    written("data.csv", (",".join(f"c{n}" for n in range(20_000)) + ",text,label\n" + "," * 20_000 + "a,b\n").encode()),
    written("data.csv", (",".join(["c"] * 20_000) + "\n").encode()),
    written("data.csv", b'text,label\n"' + b"x" * 10**6),
    written("data.csv", b"text,label\n" + b"a,b\n" * 3),
    written("data.csv", b"text,label\n" + b"a\0,b\n" * 30),
    written("data.csv", b"\n" * 10**6),
    written("data.csv", b'"' * 10**6),
    written("lines.jsonl", b'{"text": "a", "label": ' + b"[" * 100_000 + b"\n"),
    written("lines.jsonl", b'{"text": "a", "label": ' + b"9" * 5_000 + b"}\n"),
    written("lines.jsonl", b'{"text": "\\ud800", "label": "\\ud800"}\n' * 30),
    written("lines.jsonl", b'{"text": "a", "label": NaN}\n{"text": "b", "label": 1e999}\n' * 30),
    written("lines.jsonl", b"{" + b",".join(b'"c%d": 1' % n for n in range(20_000)) + b', "text": "a", "label": 1}\n'),
    written("lines.jsonl", b"{" + b",".join(b'"c%d": 1' % n for n in range(200_000)) + b"}\n" + b"{}\n" * 99),
    written("numbers.csv", (",".join(f"{n}.5" for n in range(20_000)) + "\n").encode() * 3),
    written("numbers.csv", b"a,label\n" + b"9" * 10**6 + b",1\n"),
    written("numbers.csv", b"a,label\n" + b"1,b\n" * 9 + b"1e999,c\n1_0,c\n" + "٣,c\n".encode()),
    written("numbers.csv", b"a,label\n" + b"1,b\n" * 9 + b"2," + b"c" * 10**6 + b"\n"),
    written("series.csv", b'a;b\n"1\n2";3\n' * 9),
    written("series.csv", b"1,5;" * 5_000 + b"1\n"),
    written("series.csv", b"time;a\n" + b"2024-01-01" + b"-" * 10**5 + b";1\n" * 9),
    linked("data.csv", "zeros without end"),
    linked("series.csv", "zeros without end"),
    fifo("data.csv"),
]


# Published files.

_BATCHES = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")
_TEXT = b"some text of an encyclopedia " * 40


def _make_archives() -> None:
    for packing in ("gz", "xz", "bz2", "zip"):
        Path(packing).mkdir()
        Path(packing, f"enwik8.{packing}").write_bytes(packed(_TEXT, f".{packing}"))
    reviews = {
        f"aclImdb/{split}/{label}/{n}_1.txt": f"{label} {n}".encode()
        for split in ("train", "test")
        for label in ("pos", "neg")
        for n in range(3)
    }
    Path("text").mkdir()
    Path("text/aclImdb_v1.tar.gz").write_bytes(tarred(reviews, ".gz"))
    Path("tables").mkdir()
    for split in ("train", "test"):
        Path(f"tables/imdb_{split}.tsv").write_bytes(b"".join(b"%d\ta text %d\n" % (n % 2, n) for n in range(10)))
    pairs = b"".join(b"%d.0\ta\tb\tfirst %d\tsecond\n" % (n % 2, n) for n in range(10))
    Path("retrieval").mkdir()
    for split in ("train", "eval", "test"):
        Path(f"retrieval/new_aan_pairs.{split}.tsv").write_bytes(pairs)
    Path("image").mkdir()
    np.savez(
        "image/cifar.npz",
        train_images=np.zeros((4, 32, 32, 3), np.uint8),
        train_labels=np.arange(4),
        test_images=np.zeros((4, 32, 32), np.uint8),
        test_labels=np.arange(4),
    )
    record = bytes([3]) + bytes(3072)
    batches = {f"cifar-10-batches-bin/{name}.bin": record * 2 for name in _BATCHES}
    Path("binary").mkdir()
    Path("binary/cifar-10-binary.tar.gz").write_bytes(tarred(batches, ".gz"))
    Path("citations").mkdir()
    Path("citations/acl_papers_fulltext.tsv").write_bytes(b"".join(b"P%d\ttext %d\n" % (n, n) for n in range(30)))
    edges = b"".join(b"P%d\tP%d\n" % (n, (n + more) % 30) for n in range(30) for more in range(1, 6))
    Path("citations/acl_citation_edges.tsv").write_bytes(edges)


_ORIGINS = {
    "gz": "enwik8",
    "xz": "enwik8",
    "bz2": "enwik8",
    "zip": "enwik8",
    "text": "text",
    "tables": "text",
    "retrieval": "retrieval",
    "image": "image",
    "binary": "image",
    "citations": "acl-citations",
}


def _use_archives() -> None:
    use_each([origin for origin in _ORIGINS if Path(origin).exists()], _prepare)


def _prepare(origin: str) -> None:
    name = _ORIGINS[origin]
    prepared = prepare_dataset(
        name,
        Path("out", origin),
        origin=Path(origin),
        unverified=name != "acl-citations",
        size=10 if name == "image" else None,
    )
    load_task(prepared.folder)


def _cifar(number: int) -> bytes:
    return tarred({f"cifar-10-batches-py/{name}": payloads.pickled(number) for name in _BATCHES}, ".gz")


_ARCHIVES: list[Attack] = [
    written("gz/enwik8.gz", payloads.gzip_bomb),
    written("xz/enwik8.xz", payloads.xz_bomb),
    written("bz2/enwik8.bz2", payloads.bzip2_bomb),
    written("zip/enwik8.zip", lambda: payloads.zip_bomb("enwik8")),
    written("xz/enwik8.xz", payloads.xz_dictionary),
    written("image/cifar.npz", lambda: payloads.zip_bomb("train_images.npy", payloads.npy("|u1", (2**31, 32, 32)))),
    written("binary/cifar-10-binary.tar.gz", lambda: _cifar(0)),
    written("binary/cifar-10-binary.tar.gz", lambda: payloads.tar_bomb("data_batch_1.bin")),
    written("text/aclImdb_v1.tar.gz", lambda: payloads.hostile_tar("aclImdb/train/pos/1_1.txt", b"text")),
    written("text/aclImdb_v1.tar.gz", lambda: payloads.tar_bomb("aclImdb/train/pos/1_1.txt")),
    written("tables/imdb_train.tsv", lambda: payloads.gzip_bomb()),
    written("retrieval/new_aan_pairs.train.tsv", lambda: payloads.xz_bomb()),
    written("image/cifar.npz", lambda: _arrays(train_images=payloads.object_array(0))),
    written("image/data_batch_1", lambda: payloads.pickled(0)),
    written("zip/enwik8.zip", lambda: payloads.raw_zip("../outside/enwik8", _TEXT, len(_TEXT), 0)),
    written("zip/enwik8.zip", lambda: payloads.raw_zip("enwik8", _TEXT, len(_TEXT), 14)),
    fifo("gz/enwik8.gz"),
    fifo("tables/imdb_train.tsv"),
]


# Shards of generated data sets.


def _make_shards() -> None:
    plan = get_dataset("recall-16").plan(30, 0)
    for _ in generate(plan, Path(".recall-16-10.shards"), 1, lambda done, total: None):
        pass


def _use_shards() -> None:
    prepared = prepare_dataset("recall-16", ".", size=30)
    task = load_task(prepared.folder)
    task.batch(0, 2, 0)


_SHARD = ".recall-16-10.shards/000000.npz"
_SHARDS: list[Attack] = [
    written(_SHARD, lambda: _arrays(tokens=payloads.object_array(0), labels=payloads.object_array(1))),
    written(_SHARD, lambda: payloads.zip_bomb("tokens.npy", payloads.npy("|u1", (2**31, 17)))),
    written(_SHARD, lambda: _arrays(labels=payloads.npy("<i8", (3,), bytes(24)))),
    written(_SHARD, lambda: _arrays(tokens=payloads.npy("|u1", (), b"a"))),
    written(_SHARD, lambda: zipped({})),
    linked(_SHARD, "a file outside"),
    fifo(_SHARD),
]

BASES: dict[str, Callable[[], None]] = {
    "datasets": _make_datasets,
    "arrays": _make_arrays,
    "tables": _make_tables,
    "archives": _make_archives,
    "shards": _make_shards,
}
_LIST = command("data", "list", "--data", ".")
SUBJECTS = {
    "datasets": Subject(base="datasets", use=_use_datasets, attacks=_DATASETS, independent=True, share=18),
    "arrays": Subject(base="arrays", use=_use_files, attacks=_ARRAYS, independent=True, share=14),
    "tables": Subject(base="tables", use=_use_files, attacks=_TABLES, independent=True, share=20),
    "archives": Subject(base="archives", use=_use_archives, attacks=_ARCHIVES, independent=True, share=14),
    "shards": Subject(base="shards", use=_use_shards, attacks=_SHARDS, share=5),
    "cli-data": Subject(base="datasets", use=_LIST, attacks=_DATASETS, targets=r"manifest\.json$", share=2),
}
