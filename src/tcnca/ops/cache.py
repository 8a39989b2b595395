"""Keep machine code on disk: load only what this user wrote, in a folder that nobody else can write to."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

_DIGEST_SIZE = hashlib.sha256().digest_size
# Never waits for a pipe, and never follows a link to another file. Windows has neither.
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def cache_folder() -> Path:
    """Return where compiled code is kept: `$TCNCA_CACHE`, or `~/.cache/tcnca`."""
    return Path(os.environ.get("TCNCA_CACHE") or Path.home() / ".cache" / "tcnca")


def is_private(found: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user, and nobody else can write to it."""
    if not hasattr(os, "geteuid"):
        return True  # Windows: the folders of a user are protected by their access lists
    # The permissions of a link are no permissions.
    shared = 0 if stat.S_ISLNK(found.st_mode) else found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return found.st_uid == os.geteuid() and not shared


def private_folder(folder: Path) -> bool:
    """Return whether a folder, and the link to it if its path is one, are private."""
    try:
        private = is_private(folder.lstat()) and is_private(folder.stat())
    except OSError:
        return False
    if not private:
        _warn_once(folder)
    return private


@functools.cache
def _warn_once(folder: Path) -> None:
    warnings.warn(
        f"{folder}: expected a folder of this user that nobody else can write to; its machine code is not used, and "
        f"kernels are compiled again in every process. Remove it, or run `chmod -R go-w {folder}` if it is yours",
        RuntimeWarning,
        stacklevel=2,
    )


def load(path: Path) -> bytes | None:
    """Return what `store` has written, or None if there is nothing, it is damaged, or others could have changed it."""
    if not private_folder(path.parent):
        return None
    try:
        with open(os.open(path, _READ), "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read() if stat.S_ISREG(found.st_mode) and is_private(found) else b""
    except OSError:
        return None
    digest, content = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return content if digest == _digest(path, content) else None


def store(path: Path, content: bytes) -> None:
    """Write a file for `load`, completely or not at all; do nothing where that is not possible."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if private_folder(path.parent):
            handle, name = tempfile.mkstemp(dir=path.parent)
            try:
                with open(handle, "wb") as file:
                    file.write(_digest(path, content) + content)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise


def _digest(path: Path, content: bytes) -> bytes:
    """Return a digest of the content and of what it is the machine code of, which the file's name says."""
    return hashlib.sha256(path.name.encode() + b"\0" + content).digest()
