"""Whether chunked attention goes to its kernels or to plain PyTorch."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tcnca.errors import InputError, KernelError
from tcnca.ops.attention.streaming import AttentionState
from tcnca.ops.checks import autocasts
from tcnca.ops.kernels import transformed

Backend = Literal["auto", "plain", "triton"]
BACKENDS: tuple[str, ...] = get_args(Backend)
WIDEST = 128  # queries and keys; a block of them stays in shared memory
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    state: AttentionState | None = None,
) -> str | None:
    """Why the kernels cannot run such a call of `chunked_attention`; None if they can."""
    reason = _why_not_such(q, k, v, bias, lengths, state)
    if reason is not None:
        return reason
    from tcnca.ops.triton_kernels import machine

    return machine.why_not_here(q.device.index or 0 if q.is_cuda else None)


def kernels_run(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: Tensor | None,
    state: AttentionState | None,
) -> bool:
    """Whether a call goes to the kernels; an error if it was told to and cannot."""
    if backend not in BACKENDS:
        raise InputError(f"backend: got {backend!r}, allowed are {', '.join(BACKENDS)}")
    if backend == "plain":
        return False
    if backend == "triton":
        reason = why_not(q, k, v, bias, lengths, state)
        if reason is not None:
            raise KernelError(f"backend: got 'triton', which cannot run this; {reason}. Take 'auto' or 'plain'")
        return True
    # In float32 the kernels are right but slow: they multiply without tensor cores.
    half = autocasts(q.device) or q.dtype != torch.float32
    if not q.is_cuda or not half or _why_not_such(q, k, v, bias, lengths, state) is not None:
        return False
    from tcnca.ops.triton_kernels import machine

    return machine.worth_it(q.device.index or 0, "attention")


def _why_not_such(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, lengths: Tensor | None, state: AttentionState | None
) -> str | None:
    """Why no machine's kernels could run the call."""
    if q.device.type not in ("cuda", "cpu"):
        return f"q: got one on {q.device}, allowed is a CUDA device"
    if state is not None:
        return "state: got one, allowed is None; the kernels take sequences from their start"
    if any(part is not None and part.device != q.device for part in (k, v, bias, lengths)):
        return f"tensors: got some on another device, allowed is {q.device}, where q is"
    if any(part.dtype not in DTYPES for part in (q, k, v)):
        return "dtype: got another, allowed are " + ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    if not autocasts(q.device) and not q.dtype == k.dtype == v.dtype:
        return "dtype: got several, allowed is one for q, k and v, except under autocast"
    if q.shape[2] > WIDEST:
        return f"width: got {q.shape[2]}, allowed is {WIDEST} or less"
    return transformed()
