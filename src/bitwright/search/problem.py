"""From scores and prices to a choosing problem, and from its solution back to an assignment.

Sites of one tied group choose a scheme together; each of them takes the rounding that predicts the least KL under it.
A site without a score (no calibration token reached it) or outside the question (embedding and head, unless they were
asked for) keeps its loaded format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitwright.models import Site
from bitwright.plan import Budget
from bitwright.search.candidate import Candidate
from bitwright.search.correct import Correction
from bitwright.search.price import AS_LOADED, END_ROLES, Assignment, Prices
from bitwright.search.score import Scores
from bitwright.search.solve import Option, Solution, front, solve

#: Points of the front that a plan shows, and among which assignments are chosen to be measured.
NUM_FRONT_POINTS = 14


@dataclass(frozen=True, kw_only=True)
class Group:
    """Sites that choose together, and what they can choose."""

    sites: tuple[Site, ...]
    #: Scheme → the choice of each site, in the order of the sites.
    choices: Mapping[str, tuple[Candidate, ...]]
    options: tuple[Option, ...]

    def option(self, scheme: str) -> Option:
        """The option of a scheme."""
        return next(option for option in self.options if option.key == scheme)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything the solver is asked."""

    groups: tuple[Group, ...]
    prices: Prices
    correction: Correction
    scores: Scores
    #: Bytes of everything that is not chosen: all of it, and the decoder linears among it.
    fixed_bytes: int
    fixed_decoder_bytes: int

    def assignment(self, solution: Solution) -> dict[str, Candidate]:
        """Site → choice, for every site of the model."""
        assignment = dict.fromkeys((site.name for site in self.prices.sites), AS_LOADED)
        for group, option in zip(self.groups, solution.options, strict=True):
            for site, choice in zip(group.sites, group.choices[option.key], strict=True):
                assignment[site.name] = choice
        return assignment

    def site_kl(self, site: Site, choice: Candidate) -> float:
        """Predicted KL of one site alone, nats per token."""
        return 0.0 if choice == AS_LOADED else self.correction.site(site.role, self.scores[site.name][choice])

    def site_sum(self, assignment: Assignment) -> float:
        """Sum of the sites' predicted KLs."""
        return sum(self.site_kl(site, assignment[site.name]) for site in self.prices.sites)

    def total_kl(self, assignment: Assignment) -> float:
        """Predicted KL of a whole assignment, nats per token."""
        return self.correction.total(self.site_sum(assignment))

    def size_limits(self, budget: Budget) -> dict[str, float]:
        """The budget's size limits, for what is chosen: arguments of `solve`."""
        limits = {}
        if budget.max_memory_bytes is not None:
            limits["max_bytes"] = budget.max_memory_bytes - self.fixed_bytes
        if budget.effective_bits is not None:
            num_weights = sum(site.num_weights for site in self.prices.decoder_sites)
            limits["max_decoder_bytes"] = budget.effective_bits * num_weights / 8 - self.fixed_decoder_bytes
        return limits

    def solve(self, budget: Budget, objective: str, max_total_kl: float | None) -> tuple[Solution, str | None]:
        """The best assignment and None, or the nearest one and the limit that cannot be kept.

        Where size and quality cannot both be kept, size is: the best quality that fits is given.
        """
        options = [group.options for group in self.groups]
        sizes = self.size_limits(budget)
        quality = {} if max_total_kl is None else {"max_kl": self.correction.site_sum(max_total_kl)}
        found = solve(options, minimize="bytes" if objective == "memory" else "kl", **quality, **sizes)
        if found is not None:
            return found, None
        found = solve(options, minimize="kl", **sizes)
        if found is not None:
            return found, "quality"
        found = solve(options, minimize="bytes")
        assert found is not None
        return found, "size"

    def front(self) -> tuple[Solution, ...]:
        """The least KL at NUM_FRONT_POINTS sizes; sums of sites, whatever totals were measured."""
        return front([group.options for group in self.groups], NUM_FRONT_POINTS) if self.groups else ()


def build_problem(
    prices: Prices, scores: Scores, candidates: Sequence[Candidate], correction: Correction, *, include_head: bool
) -> Problem:
    """Group the sites and price every option. Options with a non-finite prediction are left out."""
    chosen = [s for s in prices.sites if s.name in scores and (include_head or s.role not in END_ROLES)]
    by_group: dict[str, list[Site]] = {}
    for site in chosen:
        by_group.setdefault(site.tied_group or site.name, []).append(site)
    groups = tuple(
        group
        for sites in by_group.values()
        if (group := _group(tuple(sites), prices, scores, candidates, correction)).options
    )
    in_question = {site.name for group in groups for site in group.sites}
    fixed = [site for site in prices.sites if site.name not in in_question]
    return Problem(
        groups=groups,
        prices=prices,
        correction=correction,
        scores=scores,
        fixed_bytes=prices.other_bytes + sum(prices.loaded_bytes[site.name] for site in fixed),
        fixed_decoder_bytes=sum(prices.loaded_bytes[site.name] for site in fixed if site.role not in END_ROLES),
    )


def _group(
    sites: tuple[Site, ...], prices: Prices, scores: Scores, candidates: Sequence[Candidate], correction: Correction
) -> Group:
    choices: dict[str, tuple[Candidate, ...]] = {}
    options = []
    for scheme in dict.fromkeys(candidate.scheme for candidate in candidates):
        rivals = [candidate for candidate in candidates if candidate.scheme == scheme]
        best = tuple(_least(rivals, scores[site.name]) for site in sites)
        kl = sum(correction.site(s.role, scores[s.name][c]) for s, c in zip(sites, best, strict=True))
        if math.isfinite(kl):
            choices[scheme] = best
            options.append(
                Option(
                    key=scheme,
                    kl=max(kl, 0.0),
                    num_bytes=sum(prices.site_bytes(s, c) for s, c in zip(sites, best, strict=True)),
                    counts_as_decoder=sites[0].role not in END_ROLES,
                )
            )
    return Group(sites=sites, choices=choices, options=tuple(options))


def _least(candidates: Sequence[Candidate], kls: Mapping[Candidate, float]) -> Candidate:
    """The candidate with the least prediction; the first of equals, and NaN last."""
    return min(candidates, key=lambda candidate: kls[candidate] if math.isfinite(kls[candidate]) else math.inf)
