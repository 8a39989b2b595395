"""Models behind the interfaces of Hugging Face: `AutoModelForCausalLM`, `generate`, `Trainer`.

`import tcnca.hf` registers the classes, so that `from_pretrained` finds them. It needs `pip install 'tcnca[hf]'`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tcnca.errors import ConfigError, InputError
from tcnca.extras import require
from tcnca.files import atomic_write
from tcnca.models import ModelConfig, ModelState, SequenceModel
from tcnca.models.heads import ClassifierHeadConfig, LanguageModelHeadConfig
from tcnca.models.inputs import TokenInputConfig
from tcnca.models.preprocessing import Preprocessing, to_bytes

require("hf", "tcnca.hf")
import transformers  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutput  # noqa: E402


class TcncaConfig(transformers.PretrainedConfig):
    """The configuration of a model.

    Args:
        model: the fields of `tcnca.ModelConfig`, as its `to_dict` returns them.
        preprocessing: facts about the data, as `Preprocessing.to_dict` returns them.
        kwargs: fields of all configurations of Hugging Face.
    """

    model_type = "tcnca"

    def __init__(
        self, model: dict[str, Any] | None = None, preprocessing: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        config = ModelConfig() if model is None else ModelConfig.from_dict(model)
        facts = Preprocessing() if preprocessing is None else Preprocessing.from_dict(preprocessing)
        if not isinstance(config.input, TokenInputConfig):
            raise ConfigError(
                "model.input: expected tokens, got real values, which these interfaces do not take; use tcnca.load"
            )
        self.model, self.preprocessing = config.to_dict(), facts.to_dict()
        self.vocab_size, self.hidden_size = config.input.vocab_size, config.d_model
        self.num_hidden_layers = config.num_layers
        names = facts.class_names
        if names is None and isinstance(config.head, ClassifierHeadConfig):
            names = tuple(f"LABEL_{index}" for index in range(config.head.num_classes))
        if names is not None:
            kwargs.setdefault("id2label", dict(enumerate(names)))
            kwargs.setdefault("label2id", {name: index for index, name in enumerate(names)})
        # The head decides whether the embedding is shared; there is never a second tensor to tie.
        kwargs["tie_word_embeddings"] = False
        super().__init__(**kwargs)

    def build(self) -> SequenceModel:
        """Return a new model."""
        return SequenceModel(ModelConfig.from_dict(self.model), Preprocessing.from_dict(self.preprocessing))


class TcncaCache:
    """The state of a model, in the place of the keys and values of a Transformer. Its size does not grow."""

    is_compileable = False

    def __init__(self, state: ModelState, length: int) -> None:
        self.state, self.length = state, length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens were read, padding included."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the best beams."""
        self.state = self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self.state = self.state.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.state = self.state.repeat(repeats)


class TcncaPreTrainedModel(transformers.PreTrainedModel):
    """What the classes of models share. `model` is the `tcnca.SequenceModel`."""

    config_class = TcncaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _is_stateful = True

    def __init__(self, config: TcncaConfig) -> None:
        super().__init__(config)
        self.model = config.build()
        self.gradient_checkpointing = False
        self._built_on_meta = self.model.embedding.weight.is_meta
        self.post_init()

    @classmethod
    def from_model(cls, model: SequenceModel) -> TcncaPreTrainedModel:
        """Return the same model behind the interface of Hugging Face. Both share their weights."""
        config = TcncaConfig(model.config.to_dict(), model.preprocessing.to_dict())
        with torch.device("meta"):
            made = cls(config)
        made.model = model
        return made.train(model.training)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize what a file did not have. The parts of a model that is not read from one initialize themselves."""
        reset = getattr(module, "reset_parameters", None)
        if not self._built_on_meta or reset is None or isinstance(module, SequenceModel):
            return
        read = {
            name: tensor.detach().clone()
            for name, tensor in module.named_parameters(recurse=False)
            if getattr(tensor, "_is_hf_initialized", False)
        }
        reset()
        with torch.no_grad():
            for name, tensor in read.items():
                module.get_parameter(name).copy_(tensor)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of tokens."""
        embedding: nn.Module = self.model.embedding
        return embedding

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        self.gradient_checkpointing = enable
        for index, layer in enumerate(self.model.layers):
            vars(layer).pop("forward", None)
            if enable and index % every_n_layers == 0:
                layer.forward = functools.partial(_recompute, gradient_checkpointing_func, layer.forward)

    def _check(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if input_ids is None or inputs_embeds is not None:
            raise InputError("input_ids: expected tokens, got inputs_embeds or nothing; the model embeds tokens itself")
        return input_ids


def _recompute(function: Callable[..., Any], forward: Callable[..., Any], x: Tensor, **options: Any) -> Any:
    """Run a layer by a function that computes it again in the backward pass, and may take positional arguments only."""
    return function(functools.partial(forward, **options), x)


class TcncaForCausalLM(TcncaPreTrainedModel, transformers.GenerationMixin):
    """A language model. `generate` streams: each token takes the same time and memory at any position."""

    def __init__(self, config: TcncaConfig) -> None:
        super().__init__(config)
        if not isinstance(self.model.config.head, LanguageModelHeadConfig) or not self.model.streams:
            raise ConfigError("model.head: expected a causal language model; use TcncaForSequenceClassification")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TcncaCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Return logits, the loss if there are `labels`, and the cache.

        Args:
            input_ids: `[batch, time]`, the tokens after those of `past_key_values`.
            attention_mask: `[batch, time]` or longer, true for valid tokens; padding can be anywhere. Only its end, as
                long as `input_ids`, counts. Without it, no token may be padding.
            past_key_values: the cache of an earlier call, which is overwritten.
            labels: `[batch, time]`, tokens to predict, at the position of the token itself; -100 is ignored.
            use_cache: whether to return the cache; by default unless the model is in training mode.
            return_dict: whether to return an object, and not a tuple.
            logits_to_keep: number of last positions to return logits of, 0 for all; or the positions, `[positions]`.
            inputs_embeds: not supported.
            kwargs: ignored, or passed to the loss.
        """
        tokens = self._check(input_ids, inputs_embeds)
        time = tokens.shape[1]
        use_cache = not self.training if use_cache is None else use_cache
        before = past_key_values if isinstance(past_key_values, TcncaCache) else None
        mask = None if attention_mask is None else attention_mask[:, -time:].bool()
        if mask is not None:
            # `generate` continues a row that has ended with the padding token, and does not mask it.
            mask = mask & (tokens != self.config.vocab_size)
        logits, state = self.model(
            tokens,
            attention_mask=None if mask is None or bool(mask.all()) else mask,
            state=None if before is None else before.state,
            return_state=use_cache,
            inplace=before is not None and use_cache and not torch.is_grad_enabled(),
        )
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        logits = logits[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        cache: Any = None
        if state is not None:
            cache = before or TcncaCache(state, 0)
            cache.state, cache.length = state, cache.length + time
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output if return_dict or (return_dict is None and self.config.return_dict) else output.to_tuple()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first call returns the cache


class TcncaForSequenceClassification(TcncaPreTrainedModel):
    """A classifier of sequences. From the files of a language model, it gets a new head for `num_labels` classes."""

    def __init__(self, config: TcncaConfig) -> None:
        if config.model["head"]["kind"] == LanguageModelHeadConfig._kind:
            config = copy.deepcopy(config)
            names: Any = config.id2label  # by number; two classes unless `num_labels` says otherwise
            config.model["head"] = ClassifierHeadConfig(num_classes=len(names)).to_dict()
            task = {"task": "classification", "class_names": [names[index] for index in range(len(names))]}
            config.preprocessing = {**config.preprocessing, **task}
        super().__init__(config)
        head = self.model.config.head
        if not isinstance(head, ClassifierHeadConfig) or head.documents != 1:
            raise ConfigError("model.head: expected a classifier of single sequences; use TcncaForCausalLM")

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the logits of each class, and the loss if there are `labels` (`[batch]`)."""
        tokens = self._check(input_ids, inputs_embeds)
        mask = None if attention_mask is None else attention_mask.bool()
        logits = self.model(tokens, attention_mask=mask, return_state=False).logits
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        output = SequenceClassifierOutput(loss=loss, logits=logits)
        return output if return_dict or (return_dict is None and self.config.return_dict) else output.to_tuple()


class TcncaTokenizer(transformers.PreTrainedTokenizer):
    """Bytes of UTF-8 as tokens, or words between spaces if the model has them.

    The padding token comes after them. It is not in the vocabulary of the model, which reads it only where it is
    masked.

    Args:
        byte_map: byte of each token; None for all 256 in order.
        symbols: word of each token, instead of bytes.
        kwargs: arguments of all tokenizers of Hugging Face.
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self, byte_map: Sequence[int] | None = None, symbols: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        units = [chr(byte) for byte in (range(256) if byte_map is None else byte_map)] if symbols is None else symbols
        self._tokens, self._words = list(units), symbols is not None
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        kwargs.setdefault("pad_token", "<pad>")
        kwargs.setdefault("split_special_tokens", True)  # "<pad>" in a text is text
        kwargs.setdefault("clean_up_tokenization_spaces", False)
        super().__init__(byte_map=byte_map, symbols=symbols, **kwargs)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return the tokens and their numbers."""
        return {**self._ids, **self._added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return text.split() if self._words else [chr(byte) for byte in to_bytes(text, "text")]

    def _convert_token_to_id(self, token: str) -> int:
        if token not in self._ids:
            what = f"a word of the model's {len(self._tokens)}" if self._words else "a byte that the model knows"
            found = repr(token) if self._words or len(token) > 1 else f"byte 0x{ord(token):02x}"
            raise InputError(f"text: expected {what}, got {found}")
        return self._ids[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokens[index]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become replacement characters."""
        if self._words:
            return " ".join(tokens)
        # A token that was added, such as the padding, is more than one character.
        parts = (bytes([ord(token)]) if token in self._ids else token.encode() for token in tokens)
        return b"".join(parts).decode(errors="replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write nothing, since `tokenizer_config.json` has all of it."""
        return ()


def save_pretrained(model: SequenceModel, folder: str | Path, about: str = "") -> str:
    """Write a model, its tokenizer and a model card as files that `from_pretrained` reads.

    Args:
        model: a causal language model or a classifier of tokens.
        folder: the folder, which is created if it is missing.
        about: what to say about the model on its card, in Markdown.

    Returns:
        The name of the class whose `from_pretrained` reads the folder.
    """
    config, facts = model.config, model.preprocessing
    if causal := isinstance(config.head, LanguageModelHeadConfig):
        cls: type[TcncaPreTrainedModel] = TcncaForCausalLM
        auto, task = "AutoModelForCausalLM", "text-generation"
        use = (
            'inputs = tokenizer("The history of ", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True)[0]))"
        )
    else:
        cls = TcncaForSequenceClassification
        auto, task = "AutoModelForSequenceClassification", "text-classification"
        use = (
            'logits = model(**tokenizer("a text", return_tensors="pt")).logits\n'
            "print(model.config.id2label[logits.argmax().item()])"
        )
    cls.from_model(model).save_pretrained(folder)
    side = "left" if causal else "right"  # where padding is added: generation continues at the end of a row
    TcncaTokenizer(facts.byte_map, facts.symbols, padding_side=side).save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mixer = "none" if config.mixer is None else config.mixer._kind
    chunk = None if config.attention is None else config.attention.chunk_size
    attention = "none" if config.attention is None else "of all tokens" if chunk is None else f"in chunks of {chunk:,}"
    lines = (
        f"{parameters:,} parameters, {config.num_layers} layers of width {config.d_model}; mixer: {mixer}, attention: "
        f"{attention}; {config.input.vocab_size if isinstance(config.input, TokenInputConfig) else 0:,} tokens"
    )
    card = _CARD.format(task=task, about=about or "A model for long sequences.", facts=lines, auto=auto, use=use)
    atomic_write(Path(folder) / "README.md", card)
    return auto


_CARD = """---
library_name: transformers
pipeline_tag: {task}
tags:
- tcnca
---

# TCNCA

{about}

{facts}. The classes are those of the library `tcnca`.

```python
import tcnca.hf  # pip install 'tcnca[hf]'; registers the classes
from transformers import {auto}, AutoTokenizer

model, tokenizer = {auto}.from_pretrained("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")
{use}
```
"""


transformers.AutoConfig.register(TcncaConfig.model_type, TcncaConfig)
transformers.AutoModelForCausalLM.register(TcncaConfig, TcncaForCausalLM)
transformers.AutoModelForSequenceClassification.register(TcncaConfig, TcncaForSequenceClassification)
transformers.AutoTokenizer.register(TcncaConfig, slow_tokenizer_class=TcncaTokenizer)
