"""How long a matrix product takes, by its shape: tiles in waves, bytes, and what starting costs.

A kernel cuts the output [m, n] into tiles; each of a device's `u` processors computes one at a time, so tiles come in
waves, and the last one may be nearly empty. Along k the sum may be split over `c` processors. For a choice of tile:

    computing   ⌈⌈m/tm⌉·⌈n/tn⌉·c / u⌉ · 2·tm·tn·(k/c + k₀) / (peak/u · share · tile's share)
                and where c > 1 its parts are written: 4·m·n·c / (memory_share · bandwidth)
    moving      (m·k·bₓ + n·k·b_w + m·n·b_y + half_bytes) / (memory_share · bandwidth)
    time        launch + (computing^p + moving^p)^(1/p)

and the library takes the tile that is least; up to 16 rows it may take none (a kernel of vectors). `k₀` columns are
what filling and draining a tile costs; `p` says how far moving hides behind computing. Bytes that a transfer needs to
reach half of the bandwidth are a constant added to it.

One fixed share of the peak misses by 13 % on published products of an H100 with more than 512 rows, and by 21 to 27 %
below; see `benchmarks/comm_accuracy.py` for what this form misses by, on shapes that it was not fitted to as well.
Source of the form: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantisation).

Low precision costs its codes: `quantize_time_s` is what reads, rounds and writes an operand. A scale found on the
tensor itself takes one more pass over it first. Every time is *predicted*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bitwright import formats
from bitwright.hardware.device import Device
from bitwright.hardware.roofline import compute_format, matmul_tflops, raise_if_not_positive
from bitwright.parallel.efficiency import Efficiency

#: Rows and columns of a tile, and the share of a full tile's rate that it reaches.
TILES: tuple[tuple[int, int, float], ...] = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (64, 256, 0.95),
    (256, 64, 0.95),
    (128, 64, 0.8),
    (64, 128, 0.8),
    (64, 64, 0.6),
)
#: Up to so many rows there are kernels without tiles, which multiply outside matrix units at this share of their rate.
VECTOR_ROWS = 16
VECTOR_SHARE = 0.25
#: Over how many processors a sum may be split.
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmTime:
    """The predicted time of one product, and its parts."""

    seconds: float
    compute_s: float
    memory_s: float
    bound: Literal["compute", "memory"]
    #: Rows and columns of the tile that is least, and over how many processors its sum is split.
    tile: tuple[int, int, int]
    compute_format: str


def gemm_time(
    device: Device,
    efficiency: Efficiency,
    *,
    m: int,
    n: int,
    k: int,
    format: str = "bf16",
    x_bits: float | None = None,
    w_bits: float | None = None,
    y_bits: float = 16.0,
    count: int = 1,
    splits: tuple[int, ...] = SPLITS,
) -> GemmTime:
    """Return the predicted time of ``y[m, n] = x[m, k] · w[n, k]ᵀ``.

    Args:
        device, efficiency: what its peaks are, and what kernels reach of them.
        m, n, k: rows, columns, and what is summed over.
        format: of the products; where the device has no unit for it, in the nearest wider one.
        x_bits, w_bits: stored bits of a number of each operand; None: those of the format.
        y_bits: of the result.
        count: products of that shape in one kernel (experts, heads); their tiles share the waves.
        splits: over how many processors the kernel may split a sum; (1,) for one that never does, and has no kernel
            without tiles either.

    Raises:
        HardwareError: a size is not positive, or the device has no matrix unit that holds the format.
    """
    raise_if_not_positive(m=m, n=n, k=k, count=count)
    unit, _ = compute_format(device, format)
    own = formats.FORMATS[format].bits
    x_bytes, w_bytes = (own if x_bits is None else x_bits) / 8, (own if w_bits is None else w_bits) / 8
    bandwidth = efficiency.memory_share * device.memory_gb_per_s * 1e9
    moved = count * (m * k * x_bytes + n * k * w_bytes + m * n * y_bits / 8) + efficiency.half_bytes
    memory_s = moved / bandwidth
    rate = matmul_tflops(device, unit) * 1e12 / efficiency.num_units * efficiency.share(unit)
    compute_s, tile = min(
        (_tiled_time(efficiency, rate, bandwidth, (m, n, k, count), shape, split), (*shape[:2], split))
        for shape in TILES
        for split in splits
    )
    if m <= VECTOR_ROWS and len(splits) > 1:
        vectors = 2 * m * n * k * count / (rate * efficiency.num_units * VECTOR_SHARE)
        compute_s, tile = min((compute_s, tile), (vectors, (m, 1, 1)))
    power = efficiency.sharpness
    return GemmTime(
        seconds=efficiency.launch_s + (compute_s**power + memory_s**power) ** (1 / power),
        compute_s=compute_s,
        memory_s=memory_s,
        bound="compute" if compute_s >= memory_s else "memory",
        tile=tile,
        compute_format=unit,
    )


def _tiled_time(
    efficiency: Efficiency,
    unit_flops_per_s: float,
    bandwidth: float,
    sizes: tuple[int, int, int, int],
    tile: tuple[int, int, float],
    split: int,
) -> float:
    m, n, k, count = sizes
    rows, columns, share = tile
    waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * count * split / efficiency.num_units)
    seconds = waves * 2 * rows * columns * (k / split + efficiency.prologue_columns) / (unit_flops_per_s * share)
    return seconds + (count * m * n * 4 * split / bandwidth if split > 1 else 0.0)


def move_time_s(device: Device, efficiency: Efficiency, num_bytes: float, launches: int = 1) -> float:
    """Return the predicted time of kernels that only move bytes: norms, additions, casts, the optimizer's step."""
    if num_bytes <= 0:
        return 0.0
    return launches * efficiency.launch_s + num_bytes / (efficiency.memory_share * device.memory_gb_per_s * 1e9)


def quantize_time_s(
    device: Device,
    efficiency: Efficiency,
    *,
    values: float,
    from_bits: float = 16.0,
    to_bits: float,
    writes: int = 1,
    needs_amax_pass: bool = False,
) -> float:
    """Return the predicted time of turning an operand into codes.

    Args:
        device, efficiency: as in `gemm_time`.
        values: numbers of the operand.
        from_bits, to_bits: of a number, before and as a code with its share of scales.
        writes: how many times codes are written: 2 where the transposed matrix has codes of its own.
        needs_amax_pass: whether the largest number is looked for first, in a pass of its own.
    """
    reads = 2 if needs_amax_pass else 1
    moved = values * (reads * from_bits + writes * to_bits) / 8
    return move_time_s(device, efficiency, moved, launches=reads)
