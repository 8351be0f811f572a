"""What can be chosen at a site: a scheme, a rounding, a transform."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bitwright.quantize import ROUNDINGS, SCHEMES, TRANSFORMS
from bitwright.quantize.scheme import Scheme


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Candidate:
    """A choice that can be made at a site."""

    scheme: str
    rounding: str = "rtn"
    transform: str = "none"

    def __str__(self) -> str:
        extra = [part for part, plain in ((self.rounding, "rtn"), (self.transform, "none")) if part != plain]
        return " ".join([self.scheme, *extra])


def candidates_of(
    schemes: Sequence[str], roundings: Collection[str] | None = None, transforms: Collection[str] | None = None
) -> tuple[Candidate, ...]:
    """Every scheme with every rounding that applies to it and every transform that may gain.

    Args:
        schemes: names of schemes that store weights.
        roundings: names; None: those that are tried by default under a scheme.
        transforms: names; None: all where activations are rounded under scales, each with the last of the roundings;
            for weights alone none, since error feedback gains what they would.

    A transform that does nothing for a matrix's shape is left out when that matrix is scored.
    """
    found = []
    for name in schemes:
        scheme = SCHEMES[name]
        weights = scheme.weights
        assert weights is not None, f"{name} is no choice"
        tried = [
            rounding.name
            for rounding in sorted(ROUNDINGS.values(), key=lambda r: (r.needs_data, r.name))
            if rounding.applies_to(weights)
            and (rounding.tried_by_default(weights) if roundings is None else rounding.name in roundings)
        ]
        found += [Candidate(scheme=name, rounding=rounding) for rounding in tried]
        if transforms is None:
            pairs = [(tried[-1], change) for change in TRANSFORMS if _rounds_under_scales(scheme) and tried]
        else:
            pairs = [(rounding, change) for change in sorted(transforms) for rounding in tried]
        found += [Candidate(scheme=name, rounding=r, transform=t) for r, t in pairs if t != "none"]
    return tuple(found)


def _rounds_under_scales(scheme: Scheme) -> bool:
    return scheme.activations is not None and scheme.activations.scaling is not None
