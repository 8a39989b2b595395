"""Rows of n-grams: the definition, tokens in pieces, and hashes that spread."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tcnca.errors import ConfigError, StateError
from tcnca.models import SequenceModel, TokenInputConfig
from tcnca.models.preprocessing import Preprocessing
from tcnca.ops import hash_ngrams, initial_ngram_state, next_ngram_state
from tcnca.training.config import OptimizerConfig
from tcnca.training.optimizer import parameter_groups
from tests.examples import VOCABULARY, small_config, small_model

SIZES = (2, 3, 5)
BUCKETS = 101


def rows_by_definition(tokens: list[int]) -> list[list[int]]:
    """Compute rows with Python's integers."""
    prime, base = 2**31 - 1, 630_360_016
    x = [0] * 4 + [token + 1 for token in tokens]

    def row(time: int, size: int) -> int:
        return sum(x[time + 4 - lag] * base ** (lag + 1) for lag in range(size)) % prime % BUCKETS

    return [[row(time, size) + place * BUCKETS for place, size in enumerate(SIZES)] for time in range(len(tokens))]


@pytest.mark.parametrize("vocabulary", [3, 256, 2**24])
def test_rows_are_those_of_the_definition(vocabulary: int) -> None:
    tokens = torch.randint(vocabulary, (2, 20))
    rows = hash_ngrams(tokens, SIZES, BUCKETS)
    assert rows.tolist() == [rows_by_definition(each) for each in tokens.tolist()]


@pytest.mark.parametrize("cuts", [[1, 2, 3, 19], [3], [10, 11], []])
def test_any_pieces_give_the_rows_of_one_call(cuts: list[int]) -> None:
    tokens = torch.randint(256, (2, 20))
    state, pieces = initial_ngram_state(2, SIZES), []
    for begin, end in itertools.pairwise([0, *cuts, 20]):
        piece = tokens[:, begin:end]
        pieces.append(hash_ngrams(piece, SIZES, BUCKETS, state))
        state = next_ngram_state(piece, SIZES, state=state)
    assert torch.equal(torch.cat(pieces, 1), hash_ngrams(tokens, SIZES, BUCKETS))
    assert torch.equal(state.tokens, next_ngram_state(tokens, SIZES).tokens)
    assert torch.equal(state.tokens, tokens[:, -4:] + 1)


def test_the_state_is_that_after_the_valid_tokens() -> None:
    tokens = torch.randint(256, (3, 9))
    state = next_ngram_state(tokens, SIZES, torch.tensor([0, 2, 9]))
    assert state.tokens.tolist() == [
        [0, 0, 0, 0],
        [0, 0, *(tokens[1, :2] + 1).tolist()],
        (tokens[2, 5:] + 1).tolist(),
    ]


@pytest.mark.parametrize(("size", "buckets"), [(2, 2**15), (3, 2**15), (5, 2**14), (4, 10_007)])
def test_different_ngrams_share_rows_as_rarely_as_random_ones(size: int, buckets: int) -> None:
    """N-grams of letters, which are few and near each other."""
    letters = torch.randint(97, 123, (1, 200_000))
    rows = hash_ngrams(letters, (size,), buckets)[0, size - 1 :, 0]
    rows = rows[torch.unique(letters[0].unfold(0, size, 1), dim=0, return_inverse=True)[1].argsort()]
    distinct = len(torch.unique(letters[0].unfold(0, size, 1), dim=0))
    expected = buckets * (1 - (1 - 1 / buckets) ** distinct)
    assert len(rows.unique()) == pytest.approx(expected, rel=0.05)


def test_ngrams_of_a_new_model_change_nothing() -> None:
    torch.manual_seed(0)
    plain = SequenceModel(small_config("tcnca"))
    torch.manual_seed(0)
    model = SequenceModel(small_config("tcnca", ngram_sizes=[2, 3], ngram_dropout=0.0))
    x = torch.randint(VOCABULARY, (2, 9))
    assert torch.equal(model(x).logits, plain(x).logits)
    model(x).logits.square().sum().backward()
    embedding: Any = model.embedding
    learned = embedding.ngram_weight.grad.norm(dim=1) > 0
    assert learned.nonzero().flatten().tolist() == hash_ngrams(x, (2, 3), 2**14).unique().tolist()


def test_dropout_leaves_out_whole_ngrams_in_training() -> None:
    torch.manual_seed(0)
    config = TokenInputConfig(vocab_size=9, ngram_sizes=(2, 3), ngram_dropout=0.25)
    embedding: Any = config.build(4, "none", Preprocessing())
    with torch.no_grad():
        embedding.weight.zero_()
        embedding.ngram_weight[: 2**14] = 3.0
        embedding.ngram_weight[2**14 :] = 30.0
    x = torch.randint(9, (2, 5000))
    assert (embedding.eval()(x, None) == 33.0).all()
    found = embedding.train()(x, None)
    assert (found == found[..., :1]).all()
    values, counts = found[..., 0].unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 4.0, 40.0, 44.0]))
    shares = torch.tensor([1 / 16, 3 / 16, 3 / 16, 9 / 16])
    torch.testing.assert_close(counts / x.numel(), shares, atol=0.02, rtol=0)
    assert (found.mean() - 33.0).abs() < 0.5


def test_ngrams_have_a_learning_rate_of_their_own() -> None:
    model = SequenceModel(small_config("tcnca", ngram_sizes=[2, 3]))
    embedding: Any = model.embedding
    (group,) = (
        each for each in parameter_groups(model, OptimizerConfig(ngram_lr_mult=0.2)) if each["name"] == "ngrams"
    )
    assert group["params"] == [embedding.ngram_weight]
    assert group["lr_mult"] == 0.2


def test_states_of_other_ngrams_are_refused() -> None:
    x = torch.randint(VOCABULARY, (1, 9))
    state = small_model(small_config("tcnca", ngram_sizes=[2, 3]), torch.float32)(x).state
    for config in (small_config("tcnca", ngram_sizes=[2]), small_config("tcnca")):
        with pytest.raises(StateError, match="n-grams of 2, 3 tokens"):
            small_model(config, torch.float32)(x, state=state)


def test_sizes_that_make_no_sense_are_refused() -> None:
    for sizes in ((3, 2), (2, 2)):
        with pytest.raises(ConfigError, match="ngram_sizes: expected increasing numbers, got"):
            TokenInputConfig(ngram_sizes=sizes)
    with pytest.raises(ConfigError, match="ngram_buckets: expected ngram_sizes"):
        TokenInputConfig(ngram_buckets=100)
    with pytest.raises(ConfigError, match="ngram_dropout: expected ngram_sizes"):
        TokenInputConfig(ngram_dropout=0.1)
    with pytest.raises(ConfigError, match="ngram_sizes"):
        TokenInputConfig(ngram_sizes=(1, 2))
