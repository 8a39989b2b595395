"""Run cases, each in its own process with limits of time and memory and with a watch over what it does.

`python -m tests.fuzz.sandbox FOLDER` imports everything slow, makes the files of `tests.fuzz.subjects.BASES`, and then
forks a process for every line `SUBJECT SEED` that it reads. It answers with a line of JSON, a `Report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import json
import os
import platform
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.mutations import OUTSIDE
from tests.fuzz.payloads import MARKER

SECONDS = 10
"""Time that a case may take."""
MEMORY = 2**30
"""Bytes by which a case may grow."""
_ADDRESSES = 2**33
"""Bytes that a case may ask for without using them. Beyond, memory ends on every machine alike."""
MESSAGE = 20_000
"""Characters that the message of an error may have."""

_RUNS_CODE = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen"),
    *("socket.connect", "socket.bind", "webbrowser.open", "pickle.find_class", "ctypes.dlopen/handle"),
)
_CHANGES_FILES = (
    *("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate"),
    *("os.utime", "os.setxattr", "shutil.rmtree", "shutil.move", "shutil.chown"),
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What became of a case."""

    subject: str
    seed: int
    done: str
    """What was damaged."""
    outcome: str
    """`valid`, `error` for a named error, or what went wrong."""
    detail: str
    """Message or traceback."""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the case gave neither a valid result nor a named error."""
        return self.outcome not in ("valid", "error")


class Watch:
    """An audit hook that notes code that runs and files that change outside the folder of the case."""

    def __init__(self, case: Path) -> None:
        self.case = os.path.realpath(case)
        self.found: list[str] = []
        self.active = False

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in _RUNS_CODE:
            self.found.append(f"runs code: {event} {given!r}"[:500])
        elif event == "compile" and MARKER in str(given[0]) and given[1] not in ("<unknown>", b"<unknown>"):
            # The parser of literals, which runs nothing, names its texts <unknown>.
            self.found.append(f"runs code: {event} {given!r}"[:500])
        elif event == "import" and MARKER in given[0]:
            self.found.append(f"imports {given[0]}")
        elif event == "open" and isinstance(given[2], int) and given[2] & _WRITES:
            self._check(event, given[0], -1, follow=not given[2] & os.O_NOFOLLOW)
        elif event in _CHANGES_FILES:
            follow = event in ("os.chmod", "os.truncate", "os.utime")
            descriptors = [value for value in given[1:] if isinstance(value, int)]
            paths = (
                given[:2] if event in ("os.rename", "os.link") else given[1:2] if event == "os.symlink" else given[:1]
            )
            for place, path in enumerate(paths):
                renames = event in ("os.rename", "os.link") and len(descriptors) == 2
                at = descriptors[place] if renames else descriptors[-1] if descriptors else -1
                self._check(event, path, at if event not in ("os.chmod", "os.mkdir") else -1, follow=follow)

    def _check(self, event: str, path: Any, descriptor: int, *, follow: bool) -> None:
        if isinstance(path, int):
            return
        name = os.fsdecode(path)
        if descriptor >= 0 and not os.path.isabs(name):
            name = os.path.join(os.readlink(f"/proc/self/fd/{descriptor}"), name)
        folder, last = os.path.split(os.path.abspath(name))
        real = os.path.realpath(name) if follow else os.path.join(os.path.realpath(folder), last)
        if real != self.case and not real.startswith(f"{self.case}/") and real not in ("/dev/null", "/dev/tty"):
            self.found.append(f"writes outside: {event} {real}"[:500])


def run_case(name: str, seed: int, base: Path, folder: Path) -> Report:
    """Make a case in `folder` and use it, in this process."""
    from tcnca.training import provenance
    from tests.fuzz import misbehavior
    from tests.fuzz.subjects import SUBJECTS

    provenance.commit = lambda *_: None  # it starts git
    subject, case = {**SUBJECTS, **misbehavior.SUBJECTS}[name], folder / "case"
    bait = _bait(folder / OUTSIDE)
    shutil.copytree(base / subject.base, case, symlinks=True)
    os.chdir(case)
    done = subject.make(seed, base / subject.base, case)
    (folder / "done.txt").write_text(done, encoding="utf-8", errors="replace")
    watch, outcome, detail = Watch(case), "valid", ""
    sys.addaudithook(watch)
    sys.dont_write_bytecode = True
    os.environ["TMPDIR"] = str(case)
    begin, resident = resource.getrusage(resource.RUSAGE_SELF), _memory("VmRSS")
    try:
        with _limits():
            watch.active = True
            subject.use()
    except BaseException as error:
        watch.active = False
        outcome, detail = _classify(error)
    watch.active = False
    end, grown = resource.getrusage(resource.RUSAGE_SELF), _memory("VmHWM") - resident
    if watch.found:
        outcome, detail = watch.found[0], "\n".join(watch.found) + "\n" + detail
    elif any(case.rglob(MARKER)):
        outcome = "runs code: the marker exists"
    elif _bait(folder / OUTSIDE) != bait:
        outcome = "writes outside"
    elif grown > MEMORY:
        outcome = f"grows over {MEMORY:,} bytes"
    return Report(
        subject=name,
        seed=seed,
        done=done,
        outcome=outcome,
        detail=detail[-6000:],
        seconds=end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime,
    )


def _classify(error: BaseException) -> tuple[str, str]:
    from tcnca.errors import TcncaError

    text = "".join(traceback.format_exception(error))
    if isinstance(error, CaseError):
        return str(error), text
    if not isinstance(error, TcncaError):
        return f"raises {type(error).__name__}", text
    if len(str(error)) > MESSAGE:
        return f"a message of {len(str(error)):,} characters", str(error)[:1000]
    return "error", f"{type(error).__name__}: {error}"


class CaseError(Exception):
    """Raised by a subject that sees something wrong."""


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_memory("VmData") + _ADDRESSES, before[1]))
    # Ends the process wherever it is, with a traceback.
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _memory(name: str, process: int | str = "self") -> int:
    """Return a number of bytes that Linux states about a process; 0 if it is gone."""
    try:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(encoding="utf-8"))
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def _bait(folder: Path) -> dict[str, str]:
    """Return what is in a folder; create it if it is missing."""
    if not folder.exists():
        (folder / "folder").mkdir(parents=True)
        (folder / "secret.txt").write_text("secret")
        (folder / "folder" / "kept.txt").write_text("kept")
    return {str(path): path.read_text(errors="replace") if path.is_file() else "" for path in sorted(folder.rglob("*"))}


def serve(folder: Path) -> None:
    """Answer cases until the input ends."""
    from tests.fuzz import subjects

    base = folder / "base"
    if not base.exists():
        child = os.fork()
        if child == 0:
            _print_to(folder / "base.txt")
            _end_with(lambda: subjects.make_bases(base))
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"the base files could not be made:\n{(folder / 'base.txt').read_text(encoding='utf-8')}")
    platform.platform()  # starts a process, once
    # What the child has imported, so that cases do not import it again and again.
    for name in (base / subjects.IMPORTED).read_text(encoding="utf-8").split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # A collection in a case would copy the memory that it shares with this process.
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, seed = line.split()
        report = _fork(name, int(seed), base, folder / f"{name}-{seed}")
        print(json.dumps(dataclasses.asdict(report)), file=answers, flush=True)


def _fork(name: str, seed: int, base: Path, folder: Path) -> Report:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result, output = folder / "report.json", folder / "output.txt"
    child = os.fork()
    if child == 0:
        faulthandler.register(signal.SIGALRM, chain=True)
        signal.alarm(6 * SECONDS)
        _print_to(output)
        _end_with(
            lambda: result.write_text(json.dumps(dataclasses.asdict(run_case(name, seed, base, folder)))) and None
        )
    most, grows = _memory("VmRSS") + 2 * MEMORY, False
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if _memory("VmRSS", child) > most:
            grows = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.003)
    status = ended[1]
    if result.is_file():
        report = Report(**json.loads(result.read_text(encoding="utf-8")))
    else:
        printed = output.read_text(encoding="utf-8", errors="replace")[-6000:]
        hangs = "Timeout (" in printed or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM)
        outcome = f"hangs over {SECONDS} s" if hangs else f"ends with status {status}"
        outcome = f"grows over {MEMORY:,} bytes" if grows else outcome
        done = (folder / "done.txt").read_text(encoding="utf-8") if (folder / "done.txt").is_file() else ""
        report = Report(subject=name, seed=seed, done=done, outcome=outcome, detail=printed)
    if not report.failed:
        shutil.rmtree(folder, ignore_errors=True)
    return report


def _print_to(path: Path) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)


def _end_with(function: Any) -> None:
    """Call a function in a forked process, and end it."""
    status = 1
    try:
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    from tests.fuzz import sandbox

    sandbox.serve(Path(sys.argv[1]))
