"""Saved models, streaming states, and checkpoints of MEGA."""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tcnca import ModelConfig, SequenceModel, load, load_mega_checkpoint, save
from tcnca.inference.watching import FileTail, LogWatch
from tcnca.layers import AttentionConfig, EMAConfig, TCNConfig
from tcnca.models import ModelState
from tcnca.models.heads import ClassifierHeadConfig, PairHeadConfig
from tcnca.models.inputs import TokenInputConfig, ValueInputConfig
from tcnca.models.preprocessing import Preprocessing
from tests.fuzz import payloads
from tests.fuzz.mutations import Rng, odd
from tests.fuzz.subject import Attack, Subject, changed, command, entries, entry, fifo, linked, use_each, written
from tests.models import mega_files


def _models() -> dict[str, tuple[ModelConfig, Preprocessing]]:
    small: dict[str, Any] = {"num_layers": 2, "d_model": 8, "d_ff": 8}
    attention = AttentionConfig(d_key=4, d_value=8, chunk_size=8)
    tcn, tokens = TCNConfig(kernel_size=3, depth=2), TokenInputConfig(vocab_size=11)
    bytes_ = Preprocessing(task="language", byte_map=tuple(range(11)))
    values = Preprocessing(input_mean=(0.5, 1.0), input_std=(1.0, 2.0), class_names=("a", "b", "c"))
    return {
        "tcnca": (ModelConfig(**small, mixer=tcn, attention=attention, input=tokens), bytes_),
        "mega": (ModelConfig(**small, mixer=EMAConfig(d_state=3), attention=attention, input=tokens), bytes_),
        "values": (
            ModelConfig(
                **small,
                mixer=tcn,
                attention=attention,
                causal=False,
                input=ValueInputConfig(features=2),
                head=ClassifierHeadConfig(num_classes=3),
            ),
            values,
        ),
        "pairs": (
            ModelConfig(
                **small,
                mixer=tcn,
                attention=None,
                gated=False,
                causal=False,
                input=tokens,
                head=PairHeadConfig(num_classes=2),
            ),
            Preprocessing(),
        ),
    }


def _make_models() -> None:
    for name, (config, facts) in _models().items():
        save(SequenceModel(config, facts), name)
    save(SequenceModel(*_models()["tcnca"]), "int8", "int8")


def _int8(change: Callable[[dict[str, torch.Tensor]], Any]) -> Attack:
    """Return an attack that changes the tensors of an int8 model."""

    def attack(rng: Rng) -> str:
        path = Path("int8", "model.safetensors")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        return f"{path}: changed"

    return attack


_SCALE = "embedding.weight_scale"
_INT8: list[Attack] = [
    _int8(lambda tensors: tensors.pop(_SCALE)),
    _int8(lambda tensors: tensors[_SCALE].fill_(float("nan"))),
    _int8(lambda tensors: tensors.update({_SCALE: torch.ones(1)})),
    _int8(lambda tensors: tensors.update({_SCALE: torch.ones(10**6)})),
    _int8(lambda tensors: tensors.update({_SCALE: tensors[_SCALE].char()})),
    _int8(lambda tensors: tensors.update({f"{_SCALE}_scale": torch.ones(11)})),
    _int8(lambda tensors: tensors.update({"embedding.weight": torch.zeros(0, 8, dtype=torch.int8)})),
    _int8(lambda tensors: tensors.update({name: tensor.char() for name, tensor in tensors.items()})),
    changed("int8/config.json", entry("dtype", "bfloat16")),
    changed("int8/config.json", entry("dtype", [])),
    changed("int8/config.json", entry("format", "tcnca-model-2")),
]


def _forward(model: SequenceModel) -> None:
    config = model.config
    x = torch.zeros(2, 9, dtype=torch.long)
    if isinstance(config.input, ValueInputConfig):
        x = torch.zeros(2, 9, config.input.features)
    pair = (x,) if isinstance(config.head, PairHeadConfig) else ()
    with torch.no_grad():
        model(x, *pair)


def _load_models() -> None:
    use_each(entries(), lambda name: _forward(load(name)))


def _sizes_of_config(path: str) -> list[Attack]:
    sizes = {
        "model.num_layers": [10**6, 2**31, 2**63],
        "model.d_model": [2**31, 10**9],
        "model.d_ff": [2**40],
        "model.mixer.depth": [10**9],
        "model.mixer.dilation_factor": [10**9, 2**63],
        "model.mixer.kernel_size": [10**9],
        "model.attention.chunk_size": [2**40],
        "model.attention.d_key": [2**31],
    }
    return [changed(path, entry(name, value)) for name, values in sizes.items() for value in values]


def _make_state() -> None:
    for name, (config, facts) in _models().items():
        if name in ("tcnca", "mega"):
            model = SequenceModel(config, facts).eval()
            save(model, name)
            with torch.no_grad():
                state = model(torch.zeros(2, 5, dtype=torch.long)).state
            assert state is not None
            state.save(f"{name}.safetensors")


def _continue(name: str) -> None:
    model, state = load(name), ModelState.load(f"{name}.safetensors")
    repr(state)
    with torch.no_grad():
        after = model(torch.zeros(2, 3, dtype=torch.long), state=state).state
    assert after is not None
    after.repeat(2).reorder([1, 0])


def _load_states() -> None:
    use_each(("tcnca", "mega"), _continue)


def _state_metadata(key: str, value: str) -> Attack:
    def attack(rng: Rng) -> str:
        path = Path("tcnca.safetensors")
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        header.setdefault("__metadata__", {})[key] = value
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        return f"{path}: {key} {value[:50]}"

    return attack


_STRUCTURE = '[1, {{"type": {type}, "context": {context}, "children_spec": []}}]'
_STATES: list[Attack] = [
    _state_metadata("names", "[" * 100_000),
    _state_metadata("names", "null"),
    _state_metadata("names", "{}"),
    _state_metadata("names", "[[]]"),
    _state_metadata("names", "[" + ", ".join(["null"] * 100_000) + "]"),
    _state_metadata("structure", "[" * 100_000),
    _state_metadata("structure", "[1, null]"),
    _state_metadata("structure", "{}"),
    _state_metadata("structure", _STRUCTURE.format(type='"builtins.dict"', context='"[1, 2]"')),
    _state_metadata("structure", _STRUCTURE.format(type='"collections.namedtuple"', context='"os.system"')),
    _state_metadata("structure", _STRUCTURE.format(type='"collections.defaultdict"', context='"[\\"os\\", []]"')),
    _state_metadata("structure", _STRUCTURE.format(type='"tcnca.ModelState"', context='"[]"')),
    _state_metadata("format", "x" * 100_000),
]


_LOG = Path("/proc/self/cwd/app.log")
"""The state has the path of its log, which is the same in every working directory."""


def _make_watch() -> None:
    model = SequenceModel(*_models()["tcnca"]).eval()
    save(model, "model")
    Path("app.log").write_bytes(bytes(range(11)) * 3)
    tail = FileTail(_LOG)
    watch = LogWatch(model, tail)
    watch.read()
    watch.save(Path("app.state"))
    tail.close()
    Path("app.log").write_bytes(bytes(range(11)) * 5)


# MEGA.


def _make_mega() -> None:
    for name, arguments in {"lm": mega_files.LANGUAGE_MODEL, "classifier": mega_files.CLASSIFIER}.items():
        mega_files.write(Path(f"{name}.pt"), arguments, mega_files.random_weights(arguments))


def _load_mega() -> None:
    use_each(entries(), lambda name: _forward(load_mega_checkpoint(name)))


def _mega(change: Callable[[dict[Any, Any], dict[Any, Any]], Any], legacy: bool = False) -> Attack:
    """Return an attack that changes the arguments and weights of a checkpoint."""

    def attack(rng: Rng) -> str:
        content = torch.load("lm.pt", weights_only=False)
        arguments, weights = vars(content["args"]), content["model"]
        result = change(arguments, weights)
        saved = content if result is None else result
        torch.save(saved, "lm.pt", _use_new_zipfile_serialization=not legacy)
        return "lm.pt: changed"

    return attack


def _argument(name: str, value: Any) -> Attack:
    return _mega(lambda arguments, weights: arguments.update({name: value}))


def _random_argument(rng: Rng) -> str:
    """Change an argument of a random name."""
    content = torch.load("lm.pt", weights_only=False)
    arguments = vars(content["args"])
    name, value = rng.choice(sorted(arguments)), odd(rng)
    arguments[name] = value
    torch.save(content, "lm.pt")
    return f"lm.pt: {name}={str(value)[:50]}"


def _random_weight(rng: Rng) -> str:
    """Change a weight of a random name."""
    content = torch.load("lm.pt", weights_only=False)
    weights = content["model"]
    name = rng.choice(sorted(weights))
    before = weights[name]
    choices: list[Callable[[], Any]] = [
        lambda: before.reshape(-1),
        lambda: before.bool(),
        lambda: before.to(torch.complex64),
        lambda: before.to(torch.float8_e4m3fn),
        lambda: before.to_sparse(),
        lambda: before.to("meta"),
        lambda: torch.full_like(before, torch.nan),
        lambda: torch.zeros(1).expand(10**6, 10**6),
        lambda: torch.zeros(0),
        lambda: torch.zeros(()),
        lambda: torch.nn.Parameter(before),
        lambda: before[None],
        lambda: odd(rng),
        lambda: before.long(),
        lambda: torch.quantize_per_tensor(before.float(), 0.1, 0, torch.qint8),
    ]
    weights[name] = choices[rng.randrange(len(choices))]()
    torch.save(content, "lm.pt")
    return f"lm.pt: {name}: {type(weights[name]).__name__}"


_EMBEDDING = "decoder.embed_tokens.weight"
_MEGA: list[Attack] = [
    _argument("decoder_layers", argparse.Namespace),
    _argument("decoder_layers", 10**6),
    _argument("decoder_embed_dim", 2**31),
    _mega(lambda arguments, weights: weights.update({1: torch.zeros(1)})),
    _mega(lambda arguments, weights: payloads.payload(0)),
    _mega(lambda arguments, weights: {"args": payloads.payload(1), "model": weights}),
    _mega(lambda arguments, weights: {"args": payloads.payload(1), "model": weights}, legacy=True),
    _mega(lambda arguments, weights: weights.update({_EMBEDDING: torch.zeros(1).expand(10**6, 10**6)})),
    written("lm.pt", lambda: payloads.zip_bomb("archive/data.pkl")),
    fifo("lm.pt"),
    linked("lm.pt", "zeros without end"),
    _argument("dropout", np.dtype),
    _argument("decoder_n_dim", 10**9),
    _argument("max_target_positions", 10**12),
    _argument("decoder_chunk_size", 10**12),
    _argument("truncation_length", 10**15),
    _argument("decoder_layers", "2"),
    _argument("arch", ["a"]),
    _argument("arch", {}),
    _argument("activation_fn", []),
    _mega(lambda arguments, weights: weights.update({None: 1})),
    _mega(lambda arguments, weights: arguments.__setitem__(1, 2)),
    _mega(lambda arguments, weights: {"args": argparse.Namespace(**arguments), "model": {}}),
    _mega(lambda arguments, weights: weights.update({"decoder.layers.0.x": torch.zeros(1)})),
    _mega(lambda arguments, weights: weights.update({"decoder.layers.99999999999.mega_layer.gamma": torch.zeros(1)})),
    written("lm.pt", lambda: payloads.pickled(0)),
    _random_argument,
    _random_weight,
    _random_argument,
    _random_weight,
    _random_argument,
    _random_weight,
]

BASES: dict[str, Callable[[], None]] = {
    "models": _make_models,
    "states": _make_state,
    "watch": _make_watch,
    "mega": _make_mega,
}
_WATCH = command("watch", "model", str(_LOG), "--once", "--state", "app.state", "--device", "cpu")
_SIZES = [attack for name in ("tcnca", "mega") for attack in _sizes_of_config(f"{name}/config.json")]
SUBJECTS = {
    # Some of both kinds are among the first, which the short run tries.
    "model": Subject(
        base="models", use=_load_models, attacks=[*_INT8[:4], *_SIZES, *_INT8[4:]], independent=True, share=22
    ),
    "state": Subject(base="states", use=_load_states, attacks=_STATES, targets=r"^\w+\.safetensors$", share=12),
    "watch": Subject(base="watch", use=_WATCH, attacks=[fifo("app.log")], targets=r"^app\.state$", share=8),
    "mega": Subject(base="mega", use=_load_mega, attacks=_MEGA, independent=True, share=22),
}
