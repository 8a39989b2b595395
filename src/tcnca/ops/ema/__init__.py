"""Multi-dimensional damped exponential moving average, MEGA's mixer, in three equal forms and a fused one."""

from tcnca.ops.ema.kernel import EMACoefficients, ema_coefficients, ema_kernel
from tcnca.ops.ema.plain import EMA_BACKENDS, EMABackend, EMAState, ema, initial_ema_state

__all__ = [
    "EMA_BACKENDS",
    "EMABackend",
    "EMACoefficients",
    "EMAState",
    "ema",
    "ema_coefficients",
    "ema_kernel",
    "initial_ema_state",
]
