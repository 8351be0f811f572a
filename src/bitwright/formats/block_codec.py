"""What every block format can do, however it is stored: values → blocks → values, and its row in a table.

A block format cuts the last dimension of an array into blocks that share a scale. The catalog holds two kinds:

    BlockFormat (`blocks`)     codes of a scalar format and one scale a block: MX, NVFP4, block floating point
    GgufFormat  (`gguf_blocks`) bytes, packed as ggml packs them

Both compute in fp32 and give fp32 values back. An fp64 input is taken only where fp32 holds it exactly: rounding to
fp32 first and to the block's elements afterwards is not one rounding, and would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bitwright.errors import FormatError
from bitwright.formats.encode import as_array, exact_float64
from bitwright.formats.round import MAX_RANDOM_BITS

Floats32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRow:
    """One block format in a table."""

    #: Canonical name.
    name: str
    #: Bits of storage for one value, its share of the block's scales included; a scale per tensor is not.
    bits_per_value: float
    #: What one code is, by the name of its format where it has one.
    element: str
    #: Values that share a scale.
    block_size: int
    #: How the scale is stored.
    scale_format: str
    #: How the scale follows from the block's values.
    rule: str
    #: Largest value that some block can hold.
    max: float
    #: What else the format is called.
    aliases: tuple[str, ...]
    #: Document and section.
    source: str


class BlockCodec(Protocol):
    """A member of the catalog of block formats."""

    @property
    def name(self) -> str:
        """Canonical name."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names, accepted by `formats.resolve` only."""

    @property
    def source(self) -> str:
        """Document and section that define the format."""

    @property
    def golden(self) -> tuple[Any, ...]:
        """Blocks by hand from that document; a user's own format may have none."""

    @property
    def block_size(self) -> int:
        """Values that share a scale."""

    @property
    def allows_short_blocks(self) -> bool:
        """The last dimension may end in a shorter block; otherwise it must be a multiple of `block_size`."""

    @property
    def code_bits(self) -> int:
        """Bits of one code, scales left out."""

    @property
    def row(self) -> BlockRow:
        """The format in a table."""

    def encode(
        self,
        x: npt.ArrayLike,
        rounding: str = "nearest_even",
        *,
        seed: int | None = None,
        random_bits: int = MAX_RANDOM_BITS,
    ) -> Any:
        """Return how `x` (exact in fp32, any shape) is stored."""

    def decode(self, stored: Any) -> Floats32:
        """Return the values of what `encode` gave: fp32."""


def describe_blocks(codecs: Iterable[BlockCodec]) -> tuple[BlockRow, ...]:
    """Return the rows of many block formats: wide before narrow, then by name."""
    return tuple(sorted((codec.row for codec in codecs), key=lambda row: (-row.bits_per_value, row.name)))


def exact_float32(x: npt.ArrayLike) -> Floats32:
    """Return `x` as fp32, refusing what fp32 would change.

    Raises:
        FormatError: not real numbers, or values that fp32 does not hold exactly.
    """
    array = as_array(x)
    if array.dtype in (np.dtype(np.float32), np.dtype(np.float16)):
        return array.astype(np.float32, copy=False)
    wide = exact_float64(array)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    changed = (narrow != wide) & ~np.isnan(wide)
    if changed.any():
        raise FormatError(
            f"{int(changed.sum())} of {wide.size} values do not fit fp32 exactly, such as {float(wide[changed][0])!r}; "
            "block formats start from fp32, so round to it first: x.astype(numpy.float32)"
        )
    return narrow
