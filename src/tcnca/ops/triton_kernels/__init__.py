"""What kernels in Triton share: whether they can run, how they are compiled and started."""
