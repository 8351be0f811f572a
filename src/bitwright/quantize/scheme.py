"""What a scheme is: a number format and its scaling, for weights and for activations.

`scale` always multiplies codes back to values:

    symmetric     value = code · scale
    zero_point    value = (code − zero_point) · scale     integer zero point (AWQ, GPTQ, compressed-tensors)
    minimum       value = code · scale + minimum          floating minimum (GGUF's Q4_1)

A scheme is a record. Nothing in bitwright branches on its name: whatever a scheme does follows from these facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitwright import formats
from bitwright.hardware.memory import weight_bytes
from bitwright.quantize.granularity import Granularity

ScaleRule = Literal["amax", "ocp_floor"]
Symmetry = Literal["symmetric", "zero_point", "minimum"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Which numbers share a scale, how it is found, and in which format it is stored."""

    granularity: Granularity
    #: Format in which each scale is stored; codes are computed against the stored scale, so nothing is lost later.
    scale_format: str
    #: "amax": amax / largest code value. "ocp_floor": 2^(floor(log2 amax) − emax) (OCP MX v1.0, section 6.3).
    rule: ScaleRule = "amax"
    #: How codes map to values; see the module docstring.
    symmetry: Symmetry = "symmetric"
    #: Two-level scaling (NVFP4): block scales are stored relative to one fp32 scale per tensor.
    tensor_scale: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorScheme:
    """Number format plus scaling of one tensor. Without scaling the numbers themselves are rounded to the format."""

    #: Canonical name of a number format (`bitwright formats`).
    format: str
    #: None: values are stored as they are in `format`.
    scaling: Scaling | None = None

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Bytes that a [rows, columns] tensor occupies: codes, scales and offsets."""
        code_bits = formats.get(self.format).bits
        scaling = self.scaling
        if scaling is None:
            return weight_bytes(out_features=rows, in_features=columns, code_bits=code_bits)
        scale_bits = formats.get(scaling.scale_format).bits
        offset_bits = {"symmetric": 0, "zero_point": code_bits, "minimum": scale_bits}[scaling.symmetry]
        per_tensor = scaling.granularity.scope == "tensor"
        return weight_bytes(
            out_features=rows,
            in_features=columns,
            code_bits=code_bits,
            group_size=scaling.granularity.group_size or None,
            scale_bits=0 if per_tensor else scale_bits,
            zero_point_bits=0 if per_tensor else offset_bits,
            tensor_scale_bits=(scale_bits + offset_bits if per_tensor else 0) + (32 if scaling.tensor_scale else 0),
        )

    @property
    def nominal_bits(self) -> int:
        """Bits of one code, scales left out (what peers call the bit width)."""
        return formats.get(self.format).bits

    def __str__(self) -> str:
        if self.scaling is None:
            return self.format
        extra = "" if self.scaling.symmetry == "symmetric" else f", {self.scaling.symmetry}"
        return f"{self.format} per {self.scaling.granularity}, {self.scaling.scale_format} scales{extra}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A named preset: how the weights of a linear site are stored, and what its input is rounded to."""

    name: str
    #: One line for tables: what it is and where it runs.
    description: str
    #: Document that defines the scheme, or the engine convention it follows.
    source: str
    #: None only for `as_loaded`: the weights stay as the checkpoint has them.
    weights: TensorScheme | None
    #: Format and scaling of the input activations, found per call (dynamic); None leaves them alone.
    activations: TensorScheme | None = None
    #: Whether a search chooses from it unless it is told what to choose from.
    in_default_search: bool = True
