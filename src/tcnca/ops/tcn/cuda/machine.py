"""Whether this machine can run the kernels, and whether the user wants them.

`torch.compile` takes these answers as they were when it compiled. Marking functions so loads its whole front end,
which is why this module is imported where a GPU is in use and not before.
"""

from __future__ import annotations

from tcnca.ops.kernels import constant as _constant
from tcnca.ops.kernels import unable as _unable
from tcnca.ops.kernels import wanted, warn
from tcnca.ops.tcn.cuda import compiled


@_constant
def why_not_here(device: int) -> str | None:
    """Why the CUDA device of this number cannot run the kernels; None if it can."""
    return _unable(device) or compiled.missing()


@_constant
def worth_it(device: int) -> bool:
    """Whether the kernels are wanted and can run on a device; says once what has to be installed if that is all."""
    if not wanted() or _unable(device) is not None:
        return False
    lacking = compiled.missing()
    if lacking is not None:
        warn(lacking, "the TCN")
    return lacking is None
