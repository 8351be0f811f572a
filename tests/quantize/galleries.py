"""Matrices and schemes that reach every corner of scaled formats, the same on every run and for every backend."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bitwright.quantize import SCHEMES, Granularity, Scaling, TensorScheme
from bitwright.quantize.granularity import ROW, TENSOR, block, group

NAN, INF = math.nan, math.inf


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def finite() -> Tensor:
    """A row for each kind of finite number; 70 columns are two groups of 32 and a short one."""
    x = gaussian(13, 70)
    x[1] = 0.0
    x[2] = -0.0
    x[3, 40] = 1e6
    x[4, :35] = -0.0
    x[5] *= 1e38
    x[6] *= 1e-38
    x[7] *= 1e-44
    x[8] = torch.arange(-35, 35) / 4.0  # on codes, and on ties between them
    x[9] = torch.exp2(torch.arange(70) / 2.0 - 80)
    x[10] = x[10].abs() + 1
    x[11] = -x[11].abs() - 1
    x[12, 1:] *= 1e-20
    return x


def spoiled() -> Tensor:
    """A whole group of NaN, one NaN, infinities; and rows that must not notice."""
    x = gaussian(6, 70, seed=1)
    x[0, :32] = NAN
    x[1, 33] = NAN
    x[2, 69] = INF
    x[3, 0] = -INF
    return x


MATRICES: dict[str, Callable[[], Tensor]] = {
    "finite": finite,
    "not finite": spoiled,
    "non-contiguous": lambda: gaussian(40, 5, seed=2).T[:, ::2],
    "one row": lambda: gaussian(1, 33, seed=3),
    "one column": lambda: gaussian(5, 1, seed=4),
    "one number": lambda: gaussian(1, 1, seed=5),
    "no rows": lambda: torch.zeros(0, 32),
    "no columns": lambda: torch.zeros(3, 0),
}


def _scheme(format: str, granularity: Granularity, scale_format: str, **facts: object) -> TensorScheme:
    scaling = Scaling(granularity=granularity, scale_format=scale_format, **facts)  # type: ignore[arg-type]
    return TensorScheme(format=format, scaling=scaling)


#: What the catalog leaves out: every rule, symmetry, granularity and kind of format at least once.
FURTHER_SCHEMES = {
    "int4 per tensor": _scheme("int4", TENSOR, "fp16"),
    "fp8_e5m2 per tensor": _scheme("fp8_e5m2", TENSOR, "fp32"),
    "fp8_e4m3 in blocks": _scheme("fp8_e4m3", block(4, 32), "fp32"),
    "nf4 groups": _scheme("nf4", group(16), "bf16"),
    "fp8 without -0": _scheme("fp8_e4m3fnuz", group(20), "fp32"),
    "fp4 with fp6 scales": _scheme("fp4_e2m1", group(8), "fp8_e5m2"),
    "percentile": _scheme("int8", group(16), "fp32", rule="percentile", percentile=90.0),
    "percentile in blocks": _scheme("nf4", block(2, 16), "fp16", rule="percentile", percentile=99.0),
    "mse": _scheme("int3", ROW, "fp16", rule="mse"),
    "mse in blocks": _scheme("fp4_e2m1", block(7, 64), "fp8_e4m3", rule="mse"),
    "round_up": _scheme("fp8_e4m3", group(32), "e8m0", rule="round_up"),
    "round_up in blocks": _scheme("fp6_e2m3", block(2, 16), "e8m0", rule="round_up"),
    "ocp_floor per row": _scheme("fp8_e5m2", ROW, "e8m0", rule="ocp_floor"),
    "power_of_two": _scheme("fp8_e4m3", block(4, 32), "fp32", rule="power_of_two"),
    "power_of_two with margin": _scheme("fp8_e5m2", TENSOR, "e8m0", rule="power_of_two", margin=2),
    "element exponent": _scheme("int8", group(8), "bf16", element_exponent=-6),
    "two levels per row": _scheme("fp4_e2m1", ROW, "fp8_e4m3", tensor_scale=True),
    "two levels, blocks": _scheme("fp4_e2m1", block(16, 16), "fp8_e4m3", tensor_scale=True),
    "two levels, exponent": _scheme("int4", group(16), "fp8_e4m3", tensor_scale=True, element_exponent=-2),
    "zero point per tensor": _scheme("uint8", TENSOR, "fp32", symmetry="zero_point"),
    "signed zero points": _scheme("int4", block(2, 16), "bf16", symmetry="zero_point"),
    "minimum per row": _scheme("uint8", ROW, "fp32", symmetry="minimum"),
    "minima of blocks": _scheme("uint3", block(2, 16), "bf16", symmetry="minimum"),
}


def scaled_schemes() -> dict[str, TensorScheme]:
    """Every distinct scaled tensor scheme of the catalog, then the further ones."""
    found: dict[TensorScheme, str] = {}
    for scheme in SCHEMES.values():
        for tensor in (scheme.weights, scheme.activations):
            if tensor is not None and tensor.scaling is not None:
                found.setdefault(tensor, scheme.name)
    for name, tensor in FURTHER_SCHEMES.items():
        found.setdefault(tensor, name)
    return {name: tensor for tensor, name in found.items()}


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Same shape, dtype and bits; any NaN equals any NaN. None equals None."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    a_32, b_32 = a.float().contiguous(), b.float().contiguous()
    differs = a_32.view(torch.int32) != b_32.view(torch.int32)
    return not bool((differs & ~(a_32.isnan() & b_32.isnan())).any())
