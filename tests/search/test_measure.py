"""How far a measured KL can err, from its sequences."""

from __future__ import annotations

import numpy as np
import pytest

from bitwright.search.compare import TokenEffects
from bitwright.search.measure import with_error


def effects(kl: list[float], num_scored: list[int]) -> TokenEffects:
    zeros = np.zeros(len(kl))
    return TokenEffects(
        num_scored=np.array(num_scored), kl=np.array(kl), nll_reference=zeros, nll_plan=zeros, num_agreeing=zeros
    )


def test_equal_sequences_have_the_standard_error_of_their_mean() -> None:
    """0.1 and 0.3 a token: mean 0.2, standard error 0.1."""
    found = with_error(effects([1.0, 3.0], [10, 10]))
    assert (found.kl, found.relative_error) == (pytest.approx(0.2), pytest.approx(0.5))


def test_one_sequence_that_holds_everything_leaves_it_open() -> None:
    """One of n: s / √n is the mean itself."""
    assert with_error(effects([0.0] * 7 + [8.0], [10] * 8)).relative_error == pytest.approx(1.0)


def test_where_sequences_agree_or_there_is_one_nothing_is_added() -> None:
    assert with_error(effects([1.0, 2.0], [10, 20])).relative_error == pytest.approx(0.0)
    assert with_error(effects([1.0], [10])).relative_error == 0.0
