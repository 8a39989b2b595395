"""Multi-dimensional damped exponential moving average, MEGA's mixer."""

from tcnca.ops.ema.api import EMABackend, EMAState, ema, initial_ema_state
from tcnca.ops.ema.naive import EMACoefficients, ema_coefficients, ema_kernel

__all__ = [
    "EMABackend",
    "EMACoefficients",
    "EMAState",
    "ema",
    "ema_coefficients",
    "ema_kernel",
    "initial_ema_state",
]
