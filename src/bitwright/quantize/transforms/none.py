"""No transform: the tensor is quantised as it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NoTransform:
    """The identity."""

    name: str = "none"
    description: str = "the tensor as it is"


TRANSFORMS = (NoTransform(),)
