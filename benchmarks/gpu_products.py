"""Packed products on a GPU: within what sums in fp32 allow, and how fast beside torch's bf16. A part of gpu_check.py.

    python benchmarks/gpu_check.py --part products      this part alone, under two minutes

Every scheme that stores codes, on a weight of 4096 × 11008, with 1 and 16 tokens of bf16, judged in float64 on the same
GPU: with n = K + 2 G + 16 roundings of 2⁻²⁴ each (K columns, G groups; Higham, Accuracy and Stability of Numerical
Algorithms, 3.1), and half a unit of y. `worst` is the largest error as a share of what is allowed. The weight comes
back bit for bit, and a second product has the same bits as the first. Times are those of gpu_check.py, its caches
emptied, beside `torch.nn.functional.linear` of the same weight in bf16. Then a few schemes on a small, odd shape, with
other dtypes and more tokens; and products of codes with codes (`scaled_mm`), where the GPU has them.

FP8 sums of matrix units are shorter than fp32 (Hopper keeps about 14 bits between two additions in fp32: DeepSeek-V3,
arXiv:2412.19437, section 3.3.2), so that those are allowed 2⁻¹⁰ of the sum of magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bitwright.quantize import MATMULS, SCHEMES, PackedMatrix, PackedTensor, Scaling, TensorScheme, pack
from bitwright.quantize.granularity import group, spread
from bitwright.quantize.matmuls.scaled_mm import multiply_scaled
from bitwright.quantize.pack import unpack_codes
from bitwright.quantize.scaled_recipes import nvidia_capability, recipe_of, why_not_codes

Rows = list[dict[str, Any]]
#: (GPU ms, whole call ms) of what is called, on a device.
Clock = Callable[[Callable[[], object], str], tuple[float, float]]

LAYOUT = MATMULS["triton"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TIMED, TIMED_TOKENS = (4096, 11008), (1, 16)
SMALL, SMALL_INPUTS = (200, 717), ((1, FP32), (2, FP16), (33, BF16), (80, BF16))
#: On the small shape: every kind of code, scales in bits, groups that straddle words.
SMALL_SCHEMES = {
    "int4_g32_zp": SCHEMES["int4_g32_zp"].weights,
    "fp6_w": SCHEMES["fp6_w"].weights,
    "nf4_g64": SCHEMES["nf4_g64"].weights,
    "uint3, zero points, groups of 20": TensorScheme(
        format="uint3", scaling=Scaling(granularity=group(20), scale_format="bf16", symmetry="zero_point")
    ),
}
SCALED = ("fp8", "fp8_block", "mxfp8", "nvfp4")
SCALED_SHAPE, SCALED_TOKENS = (512, 1024), (1, 17, 256)


def product_checks(device: str, is_dry: bool, clock: Clock) -> Iterator[tuple[str, Callable[[], Rows]]]:
    """Names and checks; dry: tiny, few, and not timed."""
    names: dict[TensorScheme, str] = {}
    for name, scheme in SCHEMES.items():
        if scheme.weights is not None and LAYOUT.why_not(scheme.weights, TIMED, "cuda", BF16) is None:
            names.setdefault(scheme.weights, name)
    large = {name: weights for weights, name in names.items()}
    small, shape, inputs = SMALL_SCHEMES, TIMED, [(tokens, BF16) for tokens in TIMED_TOKENS]
    if is_dry:
        large, small, shape = dict(list(large.items())[::9]), {}, (9, 70)
    for name, weights in large.items():
        yield (
            f"product, {name}",
            lambda n=name, w=weights: compare(n, w, shape, inputs, device, None if is_dry else clock),
        )
    for name, weights in small.items():
        yield f"product, {name}, small", lambda n=name, w=weights: compare(n, w, SMALL, SMALL_INPUTS, device, None)
    if not is_dry:
        for name in SCALED:
            yield f"codes times codes, {name}", lambda n=name: compare_scaled(n, device, clock)


def compare(
    name: str,
    scheme: TensorScheme,
    shape: tuple[int, int],
    inputs: Any,
    device: str,
    clock: Clock | None,
) -> Rows:
    """One scheme: the weight, and a product for each number of tokens and dtype."""
    weight = gaussian(shape, device)
    packed = pack(weight, scheme)
    matrix = LAYOUT.prepare(packed)
    lost = int((LAYOUT.unpack(matrix) != packed.unpack()).sum())
    rows: Rows = [{"scheme": name, "what": "weight", "num_values": weight.numel(), "num_different": lost}]
    exact, magnitudes, gamma = exact_values(packed)
    for tokens, dtype in inputs:
        x = gaussian((tokens, shape[1]), device, seed=tokens).to(dtype)
        y, again = LAYOUT.multiply(x, matrix), LAYOUT.multiply(x, matrix)
        expected, off = x.double() @ exact.T, gamma * (x.double().abs() @ magnitudes.T)
        row = {"scheme": name, "what": "product", "tokens": tokens, "dtype": str(dtype)[6:]}
        row |= judged(y, expected, off) | {"num_unrepeated": int((y != again).sum())}
        row["num_different"] += row["num_unrepeated"]
        if clock is not None:
            row |= timed(lambda x=x: LAYOUT.multiply(x, matrix), x, weight, device, clock)
            row |= {"mb": round(matrix.nbytes / 1e6, 2), "how": LAYOUT.how(tokens, matrix, dtype)}
        rows.append(row)
    return rows


def compare_scaled(name: str, device: str, clock: Clock) -> Rows:
    """Codes times codes of one scheme: checked on a small weight, timed on the large one."""
    scheme, layout = SCHEMES[name], MATMULS["scaled_mm"]
    assert scheme.weights is not None and scheme.activations is not None
    reason = why_not_codes(scheme, device, nvidia_capability(device))
    if reason is not None:
        return [{"scheme": name, "refused": reason}]
    rows: Rows = []
    for shape, all_tokens in ((SCALED_SHAPE, SCALED_TOKENS), (TIMED, TIMED_TOKENS)):
        weight = gaussian(shape, device)
        matrix = layout.prepare(pack(weight, scheme.weights))
        values = layout.unpack(matrix).double()
        for tokens in all_tokens:
            x = pack(gaussian((tokens, shape[1]), device, seed=tokens), scheme.activations)
            of_x = x.unpack().double()
            y = scaled(x, matrix)
            row = {"scheme": name, "what": "codes times codes", "tokens": tokens, "dtype": "bfloat16"}
            row |= judged(y, of_x @ values.T, 2.0**-10 * (of_x.abs() @ values.abs().T))
            if shape == TIMED:
                row |= timed(lambda x=x, w=matrix: scaled(x, w), x.unpack(BF16), weight, device, clock)
                row["mb"] = round(matrix.nbytes / 1e6, 2)
            rows.append(row)
    return rows


def scaled(x: PackedTensor, matrix: PackedMatrix) -> Tensor:
    """The product of packed inputs, whose bytes and stored scales are operands as they are."""
    assert x.scales is not None
    return multiply_scaled(
        x.codes.view(recipe_of(matrix.scheme).dtype), x.scales, matrix, x_tensor_scale=x.tensor_scale
    )


def timed(work: Callable[[], object], x: Tensor, weight: Tensor, device: str, clock: Clock) -> dict[str, Any]:
    """Times beside bf16."""
    x_bf16, weight_bf16 = x.to(BF16), weight.to(BF16)
    bf16_ms, _ = clock(lambda: F.linear(x_bf16, weight_bf16), device)
    work_ms, call_ms = clock(work, device)
    return {
        "ms": round(work_ms, 4),
        "bf16_ms": round(bf16_ms, 4),
        "call_ms": round(call_ms, 4),
        "speed_ratio": round(bf16_ms / work_ms, 2),
    }


def judged(y: Tensor, expected: Tensor, off: Tensor) -> dict[str, Any]:
    """How many outputs are further off than `off` and half a unit of y, and the largest share of that."""
    info = torch.finfo(y.dtype)
    allowed = off + (expected.abs() + off).clamp(min=info.smallest_normal) * info.eps / 2
    share = (y.double() - expected).abs() / allowed
    wrong = int((~(share <= 1)).sum())
    return {"num_values": y.numel(), "num_different": wrong, "worst": round(float(share.max()), 4)}


def exact_values(packed: PackedTensor) -> tuple[Tensor, Tensor, float]:
    """The weight in float64, the magnitudes that its terms have, and the error that a sum of them may have."""
    q, scaling, (rows, columns) = unpack_codes(packed), packed.scheme.scaling, packed.shape
    codes, groups = q.codes_NK.double(), 1
    values, magnitudes = codes, codes.abs()
    if scaling is not None:
        assert q.scales_NG is not None
        groups = scaling.granularity.num_groups(columns)
        scales = q.scales_NG.double() * (1.0 if q.tensor_scale is None else q.tensor_scale.double())
        scale = spread(scales, rows, columns, scaling.granularity)
        offsets = torch.zeros_like(q.scales_NG) if q.offsets_NG is None else q.offsets_NG
        offset = spread(offsets.double(), rows, columns, scaling.granularity)
        if scaling.symmetry == "zero_point":
            values, magnitudes = (codes - offset) * scale, (codes.abs() + offset.abs()) * scale.abs()
        else:
            values, magnitudes = codes * scale + offset, (codes * scale).abs() + offset.abs()
    n = (columns + 2 * groups + 16) * 2.0**-24
    return values, magnitudes, n / (1 - n)


def gaussian(shape: tuple[int, int], device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed))
