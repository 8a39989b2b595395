"""Diagonal state-space models: S4D's convolution and the recurrence of S5 and the LRU."""
