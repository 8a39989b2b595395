"""One token of a model in a few kernels."""
