"""Multi-dimensional damped exponential moving average, MEGA's mixer, in three equal forms and a fused one."""

from tcnca.ops.ema.kernel import EMACoefficients, ema_coefficients, ema_kernel
from tcnca.ops.ema.plain import METHODS, EMAState, Method, ema, initial_ema_state

__all__ = [
    "METHODS",
    "EMACoefficients",
    "EMAState",
    "Method",
    "ema",
    "ema_coefficients",
    "ema_kernel",
    "initial_ema_state",
]
