"""Dilated depthwise convolution."""

from tcnca.ops.dilated_conv.plain import ConvState, conv_with_buffer, dilated_conv, initial_conv_state

__all__ = ["ConvState", "conv_with_buffer", "dilated_conv", "initial_conv_state"]
