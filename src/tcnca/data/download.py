"""Download published files. An interrupted download is resumed by the next call."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import requests
import urllib3

from tcnca.data.archives import load_checksum, save_checksum
from tcnca.data.datasets.spec import Download
from tcnca.errors import DataError

Progress = Callable[[int, int | None], None]

RETRIES = 4
PAUSE = 1.0
TIMEOUT = (15.0, 60.0)
CHUNK = 1 << 18
BY_HAND = "download it yourself and give it with --from"

_DROPPED = (requests.ConnectionError, requests.Timeout, requests.HTTPError, urllib3.exceptions.HTTPError)
# Ranges and checksums refer to the bytes as stored, so refuse compression in transit.
_HEADERS = {"Accept-Encoding": "identity"}


def download_file(download: Download, folder: Path, progress: Progress = lambda received, total: None) -> Path:
    """Download a file into `folder` unless it is already there.

    Args:
        download: the file to download.
        folder: the destination, created if it is missing.
        progress: called with the bytes received so far and the total, None if that is unknown.

    Returns:
        The path of the file. Its checksum is the published one, or else the one that the host states.
    """
    target = folder / download.filename
    transfer = _Transfer(download, folder / f"{download.filename}.part", progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expected = download.checksum or _host_checksum(download.url, target)
        if target.is_file() and (expected is None or _checksum(target, expected) == expected):
            return target
        transfer.run()
        found = expected and _checksum(transfer.part, expected)
        if found == expected:
            os.replace(transfer.part, target)
        transfer.remove()
    except requests.RequestException as error:
        raise DataError(f"{download.url}: cannot be reached ({error}); check the network, or {BY_HAND}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError(
                f"{folder}: the disk is full{transfer.missing()}; free some space and run again, the received part of "
                f"{download.url} is kept in {transfer.part.name}"
            ) from error
        raise DataError(f"{folder}: cannot be written ({error}); choose another folder") from error
    if found != expected:
        # An earlier file at this path had the wrong checksum, too.
        target.unlink(missing_ok=True)
        raise DataError(
            f"{download.url}: expected the checksum {expected}, got {found}; the file was removed, run again to "
            f"download it again, or {BY_HAND}"
        )
    return target


def _checksum(path: Path, like: str) -> str:
    """Compute a checksum with the algorithm of another one."""
    algorithm = like.partition(":")[0]
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"


def _host_checksum(url: str, target: Path) -> str | None:
    """Return the sha256 that the host states, now or when `target` was downloaded; None if it states none.

    Hugging Face states it in the header of the redirect to a large file.
    """
    if target.is_file() and (saved := load_checksum(target)) is not None:
        return saved or None
    response = requests.head(url, allow_redirects=False, headers=_HEADERS, timeout=TIMEOUT)
    found = re.fullmatch('"?([0-9a-f]{64})"?', response.headers.get("X-Linked-Etag", "")) if response.ok else None
    stated = f"sha256:{found[1]}" if found else ""
    save_checksum(target, stated)
    return stated or None


class _Transfer:
    """Receives a file into `part`, continuing the part of an earlier call."""

    def __init__(self, download: Download, part: Path, progress: Progress) -> None:
        self.part = part
        self._version_file = part.with_name(f"{part.name}.json")
        self._url, self._total, self._progress = download.url, download.size, progress

    def remove(self) -> None:
        """Remove the part and its version file."""
        self.part.unlink(missing_ok=True)
        self._version_file.unlink(missing_ok=True)

    def missing(self) -> str:
        """Return the number of missing bytes for a message."""
        return "" if self._total is None else f", {self._total - self._received():,} bytes are missing"

    def _received(self) -> int:
        return self.part.stat().st_size if self.part.is_file() else 0

    def run(self) -> None:
        """Receive the complete file."""
        most, failures = self._received(), 0
        while True:
            try:
                self._receive()
                return
            except _DROPPED as error:
                received = self._received()
                # Progress resets the number of failures, so a slow download can take as long as it needs.
                most, failures = (received, 1) if received > most else (most, failures + 1)
                if most == 0:
                    raise DataError(
                        f"{self._url}: cannot be downloaded ({error}); check the network, or {BY_HAND}"
                    ) from error
                if failures > RETRIES:
                    raise DataError(
                        f"{self._url}: the connection keeps failing ({error}); run again to continue after the "
                        f"{received:,} bytes that were received, or {BY_HAND}"
                    ) from error
                time.sleep(PAUSE * 2 ** (failures - 1))

    def _receive(self) -> None:
        """Request the missing bytes once and append them to the part."""
        start, (validator, total) = self._received(), self._load_version()
        self._total = self._total or total
        if start and start == self._total:
            self._progress(start, start)
            return
        headers = dict(_HEADERS)
        if start and validator:
            headers |= {"Range": f"bytes={start}-", "If-Range": validator}
        with requests.get(self._url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            content_range = response.headers.get("Content-Range", "")
            resumed = response.status_code == 206 and content_range.startswith(f"bytes {start}-")
            if response.status_code in (206, 416) and not resumed:
                self.part.unlink(missing_ok=True)
                raise requests.ConnectionError(f"the server does not continue at byte {start:,}")
            if response.status_code >= 500:
                response.raise_for_status()
            if response.status_code not in (200, 206):
                raise DataError(f"{self._url}: the server answers {response.status_code} {response.reason}; {BY_HAND}")
            self._append(response, start if resumed else 0)

    def _append(self, response: requests.Response, start: int) -> None:
        length = response.headers.get("Content-Length", "")
        self._total = start + int(length) if length.isdigit() else self._total
        with self.part.open("ab" if start else "wb") as file:
            if start == 0:
                self._save_version(response)
            self._progress(start, self._total)
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                file.write(chunk)
                start += len(chunk)
                self._progress(start, self._total)

    def _save_version(self, response: requests.Response) -> None:
        """Store the version of the file, so that a part is never continued with the bytes of another version."""
        tag = response.headers.get("ETag", "")
        # A weak tag does not guarantee equal bytes, so it cannot be used to resume.
        validator = tag if tag.startswith('"') else response.headers.get("Last-Modified", "")
        self._version_file.write_text(json.dumps({"validator": validator, "total": self._total}), encoding="utf-8")

    def _load_version(self) -> tuple[str, int | None]:
        try:
            version = json.loads(self._version_file.read_text(encoding="utf-8"))
            return str(version["validator"]), version["total"]
        except (OSError, ValueError, KeyError, TypeError):
            return "", None
