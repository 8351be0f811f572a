"""Overlap: published runs, bounds, and closed forms of FSDP and DDP."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwright.parallel.overlap import both_s, ddp_buckets, ddp_exposed_s, fsdp_exposed_s

_SECONDS = st.floats(1e-6, 10)


def test_a_product_beside_an_all_gather_on_eight_h100() -> None:
    # pytorch/pytorch pull 172714: 2.96 ms one after the other, 2.02 ms side by side.
    assert both_s(1.6, 1.36) == pytest.approx(2.02, rel=0.05)


@given(_SECONDS, _SECONDS, st.floats(1, 2.5))
def test_side_by_side_is_no_faster_than_either_and_no_slower_than_both(c: float, m: float, g: float) -> None:
    assert max(c, m) <= both_s(c, m, g) <= (c + m) * (1 + 1e-12)


def test_without_contention_only_the_slower_counts() -> None:
    assert both_s(3.0, 2.0, 1.0) == 3.0
    assert both_s(2.0, 3.0, 1.0) == 3.0


@given(_SECONDS, st.floats(1, 100), st.floats(1e-4, 1))
def test_buckets_follow_each_other_and_the_last_one_is_exposed(backward: float, size: float, each: float) -> None:
    buckets = ddp_buckets(backward, size, 1.0, lambda _: each)
    assert all(b.start_s >= b.ready_s for b in buckets)
    assert all(b.start_s >= a.end_s for a, b in itertools.pairwise(buckets))
    exposed = ddp_exposed_s(backward, size, 1.0, lambda _: each)
    assert exposed >= each * (1 - 1e-9)
    # No more than if nothing were hidden.
    assert exposed <= len(buckets) * each * (1 + 1e-9) + each


def test_small_gradients_hide_all_but_the_last_bucket() -> None:
    assert ddp_exposed_s(10.0, 100.0, 10.0, lambda size: size * 1e-3, 1.0) == pytest.approx(0.01)


def test_fsdp_by_hand() -> None:
    # Three layers; gathers hide behind forward, both collectives behind backward: first gather, last scatter are left.
    assert fsdp_exposed_s(1.0, 2.0, 0.5, 0.7, 3, 1.0) == pytest.approx(0.5 + 0.7)
    # A network that is slower than the work: forward G + 2·G + F, backward 2·(G + S) + B + S.
    assert fsdp_exposed_s(1.0, 2.0, 3.0, 3.0, 3, 1.0) == pytest.approx((3 + 6 + 1) + (12 + 2 + 3) - 9)
