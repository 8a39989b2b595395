"""Multi-dimensional damped exponential moving average, MEGA's mixer."""
