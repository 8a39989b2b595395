"""Entries made of a function of tensors and its oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from tcnca.bench.entry import Entry, Inputs, Pair, Subject, Work


def function_entry(
    *,
    suite: str,
    name: str,
    label: str,
    about: str,
    sizes: Mapping[str, int | str],
    tokens: int,
    inputs: Callable[[bool], Inputs],
    run: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    work: Mapping[str, Work],
    tolerance: float,
) -> Entry:
    """An entry for a function.

    Args:
        inputs: makes them; told whether they are for checking, and may be smaller.
        run: the function.
        oracle: of the same inputs in float64, the same.
    """

    def build() -> Subject:
        return _subject(run, inputs(False))

    def pair() -> Pair:
        drawn = inputs(True)
        exact = Inputs(*(tuple(tensor.double() for tensor in tensors) for tensors in drawn))
        return Pair(_subject(run, drawn), _subject(oracle, exact))

    return Entry(
        suite=suite,
        name=name,
        label=label,
        about=about,
        sizes=sizes,
        tokens=tokens,
        build=build,
        pair=pair,
        work=work,
        tolerance=tolerance,
    )


def _subject(function: Callable[..., Tensor], inputs: Inputs) -> Subject:
    learned = tuple(tensor.detach().requires_grad_() for tensor in inputs.learned)
    return Subject(lambda: function(*learned, *inputs.fixed), learned)
