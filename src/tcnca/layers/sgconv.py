"""SGConv, a long convolution whose kernel has more parameters for near inputs than for far ones."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnca.config import Probability, Range, Width
from tcnca.errors import ConfigError
from tcnca.layers.linear import GLUOutput
from tcnca.layers.mixer import Mixer, MixerConfig, ParamOptions
from tcnca.ops import LongConvState, initial_long_conv_state, long_conv

SGConvOutput = Literal["none", "activation", "glu"]

KERNEL_LR_MULT = 0.1
"""Factor of the learning rate of kernels: 1e-3, as published, where that of the other parameters is 0.01."""


class SGConvConfig(MixerConfig, kind="sgconv"):
    """Structured global convolution (Li et al., 2022), a baseline.

    The kernel is a row of pieces of `piece_size` parameters. The first two have a tap for each parameter, each further
    one is stretched to twice as many taps as the previous one, and each is scaled by `1 / decay_factor` relative to it.

    An explicit kernel has no short state: the streaming state holds `kernel_length - 1` inputs of each channel, and a
    token that is read alone takes `kernel_length` products for each channel.
    """

    kernel_length: Width = 1024
    """Taps of the kernel (L in its paper), usually the length of the sequences. Longer sequences are allowed: outputs
    depend on no input that is further away."""
    piece_size: Width = 64
    """Parameters of each piece of the kernel (d in its paper)."""
    decay_factor: Annotated[float, Range(1, 16)] = 2.0
    """Scale of a piece relative to the next one (α in its paper)."""
    output: SGConvOutput = "glu"
    """Output, from `h = conv(x) + ω · x`: `h` itself (`none`), its GELU (`activation`), or GELU, dropout, a linear map
    and a GLU (`glu`), as published."""
    dropout: Probability = 0.0
    """Dropout before the linear map of `glu`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout and self.output != "glu":
            raise ConfigError(f"dropout: expected output 'glu' with {self.dropout}, got {self.output!r}")

    @property
    def pieces(self) -> int:
        """Number of pieces of the kernel, `1 + ⌈log₂(kernel_length / piece_size)⌉`."""
        return 1 + (math.ceil(self.kernel_length / self.piece_size) - 1).bit_length()

    def build(self, d_model: int, causal: bool = True) -> SGConv:
        """Return a new `SGConv`."""
        return SGConv(d_model, self, causal)


class SGConv(Mixer):
    """SGConv: each of `d_model` channels is convolved with its own kernel, then `SGConvConfig.output` follows.

    A bidirectional SGConv has a second kernel, reversed, for the inputs after the present one. Instead of a
    configuration, its fields can be passed: `SGConv(64, kernel_length=4096)`.
    """

    state_class = LongConvState
    config: SGConvConfig
    norm: Tensor

    def __init__(self, d_model: int, config: SGConvConfig | None = None, causal: bool = True, **fields: Any) -> None:
        config = SGConvConfig.of(config, fields)
        super().__init__(d_model, config, causal)
        directions = 1 if causal else 2
        self.weight = nn.Parameter(torch.empty(directions, d_model, config.pieces, config.piece_size))
        self.omega = nn.Parameter(torch.empty(d_model))
        self.register_buffer("norm", torch.ones(directions, d_model))
        self.output = GLUOutput(d_model, config.dropout) if config.output == "glu" else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the parameters, and set the constants by which kernels are divided to their initial norms."""
        if self.weight.is_meta:
            return
        nn.init.normal_(self.weight)
        nn.init.normal_(self.omega)
        self.norm.copy_(self._pieces(self.config.kernel_length).norm(dim=-1))

    def _pieces(self, taps: int) -> Tensor:
        """Return the pieces side by side, before the division: `[directions, d_model, taps or more]`."""
        # A long sum needs more digits than half precision has.
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        count, size = weight.shape[2:]
        pieces: list[Tensor] = []
        for index, piece in enumerate(weight.unbind(2)):
            if index > 0 and size << (index - 1) >= taps:
                break
            stretched = F.interpolate(piece, size=size << (index - 1), mode="linear") if index > 1 else piece
            pieces.append(stretched * self.config.decay_factor ** (count - 1 - index))
        return torch.cat(pieces, -1)

    def kernel(self, taps: int | None = None) -> Tensor:
        """Return the first taps of the kernel, by default all, `[directions, d_model, taps]`.

        That of the second direction begins with the next input.
        """
        taps = self.config.kernel_length if taps is None else min(taps, self.config.kernel_length)
        return self._pieces(taps)[..., :taps] / self.norm.unsqueeze(-1)

    def mix(
        self, x: Tensor, lengths: Tensor | None, state: LongConvState | None, return_state: bool, inplace: bool
    ) -> tuple[Tensor, LongConvState | None]:
        """Implement `forward` with `tcnca.ops.long_conv`."""
        # A short sequence needs few taps; a compiled graph should not depend on how many.
        streams = state is not None or return_state
        kernel = self.kernel(None if streams or torch.compiler.is_compiling() else x.shape[1])
        if not self.causal:
            # The operator sees the present in both directions, as an EMA does.
            kernel = torch.stack([F.pad(kernel[0], (0, 1)), F.pad(kernel[1], (1, 0))])
        h, new = long_conv(x, kernel, lengths=lengths, state=state, return_state=return_state, inplace=inplace)
        # Under autocast the parameters are wider than what the operator returns.
        y = (h + x * self.omega).to(h.dtype)
        if self.output is not None:
            return self.output(y), new
        return F.gelu(y) if self.config.output == "activation" else y, new

    @property
    def halo(self) -> tuple[int, int]:
        """The inputs that the kernels see."""
        return self.config.kernel_length - 1, 0 if self.causal else self.config.kernel_length

    def initial_state(self, batch: int) -> LongConvState:
        """Return the state before the first token."""
        return initial_long_conv_state(
            batch, self.d_model, self.config.kernel_length, self.weight.device, self.weight.dtype
        )

    def macs(self, length: int) -> int:
        """Return the multiply-accumulate operations for one token, without the linear map of the output.

        About those of the transforms of a sequence, there and back, of twice its length. A token that is read alone
        takes `kernel_length` for each channel instead.
        """
        return self.d_model * (4 * (2 * length - 1).bit_length() + 4)

    @property
    def receptive_field(self) -> int:
        """Number of inputs that one output depends on."""
        return self.config.kernel_length * (1 if self.causal else 2)

    @property
    def signature(self) -> str:
        """What two SGConvs must share for one to continue from a state of the other."""
        return f"SGConv(kernel_length={self.config.kernel_length})"

    def param_options(self) -> dict[str, ParamOptions]:
        """Put the kernel, with a small learning rate and no weight decay, into the group that recipes can scale."""
        return {"weight": ParamOptions("kernels", lr_mult=KERNEL_LR_MULT, wd_mult=0.0)}
