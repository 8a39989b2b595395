"""Speculative decoding: a small model drafts tokens, and the large one reads them in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from tcnca.errors import InputError
from tcnca.generation.prompts import prefill
from tcnca.generation.sampling import excluded_tokens
from tcnca.models import Lengths, ModelState, SequenceModel, evaluating


@torch.no_grad()
def speculative_generate(
    model: SequenceModel,
    draft_model: SequenceModel,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    num_draft_tokens: int = 4,
    lengths: Lengths | None = None,
) -> Tensor:
    """Return the most likely continuation of each prompt: the tokens of `generate` with `temperature=0`.

    The draft model proposes tokens one by one, and the model reads them in one call. Those that the model would have
    chosen are kept, and its own choice follows; sequences of a batch keep different numbers. One call and single steps
    round differently, so the result can differ from that of `generate` where two tokens are equally likely.

    Args:
        model: a language model.
        draft_model: a smaller one with the same vocabulary.
        prompt: `[batch, time]`, at least one token in each row.
        max_new_tokens: number of tokens to generate.
        num_draft_tokens: tokens that are proposed at a time.
        lengths: `[batch]`, if prompts of several lengths are padded on the right.

    Returns:
        `[batch, max_new_tokens]`.
    """
    from tcnca.generation import stream

    for each in (model, draft_model):
        stream(each, prompt, max_new_tokens, lengths=lengths)  # checks its arguments
    vocab_size, drafted = (each.embedding.weight.shape[0] for each in (model, draft_model))
    if drafted != vocab_size:
        raise InputError(f"draft_model: expected the vocabulary of the model, {vocab_size} tokens, got {drafted}")
    if num_draft_tokens < 1:
        raise InputError(f"num_draft_tokens: expected at least 1, got {num_draft_tokens}")
    excluded = excluded_tokens(model)

    def choose(logits: Tensor) -> Tensor:
        return (logits if excluded is None else logits.masked_fill(excluded, -torch.inf)).argmax(-1)

    # A sequence that is ahead of others may become one round longer than asked for.
    text = prompt.new_zeros(prompt.shape[0], max_new_tokens + num_draft_tokens + 1, dtype=torch.long)
    with evaluating(model), evaluating(draft_model):
        last, state = prefill(model, prompt, lengths)
        _, draft_state = prefill(draft_model, prompt, lengths)
        text[:, 0] = choose(last)
        known = torch.ones_like(text[:, 0])
        while int(known.min()) < max_new_tokens:
            # Sequences that are complete repeat their end.
            begin = known.clamp(max=max_new_tokens) - 1
            draft_snapshot, snapshot = draft_state.snapshot(num_draft_tokens), state.snapshot(num_draft_tokens + 1)
            tokens = [text.gather(1, begin.unsqueeze(1))]
            for _ in range(num_draft_tokens):
                logits, draft_state = draft_model(tokens[-1], state=draft_state, inplace=True)
                tokens.append(choose(logits))
            draft = torch.cat(tokens, 1)
            logits, state = model(draft, state=state, inplace=True)
            chosen = choose(logits)
            # The first token is the model's choice, and each further one up to the first that is not.
            accepted = 1 + (chosen[:, :-1] == draft[:, 1:]).cumprod(1).sum(1)
            text.scatter_(1, begin.unsqueeze(1) + 1 + torch.arange(draft.shape[1], device=draft.device), chosen)
            accepted = torch.where(known < max_new_tokens, accepted, 0)
            known = known + accepted
            state = _read(model, state.rollback(snapshot), draft, accepted)
            draft_state = _read(draft_model, draft_state.rollback(draft_snapshot), draft, accepted)
    return text[:, :max_new_tokens]


def _read(model: SequenceModel, state: ModelState, tokens: Tensor, lengths: Tensor) -> ModelState:
    new = model(tokens, lengths=lengths, state=state, inplace=True).state
    assert new is not None
    return new
