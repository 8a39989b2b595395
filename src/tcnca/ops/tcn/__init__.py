"""The temporal convolutional network: residual blocks of dilated depthwise convolutions."""

from tcnca.ops.tcn.choice import Backend, tcn, why_not
from tcnca.ops.tcn.plain import TCNState, initial_tcn_state, receptive_field

__all__ = ["Backend", "TCNState", "initial_tcn_state", "receptive_field", "tcn", "why_not"]
