"""From scores and prices to a choosing problem, and from its solution back to an assignment.

What a site can choose is what it has scores for. Sites of one tied group choose a scheme together (and, where the
scheme rounds their common input, a transform of it; so do sites whose factors go into one norm). Within that, each site
takes what predicts least. Where rivals of one scheme also differ in time or in overflows, each combination that no
other beats is an option of its own.

A site without a score (no calibration token reached it) or outside the question (embedding and head, unless they were
asked for) keeps its loaded format.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bitwright.plan import QUALITY_LIMITS, Budget
from bitwright.quantize import SCHEMES
from bitwright.search.candidate import Candidate
from bitwright.search.correct import Correction, label_of
from bitwright.search.limits import largest_sums, objective_quantity, quantity_of, sum_of
from bitwright.search.price import AS_LOADED, END_ROLES, Amounts, AnySite, Assignment, Prices
from bitwright.search.score import Scores
from bitwright.search.solve import KL, Option, Solution, front, solve, undominated

#: Points of the front that a plan shows, and among which assignments are chosen to be measured.
NUM_FRONT_POINTS = 14


@dataclass(frozen=True, kw_only=True)
class Group:
    """Sites that choose together, and what they can choose."""

    sites: tuple[AnySite, ...]
    #: Key of an option → the choice of each site, in the order of the sites.
    choices: Mapping[str, tuple[Candidate, ...]]
    options: tuple[Option, ...]

    def option(self, key: str) -> Option:
        """The option of a key."""
        return next(option for option in self.options if option.key == key)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything the solver is asked."""

    groups: tuple[Group, ...]
    prices: Prices
    correction: Correction
    scores: Scores
    #: Quantity → amount of everything that is not chosen.
    fixed: Amounts
    #: Site → choice → expected overflows per million values of the whole model.
    overflows: Scores = field(default_factory=dict)

    def assignment(self, solution: Solution) -> dict[str, Candidate]:
        """Site → choice, for every site of the model."""
        assignment = dict.fromkeys((site.name for site in self.prices.all_sites), AS_LOADED)
        for group, option in zip(self.groups, solution.options, strict=True):
            for site, choice in zip(group.sites, group.choices[option.key], strict=True):
                assignment[site.name] = choice
        return assignment

    def site_kl(self, site: AnySite, choice: Candidate) -> float:
        """Predicted KL of one site alone, nats per token."""
        return self.correction.part(self._share(site, choice))

    def site_sum(self, assignment: Assignment) -> float:
        """What the sites of an assignment add up to; those that it does not name stay as loaded."""
        return sum(self._share(s, assignment[s.name]) for s in self.prices.all_sites if s.name in assignment)

    def _share(self, site: AnySite, choice: Candidate) -> float:
        if choice == AS_LOADED:
            return 0.0
        return self.correction.site(label_of(site), self.scores[site.name][choice], choice.rounding)

    def total_kl(self, assignment: Assignment) -> float:
        """Predicted KL of a whole assignment, nats per token."""
        return self.correction.total(self.site_sum(assignment))

    def totals(self, assignment: Assignment) -> Amounts:
        """Every quantity of a whole assignment but its KL."""
        overflow = sum(self.overflows.get(name, {}).get(choice, 0.0) for name, choice in assignment.items())
        return {**self.prices.totals(assignment), "overflow": overflow}

    def with_overflows(self, rates: Scores) -> Problem:
        """The same with other expected overflows: site → choice → per million values of the whole model."""

        def changed(group: Group, option: Option) -> Option:
            pairs = zip(group.sites, group.choices[option.key], strict=True)
            overflow = sum(rates.get(site.name, {}).get(choice, 0.0) for site, choice in pairs)
            return replace(option, amounts={**option.amounts, "overflow": overflow})

        groups = tuple(replace(g, options=tuple(changed(g, option) for option in g.options)) for g in self.groups)
        return replace(self, groups=groups, overflows=rates)

    def limits(self, budget: Budget, max_total_kl: float | None) -> dict[str, float]:
        """Quantity → what is left of the budget's limits for what is chosen: arguments of `solve`."""
        sums = largest_sums(budget, self.prices)
        left = {quantity: limit - self.fixed.get(quantity, 0) for quantity, limit in sums.items()}
        return left if max_total_kl is None else {**left, KL: self.correction.site_sum(max_total_kl)}

    def best(self, minimize: str, limits: Mapping[str, float]) -> Solution | None:
        """The exact optimum of a quantity under limits of what is chosen, or None where nothing keeps them."""
        return solve([group.options for group in self.groups], minimize=minimize, limits=limits)

    def solve(self, budget: Budget, objective: str, max_total_kl: float | None) -> tuple[Solution, tuple[str, ...]]:
        """The best assignment and (), or the nearest one and the names of the limits that it does not keep.

        Where quality and the other limits cannot all be kept, the others are: the best quality that fits is given.
        Where they alone cannot be kept, the one that is furthest out of reach is brought as near as the rest allows.
        """
        limits = self.limits(budget, max_total_kl)
        found = self.best(objective_quantity(objective, self.prices), limits)
        if found is not None:
            return found, ()
        resources = {quantity: limit for quantity, limit in limits.items() if quantity != KL}
        found = self.best(KL, resources)
        if found is not None:
            return found, tuple(name for name in budget.limits if name in QUALITY_LIMITS)
        return self._nearest(budget, resources)

    def _nearest(self, budget: Budget, limits: Mapping[str, float]) -> tuple[Solution, tuple[str, ...]]:
        def excess(quantity: str) -> float:
            alone = self.best(quantity, {})
            assert alone is not None
            fixed = self.fixed.get(quantity, 0)
            return (alone.amount(quantity) + fixed) / max(limits[quantity] + fixed, 1e-30)

        furthest = max(limits, key=excess)
        rest = {quantity: limit for quantity, limit in limits.items() if quantity != furthest}
        found = self.best(furthest, rest) or self.best(furthest, {})
        assert found is not None
        return found, tuple(
            name
            for name, value in budget.limits.items()
            if name not in QUALITY_LIMITS
            and found.amount(quantity_of(name)) + self.fixed.get(quantity_of(name), 0)
            > sum_of(name, value, self.prices)
        )

    def front(self, quantity: str = "weight_bytes") -> tuple[Solution, ...]:
        """The least KL at NUM_FRONT_POINTS amounts; sums of sites, whatever totals were measured."""
        return front([group.options for group in self.groups], NUM_FRONT_POINTS, quantity) if self.groups else ()


def build_problem(
    prices: Prices,
    scores: Scores,
    correction: Correction,
    *,
    include_head: bool,
    ties: Mapping[str, str] | None = None,
    shared: Mapping[str, str] | None = None,
    overflows: Scores | None = None,
) -> Problem:
    """Group the sites and price every option. Options with a non-finite prediction are left out.

    Args:
        prices: of the model.
        scores: site → choice → predicted KL; the choices of a site are its keys.
        correction: what probes say of predictions.
        include_head: whether embedding and head are in question.
        ties: site → name of a group that has to agree, beside the sites' own tied groups (an engine's fused layers).
        shared: site → norm that its factors go into: sites of one norm agree, transforms included.
        overflows: site → choice → expected overflows per scored prediction; none where absent.
    """
    per_million = 1e6 / max(1, prices.num_values)
    # what rows of one matrix read counts once, as it does among the values
    readers = Counter(site.tied_group for site in prices.sites)
    sharing = {site.name: readers[site.tied_group] for site in prices.sites if site.tied_group is not None}
    rates = {
        name: {c: per_million * n / sharing.get(name, 1) for c, n in of_site.items()}
        for name, of_site in (overflows or {}).items()
    }
    chosen = [s for s in prices.all_sites if s.name in scores and (include_head or s.role not in END_ROLES)]
    groups = tuple(
        group
        for sites in _tied(chosen, ties or {}, shared or {})
        if (group := _group(sites, prices, scores, correction, rates, shared or {})).options
    )
    in_question = {site.name for group in groups for site in group.sites}
    fixed: Counter[str] = Counter(prices.fixed)
    for site in prices.all_sites:
        if site.name not in in_question:
            fixed.update(prices.amounts(site, AS_LOADED))
    return Problem(
        groups=groups,
        prices=prices,
        correction=correction,
        scores=scores,
        fixed=dict(fixed),
        overflows=rates,
    )


def _tied(
    sites: Sequence[AnySite], ties: Mapping[str, str], shared: Mapping[str, str]
) -> Iterator[tuple[AnySite, ...]]:
    """Sites that share a group, of their own or by one of these, directly or through others; in order of the first."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.setdefault(name, name) != name:
            name = root[name]
        return name

    for site in sites:
        for group in (site.tied_group, ties.get(site.name), shared.get(site.name)):
            if group is not None:
                # a group's name may be that of a site: kept apart by its mark
                root[find(f"group {group}")] = find(f"site {site.name}")
    members: dict[str, list[AnySite]] = {}
    for site in sites:
        members.setdefault(find(f"site {site.name}"), []).append(site)
    for tied in members.values():
        yield tuple(tied)


@dataclass(frozen=True, slots=True)
class _Joint:
    """Choices of the first sites of a group, and what they cost together."""

    choices: tuple[Candidate, ...]
    option: Option


def _group(
    sites: tuple[AnySite, ...],
    prices: Prices,
    scores: Scores,
    correction: Correction,
    overflows: Scores,
    shared: Mapping[str, str],
) -> Group:
    choices: dict[str, tuple[Candidate, ...]] = {}
    options: list[Option] = []
    offered = [dict.fromkeys(_agreement(site, candidate, shared) for candidate in scores[site.name]) for site in sites]
    common = [terms for terms in offered[0] if all(terms in others for others in offered)]
    for terms in common:
        for joint in _joint_choices(sites, terms, prices, scores, correction, overflows, shared):
            key = terms[0] if terms[0] not in choices else f"{terms[0]} ({', '.join(map(str, joint.choices))})"
            choices[key] = joint.choices
            options.append(Option(key=key, kl=joint.option.kl, amounts=joint.option.amounts))
    return Group(sites=sites, choices=choices, options=tuple(options))


def _agreement(site: AnySite, candidate: Candidate, shared: Mapping[str, str]) -> tuple[str, str]:
    """What tied sites have to agree on: the scheme; and the transform, where it acts on the input that they share."""
    rounds_inputs = site.kind == "weight" and SCHEMES[candidate.scheme].activations is not None
    return candidate.scheme, candidate.transform if rounds_inputs or site.name in shared else ""


def _joint_choices(
    sites: Sequence[AnySite],
    terms: tuple[str, str],
    prices: Prices,
    scores: Scores,
    correction: Correction,
    overflows: Scores,
    shared: Mapping[str, str],
) -> list[_Joint]:
    """Undominated combinations of the sites' choices under the same terms; none where a site has no usable one."""
    joint = [_Joint((), Option(key="", kl=0.0))]
    for site in sites:
        own = [
            _Joint(
                (candidate,),
                Option(
                    key=str(candidate),
                    kl=max(kl, 0.0),
                    amounts={
                        **prices.amounts(site, candidate),
                        "overflow": overflows.get(site.name, {}).get(candidate, 0.0),
                    },
                ),
            )
            for candidate, raw in scores[site.name].items()
            if _agreement(site, candidate, shared) == terms
            and math.isfinite(kl := correction.site(label_of(site), raw, candidate.rounding))
        ]
        joint = _undominated([_together(left, right) for left in joint for right in _undominated(own)])
    return joint


def _together(left: _Joint, right: _Joint) -> _Joint:
    amounts: Counter[str] = Counter(left.option.amounts)
    amounts.update(right.option.amounts)
    return _Joint(
        (*left.choices, *right.choices),
        Option(
            key=f"{left.option.key} {right.option.key}".strip(),
            kl=left.option.kl + right.option.kl,
            amounts=dict(amounts),
        ),
    )


def _undominated(joint: Sequence[_Joint]) -> list[_Joint]:
    """Those that no other beats in everything, by rising KL; of equals the first."""
    by_key: dict[str, _Joint] = {}
    for one in joint:
        by_key.setdefault(one.option.key, one)
    quantities = {name for one in joint for name in one.option.amounts}
    kept = undominated([one.option for one in by_key.values()], (KL, *sorted(quantities)))
    return [by_key[option.key] for option in kept]
