"""Blocks of numbers that share a scale: OCP MX, NVFP4, block floating point. The exact arithmetic, in fp32.

The last dimension is cut into blocks of `block_size`; its last block may be shorter, and nothing is padded. With
``top = element.max · 2**element_exponent`` and ``amax = max |x|`` of a block, in this order, each step one operation of
fp32:

    ideal            by a rule of `block_scales`, from amax and top; with two levels, times the encode scale S
    scale            ideal, to nearest even in the scale format, saturating: E8M0 clamps exponents to ±127. An amax of 0
                     has ideal 0, which E8M0, having no zero, stores as 2**-127
    unit             (scale · tensor_scale) · 2**element_exponent
    code             element(x / unit), saturating: a true division by the *stored* scale. A unit of 0 (a scale that
                     rounded to zero) divides as infinity does, so that codes are 0 and keep the sign of x
    value            code · unit

`scale` and `tensor_scale` (1 with one level) multiply codes back to values.

NaN or Inf in a block: its scale is stored as NaN (E8M0 0xFF, E4M3 0x7F), its codes are 0, all its values are NaN, and
other blocks are none the worse (a two-level tensor scale ignores the block). MX 1.0 gives the NaN scale this
meaning; torchao writes it for Inf too, where Transformer Engine writes the largest scale and hides the fault.

fp32 at its ends. Under a power of two the division is exact unless the quotient is subnormal: elements below
2**-126 · unit, far under half the smallest element, so that no rounding to nearest can tell; a quotient that underflows
to 0 is 0 to `up` and `down` too. At scale 2**-127 (itself an fp32 subnormal) amax is below 2**(emax − 126), and
x / 2**-127 is exact and small; scales above 2**(127 − emax) never arise under ocp_floor. Kernels must not flush
subnormals. Values beyond fp32 become ±Inf: inputs at its very end, under a scale or in a code that was rounded up.

Integers use their whole two's complement range: MX 1.0 leaves that choice for INT8, and rounding to the nearest number
is then one rule for all.
Rejected: multiplying x by 1 / unit, as some kernels do, which moves numbers that lie on ties; padding short blocks,
since the padding would be stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bitwright.catalog import nearest_name_hint
from bitwright.errors import FormatError, UnknownName
from bitwright.formats.block_codec import BlockRow, Floats32, exact_float32
from bitwright.formats.block_scales import FLOAT32_MAX, SCALE_RULES, ScaleRule, tensor_scales
from bitwright.formats.decode import decode_codes
from bitwright.formats.encode import encode_values
from bitwright.formats.round import MAX_RANDOM_BITS
from bitwright.formats.types import FloatFormat, Format

#: Element codes of up to this width are exact in fp32, and so are their products with a power of two.
MAX_ELEMENT_BITS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenBlock:
    """One block as the standard defines it."""

    scale_code: int
    codes: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockCodes:
    """Blocks as they are stored.

    codes: [..., K] unsigned; scale_codes: [..., ceil(K / block_size)] unsigned; tensor_scale: fp32, or None with one
    level of scales. For a 0-dimensional input `codes` is 0-dimensional and `scale_codes` has shape [1].
    """

    codes: npt.NDArray[Any]
    scale_codes: npt.NDArray[Any]
    tensor_scale: np.float32 | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """Codes of one scalar format under one scale a block. Elements and scales are records, not names: an element may
    be a format that has no name of its own (the m-bit mantissas of block floating point).

    Raises:
        FormatError: the fields contradict each other.
    """

    #: Canonical name.
    name: str
    #: What a code is.
    element: Format
    #: Codes stand for the element's value times two to this (MXINT8: −6).
    element_exponent: int = 0
    #: Values that share a scale.
    block_size: int
    #: How a scale is stored.
    scale: FloatFormat
    #: How a scale follows from the block: a name in `SCALE_RULES`.
    scale_rule: ScaleRule
    #: Two levels: block scales are stored relative to one fp32 scale per tensor.
    tensor_scale: bool = False
    #: Other names, accepted by `formats.resolve` only.
    aliases: tuple[str, ...] = ()
    #: Document and section that the facts come from.
    source: str
    #: Blocks derived from that section (tensor_scale 1). Formats of the catalog have some; a user's own may go without.
    golden: tuple[GoldenBlock, ...] = ()

    def __post_init__(self) -> None:
        if self.scale_rule not in SCALE_RULES:
            known = list(SCALE_RULES)
            raise UnknownName(
                f"unknown scale rule {self.scale_rule!r}{nearest_name_hint(self.scale_rule, known)} "
                f"Known: {', '.join(known)}"
            )
        if self.block_size < 1:
            raise FormatError(f"block format '{self.name}' has blocks of {self.block_size} values; give at least 1")
        if self.element.bits > MAX_ELEMENT_BITS or self.element.max > FLOAT32_MAX:
            raise FormatError(
                f"block format '{self.name}' has elements of {self.element.bits} bits up to {self.element.max:g}; its "
                f"arithmetic is fp32, so choose elements of at most {MAX_ELEMENT_BITS} bits within fp32's range"
            )
        if not isinstance(self.scale, FloatFormat) or not self.scale.has_nan:
            raise FormatError(
                f"block format '{self.name}' stores scales in {self.scale.name}, which has no NaN to mark a block that "
                "holds NaN or Inf; choose a float format with NaN, such as e8m0, fp8_e4m3, bf16, fp16 or fp32"
            )
        if self.tensor_scale and self.scale_rule != "amax":
            raise FormatError(
                f"block format '{self.name}' has a tensor scale under the rule '{self.scale_rule}'; a second level "
                "serves scales of short range only, under the rule 'amax'"
            )
        if not self.source.strip():
            raise FormatError(f"block format '{self.name}' has no source; name the document that its facts come from")

    @property
    def scale_format(self) -> str:
        """Name of the format in which a scale is stored."""
        return self.scale.name

    @property
    def code_bits(self) -> int:
        """Bits of one code, scales left out."""
        return self.element.bits

    @property
    def bits_per_value(self) -> float:
        """Bits of storage for one value in a whole block; the fp32 scale of a tensor is not counted."""
        return self.element.bits + self.scale.bits / self.block_size

    @property
    def largest_element(self) -> float:
        """Largest value of a code under scale 1: the `top` of the module docstring."""
        return math.ldexp(self.element.max, self.element_exponent)

    @property
    def max(self) -> float:
        """Largest value that some block can hold, with tensor_scale 1."""
        return self.largest_element * self.scale.max

    @property
    def allows_short_blocks(self) -> bool:
        """Always True."""
        return True

    @property
    def row(self) -> BlockRow:
        """The format in a table."""
        return BlockRow(
            name=self.name,
            bits_per_value=self.bits_per_value,
            element=self.element.name,
            block_size=self.block_size,
            scale_format=self.scale.name + (" × fp32 per tensor" if self.tensor_scale else ""),
            rule=self.scale_rule,
            max=self.max,
            aliases=self.aliases,
            source=self.source,
        )

    def encode(
        self,
        x: npt.ArrayLike,
        rounding: str = "nearest_even",
        *,
        seed: int | None = None,
        random_bits: int = MAX_RANDOM_BITS,
    ) -> BlockCodes:
        """Return `encode_blocks` of this format."""
        return encode_blocks(self, x, rounding, seed=seed, random_bits=random_bits)

    def decode(self, stored: BlockCodes) -> Floats32:
        """Return `decode_blocks` of this format."""
        return decode_blocks(self, stored)


def encode_blocks(
    format: BlockFormat,
    x: npt.ArrayLike,
    rounding: str = "nearest_even",
    *,
    seed: int | None = None,
    random_bits: int = MAX_RANDOM_BITS,
    tensor_amax: float | None = None,
) -> BlockCodes:
    """Return codes and scales of `x`, by the arithmetic of the module docstring.

    Args:
        format: the record.
        x: [..., K], exact in fp32; any strides, any dimension may be 0.
        rounding: how elements are rounded, a name in `ROUNDINGS`; scales follow their rule.
        seed: for stochastic rounding, as in `formats.encode`: element i of the flattened array draws for itself.
        random_bits: the same.
        tensor_amax: largest magnitude of the whole tensor where `x` is a part of it; only with two levels of scales.

    Raises:
        FormatError: `x` is not exact in fp32; `tensor_amax` for a format with one level of scales, or not finite.
        UnknownName: no such rounding.
    """
    values = exact_float32(x)
    x_K = values.reshape(1) if values.ndim == 0 else values
    amax_B = _block_amax(x_K, format.block_size)
    finite_B = np.isfinite(amax_B)
    amax_B = np.where(finite_B, amax_B, np.float32(0))
    tensor_scale: np.float32 | None = None
    inv_tensor_scale = np.float32(1)
    if format.tensor_scale:
        amax = amax_B.max(initial=np.float32(0)) if tensor_amax is None else _checked_amax(tensor_amax)
        tensor_scale, inv_tensor_scale = tensor_scales(amax, format.max)
    elif tensor_amax is not None:
        raise FormatError(f"tensor_amax={tensor_amax} was given, but {format.name} has no tensor scale; leave it out")
    with np.errstate(over="ignore", under="ignore"):
        ideal_B = SCALE_RULES[format.scale_rule](amax_B, np.float32(format.largest_element)) * inv_tensor_scale
    scale_codes_B = encode_values(format.scale, np.where(finite_B, ideal_B, np.float32(np.nan)))
    unit_B = _units(format, scale_codes_B, tensor_scale)
    divisor_B = np.where(finite_B & (unit_B != 0), unit_B, np.float32(np.inf))
    is_kept = _spread(finite_B, x_K.shape[-1], format.block_size)
    with np.errstate(over="ignore", under="ignore"):
        quotient_K = np.where(is_kept, x_K, np.float32(0)) / _spread(divisor_B, x_K.shape[-1], format.block_size)
    codes_K = encode_values(format.element, quotient_K, rounding, "saturate", seed=seed, random_bits=random_bits)
    return BlockCodes(codes=codes_K.reshape(values.shape), scale_codes=scale_codes_B, tensor_scale=tensor_scale)


def decode_blocks(format: BlockFormat, stored: BlockCodes) -> Floats32:
    """Return the values of stored blocks: fp32, the shape of ``stored.codes``.

    Raises:
        FormatError: the shapes do not belong together, a code is out of range, or the tensor scale is missing.
    """
    if not isinstance(stored, BlockCodes):
        raise FormatError(
            f"{format.name} is decoded from what encode gave, codes and scales (BlockCodes), not from a "
            f"{type(stored).__name__}"
        )
    codes = np.asarray(stored.codes)
    codes_K = codes.reshape(1) if codes.ndim == 0 else codes
    columns = codes_K.shape[-1]
    expected = (*codes_K.shape[:-1], -(-columns // format.block_size))
    if np.shape(stored.scale_codes) != expected:
        raise FormatError(
            f"codes of shape {codes.shape} in blocks of {format.block_size} ({format.name}) need scales of shape "
            f"{expected}, not {np.shape(stored.scale_codes)}; pass what encode gave"
        )
    if format.tensor_scale != (stored.tensor_scale is not None):
        needs = "needs the tensor scale" if format.tensor_scale else "has no tensor scale"
        raise FormatError(f"{format.name} {needs}; tensor_scale is {stored.tensor_scale}; pass what encode gave")
    unit_B = _units(format, stored.scale_codes, stored.tensor_scale)
    element_K = decode_codes(format.element, codes_K).astype(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values_K: Floats32 = element_K * _spread(unit_B, columns, format.block_size)
    return values_K.reshape(codes.shape)


def round_blocks(
    format: BlockFormat,
    x: npt.ArrayLike,
    rounding: str = "nearest_even",
    *,
    seed: int | None = None,
    random_bits: int = MAX_RANDOM_BITS,
    tensor_amax: float | None = None,
) -> Floats32:
    """Return what is left of `x`: ``decode_blocks(encode_blocks(x))``, with the arguments and errors of the latter."""
    stored = encode_blocks(format, x, rounding, seed=seed, random_bits=random_bits, tensor_amax=tensor_amax)
    return decode_blocks(format, stored)


def _checked_amax(tensor_amax: float) -> np.float32:
    amax = exact_float32(tensor_amax)
    if not (np.isfinite(amax) and amax >= 0):
        raise FormatError(f"tensor_amax={tensor_amax} is not a finite magnitude; pass the largest |x| of the tensor")
    return np.float32(amax)


def _block_amax(x_K: Floats32, block_size: int) -> Floats32:
    """Largest magnitude of every block [..., B]; NaN where the block holds one."""
    columns = x_K.shape[-1]
    if columns == 0:
        return np.zeros((*x_K.shape[:-1], 0), dtype=np.float32)
    starts = np.arange(0, columns, block_size)
    amax_B: Floats32 = np.maximum.reduceat(np.abs(x_K), starts, axis=-1)
    return amax_B


def _units(format: BlockFormat, scale_codes_B: npt.NDArray[Any], tensor_scale: np.float32 | None) -> Floats32:
    """What multiplies the value of a code: fp32 [..., B]."""
    scale_B = decode_codes(format.scale, scale_codes_B).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        if tensor_scale is not None:
            scale_B = scale_B * np.float32(tensor_scale)
        return np.ldexp(scale_B, format.element_exponent)


def _spread(per_block_B: npt.NDArray[Any], columns: int, block_size: int) -> npt.NDArray[Any]:
    """Repeat one entry a block to one entry a value: [..., B] → [..., K]."""
    return np.repeat(per_block_B, block_size, axis=-1)[..., :columns]
