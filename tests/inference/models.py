"""Models of every kind of task with fixed weights, saved as a user finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tcnca import (
    ClassifierHeadConfig,
    PairHeadConfig,
    Preprocessing,
    RegressionHeadConfig,
    SequenceModel,
    TokenInputConfig,
    ValueInputConfig,
    save,
)
from tests.examples import small_config, small_model

BYTES = bytes(range(256))
TEXT: dict[str, Any] = {"input": TokenInputConfig(vocab_size=256), "causal": False}


def values(features: int) -> dict[str, Any]:
    """Statistics of raw values that are far from standardized."""
    return {"input_mean": (5.0,) * features, "input_std": (2.0,) * features}


def saved(kind: str, folder: Path, family: str = "tcnca", **facts: Any) -> SequenceModel:
    """Save a model of a kind, and return it."""
    known: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "classification": (
            {**TEXT, "head": ClassifierHeadConfig(num_classes=3)},
            {
                "byte_map": tuple(BYTES),
                "class_names": ("bad", "fair", "good"),
                "columns": {"text": "body", "label": "stars"},
            },
        ),
        "pairs": (
            {**TEXT, "head": PairHeadConfig()},
            {"byte_map": tuple(BYTES), "class_names": ("no", "yes"), "columns": {"text": "one", "second": "two"}},
        ),
        "signals": (
            {"input": ValueInputConfig(features=2), "causal": False, "head": ClassifierHeadConfig(num_classes=2)},
            {"class_names": ("0", "1"), "columns": {"values": "x", "labels": "y", "lengths": "n"}, **values(2)},
        ),
        "regression": (
            {"input": ValueInputConfig(), "causal": False, "head": RegressionHeadConfig(outputs=2)},
            {"columns": {"values": "values"}, "target_mean": (7.0, 1.0), "target_std": (3.0, 1.0), **values(1)},
        ),
        "forecast": (
            {"input": ValueInputConfig(features=2), "head": RegressionHeadConfig(outputs=2, pooling="none")},
            {"target_mean": (5.0, 5.0), "target_std": (2.0, 2.0), **values(2)},
        ),
        "image": (
            {"input": ValueInputConfig(), "causal": False, "head": ClassifierHeadConfig(num_classes=2)},
            {"image_size": (3, 4), "input_mean": (0.5,), "input_std": (0.25,)},
        ),
        "recall": (
            {"input": TokenInputConfig(vocab_size=4)},
            {"symbols": ("a", "b", "1", "2"), "class_names": ("a", "b", "1", "2")},
        ),
        "language": ({"input": TokenInputConfig(vocab_size=256)}, {"byte_map": tuple(BYTES)}),
    }
    config, preprocessing = known[kind]
    task = {"signals": "classification", "image": "classification"}.get(kind, kind)
    torch.manual_seed(1)
    model = SequenceModel(small_config(family, **config), Preprocessing(task=task, **{**preprocessing, **facts})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    save(model, folder)
    return model


def text_model(byte_map: bytes = BYTES, family: str = "tcnca", **changes: Any) -> SequenceModel:
    """Return a language model of bytes."""
    model = small_model(family, torch.float32, input=TokenInputConfig(vocab_size=len(byte_map)), **changes)
    model.preprocessing = Preprocessing(task="language", byte_map=tuple(byte_map))
    return model


def assert_near(got: Any, expected: Any, rtol: float = 1e-7, atol: float = 0.0) -> None:
    """Compare the numbers of predictions, which are None for those of another kind."""
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(expected, np.float64), rtol=rtol, atol=atol)
