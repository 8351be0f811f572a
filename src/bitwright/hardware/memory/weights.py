"""Stored bytes of one weight matrix: codes, and the scales and zero points of its groups."""

from __future__ import annotations

import math

from bitwright.hardware.sizes import raise_if_negative, raise_if_not_positive


def weight_bytes(
    *,
    out_features: int,
    in_features: int,
    code_bits: float,
    group_size: int | None = None,
    group_rows: int = 1,
    scale_bits: float = 0.0,
    zero_point_bits: float = 0.0,
    tensor_scale_bits: float = 0.0,
) -> int:
    """Return the stored bytes of one ``[out, in]`` weight: codes, the scales and zero points of its groups.

        bits = out · in · code_bits
             + ⌈out / group_rows⌉ · ⌈in / group_size⌉ · (scale_bits + zero_point_bits) + tensor_scale_bits

    A last group that is shorter than the others still has a whole scale. Codes are packed without gaps; the result is
    rounded up to bytes. Checked against GGUF's blocks of 32 (ggml-common.h): Q4_1 = 20 bytes (5 bits per weight: 4-bit
    codes, fp16 scale, fp16 minimum as `zero_point_bits`), Q8_0 = 34 bytes; OCP MX v1.0 §5: 4.25 bits for MXFP4.

    Args:
        code_bits: bits of one code (4 for int4).
        group_size: weights along `in_features` that share a scale; None = one scale per row (where `scale_bits` > 0).
        group_rows: rows that share it with them: 128 for blocks of 128 × 128.
        scale_bits, zero_point_bits: bits of one group's scale and of its zero point or minimum.
        tensor_scale_bits: bits of one more scale for the whole tensor (32 for NVFP4).

    Raises:
        HardwareError: a size is not positive, or a number of bits is negative.
    """
    raise_if_not_positive(out_features=out_features, in_features=in_features, code_bits=code_bits)
    raise_if_not_positive(group_rows=group_rows)
    raise_if_negative(scale_bits=scale_bits, zero_point_bits=zero_point_bits, tensor_scale_bits=tensor_scale_bits)
    if group_size is not None:
        raise_if_not_positive(group_size=group_size)
    groups_per_row = 1 if group_size is None else math.ceil(in_features / group_size)
    bits = out_features * in_features * code_bits
    bits += math.ceil(out_features / group_rows) * groups_per_row * (scale_bits + zero_point_bits) + tensor_scale_bits
    return math.ceil(bits / 8)
