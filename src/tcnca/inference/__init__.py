"""Use a trained model on files of any size: predictions for tables, lines and arrays, and the bits of texts."""

from tcnca.inference.load import load_run
from tcnca.inference.predict import PredictOptions, PredictSummary, predict_inputs
from tcnca.inference.readers import ColumnOptions
from tcnca.inference.scoring import TextScorer, score

__all__ = [
    "ColumnOptions",
    "PredictOptions",
    "PredictSummary",
    "TextScorer",
    "load_run",
    "predict_inputs",
    "score",
]
