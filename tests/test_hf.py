"""The interfaces of Hugging Face: the same numbers as the library, `generate`, `Trainer`, files, tokenizer, export."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import tcnca
from tcnca import ConfigError, InputError, ModelConfig, SequenceModel
from tcnca.cli import app
from tcnca.models.preprocessing import Preprocessing
from tests.training.tiny import fit

transformers: Any = pytest.importorskip("transformers")
import tcnca.hf as hf  # noqa: E402

SIZES: dict[str, Any] = {"d_model": 16, "d_ff": 16, "num_layers": 2, "dropout": 0.0}
FAMILIES = ("tcnca-linear-enwik8", "tcnca-enwik8", "mega-enwik8")
TEXTS = ["The history of ", "In", "a longer text, of more than one chunk"]


def language_model(preset: str = FAMILIES[0], seed: int = 0) -> SequenceModel:
    torch.manual_seed(seed)
    sizes = {"d_key": 8, "d_value": 16, "chunk_size": 8}
    facts = Preprocessing(byte_map=tuple(range(256)))
    return tcnca.build(preset, preprocessing=facts, vocab_size=256, **SIZES, **sizes).eval()


def classifier() -> SequenceModel:
    torch.manual_seed(0)
    config = ModelConfig.from_dict(
        {
            **SIZES,
            "mixer": {"kind": "tcn", "depth": 2},
            "attention": {"kind": "chunked", "d_key": 8, "d_value": 16, "chunk_size": 8},
            "input": {"kind": "tokens", "vocab_size": 256},
            "head": {"kind": "classifier", "num_classes": 3},
            "causal": False,
        }
    )
    names = ("bad", "good", "neither")
    facts = Preprocessing(task="classification", byte_map=tuple(range(256)), class_names=names)
    return SequenceModel(config, facts).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[SequenceModel, Any, Any]:
    """A model, and what `from_pretrained` reads of its files: model and tokenizer."""
    folder, model = tmp_path_factory.mktemp("saved"), language_model()
    hf.save_pretrained(model, folder)
    read = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model, read, transformers.AutoTokenizer.from_pretrained(folder)


def greedy(model: SequenceModel, text: str, count: int) -> list[int]:
    """Continue a text by the likeliest token, with nothing but `forward`."""
    tokens = model.encode(text)
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0].tolist()


@pytest.mark.parametrize("preset", FAMILIES)
def test_files_keep_the_model(preset: str, tmp_path: Path) -> None:
    model = language_model(preset)
    hf.save_pretrained(model, tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(read, hf.TcncaForCausalLM)
    assert not read.training
    assert read.model.config == model.config
    tokens = model.encode(TEXTS[2])
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=0, atol=1e-6)
        # In two calls, with the cache.
        first = read(tokens[:, :20])
        second = read(tokens[:, 20:], past_key_values=first.past_key_values)
        torch.testing.assert_close(second.logits, model(tokens).logits[:, 20:], rtol=0, atol=1e-5)
    assert second.past_key_values.get_seq_length() == tokens.shape[1]


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["cache", "no cache"])
def test_greedy_generation_is_ours_also_in_padded_batches(saved: tuple[Any, Any, Any], options: Any) -> None:
    model, read, tokenizer = saved
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert batch["attention_mask"].sum(1).tolist() == [len(text) for text in TEXTS]
    out = read.generate(**batch, max_new_tokens=12, do_sample=False, **options)
    for text, row, mask in zip(TEXTS, out, batch["attention_mask"], strict=True):
        assert row[int((mask == 0).sum()) :].tolist() == greedy(model, text, 12)
    for text in TEXTS:
        row = read.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=12, do_sample=False, **options)[0]
        assert row.tolist() == greedy(model, text, 12)


def test_beams_and_samples_use_the_cache(saved: tuple[Any, Any, Any]) -> None:
    _, read, tokenizer = saved
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    beams = [read.generate(**batch, max_new_tokens=8, num_beams=4, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*beams)
    samples = []
    for cache in (True, False):
        torch.manual_seed(0)
        options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 8}
        samples.append(read.generate(**batch, use_cache=cache, **options))
    assert samples[0].shape[0] == 2 * len(TEXTS)
    assert torch.equal(*samples)


def test_the_loss_predicts_the_next_token_and_recomputed_gradients_are_equal() -> None:
    read = hf.TcncaForCausalLM.from_model(language_model().train())
    tokens = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(0))
    loss = read(tokens, labels=tokens).loss
    logits = read.model(tokens).logits
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss, wanted)
    assert isinstance(read(tokens, return_dict=False), tuple)
    loss.backward()
    before = [parameter.grad for parameter in read.parameters()]
    plain = read.model.layers[0].forward
    for reentrant in (True, False):
        read.zero_grad()
        read._set_gradient_checkpointing(True, functools.partial(checkpoint, use_reentrant=reentrant))
        assert read.model.layers[0].forward != plain
        read(tokens, labels=tokens).loss.backward()
        # Not the same bits, since a forward pass without gradients may take other kernels.
        torch.testing.assert_close([parameter.grad for parameter in read.parameters()], before)
    read._set_gradient_checkpointing(False)
    assert read.model.layers[0].forward == plain


def test_the_trainer_learns_and_saves(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    read = hf.TcncaForCausalLM.from_model(language_model().train())
    tokens = read.model.encode("abcdefgh" * 4)[0]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"),
        max_steps=12,
        learning_rate=0.02,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(read, arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 24)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0] - 1
    trainer.save_model(str(tmp_path / "model"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(again(tokens[None]).logits, read.eval()(tokens[None]).logits)


def test_weights_that_a_file_lacks_are_initialized(tmp_path: Path) -> None:
    hf.save_pretrained(language_model(), tmp_path)
    weights = {
        name: tensor
        for name, tensor in tcnca.hf.TcncaForCausalLM.from_pretrained(tmp_path).state_dict().items()
        if "layers.1.block.mixer" not in name
    }
    config = hf.TcncaConfig.from_pretrained(tmp_path)
    read = hf.TcncaForCausalLM.from_pretrained(None, config=config, state_dict=weights)
    mixers = [layer.block.mixer for layer in read.model.layers]
    assert torch.equal(mixers[0].weight, weights["model.layers.0.block.mixer.weight"])
    # As `TCN` initializes it: all but the first block start as the identity.
    assert torch.equal(mixers[1].weight[1:, ..., 0], torch.ones_like(mixers[1].weight[1:, ..., 0]))
    assert not mixers[1].weight[1:, ..., 1:].any()
    assert 0.2 < float(mixers[1].omega.detach().std()) < 3


def test_a_classifier_answers_as_ours(tmp_path: Path) -> None:
    model = classifier()
    hf.save_pretrained(model, tmp_path)
    read = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        output = read(**batch, labels=torch.tensor([0, 1, 2]))
    ours = model.predict(TEXTS)
    assert [read.config.id2label[index] for index in output.logits.argmax(-1).tolist()] == ours.labels
    torch.testing.assert_close(output.logits.softmax(-1), torch.as_tensor(ours.probabilities), rtol=0, atol=1e-6)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits, torch.tensor([0, 1, 2])))


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = hf.TcncaTokenizer()
    tokens = tokenizer(text)["input_ids"]
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == text


def test_tokens_follow_the_model(tmp_path: Path) -> None:
    tokenizer = hf.TcncaTokenizer(byte_map=list(b"ab c"))
    tokenizer.save_pretrained(tmp_path)
    read = hf.TcncaTokenizer.from_pretrained(tmp_path)
    assert read("a cab")["input_ids"] == [0, 2, 3, 0, 1]
    with pytest.raises(InputError, match="text: expected a byte that the model knows, got 'd'"):
        read("abd")
    words = hf.TcncaTokenizer(symbols=["[MAX", "1", "2", "]"])
    assert words("[MAX 2 1 ]")["input_ids"] == [0, 2, 1, 3]
    assert words.decode([0, 2, 1, 3]) == "[MAX 2 1 ]"


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a causal language model; use TcncaForSequenceClassification"):
        hf.TcncaForCausalLM(hf.TcncaConfig(classifier().config.to_dict()))
    with pytest.raises(ConfigError, match="expected a classifier of single sequences; use TcncaForCausalLM"):
        hf.TcncaForSequenceClassification(hf.TcncaConfig(language_model().config.to_dict()))
    with pytest.raises(InputError, match="input_ids: expected tokens"):
        hf.TcncaForCausalLM.from_model(language_model())(inputs_embeds=torch.zeros(1, 2, 16))
    code = "import sys; sys.modules['transformers'] = None; import tcnca.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'tcnca[hf]'" in done.stderr


def test_the_command_exports_runs_and_the_pretrained_model(tmp_path: Path) -> None:
    runner, folder = CliRunner(), tmp_path / "model"
    fit(tmp_path / "run")
    done = runner.invoke(app, ["export", str(tmp_path / "run"), "--hf", str(folder)])
    assert done.exit_code == 0, done.output
    assert "tcnca train" in (folder / "README.md").read_text(encoding="utf-8")
    done = runner.invoke(app, ["export", "--hf", str(folder)])
    assert "--hf: expected a new or empty folder" in done.output
    done = runner.invoke(app, ["export", "--hf", str(folder), "--force"])
    assert done.exit_code == 0, done.output
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "11,275,784 parameters" in card
    # Its code, as it is written.
    code = card.split("```python\n")[1].split("```")[0].replace("FOLDER", str(folder)).replace("=100", "=5")
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert printed.stdout.startswith("The history of "), printed.stderr
    wrong: list[list[str]] = [["--hf", "a", "--onnx", "b"], []]
    for arguments in wrong:
        assert "--onnx, --model, --hf: expected one of them" in runner.invoke(app, ["export", *arguments]).output
