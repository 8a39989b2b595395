"""Use a trained model on files of any size: predictions for tables, lines, arrays and streams, and bits of texts."""

from tcnca.inference.loading import export_model, load
from tcnca.inference.predict import PredictOptions, PredictSummary, predict_inputs
from tcnca.inference.readers import ColumnOptions
from tcnca.inference.scoring import score
from tcnca.inference.streaming import Stream

__all__ = [
    "ColumnOptions",
    "PredictOptions",
    "PredictSummary",
    "Stream",
    "export_model",
    "load",
    "predict_inputs",
    "score",
]
