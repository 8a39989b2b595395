"""Chunked attention of one head by Triton kernels that keep no matrix of scores in memory."""
