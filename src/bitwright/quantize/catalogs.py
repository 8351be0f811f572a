"""What a user names when a tensor is quantised: schemes of weights and of values, roundings, transforms.

Each folder is its own registry.
"""

from __future__ import annotations

from bitwright.catalog import Catalog
from bitwright.quantize.matmuls import MatmulLayout
from bitwright.quantize.rounding import Rounding
from bitwright.quantize.scheme import Scheme
from bitwright.quantize.spelled_scheme import read_spelled_scheme
from bitwright.quantize.transforms import Transform
from bitwright.quantize.value_scheme import ValueScheme

#: Every scheme, by name; what has none, by its facts (`spelled_scheme.py`).
SCHEMES: Catalog[Scheme] = Catalog(
    kind="scheme",
    package="bitwright.quantize.schemes",
    attribute="SCHEMES",
    record_type=Scheme,
    spelled=read_spelled_scheme,
)
#: Every scheme of values that are computed or kept, by name.
VALUE_SCHEMES: Catalog[ValueScheme] = Catalog(
    kind="value scheme",
    package="bitwright.quantize.value_schemes",
    attribute="VALUE_SCHEMES",
    record_type=ValueScheme,
)
#: Every rounding of weights, by name.
ROUNDINGS: Catalog[Rounding] = Catalog(
    kind="rounding", package="bitwright.quantize.rounding", attribute="ROUNDINGS", record_type=Rounding
)
#: Every transform, by name.
TRANSFORMS: Catalog[Transform] = Catalog(
    kind="transform", package="bitwright.quantize.transforms", attribute="TRANSFORMS", record_type=Transform
)
#: Every layout of packed weights, by name.
MATMULS: Catalog[MatmulLayout] = Catalog(
    kind="layout of packed weights",
    package="bitwright.quantize.matmuls",
    attribute="MATMULS",
    record_type=MatmulLayout,
)
