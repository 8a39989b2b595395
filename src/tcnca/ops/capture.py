"""Recording CUDA graphs so that a failure leaves no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def capturing(
    stream: torch.cuda.Stream | None = None, pool: Any = None, error_mode: str = "global"
) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what runs meanwhile, on a stream and in memory of its own unless given. If that fails, no trace stays.

    A backward pass can be captured if its leaves were not used on another stream by a forward pass that still lives.
    `error_mode` is that of `torch.cuda.graph`. After a failure `torch.manual_seed` does not reach graphs from before.
    """
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    drawn = generator.clone_state()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=error_mode):
            yield graph
    except BaseException:
        torch.cuda.set_stream(before)
        with contextlib.suppress(RuntimeError):  # of a capture that has come to its end all the same
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        # Its own state waits for the end of the capture, and refuses to draw.
        generator.graphsafe_set_state(drawn)
        raise
