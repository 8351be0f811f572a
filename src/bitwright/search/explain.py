"""Why each site got what it got, in one sentence with figures."""

from __future__ import annotations

from collections.abc import Sequence

from bitwright.models import Site
from bitwright.plan import Budget
from bitwright.search.candidate import Candidate
from bitwright.search.limits import cost_quantity
from bitwright.search.mend import Mended
from bitwright.search.price import AS_LOADED, END_ROLES, KEPT_ROLES, AnySite
from bitwright.search.problem import Group
from bitwright.search.solve import KL, Option, undominated

_AIMS = {
    "memory": "smallest model within the limit",
    "latency": "fastest model within the limit",
    "kl": "least KL within the limits",
}


def reason_for(site: AnySite, choice: Candidate, mended: Mended, *, asked: tuple[Budget, str], why_kept: str) -> str:
    """The reason of one site's choice: what the neighbouring choices would have cost or saved.

    Args:
        site, choice: the site and what it got.
        mended: the problem, and what was raised after measuring.
        asked: the budget and the objective.
        why_kept: the reason to give where nothing was chosen.
    """
    if choice == AS_LOADED and not any(site in group.sites for group in mended.problem.groups):
        return why_kept
    problem = mended.problem
    group = next(group for group in problem.groups if site in group.sites)
    for repair in mended.repairs:
        if repair.site in {name for tied in group.sites for name in (tied.name, tied.tied_group)}:
            return f"raised from {repair.from_scheme}: {repair.why}{_together(group)}"
    cost = cost_quantity(asked[1], asked[0], problem.prices)
    chosen = _chosen_option(group, [mended.assignment[s.name] for s in group.sites])
    ladder = undominated(group.options, (cost, KL))
    parts = []
    more = [o for o in ladder if o.amount(cost) > chosen.amount(cost)]
    less = [o for o in ladder if o.amount(cost) < chosen.amount(cost)]
    if more:
        difference = _spell(cost, more[0].amount(cost) - chosen.amount(cost))
        parts.append(f"{more[0].key} would save {chosen.kl - more[0].kl:.2g} nats for {difference} more")
    if less:
        difference = _spell(cost, chosen.amount(cost) - less[-1].amount(cost))
        parts.append(f"{less[-1].key} would save {difference} for {less[-1].kl - chosen.kl:.2g} nats more")
    return f"part of the {_AIMS[asked[1]]}: {'; '.join(parts) or 'the only usable choice'}{_together(group)}"


def why_kept(site: Site, loaded_format: str, *, include_head: bool, reached: int | None, ruled_out: str | None) -> str:
    """Why nothing was chosen for a weight site.

    Args:
        site: which.
        loaded_format: what the checkpoint stores it in.
        include_head: whether embedding and head were in question.
        reached: calibration tokens that reached it, where they were too few.
        ruled_out: why nothing is left to choose from, where that is so.
    """
    kept = f"kept in its loaded format ({loaded_format})"
    if site.role in END_ROLES and not include_head:
        return f"{kept}: --include-head makes it a choice"
    if site.role in KEPT_ROLES:
        return f"{kept}: its error moves tokens between experts"
    if ruled_out is not None:
        return f"{kept}: every choice is ruled out here, {ruled_out}"
    if reached:
        return f"{kept}: only {reached} calibration tokens reached it, too few to choose by"
    return f"{kept}: no calibration token reached it, so nothing is known of it"


def _chosen_option(group: Group, choices: Sequence[Candidate]) -> Option:
    return next(option for option in group.options if group.choices[option.key] == tuple(choices))


def _together(group: Group) -> str:
    if len(group.sites) == 1:
        return ""
    one_matrix = len({site.tied_group for site in group.sites} - {None}) == 1 and group.sites[0].tied_group is not None
    return f" ({len(group.sites)} {'rows of one matrix' if one_matrix else 'fused layers'} decide together)"


def _spell(quantity: str, amount: float) -> str:
    """A difference of a quantity in a unit of its own."""
    if quantity.endswith("_bytes"):
        return f"{amount / 1024:.{0 if amount >= 10 * 1024 else 2}f} KiB"
    if quantity.endswith("_s"):
        return f"{amount * 1e6:.3g} µs"
    return f"{amount:.3g} {quantity.replace('_', ' ')}"
