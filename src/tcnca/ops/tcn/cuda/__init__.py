"""The TCN's kernels for NVIDIA GPUs. Importing this needs no GPU: CUDA is loaded when a kernel first runs."""
