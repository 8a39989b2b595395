"""Use a trained model on files: predictions for tables, lines and arrays of any size."""

from tcnca.inference.predict import PredictOptions, PredictSummary, load_run, predict_inputs
from tcnca.inference.readers import ColumnOptions

__all__ = ["ColumnOptions", "PredictOptions", "PredictSummary", "load_run", "predict_inputs"]
