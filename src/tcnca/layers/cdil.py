"""CDIL-CNN, a stack of dilated convolutions that mix channels and wrap around the ends of a sequence."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.config import LayerCount, Width
from tcnca.errors import ConfigError, StateError, shown
from tcnca.layers.mixer import Mixer, MixerConfig
from tcnca.layers.norm import weight_norm
from tcnca.layers.tcn import MAX_RECEPTIVE_FIELD
from tcnca.ops import (
    ContextParallel,
    State,
    check_lengths,
    current_context,
    receptive_field,
    roll_time,
    zero_padding,
)

BIAS_STD = 0.01


class CDILConfig(MixerConfig, kind="cdil"):
    """Circular dilated convolutions (Cheng et al., 2022), a baseline for classification. Bidirectional only.

    The mixer is the whole stack: `depth` convolutions, number `i` of dilation `2^i`. The published CDIL-CNN is a model
    with `num_layers=1`, `gated=False`, `attention=None`, `d_ff=0`, `norm="none"` and mean pooling.
    """

    kernel_size: Width = 3
    """Taps of every convolution, an odd number."""
    depth: LayerCount = 9
    """Number of convolutions. An output depends on `1 + (kernel_size - 1) (2^depth - 1)` inputs: 1023 by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise ConfigError(
                f"kernel_size: expected an odd number, for as many taps on both sides, got {self.kernel_size}"
            )
        field = self.receptive_field
        if field > MAX_RECEPTIVE_FIELD:
            raise ConfigError(
                f"depth: expected a receptive field of at most {MAX_RECEPTIVE_FIELD} tokens, got {shown(field)}; "
                "reduce depth or kernel_size"
            )

    def build(self, d_model: int, causal: bool = True) -> CDIL:
        """Return a new `CDIL`."""
        return CDIL(d_model, self, causal)

    @property
    def receptive_field(self) -> int:
        """Number of inputs that one output depends on."""
        return receptive_field(self.kernel_size, 2, self.depth)


class CDIL(Mixer):
    """What a CDIL-CNN adds to its input: `Σ_i relu(conv_i(h_i))` with `h_0 = x`, `h_{i+1} = h_i + relu(conv_i(h_i))`.

    A block that adds its input, as `ResidualBlock` does, is the published stack. The convolutions have full matrices
    for each tap with weight norm and a bias, and wrap around from the last valid token of a row to its first. Instead
    of a configuration, its fields can be passed: `CDIL(64, depth=11)`.
    """

    state_class = State
    config: CDILConfig

    def __init__(self, d_model: int, config: CDILConfig | None = None, causal: bool = False, **fields: Any) -> None:
        config = CDILConfig.of(config, fields)
        if causal:
            raise ConfigError(
                "causal: expected False with a CDIL mixer, got True; circular padding shows the end of a sequence to "
                "its beginning. The causal counterpart is a TCN with block='residual'"
            )
        super().__init__(d_model, config, causal)
        self.weight = nn.Parameter(torch.empty(config.depth, d_model, config.kernel_size * d_model))
        self.scale = nn.Parameter(torch.empty(config.depth, d_model))
        self.bias = nn.Parameter(torch.empty(config.depth, d_model))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize weights as PyTorch's convolutions, and biases N(0, 0.01²).

        The published code means to start weights at N(0, 0.01²) too, but sets them where weight norm replaces them.
        """
        if self.weight.is_meta:
            return
        bound = 1.0 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        self.scale.copy_(self.weight.norm(dim=-1))
        nn.init.normal_(self.bias, std=BIAS_STD)

    def mix(
        self, x: Tensor, lengths: Tensor | None, state: State | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, None]:
        """Implement `forward`."""
        check_lengths(lengths, x.shape[0], x.shape[1])
        x = zero_padding(x, lengths)
        center, context = self.config.kernel_size // 2, current_context()
        added = torch.zeros_like(x)
        for index, weight in enumerate(weight_norm(self.weight, self.scale)):
            h = x + added
            shifts = [offset << index for offset in range(center, -center - 1, -1)]
            if context is None:
                rolled = [roll_time(h, shift, lengths) for shift in shifts]
            else:
                rolled = _roll_part(context, h, center << index, shifts, lengths)
            added = added + F.relu(F.linear(torch.cat(rolled, -1), weight, self.bias[index]))
        return added, None

    @property
    def halo(self) -> None:
        """None: each convolution exchanges its inputs, which wrap around."""
        return None

    def initial_state(self, batch: int) -> NoReturn:
        """Raise an error: there is none."""
        raise StateError("state: expected a causal mixer, got a CDIL, which is bidirectional and has no state")

    def macs(self, length: int) -> int:
        """Return the multiply-accumulate operations for one token, which do not depend on `length`."""
        return self.weight.numel()

    @property
    def receptive_field(self) -> int:
        """Number of inputs that one output depends on."""
        return self.config.receptive_field

    @property
    def signature(self) -> str:
        """The structure; there is no state to continue from."""
        return f"CDIL(kernel_size={self.config.kernel_size}, depth={self.config.depth})"


def _roll_part(
    context: ContextParallel, x: Tensor, halo: int, shifts: list[int], lengths: Tensor | None
) -> list[Tensor]:
    """Return a part of a sequence that is rotated as a whole, by up to `halo` steps; see `roll_time`."""
    batch, time, width = x.shape
    if lengths is None:
        whole = torch.full((batch, 1), context.size * time)
    else:
        whole = context.whole_lengths(lengths).cpu().clamp(min=1).unsqueeze(1)
    # The token that belongs in each slot of the part of each process and its halo, which wraps around.
    slots = torch.arange(context.size).view(-1, 1, 1) * time + torch.arange(-halo, time + halo)
    token = slots % whole
    source = (token // time * batch + torch.arange(batch).unsqueeze(1)) * time + token % time
    extended = context.route(x.flatten(0, 1), source.flatten(1)).view(batch, time + 2 * halo, width)
    return [extended[:, halo - shift : halo - shift + time] for shift in shifts]
