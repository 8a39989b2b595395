"""Downloads are resumed, and only files with the right checksum are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tcnca.data import download as module
from tcnca.data.archives import checksum_file
from tcnca.data.datasets import list_datasets
from tcnca.data.datasets.spec import Download
from tcnca.data.download import download_file
from tcnca.errors import ConfigError, DataError

DATA = bytes(range(256)) * 40
OTHER = DATA[::-1]
NAME = "file.bin"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclasses.dataclass
class Host:
    """What the server has, how it behaves, and the requests that it received."""

    data: bytes = DATA
    ranges: bool = True
    lengths: bool = True
    """Whether answers state their size."""
    status: list[int] = dataclasses.field(default_factory=list)
    """Answers to the next requests; 200 for the file."""
    drops: list[int] = dataclasses.field(default_factory=list)
    """Bytes after which the connection of the next answers is dropped."""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    requests: list[dict[str, str]] = dataclasses.field(default_factory=list)
    url: str = ""

    def download(self, checksum: str | None = f"sha256:{sha256(DATA)}", size: int | None = len(DATA)) -> Download:
        return Download(url=self.url, filename=NAME, checksum=checksum, size=size)

    def ranges_requested(self) -> list[str | None]:
        return [headers.get("Range") for headers in self.requests if headers["method"] == "GET"]


def handler(host: Host) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def next_status(self, method: str) -> int:
            host.requests.append({"method": method, **dict(self.headers.items())})
            return host.status.pop(0) if host.status else 200

        def answer(self, status: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in (headers | host.headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()

        def do_HEAD(self) -> None:
            self.answer(self.next_status("HEAD"))

        def do_GET(self) -> None:
            status = self.next_status("GET")
            requested = self.headers.get("Range", "bytes=0-") if host.ranges else "bytes=0-"
            start = int(requested.removeprefix("bytes=").removesuffix("-"))
            if status == 200 and start >= len(host.data):
                status = 416
            if status != 200:
                self.answer(status, Content_Length="0")
                return
            length = {"Content_Length": str(len(host.data) - start)} if host.lengths else {}
            self.answer(206 if start else 200, **length)
            # A client that refuses the size hangs up.
            with contextlib.suppress(ConnectionError):
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
        # The server has no certificate.
        monkeypatch.setattr(module, "ALLOWED", f"http://127.0.0.1:{server.server_port}/")
        yield host
        server.shutdown()
        thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupt_download(host: Host, folder: Path) -> int:
    """Leave a partial file and return its size."""
    host.drops = [4000] + [0] * 4
    with pytest.raises(DataError, match=rf"{host.url}: the connection keeps failing .*run again .*--from"):
        download_file(host.download(), folder)
    host.requests.clear()
    part = (folder / f"{NAME}.part").read_bytes()
    assert part == DATA[: len(part)]
    assert len(part) > 3000
    return len(part)


def test_file_is_downloaded_once(host: Host, tmp_path: Path) -> None:
    calls: list[tuple[int, int | None]] = []
    folder = tmp_path / "new" / "folder"
    path = download_file(host.download(), folder, lambda received, total: calls.append((received, total)))
    assert path == folder / NAME
    assert path.read_bytes() == DATA
    assert names(folder) == [NAME]
    assert calls[0] == (0, len(DATA))
    assert calls[-1] == (len(DATA), len(DATA))
    assert calls == sorted(calls)
    assert len(calls) > 10
    assert download_file(host.download(), folder) == path
    assert len(host.requests) == 1


def test_dropped_connections_are_resumed(host: Host, tmp_path: Path) -> None:
    host.drops = [3000, 2000, 1000]
    assert download_file(host.download(), tmp_path).read_bytes() == DATA
    first, *ranges = host.ranges_requested()
    assert first is None
    starts = [int(text.removeprefix("bytes=").removesuffix("-")) for text in ranges if text]
    assert starts == sorted(starts)
    assert len(starts) == 3
    assert starts[0] > 2000
    assert names(tmp_path) == [NAME]


def test_next_call_resumes(host: Host, tmp_path: Path) -> None:
    size = interrupt_download(host, tmp_path)
    calls: list[int] = []
    path = download_file(host.download(), tmp_path, lambda received, total: calls.append(received))
    assert path.read_bytes() == DATA
    assert host.ranges_requested() == [f"bytes={size}-"]
    assert calls[0] == size


def test_next_call_resumes_after_an_interrupt(host: Host, tmp_path: Path) -> None:
    def interrupt(received: int, total: int | None) -> None:
        if received > 5000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download_file(host.download(), tmp_path, interrupt)
    assert names(tmp_path) == [f"{NAME}.part"]
    size = (tmp_path / f"{NAME}.part").stat().st_size
    assert download_file(host.download(), tmp_path).read_bytes() == DATA
    assert host.ranges_requested() == [None, f"bytes={size}-"]


def test_server_that_ignores_ranges(host: Host, tmp_path: Path) -> None:
    size = interrupt_download(host, tmp_path)
    host.ranges = False
    host.drops = [4000] * 100
    with pytest.raises(DataError, match="keeps failing"):
        download_file(host.download(), tmp_path)
    assert len(host.requests) == 1 + module.RETRIES
    host.drops.clear()
    assert download_file(host.download(), tmp_path).read_bytes() == DATA
    assert host.ranges_requested()[0] == f"bytes={size}-"


@pytest.mark.parametrize("part", [DATA, DATA + b"more", bytes(5000)], ids=["complete", "too long", "damaged"])
def test_part_of_an_earlier_call(host: Host, tmp_path: Path, part: bytes) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(part)
    if part != DATA:
        with pytest.raises(DataError, match="expected the checksum"):
            download_file(host.download(), tmp_path)
        assert names(tmp_path) == []
    assert download_file(host.download(), tmp_path).read_bytes() == DATA


def test_part_is_not_continued_without_a_checksum(host: Host, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(OTHER[:5000])
    assert download_file(host.download(None, None), tmp_path).read_bytes() == DATA
    assert host.ranges_requested() == [None]


def test_busy_server_is_tried_again(host: Host, tmp_path: Path) -> None:
    size = interrupt_download(host, tmp_path)
    host.status = [503, 503]
    assert download_file(host.download(), tmp_path).read_bytes() == DATA
    assert host.ranges_requested() == [f"bytes={size}-"] * 3


def test_wrong_checksum_is_refused(host: Host, tmp_path: Path) -> None:
    host.data = OTHER
    for _ in range(2):
        message = f"{host.url}: expected the checksum sha256:{sha256(DATA)}, got sha256:{sha256(OTHER)}; .*--from"
        with pytest.raises(DataError, match=message):
            download_file(host.download(), tmp_path)
        assert f"{NAME}.part" not in names(tmp_path)
        (tmp_path / NAME).write_bytes(b"an earlier file with a wrong checksum")


@pytest.mark.parametrize("status", [403, 404, 500])
def test_error_of_the_server(host: Host, tmp_path: Path, status: int) -> None:
    host.status = [status] * 9
    with pytest.raises(DataError, match=rf"{host.url}: .*{status}.*download it yourself and give it with --from"):
        download_file(host.download(), tmp_path)
    assert len(host.requests) == 1
    assert names(tmp_path) == []


@pytest.mark.parametrize("checksum", [f"sha256:{sha256(DATA)}", None], ids=["published", "stated by the host"])
def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checksum: str | None) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    url = "https://127.0.0.1:9/file.bin"
    download = Download(url=url, filename=NAME, checksum=checksum, size=None)
    with pytest.raises(DataError, match=rf"{url}: cannot be .*check the network, or .*--from"):
        download_file(download, tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_full_disk(host: Host, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"the disk is full; free some space .* is kept"):
        download_file(host.download(), tmp_path)
    assert f"{NAME}.part" in names(tmp_path)


def test_content_encoding_is_ignored(host: Host, tmp_path: Path) -> None:
    """Some servers declare the compression of an archive as an encoding of the transfer."""
    host.headers = {"Content-Encoding": "gzip"}
    assert download_file(host.download(), tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("status", [200, 302])
def test_checksum_stated_by_the_host(host: Host, tmp_path: Path, status: int) -> None:
    """It is in the answer of the address itself, not in that of the address to which it redirects."""
    host.status = [status]
    host.headers = {"X-Linked-Etag": f'"{sha256(DATA)}"', "Location": "http://127.0.0.1:9/elsewhere"}
    path = download_file(host.download(None, None), tmp_path)
    assert [headers["method"] for headers in host.requests] == ["HEAD", "GET"]
    assert checksum_file(path).read_text() == f"sha256:{sha256(DATA)}"
    assert download_file(host.download(None, None), tmp_path) == path
    assert len(host.requests) == 2
    path.write_bytes(OTHER)
    assert download_file(host.download(None, None), tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("stated", [None, '"0123abc"'])
def test_file_without_a_checksum(host: Host, tmp_path: Path, stated: str | None) -> None:
    host.headers = {} if stated is None else {"X-Linked-Etag": stated}
    path = download_file(host.download(None, None), tmp_path)
    assert path.read_bytes() == DATA
    assert names(tmp_path) == [NAME]
    host.requests.clear()
    assert download_file(host.download(None, None), tmp_path) == path
    assert host.requests == []


def test_only_https_is_opened(tmp_path: Path) -> None:
    download = Download(url="http://127.0.0.1:9/file.bin", filename=NAME, checksum=None, size=None)
    with pytest.raises(DataError, match=r"expected addresses with https:// only .*--from"):
        download_file(download, tmp_path)
    for spec in list_datasets():
        for each in spec.downloads:
            assert each.url.startswith("https://")
    with pytest.raises(ConfigError, match="checksum: expected sha256"):
        Download(url="https://example.org", filename=NAME, checksum="md5:00", size=None)


def test_redirect_to_another_address_is_refused(host: Host, tmp_path: Path) -> None:
    host.status, host.headers = [302], {"Location": f"http://localhost:{host.url.split(':')[2]}"}
    with pytest.raises(DataError, match=r"expected addresses with .* only \(.*http://localhost"):
        download_file(host.download(), tmp_path)
    assert len(host.requests) == 1
    assert names(tmp_path) == []


@pytest.mark.parametrize("data", [DATA + b"more", DATA * 100], ids=["few", "many"])
def test_file_that_is_too_large_is_refused(host: Host, tmp_path: Path, data: bytes) -> None:
    host.data = data
    with pytest.raises(DataError, match=f"expected {len(DATA):,} bytes, got {len(data)}"):
        download_file(host.download(), tmp_path)
    assert NAME not in names(tmp_path)


@pytest.mark.parametrize("size", [len(DATA), None], ids=["known", "unknown"])
def test_endless_answer_is_refused(host: Host, tmp_path: Path, size: int | None) -> None:
    host.data, host.lengths = DATA * 1000, False
    with pytest.raises(DataError, match=r"expected a stated size, got none|expected 10,240 bytes, got more"):
        download_file(host.download(None, size), tmp_path)
    assert NAME not in names(tmp_path)
    part = tmp_path / f"{NAME}.part"
    assert not part.exists() or part.stat().st_size <= len(DATA)


@pytest.mark.parametrize("text", [b"", b"odd:00", b"md5:" + bytes(40), b"\xff" * 200])
def test_damaged_checksum_file_is_ignored(host: Host, tmp_path: Path, text: bytes) -> None:
    path = download_file(host.download(None, None), tmp_path)
    checksum_file(path).write_bytes(text)
    assert download_file(host.download(None, None), tmp_path) == path
