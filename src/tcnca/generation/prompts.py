"""Prefill: read a prompt of any length in bounded memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tcnca.models import Lengths, ModelState, SequenceModel
from tcnca.ops import take_time

PREFILL_TOKENS = 16_384
"""Tokens of a batch that are read in one call on a CPU, by models and vocabularies up to the `PREFILL_WIDTH`."""
PREFILL_WIDTH = 512
GPU_FACTOR = 8
"""How many times as many are read in one call on a GPU, so that launching the kernels takes less time than they run."""
OnPiece = Callable[[Tensor, Tensor | None], None]
"""Called with the tokens of a piece, `[batch, time]`, and which of them are valid; None if all are."""


def piece_length(model: SequenceModel, batch: int) -> int:
    """Return how many tokens of each row are read in one call: whole chunks of the attention."""
    attention, device = model.config.attention, model.embedding.weight.device
    chunk = 1 if attention is None else attention.chunk_size or 1
    tokens = PREFILL_TOKENS * (GPU_FACTOR if device.type == "cuda" else 1)
    if attention is not None and attention.chunk_size is None:
        tokens //= attention.num_heads  # after a state, full attention has the weights of all heads in memory
    # A large vocabulary makes the logits the largest tensor.
    tokens = tokens * PREFILL_WIDTH // max(model.config.d_model, len(model.embedding.weight), PREFILL_WIDTH)
    return max(tokens // batch // chunk, 1) * chunk


def prefill(
    model: SequenceModel,
    prompt: Tensor,
    lengths: Lengths | None = None,
    on_piece: OnPiece | None = None,
) -> tuple[Tensor, ModelState]:
    """Read prompts in pieces, and return the logits after the last token of each prompt, and the state.

    Args:
        model: a language model in evaluation mode.
        prompt: `[batch, time]`, whole numbers of any dtype. The padding token of the model can be anywhere.
        lengths: `[batch]`, valid tokens of each row; the rest is padding.
        on_piece: is called with the tokens of each piece that was read, `[batch, time]`, and which of them are valid;
            None if all are.

    Returns:
        The logits `[batch, vocab_size]`, and the state.
    """
    padding, ends = model.embedding.pad_token_id, None
    if lengths is not None:
        ends = torch.as_tensor(lengths, device=prompt.device).long()
    last: Tensor | None = None
    state: ModelState | None = None
    width = piece_length(model, prompt.shape[0])
    for begin in range(0, prompt.shape[1], width):
        piece = prompt[:, begin : begin + width].long()
        left = None if ends is None else (ends - begin).clamp(0, piece.shape[1])
        logits, state = model(piece, lengths=left, state=state, inplace=state is not None)
        valid: Tensor | None = None
        if left is None and padding is None:
            # Without a copy, the logits of the whole piece would stay in memory.
            last = logits[:, -1].clone()
        else:
            times = torch.arange(piece.shape[1], device=piece.device)
            valid = torch.ne(piece, padding or 0) if left is None else times < left.unsqueeze(1)
            # A prompt that has ended before this piece, or not begun, keeps what it has.
            index = torch.where(valid, times, -1).amax(1)
            new = take_time(logits, index.clamp(min=0).unsqueeze(1))[:, 0]
            last = new if last is None else torch.where((index >= 0).unsqueeze(1), new, last)
        if on_piece is not None:
            on_piece(piece, valid)
    assert last is not None
    assert state is not None
    return last, state
