"""Other systems and devices: Windows and macOS, simulated by removing what they lack; Apple's GPUs without float64."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from typer.testing import CliRunner

from tcnca import CheckpointError, ClassifierHeadConfig, InputError, signals
from tcnca.cli import app, score
from tcnca.data import npy
from tcnca.errors import ConfigError, DataError
from tcnca.extras import EXTRAS
from tcnca.files import atomic_write
from tcnca.inference.watching import PipeTail, WatchState
from tcnca.ops import cache, checks
from tcnca.ops.state import read_tensors
from tcnca.training import logger
from tcnca.training.distributed import available_cores, check_device, dist_context
from tcnca.training.recipe import load_recipe
from tests.examples import FAMILY, VARIANTS, VOCABULARY, small_model

ROOT = Path(__file__).parents[1]
OPTIONAL = [module for modules in EXTRAS.values() for module in modules]
# What Windows does not have, of all that this package or its dependencies may be tempted to use.
WITHOUT = {
    "os": (
        "fork",
        "pread",
        "geteuid",
        "getuid",
        "sched_getaffinity",
        "sysconf",
        "killpg",
        "getpgid",
    ),
    "signal": ("SIGHUP", "SIGKILL", "SIGPIPE", "SIGUSR1", "SIGUSR2", "SIGALRM", "pthread_sigmask", "setitimer"),
}
WINDOWS = f"""
import filelock, multiprocessing, os, signal, sys
import torch  # Python's and PyTorch's own modules are those of this system
for module, names in {WITHOUT}.items():
    for name in names:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
for module in ("fcntl", "resource", "pwd", "grp", "termios", {", ".join(map(repr, OPTIONAL))}):
    sys.modules[module] = None
"""


def test_a_plain_installation_trains_and_generates_without_what_windows_lacks(tmp_path: Path) -> None:
    (tmp_path / "jobs.log").write_text("job 1: done\njob 2: done\n" * 200, encoding="utf-8")
    small = ["num_layers=1", "d_model=16", "d_ff=16", "mixer.depth=2"]
    changes = ["max_steps=2", "eval.max_batches=1", "checkpoint.every=1", *small]
    commands = [
        ["train", "lm", "data=jobs.log", *changes, "--device", "cpu"],
        ["generate", "runs/lm", "--prompt", "job ", "--max-tokens", "2", "--device", "cpu"],
        ["watch", "runs/lm", "jobs.log", "--state", "jobs.state", "--once", "--device", "cpu"],
    ]
    code = f"{WINDOWS}\nfrom tcnca.cli import app\nfor arguments in {commands}: app(arguments, standalone_mode=False)"
    # Redirected output has the old encoding of Windows.
    environment = os.environ | {"PYTHONIOENCODING": "cp1252:backslashreplace"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr.decode("cp1252")
    said = done.stdout.decode("cp1252")
    assert "saved the model after step 2" in said
    assert said.count("curves.png is not drawn: matplotlib is not installed; pip install 'tcnca[plots]'") == 1
    assert said.count("no files for TensorBoard: tensorboard is not installed; pip install 'tcnca[tensorboard]'") == 1
    assert "the model, report.md and checkpoints" in said
    files = {path.name for path in (tmp_path / "runs" / "lm").iterdir()}
    assert {"model.safetensors", "report.md", "log.jsonl"} <= files
    assert not {"curves.png", "tensorboard"} & files
    assert int(WatchState.load(tmp_path / "jobs.state").stream.position) == 4800


@pytest.mark.parametrize("arguments", [["recipes"], ["train", "--help"]], ids=" ".join)
def test_output_in_the_encoding_of_windows(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tcnca", *arguments],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "cp1252"},
    )
    assert done.returncode == 0, done.stderr.decode("cp1252")
    assert len(done.stdout.decode("cp1252")) > 100


def test_system_calls_that_are_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert available_cores() == os.cpu_count()
    monkeypatch.setitem(sys.modules, "resource", None)
    assert logger._peak_memory(torch.device("cpu")) == {}
    monkeypatch.delattr(os, "geteuid", raising=False)
    cache.store(tmp_path / "code" / "kernel", b"machine code")
    assert cache.load(tmp_path / "code" / "kernel") == b"machine code"

    def missing(path: Path, **_: Any) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert 2**28 < npy.available_memory() < 2**45
    monkeypatch.delattr(os, "sysconf", raising=False)
    assert npy.available_memory() == sys.maxsize


def test_files_that_others_have_open_are_replaced_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace, failures = Path.replace, iter([True, True, False])

    def busy(source: Path, target: Path) -> Path:
        if next(failures):
            raise PermissionError(13, "The process cannot access the file", str(target))
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", busy)
    monkeypatch.setattr("tcnca.files.os.name", "nt")
    monkeypatch.setattr("tcnca.files._REPLACE_PAUSES", (0.0, 0.0))
    target = tmp_path / "best.json"
    atomic_write(target, "1\n2")
    assert target.read_bytes() == b"1\n2"
    # Not for ever, and elsewhere not at all.
    failures = iter([True] * 3)
    with pytest.raises(DataError, match="cannot be written"):
        atomic_write(target, "3")
    monkeypatch.setattr("tcnca.files.os.name", "posix")
    failures = iter([True, False])
    with pytest.raises(DataError, match="cannot be written"):
        atomic_write(target, "4")
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]


def test_files_are_closed_before_they_are_renamed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    handles, replace = Path("/proc/self/fd"), Path.replace
    if not handles.exists():
        pytest.skip("needs /proc")

    def check(source: Path, target: Path) -> Path:
        assert str(source) not in {os.path.realpath(handle) for handle in handles.iterdir()}
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", check)
    place: Any = SimpleNamespace(to_dict=lambda: {"line": 1})

    def stop() -> None:
        with score._line_writer(tmp_path / "lines.jsonl") as write:
            write(iter([place]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert (tmp_path / "lines.jsonl.partial").read_text() == '{"line": 1}\n'


def test_files_are_not_mapped_where_that_blocks_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Windows neither replaces nor removes files that are mapped into memory."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"x": torch.ones(9)}, path)
    mapped = read_tensors(path, CheckpointError)
    assert str(path) in maps.read_text()
    monkeypatch.setattr("tcnca.ops.state.os.name", "nt")
    copied = read_tensors(path, CheckpointError)
    monkeypatch.undo()
    assert torch.equal(mapped[0]["x"], copied[0]["x"])
    del mapped
    assert str(path) not in maps.read_text()


def test_pipes_are_not_watched_where_they_cannot_be_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tcnca.inference.watching.os.name", "nt")
        with pytest.raises(InputError, match="log: expected a file, since pipes cannot be watched on Windows, got a"):
            PipeTail(io.BytesIO())


def test_runs_are_asked_to_end_by_what_the_system_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        sent: list[int]

        def __init__(self) -> None:
            self.sent = []

        def poll(self) -> int | None:
            return 0 if self.sent else None

        def send_signal(self, number: int) -> None:
            self.sent.append(number)

    process: Any = Process()
    signals.ask_to_end(process)
    signals.ask_to_end(process)
    assert process.sent == [signal.SIGTERM]
    monkeypatch.setattr(signal, "CTRL_BREAK_EVENT", 1, raising=False)
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 512, raising=False)
    process = Process()
    signals.ask_to_end(process)
    assert process.sent == [1]
    assert signals.start_options() == {"creationflags": 512}


def test_file_names_are_allowed_on_windows() -> None:
    folders = [ROOT / name for name in ("src", "tests", "docs", "results", "benchmarks", ".github")]
    names = [path.name for folder in folders for path in folder.rglob("*")]
    assert len(names) > 300
    assert not [name for name in names if set(name) & set('<>:"\\|?*') or name.endswith((" ", "."))]
    assert len({name.lower() for name in os.listdir(ROOT)}) == len(os.listdir(ROOT))


# Apple's GPUs: `mps`.


def test_devices_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device: expected cpu, since no GPU of Apple was found, got mps"):
        check_device("mps")
    with pytest.raises(ConfigError, match="--device: expected cpu, cuda or mps, got gpu; a GPU is called cuda"):
        check_device("gpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with dist_context("mps") as context:
        assert context.device == torch.device("mps")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ConfigError, match="expected cpu or cuda for 2 processes, got mps"),
        dist_context("mps"),
    ):
        pass
    done = CliRunner().invoke(app, ["bench", "ops", "--device", "mps"])
    assert "got mps, on which times are not measured" in done.stderr


class NoFloat64(TorchDispatchMode):
    """Refuses float64, as Apple's GPUs do."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.dtype in (torch.float64, torch.complex128):
                raise TypeError(f"{function}: float64 is not supported")
        return result


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU takes the place of a device without float64; models are still built in it, as on the host."""
    monkeypatch.setattr(checks, "WITHOUT_FLOAT64", ("mps", "cpu"))


NEEDS_FLOAT64 = [name for name in VARIANTS if name.startswith(("s4d", "s5", "lru", "truncated"))]
TOKENS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize("name", [*FAMILY, "transformer-xl", "sgconv", "heads-gated"])
def test_models_train_and_stream_without_float64(name: str) -> None:
    model = small_model(VARIANTS[name], torch.float32, head=ClassifierHeadConfig(num_classes=3, pooling="mean"))
    with NoFloat64():
        model.train()(TOKENS, return_state=False).logits.sum().backward()
        model.eval()
        whole = model(TOKENS).logits
        _, state = model(TOKENS[:, :7])
        torch.testing.assert_close(model(TOKENS[:, 7:], state=state).logits, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize("name", NEEDS_FLOAT64)
def test_models_that_need_float64_say_so(name: str) -> None:
    with pytest.raises(InputError, match="expected a CPU or a CUDA device, which compute in float64, got cpu"):
        small_model(VARIANTS[name], torch.float32)(TOKENS)


def test_states_move_to_a_device_without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("tcn-mlp", torch.float32, head=ClassifierHeadConfig(num_classes=3, pooling="mean"))
    state = model.initial_state(1)
    assert torch.float64 in {tensor.dtype for tensor in state.tensors().values()}
    monkeypatch.setattr(checks, "WITHOUT_FLOAT64", ("cpu",))
    assert torch.float64 not in {tensor.dtype for tensor in state.to("cpu").tensors().values()}


def test_recipes_are_small_on_apple_devices() -> None:
    recipe = load_recipe("lm")
    assert recipe.for_device("mps") == recipe.for_device("cpu") != recipe.for_device("cuda")
