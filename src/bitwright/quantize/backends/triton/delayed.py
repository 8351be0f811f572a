"""Triton kernel: numbers under one scale that is known beforehand, and their largest magnitude found on the way.

    inv_scale     fp32, one for all
    values        format(x · inv_scale) · (1 / inv_scale), each operation rounded by itself
    amax          max |x|, NaN if x holds one

One read and one write. The reciprocal is a division (div.rn), done by every program anew: one number, against thousands
of products. Programs agree on amax by an atomic maximum of its word: words of magnitudes are ordered like the
magnitudes, Inf and NaN last, and a maximum does not ask who came first.

Rejected: a maximum per program, since whoever reduces them is a second launch.
"""

# Kernels are written in Triton's language, which type checkers of Python do not know.
# mypy: ignore-errors

import triton
import triton.language as tl

from bitwright.quantize.backends.triton.rounding import load_fp32, round_fp32, store_fp32, to_bits

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


# inverse scales are one of many in an array: wherever it lies, the kernel is the same
@triton.jit(do_not_specialize_on_alignment=["inv_scale_pointer"])
def delayed_kernel(
    x_pointer,
    out_pointer,
    inv_scale_pointer,
    amax_pointer,
    table,
    size,
    grid: tl.constexpr,
    overflow: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`BLOCK` consecutive elements a program; ``amax[0] = max(amax[0], words of magnitudes)``."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    x = load_fp32(x_pointer + index, mask)
    # one lane: Triton's scalars have no shape to divide in
    inv_scale = tl.load(inv_scale_pointer + tl.arange(0, 1))
    scale = tl.math.div_rn(tl.full(inv_scale.shape, 1.0, tl.float32), inv_scale)
    store_fp32(out_pointer + index, round_fp32(x * inv_scale, 0, table, grid, overflow) * scale, mask, False)
    tl.atomic_max(amax_pointer, tl.max(to_bits(x) & _MAGNITUDE, axis=0), sem="relaxed")
