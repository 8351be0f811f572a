"""From the largest magnitude of a block to its scale, before that is rounded to the format in which it is stored.

With ``top`` the largest value of an element under scale 1, each step one operation of fp32:

    ocp_floor   2**(floor(log2 amax) − floor(log2 top))      OCP MX 1.0 §6.3: an amax beyond top · scale saturates
    round_up    2**ceil(log2(amax / top))                    NVIDIA's MXFP8 (torchao: RCEIL): no element saturates
    amax        amax / top

`floor(log2)` is the exponent field (frexp), never a logarithm; round_up adds one to the exponent of the fp32 quotient
amax / top where any fraction bit is set. An amax or quotient of 0 gives 0.

Two levels (NVFP4: T = 448 · 6 = 2688, the largest scale times top):

    S            = min(T / amax_tensor, largest fp32 number)       encodes: ideal = (amax / top) · S
    tensor_scale = max(amax_tensor / T, 2**-128)                   decodes; the reciprocal, by its own division
    amax_tensor = 0: both are 1

The order is that of Transformer Engine's reference quantiser for NVFP4 (amax / 6 first, then times the global encode
scale). TE's later kernels multiply by a precomputed S · (1/6), which moves scales that lie on ties.
Rejected: tensor_scale = amax_tensor / T without a floor, which is off by orders of magnitude where S is capped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bitwright.formats.block_codec import Floats32

ScaleRule = Literal["amax", "ocp_floor", "round_up"]

FLOAT32_MAX = np.finfo(np.float32).max
#: 1 / fp32 max: what stands for the reciprocal of a capped encode scale.
_SMALLEST_TENSOR_SCALE = np.float32(2.0**-128)


def _ocp_floor(amax_B: Floats32, top: np.float32) -> Floats32:
    return _power_of_two(np.frexp(amax_B)[1] - np.frexp(top)[1], amax_B)


def _round_up(amax_B: Floats32, top: np.float32) -> Floats32:
    quotient_B = amax_B / top
    mantissa_B, exponent_B = np.frexp(quotient_B)
    return _power_of_two(exponent_B - (mantissa_B == 0.5), quotient_B)


def _amax(amax_B: Floats32, top: np.float32) -> Floats32:
    return amax_B / top


#: (finite amax of every block, top) → ideal scale of every block, fp32.
SCALE_RULES: Mapping[str, Callable[[Floats32, np.float32], Floats32]] = MappingProxyType(
    {"amax": _amax, "ocp_floor": _ocp_floor, "round_up": _round_up}
)


def tensor_scales(amax: np.float32, largest_block: float) -> tuple[np.float32, np.float32]:
    """Return the tensor scale, which decodes, and the encode scale.

    Args:
        amax: largest magnitude of the tensor, finite.
        largest_block: T, the largest value of a block under tensor scale 1.
    """
    if amax == 0:
        return np.float32(1), np.float32(1)
    top = np.float32(largest_block)
    with np.errstate(over="ignore", under="ignore"):
        return max(amax / top, _SMALLEST_TENSOR_SCALE), min(top / amax, FLOAT32_MAX)


def _power_of_two(exponent_B: npt.NDArray[Any], source_B: Floats32) -> Floats32:
    """Two to the exponent; 0 where the number that the exponent was taken from is 0."""
    return np.where(source_B == 0, np.float32(0), np.ldexp(np.float32(1), exponent_B.astype(np.int32)))
