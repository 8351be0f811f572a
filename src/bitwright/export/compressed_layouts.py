"""The layouts of compressed-tensors, each a pattern over the facts of a scheme; which one holds a scheme, or why none.

    pack-quantized        integers of 2 to 8 bits in words of 32, inputs as they are
    int-quantized         int8, inputs in int8
    float-quantized       fp8 (E4M3) per tensor, row or block, inputs in fp8
    naive-quantized       fp8, inputs as they are
    nvfp4-pack-quantized  E2M1 in groups of 16 under two levels; inputs as they are, or under a static second level
    mxfp4-pack-quantized  E2M1 in groups of 32 under powers of two; inputs as they are, or the same
    mxfp8-quantized       fp8 in groups of 32 under powers of two; inputs as they are, or the same

Of layouts that do not fit, the one that fits longest, fact after fact, is the one that was meant: its first difference
is the reason.

Source: compressed-tensors 0.20, config/format.py and compressors/*/base.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from bitwright.quantize.scheme import Scheme, TensorScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way of storing codes, as a pattern over the facts of a scheme."""

    name: str
    #: Formats of the codes.
    formats: tuple[str, ...]
    scopes: tuple[str, ...]
    #: Columns under one scale, where the layout fixes them.
    group_size: int | None = None
    scale_formats: tuple[str, ...] = ("fp16", "bf16", "fp32")
    symmetries: tuple[str, ...] = ("symmetric",)
    tensor_scale: bool = False
    #: (format, scope, static) of inputs that go with it; None stands for inputs that are not rounded.
    inputs: tuple[tuple[str, str, bool] | None, ...] = (None,)
    #: `scale_dtype` of weights and inputs in the config.
    scale_dtype: str | None = None


_SIGNED = tuple(f"int{bits}" for bits in range(2, 9))
_UNSIGNED = tuple(f"uint{bits}" for bits in range(2, 9))
#: The first that fits is taken.
LAYOUTS = (
    Layout(name="pack-quantized", formats=_SIGNED, scopes=("row", "group")),
    Layout(name="pack-quantized", formats=_UNSIGNED, scopes=("row", "group"), symmetries=("zero_point",)),
    Layout(
        name="int-quantized",
        formats=("int8",),
        scopes=("tensor", "row"),
        inputs=(("int8", "row", False), ("int8", "tensor", True)),
    ),
    Layout(
        name="float-quantized",
        formats=("fp8_e4m3",),
        scopes=("tensor", "row"),
        inputs=(("fp8_e4m3", "row", False), ("fp8_e4m3", "tensor", True)),
    ),
    Layout(
        name="float-quantized",
        formats=("fp8_e4m3",),
        scopes=("block",),
        group_size=128,
        inputs=(("fp8_e4m3", "group", False),),
    ),
    Layout(name="naive-quantized", formats=("fp8_e4m3",), scopes=("tensor", "row")),
    Layout(
        name="nvfp4-pack-quantized",
        formats=("fp4_e2m1",),
        scopes=("group",),
        group_size=16,
        scale_formats=("fp8_e4m3",),
        tensor_scale=True,
        inputs=(None, ("fp4_e2m1", "two levels", True)),
        scale_dtype="torch.float8_e4m3fn",
    ),
    Layout(
        name="mxfp4-pack-quantized",
        formats=("fp4_e2m1",),
        scopes=("group",),
        group_size=32,
        scale_formats=("e8m0",),
        inputs=(None, ("fp4_e2m1", "group", False)),
        scale_dtype="torch.uint8",
    ),
    Layout(
        name="mxfp8-quantized",
        formats=("fp8_e4m3",),
        scopes=("group",),
        group_size=32,
        scale_formats=("e8m0",),
        inputs=(None, ("fp8_e4m3", "group", False)),
        scale_dtype="torch.uint8",
    ),
)


def layout_of(scheme: Scheme) -> tuple[Layout | None, str]:
    """The layout of a scheme, or what is missing, from the layout that came closest."""
    reasons = [_first_difference(layout, scheme) for layout in LAYOUTS]
    found = next((layout for layout, reason in zip(LAYOUTS, reasons, strict=True) if reason is None), None)
    furthest = max((reason for reason in reasons if reason is not None), key=lambda reason: reason[0])
    return found, furthest[1]


def _first_difference(layout: Layout, scheme: Scheme) -> tuple[int, str] | None:
    """The first fact that does not fit, as (how many did before it, what is so instead)."""
    weights = scheme.weights
    assert weights is not None and weights.scaling is not None
    scaling = weights.scaling
    granularity = scaling.granularity
    inputs = _inputs_of(scheme)
    checks = (
        (weights.format in layout.formats, f"has no {weights.format} codes"),
        (scaling.symmetry in layout.symmetries, f"has no {weights.format} codes with a floating minimum"),
        (granularity.scope in layout.scopes, f"has no {weights.format} codes under scales per {granularity}"),
        (
            layout.group_size is None or granularity.group_size == layout.group_size,
            f"has {weights.format} codes under scales for {layout.group_size}, not for {granularity.group_size}",
        ),
        (scaling.scale_format in layout.scale_formats, f"has no {scaling.scale_format} scales of {weights.format}"),
        (scaling.tensor_scale == layout.tensor_scale, f"has no second level of scales of {weights.format}"),
        (scaling.element_exponent == 0, f"has no {weights.format} codes that stand for fractions"),
        (inputs in layout.inputs, _spell_inputs(scheme)),
    )
    return next(((index, text) for index, (fits, text) in enumerate(checks) if not fits), None)


def _inputs_of(scheme: Scheme) -> tuple[str, str, bool] | None:
    if scheme.activations is None:
        return None
    scaling = scheme.activations.scaling
    scope = "none" if scaling is None else "two levels" if scaling.tensor_scale else scaling.granularity.scope
    return scheme.activations.format, scope, scheme.static_activations


def _spell_inputs(scheme: Scheme) -> str:
    inputs = scheme.activations
    if inputs is not None and has_tensor_scale(inputs):
        return (
            f"stores the tensor scale of {inputs.format} inputs, and {scheme.name} finds it on every call; "
            "a scheme that finds it in calibration, or leaves inputs alone, can be written"
        )
    assert scheme.weights is not None
    return f"has no {scheme.weights.format} weights with inputs in {'16 bits' if inputs is None else inputs}"


def has_tensor_scale(tensor: TensorScheme | None) -> bool:
    """Whether numbers are under two levels of scales."""
    return tensor is not None and tensor.scaling is not None and tensor.scaling.tensor_scale
