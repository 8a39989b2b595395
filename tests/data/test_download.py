"""Downloads are resumed, and only files with the right checksum are kept."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tcnca.data import download as module
from tcnca.data.archives import load_checksum
from tcnca.data.datasets.spec import Download
from tcnca.data.download import download_file
from tcnca.errors import DataError

DATA = bytes(range(256)) * 40
OTHER = DATA[::-1]
NAME = "file.bin"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclasses.dataclass
class Host:
    """What the server has, how it behaves, and what it was asked."""

    data: bytes = DATA
    tag: str = '"one"'
    date: str = "Mon, 02 Jan 2006 15:04:05 GMT"
    ranges: bool = True
    status: list[int] = dataclasses.field(default_factory=list)
    """Errors to answer the next requests with; 200 for none."""
    drops: list[int] = dataclasses.field(default_factory=list)
    """Bytes after which the connection of the next answers is dropped."""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    measured: bool = True
    """Whether the length is stated."""
    asked: list[dict[str, str]] = dataclasses.field(default_factory=list)
    url: str = ""

    def download(self, checksum: str | None = f"sha256:{sha256(DATA)}", size: int | None = len(DATA)) -> Download:
        return Download(url=self.url, filename=NAME, checksum=checksum, size=size)

    def starts(self) -> list[str | None]:
        """The ranges that were asked for."""
        return [headers.get("Range") for headers in self.asked if headers["method"] == "GET"]


def handler(host: Host) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def note(self, method: str) -> int:
            host.asked.append({"method": method, **dict(self.headers.items())})
            return host.status.pop(0) if host.status else 200

        def end(self, status: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in (headers | host.headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()

        def do_HEAD(self) -> None:
            self.end(self.note("HEAD"))

        def do_GET(self) -> None:
            status = self.note("GET")
            if status != 200:
                self.end(status, Content_Length="0")
                return
            start = 0
            if host.ranges and "Range" in self.headers and self.headers["If-Range"] in (host.tag, host.date):
                start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            headers = {"ETag": host.tag, "Last-Modified": host.date}
            if host.measured:
                headers["Content-Length"] = str(len(host.data) - start)
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(host.data) - 1}/{len(host.data)}"
            self.end(206 if start else 200, **headers)
            self.wfile.write(host.data[start:][: host.drops.pop(0) if host.drops else None])

    return Handler


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setattr(module, "CHUNK", 512)
    host = Host()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(host)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        host.url = f"http://127.0.0.1:{server.server_port}/{NAME}"
        yield host
        server.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("checksum", [f"sha256:{sha256(DATA)}", f"md5:{hashlib.md5(DATA).hexdigest()}"])
def test_file_is_fetched_once(host: Host, tmp_path: Path, checksum: str) -> None:
    seen: list[tuple[int, int | None]] = []
    folder = tmp_path / "new" / "folder"
    path = download_file(host.download(checksum), folder, lambda received, total: seen.append((received, total)))
    assert path == folder / NAME
    assert path.read_bytes() == DATA
    assert names(folder) == [NAME]
    assert seen[0] == (0, len(DATA))
    assert seen[-1] == (len(DATA), len(DATA))
    assert seen == sorted(seen)
    assert len(seen) > 10
    assert download_file(host.download(checksum), folder) == path
    assert len(host.asked) == 1


def test_dropped_connections_are_taken_up_again(host: Host, tmp_path: Path) -> None:
    host.drops = [3000, 2000, 1000]
    assert download_file(host.download(), tmp_path).read_bytes() == DATA
    starts = [int(start.removeprefix("bytes=").removesuffix("-")) for start in host.starts()[1:] if start]
    assert host.starts()[0] is None
    assert starts == sorted(starts)
    assert len(starts) == 3
    assert starts[0] > 2000
    assert names(tmp_path) == [NAME]


def test_next_call_goes_on_after_the_connection_kept_failing(host: Host, tmp_path: Path) -> None:
    host.drops = [3000] + [0] * 4
    with pytest.raises(DataError, match=rf"{host.url}: the connection keeps failing .*run again .*--from"):
        download_file(host.download(), tmp_path)
    part = (tmp_path / f"{NAME}.part").read_bytes()
    assert part == DATA[: len(part)]
    assert len(part) > 2000
    host.asked.clear()
    seen: list[int] = []
    assert download_file(host.download(), tmp_path, lambda received, total: seen.append(received)).read_bytes() == DATA
    assert host.starts() == [f"bytes={len(part)}-"]
    assert seen[0] == len(part)


def leave_part(host: Host, folder: Path, size: int | None = len(DATA)) -> int:
    """A download that was broken off; the bytes that it had received."""
    host.drops = [4000] + [0] * 4
    with pytest.raises(DataError, match="keeps failing"):
        download_file(host.download(size=size), folder)
    host.asked.clear()
    return (folder / f"{NAME}.part").stat().st_size


def test_server_that_ignores_ranges_and_drops_does_not_hold_us_for_ever(host: Host, tmp_path: Path) -> None:
    host.ranges = False
    host.drops = [4000] * 100
    with pytest.raises(DataError, match="keeps failing"):
        download_file(host.download(), tmp_path)
    assert len(host.asked) == 1 + module.RETRIES


@pytest.mark.parametrize("tag", ['"two"', 'W/"weak"'])
def test_file_that_changed_is_not_spliced(host: Host, tmp_path: Path, tag: str) -> None:
    leave_part(host, tmp_path)
    host.data, host.tag, host.date = OTHER, tag, "Tue, 03 Jan 2006 15:04:05 GMT"
    assert download_file(host.download(f"sha256:{sha256(OTHER)}"), tmp_path).read_bytes() == OTHER
    assert host.asked[0]["If-Range"] == '"one"'


@pytest.mark.parametrize("size", [len(DATA), None], ids=["published", "remembered"])
def test_part_that_is_whole_needs_no_more(host: Host, tmp_path: Path, size: int | None) -> None:
    leave_part(host, tmp_path, size)
    (tmp_path / f"{NAME}.part").write_bytes(DATA)
    assert download_file(host.download(size=size), tmp_path).read_bytes() == DATA
    assert host.asked == []


def test_range_that_is_refused_makes_it_start_over(host: Host, tmp_path: Path) -> None:
    kept = leave_part(host, tmp_path)
    host.status = [416]
    assert download_file(host.download(), tmp_path).read_bytes() == DATA
    assert host.starts() == [f"bytes={kept}-", None]


def test_busy_server_is_asked_again(host: Host, tmp_path: Path) -> None:
    kept = leave_part(host, tmp_path)
    host.status = [503, 503]
    assert download_file(host.download(), tmp_path).read_bytes() == DATA
    assert host.starts() == [f"bytes={kept}-"] * 3


@pytest.mark.parametrize("earlier", [False, True], ids=["", "earlier file"])
def test_wrong_checksum_leaves_nothing(host: Host, tmp_path: Path, earlier: bool) -> None:
    host.data = OTHER
    if earlier:
        (tmp_path / NAME).write_bytes(b"no better")
    with pytest.raises(DataError) as raised:
        download_file(host.download(), tmp_path)
    for part in (host.url, sha256(DATA), sha256(OTHER), "download it again", "--from"):
        assert part in str(raised.value)
    assert names(tmp_path) == []


def test_damaged_part_is_not_kept_for_ever(host: Host, tmp_path: Path) -> None:
    leave_part(host, tmp_path)
    part = tmp_path / f"{NAME}.part"
    part.write_bytes(bytes(part.stat().st_size))
    with pytest.raises(DataError, match="expected the checksum"):
        download_file(host.download(), tmp_path)
    assert download_file(host.download(), tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("status", [403, 404, 500])
def test_refusal_names_the_address_and_the_way_out(host: Host, tmp_path: Path, status: int) -> None:
    host.status = [status] * 9
    with pytest.raises(DataError, match=rf"{host.url}: .*{status}.*download it yourself and give it with --from"):
        download_file(host.download(), tmp_path)
    assert len(host.asked) == 1
    assert names(tmp_path) == []


@pytest.mark.parametrize("checksum", [f"sha256:{sha256(DATA)}", None], ids=["published", "to be asked"])
def test_no_network_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checksum: str | None) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    url = "http://127.0.0.1:9/file.bin"
    download = Download(url=url, filename=NAME, checksum=checksum, size=None)
    with pytest.raises(DataError, match=rf"{url}: cannot be .*check the network, or .*--from"):
        download_file(download, tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_says_what_is_missing(host: Host, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"the disk is full, 10,240 bytes are missing; free .* is kept"):
        download_file(host.download(), tmp_path)
    assert f"{NAME}.part" in names(tmp_path)


def test_bytes_are_taken_as_they_are_stored(host: Host, tmp_path: Path) -> None:
    """Some servers call an archive an encoding, which is not to be undone."""
    host.headers = {"Content-Encoding": "gzip"}
    assert download_file(host.download(), tmp_path).read_bytes() == DATA


def test_checksum_that_the_host_states_is_checked(host: Host, tmp_path: Path) -> None:
    host.headers = {"X-Linked-Etag": f'"{sha256(DATA)}"'}
    path = download_file(host.download(None, None), tmp_path)
    assert load_checksum(path)
    host.asked.clear()
    assert download_file(host.download(None, None), tmp_path) == path
    assert host.asked == []
    path.write_bytes(OTHER)
    assert download_file(host.download(None, None), tmp_path).read_bytes() == DATA
    assert host.starts() == [None]


@pytest.mark.parametrize("stated", [None, '"0123abc"'])
def test_file_without_any_checksum_is_known_as_unchecked(host: Host, tmp_path: Path, stated: str | None) -> None:
    host.headers = {} if stated is None else {"X-Linked-Etag": stated}
    path = download_file(host.download(None, None), tmp_path)
    assert path.read_bytes() == DATA
    assert load_checksum(path) == ""
    host.asked.clear()
    assert download_file(host.download(None, None), tmp_path) == path
    assert host.asked == []


def test_checksum_is_asked_of_the_address_itself(host: Host, tmp_path: Path) -> None:
    """Where the host keeps the file elsewhere, the other place does not state it."""
    host.status = [302]
    host.headers = {"X-Linked-Etag": f'"{sha256(DATA)}"', "Location": "http://127.0.0.1:9/elsewhere"}
    assert load_checksum(download_file(host.download(None, None), tmp_path))
    assert [headers["method"] for headers in host.asked] == ["HEAD", "GET"]


def test_next_call_goes_on_after_an_interrupt(host: Host, tmp_path: Path) -> None:
    def interrupt(received: int, total: int | None) -> None:
        if received > 5000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_file(host.download(), tmp_path, interrupt)
    assert names(tmp_path) == [f"{NAME}.part", f"{NAME}.part.json"]
    size = (tmp_path / f"{NAME}.part").stat().st_size
    assert size > 5000
    assert download_file(host.download(), tmp_path).read_bytes() == DATA
    assert host.starts() == [None, f"bytes={size}-"]


def test_server_that_ignores_ranges_makes_it_start_over(host: Host, tmp_path: Path) -> None:
    kept = leave_part(host, tmp_path)
    host.ranges = False
    assert download_file(host.download(), tmp_path).read_bytes() == DATA
    assert host.starts() == [f"bytes={kept}-"]
