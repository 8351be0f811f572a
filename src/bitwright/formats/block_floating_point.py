"""Classic block floating point: N integer mantissas of m bits share one 8-bit exponent.

    value = k · 2**(E − (m − 2)),   k in two's complement, −2**(m−1) … 2**(m−1) − 1

E is the exponent of the block's largest magnitude, stored as E8M0, so that mantissas lie in [−2, 2) in steps of
2**-(m−2): the convention of MXINT8, which is the case N = 32, m = 8. (Others write the mantissa in [−1, 1) and store
E + 1; the values are the same.)

Source: J. H. Wilkinson, Rounding Errors in Algebraic Processes (1963), chapter 1, on block floating vectors; the
encoding of exponent and mantissa as in OCP MX 1.0, E8M0 and INT8.
Rejected: sign-magnitude mantissas, which spend a code on −0; more than 24 bits, whose values fp32 does not hold.
"""

from __future__ import annotations

from bitwright.errors import FormatError
from bitwright.formats.blocks import MAX_ELEMENT_BITS, BlockFormat, GoldenBlock
from bitwright.formats.types import FloatFormat, IntFormat

_SOURCE = "J. H. Wilkinson, Rounding Errors in Algebraic Processes (1963), ch. 1; coded as MXINT8 is (OCP MX 1.0)"
_MANTISSA = "two's complement mantissa with 2 bits before the point (OCP MX 1.0, INT8)"


def blocks_of_shared_exponent(
    *, exponent: FloatFormat, block_size: int, mantissa_bits: int, name: str | None = None
) -> BlockFormat:
    """Return the record for blocks of `block_size` mantissas of `mantissa_bits` bits, the sign included.

    Args:
        exponent: how the shared exponent is stored (E8M0).
        block_size: N, at least 1.
        mantissa_bits: m, 2 to 24.
        name: "bfp{m}_b{N}" unless given.

    Raises:
        FormatError: a size out of range.
    """
    if not 2 <= mantissa_bits <= MAX_ELEMENT_BITS:
        raise FormatError(
            f"block floating point has {mantissa_bits}-bit mantissas; give 2 to {MAX_ELEMENT_BITS}, the sign included"
        )
    one = 1 << (mantissa_bits - 2)
    mantissa = IntFormat(
        name=f"int{mantissa_bits}",
        bits=mantissa_bits,
        signed=True,
        source=_MANTISSA,
        golden=((0, 0.0), (one, float(one)), (2 * one, -2.0 * one)),
    )
    step = 1 / one
    return BlockFormat(
        name=name or f"bfp{mantissa_bits}_b{block_size}",
        element=mantissa,
        element_exponent=2 - mantissa_bits,
        block_size=block_size,
        scale=exponent,
        scale_rule="ocp_floor",
        source=_SOURCE,
        golden=(
            GoldenBlock(
                scale_code=0x80,
                codes=(0, one, 2 * one - 1, 2 * one, 4 * one - 1),
                values=(0.0, 2.0, 4.0 - 2 * step, -4.0, -2 * step),
            ),
        ),
    )
