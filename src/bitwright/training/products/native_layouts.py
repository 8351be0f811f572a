"""How torch takes operands of scaled products on GPUs, and which recipes are such products.

What torch multiplies is a pair of *layouts*: how the scales of each operand lie, in which formats codes come, on which
compute capabilities. A recipe is native where all three of its products are such pairs; else all of them are emulated,
since codes that some products share are written once.

    tensor        one fp32 scale; E4M3 by E4M3 or E5M2                        8.9 and later
    1 × 128       E4M3, fp32 scales, along what is summed over                9.0 alone
    128 × 128     E4M3, fp32 scales; the other operand is 1 × 128             9.0 alone
    1 × 32        E4M3, E8M0 scales in tiles                                  10.0 and later
    1 × 16        E2M1, E4M3 scales in tiles, and a tensor scale; blocks of 16 × 16 as 16 equal rows    10.0 and later

Source: PyTorch, aten/src/ATen/native/cuda/ScaledBlas.cpp (shapes, strides, types, capabilities).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import ScalingType

from bitwright.quantize.granularity import TENSOR, Granularity, block, group
from bitwright.quantize.scheme import TensorScheme
from bitwright.training.product_recipe import ProductRecipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How torch takes one operand."""

    scaling: ScalingType
    #: Layouts that the other operand may have.
    others: frozenset[ScalingType]
    formats: tuple[str, ...]
    #: Those of them that only one of two operands may be in.
    once: tuple[str, ...] = ()
    granularities: tuple[Granularity, ...]
    scale_format: str
    has_tensor_scale: bool = False
    #: Compute capabilities from this one on, and below the other if there is one.
    capability: tuple[int, int]
    below: tuple[int, int] | None = None
    #: What rows and columns are filled up to multiples of.
    rows: int
    columns: int

    @property
    def is_tiled(self) -> bool:
        """Scales lie in tiles of 128 × 4."""
        return self.scaling in (ScalingType.BlockWise1x16, ScalingType.BlockWise1x32)

    def takes(self, scheme: TensorScheme) -> bool:
        """Whether codes under a scheme lie so."""
        scaling = scheme.scaling
        assert scaling is not None
        return (
            scheme.format in self.formats
            and scaling.granularity in self.granularities
            and scaling.scale_format == self.scale_format
            and scaling.tensor_scale == self.has_tensor_scale
            and not scaling.element_exponent
        )


_ROWS, _BLOCKS = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
LAYOUTS = (
    Layout(
        scaling=ScalingType.TensorWise,
        others=frozenset({ScalingType.TensorWise}),
        formats=("fp8_e4m3", "fp8_e5m2"),
        once=("fp8_e5m2",),
        granularities=(TENSOR,),
        scale_format="fp32",
        capability=(8, 9),
        rows=16,
        columns=16,
    ),
    Layout(
        scaling=_ROWS,
        others=frozenset({_ROWS, _BLOCKS}),
        formats=("fp8_e4m3",),
        granularities=(group(128),),
        scale_format="fp32",
        capability=(9, 0),
        below=(10, 0),
        rows=128,
        columns=128,
    ),
    Layout(
        scaling=_BLOCKS,
        others=frozenset({_ROWS}),
        formats=("fp8_e4m3",),
        granularities=(block(128, 128),),
        scale_format="fp32",
        capability=(9, 0),
        below=(10, 0),
        rows=128,
        columns=128,
    ),
    Layout(
        scaling=ScalingType.BlockWise1x32,
        others=frozenset({ScalingType.BlockWise1x32}),
        formats=("fp8_e4m3",),
        granularities=(group(32),),
        scale_format="e8m0",
        capability=(10, 0),
        rows=32,
        columns=32,
    ),
    Layout(
        scaling=ScalingType.BlockWise1x16,
        others=frozenset({ScalingType.BlockWise1x16}),
        formats=("fp4_e2m1",),
        granularities=(group(16), block(16, 16)),
        scale_format="fp8_e4m3",
        has_tensor_scale=True,
        capability=(10, 0),
        rows=32,
        columns=32,
    ),
)


def layout_of(scheme: TensorScheme) -> Layout | None:
    """The layout of codes under a scheme; None if torch has none."""
    return next((layout for layout in LAYOUTS if layout.takes(scheme)), None)


def why_not_native(recipe: ProductRecipe, device_type: str, capability: tuple[int, int] | None) -> str | None:
    """Return why torch does not multiply a recipe's codes, or None if it does.

    Args:
        recipe: all three products are asked about.
        device_type: where.
        capability: of the GPU there (`scaled_recipes.nvidia_capability`).
    """
    if device_type == "cpu":
        return "torch has scaled products on a CPU as a loop to compare with, far slower than bf16"
    if capability is None:
        return f"scaled products are known of GPUs of NVIDIA, and {device_type} here is none"
    for rule in recipe.operands.values():
        layout = layout_of(rule.scheme)
        if layout is None:
            return f"torch has no scaled products of {rule.scheme}"
        if not layout.capability <= capability or (layout.below is not None and capability >= layout.below):
            here = _dotted(capability)
            return f"products of {rule.scheme} need compute capability {_spell(layout)}, and here it is {here}"
    for name, pair in recipe.products.items():
        if not _are_multiplied(*(rule.scheme for rule in pair)):
            return f"torch has no {name} product of {pair[0].scheme} with {pair[1].scheme}"
    return None


def _are_multiplied(first: TensorScheme, second: TensorScheme) -> bool:
    """Whether torch multiplies operands of two schemes that have layouts."""
    layouts = layout_of(first), layout_of(second)
    assert layouts[0] is not None and layouts[1] is not None
    is_twice = first.format == second.format and first.format in layouts[0].once
    return layouts[1].scaling in layouts[0].others and not is_twice


def _spell(layout: Layout) -> str:
    low = _dotted(layout.capability)
    return low if layout.below is None else f"{low} and below {_dotted(layout.below)}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
