"""Products with packed weights as `hardware profile` measures them: how fast each format is read from where it lies.

Weights are in one format each, as presets have them (integers of 8 bits and FP8 under a scale a row, of 4 bits in
groups of 128), inputs are in the dtype that the machine multiplies in. The layout is the one that a plan would run with
here (`select_matmul`). `hardware` stands below this package, so it is handed these products (`hardware/bench.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from bitwright.quantize.granularity import ROW, group
from bitwright.quantize.scheme import Scaling, TensorScheme

if TYPE_CHECKING:
    from torch import Tensor

_SCHEMES: Mapping[str, TensorScheme] = {
    "int8": TensorScheme(format="int8", scaling=Scaling(granularity=ROW, scale_format="fp16")),
    "fp8_e4m3": TensorScheme(format="fp8_e4m3", scaling=Scaling(granularity=ROW, scale_format="fp32")),
    "fp8_e5m2": TensorScheme(format="fp8_e5m2", scaling=Scaling(granularity=ROW, scale_format="fp32")),
    "int4": TensorScheme(format="int4", scaling=Scaling(granularity=group(128), scale_format="fp16")),
}


class PackedWeights:
    """What `hardware.profile.measure` takes as `packed`."""

    formats = tuple(_SCHEMES)

    def prepare(self, name: str, x_MK: Tensor, w_NK: Tensor) -> tuple[Callable[[], object], int, str]:
        """Return what multiplies, the bytes that the packed weight takes, and which kernel it is.

        Args:
            name: of the weight's format, one of `formats`.
            x_MK: inputs, fp32, bf16 or fp16.
            w_NK: the weight, fp32, on the same device.

        Raises:
            SchemeError: no layout holds such a weight here.
        """
        from bitwright.quantize.packed_matmul import prepare_matmul, select_matmul
        from bitwright.quantize.quantize import pack

        packed = pack(w_NK, _SCHEMES[name])
        layout = select_matmul(packed.scheme, packed.shape, x_MK.device.type, x_MK.dtype).layout
        matrix = layout.prepare(packed)
        multiply = prepare_matmul(matrix)
        how = layout.how(x_MK.shape[0], matrix, x_MK.dtype)
        return lambda: multiply(x_MK), matrix.nbytes, f"{layout.name}, {how}"
