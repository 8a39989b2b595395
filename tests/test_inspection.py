"""`tcnca inspect`: numbers against hand computation, measurements against definitions, and the command."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tcnca import (
    AttentionConfig,
    CDILConfig,
    ClassifierHeadConfig,
    ModelConfig,
    SequenceModel,
    TCNConfig,
    preset,
)
from tcnca.cli import app
from tcnca.errors import DataError
from tcnca.inspection import plots
from tcnca.inspection.costs import Cost, Dilated, dilated_structure, model_costs, stack_receptive_field
from tcnca.inspection.probes import (
    attention_maps,
    default_layers,
    default_tokens,
    impulse_response,
    influence,
    layer_mixer,
    mean_weights,
    tcn_kernels,
    visible_keys,
)
from tcnca.inspection.samples import read_sample
from tcnca.layers import S5Config
from tcnca.models import summarize
from tcnca.ops import lag_counts, receptive_field, tcn
from tests.examples import BIDIRECTIONAL, VARIANTS, VOCABULARY, small_config, small_model
from tests.inference.models import saved
from tests.training.tiny import fit

runner = CliRunner()
CDIL = small_config(
    "tcn-mlp", mixer=CDILConfig(depth=3), num_layers=1, d_ff=0, causal=False, head=ClassifierHeadConfig()
)


def tokens(time: int, rows: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, time))


def run(*arguments: Any) -> Any:
    return runner.invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "200"})


# Structure


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "plain"])
@pytest.mark.parametrize("sizes", [(3, 3, 2, 1), (2, 5, 3, 1), (3, 2, 2, 2), (4, 3, 2, 1), (1, 2, 3, 1)], ids=str)
def test_lag_counts_are_those_of_brute_force(sizes: tuple[int, int, int, int], residual: bool, causal: bool) -> None:
    kernel_size, factor, depth, convolutions = sizes
    lead = 0 if causal else (kernel_size - 1) // 2
    blocks = []
    for block in range(depth):
        taps = [(tap - lead) * factor**block for tap in range(kernel_size)]
        lags = [sum(chosen) for chosen in itertools.product(taps, repeat=convolutions)]
        blocks.append([*lags, *([0] if residual else [])])
    expected = [sum(chosen) for chosen in itertools.product(*blocks)]
    counts = lag_counts(*sizes, residual, causal)
    first = -lead * convolutions * sum(factor**block for block in range(depth))
    assert len(counts) == receptive_field(*sizes)
    assert counts.tolist() == [expected.count(first + index) for index in range(len(counts))]


@pytest.mark.parametrize("causal", [True, False])
def test_lag_counts_are_the_response_of_kernels_of_ones(causal: bool) -> None:
    structure = Dilated(kernel_size=3, dilation_factor=4, depth=3, convolutions=1, residual=True, causal=causal)
    lags, counts = structure.lags()
    x = torch.zeros(1, 200, 1, dtype=torch.float64)
    x[0, 100] = 1.0
    weight = torch.ones(3, 1, 1, 3, dtype=torch.float64)
    y, _ = tcn(x, weight, 4, activation="none", residual=True, causal=causal)
    assert y[0, 100 + lags, 0].tolist() == counts.tolist()
    assert y.sum() == counts.sum()
    assert (counts == 0).any()  # f > K leaves gaps


def test_costs_by_hand() -> None:
    """Two layers of d_model 8; K=3, f=2, D=3; d_key 4, d_value 6, chunks of 4; d_ff 12; a vocabulary of 11."""
    model = SequenceModel(small_config("tcnca"))
    costs = model_costs(model, 16)
    mixer = 3 * 8 * 3
    projections = 8 * 6 + 8 * (8 + 4 + 6 + 8) + 6 * 8
    assert costs.parts == {
        "embedding": Cost(parameters=88, weight_bytes=4 * 8),
        "mixer": Cost(
            parameters=2 * (mixer + 8),
            macs=2 * mixer,
            weight_bytes=8 * (mixer + 8),
            moved_state_bytes=8 * mixer,
            state_bytes=2 * (4 * (2 + 4 + 8) * 8 + 8),
        ),
        # A token sees two keys on average; the position bias has 7 values.
        "attention": Cost(
            parameters=2 * 7,
            macs=2 * 2 * 10,
            weight_bytes=8 * 7,
            moved_state_bytes=8 * 2 * 10,
            state_bytes=2 * (4 * 4 * 10 + 8),
        ),
        "projections": Cost(
            parameters=2 * (projections + 6 + 26 + 8 + 16),
            macs=2 * projections,
            weight_bytes=8 * (projections + 6 + 26 + 8 + 16),
        ),
        "feed-forward": Cost(parameters=2 * (192 + 20), macs=2 * 192, weight_bytes=8 * (192 + 20)),
        "norms": Cost(parameters=2 * 32 + 16, weight_bytes=8 * 32 + 64),
        "head": Cost(macs=88, weight_bytes=4 * 88),
    }
    assert costs.layer.parameters == mixer + 8 + 7 + projections + 56 + 212 + 32
    assert costs.total.bytes_per_token == costs.total.weight_bytes + costs.total.moved_state_bytes
    half = model_costs(model.to(torch.bfloat16), 16).total
    assert 2 * half.bytes_per_token == costs.total.bytes_per_token


@pytest.mark.parametrize(
    "name", ["tcnca-enwik8", "mega-text", "transformer-xl-enwik8", "transformer-enwik8", "s5-image"]
)
def test_totals_are_those_of_the_summary(name: str) -> None:
    found = preset(name)
    with torch.device("meta"):
        costs = model_costs(SequenceModel(found.model), found.length)
    summary = summarize(found.model, found.length)
    assert (costs.total.parameters, costs.total.macs) == (summary.parameters, summary.macs)
    assert costs.total.state_bytes == (summary.state_bytes or 0)
    assert costs.streams == (summary.state_bytes is not None)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_parts_of_every_variant_add_up(name: str) -> None:
    costs, summary = model_costs(SequenceModel(VARIANTS[name]), 32), summarize(VARIANTS[name], 32)
    total = costs.total
    assert (total.parameters, total.macs, total.state_bytes) == (
        summary.parameters,
        summary.macs,
        summary.state_bytes,
    )
    assert total.moved_state_bytes <= 3 * total.state_bytes


SEEN = {
    "tcnca": {},
    "shifted": {"shift_keys": True, "mixer.depth": 2},
    "memory": {"attention": AttentionConfig(d_key=4, d_value=6, chunk_size=4, memory=True, position="none")},
    "no mixer": {"mixer": None},
    "no attention": {"attention": None, "gated": False, "mixer.depth": 2},
    "even kernel": {"kernel_size": 2},
    "residual": {"gated": False, "mixer.depth": 2},
    "n-grams": {"ngram_sizes": [2, 4]},
    "n-grams, no attention": {"ngram_sizes": [3], "attention": None, "gated": False, "mixer.depth": 2},
    "residual, shifted": {"gated": False, "shift_keys": True, "mixer.depth": 1},
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("changes", SEEN.values(), ids=SEEN)
def test_receptive_field_of_the_stack_is_what_outputs_depend_on(changes: dict[str, Any], causal: bool) -> None:
    if changes.get("attention") and not causal:
        pytest.skip("memory is causal")
    head = ClassifierHeadConfig(pooling="none")
    model = small_model("tcnca", head=head, causal=causal, **changes)
    field = stack_receptive_field(model)
    assert field is not None
    time = 96
    rows = tokens(time).repeat(time + 1, 1)
    rows[torch.arange(time), torch.arange(time)] = (rows[-1] + 1) % VOCABULARY
    with torch.no_grad():
        logits = model(rows, return_state=False).logits
    changed = (logits[:-1] != logits[-1]).any(-1)  # by input and output
    widths = []
    for output in range(40, 56):
        seen = changed[:, output].nonzero()
        widths.append(int(seen.max() - seen.min()) + 1)
    assert max(widths) == field
    layer = dataclasses.replace(model.config, num_layers=1)
    assert summarize(layer, time).receptive_field == stack_receptive_field(SequenceModel(layer))


def test_receptive_fields_without_a_limit() -> None:
    assert stack_receptive_field(SequenceModel(small_config("mega"))) is None
    assert stack_receptive_field(SequenceModel(small_config("mega-full"))) is None
    assert stack_receptive_field(SequenceModel(CDIL)) == 15


# Measurements


def test_impulse_response_of_a_linear_tcn_is_the_convolution_of_its_kernels() -> None:
    model = small_model("tcnca")
    mixer: Any = layer_mixer(model, 1)
    response = impulse_response(mixer)
    for channel in range(8):
        expected = np.ones(1)
        for block in range(3):
            kernel = np.zeros(2 * 2**block + 1)
            kernel[:: 2**block] = mixer.weight[block, 0, channel].detach()
            expected = np.convolve(expected, kernel)
        expected[0] += mixer.omega[channel].item()
        np.testing.assert_allclose(response.values[channel], expected, atol=1e-12)
    assert response.lags.tolist() == list(range(15))
    assert (response.reach(1.0) <= 14).all()


def test_measurements_leave_the_modes_of_modules() -> None:
    mixer = layer_mixer(small_model(VARIANTS["tcn-two-convolutions-batch"]), 0).train()
    next(mixer.children()).eval()
    before = [module.training for module in mixer.modules()]
    assert set(before) == {True, False}
    impulse_response(mixer, 20)
    assert [module.training for module in mixer.modules()] == before


def test_impulse_responses_of_mixed_channels_are_diagonals_of_the_jacobian() -> None:
    torch.manual_seed(3)
    mixer = S5Config(d_state=4, output="none").build(5).double()
    response = impulse_response(mixer, 20)
    assert response.lags[-1] == 19
    jacobian: Any = torch.autograd.functional.jacobian(lambda x: mixer(x)[0], torch.zeros(1, 20, 5).double())
    for row, channel in enumerate(response.channels):
        np.testing.assert_allclose(response.values[row], jacobian[:, channel, 0, 0, channel], atol=1e-12)


def test_kernels_are_those_that_are_applied() -> None:
    model = small_model("tcn-mlp")  # with weight norm
    mixer: Any = layer_mixer(model, 0)
    kernels = tcn_kernels(mixer)
    assert kernels is not None
    assert kernels.shape == (3, 8, 3)
    np.testing.assert_allclose(np.linalg.norm(kernels, axis=-1), mixer.scale.detach().abs()[:, 0], rtol=1e-6)
    assert tcn_kernels(layer_mixer(small_model("mega"), 0)) is None


def test_ngrams_cost_a_row_of_each_table_and_the_last_tokens() -> None:
    config = small_config("tcnca", ngram_sizes=[2, 4], ngram_buckets=13)
    cost = model_costs(SequenceModel(config), 16).parts["embedding"]
    assert cost.parameters == 88 + 2 * 13 * 8
    assert cost.weight_bytes == 3 * 4 * 8
    assert (cost.state_bytes, cost.moved_state_bytes) == (3 * 8, 6 * 8)


@pytest.mark.parametrize("kind", ["tcnca", "transformer-full", "s5", "no-norm"])
def test_influence_is_the_derivative_of_the_whole_model(kind: str) -> None:
    model, x = small_model(VARIANTS[kind]), tokens(24)
    found = influence(model, x, positions=2, seed=5)
    generator = torch.Generator().manual_seed(5)
    embedded: Tensor | None = None

    def replace(_: Any, __: Any, output: Tensor) -> Tensor:
        nonlocal embedded
        embedded = output.detach().requires_grad_()
        return embedded

    squares = []
    with model.embedding.register_forward_hook(replace):
        logits = model(x, return_state=False).logits
    assert embedded is not None
    for place in (12, 23):
        vector = torch.randn(1, 1, VOCABULARY, generator=generator).to(logits)
        (gradient,) = torch.autograd.grad((logits[:, place : place + 1] * vector).sum(), embedded, retain_graph=True)
        squares.append(gradient[0].square().sum(-1).flip(0)[23 - place :])
    for lag in range(24):
        both = [row[lag] for row in squares if lag < len(row)]
        assert found.norms[lag] == pytest.approx(float(torch.stack(both).mean().sqrt()), rel=1e-9)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_influence_is_zero_outside_of_the_receptive_field() -> None:
    model = small_model("tcn-mlp")
    field = stack_receptive_field(model)
    assert field == 29
    found = influence(model, tokens(96))
    assert found.lags.tolist() == list(range(96))
    assert (found.norms[:field] > 0).all()
    assert (found.norms[field:] == 0).all()
    assert found.reach(1.0) <= field - 1
    assert found.reach(0.5) <= found.reach(0.9)


def test_influence_estimates_the_norm_of_the_jacobian() -> None:
    model, x = small_model("tcn-mlp", num_layers=1), tokens(16)
    place = 8  # of the only output, the first of the second half
    found = [influence(model, x, positions=1, seed=seed).norms[0] ** 2 for seed in range(200)]
    h = model.embedding(x, None)[:, : place + 1].detach()

    def last_logits(embedded: Tensor) -> Tensor:
        features: Any = model.layers[0](torch.cat([h[:, :-1], embedded.view(1, 1, -1)], 1))[0]
        assert model.norm is not None
        return model.norm(features, None)[0, -1] @ model.embedding.weight.T

    jacobian: Any = torch.autograd.functional.jacobian(last_logits, h[0, -1])
    assert np.mean(found) == pytest.approx(float(jacobian.square().sum()), rel=0.15)


@pytest.mark.parametrize("name", [name for name, config in VARIANTS.items() if config.attention is not None])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_attention_maps_times_values_are_the_output(name: str, causal: bool) -> None:
    if not causal and name not in BIDIRECTIONAL:
        pytest.skip("memory is causal")
    head: dict[str, Any] = {} if causal else {"head": ClassifierHeadConfig()}
    model, x = small_model(VARIANTS[name], causal=causal, **head), tokens(11)
    attention: Any = model.layers[1].block.attention  # type: ignore[union-attr]
    calls: list[tuple[Any, Any]] = []
    with attention.register_forward_hook(lambda _, inputs, output: calls.append((inputs, output))), torch.no_grad():
        model(x, return_state=False)
    maps = attention_maps(model, x, [1])
    (_, _, values), output = calls[0]
    heads = attention.config.num_heads
    split = values[0].unflatten(-1, (heads, -1)).movedim(1, 0)
    combined = (torch.from_numpy(maps[1]) @ split).movedim(0, 1).flatten(1)
    torch.testing.assert_close(combined, output[0], rtol=1e-9, atol=1e-10)
    visible = visible_keys(attention.config, causal, 11)
    assert (maps[1][:, ~visible] == 0).all()
    if attention.config.activation == "softmax":
        assert (maps[1][:, visible] > 0).all()
        np.testing.assert_allclose(maps[1].sum(-1), 1.0, atol=1e-9)


def test_attention_weights_by_their_definition() -> None:
    config = AttentionConfig(d_key=4, d_value=4, chunk_size=3, position="none")
    model = small_model("tcnca", attention=config)
    attention: Any = model.layers[0].block.attention  # type: ignore[union-attr]
    calls: list[Any] = []
    with attention.register_forward_pre_hook(lambda _, inputs: calls.append(inputs)), torch.no_grad():
        model(x := tokens(5), return_state=False)
    q, k = (part[0].numpy() for part in calls[0][:2])
    expected = np.zeros((5, 5))
    for query, key in [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 3), (4, 3), (4, 4)]:
        expected[query, key] = np.exp(q[query] @ k[key] / 2.0)
    expected /= expected.sum(-1, keepdims=True)
    weights = attention_maps(model, x, [0])[0]
    np.testing.assert_allclose(weights[0], expected, atol=1e-12)
    lags, means = mean_weights(weights, visible_keys(config, True, 5))
    assert lags.tolist() == [0, 1, 2]
    np.testing.assert_allclose(means, [np.trace(expected) / 5, (expected[[1, 2, 4], [0, 1, 3]]).mean(), expected[2, 0]])


def test_choices_that_bound_time() -> None:
    assert default_layers(1) == [0]
    assert default_layers(2) == [0, 1]
    assert default_layers(12) == [0, 6, 11]
    with torch.device("meta"):
        large, small = (SequenceModel(preset(name).model) for name in ("tcnca-enwik8", "tcn-mlp-enwik8"))
    assert default_tokens(large, 8192) == 1024
    assert default_tokens(small, 8192) == 2048
    assert default_tokens(small, 100) == 100
    with torch.device("meta"):
        full = SequenceModel(preset("transformer-enwik8").model)
    assert default_tokens(full, 10**9) == default_tokens(full, 8192) == 1024
    # A position bias for 64 tokens has no values for more.
    assert default_tokens(SequenceModel(small_config("mega-full")), 8192) == 64


# Pictures and the command

KINDS = [
    "tcnca",
    "tcnca-simple",
    "tcn-mlp",
    "tcn-two-convolutions-batch",
    "ema-mlp",
    "s4d",
    "s5",
    "lru-gated",
    "sgconv",
]
KINDS += ["attention-alone-gated", "heads-gated", "transformer-xl", "feed-forward-alone", "truncated-scan-batch"]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", [*KINDS, "cdil"])
def test_every_kind_is_measured(name: str, causal: bool) -> None:
    if (name == "cdil" and causal) or (not causal and name in VARIANTS and name not in BIDIRECTIONAL):
        pytest.skip("one direction only")
    head: dict[str, Any] = {} if causal else {"head": ClassifierHeadConfig()}
    model = SequenceModel(CDIL if name == "cdil" else VARIANTS[name].override(causal=causal, **head))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = influence(model, tokens(40), positions=3)
    assert found.pooled != causal
    assert np.isfinite(found.norms).all()
    assert (found.lags.min() < 0) != causal
    assert found.norms[found.lags == 0] > 0
    if model.config.mixer is not None:
        response = impulse_response(layer_mixer(model, 0), 64)
        assert response.values.shape == (8, len(response.lags))
        assert np.isfinite(response.values).all()
        assert (response.lags[0] < 0) != causal
        assert np.abs(response.values[:, response.lags == 0]).min() > 0
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_bidirectional_response_reaches_both_ends() -> None:
    model = small_model("tcn-mlp", causal=False, head=ClassifierHeadConfig())
    response = impulse_response(layer_mixer(model, 0))
    assert response.lags.tolist() == list(range(-7, 8))
    assert (np.abs(response.values[:, [0, -1]]) > 0).all()


@pytest.mark.parametrize(
    "config",
    [
        TCNConfig(kernel_size=3, dilation_factor=3, depth=2, block="residual", output="none"),
        TCNConfig(kernel_size=3, dilation_factor=100, depth=3),
        TCNConfig(kernel_size=17, dilation_factor=8, depth=4),
        TCNConfig(kernel_size=1, depth=1),
        TCNConfig(kernel_size=2, dilation_factor=2, depth=2, convolutions=2, block="residual", output="none"),
    ],
    ids=["paper", "wide", "enwik8", "one tap", "two convolutions"],
)
def test_trees_show_all_units(config: TCNConfig, tmp_path: Path) -> None:
    structure = dilated_structure(ModelConfig(mixer=config))
    assert structure is not None
    levels = plots._tree_levels(structure, len(structure.dilations))
    lags, counts = structure.lags()
    assert (-levels[0][::-1]).tolist() == lags[counts > 0].tolist()
    assert plots._panel_depths(structure)[0] == len(structure.dilations)
    for draw, name in ((plots.draw_connectivity, "tree.svg"), (plots.draw_coverage, "lags.svg")):
        drawn = functools.partial(draw, structure, "a $title\x1b")
        paths = [plots.save(drawn, tmp_path / folder / name) for folder in "ab"]
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert b"a $title\\x1b" in paths[0].read_bytes()


def test_the_command_writes_tables_pictures_and_numbers(tmp_path: Path) -> None:
    model = saved("language", tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 2)
    out, numbers = tmp_path / "out", tmp_path / "numbers.json"
    done = run(tmp_path / "model", "--data", text, "--out", out, "--json", numbers, "--layers", "1", "--tokens", 64)
    assert done.exit_code == 0, done.output
    names = ["connectivity.svg", "coverage.svg", "responses.png", "kernels.png", "attention.png", "receptive-field.png"]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    found = json.loads(numbers.read_text())
    assert found["complete"]
    assert [Path(path).name for path in found["pictures"]] == names
    assert found["weights"] == "trained"
    assert found["total"]["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["receptive_field"] == {"mixer": 15, "stack": stack_receptive_field(model)}
    assert found["coverage"]["counts"] == lag_counts(3, 2, 3).tolist()
    assert list(found["responses"]) == list(found["attention"]["layers"]) == ["1"]
    assert found["influence"]["tokens"] == len(found["influence"]["norms"]) == 64
    assert found["influence"]["data"] == "text.txt"
    assert "| projections" in done.output
    assert "text.txt" in done.output


def test_a_preset_has_random_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("mega-recall-64", "--json", "numbers.json")
    assert done.exit_code == 0, done.output
    assert "random, as they are initialized" in done.output
    assert "unlimited" in done.output
    folder = tmp_path / "inspect" / "mega-recall-64"
    assert sorted(path.name for path in folder.iterdir()) == ["attention.png", "receptive-field.png", "responses.png"]
    found = json.loads(Path("numbers.json").read_text())
    assert found["weights"] == "random"
    assert found["influence"]["data"] == "random tokens"
    assert "coverage" not in found


def test_a_model_without_a_mixer_has_no_receptive_field_of_one() -> None:
    done = run("transformer-xl-enwik8", "--no-plots", "--json", "-")
    assert done.exit_code == 0, done.output
    assert list(json.loads(done.stdout)["receptive_field"]) == ["stack"]
    assert "mixer of a layer" not in done.stderr


def test_tables_alone() -> None:
    done = run("tcnca-pathx", "--no-plots", "--json", "-")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert not found["streams"]
    assert "pictures" not in found
    assert "| projections" in done.stderr


def test_the_pretrained_model_is_the_default(tmp_path: Path) -> None:
    done = run("--no-plots", "--json", tmp_path / "numbers.json")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert found["model"] == "pretrained/enwik8"
    assert found["receptive_field"]["mixer"] == 9361


@pytest.mark.parametrize("kind", ["pairs", "forecast"])
def test_models_of_other_tasks(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path / "model")
    options = ("--out", tmp_path / "out", "--json", tmp_path / "numbers.json", "--tokens", 32, "--layers", 0)
    done = run(tmp_path / "model", *options)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "numbers.json").read_text())["influence"]
    assert found["data"] == ("random values" if kind == "forecast" else "a text of the package")
    assert found["of"] == ("outputs" if kind == "forecast" else "features of the last layer")


def test_values_of_a_file(tmp_path: Path) -> None:
    model = saved("signals", tmp_path / "model")
    series = np.random.default_rng(0).normal(5, 2, (3, 20, 2))
    np.save(tmp_path / "values.npy", series)
    found = read_sample(model, tmp_path / "values.npy", 16)
    assert found.about == "values.npy"
    np.testing.assert_allclose(found.x[0], series[0, :16], rtol=1e-6)
    np.save(tmp_path / "values.npy", series[0])
    np.testing.assert_allclose(read_sample(model, tmp_path / "values.npy", 16).x[0], series[0, :16], rtol=1e-6)
    np.save(tmp_path / "values.npy", series[0, :1])
    with pytest.raises(DataError, match="at least 2 tokens or time steps, got 1"):
        read_sample(model, tmp_path / "values.npy", 16)


def test_words_of_a_file(tmp_path: Path) -> None:
    model = saved("recall", tmp_path / "model")
    (tmp_path / "words.txt").write_text("a 1 b 2 a 2 a")
    assert read_sample(model, tmp_path / "words.txt", 5).x.tolist() == [[0, 2, 1, 3, 0]]


def test_a_run_is_shown_on_its_own_data(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fit(folder, "max_steps=1")
    done = run(folder, "--json", tmp_path / "numbers.json", "--layers", 0)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "numbers.json").read_text())["influence"]["data"] == "recall-16-10, validation"
    assert (folder / "inspect" / "attention.png").is_file()


ERRORS: dict[str, tuple[list[str], str]] = {
    "a misspelled preset": (["tcnca-linear-enwik"], "did you mean tcnca-linear-enwik8?"),
    "a missing folder": (["runs/none"], "MODEL: expected a preset, a run directory or the folder of a model"),
    "a layer too many": (["mega-recall-64", "--layers", "0,2"], "--layers: expected numbers from 0 to 1"),
    "no layer": (["mega-recall-64", "--layers", "x"], "--layers: expected numbers from 0 to 1"),
    "data for a preset": (["mega-recall-64", "--data", "x.txt"], "--data: expected a trained model"),
    "best of a preset": (["mega-recall-64", "--best"], "--best: expected a run directory"),
    "tokens without pictures": (
        ["mega-recall-64", "--tokens", "9", "--no-plots"],
        "--tokens: expected it with pictures",
    ),
    "no such file": (["{model}", "--data", "{model}/none.txt"], "none.txt, which is none"),
    "a text for values": (["{model}", "--data", "{model}/config.json"], "expected an .npy file"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(arguments: list[str], message: str, tmp_path: Path) -> None:
    saved("signals", tmp_path / "model")
    words = [word.format(model=tmp_path / "model") for word in arguments]
    done = run(*words)
    assert done.exit_code == 1, done.output
    assert message in done.output.replace("\n", " ")


def test_tables_need_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("mega-recall-64")
    assert done.exit_code == 0, done.output
    assert "feed-forward" in done.output
    assert "no pictures: matplotlib is not installed; pip install 'tcnca[plots]'" in done.output
    assert run("mega-recall-64", "--layers", "0").exit_code == 1


def test_what_was_measured_is_kept_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tcnca.inspection.probes.impulse_response", interrupt)
    done = run("tcnca-simple-recall-64", "--out", tmp_path, "--json", tmp_path / "numbers.json")
    assert done.exit_code == 130
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert not found["complete"]
    assert (tmp_path / "coverage.svg").is_file()
    assert "coverage" in found
