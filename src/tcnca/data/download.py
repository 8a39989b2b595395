"""Download published files over HTTPS. An interrupted download is resumed by the next call, which pooch cannot do."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from pathlib import Path

import requests
import urllib3

from tcnca.data.archives import checksum_file, file_sha256, read_checksum
from tcnca.data.datasets.spec import Download
from tcnca.errors import DataError

Progress = Callable[[int, int | None], None]

RETRIES = 4
PAUSE = 1.0
TIMEOUT = (15.0, 60.0)
CHUNK = 1 << 18
ALLOWED = "https://"
"""Addresses start with this, and so do those to which they redirect."""
BY_HAND = "download it yourself and give it with --from"

# Ranges and checksums refer to the bytes as stored, so refuse compression in transit.
_HEADERS = {"Accept-Encoding": "identity"}


def download_file(download: Download, folder: Path, progress: Progress = lambda received, total: None) -> Path:
    """Download a file into `folder` unless it is already there.

    Its checksum is the published one, or else the one that the host states. `progress` is called with the bytes
    received so far and the total, None if that is unknown.
    """
    target, part = folder / download.filename, folder / f"{download.filename}.part"
    stated = checksum_file(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expected = download.checksum or read_checksum(target)
        if target.is_file() and (expected is None or file_sha256(target) == expected):
            return target
        expected = download.checksum or _host_checksum(download.url)
        if expected is None:
            # Without a checksum, a part could be continued with the bytes of another version of the file.
            part.unlink(missing_ok=True)
        _receive_all(download, part, progress)
        found = expected and file_sha256(part)
        if found != expected:
            part.unlink()
            raise DataError(
                f"{download.url}: expected the checksum {expected}, got {found}; the file was removed, run again to "
                f"download it again, or {BY_HAND}"
            )
        if expected and not download.checksum:
            stated.write_text(expected, encoding="utf-8")
        return part.replace(target)
    except requests.exceptions.InvalidSchema as error:
        raise DataError(f"{download.url}: expected addresses with {ALLOWED} only ({error}); {BY_HAND}") from error
    except requests.RequestException as error:
        raise DataError(f"{download.url}: cannot be reached ({error}); check the network, or {BY_HAND}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError(
                f"{folder}: the disk is full; free some space and run again, the received part of {download.url} is "
                f"kept in {part.name}"
            ) from error
        raise DataError(f"{folder}: cannot be written ({error}); choose another folder") from error


def _session() -> requests.Session:
    """Return a session that opens only addresses which start with `ALLOWED`."""
    session = requests.Session()
    session.adapters.clear()
    session.mount(ALLOWED, requests.adapters.HTTPAdapter())
    return session


def _host_checksum(url: str) -> str | None:
    """Return the sha256 that the host states: Hugging Face does, in the header of the redirect to a large file."""
    with _session() as session:
        response = session.head(url, allow_redirects=False, headers=_HEADERS, timeout=TIMEOUT)
    found = re.fullmatch('"?([0-9a-f]{64})"?', response.headers.get("X-Linked-Etag", "")) if response.ok else None
    return f"sha256:{found[1]}" if found else None


def _size(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _receive_all(download: Download, part: Path, progress: Progress) -> None:
    """Receive the file into `part`; try again after failures."""
    most, failures = _size(part), 0
    while True:
        try:
            _receive(download, part, progress)
            return
        except (requests.ConnectionError, requests.Timeout, requests.HTTPError, urllib3.exceptions.HTTPError) as error:
            received = _size(part)
            # Progress resets the number of failures, so a slow download can take as long as it needs.
            most, failures = (received, 1) if received > most else (most, failures + 1)
            if most == 0:
                raise DataError(
                    f"{download.url}: cannot be downloaded ({error}); check the network, or {BY_HAND}"
                ) from error
            if failures > RETRIES:
                raise DataError(
                    f"{download.url}: the connection keeps failing ({error}); run again to continue after the "
                    f"{received:,} bytes that were received, or {BY_HAND}"
                ) from error
            time.sleep(PAUSE * 2 ** (failures - 1))


def _receive(download: Download, part: Path, progress: Progress) -> None:
    """Request the bytes that are missing in `part` once, and append them."""
    start = _size(part)
    headers = _HEADERS | ({"Range": f"bytes={start}-"} if start else {})
    with _session() as session, session.get(download.url, headers=headers, stream=True, timeout=TIMEOUT) as response:
        if response.status_code == 416:  # nothing is missing, or the part is longer than the file
            return
        if response.status_code >= 500:
            response.raise_for_status()
        if response.status_code not in (200, 206):
            raise DataError(f"{download.url}: the server answers {response.status_code} {response.reason}; {BY_HAND}")
        # A server that does not support ranges sends the whole file.
        start = start if response.status_code == 206 else 0
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if re.fullmatch("[0-9]{1,18}", length) else download.size
        if total is None or total > (download.size or total):
            expected = "a stated size" if download.size is None else f"{download.size:,} bytes"
            raise DataError(f"{download.url}: expected {expected}, got {total or 'none'}; {BY_HAND}")
        with part.open("ab" if start else "wb") as file:
            progress(start, total)
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                start += len(chunk)
                if start > total:
                    raise DataError(f"{download.url}: expected {total:,} bytes, got more; {BY_HAND}")
                file.write(chunk)
                progress(start, total)
