"""Whether the environment leaves the choice of kernels to the library."""

from __future__ import annotations

import os

from tcnca.errors import ConfigError

SETTING = "TCNCA_KERNELS"
CHOICES = ("auto", "plain")


def wanted() -> bool:
    """Whether `backend="auto"` may take more than plain PyTorch."""
    setting = os.environ.get(SETTING) or "auto"
    if setting not in CHOICES:
        raise ConfigError(f"{SETTING}: got {setting!r} in the environment, allowed are {', '.join(CHOICES)}")
    return setting == "auto"
