"""Corrections: what probes say is taken on, monotone, invertible, and no further than one probe can be trusted."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bitwright.models.sites import Site
from bitwright.search.candidate import Candidate
from bitwright.search.correct import (
    PROBE_KL,
    ROUNDING_PROBE_KL,
    Correction,
    Probe,
    choose_role_probes,
    choose_rounding_probes,
    fit_factors,
)
from bitwright.search.jumps import Jumps

positive = st.floats(-6, 2).map(lambda exponent: 10.0**exponent)
totals = st.lists(st.tuples(positive, positive), max_size=6)
laws = st.one_of(st.just(0.0), positive).map(lambda c: Jumps(c=c))


def site(name: str, role: str) -> Site:
    return Site(
        name=name,
        kind="weight",
        role=role,
        module=name,
        parameter=f"{name}.weight",
        rows=None,
        expert=None,
        transposed=False,
        tied_group=None,
        shape=(8, 8),
        uses=(name,),
    )


def probe(role: str, predicted: float, measured: float) -> Probe:
    return Probe(role=role, what=role, scheme="int4_g32", predicted=predicted, measured=measured)


def with_totals(points: list[tuple[float, float]], jumps: Jumps | None = None) -> Correction:
    correction = Correction(role_factors={}, jumps=jumps if jumps is not None else Jumps())
    for site_sum, measured in points:
        correction = correction.with_total(site_sum, measured)
    return correction


@given(totals, positive, laws)
def test_the_latest_total_is_met_exactly(points: list[tuple[float, float]], at: float, jumps: Jumps) -> None:
    correction = with_totals(points, jumps).with_total(at, 3 * at)
    assert correction.total(at) == pytest.approx(3 * at, rel=1e-9)


@given(totals, positive, positive, laws)
@example([(10.0, 1.0), (0.1, 1.0 - 6e-16)], 1.0, 1.0, Jumps())  # level: no sum can be told from such totals
def test_totals_rise_and_have_an_inverse(points: list[tuple[float, float]], a: float, b: float, jumps: Jumps) -> None:
    correction = with_totals(points, jumps)
    low, high = sorted((a, b))
    assert correction.total(low) <= correction.total(high) * (1 + 1e-9)
    assert correction.site_sum(correction.total(a)) == pytest.approx(a, rel=1e-6)
    for (s0, m0), (s1, m1) in zip(correction.totals, correction.totals[1:], strict=False):
        assert s0 < s1 and m0 < m1


def test_without_totals_sites_add_up() -> None:
    correction = Correction(role_factors={"attn.q": 0.5})
    assert correction.total(0.3) == correction.site_sum(0.3) == 0.3
    assert correction.total(0.0) == 0.0
    assert correction.site("attn.q", 0.2) == 0.1
    assert correction.site("attn.k", 0.2) == 0.2


def test_between_two_totals_logarithms_are_linear_and_beyond_them_it_goes_on_in_proportion() -> None:
    correction = with_totals([(0.01, 0.02), (1.0, 0.5)])
    assert correction.total(0.1) == pytest.approx(math.sqrt(0.02 * 0.5))
    assert correction.total(0.005) == pytest.approx(0.01)
    assert correction.total(2.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("site_sum", "measured"), [(0.0, 0.1), (0.1, 0.0), (-1.0, 0.1), (0.1, math.nan)])
def test_a_total_that_is_no_positive_number_says_nothing(site_sum: float, measured: float) -> None:
    correction = with_totals([(0.01, 0.02)])
    assert correction.with_total(site_sum, measured) == correction


def test_factors_lie_between_the_probe_and_the_common_mean() -> None:
    """ln factors −ln 2 and +ln 2: mean 0, sample variance 2 ln² 2 = 0.9609, of which one probe's error is 0.0225."""
    factors = fit_factors([probe("attn.q", 0.02, 0.01), probe("attn.v", 0.02, 0.04)]).role_factors
    trust = (0.9609 - 0.0225) / 0.9609
    assert factors["attn.q"] == pytest.approx(2 ** (-trust), rel=1e-4)
    assert factors["attn.v"] == pytest.approx(2**trust, rel=1e-4)
    assert fit_factors([probe("attn.q", 0.02, 0.03)]).role_factors["attn.q"] == pytest.approx(1.5)


def test_roles_that_differ_by_less_than_probes_err_have_one_factor() -> None:
    """Ratios of 0.9 and 1.1: variance of logarithms 0.0201, below 0.15² = 0.0225; both get the geometric mean."""
    factors = fit_factors([probe("attn.q", 0.02, 0.018), probe("attn.v", 0.02, 0.022)]).role_factors
    assert factors == {role: pytest.approx(math.sqrt(0.99)) for role in ("attn.q", "attn.v")}


def test_values_that_stray_say_nothing_of_weights() -> None:
    """Three roles of weights within a probe's error have one factor, beside values that are off by five."""
    weights = [probe("attn.q", 0.02, 0.018), probe("attn.k", 0.02, 0.02), probe("attn.v", 0.02, 0.022)]
    stray = [probe("norm values", 0.01, 0.01), probe("residual values", 0.001, 0.005)]
    values = [dataclasses.replace(p, of_values=True) for p in stray]
    factors = fit_factors([*weights, *values]).role_factors
    assert {role: factors[role] for role in ("attn.q", "attn.k", "attn.v")} == fit_factors(weights).role_factors
    assert factors["attn.q"] == factors["attn.v"]
    assert factors["norm values"] < 1.2 < 4 < factors["residual values"]


def test_a_probe_whose_sequences_disagree_is_trusted_less() -> None:
    """Three roles at 1 and one at 5, by moments (DerSimonian & Laird): one sequence of all it was measured on tells."""
    level = [probe(f"role {i}", 0.02, 0.02) for i in range(3)]
    stray = probe("residual", 0.001, 0.005)
    sure = fit_factors([*level, stray]).role_factors
    unsure = fit_factors([*level, dataclasses.replace(stray, relative_error=0.9)]).role_factors
    w, v = 1 / 0.0225, 1 / 0.81
    q = (3 * w * v / (3 * w + v)) * math.log(5) ** 2
    apart = max(0.0, (q - 3) / (3 * w + v - (3 * w**2 + v**2) / (3 * w + v)))
    own, others = 1 / (apart + 0.81), 3 / (apart + 0.0225)
    mean = own * math.log(5) / (own + others)
    assert math.log(unsure["residual"]) == pytest.approx(mean + apart * own * (math.log(5) - mean))
    assert unsure["residual"] < 1.1 < 4 < sure["residual"]


def test_what_a_rounding_is_told_too_little_is_its_own_factor() -> None:
    """All sites in it: 1.5 times what was predicted; its role, measured at 1.5 too, is then told right."""
    fed_back = {"rounding": "gradient_aware"}
    whole = dataclasses.replace(probe("", 0.1, 0.15), **fed_back)
    roles = [dataclasses.replace(probe("mlp.up", 0.02, 0.03), **fed_back), probe("attn.q", 0.02, 0.02)]
    correction = fit_factors(roles, [whole])
    assert correction.rounding_factors == {"gradient_aware": pytest.approx(1.5)}
    assert correction.role_factors == {"mlp.up": pytest.approx(1.0), "attn.q": pytest.approx(1.0)}
    assert correction.site("mlp.up", 0.02, "gradient_aware") == pytest.approx(0.03)
    assert correction.site("mlp.up", 0.02) == pytest.approx(0.02)


def test_all_sites_take_the_scheme_nearest_to_the_aim_for_each_rounding_that_needs_data() -> None:
    nearest, fine = Candidate(scheme="int4_g32"), Candidate(scheme="int8_w", rounding="gradient_aware")
    fed_back = Candidate(scheme="int4_g32", rounding="gradient_aware")
    plain = Candidate(scheme="int4_g32", rounding="gptq")
    aim = ROUNDING_PROBE_KL
    scores = {
        "a": {nearest: aim, fed_back: aim / 3, fine: aim / 50, plain: math.nan},
        "b": {nearest: aim, fed_back: aim / 3, plain: aim},
    }
    probes = choose_rounding_probes([site("a", "q"), site("b", "k")], scores, (nearest, fed_back, fine, plain))
    assert probes == {"gradient_aware": {"a": fed_back, "b": fed_back}, "gptq": {"b": plain}}


def test_what_is_common_to_whole_assignments_is_said_of_weights_alone() -> None:
    """Weights at twice their prediction, beside values that are told right."""
    correction = fit_factors([probe("attn.q", 0.02, 0.02), dataclasses.replace(probe("kv", 1.0, 1.0), of_values=True)])
    points = [(0.1, 0.0, 0.2), (0.01, 0.002, 0.022), (0.001, 0.1, 3.0)]  # of the last, values are the larger part
    levelled = correction.levelled(points, {"attn.q"})
    assert levelled.role_factors == {"attn.q": pytest.approx(2.0), "kv": pytest.approx(1.0)}
    assert correction.levelled(points[2:], {"attn.q"}) == correction


def test_where_experts_are_chosen_factors_are_those_of_smooth_parts() -> None:
    """S + c √S with c = 0.1: two probes of S = 0.01 and 0.0001, both predicted at half of that."""
    law = Jumps(c=0.1)
    probes = [probe("attn.q", 0.005, 0.01 + 0.1 * 0.1), probe("attn.v", 0.00005, 0.0001 + 0.1 * 0.01)]
    correction = fit_factors(probes, jumps=law)
    assert correction.role_factors == {"attn.q": pytest.approx(2.0), "attn.v": pytest.approx(2.0)}
    assert correction.part(correction.site("attn.q", 0.005)) == pytest.approx(0.02)
    assert correction.total(0.0001) == pytest.approx(0.0011)
    assert correction.with_total(0.0001, 0.0022).total(0.01) == pytest.approx(0.04)


def test_probes_without_a_signal_are_left_out() -> None:
    factors = fit_factors([probe("a", 0.0, 0.01), probe("b", 0.01, 0.0), probe("c", 0.01, 0.02)]).role_factors
    assert factors == {"c": pytest.approx(2.0)}
    assert fit_factors([]).role_factors == {}


def test_each_role_is_probed_with_the_choice_nearest_to_the_aim() -> None:
    sites = [site("a0", "attn.q"), site("a1", "attn.q"), site("b", "mlp.up"), site("c", "router"), site("d", "lm_head")]
    fine, coarse, broken = (Candidate(scheme=s) for s in ("int8_w", "int4_g32", "fp16"))
    scores = {
        "a0": {fine: 0.001, coarse: PROBE_KL / 2, broken: math.nan},
        "a1": {fine: 0.001, coarse: PROBE_KL / 2, broken: math.inf},
        "b": {fine: PROBE_KL * 1.2, coarse: PROBE_KL * 50, broken: math.nan},
        "c": {fine: 0.0, coarse: 0.0, broken: math.nan},
    }
    probes = choose_role_probes(sites, scores, (fine, coarse, broken))
    assert probes == {"attn.q": {"a0": coarse, "a1": coarse}, "mlp.up": {"b": fine}}


def test_of_the_roundings_of_a_scheme_the_best_is_probed() -> None:
    nearest, fed_back, fine = (
        Candidate(scheme="int4_g32"),
        Candidate(scheme="int4_g32", rounding="gradient_aware"),
        Candidate(scheme="int8_w"),
    )
    scores = {"a": {nearest: PROBE_KL, fed_back: PROBE_KL / 3, fine: PROBE_KL / 50}}
    assert choose_role_probes([site("a", "attn.q")], scores, (nearest, fed_back, fine)) == {"attn.q": {"a": fed_back}}


def test_a_choice_that_rounds_the_input_is_probed_on_the_whole_fused_matrix() -> None:
    """q alone for int4; q, k and v, which read one tensor, for a scheme that rounds it."""
    sites = [dataclasses.replace(site(f"qkv[{part}]", f"attn.{part}"), tied_group="qkv") for part in "qkv"]
    for scheme, expected in (("int4_g32", ["qkv[q]"]), ("fp8", ["qkv[q]", "qkv[k]", "qkv[v]"])):
        choice = Candidate(scheme=scheme)
        probes = choose_role_probes(sites, {s.name: {choice: 0.01} for s in sites}, (choice,))
        assert sorted(probes) == ["attn.k", "attn.q", "attn.v"]
        assert list(probes["attn.q"]) == expected
