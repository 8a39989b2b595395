"""Machine code on disk: it is loaded only if nobody else can have written it, and if it is whole."""

from __future__ import annotations

import errno
import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tcnca.ops import cache
from tcnca.ops.tcn.cuda import nvrtc
from tests.ops.interpreter import not_interpreted

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
SHARED = pytest.warns(RuntimeWarning, match="expected a folder of this user that nobody else can write to")


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    cache._warn_once.cache_clear()


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the sources that were compiled, by a pretended compiler into a cache in `tmp_path`."""
    sources: list[str] = []

    def compile_source(text: str, architecture: str) -> bytes:
        sources.append(text)
        return f"{text} for {architecture}".encode()

    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    monkeypatch.setattr(nvrtc, "_call", lambda name, *arguments: (12, 9))
    monkeypatch.setenv("TCNCA_CACHE", str(tmp_path))
    return sources


def run(text: str = "a") -> None:
    assert nvrtc.cubin(text, "sm_90") == f"{text} for sm_90".encode()


def only_file(folder: Path) -> Path:
    (path,) = (folder / "kernels").iterdir()
    return path


def test_what_was_compiled_once_is_loaded(tmp_path: Path, compiled: list[str]) -> None:
    run()
    run()
    assert compiled == ["a"]
    assert (tmp_path / "kernels").stat().st_mode & 0o777 == 0o700
    assert only_file(tmp_path).stat().st_mode & 0o777 == 0o600


def test_a_damaged_or_foreign_file_is_replaced(tmp_path: Path, compiled: list[str]) -> None:
    run()
    path = only_file(tmp_path)
    whole = path.read_bytes()
    run("b")
    (other,) = set((tmp_path / "kernels").iterdir()) - {path}
    foreign = other.read_bytes()
    for content in (whole[:-1], whole[:-1] + b"1", whole + b"x", b"", whole[:10], b"a for sm_90", foreign):
        path.write_bytes(content)
        compiled.clear()
        run()
        run()
        assert compiled == ["a"]
        assert path.read_bytes() == whole


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_replaced(tmp_path: Path, compiled: list[str], mode: int) -> None:
    run()
    only_file(tmp_path).chmod(mode)
    run()
    assert compiled == ["a", "a"]
    assert only_file(tmp_path).stat().st_mode & 0o777 == 0o600
    run()
    assert compiled == ["a", "a"]


def test_a_link_or_a_pipe_instead_of_a_file_is_replaced(tmp_path: Path, compiled: list[str]) -> None:
    run()
    path = only_file(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    for make in (lambda: path.symlink_to(elsewhere), lambda: os.mkfifo(path)):
        make()
        compiled.clear()
        run()
        assert compiled == ["a"]
        assert path.is_file()
        assert not path.is_symlink()
        path.unlink()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, compiled: list[str], mode: int) -> None:
    run()
    (tmp_path / "kernels").chmod(mode)
    with SHARED:
        run()
    run("b")
    run("b")
    assert compiled == ["a", "a", "b", "b"]
    assert len(list((tmp_path / "kernels").iterdir())) == 1


@pytest.mark.parametrize("what", ["folder", "link"])
def test_what_belongs_to_others_is_not_used(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run()
    if what == "link":
        (tmp_path / "kernels").rename(tmp_path / "real")
        (tmp_path / "kernels").symlink_to("real")
        run()
        assert compiled == ["a"]
        if os.geteuid() != 0:
            pytest.skip("only root can give a link away")
        os.lchown(tmp_path / "kernels", 12345, -1)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    with SHARED:
        run()
    assert compiled == ["a", "a"]


def test_a_file_of_another_user_is_replaced(tmp_path: Path, compiled: list[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    run()
    os.chown(only_file(tmp_path), 12345, -1)
    run()
    run()
    assert compiled == ["a", "a"]
    assert only_file(tmp_path).stat().st_uid == 0


@pytest.mark.parametrize("where", ["open", "write", "replace"])
def test_a_full_disk_leaves_no_file(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full:
        def __init__(self, handle: int, mode: str) -> None:
            self.handle = handle

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            os.close(self.handle)

        write = fail

    with monkeypatch.context() as patch:
        if where == "open":
            patch.setattr(tempfile, "mkstemp", fail)
        elif where == "replace":
            patch.setattr(os, "replace", fail)
        else:
            patch.setattr(cache, "open", Full, raising=False)
        run()
    assert list((tmp_path / "kernels").iterdir()) == []
    run()
    run()
    assert compiled == ["a", "a"]


def test_without_a_folder_every_process_compiles(tmp_path: Path, compiled: list[str]) -> None:
    (tmp_path / "kernels").write_text("no folder")
    run()
    run()
    assert compiled == ["a", "a"]


@not_interpreted
@pytest.mark.parametrize("shared", ["", ".", "key", "file"])
def test_tritons_cache_is_used_if_it_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    pytest.importorskip("triton")
    launcher: Any = importlib.import_module("tcnca.ops.launcher")
    kernels: Any = importlib.import_module("tcnca.ops.ema.triton_kernels")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    build = launcher.Build(
        kernels.prepare, ("*fp32",) * 5 + ("i32",), (("HIDDEN", 4), ("SCALE", 0.5), ("BLOCK", 128)), 4, 3, None
    )
    expected = launcher.compile_kernel(build, 90).asm["cubin"]
    (path,) = tmp_path.glob("*/*.cubin")
    path.write_bytes(b"changed")
    for folder in [tmp_path, *tmp_path.iterdir()]:
        folder.chmod(0o700)
    for file in path.parent.iterdir():
        file.chmod(0o600)
    if not shared:
        assert launcher.compile_kernel(build, 90).asm["cubin"] == b"changed"
        return
    {".": tmp_path, "key": path.parent, "file": path}[shared].chmod(0o770)
    if shared == "file":
        assert launcher.compile_kernel(build, 90).asm["cubin"] == expected
    else:
        with SHARED:
            assert launcher.compile_kernel(build, 90).asm["cubin"] == expected
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
