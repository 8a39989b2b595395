"""The TCN's kernels for NVIDIA GPUs. Importing this needs no GPU: CUDA is loaded when a kernel first runs.

Three families of kernels compute the same blocks: `tensor_core` for 16-bit numbers, `registers` for everything else,
`smem` for short sequences.
"""
