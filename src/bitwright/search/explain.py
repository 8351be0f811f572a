"""Why each site got what it got, in one sentence with figures."""

from __future__ import annotations

from bitwright.models import Site
from bitwright.search.candidate import Candidate
from bitwright.search.mend import Mended
from bitwright.search.price import AS_LOADED, END_ROLES, KEPT_ROLES
from bitwright.search.solve import undominated


def reason_for(
    site: Site, choice: Candidate, mended: Mended, objective: str, loaded_format: str, include_head: bool
) -> str:
    """The reason of one site's choice: what the neighbouring choices would have cost or saved."""
    if choice == AS_LOADED:
        if site.role in END_ROLES and not include_head:
            return f"kept in its loaded format ({loaded_format}): --include-head makes it a choice"
        if site.role in KEPT_ROLES:
            return f"kept in its loaded format ({loaded_format}): its error moves tokens between experts"
        return (
            f"kept in its loaded format ({loaded_format}): no calibration token reached it, so nothing is known of it"
        )
    for repair in mended.repairs:
        if repair.site in (site.name, site.tied_group):
            return f"raised from {repair.from_scheme}: {repair.why}"
    problem = mended.problem
    group = next(group for group in problem.groups if site in group.sites)
    chosen = group.option(choice.scheme)
    ladder = undominated(group.options)
    larger = [o for o in ladder if o.num_bytes > chosen.num_bytes]
    smaller = [o for o in ladder if o.num_bytes < chosen.num_bytes]
    parts = []
    if larger:
        up = larger[0]
        parts.append(
            f"{up.key} would save {chosen.kl - up.kl:.2g} nats for {_kib(up.num_bytes - chosen.num_bytes)} more"
        )
    if smaller:
        down = smaller[-1]
        parts.append(
            f"{down.key} would save {_kib(chosen.num_bytes - down.num_bytes)} for {down.kl - chosen.kl:.2g} nats more"
        )
    aim = "smallest model within the limit" if objective == "memory" else "least KL within the size"
    together = f" ({len(group.sites)} rows of one matrix decide together)" if len(group.sites) > 1 else ""
    return f"part of the {aim}: " + ("; ".join(parts) or "the only usable choice") + together


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:.{0 if num_bytes >= 10 * 1024 else 2}f} KiB"
