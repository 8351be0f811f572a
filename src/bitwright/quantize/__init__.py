"""How a tensor becomes codes: schemes, scales, roundings, and the values that come back.

q = quantize(x, SCHEMES["int4_g128"].weights)
x_hat = dequantize(q)
x_hat = fake_quantize(x, SCHEMES["fp8"].activations)
packed = pack(x, SCHEMES["mxfp4"].weights)
x_hat = unpack(packed)
matrix = select_matmul(packed.scheme, packed.shape, "cpu", x.dtype).layout.prepare(packed)
y = packed_matmul(x, matrix)

Importing this page loads no torch: each name is fetched when it is first used, and `quantize.statistics` needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwright.lazy_page import open_lazily

if TYPE_CHECKING:
    from bitwright.quantize.catalogs import MATMULS, ROUNDINGS, SCHEMES, TRANSFORMS, VALUE_SCHEMES
    from bitwright.quantize.delayed_scaling import DelayedScaling
    from bitwright.quantize.granularity import Granularity, block, group
    from bitwright.quantize.matmuls import MatmulLayout, PackedMatrix
    from bitwright.quantize.pack import PackedTensor
    from bitwright.quantize.packed_matmul import packed_matmul, select_matmul
    from bitwright.quantize.qtensor import QTensor
    from bitwright.quantize.quantize import dequantize, fake_quantize, pack, quantize, unpack
    from bitwright.quantize.rounding import Rounding
    from bitwright.quantize.scheme import Scaling, Scheme, TensorScheme, block_scheme
    from bitwright.quantize.value_scheme import ValueScheme

_HOMES = {
    "MATMULS": "bitwright.quantize.catalogs",
    "ROUNDINGS": "bitwright.quantize.catalogs",
    "SCHEMES": "bitwright.quantize.catalogs",
    "TRANSFORMS": "bitwright.quantize.catalogs",
    "VALUE_SCHEMES": "bitwright.quantize.catalogs",
    "DelayedScaling": "bitwright.quantize.delayed_scaling",
    "Granularity": "bitwright.quantize.granularity",
    "MatmulLayout": "bitwright.quantize.matmuls",
    "PackedMatrix": "bitwright.quantize.matmuls",
    "PackedTensor": "bitwright.quantize.pack",
    "QTensor": "bitwright.quantize.qtensor",
    "Rounding": "bitwright.quantize.rounding",
    "Scaling": "bitwright.quantize.scheme",
    "Scheme": "bitwright.quantize.scheme",
    "TensorScheme": "bitwright.quantize.scheme",
    "ValueScheme": "bitwright.quantize.value_scheme",
    "block": "bitwright.quantize.granularity",
    "block_scheme": "bitwright.quantize.scheme",
    "dequantize": "bitwright.quantize.quantize",
    "fake_quantize": "bitwright.quantize.quantize",
    "group": "bitwright.quantize.granularity",
    "pack": "bitwright.quantize.quantize",
    "packed_matmul": "bitwright.quantize.packed_matmul",
    "quantize": "bitwright.quantize.quantize",
    "select_matmul": "bitwright.quantize.packed_matmul",
    "unpack": "bitwright.quantize.quantize",
}

__all__ = [
    "MATMULS",
    "ROUNDINGS",
    "SCHEMES",
    "TRANSFORMS",
    "VALUE_SCHEMES",
    "DelayedScaling",
    "Granularity",
    "MatmulLayout",
    "PackedMatrix",
    "PackedTensor",
    "QTensor",
    "Rounding",
    "Scaling",
    "Scheme",
    "TensorScheme",
    "ValueScheme",
    "block",
    "block_scheme",
    "dequantize",
    "fake_quantize",
    "group",
    "pack",
    "packed_matmul",
    "quantize",
    "select_matmul",
    "unpack",
]

open_lazily(__name__, _HOMES)
