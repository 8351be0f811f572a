"""Laws that every scheme of the catalog obeys, for weights and activations. A new one is tested here with no edit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import SchemeError
from bitwright.quantize import ROUNDINGS, SCHEMES, QTensor, Rounding, TensorScheme, dequantize, fake_quantize, quantize
from bitwright.quantize.scaling import Scales
from bitwright.quantize.seen import Seen


def tensor_schemes() -> dict[str, TensorScheme]:
    """Every distinct format and scaling that some scheme applies to weights or activations."""
    found: dict[TensorScheme, str] = {}
    for scheme in SCHEMES.values():
        for side, tensor in (("weights", scheme.weights), ("activations", scheme.activations)):
            if tensor is not None:
                found.setdefault(tensor, f"{scheme.name}-{side}")
    return {label: tensor for tensor, label in found.items()}


TENSOR_SCHEMES = tensor_schemes()
ALL = pytest.mark.parametrize("scheme", TENSOR_SCHEMES.values(), ids=TENSOR_SCHEMES.keys())


def which(holds: Callable[[TensorScheme], bool]) -> pytest.MarkDecorator:
    """Parametrise over the schemes for which a law holds."""
    chosen = {label: scheme for label, scheme in TENSOR_SCHEMES.items() if holds(scheme)}
    return pytest.mark.parametrize("scheme", chosen.values(), ids=chosen.keys())


SCALED = which(lambda scheme: scheme.scaling is not None)


def recovers_its_scale(scheme: TensorScheme) -> bool:
    """Whether the scale found from dequantised values is the one that made them.

    Power-of-two scales: amax keeps its binade, or saturates to the top of it. Integers with fp16 scales: the extreme
    element has the extreme code, and its product with an 11-bit scale is exact in fp32.
    """
    scaling = scheme.scaling
    if scaling is None or scaling.rule == "ocp_floor":
        return True
    is_integer = isinstance(formats.get(scheme.format), formats.IntFormat)
    return is_integer and scaling.symmetry == "symmetric" and scaling.scale_format == "fp16"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=generator(seed)) * 0.05


def one_outlier() -> Tensor:
    x = gaussian(4, 256)
    x[1, 77] = 1000.0
    return x


INPUTS: dict[str, Callable[[], Tensor]] = {
    "gaussian": lambda: gaussian(8, 256),
    "ragged last group": lambda: gaussian(5, 200),
    "narrower than a group": lambda: gaussian(3, 7),
    "one row": lambda: gaussian(1, 128),
    "one column": lambda: gaussian(6, 1),
    "zeros": lambda: torch.zeros(3, 128),
    "negative zeros": lambda: -torch.zeros(3, 128),
    "one outlier": one_outlier,
    "all positive": lambda: gaussian(4, 160).abs() + 0.5,
    "all negative": lambda: -gaussian(4, 160).abs() - 0.5,
    "constant": lambda: torch.full((3, 160), 0.3),
    "huge": lambda: gaussian(4, 160) * 1e30,
    "tiny": lambda: gaussian(4, 160) * 1e-7,
    "smaller than any fp16": lambda: gaussian(4, 160) * 1e-20,
    "fp32 subnormals": lambda: gaussian(4, 160) * 1e-40,
    "wide range": lambda: torch.exp(gaussian(6, 160) * 300).clamp(1e-20, 1e20),
    "non-contiguous": lambda: gaussian(160, 9).T,
    "every second column": lambda: gaussian(4, 320)[:, ::2],
    "no rows": lambda: torch.zeros(0, 128),
    "no columns": lambda: torch.zeros(3, 0),
    "empty": lambda: torch.zeros(0, 0),
}
ANY_INPUT = pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS.keys())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal fp32 bit patterns; any NaN equals any NaN."""
    if a.shape != b.shape:
        return False
    differs = a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)
    return not bool((differs & ~(a.isnan() & b.isnan())).any())


def spread_scales(q: QTensor) -> Tensor:
    """The size of one code step at every element, fp32 [N, K]."""
    assert q.scales_NG is not None and q.scheme.scaling is not None
    effective = q.scales_NG if q.tensor_scale is None else q.scales_NG * q.tensor_scale
    height, width = group_shape(q.scheme, *q.codes_NK.shape)
    rows, columns = (torch.arange(size) // step for size, step in zip(q.codes_NK.shape, (height, width), strict=True))
    return effective[rows][:, columns]


def group_shape(scheme: TensorScheme, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns under one scale, by what the scopes mean."""
    assert scheme.scaling is not None
    granularity = scheme.scaling.granularity
    return {
        "tensor": (rows, columns),
        "row": (1, columns),
        "group": (1, granularity.group_size),
        "block": (granularity.block_rows, granularity.group_size),
    }[granularity.scope]


@ALL
@ANY_INPUT
def test_fake_quantize_is_dequantize_of_quantize(scheme: TensorScheme, x: Callable[[], Tensor]) -> None:
    values = x()
    before = values.clone()
    together = fake_quantize(values, scheme)
    apart = dequantize(quantize(values, scheme))
    assert same_bits(together, apart)
    assert together.shape == values.shape and together.dtype == torch.float32
    assert same_bits(values, before), "the input was written to"


@SCALED
@ANY_INPUT
def test_finite_numbers_stay_finite(scheme: TensorScheme, x: Callable[[], Tensor]) -> None:
    q = quantize(x(), scheme)
    assert torch.isfinite(q.codes_NK).all()
    assert torch.isfinite(q.dequantize()).all()


@SCALED
@ANY_INPUT
def test_codes_and_scales_are_numbers_of_their_formats(scheme: TensorScheme, x: Callable[[], Tensor]) -> None:
    q = quantize(x(), scheme)
    scaling = scheme.scaling
    assert scaling is not None and q.scales_NG is not None
    codes = q.codes_NK.numpy()
    assert np.array_equal(formats.round(scheme.format, codes), codes)
    assert not (codes[codes == 0] != 0).any()
    scales = np.ldexp(q.scales_NG.numpy(), -scaling.element_exponent)
    representable = scales == 0 if scaling.scale_format == "e8m0" else np.zeros(scales.shape, dtype=bool)
    assert (representable | (formats.round(scaling.scale_format, scales) == scales)).all()
    if scaling.scale_format == "e8m0":
        assert (scales > 0).all(), "E8M0 has no zero"
    if q.offsets_NG is not None:
        stored_in = scheme.format if scaling.symmetry == "zero_point" else scaling.scale_format
        offsets = q.offsets_NG.numpy()
        assert np.array_equal(formats.round(stored_in, offsets), offsets)


@SCALED
@ANY_INPUT
def test_shapes_are_those_of_the_granularity(scheme: TensorScheme, x: Callable[[], Tensor]) -> None:
    values = x()
    rows, columns = values.shape
    q = quantize(values, scheme)
    assert scheme.scaling is not None and q.scales_NG is not None
    height, width = group_shape(scheme, rows, columns)
    if scheme.scaling.granularity.scope == "tensor":
        assert q.scales_NG.shape == (1, 1)  # of a tensor without elements too
    else:
        assert q.scales_NG.shape == (math.ceil(rows / height), math.ceil(columns / width) if columns else 0)
    assert q.scales_NG.numel() == scheme.scaling.granularity.num_scales(rows, columns)
    assert (q.offsets_NG is None) == (scheme.scaling.symmetry == "symmetric")
    assert (q.tensor_scale is None) == (not scheme.scaling.tensor_scale)


@SCALED
def test_stored_numbers_alone_give_the_same_values_again(scheme: TensorScheme) -> None:
    x = gaussian(6, 200, seed=3)
    q = quantize(x, scheme)
    assert q.scales_NG is not None
    stored = Scales(
        scale=q.scales_NG.unsqueeze(-1),
        offset=None if q.offsets_NG is None else q.offsets_NG.unsqueeze(-1),
        tensor_scale=q.tensor_scale,
    )
    assert same_bits(quantize(x, scheme, scales=stored).dequantize(), q.dequantize())
    # and the values are on the grid of those scales: quantising them against it changes nothing
    assert same_bits(quantize(q.dequantize(), scheme, scales=stored).dequantize() + 0.0, q.dequantize() + 0.0)


@which(recovers_its_scale)
def test_a_second_time_changes_nothing_where_the_scale_is_recovered(scheme: TensorScheme) -> None:
    once = fake_quantize(gaussian(8, 256), scheme)
    assert same_bits(fake_quantize(once, scheme), once)


@SCALED
def test_zeros_give_zeros(scheme: TensorScheme) -> None:
    assert torch.equal(fake_quantize(torch.zeros(3, 200), scheme), torch.zeros(3, 200))


@SCALED
def test_zero_survives_among_other_numbers_unless_a_minimum_shifts_the_grid(scheme: TensorScheme) -> None:
    assert scheme.scaling is not None
    x = gaussian(4, 256) + 0.02
    x[:, ::5] = 0.0
    kept = fake_quantize(x, scheme)[:, ::5]
    if scheme.scaling.symmetry == "minimum":
        assert (kept != 0).any()
    else:
        assert (kept == 0).all()


@which(lambda scheme: scheme.scaling is not None and isinstance(formats.get(scheme.format), formats.IntFormat))
@pytest.mark.parametrize("shape", [(4, 256), (3, 200)])
def test_errors_are_at_most_half_a_step_where_nothing_saturates(scheme: TensorScheme, shape: tuple[int, int]) -> None:
    """Integers: half a step, plus what rounding the stored scale and minimum can push the ends outside, or by which
    amax may exceed the largest code under a floored power of two: less than one step (127 · s < amax < 128 · s)."""
    number = formats.get(scheme.format)
    assert scheme.scaling is not None
    x = gaussian(*shape)
    q = quantize(x, scheme)
    step = spread_scales(q)
    ends = max(abs(number.min), abs(number.max)) * 2.0**-11 if scheme.scaling.scale_format == "fp16" else 0.0
    slack = {"symmetric": ends, "zero_point": 0.5 + ends, "minimum": 2 * ends + 0.05}[scheme.scaling.symmetry]
    slack += 0.5 if scheme.scaling.rule == "ocp_floor" else 0.0
    assert ((q.dequantize() - x).abs() <= step * (0.5 + slack + 1e-5)).all()


@SCALED
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_is_seen_and_spoils_its_own_group_only(scheme: TensorScheme, bad: float) -> None:
    assert scheme.scaling is not None
    x = gaussian(3, 256)
    x[1, 5] = bad
    values = fake_quantize(x, scheme)
    assert not torch.isfinite(values[1, 5])
    assert torch.isfinite(values[outside_group(scheme, 3, 256, 1, 5)]).all()


def outside_group(scheme: TensorScheme, rows: int, columns: int, row: int, column: int) -> Tensor:
    """Which elements of a matrix have another scale than the one at [row, column]: bool [rows, columns]."""
    height, width = group_shape(scheme, rows, columns)
    same_rows, same_columns = (
        torch.arange(rows) // height == row // height,
        torch.arange(columns) // width == column // width,
    )
    return ~(same_rows.unsqueeze(1) & same_columns)


@SCALED
def test_a_group_of_nan_stays_nan(scheme: TensorScheme) -> None:
    assert scheme.scaling is not None
    rows = group_shape(scheme, 1, 256)[0] + 1
    x = gaussian(rows, 256)
    outside = outside_group(scheme, rows, 256, 0, 0)
    x[~outside] = math.nan
    values = fake_quantize(x, scheme)
    assert values[~outside].isnan().all()
    assert torch.isfinite(values[outside]).all()
    assert outside[-1].all() or scheme.scaling.granularity.scope == "tensor"  # which is all one group


@SCALED
def test_scales_that_fp16_cannot_hold_become_zeros_without_nan(scheme: TensorScheme) -> None:
    assert scheme.scaling is not None
    x = gaussian(2, 128) * 1e-20
    q = quantize(x, scheme)
    if scheme.scaling.scale_format == "fp16":
        assert q.scales_NG is not None and (q.scales_NG == 0).all()
        assert torch.equal(q.dequantize().abs(), torch.zeros(2, 128))
    else:
        relative = (q.dequantize() - x).norm() / x.norm()
        assert relative < 0.2


@which(lambda scheme: scheme.scaling is not None and not scheme.scaling.tensor_scale)
def test_one_outlier_costs_its_own_group_only(scheme: TensorScheme) -> None:
    """Save where a scale of the whole tensor exists, which the outlier raises: every block scale loses resolution."""
    assert scheme.scaling is not None
    calm, spoiled = gaussian(4, 256), one_outlier()
    untouched = outside_group(scheme, 4, 256, 1, 77)
    assert torch.equal(fake_quantize(spoiled, scheme)[untouched], fake_quantize(calm, scheme)[untouched])
    assert fake_quantize(spoiled, scheme)[1, 77] == pytest.approx(1000.0, rel=0.25)  # floor scales clip up to 25 %


@ALL
def test_leading_dimensions_are_rows(scheme: TensorScheme) -> None:
    x = gaussian(6, 96).reshape(2, 3, 96)
    assert same_bits(fake_quantize(x, scheme), fake_quantize(x.reshape(6, 96), scheme).reshape(2, 3, 96))
    shares_rows = scheme.scaling is not None and group_shape(scheme, 6, 96)[0] > 1
    if scheme.scaling is None or not (scheme.scaling.tensor_scale or shares_rows):
        assert same_bits(fake_quantize(x[0, 0], scheme), fake_quantize(x, scheme)[0, 0])


@ALL
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int32])
def test_other_dtypes_are_refused(scheme: TensorScheme, dtype: torch.dtype) -> None:
    x = torch.ones(2, 32, dtype=dtype)
    with pytest.raises(SchemeError, match=r"fp32.*\.float\(\)"):
        quantize(x, scheme)
    with pytest.raises(SchemeError, match=r"fp32.*\.float\(\)"):
        fake_quantize(x, scheme)


def test_quantize_takes_matrices_only() -> None:
    with pytest.raises(SchemeError, match=r"shape \(2, 3, 32\)"):
        quantize(torch.ones(2, 3, 32), TENSOR_SCHEMES["int4_g128-weights"])


CHOICES = {
    f"{scheme.name}-{rounding.name}": (rounding, scheme.weights)
    for scheme in SCHEMES.values()
    for rounding in ROUNDINGS.values()
    if scheme.weights is not None and rounding.applies_to(scheme.weights)
}


@pytest.mark.parametrize(("rounding", "weights"), CHOICES.values(), ids=CHOICES.keys())
@pytest.mark.parametrize("shape", [(5, 200), (1, 576), (0, 64)])
def test_every_rounding_gives_storable_codes(rounding: Rounding, weights: TensorScheme, shape: tuple[int, int]) -> None:
    w = gaussian(*shape, seed=1)
    seen = Seen(x_TK=torch.randn(64, shape[1], generator=generator(2)))
    q = rounding.quantize(w, weights, seen)
    assert np.array_equal(formats.round(weights.format, q.codes_NK.numpy()), q.codes_NK.numpy())
    if weights.scaling is None:
        assert same_bits(q.dequantize(), fake_quantize(w, weights))
        return
    assert q.scales_NG is not None
    scales = np.ldexp(q.scales_NG.numpy(), -weights.scaling.element_exponent)
    assert np.array_equal(formats.round(weights.scaling.scale_format, scales), scales)
    assert q.codes_NK.shape == w.shape
    rtn = quantize(w, weights).dequantize()
    assert (q.dequantize() - w).norm() <= 2 * (rtn - w).norm()


@pytest.mark.parametrize(
    ("scheme", "rows", "columns", "expected_bytes"),
    [
        ("fp32", 10, 576, 10 * 576 * 4),
        ("bf16", 10, 576, 10 * 576 * 2),
        ("fp16", 10, 576, 10 * 576 * 2),
        ("int8_w", 10, 576, 10 * (576 + 4)),
        ("int8", 10, 576, 10 * (576 + 4)),
        ("fp8_w", 10, 576, 10 * (576 + 4)),
        ("fp6_w", 10, 576, 10 * (576 * 6 // 8 + 4)),
        ("int4_g128", 10, 576, 10 * (288 + 5 * 2)),  # 576 = 4 · 128 + 64: five fp16 scales
        ("int4_g64", 10, 576, 10 * (288 + 9 * 2)),
        ("int4_g32", 10, 576, 10 * (288 + 18 * 2)),
        ("int4_g128_zp", 10, 576, 10 * 288 + 10 * 5 * 20 // 8),  # + a 4-bit zero point per group
        ("int4_g32_min", 10, 576, 10 * 576 * 5 // 8),  # GGUF Q4_1: 20 bytes per 32 weights
        ("int3_g64", 10, 576, 10 * (576 * 3 // 8 + 9 * 2)),
        ("mxfp8", 10, 576, 10 * (576 + 18)),
        ("mxfp4", 10, 576, 10 * 576 * 17 // 32),  # 4.25 bits
        ("nvfp4", 10, 576, 10 * 576 * 9 // 16 + 4),  # 4.5 bits and the tensor's scale
        ("mxfp4", 1, 33, 17 + 2),
        ("mxfp6", 10, 576, 10 * (576 * 6 // 8 + 18)),  # 6.25 bits
        ("mxint8", 10, 576, 10 * (576 + 18)),
        ("bfp8", 10, 576, 10 * (576 + 72)),  # 9 bits
        ("fp8_block", 576, 7168, 576 * 7168 + 5 * 56 * 4),  # DeepSeek-V3, kv_a_proj_with_mqa
        ("nf4_g64", 10, 576, 10 * (288 + 9 * 4)),
    ],
)
def test_stored_bytes_by_closed_form(scheme: str, rows: int, columns: int, expected_bytes: int) -> None:
    weights = SCHEMES[scheme].weights
    assert weights is not None
    assert weights.stored_bytes(rows, columns) == expected_bytes


@ALL
@pytest.mark.parametrize("shape", [(3, 576), (1, 33), (7, 128)])
def test_stored_bytes_count_what_a_qtensor_holds(scheme: TensorScheme, shape: tuple[int, int]) -> None:
    q = quantize(gaussian(*shape), scheme)
    bits = q.codes_NK.numel() * formats.get(scheme.format).bits
    if scheme.scaling is not None:
        assert q.scales_NG is not None
        bits += q.scales_NG.numel() * formats.get(scheme.scaling.scale_format).bits
        if q.offsets_NG is not None:
            stored_in = scheme.format if scheme.scaling.symmetry == "zero_point" else scheme.scaling.scale_format
            bits += q.offsets_NG.numel() * formats.get(stored_in).bits
        bits += 32 if q.tensor_scale is not None else 0
    assert scheme.stored_bytes(*shape) == math.ceil(bits / 8)


def test_the_catalog_holds_the_promised_names() -> None:
    promised = "fp32 fp16 bf16 int8_w int3_g64 fp8_w fp6_w fp8 int8 mxfp8 mxfp4 nvfp4 as_loaded".split()
    promised += "fp8_block mxfp6 mxint8 bfp8 nf4_g64".split()
    promised += [f"int4_g{size}{kind}" for size in (128, 64, 32) for kind in ("", "_zp", "_min")]
    assert set(promised) <= set(SCHEMES)
    assert {"rtn", "clip"} <= set(ROUNDINGS)
    assert all(scheme.source and scheme.description for scheme in SCHEMES.values())
