"""Register operators with PyTorch, so that `torch.compile`, `torch.export` and autograd know them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tcnca.errors import KernelError
from tcnca.ops.dispatch import HINT

_LIBRARY = torch.library.Library("tcnca", "FRAGMENT")


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    device: str,
    backward: Callable[..., Any] | str,
    save: Callable[..., None] | None = None,
) -> Any:
    """Register `tcnca::NAME`, and return it.

    Args:
        schema: name, arguments and results.
        run: the implementation.
        fake: returns empty results.
        device: the dispatch key of the implementation, `CPU` or `CUDA`.
        backward: returns the gradients of all arguments; or, without gradients, the backend that has them.
        save: keeps what `backward` needs.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"tcnca::{name}", fake, lib=_LIBRARY)

    if isinstance(backward, str):
        backward, save = _refusal(name, backward), _save_nothing
    torch.library.register_autograd(f"tcnca::{name}", backward, setup_context=save, lib=_LIBRARY)
    return getattr(torch.ops.tcnca, name).default


def _refusal(name: str, backend: str) -> Callable[..., None]:
    def refuse(ctx: Any, *gradients: Any) -> None:
        raise KernelError(
            f"tcnca::{name}: expected first derivatives only, got one of this operator, which has none; "
            f"use backend={backend!r}, or {HINT}"
        )

    return refuse


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    return
