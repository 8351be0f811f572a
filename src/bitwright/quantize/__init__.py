"""How a tensor becomes codes: schemes, scales, roundings, and the values that come back.

q = quantize(x, SCHEMES["int4_g128"].weights)
x_hat = dequantize(q)
x_hat = fake_quantize(x, SCHEMES["fp8"].activations)
"""

from bitwright.catalog import Catalog
from bitwright.quantize.granularity import Granularity, group
from bitwright.quantize.qtensor import QTensor
from bitwright.quantize.quantize import dequantize, fake_quantize, quantize
from bitwright.quantize.rounding import Rounding
from bitwright.quantize.scheme import Scaling, Scheme, TensorScheme
from bitwright.quantize.transforms.none import NoTransform

SCHEMES: Catalog[Scheme] = Catalog(
    kind="scheme", package="bitwright.quantize.schemes", attribute="SCHEMES", record_type=Scheme
)
ROUNDINGS: Catalog[Rounding] = Catalog(
    kind="rounding", package="bitwright.quantize.rounding", attribute="ROUNDINGS", record_type=Rounding
)
TRANSFORMS: Catalog[NoTransform] = Catalog(
    kind="transform", package="bitwright.quantize.transforms", attribute="TRANSFORMS", record_type=NoTransform
)

__all__ = [
    "ROUNDINGS",
    "SCHEMES",
    "TRANSFORMS",
    "Granularity",
    "QTensor",
    "Rounding",
    "Scaling",
    "Scheme",
    "TensorScheme",
    "dequantize",
    "fake_quantize",
    "group",
    "quantize",
]
