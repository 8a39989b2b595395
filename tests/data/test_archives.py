"""Files are read in whatever way they are packed; damaged files are named, and nothing is written to disk."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from tcnca.data import archives
from tcnca.data.archives import find_file, iter_members, open_decompressed, read_all, read_tsv
from tcnca.errors import DataError
from tests.data.helpers import PACKINGS, TARS, packed, tarred, write, written, zipped

TEXT = bytes(range(256)) * 700
FILES = {"top.txt": b"top", "folder/one.txt": b"one", "folder/deep/two.bin": TEXT}


def all_members(path: Path) -> dict[str, bytes]:
    return {name: read_all(reader, f"{path}: {name}", 2**20) for name, reader in iter_members(path)}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ["named.txt", "named.gz", "named.zip"])
def test_compression_is_detected_from_the_content(tmp_path: Path, packing: str, name: str) -> None:
    with open_decompressed(written(tmp_path / name, packed(TEXT, packing))) as reader:
        assert reader.read() == TEXT


@pytest.mark.parametrize("keep", [0.3, 0.9])
@pytest.mark.parametrize("packing", PACKINGS[1:])
def test_truncated_file_is_refused(tmp_path: Path, packing: str, keep: float) -> None:
    data = packed(os.urandom(5000), packing)
    path = written(tmp_path / "short", data[: int(len(data) * keep)])
    message = r"short: is truncated, damaged .*download it again"
    with pytest.raises(DataError, match=message), open_decompressed(path) as reader:
        read_all(reader, path, 2**20)


@pytest.mark.parametrize("files", [{}, {"one": b"1", "two": b"2"}], ids=["none", "two"])
def test_zip_must_hold_one_file(tmp_path: Path, files: dict[str, bytes]) -> None:
    path = written(tmp_path / "several.zip", zipped(files))
    with pytest.raises(DataError, match=rf"several.zip: expected one file in the archive, got {len(files)}"):
        open_decompressed(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: cannot be opened \(No such file or directory\)"):
        open_decompressed(tmp_path / "nowhere")


def test_members_of_folders_and_archives(tmp_path: Path) -> None:
    assert all_members(write(tmp_path / "folder", FILES)) == FILES
    assert all_members(written(tmp_path / "zip", zipped(FILES))) == FILES
    for packing in TARS:
        path = written(tmp_path / packing, tarred(FILES, packing.removeprefix(".tar")))
        assert all_members(path) == FILES


def test_damaged_member_of_a_zip_is_named(tmp_path: Path) -> None:
    data = bytearray(zipped({"member": os.urandom(5000)}))
    data[2000] ^= 0xFF
    with pytest.raises(DataError, match="damaged: member: is truncated, damaged"):
        all_members(written(tmp_path / "damaged", bytes(data)))


def test_encrypted_zip_is_refused(tmp_path: Path) -> None:
    data = bytearray(zipped({"secret": b"text"}))
    directory = data.index(b"PK\x01\x02")
    # The lowest flag of both headers says that a member is encrypted.
    data[6] |= 1
    data[directory + 8] |= 1
    with pytest.raises(DataError, match=r"locked: cannot be unpacked .*unpack it yourself"):
        all_members(written(tmp_path / "locked", bytes(data)))


@pytest.mark.parametrize("name", ["../outside", "/outside", "folder/../../outside"])
def test_member_names_are_not_used_as_paths(tmp_path: Path, name: str) -> None:
    inner = tmp_path / "inner"
    for data in (tarred({name: b"evil"}), zipped({name: b"evil"})):
        path = written(inner / "archive", data)
        before = sorted(tmp_path.rglob("*"))
        assert list(all_members(path).values()) == [b"evil"]
        assert sorted(tmp_path.rglob("*")) == before
        assert not Path("/outside").exists()


def test_links_and_devices_are_skipped(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            entry = tarfile.TarInfo(f"kind {kind!r}")
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
        archive.addfile(tarfile.TarInfo("plain"))
    assert all_members(written(tmp_path / "tar", buffer.getvalue())) == {"plain": b""}

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as package:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        package.writestr(info, "/etc/passwd")
        package.writestr("plain", b"")
    assert all_members(written(tmp_path / "zip", buffer.getvalue())) == {"plain": b""}

    folder = write(tmp_path / "folder", {"plain": b""})
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "fifo")
    assert all_members(folder) == {"plain": b""}


@pytest.mark.parametrize("packing", PACKINGS)
def test_find_file_with_any_suffix(tmp_path: Path, packing: str) -> None:
    assert find_file(tmp_path, "name.tsv") is None
    path = written(tmp_path / f"name.tsv{packing}", b"")
    assert find_file(tmp_path, "name.tsv") == path


def zeros(packing: str, count: int) -> bytes:
    """Compress `count` MB of zeros, in several parts where the format allows it."""
    if packing == ".zip":
        return zipped({"inside": bytes(count * 2**20)})
    return packed(bytes(2**20), packing) * count


@pytest.mark.parametrize("packing", PACKINGS[1:])
def test_decompression_bomb_is_refused(tmp_path: Path, packing: str) -> None:
    path = written(tmp_path / "bomb", zeros(packing, 65))
    assert path.stat().st_size < 10**6
    message = (
        r"bomb: expected at most 67,108,864 bytes when unpacked, 50 times its size, got more; .*unpack it yourself"
    )
    with pytest.raises(DataError, match=message), open_decompressed(path) as reader:
        read_all(reader, path, 10**9)
    # A file that unpacks to less than this is harmless.
    with open_decompressed(written(tmp_path / "small", zeros(packing, 20))) as reader:
        assert len(read_all(reader, path, 2**26)) == 20 * 2**20


def test_file_that_is_read_at_once_is_limited(tmp_path: Path) -> None:
    path = written(tmp_path / "file", bytes(1001))
    with open_decompressed(path) as reader:
        assert len(read_all(reader, path, 1001)) == 1001
    with open_decompressed(path) as reader, pytest.raises(DataError, match="file: expected at most 1,000 bytes"):
        read_all(reader, path, 1000)


def test_members_of_a_bomb_are_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "bomb.zip", zipped({f"{n}": bytes(20 * 2**20) for n in range(4)}))
    seen: list[str] = []
    with pytest.raises(DataError, match=r"bomb\.zip: expected at most"):
        seen.extend(name for name, _ in iter_members(path))
    assert len(seen) < 4


@pytest.mark.parametrize("size", [2**30, 2**60, -1, -(2**40)])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize("packing", ["", ".gz"])
def test_tar_header_with_an_impossible_size(tmp_path: Path, size: int, kind: bytes, packing: str) -> None:
    entry = tarfile.TarInfo("name")
    entry.type, entry.size = kind, size
    data = entry.tobuf(format=tarfile.GNU_FORMAT) + bytes(4096)
    with pytest.raises(DataError, match="archive: is truncated, damaged or not an archive"):
        all_members(written(tmp_path / "archive", packed(data, packing)))


def test_many_members_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "archive", packed(tarfile.TarInfo("name").tobuf() * 12_000 + bytes(1024), ".gz"))
    with pytest.raises(DataError, match=r"archive: expected at most 10,\d{3} members, one in 400 bytes, got more"):
        all_members(path)


def test_nested_tar_headers_are_refused(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("name")
    entry.type = tarfile.XHDTYPE
    with pytest.raises(DataError, match="archive: "):
        all_members(written(tmp_path / "archive", entry.tobuf() * 5000 + bytes(1024)))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(DataError, match=f"{name}: expected a file or a folder, got a pipe or a device"):
            open_decompressed(tmp_path / name)
        with pytest.raises(DataError, match=f"{name}: expected a file or a folder, got a pipe or a device"):
            all_members(tmp_path / name)


def test_long_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_LINE", 100)
    with written(tmp_path / "a.tsv", b"a\tb\n" + b"c" * 200).open("rb") as reader:
        rows = read_tsv(reader, "a.tsv", 2)
        next(rows)
        with pytest.raises(DataError, match=r"a\.tsv, line 2: expected fewer than 100 bytes, got more"):
            next(rows)
