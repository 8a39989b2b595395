"""Images of Pathfinder have two dots on dashed curves, connected if and only if the label says so."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tcnca.data.datasets.pathfinder import _LARGE as PATHX
from tcnca.data.datasets.pathfinder import _SMALL as PATHFINDER
from tcnca.data.datasets.pathfinder import Pathfinder, Scenes
from tcnca.data.rng import CounterRNG
from tcnca.errors import ConfigError

Bytes = NDArray[np.uint8]
Point = tuple[int, int]

SETS = {32: PATHFINDER, 128: PATHX}
COUNT = {32: 120, 128: 24}
# Ends of neighboring dashes are two margins apart, and up to three pixels more by rounding; a missing dash would
# leave a gap of another dash and two margins.
BRIDGE = {size: 2 * max(parameters.margins) + 3 for size, parameters in SETS.items()}


@functools.cache
def _scenes(size: int) -> Scenes:
    return SETS[size].scenes(CounterRNG(1, "pathfinder"), COUNT[size])


def _inked(drawing: Bytes, least: float = 1 / 3) -> list[Point]:
    """Pixels that are not much less bright than the brightest."""
    rows, columns = np.nonzero(drawing >= least * drawing.max())
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _components(points: Iterable[Point], bridge: float) -> Iterator[set[Point]]:
    """What is connected by steps of at most `bridge`."""
    left = set(points)
    while left:
        whole, front = set[Point](), {left.pop()}
        while front:
            whole |= front
            front = {point for point in left if min(math.dist(point, other) for other in front) <= bridge}
            left -= front
        yield whole


def _near(point: NDArray[np.int64], drawing: Bytes) -> bool:
    """Whether there is ink at a point or next to it."""
    return min(math.dist(point.tolist(), other) for other in _inked(drawing)) <= 1


@pytest.mark.parametrize("size", SETS)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_shapes(size: int, count: int) -> None:
    examples = SETS[size].examples(CounterRNG("count"), count)
    pixels, labels = examples["pixels"], examples["labels"]
    assert isinstance(pixels, np.ndarray)
    assert isinstance(labels, np.ndarray)
    assert pixels.dtype == np.uint8
    assert pixels.shape == (count, size, size)
    assert labels.dtype == np.int64
    assert labels.shape == (count,)
    assert set(examples) == {"pixels", "labels"}


@pytest.mark.parametrize("size", SETS)
def test_images_depend_on_the_key(size: int) -> None:
    first, again, other = (SETS[size].scenes(CounterRNG(seed), 6) for seed in (3, 3, 4))
    assert np.array_equal(first.pixels, again.pixels)
    assert np.array_equal(first.labels, again.labels)
    assert not (first.pixels == other.pixels).all((1, 2)).any()
    assert len(np.unique(first.pixels, axis=0)) == 6


def test_the_label_moves_only_the_dots() -> None:
    scenes = _scenes(32)
    joined = scenes.labels == 1
    for layer in (scenes.curves.max(1), scenes.distractors):
        ink = layer.mean((1, 2))
        error = math.sqrt(ink[joined].var() / joined.sum() + ink[~joined].var() / (~joined).sum())
        assert abs(ink[joined].mean() - ink[~joined].mean()) < 4 * error


@pytest.mark.parametrize("size", SETS)
def test_curves_are_connected(size: int) -> None:
    for curve in _scenes(size).curves.reshape(-1, size, size):
        assert len(list(_components(_inked(curve), BRIDGE[size]))) == 1


@pytest.mark.parametrize("size", SETS)
def test_label_says_whether_the_dots_are_on_one_curve(size: int) -> None:
    scenes = _scenes(size)
    plain = 0
    for curves, dots, label in zip(scenes.curves, scenes.dots, scenes.labels, strict=True):
        on = [[_near(dot, curve) for curve in curves] for dot in dots]
        assert all(map(any, on))
        same = (on[0][0] and on[1][0]) or (on[0][1] and on[1][1])
        different = (on[0][0] and on[1][1]) or (on[0][1] and on[1][0])
        # Where curves cross under a dot it lies on both, and the picture can be read either way.
        assert same if label else different
        plain += same != different
    assert plain > 0.8 * len(scenes.labels)


def _dashes(drawing: Bytes) -> list[set[Point]]:
    # Gaps of two pixels are gray rather than black.
    return list(_components(_inked(drawing, 5 / 8), math.sqrt(2)))


def test_curves_have_fourteen_dashes() -> None:
    for curve in _scenes(128).curves.reshape(-1, 128, 128):
        assert len(_dashes(curve)) == 14


@pytest.mark.parametrize("size", SETS)
def test_distractors_do_not_touch_the_curves(size: int) -> None:
    scenes = _scenes(size)
    curves, others = scenes.curves.max(1), scenes.distractors
    both = (curves > curves.max((1, 2), keepdims=True) / 2) & (others > others.max((1, 2), keepdims=True) / 2)
    assert not both.any()
    assert (others.max((1, 2)) > 0).all()


def test_curves_start_at_the_published_distance() -> None:
    """With curves of two dashes the dots are near the starts: those of different curves are about as far apart."""
    short = dataclasses.replace(PATHX, curve_dashes=2, distractors=0)
    scenes = short.scenes(CounterRNG("near"), 200)
    apart = np.hypot(*(scenes.dots[:, 0] - scenes.dots[:, 1]).T)
    # A curve of two dashes is two dashes and two margins long.
    assert (apart[scenes.labels == 1] < 2 * 5 + 2 * 3 + 2).all()
    assert (np.abs(apart[scenes.labels == 0] - 20) < 2 * 5 + 2 * 3 + 2).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thickness": 0.3}, "thickness: expected a positive multiple of 0.5, got 0.3"),
        ({"curve_dashes": 1}, "curve_dashes, distractor_dashes: expected at least 2, got 1 and 4"),
        ({"size": 24}, "size: expected enough for two curves that start 7 pixels apart, got 24"),
    ],
)
def test_invalid_parameters(changes: dict[str, float], message: str) -> None:
    def make() -> Pathfinder:
        made = dataclasses.replace(PATHFINDER, **changes)  # type: ignore[arg-type]
        made.examples(CounterRNG("refused"), 1)
        return made

    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value) == message


def test_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcnca.data.datasets.pathfinder._BLOCK", 5 * 32**2)
    scenes = PATHFINDER.scenes(CounterRNG("blocks"), 13)
    assert (scenes.pixels.max((1, 2)) == 255).all()
    assert (scenes.curves.max((2, 3)) > 0).all()
    assert len(np.unique(scenes.pixels, axis=0)) == 13
