"""GGUF's super-blocks of 256: inner scales of few bits under fp16 scales. Packing of Q4_K and Q6_K, and their search.

    q4_k  8 groups of 32: d, dmin, 12 bytes of 6-bit s and m, 128 of nibbles         value = (d · s) · q − dmin · m
    q6_k  16 groups of 16: 128 bytes of low nibbles, 64 of upper bits, 16 × int8 s, d      value = (d · s) · (q − 32)

Layouts. Q4_K, nibbles: 32 bytes for every 64 values, the first 32 of them below. Its 6-bit numbers, j = 0 … 3: byte j
is s_j with the two upper bits of s_{j+4} on top, byte j + 4 the same of m, byte j + 8 the lower nibbles of s_{j+4}
(below) and m_{j+4}. Q6_K, for each half of 128 values, four runs of 32: low nibbles of runs 0 and 1 lie below, of 2 and
3 above, in 64 bytes; the upper two bits of runs 0 … 3 lie in 32 bytes, lowest first.

Decoding is exact in this order of fp32 operations. Encoding is a search that no document fixes: ours has the idea of
ggml's (try several grids a sub-block, fit scale and minimum to each by least squares, keep the best) in float64:

    q4_k   weights rms(x) + |x|. For δ in −1, −0.9, … 1: q = round((x − low) · (15 + δ) / (high − low)) in 0 … 15, where
           low = min(x, 0); scale and offset by weighted least squares, offset ≤ 0; the least weighted error wins
    q6_k   weights x². For δ in −0.9, … 0.9: q = round(x · −(32 + δ) / extreme) in −32 … 31; scale = Σ w x q / Σ w q²;
           the largest (Σ w x q)² / Σ w q² wins, which is the least error

Then inner scales are rounded against the largest of their super-block (to 63, or to −128 for the extreme one), and
codes are found again, to nearest, against what is stored. A file that ggml wrote differs in some codes.

Source: ggml, ggml-common.h (block_q4_K, block_q6_K), ggml-quants.c (dequantize_row_*, make_qkx2_quants,
make_qx_quants).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bitwright.formats.block_codec import Floats32
from bitwright.formats.gguf_blocks import Bytes, half_bytes, pack_nibbles, read_halves, unpack_nibbles

Floats = npt.NDArray[np.float64]

_SHIFTS_Q4_K = np.arange(-10, 11) / 10
_SHIFTS_Q6_K = np.arange(-9, 10) / 10


def pack_q4_k(x: Floats32) -> Bytes:
    """Pack super-blocks [n, 256] of q4_k."""
    groups = x.reshape(len(x), 8, 32).astype(np.float64)
    scale, minimum = _fit_with_minimum(groups)
    scale_half, scale_steps = _inner_steps(scale, scale.max(axis=1, keepdims=True) / 63, 0, 63)
    minimum_half, minimum_steps = _inner_steps(minimum, minimum.max(axis=1, keepdims=True) / 63, 0, 63)
    step = read_halves(scale_half).astype(np.float64) * scale_steps
    offset = read_halves(minimum_half).astype(np.float64) * minimum_steps
    codes = _nearest(groups + offset[..., None], step[..., None], 0, 15).astype(np.uint8)
    nibbles = pack_nibbles(codes.reshape(len(x), 4, 64)).reshape(len(x), 128)
    return np.concatenate([scale_half, minimum_half, pack_six_bits(scale_steps, minimum_steps), nibbles], axis=-1)


def unpack_q4_k(stored: Bytes) -> Floats32:
    """Values of q4_k super-blocks [n, 144]."""
    scale_steps, minimum_steps = unpack_six_bits(stored[:, 4:16])
    step = read_halves(stored[:, :2]) * scale_steps.astype(np.float32)
    offset = read_halves(stored[:, 2:4]) * minimum_steps.astype(np.float32)
    codes = unpack_nibbles(stored[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(np.float32)
    return (step[..., None] * codes - offset[..., None]).reshape(-1, 256)


def pack_q6_k(x: Floats32) -> Bytes:
    """Pack super-blocks [n, 256] of q6_k."""
    groups = x.reshape(len(x), 16, 16).astype(np.float64)
    scale = _fit_signed(groups)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1, keepdims=True), axis=1)
    half, steps = _inner_steps(scale, largest / -128 + 0.0, -128, 127)
    step = read_halves(half).astype(np.float64) * steps
    codes = (_nearest(groups, step[..., None], -32, 31) + 32).astype(np.uint8).reshape(len(x), 2, 4, 32)
    low = pack_nibbles(codes.reshape(len(x), 2, 128)).reshape(len(x), 128)
    top = codes >> 4
    high = (top[:, :, 0] | top[:, :, 1] << 2 | top[:, :, 2] << 4 | top[:, :, 3] << 6).reshape(len(x), 64)
    return np.concatenate([low, high, steps.astype(np.int8).view(np.uint8), half], axis=-1)


def unpack_q6_k(stored: Bytes) -> Floats32:
    """Values of q6_k super-blocks [n, 210]."""
    low = unpack_nibbles(stored[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    top = (stored[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = (low | top << 4).reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    steps = np.ascontiguousarray(stored[:, 192:208]).view(np.int8).astype(np.float32)
    step = read_halves(stored[:, 208:]) * steps
    return (step[..., None] * codes).reshape(-1, 256)


def pack_six_bits(scale_steps: npt.NDArray[Any], minimum_steps: npt.NDArray[Any]) -> Bytes:
    """Pack two times eight 6-bit numbers [n, 8] into 12 bytes, as Q4_K does."""
    s, m = scale_steps.astype(np.uint8), minimum_steps.astype(np.uint8)
    return np.concatenate(
        [
            s[:, :4] | (s[:, 4:] >> 4) << 6,
            m[:, :4] | (m[:, 4:] >> 4) << 6,
            (s[:, 4:] & 0x0F) | (m[:, 4:] & 0x0F) << 4,
        ],
        axis=-1,
    )


def unpack_six_bits(stored: Bytes) -> tuple[Bytes, Bytes]:
    """Undo `pack_six_bits`: uint8 [n, 12] → scales and minimums, uint8 [n, 8] each."""
    first, second, rest = stored[:, :4], stored[:, 4:8], stored[:, 8:]
    scale_steps = np.concatenate([first & 63, (rest & 0x0F) | (first >> 6) << 4], axis=-1)
    minimum_steps = np.concatenate([second & 63, rest >> 4 | (second >> 6) << 4], axis=-1)
    return scale_steps, minimum_steps


def _inner_steps(inner: Floats, outer: Floats, lowest: int, highest: int) -> tuple[Bytes, Floats]:
    """Store the outer scale [n, 1] as fp16 and count the inner scales [n, s] in steps of it, before it is rounded."""
    return half_bytes(outer), _nearest(inner, outer, lowest, highest)


def _nearest(x: Floats, step: Floats, lowest: int, highest: int) -> Floats:
    """round(x / step), clipped; 0 (or what is nearest to it) where the step is 0."""
    divisor = np.where(step == 0, np.inf, step)
    return np.clip(np.rint(x / divisor), lowest, highest)


def _fit_with_minimum(x: Floats) -> tuple[Floats, Floats]:
    """Scale and minimum ≥ 0 of every group [n, s, g], such that x ≈ scale · q − minimum: two [n, s]."""
    weight = np.sqrt((x * x).mean(axis=-1, keepdims=True)) + np.abs(x)
    low = np.minimum(x.min(axis=-1, keepdims=True), 0.0)
    span = x.max(axis=-1, keepdims=True) - low
    best_scale, best_low = span[..., 0] / 15, low[..., 0]
    codes = _nearest(x - low, span / 15, 0, 15)
    best_error = (weight * (span / 15 * codes + low - x) ** 2).sum(axis=-1)
    sum_w, sum_x = weight.sum(axis=-1), (weight * x).sum(axis=-1)
    for shift in _SHIFTS_Q4_K:
        codes = _nearest(x - low, span / (15 + shift), 0, 15)
        sum_q, sum_qq = (weight * codes).sum(axis=-1), (weight * codes * codes).sum(axis=-1)
        sum_xq = (weight * x * codes).sum(axis=-1)
        determinant = sum_w * sum_qq - sum_q * sum_q
        safe = np.where(determinant > 0, determinant, 1.0)
        scale, offset = (sum_w * sum_xq - sum_x * sum_q) / safe, (sum_qq * sum_x - sum_q * sum_xq) / safe
        scale = np.where(offset > 0, sum_xq / np.where(sum_qq > 0, sum_qq, 1.0), scale)
        offset = np.minimum(offset, 0.0)
        error = (weight * (scale[..., None] * codes + offset[..., None] - x) ** 2).sum(axis=-1)
        is_better = (determinant > 0) & (scale > 0) & (error < best_error)
        best_scale, best_low = np.where(is_better, scale, best_scale), np.where(is_better, offset, best_low)
        best_error = np.where(is_better, error, best_error)
    return best_scale, -best_low


def _fit_signed(x: Floats) -> Floats:
    """Signed scale of every group [n, s, g], such that x ≈ scale · q with q in −32 … 31: [n, s]."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)
    best_scale = best_gain = np.zeros(x.shape[:-1])
    for shift in _SHIFTS_Q6_K:
        codes = _nearest(x, extreme / -(32 + shift), -32, 31)
        sum_xq, sum_qq = (x**3 * codes).sum(axis=-1), ((x * codes) ** 2).sum(axis=-1)
        safe = np.where(sum_qq > 0, sum_qq, 1.0)
        is_better = sum_xq * sum_xq / safe > best_gain
        best_scale = np.where(is_better, sum_xq / safe, best_scale)
        best_gain = np.where(is_better, sum_xq * sum_xq / safe, best_gain)
    return best_scale
