"""Fetching published files: what was received is kept when the connection fails, and the next call goes on from it."""

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

from tcnca.data.sources.published import Download, note_checksum, noted_checksum
from tcnca.errors import DataError

Progress = Callable[[int, int | None], None]

RETRIES = 4
PAUSE = 1.0
TIMEOUT = (15.0, 60.0)
CHUNK = 1 << 18
BY_HAND = "fetch it by hand and give --from"

_DROPPED = (requests.ConnectionError, requests.Timeout, requests.HTTPError, urllib3.exceptions.HTTPError)
# The bytes are wanted as they are stored: ranges and checksums are of those.
_AS_STORED = {"Accept-Encoding": "identity"}


def fetch(download: Download, folder: Path, progress: Progress | None = None) -> Path:
    """Fetch a file into `folder`, unless it is there already.

    Args:
        download: what to fetch.
        folder: where to put it; made if it is missing.
        progress: called with the number of bytes so far and of all, None if that is not known.

    Returns:
        The file, which has the checksum that was published, or that the host states. If there is neither,
        `is_unchecked` says so.
    """
    target = folder / download.filename
    receiver = _Receiver(download, folder / f"{download.filename}.part", progress)
    # Pooch announces on the terminal what it is about to do, which `progress` is for.
    pooch.get_logger().setLevel("WARNING")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        expected = download.checksum or _stated(download.url, target)
        receiver.algorithm = expected.partition(":")[0] if expected else None
        pooch.retrieve(download.url, expected, fname=download.filename, path=folder, downloader=receiver)
    except DataError:
        raise
    except requests.RequestException as error:
        raise DataError(f"{download.url}: cannot be reached ({error}); is there a network? Else {BY_HAND}") from error
    except ValueError as error:
        if receiver.found is None:
            raise
        # Neither may an earlier file stay that was no better.
        target.unlink(missing_ok=True)
        raise DataError(
            f"{download.url}: its checksum is {receiver.found}, expected is {expected}; what was received has been "
            f"removed, fetch it again, or {BY_HAND}"
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DataError(
                f"{folder}: the disk is full{receiver.missing()}; free some space and run again, what was received of "
                f"{download.url} is kept in {receiver.part.name}"
            ) from error
        raise DataError(f"{folder}: cannot be written ({error}); choose another folder") from error
    return target


def _stated(url: str, target: Path) -> str | None:
    """The sha256 that the host states, now or when `target` was fetched; None if it states none.

    Hugging Face states it with the address at which it keeps a large file.
    """
    if target.is_file() and (noted := noted_checksum(target)) is not None:
        return noted or None
    response = requests.head(url, allow_redirects=False, headers=_AS_STORED, timeout=TIMEOUT)
    found = re.fullmatch('"?([0-9a-f]{64})"?', response.headers.get("X-Linked-Etag", "")) if response.ok else None
    stated = f"sha256:{found[1]}" if found else ""
    note_checksum(target, stated)
    return stated or None


class _Receiver:
    """Receives a file for pooch, going on from the part that an earlier call has left."""

    def __init__(self, download: Download, part: Path, progress: Progress | None) -> None:
        self.part = part
        self.algorithm: str | None = None
        self.found: str | None = None
        self._url = download.url
        self._memory = part.with_name(f"{part.name}.json")
        self._total = download.size
        self._progress = progress or (lambda received, total: None)

    def __call__(self, url: str, output_file: str, pooch_object: object) -> None:
        """Leave the whole file at `output_file`. The part is gone then, whatever its checksum turns out to be."""
        self._receive_all()
        os.replace(self.part, output_file)
        self._memory.unlink(missing_ok=True)
        if self.algorithm:
            # Pooch deletes a file that has not the right checksum; the user is to hear which it has.
            self.found = f"{self.algorithm}:{pooch.file_hash(output_file, self.algorithm)}"

    def missing(self) -> str:
        """How much is still to come, in words."""
        return "" if self._total is None else f", {self._total - self._kept():,} bytes are still to come"

    def _kept(self) -> int:
        return self.part.stat().st_size if self.part.is_file() else 0

    def _receive_all(self) -> None:
        most, failures = self._kept(), 0
        while True:
            try:
                self._receive()
                return
            except _DROPPED as error:
                kept = self._kept()
                # Who gets on, however slowly, may try for ever; who starts over each time may not.
                most, failures = (kept, 1) if kept > most else (most, failures + 1)
                if most == 0:
                    raise DataError(
                        f"{self._url}: cannot be fetched ({error}); is there a network? Else {BY_HAND}"
                    ) from error
                if failures > RETRIES:
                    raise DataError(
                        f"{self._url}: the connection keeps failing ({error}); run again to go on from the "
                        f"{kept:,} bytes that were received, or {BY_HAND}"
                    ) from error
                time.sleep(PAUSE * 2 ** (failures - 1))

    def _receive(self) -> None:
        """Ask once for what is missing, and append it to the part."""
        start, (validator, total) = self._kept(), self._remembered()
        self._total = self._total or total
        if start and start == self._total:
            self._progress(start, start)
            return
        headers = dict(_AS_STORED)
        if start and validator:
            headers |= {"Range": f"bytes={start}-", "If-Range": validator}
        with requests.get(self._url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            go_on = response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
                f"bytes {start}-"
            )
            if response.status_code in (206, 416) and not go_on:
                self.part.unlink(missing_ok=True)
                raise requests.ConnectionError(f"the server does not go on from byte {start:,}")
            if response.status_code >= 500:
                response.raise_for_status()
            if response.status_code not in (200, 206):
                raise DataError(f"{self._url}: answers {response.status_code} {response.reason}; {BY_HAND}")
            self._append(response, start if go_on else 0)

    def _append(self, response: requests.Response, start: int) -> None:
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdigit() else self._total
        self._total = total
        with self.part.open("ab" if start else "wb") as file:
            if start == 0:
                self._remember(response, total)
            self._progress(start, total)
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                file.write(chunk)
                start += len(chunk)
                self._progress(start, total)

    def _remember(self, response: requests.Response, total: int | None) -> None:
        """Which version of the file the part is of: it is not to be continued with another one's bytes."""
        tag = response.headers.get("ETag", "")
        # A weak tag does not promise equal bytes, so no range may depend on it.
        validator = tag if tag.startswith('"') else response.headers.get("Last-Modified", "")
        self._memory.write_text(json.dumps({"validator": validator, "total": total}), encoding="utf-8")

    def _remembered(self) -> tuple[str, int | None]:
        try:
            memory = json.loads(self._memory.read_text(encoding="utf-8"))
            return str(memory["validator"]), memory["total"]
        except (OSError, ValueError, KeyError, TypeError):
            return "", None
