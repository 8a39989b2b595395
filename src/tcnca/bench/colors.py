"""One color for one contestant, in every picture; told apart by people who do not see all colors as well."""

from __future__ import annotations

BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK, GRAY = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
    "#888888",
)

# Blue is the EMA and orange the convolution, as in the paper.
_COLORS = {
    "tcn": ORANGE,
    "plain-tcn": YELLOW,
    "conv": PINK,
    "fft-ema": BLUE,
    "fft-ema-published": SKY,
    "fft-ema-cached": BLACK,
    "scan-ema": GREEN,
    "copy": GRAY,
    "tcnca": ORANGE,
    "mega-fft": BLUE,
    "mega-scan": GREEN,
}


def color_of(name: str) -> str:
    """The color of a contestant, whatever its direction and whether it is compiled."""
    return _COLORS.get(name.removesuffix("-bi").removesuffix("-compiled"), GRAY)
