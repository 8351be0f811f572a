"""Overflows before the cast as a limit: what was expected from calibration gives way to what was counted on other text.

    risk    overflows ÷ values that were rounded · values that the plan rounds ÷ all values of the model · 10⁶

Expected ones come from one half of the calibration text under the scale of the other; other text can hold more. Where a
measured plan is over its limit, the counts are taken on site by site, under whatever else has the same inputs rounded
in the same way; what was not measured is taken to be as far off as the sum of what was. Counts below what was expected
are left aside: a limit is promised, and few events make no rate.
"""

from __future__ import annotations

from bitwright.inference import Counters, Overflows
from bitwright.models.linear_calls import matrices_of
from bitwright.search.price import AS_LOADED, Assignment, Prices
from bitwright.search.problem import Problem


def risk_of(prices: Prices, assignment: Assignment, per_million_rounded: float) -> float:
    """Overflows per million values of the model, from those per million values that an assignment rounds."""
    return prices.num_rounded(assignment) / max(1, prices.num_values) * per_million_rounded


def measured_risk(prices: Prices, assignment: Assignment, counters: Counters) -> float:
    """Overflows per million values of the model, as they were counted while an assignment ran."""
    return risk_of(prices, assignment, sum(counters.values(), Overflows()).per_million)


def with_counts(problem: Problem, assignment: Assignment, counters: Counters) -> Problem:
    """The problem whose expected overflows have taken on those that were counted while an assignment ran."""
    measured = _by_site(problem, assignment, counters)
    total, expected = sum(measured.values()), problem.totals(assignment)["overflow"]
    further = max(1.0, total / expected) if expected > 0 else 1.0
    rates = {}
    for site in problem.prices.all_sites:
        scored, chosen = problem.scores.get(site.name, {}), assignment[site.name]
        known = problem.overflows.get(site.name, {})
        rates[site.name] = {
            choice: max(known.get(choice, 0.0), measured.get(site.name, 0.0))
            if (choice.scheme, choice.transform) == (chosen.scheme, chosen.transform)
            else further * known.get(choice, 0.0)
            for choice in scored
            if choice != AS_LOADED
        }
    return problem.with_overflows(rates)


def _by_site(problem: Problem, assignment: Assignment, counters: Counters) -> dict[str, float]:
    """Site → its share of the risk; sites of one matrix share what was counted there."""
    counted = sum(count.num_overflows for count in counters.values())
    if counted == 0:
        return {}
    risk = measured_risk(problem.prices, assignment, counters)
    sites_of = {m.name: tuple(site.name for site in m.sites) for m in matrices_of(problem.prices.sites)}
    found: dict[str, float] = {}
    for name, count in counters.items():
        sites = sites_of.get(name, (name,))
        for site in sites:
            found[site] = risk * count.num_overflows / counted / len(sites)
    return found
