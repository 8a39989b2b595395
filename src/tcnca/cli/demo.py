"""`tcnca demo`: continue a text, train a small model on associative recall, ask it; or show that all models stream."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tcnca.cli.generate import generate
from tcnca.cli.train import train
from tcnca.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from tcnca.data import Task
    from tcnca.models import SequenceModel

NAME = "recall-small"
FOLDER = Path("runs") / "demo"
_FILES = (
    r"\.lock|\.?(recipe\.yaml|provenance\.json|log\.jsonl|tensorboard|checkpoints|curves\.png|model\.safetensors"
    r"|config\.json|report\.md|result\.json|eval-.+\.json)"
)
"""Names of what a run leaves; a file that is being written begins with a dot."""
PROMPT = "The history of "
MAX_TOKENS = 300
TEMPERATURE = 0.8
GOAL = 0.99
QUESTION = "a 2 c 4 b 3 d 1"
_EXAMPLES = 3
_LINE = 32
"""Tokens per printed line, which fit into 80 characters."""

# With --streaming: one model of each kind, with chunks so short that the sequence crosses some.
STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "tcnca-enwik8": ("tcnca-enwik8", {"chunk_size": 48}),
    "tcnca-linear-enwik8": ("tcnca-linear-enwik8", {"chunk_size": 48}),
    "mega-enwik8, chunked": ("mega-enwik8", {"chunk_size": 48}),
    "mega-enwik8, full": ("mega-enwik8", {"chunk_size": None}),
    "tcn-mlp-enwik8": ("tcn-mlp-enwik8", {}),
    "ema-mlp-enwik8": ("ema-mlp-enwik8", {}),
    "tcnca-simple-recall-64": ("tcnca-simple-recall-64", {}),
}
# Rounding in float32 over twelve layers; a wrong tap or a lost key gives errors a thousand times larger.
STREAMING_TOLERANCE = 1e-4


def demo(
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the recipe, such as lr=0.02.")
    ] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Instead, show that every model of the paper can stream.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=2, help="With --streaming: tokens per model.")] = 128,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of weights, data and the continued text.")] = 0,
) -> None:
    """Continue a text with the pretrained model, then train a small one on associative recall to 99 % and query it.

    Training starts over each time, in runs/demo.
    """
    if streaming:
        if changes:
            raise ConfigError(f"{changes[0]}: expected no changes with --streaming, which does not train; leave it out")
        _show_streaming(tokens, seed)
        return
    from tcnca.models import load
    from tcnca.training import load_recipe

    wanted = [*([f"batch.seed={seed}"] if seed else []), *(changes or [])]
    plain = load_recipe(NAME)
    recipe = plain.override(wanted)
    if recipe.data.source != plain.data.source:
        raise ConfigError(
            f"data: expected {plain.data.source}, whose symbols the demo uses, got {recipe.data.source}; "
            f"train on it with `tcnca train {NAME} data={recipe.data.source}`"
        )
    task = recipe.build_task()
    _clear()
    _continue_text(seed)
    typer.echo(f"\nAssociative recall: after {QUESTION} … one of the letters comes again. Which number goes with it?")
    typer.echo(f"TCNCA-simple learns it in {recipe.schedule.max_steps:,} steps of {recipe.batch.size} sequences.\n")
    train(NAME, wanted, out=FOLDER)
    _ask(task, load(FOLDER))
    _conclude()


def _continue_text(seed: int) -> None:
    """Let the pretrained model continue a prompt on the CPU."""
    options = f"--prompt {PROMPT!r} --max-tokens {MAX_TOKENS} --temperature {TEMPERATURE} --seed {seed} --device cpu"
    typer.echo("The pretrained model continues a text. The first time, it compiles kernels for a few seconds.")
    typer.echo(f"  tcnca generate {options}\n")
    typer.echo(PROMPT, nl=False)
    generate(prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=TEMPERATURE, seed=seed, device="cpu")


def _clear() -> None:
    from tcnca.files import LOCK, file_lock
    from tcnca.training.provenance import read_launches

    if not FOLDER.exists():
        return
    launches = read_launches(FOLDER)
    strange = [path for path in FOLDER.iterdir() if not re.fullmatch(_FILES, path.name)]
    if strange or any(launch.recipe != NAME for launch in launches):
        raise TrainingError(
            f"{FOLDER}: expected the run of an earlier demo, which a new one replaces, got something else; move it, or "
            "start the demo in another directory"
        )
    try:
        # Not while another demo is running.
        with file_lock(FOLDER / LOCK):
            shutil.rmtree(FOLDER)
    except OSError as error:
        raise TrainingError(
            f"{FOLDER}: cannot be removed ({error}); remove it yourself, or start the demo in another directory"
        ) from error


def _ask(task: Task, model: SequenceModel) -> None:
    symbols: list[str] = task.data.manifest["symbols"]
    pairs = QUESTION.split()
    typer.echo("\nShort questions, with the answer of the model and its probability:")
    for key, right in zip(pairs[::2], pairs[1::2], strict=True):
        tokens = [symbols.index(name) for name in (*pairs, key)]
        typer.echo(f"  {QUESTION} → {key} ?  {_answer(model, symbols, tokens, right)}")
    typer.echo("\nQuestions of full length, from the test set:")
    batch = next(task.eval_batches("test", _EXAMPLES))
    for tokens, target in zip(batch.inputs.tolist(), batch.targets[:, -1].tolist(), strict=True):
        *names, key = (symbols[token] for token in tokens)
        for begin in range(0, len(names), _LINE):
            typer.echo(f"  {' '.join(names[begin : begin + _LINE])}")
        typer.echo(f"    → {key} ?  {_answer(model, symbols, tokens, symbols[target])}")


def _answer(model: SequenceModel, symbols: Sequence[str], tokens: Sequence[int], right: str) -> str:
    import torch

    with torch.no_grad():
        shares = model(torch.tensor([tokens]), return_state=False).logits[0, -1].softmax(-1)
    answer = symbols[int(shares.argmax())]
    return f"{answer}  ({100 * float(shares.max()):.1f} %), {'right' if answer == right else f'WRONG: it is {right}'}"


def _conclude() -> None:
    from tcnca.training.report import CURVES, read_result

    result = read_result(FOLDER)
    assert result is not None
    score = result.scores["test"]
    reached = f"{100 * score.value:.1f} % of {score.count:,} test sequences right"
    typer.echo(f"\n{reached}, after {result.step:,} steps in {result.seconds:,.0f} s.")
    curves = f"The curves are in {FOLDER / CURVES}, the" if (FOLDER / CURVES).is_file() else "The"
    typer.echo(f"{curves} trained model in {FOLDER}.")
    if score.value < GOAL:
        raise TrainingError(f"{reached}, expected {100 * GOAL:.0f} %; try another --seed, or max_steps=2000")
    typer.echo(f"\nContinue with\n  tcnca generate --prompt 'In 1905, '\n  tcnca eval {FOLDER}\n  tcnca recipes")


def _show_streaming(tokens: int, seed: int) -> None:
    """Print that the output token by token equals the parallel forward pass."""
    import torch

    from tcnca.models import build

    typer.echo(f"{tokens} tokens in one call, in random pieces, and one by one:\n")
    typer.echo(f"{'model':<24}{'in pieces':>12}{'one by one':>12}{'tokens/s':>10}  equal")
    failed: list[str] = []
    for label, (name, changes) in STREAMED.items():
        torch.manual_seed(seed)
        pieces, single, speed = streaming_errors(build(name, **changes).eval(), tokens, seed)
        equal = max(pieces, single) <= STREAMING_TOLERANCE
        failed += [] if equal else [label]
        typer.echo(f"{label:<24}{pieces:>12.1e}{single:>12.1e}{speed:>10.0f}  {'yes' if equal else 'NO'}")
    typer.echo(
        f"\nErrors are ‖streamed - parallel‖ / ‖parallel‖ of the logits, in float32 with random weights; "
        f"up to {STREAMING_TOLERANCE:.0e} is rounding.\nWith chunks, or without attention, every token costs the same."
    )
    if failed:
        raise TrainingError(f"streaming differs from the parallel forward pass in {', '.join(failed)}")


def streaming_errors(model: SequenceModel, tokens: int, seed: int) -> tuple[float, float, float]:
    """Return the errors of random pieces and of single tokens against one call, and the speed of single tokens."""
    import torch

    rng, sizes = random.Random(seed), list[int]()
    while left := tokens - sum(sizes):
        sizes.append(rng.randint(1, min(left, 40)))
    x = torch.randint(model.embedding.weight.shape[0], (1, tokens), generator=torch.Generator().manual_seed(seed))

    def error(sizes: Sequence[int]) -> float:
        state, outputs = model.initial_state(1), []
        for piece in x.split(sizes, dim=1):
            logits, state = model(piece, state=state, inplace=True)
            outputs.append(logits)
        return float((torch.cat(outputs, 1) - whole).norm() / whole.norm())

    with torch.no_grad():
        whole = model(x, return_state=False).logits
        pieces = error(sizes)
        start = time.perf_counter()
        single = error([1] * tokens)
        return pieces, single, tokens / (time.perf_counter() - start)
