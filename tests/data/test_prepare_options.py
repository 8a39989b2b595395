"""Options of `prepare` that do not fit, and those that make a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tcnca.data import CustomOptions, prepare_dataset
from tcnca.errors import ConfigError


def test_options_that_do_not_fit(tmp_path: Path, table: Path) -> None:
    with pytest.raises(ConfigError, match="recall-64-10: is made, not read; leave --from out"):
        prepare_dataset("recall", tmp_path, origin=table)
    with pytest.raises(ConfigError, match="size: got 10, but data of your own is taken whole; leave --size out"):
        prepare_dataset("reviews", tmp_path, origin=table, size=10)
    with pytest.raises(ConfigError, match="workers: got 0, allowed is at least 1"):
        prepare_dataset("recall", tmp_path, workers=0)
    with pytest.raises(ConfigError, match="size: got 0, allowed is at least 1"):
        prepare_dataset("recall", tmp_path, size=0)
    with pytest.raises(ConfigError, match=r"set: got 'lisptops', .*did you mean listops\?; or give --from FILE"):
        prepare_dataset("lisptops", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [table.name]


def test_options_that_make_no_difference_are_refused(tmp_path: Path, table: Path) -> None:
    with pytest.raises(
        ConfigError, match="recall-64-10: is a known set, and options for data of your own mean nothing"
    ):
        prepare_dataset("recall", tmp_path, custom=CustomOptions(label="stars"))
    with pytest.raises(ConfigError, match="seed: got 3, but nothing of text is drawn; leave --seed out"):
        prepare_dataset("text", tmp_path, origin=table, seed=3)
    with pytest.raises(ConfigError, match="unverified: there is no published reviews to check against"):
        prepare_dataset("reviews", tmp_path, origin=table, unverified=True)
    with pytest.raises(ConfigError, match="unverified: there is no published recall-64-10 to check against"):
        prepare_dataset("recall", tmp_path, unverified=True)


def test_the_seed_splits_data_of_your_own(tmp_path: Path, table: Path) -> None:
    def test_texts(place: str, seed: int, custom: CustomOptions | None) -> set[bytes]:
        data = prepare_dataset("reviews", tmp_path / place, origin=table, seed=seed, custom=custom).data
        tokens = data.columns("test")["tokens"]
        return {bytes(tokens[index]) for index in range(len(tokens))}

    assert test_texts("a", 0, None) != test_texts("b", 1, None)
    assert test_texts("b", 1, None) == test_texts("c", 0, CustomOptions(seed=1))


def test_sets_that_differ_have_other_digests(tmp_path: Path) -> None:
    sets = [
        prepare_dataset("recall", tmp_path / str(place), size=40, seed=seed) for place, seed in enumerate((0, 0, 1))
    ]
    digests = [prepared.data.digest for prepared in sets]
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 64
