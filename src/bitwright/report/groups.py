"""Sites gathered for reading: all sites of one role with one choice are one line, and each role has a total.

A prediction adds up over sites, so every line has one. A measurement does not: a role is measured with all its sites
changed at once, so only its total has one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from bitwright.plan import Plan, SiteChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteGroup:
    """The sites of one role that share a choice."""

    role: str
    scheme: str
    rounding: str
    transform: str
    num_sites: int
    num_weights: int
    num_bytes: int
    #: Stored bits per weight, over all weights of the group.
    bits: float
    #: Sum over the sites, nats per token.
    predicted_kl: float

    @property
    def choice(self) -> str:
        return spell_choice(self.scheme, self.rounding, self.transform)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleTotal:
    """All sites of one role as the plan has them."""

    role: str
    #: One for each choice in the role, from the fewest bits to the most.
    groups: tuple[SiteGroup, ...]
    num_sites: int
    num_bytes: int
    #: Stored bits per weight, over all weights of the role.
    bits: float
    #: Sum over the sites, nats per token.
    predicted_kl: float
    #: KL with this role alone changed, all its sites at once; None where it was not measured.
    measured_kl: float | None


def spell_choice(scheme: str, rounding: str, transform: str) -> str:
    """``"int4_g128+clip"``; plain rounding and no transform go without saying."""
    parts = [scheme]
    if rounding != "rtn":
        parts.append(rounding)
    if transform != "none":
        parts.append(transform)
    return "+".join(parts)


def group_sites(plan: Plan) -> tuple[SiteGroup, ...]:
    """Return the groups in the order of their roles in the model, within a role from the fewest bits to the most."""
    members: dict[tuple[str, str, str, str], list[SiteChoice]] = defaultdict(list)
    role_order: dict[str, int] = {}
    for site in plan.sites:
        role_order.setdefault(site.role_label, len(role_order))
        members[site.role_label, site.scheme, site.rounding, site.transform].append(site)
    groups = []
    for (role, scheme, rounding, transform), sites in members.items():
        num_weights = sum(math.prod(site.shape) for site in sites)
        num_bytes = sum(site.bytes for site in sites)
        groups.append(
            SiteGroup(
                role=role,
                scheme=scheme,
                rounding=rounding,
                transform=transform,
                num_sites=len(sites),
                num_weights=num_weights,
                num_bytes=num_bytes,
                bits=sum(site.bits * math.prod(site.shape) for site in sites) / max(num_weights, 1),
                predicted_kl=math.fsum(site.predicted_kl for site in sites),
            )
        )
    return tuple(sorted(groups, key=lambda group: (role_order[group.role], group.bits, group.scheme, group.rounding)))


def total_roles(plan: Plan) -> tuple[RoleTotal, ...]:
    """Return the roles in the order of the model, each with its groups and with what was measured of it."""
    by_role: dict[str, list[SiteGroup]] = defaultdict(list)
    for group in group_sites(plan):
        by_role[group.role].append(group)
    measured = {point.role: point.measured_kl for point in plan.predictions if point.kind == "plan_role"}
    return tuple(
        RoleTotal(
            role=role,
            groups=tuple(groups),
            num_sites=sum(group.num_sites for group in groups),
            num_bytes=sum(group.num_bytes for group in groups),
            bits=sum(group.bits * group.num_weights for group in groups)
            / max(sum(group.num_weights for group in groups), 1),
            predicted_kl=math.fsum(group.predicted_kl for group in groups),
            measured_kl=measured.get(role),
        )
        for role, groups in by_role.items()
    )


def bits_of_schemes(plan: Plan) -> dict[str, float]:
    """Return the schemes in use, from the fewest stored bits per weight to the most, with those bits."""
    weights: dict[str, float] = defaultdict(float)
    bits: dict[str, float] = defaultdict(float)
    for site in plan.sites:
        count = math.prod(site.shape)
        weights[site.scheme] += count
        bits[site.scheme] += site.bits * count
    mean = {scheme: bits[scheme] / max(weights[scheme], 1) for scheme in weights}
    return dict(sorted(mean.items(), key=lambda item: (item[1], item[0])))
