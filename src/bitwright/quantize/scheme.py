"""What a scheme is: a number format and its scaling, for weights and for activations.

`scale` always multiplies codes back to values:

    symmetric     value = code · scale
    zero_point    value = (code − zero_point) · scale     integer zero point (AWQ, GPTQ, compressed-tensors)
    minimum       value = code · scale + minimum          floating minimum (GGUF's Q4_1)

A scheme is a record. Nothing in bitwright branches on its name: whatever a scheme does follows from these facts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, cast, get_args

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.formats import BlockFormat, FloatFormat
from bitwright.hardware.memory import weight_bytes
from bitwright.quantize.granularity import Granularity, group

#: How a group's numbers become a scale; `scaling.py` has the formulas and where each comes from.
ScaleRule = Literal["amax", "percentile", "mse", "ocp_floor", "round_up", "power_of_two"]
Symmetry = Literal["symmetric", "zero_point", "minimum"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Which numbers share a scale, how it is found, and in which format it is stored.

    Raises:
        SchemeError: the fields contradict each other.
    """

    granularity: Granularity
    #: Format in which each scale is stored; codes are computed against the stored scale, so nothing is lost later.
    scale_format: str
    #: How the scale follows from the group's numbers; offsets (`symmetry`) are found by "amax" only.
    rule: ScaleRule = "amax"
    #: Rule "percentile": the share of magnitudes, in percent, that the codes must reach; 100 is amax.
    percentile: float = 100.0
    #: Rule "power_of_two": binary orders of magnitude kept free above amax.
    margin: int = 0
    #: How codes map to values; see the module docstring.
    symmetry: Symmetry = "symmetric"
    #: Two-level scaling (NVFP4): block scales are stored relative to one fp32 scale per tensor.
    tensor_scale: bool = False
    #: A stored scale s multiplies codes by s · 2^element_exponent (MXINT8: −6, its codes being multiples of 1/64).
    element_exponent: int = 0

    def __post_init__(self) -> None:
        if self.rule not in get_args(ScaleRule):
            raise SchemeError(f"unknown scale rule {self.rule!r}; use one of {', '.join(get_args(ScaleRule))}")
        if self.symmetry not in get_args(Symmetry):
            raise SchemeError(f"unknown symmetry {self.symmetry!r}; use one of {', '.join(get_args(Symmetry))}")
        if not isinstance(formats.FORMATS[self.scale_format], FloatFormat):
            raise SchemeError(f"scales are stored as floats, not as {self.scale_format}; try fp16, bf16, fp32 or e8m0")
        if not 0 < self.percentile <= 100:
            raise SchemeError(f"percentile is {self.percentile}; give a share of magnitudes in (0, 100], in percent")
        if self.percentile != 100 and self.rule != "percentile":
            raise SchemeError(
                f"percentile is {self.percentile}, but rule {self.rule!r} does not look at it; leave it out"
            )
        if self.margin and self.rule != "power_of_two":
            raise SchemeError(f"margin is {self.margin}, but rule {self.rule!r} does not look at it; leave it out")
        if self.symmetry != "symmetric" and (self.rule != "amax" or self.tensor_scale or self.element_exponent):
            raise SchemeError(
                f"symmetry {self.symmetry!r} goes with rule 'amax' and plain scales only, not with rule {self.rule!r}, "
                f"tensor_scale {self.tensor_scale}, element_exponent {self.element_exponent}; make it symmetric"
            )

    @property
    def needs_amax_alone(self) -> bool:
        """Whether a scale follows from the ends of its group, so that one reduction finds it."""
        return self.rule not in ("percentile", "mse")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorScheme:
    """Number format plus scaling of one tensor. Without scaling the numbers themselves are rounded to the format.

    Raises:
        SchemeError: a block format, a scale for what needs none, or two levels of scales that fp32 does not hold.
        UnknownName: no format has that name.
    """

    #: Canonical name of a number format (`bitwright formats`).
    format: str
    #: None: values are stored as they are in `format`.
    scaling: Scaling | None = None
    #: All of it as words between spaces, which `read_scheme` understands: found here, since compilers that trace a
    #: program make numbers that vary of the sizes in a scheme, and could not spell them.
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.format in formats.BLOCK_FORMATS:
            raise SchemeError(
                f"{self.format} is a block format, elements and their scales together; block_scheme({self.format!r}) "
                "is its scheme"
            )
        number = formats.FORMATS[self.format]
        object.__setattr__(self, "text", _spell(self.format, self.scaling))
        if self.scaling is None:
            return
        if isinstance(number, FloatFormat) and number.bits >= 32:
            raise SchemeError(f"{self.format} needs no scale: it holds every tensor; leave the scaling out")
        largest = float(formats.FORMATS[self.scaling.scale_format].max) * float(number.max)
        if self.scaling.tensor_scale and largest > float(formats.FORMATS["fp32"].max):
            raise SchemeError(
                f"{self.scaling.scale_format} scales times {self.format} codes reach {largest:.3g}, beyond fp32, so no "
                "tensor scale brings a tensor to that range; store scales in a format of short range, or use one level"
            )

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Bytes that a [rows, columns] tensor occupies: codes, scales and offsets."""
        code_bits = formats.FORMATS[self.format].bits
        scaling = self.scaling
        if scaling is None:
            return weight_bytes(out_features=rows, in_features=columns, code_bits=code_bits)
        scale_bits = formats.FORMATS[scaling.scale_format].bits
        offset_bits = {"symmetric": 0, "zero_point": code_bits, "minimum": scale_bits}[scaling.symmetry]
        per_tensor = scaling.granularity.scope == "tensor"
        return weight_bytes(
            out_features=rows,
            in_features=columns,
            code_bits=code_bits,
            group_size=scaling.granularity.group_size or None,
            group_rows=scaling.granularity.block_rows or 1,
            scale_bits=0 if per_tensor else scale_bits,
            zero_point_bits=0 if per_tensor else offset_bits,
            tensor_scale_bits=(scale_bits + offset_bits if per_tensor else 0) + (32 if scaling.tensor_scale else 0),
        )

    @property
    def nominal_bits(self) -> int:
        """Bits of one code, scales left out (what peers call the bit width)."""
        return formats.FORMATS[self.format].bits

    def __str__(self) -> str:
        if self.scaling is None:
            return self.format
        extra = "" if self.scaling.symmetry == "symmetric" else f", {self.scaling.symmetry}"
        return f"{self.format} per {self.scaling.granularity}, {self.scaling.scale_format} scales{extra}"


def _spell(format: str, scaling: Scaling | None) -> str:
    if scaling is None:
        return format
    granularity = scaling.granularity
    return (
        f"{format} {granularity.scope} {granularity.group_size} {granularity.block_rows} {scaling.scale_format} "
        f"{scaling.rule} {scaling.percentile} {scaling.margin} {scaling.symmetry} {int(scaling.tensor_scale)} "
        f"{scaling.element_exponent}"
    )


@cache
def read_scheme(text: str) -> TensorScheme:
    """Return the scheme of a `TensorScheme.text`."""
    format, *fields = text.split()
    if not fields:
        return TensorScheme(format=format)
    scope, group_size, block_rows, scale_format, rule, percentile, margin, symmetry, tensor_scale, exponent = fields
    scaling = Scaling(
        granularity=Granularity(scope=cast(Any, scope), group_size=int(group_size), block_rows=int(block_rows)),
        scale_format=scale_format,
        rule=cast(Any, rule),
        percentile=float(percentile),
        margin=int(margin),
        symmetry=cast(Any, symmetry),
        tensor_scale=bool(int(tensor_scale)),
        element_exponent=int(exponent),
    )
    return TensorScheme(format=format, scaling=scaling)


def block_scheme(name: str) -> TensorScheme:
    """The scheme that a block format is: its elements, block size, scales and rule, from its one record.

    Args:
        name: canonical name of a block format whose elements are a number format (MX, NVFP4, block floating point).

    Raises:
        SchemeError: the format is packed bytes without such elements (GGUF).
        UnknownName: no block format has that name.
    """
    record = formats.BLOCK_FORMATS[name]
    if not isinstance(record, BlockFormat):
        raise SchemeError(f"block format '{name}' has no elements of a number format; use one of MX, NVFP4 or BFP")
    return TensorScheme(
        format=record.element.name,
        scaling=Scaling(
            granularity=group(record.block_size),
            scale_format=record.scale.name,
            rule=record.scale_rule,
            tensor_scale=record.tensor_scale,
            element_exponent=record.element_exponent,
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A named preset: how the weights of a linear site are stored, and what its input is rounded to.

    Raises:
        SchemeError: static activations without one scale for the whole tensor.
    """

    name: str
    #: One line for tables: what it is and where it runs.
    description: str
    #: Document that defines the scheme, or the engine convention it follows.
    source: str
    #: None only for `as_loaded`: the weights stay as the checkpoint has them.
    weights: TensorScheme | None
    #: Format and scaling of the input activations; None leaves them alone.
    activations: TensorScheme | None = None
    #: False: their scales are found on every call (dynamic). True: one scale per tensor is found in calibration, by the
    #: rule of `activations.scaling`, and kept: what goes beyond it later saturates (`static_scales.py`). Of two levels
    #: it is the second one that is kept; scales of groups are found on every call, in units of it.
    static_activations: bool = False
    #: Whether a search chooses from it unless it is told what to choose from.
    in_default_search: bool = True

    def __post_init__(self) -> None:
        scaling = None if self.activations is None else self.activations.scaling
        if self.static_activations and (
            scaling is None
            or scaling.symmetry != "symmetric"
            or (scaling.granularity.scope == "tensor") == scaling.tensor_scale
        ):
            raise SchemeError(
                f"scheme '{self.name}' has static activations as {self.activations}; a static scale is one per tensor: "
                "give them a symmetric scaling with granularity TENSOR, or one in groups with a tensor scale"
            )
