"""The structure of stacked dilated convolutions: how far it sees, and which lags it reaches."""

from __future__ import annotations

import dataclasses

import torch

from tcnca.layers.tcn import TCNConfig
from tcnca.ops import receptive_field


@dataclasses.dataclass(frozen=True, order=True)
class Structure:
    """The four numbers that fix the connections of a TCN: the paper's K, f, D and B."""

    kernel_size: int
    dilation_factor: int
    depth: int
    convolutions: int = 1

    @property
    def receptive_field(self) -> int:
        """Number of inputs from the first to the last one that an output depends on."""
        return receptive_field(self.kernel_size, self.dilation_factor, self.depth, self.convolutions)

    @property
    def dilations(self) -> list[int]:
        """Dilation of each convolution, from the input to the output."""
        return [self.dilation_factor**block for block in range(self.depth) for _ in range(self.convolutions)]

    def lead(self, causal: bool) -> int:
        """Return the number of inputs after the present one that an output depends on."""
        return 0 if causal else (self.kernel_size - 1) // 2 * sum(self.dilations)

    @property
    def gapless(self) -> bool:
        """Whether every lag inside the receptive field is reached.

        With `m = convolutions · (kernel_size - 1)`, the lags are the numbers whose digits to the base of the dilation
        factor are 0 to `m`. Consecutive blocks leave no gap if and only if the factor is at most `m + 1`.
        """
        return self.depth == 1 or self.kernel_size == 1 or self.dilation_factor <= self.digits

    @property
    def digits(self) -> int:
        """Values of a digit of a lag, and the largest dilation factor that leaves no gap."""
        return self.convolutions * (self.kernel_size - 1) + 1

    def count_lags(self, length: int, causal: bool = True) -> int:
        """Return how many lags of a window of `length` some path of taps reaches.

        The window is `0 … length - 1` for a causal TCN, and centered at 0 for a bidirectional one. Skip connections
        do not change the number, since every kernel has a tap of lag 0.
        """
        if causal:
            return self._count_below(length)
        # Bidirectional taps are the causal ones, moved by as much as the blocks see of the future.
        start = self.lead(causal) - (length - 1) // 2
        return self._count_below(start + length) - self._count_below(start)

    def _count_below(self, bound: int) -> int:
        """Return the number of causal lags below `bound`."""
        if bound <= 0 or self.gapless:
            return max(0, min(bound, self.receptive_field))
        # The digits of a lag are unique. Go down from the largest dilation: with a smaller digit there, every
        # combination of the other digits stays below the bound.
        count = 0
        for block in reversed(range(self.depth)):
            digit, bound = divmod(bound, self.dilation_factor**block)
            if digit >= self.digits:
                return count + self.digits ** (block + 1)
            count += digit * self.digits**block
        return count

    def config(self, base: TCNConfig) -> TCNConfig:
        """Return `base` with this structure."""
        return dataclasses.replace(base, **dataclasses.asdict(self))

    def parameters(self, base: TCNConfig, channels: int) -> int:
        """Return the number of parameters of a TCN."""
        with torch.device("meta"):
            tcn = self.config(base).build(channels)
        return sum(parameter.numel() for parameter in tcn.parameters())

    def state_values(self, channels: int) -> int:
        """Return the values in the streaming state of one sequence."""
        return channels * (self.receptive_field - 1)

    def __str__(self) -> str:
        numbers = (self.kernel_size, self.dilation_factor, self.depth, self.convolutions)
        return " ".join(f"{name}={number}" for name, number in zip("KfDB", numbers, strict=True))
