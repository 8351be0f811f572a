"""What torch multiplies codes with codes of, on GPUs: kinds of products as records, and why a scheme is none of them.

    row          FP8, one scale a row of each (or one for all); from compute capability 8.9 on
    block 128    FP8, groups of 128 of x and blocks of 128 × 128 of W; on 9.x alone
    MX           FP8 in groups of 32 under powers of two; from 10.0 on
    NVFP4        FP4 in groups of 16 under E4M3 scales, and a scale a tensor; from 10.0 on

A scheme is asked about with the compute capability of the GPU as an argument (`nvidia_capability`). On a CPU torch has
these products as a loop that is there to be compared with, far slower than bf16: never there.

Sources: PyTorch, aten/src/ATen/native/cuda/ScaledBlas.cpp (shapes, strides, capabilities). MXFP4 is left out: torch has
it in builds with a further library only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import ScalingType

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize.granularity import ROW, TENSOR, Granularity, block, group
from bitwright.quantize.scheme import Scheme, TensorScheme

_BITS_OF_BYTE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One kind of product."""

    name: str
    format: str
    #: torch's dtype of the codes: of FP4, of two of them.
    dtype: torch.dtype
    scale_format: str
    has_tensor_scale: bool = False
    #: Who may share a scale in the weight, and in x.
    weights: tuple[Granularity, ...]
    inputs: tuple[Granularity, ...]
    #: Compute capabilities from this one on, and below the other if there is one.
    capability: tuple[int, int]
    below: tuple[int, int] | None = None
    #: What rows and columns are multiples of.
    rows: int
    columns: int
    #: As torch calls the scales of x and of the weight.
    of_inputs: ScalingType
    of_weights: ScalingType

    @property
    def is_tiled(self) -> bool:
        """Scales lie in tiles."""
        return self.of_weights in (ScalingType.BlockWise1x16, ScalingType.BlockWise1x32)

    @property
    def codes_of_byte(self) -> int:
        """Codes in a byte."""
        return _BITS_OF_BYTE // formats.FORMATS[self.format].bits

    def lacks(self, scheme: TensorScheme | None, sharers: tuple[Granularity, ...]) -> str | None:
        """What a tensor under a scheme would have to be instead; None if it is taken."""
        scaling = None if scheme is None else scheme.scaling
        if (
            scheme is None
            or scaling is None
            or (scheme.format, scaling.scale_format) != (self.format, self.scale_format)
        ):
            return f"{self.format} under {self.scale_format} scales"
        if scaling.symmetry != "symmetric" or scaling.element_exponent:
            return "codes times scales and nothing else"
        if scaling.tensor_scale != self.has_tensor_scale:
            return f"{'two levels' if self.has_tensor_scale else 'one level'} of scales"
        return None if scaling.granularity in sharers else f"scales per {' or '.join(map(str, sharers))}"


RECIPES = (
    Recipe(
        name="row",
        format="fp8_e4m3",
        dtype=torch.float8_e4m3fn,
        scale_format="fp32",
        weights=(ROW, TENSOR),
        inputs=(ROW, TENSOR),
        capability=(8, 9),
        rows=16,
        columns=16,
        of_inputs=ScalingType.RowWise,
        of_weights=ScalingType.RowWise,
    ),
    Recipe(
        name="block 128",
        format="fp8_e4m3",
        dtype=torch.float8_e4m3fn,
        scale_format="fp32",
        weights=(block(128, 128),),
        inputs=(group(128),),
        capability=(9, 0),
        below=(10, 0),
        rows=128,
        columns=128,
        of_inputs=ScalingType.BlockWise1x128,
        of_weights=ScalingType.BlockWise128x128,
    ),
    Recipe(
        name="MX",
        format="fp8_e4m3",
        dtype=torch.float8_e4m3fn,
        scale_format="e8m0",
        weights=(group(32),),
        inputs=(group(32),),
        capability=(10, 0),
        rows=32,
        columns=32,
        of_inputs=ScalingType.BlockWise1x32,
        of_weights=ScalingType.BlockWise1x32,
    ),
    Recipe(
        name="NVFP4",
        format="fp4_e2m1",
        dtype=torch.float4_e2m1fn_x2,
        scale_format="fp8_e4m3",
        has_tensor_scale=True,
        weights=(group(16),),
        inputs=(group(16),),
        capability=(10, 0),
        rows=32,
        columns=32,
        of_inputs=ScalingType.BlockWise1x16,
        of_weights=ScalingType.BlockWise1x16,
    ),
)


def nvidia_capability(device_type: str) -> tuple[int, int] | None:
    """Compute capability of the first GPU of NVIDIA; None where that is no such GPU."""
    if device_type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()


def why_not_codes(scheme: Scheme, device_type: str, capability: tuple[int, int] | None) -> str | None:
    """Return why torch does not multiply codes with codes under a scheme, or None if it does.

    Args:
        scheme: of weight and x.
        device_type: where.
        capability: of the GPU there (`nvidia_capability`).
    """
    if device_type == "cpu":
        return "torch has scaled products on a CPU as a loop to compare with, far slower than bf16"
    if capability is None:
        return f"scaled products are known of GPUs of NVIDIA, and {device_type} here is none"
    wanted: list[str] = []
    for recipe in RECIPES:
        lacking = recipe.lacks(scheme.weights, recipe.weights)
        if lacking is not None:
            wanted.append(lacking)
            continue
        lacking = recipe.lacks(scheme.activations, recipe.inputs)
        if lacking is not None:
            return f"scaled products per {recipe.name} take inputs as {lacking}, not {scheme.activations or 'numbers'}"
        return _why_no_capability(recipe, capability)
    return f"scaled products take weights as {', or '.join(dict.fromkeys(wanted))}, not {scheme.weights or 'numbers'}"


def _why_no_capability(recipe: Recipe, capability: tuple[int, int]) -> str | None:
    if recipe.capability <= capability and (recipe.below is None or capability < recipe.below):
        return None
    last = "" if recipe.below is None else f" and below {_spell(recipe.below)}"
    needed = f"{_spell(recipe.capability)}{last}"
    return f"scaled products per {recipe.name} need compute capability {needed}, and here it is {_spell(capability)}"


def _spell(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def recipe_of(weights: TensorScheme) -> Recipe:
    """The kind of product that takes weights under a scheme.

    Raises:
        SchemeError: none does.
    """
    for recipe in RECIPES:
        if recipe.lacks(weights, recipe.weights) is None:
            return recipe
    raise SchemeError(f"torch has no scaled product for weights as {weights}; choose another layout")
