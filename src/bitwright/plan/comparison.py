"""Two plans of one model side by side: where they differ, and whether the difference in quality exceeds the noise.

Quality is compared on the same text, sequence by sequence: the sequences that are hard for one plan are hard for the
other, so the difference of their KLs is known far better than either KL. The verdict follows from its interval alone:

    better              the interval of KL(second) − KL(first) lies below 0
    worse               it lies above 0
    within the noise    it holds 0: no gain is claimed, and no loss
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bitwright.errors import PlanError
from bitwright.plan.canonical import Number
from bitwright.plan.plan import Plan
from bitwright.plan.schema import Interval, Record, SiteChoice

Verdict = Literal["better", "within the noise", "worse"]


class SiteDifference(Record):
    """A site at which two plans choose differently; None where a plan has no such site."""

    name: str
    role: str
    first: str | None
    second: str | None
    #: Stored bytes of the second less those of the first.
    bytes: int


class PlanComparison(Record):
    """The second plan against the first."""

    sites: tuple[SiteDifference, ...]
    #: Sites of either plan.
    num_sites: int = Field(ge=0)
    #: Stored bytes of all weights, and decode time where both plans are for one device and workload.
    first_bytes: int = Field(ge=0)
    second_bytes: int = Field(ge=0)
    first_decode_s: Number | None = None
    second_decode_s: Number | None = None
    #: KL of each, nats, and of the second less the first on the same sequences.
    first_kl: Interval
    second_kl: Interval
    difference: Interval
    sequences: int = Field(ge=0)
    #: Name of the text.
    source: str
    #: The second plan's quality against the first's.
    verdict: Verdict


def verdict_of(difference: Interval) -> Verdict:
    """What an interval of KL(second) − KL(first) says of the second."""
    if difference.high < 0:
        return "better"
    return "worse" if difference.low > 0 else "within the noise"


def diff_sites(first: Plan, second: Plan) -> tuple[SiteDifference, ...]:
    """The sites at which two plans differ, in the order of the first, then those that only the second has.

    Raises ``PlanError`` where the plans are for different weights.
    """
    if first.model.hash != second.model.hash:
        raise PlanError(
            f"the plans are for different weights ({first.model.name!r}, hash {first.model.hash[:12]}, and "
            f"{second.model.name!r}, hash {second.model.hash[:12]}); compare plans of one model"
        )
    left = {site.name: site for site in first.sites}
    right = {site.name: site for site in second.sites}
    found = []
    for name in dict.fromkeys((*left, *right)):
        a, b = left.get(name), right.get(name)
        if _choice(a) != _choice(b):
            site = a or b
            assert site is not None
            found.append(
                SiteDifference(
                    name=name,
                    role=site.role,
                    first=_choice(a),
                    second=_choice(b),
                    bytes=(0 if b is None else b.bytes) - (0 if a is None else a.bytes),
                )
            )
    return tuple(found)


def _choice(site: SiteChoice | None) -> str | None:
    """The scheme, with rounding and transform where they are not plain."""
    if site is None:
        return None
    extra = [part for part, plain in ((site.rounding, "rtn"), (site.transform, "none")) if part != plain]
    return "+".join([site.scheme, *extra])
