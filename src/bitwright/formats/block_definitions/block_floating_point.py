"""Block floating point: the default of 8 values × 8-bit mantissas under one 8-bit exponent.

Other sizes are made by `formats.block_floating_point(block_size=…, mantissa_bits=…)`, or in a format file.
"""

from __future__ import annotations

from bitwright.formats import block_floating_point

BLOCK_FORMATS = (block_floating_point(block_size=8, mantissa_bits=8, name="bfp8"),)
