"""A saved model can come from anyone: any content of its files gives a model or a CheckpointError, soon and small."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import safetensors.torch
import torch
from torch import Tensor

import tcnca
from tcnca import (
    CDILConfig,
    CheckpointError,
    ClassifierHeadConfig,
    ConfigError,
    LRUConfig,
    ModelConfig,
    ModelState,
    PairHeadConfig,
    RegressionHeadConfig,
    S4DConfig,
    S5Config,
    SequenceModel,
    SGConvConfig,
    StateError,
    TCNConfig,
    ValueInputConfig,
    build,
    load,
    preset,
    save,
)
from tcnca.config import Config
from tcnca.ops import State
from tests.comparison import assert_close
from tests.examples import VARIANTS, VOCABULARY, small_config, small_model
from tests.models.limits import limited

CONFIG, WEIGHTS = "config.json", "model.safetensors"
HUGE = (10**6, 10**9, 2**31, 2**40, 2**62, 2**63, 10**30)
MODELS: dict[str, ModelConfig] = {
    "gated": small_config(d_ff=12, pad_token_id=0, max_length=4),
    "ngrams": small_config(ngram_sizes=[2, 4], ngram_buckets=13),
    "full": small_config("mega-full", truncation=4, position="rope"),
    "residual": small_config("tcn-mlp", head=RegressionHeadConfig(hidden=5), **{"mixer.norm": "batch"}),
    "classifier": small_config("ema-mlp", head=ClassifierHeadConfig(hidden=5), causal=False, truncation=3),
    "pair": small_config("tcnca-simple", head=PairHeadConfig(), input=ValueInputConfig(features=2), causal=False),
    "series": small_config("tcnca-simple", init="series", position="rotary"),
    "no parts": small_config("tcn-mlp", mixer=None, d_ff=0),
    "s4d": small_config("ema-mlp", mixer=S4DConfig(d_state=4)),
    "s5": small_config("ema-mlp", mixer=S5Config(d_state=8)),
    "lru": small_config("ema-mlp", mixer=LRUConfig(d_state=4)),
    "sgconv": small_config("ema-mlp", mixer=SGConvConfig(kernel_length=32, piece_size=4)),
    "cdil": small_config("ema-mlp", mixer=CDILConfig(depth=2), causal=False, head=ClassifierHeadConfig()),
}


def integer_fields(config: Config) -> Iterator[str]:
    """Yield the paths of all fields of a configuration that hold integers, and of its parts."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        if name.startswith("_") or not hasattr(config, name):
            continue
        value = getattr(config, name)
        members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        if isinstance(value, Config):
            yield from (f"{name}.{inner}" for inner in integer_fields(value))
        elif any(get_origin(each) is Annotated and each.__origin__ is int for each in members):
            yield name


def write_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / CONFIG).read_text())
    change(content)
    (folder / CONFIG).write_text(json.dumps(content))


def tokens(batch: int = 1, time: int = 5) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time))


def test_the_models_have_every_integer_field() -> None:
    found = {path for config in MODELS.values() for path in integer_fields(config)}
    assert {"num_layers", "d_ff", "mixer.depth", "mixer.truncation", "input.features", "head.hidden_layers"} <= found
    assert len(found) == 25, sorted(found)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_that_the_weights_do_not_have(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each integer in turn is huge; a few, such as a chunk size without a bias for it, are harmless."""
    monkeypatch.setattr(tcnca.models.model, "_memory", lambda device: 2**30)
    folder = save(build(MODELS[name]), tmp_path)
    original = json.loads((folder / CONFIG).read_text())
    for path in integer_fields(MODELS[name]):
        *outer, field = path.split(".")
        for size in HUGE:
            content = copy.deepcopy(original)
            place = content["model"]
            for part in outer:
                place = place[part]
            place[field] = size
            (folder / CONFIG).write_text(json.dumps(content))
            with limited(seconds=1.0):
                model = load_or_refuse(folder)
            if model is not None:
                assert field in ("chunk_size", "max_length", "truncation"), path
                if size > 10**6:
                    with limited(seconds=1.0):
                        assert_runs_or_is_refused(model)


def load_or_refuse(folder: Path) -> SequenceModel | None:
    """Return the model, or None after an error with a short message."""
    try:
        return load(folder)
    except CheckpointError as error:
        message = str(error)
    assert len(message) < 3000
    return None


def assert_runs_or_is_refused(model: SequenceModel) -> None:
    """A model whose weights fit can still have a state that no machine holds."""
    values = isinstance(model.config.input, ValueInputConfig)
    x = torch.randn(1, 5, 2) if values else tokens()
    with contextlib.suppress(StateError):
        model(x, *([x] if model.config.head.documents == 2 else []))
        if model.streams:
            model.initial_state(1)
    model(x, *([x] if model.config.head.documents == 2 else []), return_state=False)


def test_sizes_that_the_weights_do_not_have_among_valid_ones(folder: Path) -> None:
    original = (folder / CONFIG).read_bytes()
    for change, message in (
        ({"num_layers": 1000}, "num_layers: expected at most 2, the layers of the weights, got 1000"),
        ({"d_model": 2**24}, "embedding.weight: expected shape"),
        (
            {"mixer": {"norm": "rms", "depth": 1024, "dilation_factor": 1}},
            "expected the weights of the model, got missing",
        ),
        ({"mixer": {"kernel_size": 2**20, "dilation_factor": 2}}, "mixer.weight: expected shape"),
    ):
        content = json.loads(original)
        content["model"] |= change
        (folder / CONFIG).write_text(json.dumps(content))
        with limited(seconds=2.0), pytest.raises(CheckpointError, match=message):
            load(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(small_model(dtype=torch.float32), tmp_path / "model")


@pytest.mark.parametrize("size", HUGE)
def test_models_that_are_built_by_hand(size: int) -> None:
    for fields in ("num_layers", "depth", "convolutions", "hidden_layers"):
        with limited(seconds=1.0), pytest.raises(ConfigError, match=rf"{fields}: expected .*1024"):
            small_config(head=ClassifierHeadConfig(hidden=4)).override({fields: size})
    with limited(seconds=1.0), pytest.raises(ConfigError):
        preset("tcnca-enwik8", dilation_factor=size, depth=1024)
    if size > 2**24:
        for fields in ("d_model", "d_ff", "vocab_size", "d_key", "kernel_size"):
            with (
                limited(seconds=1.0),
                pytest.raises(ConfigError, match=rf"{fields}: expected an integer in \[., 16777"),
            ):
                preset("tcnca-enwik8", **{fields: size})
    if size >= 2**31:
        with limited(seconds=1.0), pytest.raises(ConfigError, match=r"^length: expected an integer <= 2147483647"):
            TCNConfig.covering(size)


def test_dilation_beyond_every_memory() -> None:
    with pytest.raises(ConfigError, match=r"^mixer\.dilation_factor: expected a receptive field of at most 2147483647"):
        small_config(dilation_factor=10**6)
    with pytest.raises(ConfigError, match=r"^mixer\.dilation_factor: "):
        small_config(kernel_size=1, dilation_factor=10**6)
    model = SequenceModel(small_config(dilation_factor=30_000, num_layers=1))
    x = tokens()
    with limited(seconds=1.0), pytest.raises(StateError, match=r"^state: expected at most .*return_state=False"):
        model(x)
    with limited(seconds=1.0), pytest.raises(StateError, match=r"^state: expected at most .*the memory of the device"):
        model.initial_state(1)
    with limited(seconds=1.0), pytest.raises(StateError, match=r"^state: expected at most"):
        SequenceModel(small_config()).initial_state(10**12)
    assert model(x, return_state=False).logits.shape == (1, 5, VOCABULARY)


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = safetensors.torch.load_file(folder / WEIGHTS)
    change(weights)
    safetensors.torch.save_file(weights, folder / WEIGHTS)


GAMMA = "layers.0.block.gamma"


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_weights_of_another_dtype(folder: Path, dtype: torch.dtype) -> None:
    change_weights(folder, lambda weights: weights.update({GAMMA: torch.zeros(2, 4).to(dtype)}))
    with pytest.raises(CheckpointError, match=rf"{GAMMA}: expected floating-point numbers of 16 bits .*, got {dtype}"):
        load(folder)


def test_other_weights(folder: Path) -> None:
    original = (folder / WEIGHTS).read_bytes()
    changes: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
        (lambda weights: weights.update({GAMMA: torch.zeros(0)}), rf"{GAMMA}: expected shape \[2, 4\], got \[0\]"),
        (lambda weights: weights.update({GAMMA: torch.tensor(1.0)}), rf"{GAMMA}: expected shape \[2, 4\], got \[\]"),
        (lambda weights: weights.clear(), r"num_layers: expected at most 0"),
        (
            lambda weights: weights.update({f"x.{i}": torch.zeros(0) for i in range(5000)}),
            r"unknown \['x\.0', .*\.\.\.",
        ),
        (lambda weights: weights.update({"layers.1000000.x": torch.zeros(1)}), r"unknown \['layers\.1000000\.x'\]"),
        (lambda weights: weights.update({"layers.": torch.zeros(1), "layers": torch.zeros(1)}), r"unknown \['layers"),
        (lambda weights: weights.update({"x" * 10**5: torch.zeros(1)}), r"unknown \['xxx"),
        (
            lambda weights: weights.update({"head.weight": weights["embedding.weight"] + 1}),
            r"unknown \['head.weight'\]",
        ),
    ]
    for change, message in changes:
        (folder / WEIGHTS).write_bytes(original)
        change_weights(folder, change)
        with limited(seconds=2.0), pytest.raises(CheckpointError, match=message) as caught:
            load(folder)
        assert len(str(caught.value)) < 3000
    (folder / WEIGHTS).write_bytes(original)
    change_weights(folder, lambda weights: weights[GAMMA].fill_(float("nan")))
    assert load(folder)(tokens()).logits.isnan().all()


MATRIX = "layers.0.block.output.weight"
INT8_CHANGES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scale": (lambda w: w.pop(f"{MATRIX}_scale"), rf"{MATRIX}: expected int8 with {MATRIX}_scale"),
    "short scale": (
        lambda w: w.update({f"{MATRIX}_scale": torch.ones(3)}),
        rf"{MATRIX}_scale: expected a floating-point number per row, shape \[8\], got torch.float32 of shape \[3\]",
    ),
    "matrix of scales": (lambda w: w.update({f"{MATRIX}_scale": torch.ones(8, 1)}), rf"{MATRIX}_scale: .*\[8, 1\]"),
    "no numbers": (lambda w: w.update({f"{MATRIX}_scale": torch.ones(())}), rf"{MATRIX}_scale: .*shape \[\]"),
    "integers": (lambda w: w.update({f"{MATRIX}_scale": torch.ones(8).long()}), rf"{MATRIX}_scale: .*torch.int64"),
    "int8 scale": (lambda w: w.update({f"{MATRIX}_scale": torch.ones(8).char()}), rf"{MATRIX}_scale: .*torch.int8"),
    "NaN": (lambda w: w[f"{MATRIX}_scale"].fill_(float("nan")), rf"{MATRIX}_scale: expected finite numbers above 0"),
    "infinite": (lambda w: w[f"{MATRIX}_scale"].fill_(float("inf")), rf"{MATRIX}_scale: expected finite numbers"),
    "negative": (lambda w: w[f"{MATRIX}_scale"].neg_(), rf"{MATRIX}_scale: expected finite numbers above 0"),
    "zero": (lambda w: w[f"{MATRIX}_scale"].zero_(), rf"{MATRIX}_scale: expected finite numbers above 0"),
    "uint8": (lambda w: w.update({MATRIX: w[MATRIX].byte()}), rf"unknown \['{MATRIX}_scale'\]"),
    "other shape": (
        lambda w: w.update({MATRIX: torch.zeros(8, 99, dtype=torch.int8)}),
        rf"{MATRIX}: expected shape \[8, 6\], got \[8, 99\]",
    ),
    "scale of a float": (
        lambda w: w.update({"layers.0.block.gamma_scale": torch.ones(2)}),
        r"unknown \['layers\.0\.block\.gamma_scale'\]",
    ),
    "int8 gain": (
        lambda w: w.update({GAMMA: w[GAMMA].char(), f"{GAMMA}_scale": torch.ones(2)}),
        rf"unknown \['{GAMMA}_scale'\]",
    ),
    "int8 gain without scale": (
        lambda w: w.update({GAMMA: w[GAMMA].char()}),
        rf"{GAMMA}: expected floating-point numbers of 16 bits .*, got torch.int8",
    ),
    "int8 kernel": (
        lambda w: w.update({"layers.0.block.mixer.weight": w["layers.0.block.mixer.weight"].char()}),
        r"mixer\.weight: expected floating-point numbers of 16 bits .*, got torch.int8",
    ),
    "unknown matrix": (
        lambda w: w.update({"x.weight": torch.zeros(2, 2).char(), "x.weight_scale": torch.ones(2)}),
        r"unknown \['x\.weight'\]",
    ),
}


@pytest.mark.parametrize("case", INT8_CHANGES, ids=lambda name: name.replace(" ", "-"))
def test_int8_weights_that_do_not_fit(tmp_path: Path, case: str) -> None:
    change, message = INT8_CHANGES[case]
    folder = save(small_model(dtype=torch.float32), tmp_path, "int8")
    change_weights(folder, change)
    with limited(seconds=2.0), pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}") as caught:
        load(folder)
    assert len(str(caught.value)) < 3000


def test_a_small_file_of_a_huge_int8_matrix(tmp_path: Path) -> None:
    """Shapes are compared before matrices are in float32: a file can have a hole that takes no space."""
    folder = save(small_model(dtype=torch.float32), tmp_path, "int8")
    weights = safetensors.torch.load_file(folder / WEIGHTS)
    del weights[MATRIX]
    content = safetensors.torch.save(weights)
    begin = 8 + int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8:begin]), content[begin:]
    size = 8 * 5 * 10**7
    header[MATRIX] = {"dtype": "I8", "shape": [8, size // 8], "data_offsets": [len(body), len(body) + size]}
    text = json.dumps(header).encode()
    with open(folder / WEIGHTS, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + body)
        file.truncate(file.tell() + size)
    # In float32 the matrix would take 1.6 GB.
    with limited(seconds=2.0), pytest.raises(CheckpointError, match=rf"{MATRIX}: expected shape \[8, 6\], got \[8, 50"):
        load(folder)


def test_weights_that_int8_cannot_hold_are_not_saved(tmp_path: Path) -> None:
    model = small_model(dtype=torch.float32)
    folder = save(model, tmp_path, "int8")
    before = (folder / WEIGHTS).read_bytes()
    for value in (float("nan"), float("inf")):
        with torch.no_grad():
            model.get_parameter(MATRIX)[1, 2] = value
        with pytest.raises(CheckpointError, match=rf"{MATRIX}: expected finite weights for dtype 'int8'"):
            save(model, folder, "int8")
        assert (folder / WEIGHTS).read_bytes() == before
        save(model, tmp_path / "bfloat16", "bfloat16")


def test_int8_weights_need_their_format(folder: Path, tmp_path: Path) -> None:
    """Weights of one format with the configuration of another."""
    rounded = save(small_model(dtype=torch.float32), tmp_path / "rounded", "int8")
    plain, int8 = ((path / CONFIG).read_bytes() for path in (folder, rounded))
    (rounded / CONFIG).write_bytes(plain)
    with pytest.raises(CheckpointError, match=r"unknown \[.*weight_scale"):
        load(rounded)
    (folder / CONFIG).write_bytes(int8)
    assert load(folder).embedding.weight.dtype == torch.float32


def test_header_that_claims_more_than_the_file(folder: Path) -> None:
    for header in (
        {"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
        {"x": {"dtype": "F32", "shape": [2**63, 4], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}},
        {"x": {"dtype": "U64", "shape": [1], "data_offsets": [0, 8]}},
        {"x": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}},
        {"__metadata__": {"x": 3}},
    ):
        text = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        with limited(seconds=1.0), pytest.raises(CheckpointError, match=r"model\.safetensors: "):
            load(folder)
    (folder / WEIGHTS).write_bytes((2**27).to_bytes(8, "little") + b" " * 2**16)
    with limited(seconds=1.0), pytest.raises(CheckpointError, match=r"a header of 134,217,728 bytes"):
        load(folder)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_only_regular_files_are_read(folder: Path, name: str) -> None:
    def pipe() -> None:
        os.mkfifo(folder / name)

    for replace in (pipe, lambda: (folder / name).symlink_to("/dev/zero"), lambda: (folder / name).mkdir()):
        (folder / name).unlink()
        replace()
        with (
            limited(seconds=2.0),
            pytest.raises(CheckpointError, match=rf"{name}: cannot be read .*not a regular file"),
        ):
            load(folder)
    (folder / name).rmdir()
    (folder / name).symlink_to(name)
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read"):
        load(folder)


FACTS: list[tuple[dict[str, Any], str]] = [
    ({"input_mean": [0.0], "input_std": [0.0]}, "input_std: expected numbers above 0"),
    ({"input_mean": [0.0], "input_std": [float("nan")]}, "input_std: expected"),
    ({"input_mean": [0.0], "input_std": [float("inf")]}, "input_std: expected"),
    ({"input_mean": [0.0], "input_std": [-1.0]}, "input_std: expected numbers above 0"),
    ({"input_mean": [0.0] * 3, "input_std": [1.0] * 3}, "input_mean: expected one of each feature, 1, got 3"),
    ({"input_mean": [0.0] * 10**5}, "input_mean, input_std: expected both"),
    ({"input_mean": "zero", "input_std": [1.0]}, "input_mean: expected"),
    ({"input_mean": {"a": 1}, "input_std": [1.0]}, "input_mean"),
    ({"class_names": ["a", "b", "c"]}, "num_classes: expected at least 3"),
    ({"class_names": ["a", 1]}, "class_names: expected"),
    ({"class_names": ["a", None]}, "class_names: expected"),
    ({"class_names": [["a"], "b"]}, "class_names: expected"),
    ({"class_names": "ab"}, "class_names: expected"),
    ({"byte_map": [0, 256]}, "byte_map: expected"),
    ({"byte_map": [1, 1]}, "byte_map: expected different numbers"),
    ({"symbols": [1]}, "symbols: expected"),
    ({"task": 3}, "task: expected"),
    ({"x" * 10**6: 3}, "expected a key of at most 200 characters"),
]


@pytest.mark.parametrize(("facts", "message"), FACTS, ids=[next(iter(facts))[:12] + m[-6:] for facts, m in FACTS])
def test_facts_about_the_data_that_cannot_be(facts: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(build(small_config(input=ValueInputConfig(), head=ClassifierHeadConfig())), tmp_path)
    write_config(folder, lambda content: content.update(preprocessing=facts))
    with limited(seconds=2.0), pytest.raises(CheckpointError, match=rf"config\.json: .*{message}") as caught:
        load(folder)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    "value",
    [None, True, -1, 1e308, "x" * 10**6, [[]], {"a": {"b": 1}}, {"kind": "os"}, 10**400],
    ids=lambda v: str(v)[:9],
)
def test_values_of_any_type_in_the_configuration(folder: Path, value: Any) -> None:
    original = (folder / CONFIG).read_bytes()
    paths: list[tuple[str, ...]] = [("format",), ("model",), ("preprocessing",)]
    paths += [("model", name) for name in small_config().to_dict()]
    paths += [("model", part, name) for part in ("mixer", "head", "input") for name in small_config().to_dict()[part]]
    for *outer, last in paths:
        content = json.loads(original)
        place = content
        for part in outer:
            place = place[part]
        place[last] = value
        (folder / CONFIG).write_text(json.dumps(content))
        with limited(seconds=1.0):
            load_or_refuse(folder)


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_damaged_folders_are_refused_or_read(folder: Path, count: int) -> None:
    generator = random.Random(0)
    originals = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    for number in range(count):
        name = (CONFIG, WEIGHTS)[number % 2]
        damaged = bytearray(originals[name])
        for _ in range(generator.randint(1, 4)):
            place = generator.randrange(min(len(damaged), 4000))
            damaged[place : place + generator.choice([0, 1, 1, 9])] = generator.randbytes(
                generator.choice([0, 1, 1, 3])
            )
        (folder / name).write_bytes(damaged)
        with limited(seconds=1.0):
            load_or_refuse(folder)
        (folder / name).write_bytes(originals[name])


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_copied_states_pass_the_checks(variant: str, tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = small_model(VARIANTS[variant], dtype)
        state = model(tokens(2, 6)).state
        assert state is not None
        expected = model(tokens(2, 3) * 0, state=state).logits
        state.save(tmp_path / "state")
        for copied in (state.clone(), ModelState.load(tmp_path / "state"), state.reorder([0, 1]), state.repeat(1)):
            assert torch.equal(model(tokens(2, 3) * 0, state=copied).logits, expected)
        model(tokens(2, 3), state=model.initial_state(2))


STATE_CHANGES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "no batch": lambda t: t.update({name: tensor[:0] for name, tensor in t.items()}),
    "wide": lambda t: t.update({"layers.1.mixer.buffers.0": torch.zeros(2, 2, 9)}),
    "long": lambda t: t.update({"layers.1.mixer.buffers.0": torch.zeros(2, 900, 8)}),
    "integers": lambda t: t.update({"layers.1.mixer.buffers.0": torch.zeros(2, 2, 8, dtype=torch.int64)}),
    "keys": lambda t: t.update({"layers.1.attention.keys": torch.zeros(2, 3, 4)}),
    "dimensions": lambda t: t.update({"layers.1.attention.keys": torch.zeros(2, 4)}),
    "half": lambda t: t.update({"layers.0.mixer.buffers.0": torch.zeros(2, 2, 8).half()}),
}


@pytest.mark.parametrize("case", STATE_CHANGES, ids=lambda name: name.replace(" ", "-"))
def test_altered_states_do_not_fit_the_model(case: str, tmp_path: Path) -> None:
    model, path = small_model(dtype=torch.float32), tmp_path / "state"
    state = model(tokens(2)).state
    assert state is not None
    state.detach().save(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    STATE_CHANGES[case](tensors)
    safetensors.torch.save_file(tensors, path, metadata)
    with pytest.raises(StateError, match=r"^state"):
        model(tokens(2), state=ModelState.load(path))


def test_states_with_other_parts_do_not_fit_the_model() -> None:
    model = small_model(dtype=torch.float32)
    state = model(tokens(2)).state
    assert state is not None
    first = state.layers[0]
    empty = type(first)(first.mixer, None)
    averages = small_model("mega", dtype=torch.float32)(tokens(2)).state
    for layers in (
        (),
        (first,),
        (first,) * 3,
        (first, empty),
        averages.layers,
        (type(first)(first.attention, None),) * 2,
    ):
        with pytest.raises(StateError, match=r"^state: expected the (parts|tensors)"):
            model(tokens(2), state=ModelState(layers, None, state.signature))
    far = state.map(lambda tensor: tensor if tensor.is_floating_point() else tensor + 2**62)
    for wrong in (far, state.map(lambda tensor: tensor if tensor.is_floating_point() else tensor - 9)):
        with pytest.raises(StateError, match=r"position: expected values from 0 to 2\^53"):
            model(tokens(2), state=wrong)


def test_tokens_of_a_state_that_are_not_in_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """Kernels compute with them which rows of a table they read."""
    model = small_model(small_config("tcnca", ngram_sizes=[2, 4]), dtype=torch.float32)
    state = model(tokens(2)).state
    assert state is not None
    for change in (VOCABULARY, 2**40, -VOCABULARY):
        wrong = dataclasses.replace(state, input=state.input.map(lambda old, change=change: old + change))
        wrong.save(tmp_path / "state")
        with pytest.raises(StateError, match=rf"input\.tokens: expected values from 0 to {VOCABULARY}"):
            model(tokens(2), state=ModelState.load(tmp_path / "state"))


@pytest.mark.parametrize("d_ff", [0, 12])
def test_model_without_parts(d_ff: int, tmp_path: Path) -> None:
    model = small_model(small_config("tcn-mlp", mixer=None, d_ff=d_ff))
    x = tokens(2, 6)
    with torch.no_grad():
        whole = model(x).logits
        state = model(x[:, :3]).state
        assert state is not None
        state.save(tmp_path / "state")
        states: list[State] = [state, model.initial_state(2), state.reorder([1, 0]), state.repeat(2), state.clone()]
        for each in [*states, State.load(tmp_path / "state"), state.to(torch.float64), state.detach()]:
            assert isinstance(each, ModelState)
            assert_close(model(x[:, 3:], state=each).logits, whole[:, 3:])
        assert torch.equal(load(save(model, tmp_path / "model"))(x).logits, whole)
    assert tcnca.generate(model, x, 9).shape == (2, 9)
    assert tcnca.models.summarize(model.config, 9).state_bytes == 0
