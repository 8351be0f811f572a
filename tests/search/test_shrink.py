"""Numbers that err are drawn to their mean: in closed form for equal errors, and by how much each errs for others."""

from __future__ import annotations

import pytest

from bitwright.search.shrink import drawn_to_mean


def test_equal_errors_take_their_share_of_the_sample_variance() -> None:
    """−1 and 1: sample variance 2, of which errors of 1 make 1; each is drawn half way to 0."""
    assert drawn_to_mean({"a": -1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}) == {
        "a": pytest.approx(-0.5),
        "b": pytest.approx(0.5),
    }


def test_what_differs_by_less_than_it_errs_is_the_weighted_mean() -> None:
    """0 with weight 4 and 1 with weight 1."""
    drawn = drawn_to_mean({"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 2.0})
    assert drawn == {"a": pytest.approx(0.2), "b": pytest.approx(0.2)}


def test_one_alone_stays_and_none_is_none() -> None:
    assert drawn_to_mean({"a": 0.7}, {"a": 3.0}) == {"a": pytest.approx(0.7)}
    assert drawn_to_mean({}, {}) == {}


def test_the_less_sure_is_drawn_further() -> None:
    drawn = drawn_to_mean({"a": -1.0, "b": 1.0, "c": 1.0, "d": -1.0}, {"a": 0.1, "b": 0.1, "c": 0.5, "d": 0.1})
    assert drawn["c"] < drawn["b"] < 1.0
