"""One product: from x and the parts of a matrix to the call of a kernel, and to y.

Legend: M tokens, N rows and K columns of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bitwright import formats
from bitwright.quantize.backends.cpu.arrays import array_of, run_rows
from bitwright.quantize.backends.cpu.features import processor_features
from bitwright.quantize.backends.cpu.matmul import DIRECT, SCALED, Sizes, multiply_tiles, multiply_tiles_parallel
from bitwright.quantize.backends.cpu.matmul_layout import constant, pair_bytes
from bitwright.quantize.backends.cpu.matmul_numbers import Expansion, floats_expansion
from bitwright.quantize.backends.cpu.matmul_operands import blocks_of, group_sums
from bitwright.quantize.backends.cpu.matmul_parts import Parts, Side
from bitwright.quantize.backends.cpu.matmul_ways import Step, Way, constants_of, scales_vary, way_of

#: Tokens that one call takes: beyond, their sums would leave the second cache.
MAX_TOKENS = 512
#: Codes that a kernel multiplies in the time in which others round one number (`arrays.MIN_PER_THREAD` counts those).
_SPEED = 16
_ALL = 1 << 30
_ONE = np.ones(1, np.float32)
_NO_SUMS = np.zeros((0, 0), np.float32)


def multiply(
    x_MK: Tensor,
    parts: Parts,
    tensors: Mapping[str, Tensor],
    *,
    features: frozenset[str] | None = None,
    step: Step | None = None,
) -> Tensor:
    """x Wᵀ, [M, N] in the dtype of x.

    Args:
        x_MK: fp32, bf16 or fp16.
        parts: how the weight is kept, and
        tensors: what is kept (`Parts.lay`).
        features: of the processor that are made use of; None: all that it has.
        step: what is done; None: as the way says that the product goes.
    """
    tokens, rows = x_MK.shape[0], parts.shape[0]
    if tokens == 0:
        return x_MK.new_empty(0, rows)
    call = call_of(parts, x_MK.dtype, features)
    if tokens <= MAX_TOKENS:
        return _product(x_MK, parts, tensors, call, step or call.way.step(tokens))
    return torch.cat([multiply(some, parts, tensors, features=features, step=step) for some in x_MK.split(MAX_TOKENS)])


def way_of_parts(parts: Parts, dtype: torch.dtype, features: frozenset[str]) -> Way:
    """The way that products of such a weight go."""
    scaling = parts.scheme.scaling
    scale = None if scaling is None else formats.FORMATS[scaling.scale_format]
    return way_of(parts.number, scale, parts.tiles.group_columns, dtype, features)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """What every product with a matrix has in common."""

    way: Way
    #: How scales and offsets are expanded; None without, or where they are no codes.
    sides: tuple[Expansion | None, ...]
    sizes: Sizes
    scales_vary: bool
    #: `arguments` of steps that were asked for.
    known: dict[Step, tuple[Any, ...]]

    def arguments(self, step: Step) -> tuple[Any, ...]:
        """Tables, sizes and constants, as kernels take them."""
        found = self.known.get(step)
        if found is None:
            found = self.known[step] = self._arguments(step)
        return found

    def _arguments(self, step: Step) -> tuple[Any, ...]:
        way = self.way
        expansions = (way.scaled_expansion if step.mode == SCALED else way.expansion, *self.sides)
        run_pairs = _ALL if step.mode == DIRECT else way.run_pairs
        return (
            tuple(_ONE if found is None else found.entries for found in expansions),
            self.sizes._replace(run_pairs=run_pairs, scales_vary=step.mode == SCALED and self.scales_vary),
            (*map(constants_of, expansions), *map(constant, (step.columns, step.vectors, step.mode))),
        )


@cache
def call_of(parts: Parts, dtype: torch.dtype, features: frozenset[str] | None = None) -> Call:
    """What products with a matrix have in common; see `multiply`."""
    features = processor_features() if features is None else features
    tiles, scaling = parts.tiles, parts.scheme.scaling
    if scaling is None:
        rows_of_scale = tiles.rows
    else:
        assert parts.scales is not None
        rows_of_scale = scaling.granularity.group_rows(tiles.rows) if parts.scales.is_shared else 0
    sizes = Sizes(
        rows=tiles.rows,
        num_groups=tiles.num_groups,
        group_pairs=tiles.group_pairs,
        last_pairs=tiles.last_pairs,
        pair_bytes=pair_bytes(tiles.bits),
        rows_of_scale=rows_of_scale,
        has_zero_points=scaling is not None and scaling.symmetry == "zero_point",
        scale_unit=1.0 if scaling is None else 2.0**scaling.element_exponent,
        scales_vary=False,
        run_pairs=_ALL,
    )
    return Call(
        way=way_of_parts(parts, dtype, features),
        sides=tuple(_expansion_of(side, features) for side in (parts.scales, parts.offsets)),
        sizes=sizes,
        known={},
        scales_vary=scaling is not None and scales_vary(formats.FORMATS[scaling.scale_format]),
    )


def _expansion_of(side: Side | None, features: frozenset[str]) -> Expansion | None:
    """How scales or offsets that are kept as codes become numbers; None without such."""
    return None if side is None or side.tiles is None else floats_expansion(side.number, features)


def _product(x_MK: Tensor, parts: Parts, tensors: Mapping[str, Tensor], call: Call, step: Step) -> Tensor:
    x, takes_pairs = x_MK.detach(), call.way.takes_pairs
    blocks = blocks_of(x if takes_pairs else x.float(), parts.tiles, step.columns)
    y_MN = torch.empty(len(x), parts.shape[0])
    codes, scales, offsets, factor = operands_of(tensors)
    sums = _NO_SUMS if offsets is None else group_sums(x, parts.tiles).numpy()
    arrays = (codes, blocks.numpy().view(np.uint32) if takes_pairs else blocks.numpy(), y_MN.numpy())
    arguments = (factor, *call.arguments(step))
    num_tiles, work = parts.tiles.num_tiles, work_of(parts, blocks.shape[0])
    run_rows(multiply_tiles, multiply_tiles_parallel, (*arrays, scales, offsets, sums), num_tiles, arguments, work)
    return y_MN.to(x.dtype)


def operands_of(tensors: Mapping[str, Tensor]) -> tuple[Any, Any, Any, Any]:
    """Codes, scales, offsets (None without) and the factor of all outputs, as kernels take them."""
    scales, offsets, tensor_scale = (tensors.get(name) for name in ("scales", "offsets", "tensor_scale"))
    return (
        tensors["codes"].numpy().reshape(-1),
        _ONE if scales is None else _array(scales),
        None if offsets is None else _array(offsets),
        _ONE if tensor_scale is None else tensor_scale.reshape(1).numpy(),
    )


def work_of(parts: Parts, num_blocks: int) -> int:
    """What a product with so many blocks of columns of x takes, in numbers that other kernels round."""
    return parts.shape[0] * parts.shape[1] * num_blocks // _SPEED


def _array(stored: Tensor) -> npt.NDArray[Any]:
    return stored.numpy().reshape(-1) if stored.dtype == torch.uint8 else array_of(stored)
