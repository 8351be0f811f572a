"""Integers of 2 to 8 bits and of 16, two's complement and unsigned.

The range is the whole code range (int8: −128 to 127). Whether a scheme uses it symmetrically (−127 to 127) is the
scheme's business; so are scales and zero points.
"""

from __future__ import annotations

from bitwright.formats.types import IntFormat

_TWOS_COMPLEMENT = "ISO/IEC 9899:2024 (C23) §6.2.6.2: two's complement, sign bit worth −2**(bits−1)"
_UNSIGNED = "ISO/IEC 9899:2024 (C23) §6.2.6.2: pure binary representation"

FORMATS = (
    IntFormat(
        name="int16",
        bits=16,
        signed=True,
        aliases=("i16", "s16"),
        source=_TWOS_COMPLEMENT,
        golden=((0x0000, 0.0), (0x0001, 1.0), (0x7FFF, 32767.0), (0x8000, -32768.0), (0xFFFF, -1.0)),
    ),
    IntFormat(
        name="int8",
        bits=8,
        signed=True,
        aliases=("i8", "s8"),
        source=_TWOS_COMPLEMENT,
        golden=((0x00, 0.0), (0x01, 1.0), (0x7F, 127.0), (0x80, -128.0), (0xFF, -1.0)),
    ),
    IntFormat(
        name="int7",
        bits=7,
        signed=True,
        aliases=("i7", "s7"),
        source=_TWOS_COMPLEMENT,
        golden=((0x00, 0.0), (0x01, 1.0), (0x3F, 63.0), (0x40, -64.0), (0x7F, -1.0)),
    ),
    IntFormat(
        name="int6",
        bits=6,
        signed=True,
        aliases=("i6", "s6"),
        source=_TWOS_COMPLEMENT,
        golden=((0x00, 0.0), (0x01, 1.0), (0x1F, 31.0), (0x20, -32.0), (0x3F, -1.0)),
    ),
    IntFormat(
        name="int5",
        bits=5,
        signed=True,
        aliases=("i5", "s5"),
        source=_TWOS_COMPLEMENT,
        golden=((0x00, 0.0), (0x01, 1.0), (0x0F, 15.0), (0x10, -16.0), (0x1F, -1.0)),
    ),
    IntFormat(
        name="int4",
        bits=4,
        signed=True,
        aliases=("i4", "s4"),
        source=_TWOS_COMPLEMENT,
        golden=((0x0, 0.0), (0x1, 1.0), (0x7, 7.0), (0x8, -8.0), (0xF, -1.0)),
    ),
    IntFormat(
        name="int3",
        bits=3,
        signed=True,
        aliases=("i3", "s3"),
        source=_TWOS_COMPLEMENT,
        golden=((0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, -4.0), (5, -3.0), (6, -2.0), (7, -1.0)),
    ),
    IntFormat(
        name="int2",
        bits=2,
        signed=True,
        aliases=("i2", "s2"),
        source=_TWOS_COMPLEMENT,
        golden=((0, 0.0), (1, 1.0), (2, -2.0), (3, -1.0)),
    ),
    IntFormat(
        name="uint8",
        bits=8,
        signed=False,
        aliases=("u8",),
        source=_UNSIGNED,
        golden=((0x00, 0.0), (0x01, 1.0), (0x80, 128.0), (0xFF, 255.0)),
    ),
    IntFormat(
        name="uint6",
        bits=6,
        signed=False,
        aliases=("u6",),
        source=_UNSIGNED,
        golden=((0x00, 0.0), (0x01, 1.0), (0x20, 32.0), (0x3F, 63.0)),
    ),
    IntFormat(
        name="uint5",
        bits=5,
        signed=False,
        aliases=("u5",),
        source=_UNSIGNED,
        golden=((0x00, 0.0), (0x01, 1.0), (0x10, 16.0), (0x1F, 31.0)),
    ),
    IntFormat(
        name="uint4",
        bits=4,
        signed=False,
        aliases=("u4",),
        source=_UNSIGNED,
        golden=((0x0, 0.0), (0x1, 1.0), (0x8, 8.0), (0xF, 15.0)),
    ),
    IntFormat(
        name="uint3",
        bits=3,
        signed=False,
        aliases=("u3",),
        source=_UNSIGNED,
        golden=((0, 0.0), (1, 1.0), (4, 4.0), (7, 7.0)),
    ),
    IntFormat(
        name="uint2",
        bits=2,
        signed=False,
        aliases=("u2",),
        source=_UNSIGNED,
        golden=((0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)),
    ),
)
