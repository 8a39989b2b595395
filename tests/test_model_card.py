"""docs/model-card.md: its numbers are those of the pretrained model.

`python -m tests.test_model_card` writes them again, with the figure and the continuations.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tcnca
from tcnca import pretrained
from tcnca.cli import app
from tcnca.errors import escape_control, format_score
from tcnca.training.logger import LOG
from tcnca.training.report import draw_curves, duration, markdown_table, read_result

NOT_RUN = "<!-- not run: another text on each machine -->\n"
PAGE = Path(__file__).parents[1] / "docs" / "model-card.md"
FIGURE = PAGE.parent / "figures" / "pretrained-curves.png"
COMMAND = (
    "tcnca generate --prompt 'The history of ' --num-samples 10 --max-tokens 250 --temperature 0.8 --seed 0 "
    "--device cpu"
)
RESULT = read_result(pretrained.FOLDER)


def facts() -> str:
    """Return the table of what the model is."""
    assert RESULT is not None
    model = tcnca.load()
    config, size = model.config, sum(path.stat().st_size for path in pretrained.FOLDER.iterdir())
    attention = config.attention
    assert attention is not None
    rows = [
        ["parameters", f"{sum(parameter.numel() for parameter in model.parameters()):,}"],
        ["size in the package", f"{size / 1e6:.2f} MB"],
        ["layers, `d_model`, `d_ff`", f"{config.num_layers}, {config.d_model}, {config.d_ff}"],
        ["`d_key`, `d_value`, `chunk_size`", f"{attention.d_key}, {attention.d_value}, {attention.chunk_size:,}"],
        ["training", f"{RESULT.step:,} steps, {RESULT.tokens:,} bytes, {duration(RESULT.seconds)}"],
    ]
    return markdown_table(["", ""], rows)


def scores() -> str:
    """Return the table of scores: of the run, and of the weights in the package."""
    assert RESULT is not None
    found = [(f"{split}, before rounding", score.value, score.count) for split, score in RESULT.scores.items()]
    path = pretrained.FOLDER / "eval-test.json"
    rounded = json.loads(path.read_text(encoding="utf-8"))
    found.append(("test, as in the package", rounded["value"], rounded["count"]))
    rows = [[name, format_score(value), f"{count:,}"] for name, value, count in found]
    return markdown_table(["split", "bits per byte", "bytes"], rows)


def continuations() -> str:
    """Return what the command prints, as it is, in a block that no text of the model can end."""
    done = CliRunner().invoke(app, shlex.split(COMMAND)[1:])
    assert done.exit_code == 0, done.output
    # Any byte can be generated, and the page is text.
    return f"{NOT_RUN}```sh\n{COMMAND}\n```\n\n~~~~~~~~text\n{escape_control(done.stdout.rstrip())}\n~~~~~~~~"


def part(name: str) -> str:
    """Return a generated part of the page."""
    found = re.search(rf"<!-- {name} -->\n(.*)\n<!-- /{name} -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", ["facts", "scores"])
def test_tables_are_those_of_the_model(name: str) -> None:
    assert part(name) == {"facts": facts, "scores": scores}[name]()


def test_there_are_ten_continuations_of_the_command() -> None:
    """Their text is not compared, since rounding differs between machines."""
    text = part("continuations")
    assert text.startswith(f"{NOT_RUN}```sh\n{COMMAND}\n```\n")
    assert re.findall(r"^== sample (\d+) ==$", text, re.MULTILINE) == [str(number) for number in range(10)]
    assert FIGURE.is_file()


def write() -> None:
    """Write the generated parts of the page, and the figure."""
    text = PAGE.read_text(encoding="utf-8")
    for name, content in {"facts": facts(), "scores": scores(), "continuations": continuations()}.items():
        before, rest = text.split(f"<!-- {name} -->")
        text = f"{before}<!-- {name} -->\n{content}\n<!-- /{name} -->{rest.split(f'<!-- /{name} -->')[1]}"
    PAGE.write_text(text, encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(pretrained.FOLDER / LOG, folder)
        curves = draw_curves(Path(folder), "enwik8-pretrained", higher_is_better=False)
        assert curves is not None
        shutil.copy(curves, FIGURE)


if __name__ == "__main__":
    write()
