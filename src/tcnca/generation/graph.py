"""A step of one token as a CUDA graph: a few hundred small kernels, started together instead of one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from tcnca.models import ModelState, SequenceModel
from tcnca.ops.driver import capture_graph

LEAST_TOKENS = 8
"""Recording costs about as much as so many steps."""
_WARM_UP = 2


def records(model: SequenceModel, device: torch.device, tokens: int) -> bool:
    """Whether a graph can generate so many tokens, and is worth it."""
    attention = model.config.attention
    # The state of full attention grows; what autocast has cast would be cast for one replay only.
    grows = attention is not None and attention.chunk_size is None
    return device.type == "cuda" and tokens >= LEAST_TOKENS and not grows and not torch.is_autocast_enabled("cuda")


class GraphedStep:
    """Reads one token after another, `[batch]`, and gives the logits of the next, `[batch, num_classes]`.

    The given state's memory is used up, and the logits are overwritten by the next step.
    """

    def __init__(self, model: SequenceModel, state: ModelState) -> None:
        before = state.tensors()
        self._token = next(iter(before.values())).new_zeros(state.batch_size, dtype=torch.long)
        with torch.cuda.device(self._token.device):
            # PyTorch's own choice of a stream stays with the first device that it was made for.
            stream = torch.cuda.Stream()
            self._warm_up(model, state, stream)
            # Other threads, one that pins memory for example, may go on meanwhile: all of this happens in this one.
            with capture_graph(stream, error_mode="thread_local") as self._graph:
                logits, after = model(self._token.unsqueeze(1), state=state, inplace=True)
                assert after is not None
                for name, tensor in after.tensors().items():
                    if tensor.data_ptr() != before[name].data_ptr():
                        before[name].copy_(tensor)
        # Replays read and write them where they are.
        self._held = before, after
        self._logits = logits[:, -1]

    def _warm_up(self, model: SequenceModel, state: ModelState, stream: torch.cuda.Stream) -> None:
        """Let libraries allocate what they keep, on the stream that is recorded."""
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                model(self._token.unsqueeze(1), state=state.clone(), inplace=True)
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, token: Tensor) -> Tensor:
        """Read a token."""
        self._token.copy_(token)
        self._graph.replay()
        return self._logits
