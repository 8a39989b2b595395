"""The temporal convolutional network: residual blocks of dilated depthwise convolutions."""

from tcnca.ops.tcn.plain import TCNState, initial_tcn_state, receptive_field, tcn

__all__ = ["TCNState", "initial_tcn_state", "receptive_field", "tcn"]
