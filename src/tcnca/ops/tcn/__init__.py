"""The temporal convolutional network: residual blocks of dilated depthwise convolutions."""
