"""The wheel works in a clean environment, outside of the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

import tcnca

ROOT = Path(__file__).parents[1]
MODEL = """
import torch, tcnca
model = tcnca.build("tcnca-linear-enwik8", vocab_size=256, num_layers=1, d_model=32, d_ff=32).eval()
tokens = torch.randint(256, (1, 64))
whole = model(tokens).logits
_, state = model(tokens[:, :40])
assert torch.allclose(model(tokens[:, 40:], state=state).logits, whole[:, 40:], atol=1e-5)
print(tcnca.__version__, tcnca.__file__)
"""
IMPORT = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def run(*command: object, folder: Path) -> str:
    """Run a command; a failure shows what it said."""
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_wheel_in_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The wheel is built from the source distribution, so that files missing in it are noticed.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT, folder=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert wheel.name == f"tcnca-{tcnca.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "tcnca").rglob("*") if path.is_file()}
    packaged = {Path(name).as_posix() for name in packaged if "__pycache__" not in name}
    assert packaged <= set(names), packaged - set(names)
    assert not [name for name in names if not name.startswith("tcnca")]

    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "env", with_pip=True)
    scripts = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    python, command = scripts / "python", scripts / "tcnca"
    constraints = ("--constraint", ROOT / "constraints.txt")
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints)
    started = time.monotonic()
    run(*pip, "torch", folder=tmp_path)
    between = time.monotonic()
    run(*pip, wheel, folder=tmp_path)
    ended = time.monotonic()
    installed = run(python, "-m", "pip", "list", "--format", "freeze", folder=tmp_path).lower()
    assert not [name for name in ("matplotlib", "tensorboard", "requests", "numba", "pillow") if name in installed]

    version, place = run(python, "-c", MODEL, folder=tmp_path).split()
    assert version == tcnca.__version__
    assert Path(place).is_relative_to(tmp_path)
    assert run(command, "--version", folder=tmp_path) == f"tcnca {version}\n"
    table = tmp_path / "reviews.csv"
    rows = [f"a superb {thing},good\na dull {thing},bad\n" for thing in ("hour", "film", "cast", "script")]
    table.write_text("text,label\n" + "".join(rows), encoding="utf-8")
    said = run(command, "train", "classify", "data=reviews.csv", "max_steps=10", folder=tmp_path)
    assert "pip install 'tcnca[plots]'" in said
    run(command, "export", "runs/classify", "--model", "small", "--dtype", "int8", folder=tmp_path)
    for model in ("runs/classify", "small"):
        assert "good" in run(command, "predict", model, "a superb hour", folder=tmp_path)
    text = run(command, "generate", "--prompt", "The history of ", "--max-tokens", 20, folder=tmp_path)
    assert len(text.strip()) > 5

    times = {
        name: min(float(run(python, "-c", IMPORT.format(name), folder=tmp_path)) for _ in range(3))
        for name in ("torch", "tcnca", "tcnca.models")
    }
    print(
        f"\nwheel {wheel.stat().st_size / 1e6:.1f} MB, source {sdist.stat().st_size / 1e6:.1f} MB; installed in "
        f"{ended - between:.1f} s, PyTorch in {between - started:.1f} s; "
        + ", ".join(f"import {name} {seconds:.3f} s" for name, seconds in times.items())
    )
    # The modules of PyTorch are imported when they are first used.
    assert times["tcnca"] < times["torch"] / 4
