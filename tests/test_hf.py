"""The interfaces of Hugging Face: the same numbers as the library, `generate`, `Trainer`, files, tokenizer, export."""

from __future__ import annotations

import dataclasses
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
from tcnca import ConfigError, InputError, ModelConfig, PairHeadConfig, SequenceModel
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
    ngrams = {"ngram_sizes": [2, 3], "ngram_buckets": 50, "ngram_dropout": 0.0}
    model = tcnca.build(preset, preprocessing=facts, vocab_size=256, **SIZES, **sizes, **ngrams).eval()
    torch.nn.init.normal_(model.state_dict()["embedding.ngram_weight"], std=0.1)
    return model


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


def test_rows_of_a_batch_end_at_different_tokens(saved: tuple[Any, Any, Any]) -> None:
    model, read, tokenizer = saved
    wanted = [greedy(model, text, 12)[len(text) :] for text in TEXTS]
    end = wanted[0][2]
    lengths = [row.index(end) + 1 if end in row else 12 for row in wanted]
    assert len(set(lengths)) > 1
    batch, padding = tokenizer(TEXTS, return_tensors="pt", padding=True), tokenizer.pad_token_id
    out = read.generate(**batch, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=padding)
    for row, continuation, length in zip(out[:, batch["input_ids"].shape[1] :].tolist(), wanted, lengths, strict=True):
        assert row == continuation[:length] + [padding] * (len(row) - length)
    assert tokenizer.decode(out[1], skip_special_tokens=True).startswith(TEXTS[1])


def test_padding_does_not_change_processed_logits(saved: tuple[Any, Any, Any]) -> None:
    _, read, tokenizer = saved
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "repetition_penalty": 1.5}
    options["no_repeat_ngram_size"] = 1
    batch = read.generate(**tokenizer(TEXTS, return_tensors="pt", padding=True), **options)
    for text, row in zip(TEXTS, batch, strict=True):
        assert row[-8:].tolist() == read.generate(**tokenizer(text, return_tensors="pt"), **options)[0, -8:].tolist()


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
    for kept in (0, 3, torch.tensor([4, 7, 29])):
        expected = logits[:, kept] if isinstance(kept, torch.Tensor) else logits[:, -kept:]
        torch.testing.assert_close(read(tokens, logits_to_keep=kept).logits, expected)
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


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointing"])
def test_the_trainer_learns_and_saves(tmp_path: Path, recompute: bool) -> None:
    pytest.importorskip("accelerate")
    read = hf.TcncaForCausalLM.from_model(language_model().train())
    tokens = read.model.encode("abcdefgh" * 4)[0]
    # Its new name, and the old one.
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    options = [name for name in ("activation_checkpointing", "gradient_checkpointing") if name in known][:1]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"),
        max_steps=12,
        learning_rate=0.02,
        per_device_train_batch_size=2,
        logging_steps=1,
        **{option: True for option in options if recompute},
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(read, arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 24)
    trainer.train()
    assert isinstance(read.model.layers[0].forward, functools.partial) == recompute
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


def test_a_classifier_answers_as_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = classifier()
    assert hf.save_pretrained(model, tmp_path) == "AutoModelForSequenceClassification"
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "mixer: tcn, attention: in chunks of 8; 256 tokens" in card
    exec(card.split("```python\n")[1].split("```")[0].replace("FOLDER", str(tmp_path)), {})
    assert capsys.readouterr().out == f"{model.predict(['a text']).labels[0]}\n"  # type: ignore[index]
    read = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        output = read(**batch, labels=torch.tensor([0, 1, 2]))
    ours = model.predict(TEXTS)
    assert [read.config.id2label[index] for index in output.logits.argmax(-1).tolist()] == ours.labels
    torch.testing.assert_close(output.logits.softmax(-1), torch.as_tensor(ours.probabilities), rtol=0, atol=1e-6)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits, torch.tensor([0, 1, 2])))


def test_a_language_model_is_tuned_as_a_classifier(saved: tuple[Any, Any, Any], tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, read, tokenizer = saved
    read.save_pretrained(tmp_path / "lm")
    tuned = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3)
    assert torch.equal(tuned.model.layers[0].block.mixer.weight, model.layers[0].block.mixer.weight)
    examples = [{**tokenizer(text), "labels": label} for label, text in enumerate(("aaaa", "bbbbbb", "cc"))]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=25, learning_rate=0.02, report_to=[], use_cpu=True, disable_tqdm=True
    )
    collator = transformers.DataCollatorWithPadding(tokenizer)
    trainer = transformers.Trainer(tuned, arguments, train_dataset=examples * 8, data_collator=collator)
    trainer.train()
    batch = collator(examples)
    assert tuned.eval()(**batch).logits.argmax(-1).tolist() == [0, 1, 2]
    tuned.save_pretrained(tmp_path / "tuned")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "tuned")
    assert torch.equal(again(**batch).logits, tuned(**batch).logits)


def test_configurations_and_dtypes(saved: tuple[Any, Any, Any], tmp_path: Path) -> None:
    model, read, tokenizer = saved
    read.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, hf.TcncaConfig)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (256, 16, 2)
    assert config.to_dict() == hf.TcncaConfig.from_dict(config.to_dict()).to_dict()
    torch.manual_seed(1)
    new = transformers.AutoModelForCausalLM.from_config(config)
    assert new.model.config == model.config
    assert not torch.equal(new.model.embedding.weight, model.embedding.weight)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = tokenizer(TEXTS[2], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert half(tokens).logits.dtype == torch.bfloat16
        torch.testing.assert_close(half(tokens).logits.float(), model(tokens).logits, rtol=0.1, atol=0.1)


def test_pipelines_and_streamers(saved: tuple[Any, Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model, read, tokenizer = saved
    generator = transformers.pipeline("text-generation", model=read, tokenizer=tokenizer)
    (found,) = generator(TEXTS[0], max_new_tokens=4, do_sample=False)
    assert found["generated_text"] == bytes(greedy(model, TEXTS[0], 4)).decode(errors="replace")
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
    read.generate(**tokenizer(TEXTS[0], return_tensors="pt"), max_new_tokens=4, do_sample=False, streamer=streamer)
    assert capsys.readouterr().out == found["generated_text"].removeprefix(TEXTS[0]) + "\n"


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
    with pytest.raises(InputError, match="text: expected a byte that the model knows, got byte 0xc3"):
        read("abä")
    with pytest.raises(InputError, match="text: expected valid Unicode, got the unpaired surrogate"):
        read("a\ud800")
    words = hf.TcncaTokenizer(symbols=["[MAX", "1", "2", "]"])
    assert words("[MAX 2 1 ]")["input_ids"] == [0, 2, 1, 3]
    assert words.decode([0, 2, 1, 3]) == "[MAX 2 1 ]"


def test_the_padding_token_is_no_token_of_the_model(saved: tuple[Any, Any, Any]) -> None:
    for tokenizer in (hf.TcncaTokenizer(), saved[2]):
        assert (tokenizer.pad_token_id, tokenizer.vocab_size, len(tokenizer)) == (256, 256, 257)
        assert tokenizer.get_vocab()["<pad>"] == 256
        assert tokenizer.decode([0, 97, 256], skip_special_tokens=True) == "\0a"
        assert tokenizer.decode([0, 97, 256]) == "\0a<pad>"
        assert tokenizer("<pad>")["input_ids"] == list(b"<pad>")
        collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        batch = collator([tokenizer("\0a"), tokenizer("abc")])
        assert sorted(batch["labels"].flatten().tolist()) == [-100, 0, 97, 97, 98, 99]
    with torch.no_grad():
        loss = saved[1](**batch).loss
    assert bool(torch.isfinite(loss))


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a causal language model; use TcncaForSequenceClassification"):
        hf.TcncaForCausalLM(hf.TcncaConfig(classifier().config.to_dict()))
    pairs = classifier().config.override(head=PairHeadConfig(num_classes=2))
    with pytest.raises(ConfigError, match="expected a classifier of single sequences; use TcncaForCausalLM"):
        hf.TcncaForSequenceClassification(hf.TcncaConfig(pairs.to_dict()))
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
    ours, read = tcnca.load(), transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = ours.encode("The history of ")
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, ours(tokens).logits, rtol=0, atol=1e-6)
    continued = read.generate(tokens, max_new_tokens=12, do_sample=False)[:, tokens.shape[1] :]
    assert torch.equal(continued, tcnca.generate(ours, tokens, 12, temperature=0))
    wrong: list[list[str]] = [["--hf", "a", "--onnx", "b"], []]
    for arguments in wrong:
        assert "--onnx, --model, --hf: expected one of them" in runner.invoke(app, ["export", *arguments]).output
