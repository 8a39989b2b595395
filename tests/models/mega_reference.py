"""MEGA in NumPy, float64 and plain loops, from its formulas: what our reading of its checkpoints is compared with.

It takes the arguments and the weights under the names that MEGA's own checkpoints have, every argument spelled
out, and shares nothing with `tcnca`. One sequence at a time and without its padding, so that nothing here knows
about masks: that padding makes no difference is a claim about the library, not about this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = dict[str, Array]
Arguments = dict[str, Any]

PADDING = 1
EPS = 1e-5

_erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    return x * 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_accurate": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "linear": lambda x: x,
}


def language_model(args: Arguments, weights: Weights, tokens: Array) -> Array:
    """Logits `[batch, time, vocab_size]`, zero where a token of `tokens` (`[batch, time]`) is padding."""
    embedding = weights["decoder.embed_tokens.weight"]
    tied = args["share_decoder_input_output_embed"]
    matrix = embedding if tied else weights["decoder.output_projection.weight"]
    scale = 1.0 if args["no_scale_embedding"] else math.sqrt(args["decoder_embed_dim"])
    logits = np.zeros((*tokens.shape, len(embedding)))
    stack = _Stack("decoder.", weights, args, causal=True)
    for row, line in enumerate(tokens):
        real = np.flatnonzero(line != PADDING)
        if len(real):
            logits[row, real] = stack.features(scale * embedding[line[real]]) @ matrix.T
    return logits


def classifier(args: Arguments, weights: Weights, inputs: Array, second: Array | None = None) -> Array:
    """Logits `[batch, num_classes]` of tokens or real values `[batch, time]`, or of pairs of documents."""
    pooled = _pooled(args, weights, inputs)
    if second is not None:
        pooled = np.concatenate([_pooled(args, weights, second), pooled], 1)
    function = ACTIVATIONS[args["classifier_activation_fn"]]
    for number in range(args["classifier_layers"]):
        pooled = function(_linear(weights, f"classifier.{number}.0.", pooled))
    return pooled @ weights["sentence_projection_layer.weight"].T


def _pooled(args: Arguments, weights: Weights, inputs: Array) -> Array:
    stack = _Stack("encoder.encoder.", weights, args, causal=False)
    return np.stack([_pooled_row(args, weights, stack, line) for line in inputs])


def _pooled_row(args: Arguments, weights: Weights, stack: _Stack, line: Array) -> Array:
    name = "encoder.encoder.embed_tokens."
    if args["input_type"] == "text":
        embedded = weights[name + "embed.weight"][line[line != PADDING]]
    else:
        embedded = np.stack([value * weights[name + "weight"] + weights[name + "bias"] for value in line])
    features = stack.features(embedded)
    return features.mean(0) if args["sen_rep_type"] == "mp" else features[0]


class _Stack:
    """The layers of either model, which name the same things differently."""

    def __init__(self, prefix: str, weights: Weights, args: Arguments, causal: bool) -> None:
        self.prefix, self.weights, self.args, self.causal = prefix, weights, args, causal
        self.prenorm = args["normalize_before" if causal else "encoder_normalize_before"]
        self.norm_type = args["normalization_type" if causal else "norm_type"]
        self.layers = args["decoder_layers" if causal else "encoder_layers"]
        self.chunk_size = args["decoder_chunk_size" if causal else "chunk_size"]
        self.keys = args["decoder_z_dim" if causal else "z_dim"]
        self.function = ACTIVATIONS[args["activation_fn"]]

    def features(self, x: Array) -> Array:
        """What the last layer makes of the embeddings `x` (`[time, width]`) of one sequence."""
        if self.args["normalize_embedding"]:
            x = self.norm("embed_norm.", x)
        for number in range(self.layers):
            x = self.gated_attention(f"layers.{number}.mega_layer.", x)
            if f"{self.prefix}layers.{number}.nffn.fc1.weight" in self.weights:
                x = self.feed_forward(f"layers.{number}.nffn.", x)
        return self.norm("final_norm.", x) if self.prenorm else x

    def get(self, name: str) -> Array:
        return self.weights[self.prefix + name]

    def gated_attention(self, name: str, x: Array) -> Array:
        normed = self.norm(name + "norm.", x) if self.prenorm else x
        values = self.function(_linear(self.weights, self.prefix + name + "v_proj.", normed))
        mixed = self.moving_average(name + "move.", normed)
        joint = _linear(self.weights, self.prefix + name + "mx_proj.", mixed)
        width, hidden = x.shape[1], values.shape[1]
        u, zeta, r, h = np.split(joint, np.cumsum([width, self.keys, hidden]), axis=1)
        gamma, beta = self.get(name + "gamma"), self.get(name + "beta")
        query, key = (silu(zeta) * gamma[i] + beta[i] for i in (0, 1))
        attended = self.attention(name + "rel_pos_bias.", query, key, values)
        candidate = self.function(h + _linear(self.weights, self.prefix + name + "h_proj.", attended * silu(r)))
        x = x + sigmoid(u) * (candidate - x)
        return x if self.prenorm else self.norm(name + "norm.", x)

    def feed_forward(self, name: str, x: Array) -> Array:
        h = self.norm(name + "norm.", x) if self.prenorm else x
        h = self.function(_linear(self.weights, self.prefix + name + "fc1.", h))
        x = x + _linear(self.weights, self.prefix + name + "fc2.", h)
        return x if self.prenorm else self.norm(name + "norm.", x)

    def moving_average(self, name: str, x: Array) -> Array:
        time, width = x.shape
        delta, alpha, beta = (self.get(name + part)[:, :, 0] for part in ("delta", "alpha", "beta"))
        gamma = self.get(name + "gamma")
        p = sigmoid(delta)
        q = 1.0 - p * sigmoid(alpha)
        limit = self.args["truncation_length"]
        lags = time if limit is None else min(time, limit)
        kernel = [(p * beta * q**lag * gamma).sum(1) / math.sqrt(gamma.shape[1]) for lag in range(lags)]
        y = np.zeros_like(x)
        for t in range(time):
            for lag in range(lags):
                if t - lag >= 0:
                    y[t] += kernel[lag][:width] * x[t - lag]
                if t + lag < time and not self.causal:
                    y[t] += kernel[lag][width:] * x[t + lag]
        return silu(y + self.get(name + "omega") * x)

    def attention(self, name: str, query: Array, key: Array, values: Array) -> Array:
        time = len(query)
        size = self.chunk_size if self.chunk_size > 0 else time
        out = np.zeros_like(values)
        for t in range(time):
            start = t // size * size
            end = t + 1 if self.causal else min(start + size, time)
            scores = key[start:end] @ query[t]
            bias = np.array([self.bias(name, t - start, other) for other in range(end - start)])
            out[t] = self.attention_weights(scores, bias) @ values[start:end]
        return out

    def attention_weights(self, scores: Array, bias: Array) -> Array:
        """From the scores of the visible keys."""
        kind = self.args["attention_activation_fn"]
        if kind == "softmax":
            scores = scores / math.sqrt(self.keys) + bias
            weights = np.exp(scores - scores.max())
            return weights / weights.sum()
        scores = scores / len(scores) + bias
        if kind == "relu2":
            return np.maximum(scores, 0.0) ** 2
        return 0.5 * (1.0 + _erf((scores - 0.707107) / (0.282095 * math.sqrt(2.0))))

    def bias(self, name: str, query: int, key: int) -> float:
        if self.args["rel_pos_bias"] == "simple":
            table = self.get(name + "rel_pos_bias")
            return float(table[(len(table) + 1) // 2 - 1 + key - query])
        half = self.keys // 2
        speed = 10000.0 ** -(np.arange(half) / half)
        # Each pair, one of either half, is a complex number, and turning it a multiplication.
        alpha, beta = (
            row[:half] + 1j * row[half:] for row in (self.get(name + "alpha")[0], self.get(name + "beta")[0])
        )
        return float((np.conj(alpha * np.exp(1j * query * speed)) * beta * np.exp(1j * key * speed)).sum().real)

    def norm(self, name: str, x: Array) -> Array:
        name = self.prefix + name + "norm."
        if self.norm_type == "layernorm":
            y = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + EPS)
        elif self.norm_type in ("scalenorm", "rmsnorm"):
            y = x / np.sqrt((x * x).mean(1, keepdims=True) + EPS)
        else:
            y = (x - self.weights[name + "running_mean"]) / np.sqrt(self.weights[name + "running_var"] + EPS)
        # A final norm without learned scales has no weights at all.
        y = y * self.weights.get(name + "scalar", np.ones(1)) * self.weights.get(name + "weight", np.ones(1))
        return y + self.weights.get(name + "bias", np.zeros(1))


def _linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[name + "weight"].T + weights[name + "bias"]
