"""The temporal convolutional network: residual blocks of dilated depthwise convolutions."""

from tcnca.ops.tcn.api import TCNBackend, tcn
from tcnca.ops.tcn.naive import TCNSpec, TCNState, initial_tcn_state, naive_tcn, receptive_field

__all__ = [
    "TCNBackend",
    "TCNSpec",
    "TCNState",
    "initial_tcn_state",
    "naive_tcn",
    "receptive_field",
    "tcn",
]
