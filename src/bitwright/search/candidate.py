"""What can be chosen at a site: a scheme, a rounding, a transform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bitwright.quantize import ROUNDINGS, SCHEMES


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Candidate:
    """A choice that can be made at a site."""

    scheme: str
    rounding: str = "rtn"
    transform: str = "none"

    def __str__(self) -> str:
        return self.scheme if self.rounding == "rtn" else f"{self.scheme} {self.rounding}"


def candidates_of(schemes: Sequence[str]) -> tuple[Candidate, ...]:
    """Every scheme with every rounding that applies to it."""
    found = []
    for name in schemes:
        weights = SCHEMES[name].weights
        assert weights is not None, f"{name} is no choice"
        found += [
            Candidate(scheme=name, rounding=rounding.name)
            for rounding in sorted(ROUNDINGS.values(), key=lambda r: (r.needs_data, r.name))
            if rounding.applies_to(weights)
        ]
    return tuple(found)
