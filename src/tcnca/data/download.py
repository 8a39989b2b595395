"""Download published files. An interrupted download is resumed by the next call."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pooch  # type: ignore[import-untyped]
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


def download_file(download: Download, folder: Path, progress: Progress | None = None) -> Path:
    """Download a file into `folder` unless it is already there.

    Args:
        download: the file to download.
        folder: the destination, created if it is missing.
        progress: called with the bytes received so far and the total, None if that is unknown.

    Returns:
        The path of the file. Its checksum is the published one, or else the one that the host states.
    """
    target = folder / download.filename
    receiver = _Receiver(download, folder / f"{download.filename}.part", progress)
    # Pooch reports downloads on the terminal, which `progress` already does.
    pooch.get_logger().setLevel("WARNING")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expected = download.checksum or _host_checksum(download.url, target)
        receiver.algorithm = expected.partition(":")[0] if expected else None
        pooch.retrieve(download.url, expected, fname=download.filename, path=folder, downloader=receiver)
    except DataError:
        raise
    except requests.RequestException as error:
        raise DataError(f"{download.url}: cannot be reached ({error}); check the network, or {BY_HAND}") from error
    except ValueError as error:
        if receiver.found is None:
            raise
        # An earlier file at this path had the wrong checksum, too.
        target.unlink(missing_ok=True)
        raise DataError(
            f"{download.url}: expected the checksum {expected}, got {receiver.found}; the file was removed, run again "
            f"to download it again, or {BY_HAND}"
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError(
                f"{folder}: the disk is full{receiver.missing()}; free some space and run again, the received part of "
                f"{download.url} is kept in {receiver.part.name}"
            ) from error
        raise DataError(f"{folder}: cannot be written ({error}); choose another folder") from error
    return target


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


class _Receiver:
    """Receive a file for pooch, continuing the part of an earlier call."""

    def __init__(self, download: Download, part: Path, progress: Progress | None) -> None:
        self.part = part
        self.algorithm: str | None = None
        self.found: str | None = None
        self._url = download.url
        self._version_file = part.with_name(f"{part.name}.json")
        self._total = download.size
        self._progress = progress or (lambda received, total: None)

    def __call__(self, url: str, output_file: str, pooch_object: object) -> None:
        """Write the complete file to `output_file` and remove the part."""
        self._receive_all()
        os.replace(self.part, output_file)
        self._version_file.unlink(missing_ok=True)
        if self.algorithm:
            # Pooch deletes a file with a wrong checksum, so compute it for the error message.
            self.found = f"{self.algorithm}:{pooch.file_hash(output_file, self.algorithm)}"

    def missing(self) -> str:
        """Return the number of missing bytes for a message."""
        return "" if self._total is None else f", {self._total - self._received():,} bytes are missing"

    def _received(self) -> int:
        return self.part.stat().st_size if self.part.is_file() else 0

    def _receive_all(self) -> None:
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
            resumed = response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
                f"bytes {start}-"
            )
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
        total = start + int(length) if length.isdigit() else self._total
        self._total = total
        with self.part.open("ab" if start else "wb") as file:
            if start == 0:
                self._save_version(response, total)
            self._progress(start, total)
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                file.write(chunk)
                start += len(chunk)
                self._progress(start, total)

    def _save_version(self, response: requests.Response, total: int | None) -> None:
        """Store the version of the file, so that a part is never continued with the bytes of another version."""
        tag = response.headers.get("ETag", "")
        # A weak tag does not guarantee equal bytes, so it cannot be used to resume.
        validator = tag if tag.startswith('"') else response.headers.get("Last-Modified", "")
        self._version_file.write_text(json.dumps({"validator": validator, "total": total}), encoding="utf-8")

    def _load_version(self) -> tuple[str, int | None]:
        try:
            version = json.loads(self._version_file.read_text(encoding="utf-8"))
            return str(version["validator"]), version["total"]
        except (OSError, ValueError, KeyError, TypeError):
            return "", None
