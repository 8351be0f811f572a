"""Number formats: what one number is, rounded exactly as a standard says. Pure Python and NumPy.

    from bitwright import formats

    formats.get("fp8_e4m3").max                   # 448.0
    formats.round("fp8_e4m3", [0.1, 500.0])       # [0.1015625, 448.0]
    formats.encode("fp8_e4m3", 1.0)               # 0x38
    formats.decode("fp8_e4m3", 0x38)              # 1.0
    formats.table("fp4_e2m1")                     # [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0, -0.5, …]
    formats.resolve("torch.float8_e4m3fn")        # "fp8_e4m3": names of other libraries, at the borders only

What a record holds is in `types`, bit layout → value in `decode`, rounding in `round`, random bits in `philox`,
overflow in `encode`; each family of formats is one file in `definitions`, and a user's own come from a `format_file`.
This is the reference: every fast kernel agrees with it bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bitwright.catalog import Catalog, nearest_name_hint
from bitwright.errors import FormatError, UnknownName
from bitwright.formats.decode import decode_codes, value_table
from bitwright.formats.describe import FormatRow, describe_all
from bitwright.formats.encode import OVERFLOWS, OverflowRule, OverflowValues, encode_values, overflow_values
from bitwright.formats.format_file import read_format_file
from bitwright.formats.round import MAX_RANDOM_BITS, ROUNDINGS, RoundingMode
from bitwright.formats.types import CodebookFormat, FloatFormat, Format, IntFormat, Specials

__all__ = [
    "FORMATS",
    "OVERFLOWS",
    "ROUNDINGS",
    "CodebookFormat",
    "FloatFormat",
    "Format",
    "FormatRow",
    "IntFormat",
    "OverflowRule",
    "OverflowValues",
    "RoundingMode",
    "Specials",
    "add",
    "decode",
    "encode",
    "get",
    "names",
    "overflow_values",
    "read_format_file",
    "resolve",
    "round",
    "rows",
    "table",
]

#: Every format, by canonical name.
FORMATS: Catalog[Format] = Catalog(
    kind="format",
    package="bitwright.formats.definitions",
    attribute="FORMATS",
    record_type=(FloatFormat, IntFormat, CodebookFormat),
)


def names() -> tuple[str, ...]:
    """Return the canonical name of every format, sorted."""
    return tuple(sorted(FORMATS))


def get(name: str) -> Format:
    """Return the record of a format by its canonical name.

    Raises:
        UnknownName: no format has that name; the nearest one is suggested.
    """
    return FORMATS[name]


def resolve(text: str) -> str:
    """Return the canonical name for a canonical name or an alias of another library.

    For the borders (command line, files, checkpoints) only. Case and the prefix "torch." do not matter.

    Raises:
        UnknownName: neither; the nearest name is suggested.
    """
    written = text.strip().lower().removeprefix("torch.")
    if written in FORMATS:
        return written
    aliases = _aliases()
    if written not in aliases:
        hint = nearest_name_hint(written, [*names(), *aliases])
        raise UnknownName(f"unknown format {text!r}{hint} Known formats: {', '.join(names())}")
    return aliases[written]


def table(name: str) -> npt.NDArray[np.float64]:
    """Return the value of every code: float64 ``[2**bits]``, read-only.

    Raises:
        FormatError: the format has more than 20 bits.
        UnknownName: no format has that name.
    """
    return value_table(FORMATS[name])


def decode(name: str, codes: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the value of every code: integers in ``[0, 2**bits)``, any shape → float64, the same shape.

    Raises:
        FormatError: `codes` are not integers, or one is out of range.
        UnknownName: no format has that name.
    """
    return decode_codes(FORMATS[name], codes)


def encode(
    name: str,
    x: npt.ArrayLike,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    *,
    seed: int | None = None,
    random_bits: int = MAX_RANDOM_BITS,
) -> npt.NDArray[Any]:
    """Return the code that every value rounds to: real numbers, any shape → uint8/16/32/64, the same shape.

    Args:
        name: canonical name of the format.
        x: values that float64 holds exactly.
        rounding: a name in `ROUNDINGS`.
        overflow: a name in `OVERFLOWS`.
        seed: in [0, 2**64); needed, and read, by stochastic rounding only. The same seed draws the same bits.
        random_bits: 1 to 32, of each element; read by stochastic rounding only.

    Raises:
        FormatError: `x` is not exact in float64, or holds NaN and the format has none, or the seed is missing.
        UnknownName: no such format, rounding or overflow rule.
    """
    return encode_values(FORMATS[name], x, rounding, overflow, seed=seed, random_bits=random_bits)


def round(
    name: str,
    x: npt.ArrayLike,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    *,
    seed: int | None = None,
    random_bits: int = MAX_RANDOM_BITS,
) -> npt.NDArray[np.float64]:
    """Return what is left of every value in a format: ``decode(encode(x))``, float64, the shape of `x`.

    Arguments and errors are those of `encode`.
    """
    format = FORMATS[name]
    codes = encode_values(format, x, rounding, overflow, seed=seed, random_bits=random_bits)
    return decode_codes(format, codes)


def rows() -> tuple[FormatRow, ...]:
    """Return one row of facts per format, for tables: floats before integers, wide before narrow."""
    return describe_all(FORMATS.values())


def add(format: Format, *, origin: str = "a call of formats.add") -> None:
    """Take a format of one's own into the catalog, for as long as this process runs.

    Args:
        format: its record, say from `read_format_file`.
        origin: where it comes from, for messages.

    Raises:
        BitwrightError: another format has its name, or an alias that it claims; both origins are named.
    """
    taken = _aliases()
    for claimed in (format.name, *(alias.lower() for alias in format.aliases)):
        if claimed in taken or (claimed in FORMATS and claimed != format.name):
            raise FormatError(
                f"'{claimed}', claimed by format '{format.name}' in {origin}, already stands for "
                f"'{taken.get(claimed, claimed)}'; choose another name or alias"
            )
    FORMATS.add(format, origin)


def _aliases() -> dict[str, str]:
    found: dict[str, str] = {}
    for format in FORMATS.values():
        for alias in format.aliases:
            written = alias.lower()
            if written in FORMATS or found.get(written, format.name) != format.name:
                raise TypeError(
                    f"alias '{alias}' of format '{format.name}' is already taken by '{found.get(written, written)}'"
                )
            found[written] = format.name
    return found
