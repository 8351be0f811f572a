"""What a user names when a tensor is quantised: schemes, roundings, transforms. Each folder is its own registry."""

from __future__ import annotations

from bitwright.catalog import Catalog
from bitwright.quantize.rounding import Rounding
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.transforms.none import NoTransform

#: Every scheme, by name.
SCHEMES: Catalog[Scheme] = Catalog(
    kind="scheme", package="bitwright.quantize.schemes", attribute="SCHEMES", record_type=Scheme
)
#: Every rounding of weights, by name.
ROUNDINGS: Catalog[Rounding] = Catalog(
    kind="rounding", package="bitwright.quantize.rounding", attribute="ROUNDINGS", record_type=Rounding
)
#: Every transform, by name.
TRANSFORMS: Catalog[NoTransform] = Catalog(
    kind="transform", package="bitwright.quantize.transforms", attribute="TRANSFORMS", record_type=NoTransform
)
