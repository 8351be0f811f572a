"""Number formats: what one number is, rounded exactly as a standard says. Pure Python and NumPy.

    from bitwright import formats

    formats.get("fp8_e4m3").max                   # 448.0
    formats.round("fp8_e4m3", [0.1, 500.0])       # [0.1015625, 448.0]
    formats.encode("fp8_e4m3", 1.0)               # 0x38
    formats.decode("fp8_e4m3", 0x38)              # 1.0
    formats.table("fp4_e2m1")                     # [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0, -0.5, …]
    formats.resolve("torch.float8_e4m3fn")        # "fp8_e4m3": names of other libraries, at the borders only

    formats.round("mxfp4", x)                     # blocks of 32 along the last dimension: fp32 → fp32
    formats.decode("q4_0", formats.encode("q4_0", x))      # the bytes of a GGUF file, and back

What a record holds is in `types`, bit layout → value in `decode`, rounding in `round`, random bits in `philox`,
overflow in `encode`; each family of formats is one file in `definitions`, and a user's own come from a `format_file`.
Numbers that share a scale are in `blocks`, those of GGUF files in `gguf_blocks`; their files are `block_definitions`.
This is the reference: every fast kernel agrees with it bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bitwright.catalog import Catalog, nearest_name_hint
from bitwright.errors import FormatError, UnknownName
from bitwright.formats.block_codec import BlockCodec, BlockRow, describe_blocks
from bitwright.formats.block_floating_point import blocks_of_shared_exponent
from bitwright.formats.blocks import BlockCodes, BlockFormat
from bitwright.formats.decode import decode_codes, value_table
from bitwright.formats.describe import FormatRow, describe_all
from bitwright.formats.encode import OVERFLOWS, OverflowRule, OverflowValues, encode_values, overflow_values
from bitwright.formats.format_file import read_formats
from bitwright.formats.gguf_blocks import GgufFormat
from bitwright.formats.round import MAX_RANDOM_BITS, ROUNDINGS, RoundingMode
from bitwright.formats.types import CodebookFormat, FloatFormat, Format, IntFormat, Specials

__all__ = [
    "BLOCK_FORMATS",
    "FORMATS",
    "OVERFLOWS",
    "ROUNDINGS",
    "BlockCodec",
    "BlockCodes",
    "BlockFormat",
    "BlockRow",
    "CodebookFormat",
    "FloatFormat",
    "Format",
    "FormatRow",
    "GgufFormat",
    "IntFormat",
    "OverflowRule",
    "OverflowValues",
    "RoundingMode",
    "Specials",
    "add",
    "block_floating_point",
    "block_names",
    "block_rows",
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


#: Every block format, by canonical name.
BLOCK_FORMATS: Catalog[BlockCodec] = Catalog(
    kind="block format",
    package="bitwright.formats.block_definitions",
    attribute="BLOCK_FORMATS",
    record_type=(BlockFormat, GgufFormat),
)


def names() -> tuple[str, ...]:
    """Return the canonical name of every scalar format, sorted."""
    return tuple(sorted(FORMATS))


def block_names() -> tuple[str, ...]:
    """Return the canonical name of every block format, sorted."""
    return tuple(sorted(BLOCK_FORMATS))


def get(name: str) -> Any:
    """Return the record of a format, scalar or block, by its canonical name.

    It is typed as Any, since both kinds come back; ``FORMATS[name]`` and ``BLOCK_FORMATS[name]`` give one kind, typed,
    and refuse the other.

    Raises:
        UnknownName: no format has that name; the nearest one is suggested.
    """
    if name in FORMATS:
        return FORMATS[name]
    if name in BLOCK_FORMATS:
        return BLOCK_FORMATS[name]
    known = [*names(), *block_names()]
    raise UnknownName(f"unknown format {name!r}{nearest_name_hint(name, known)} Known formats: {', '.join(known)}")


def block_floating_point(*, block_size: int = 8, mantissa_bits: int = 8, name: str | None = None) -> BlockFormat:
    """Return the record of classic block floating point: N mantissas of m bits share one 8-bit exponent.

    Its `encode` and `decode` do what `formats.encode` and `formats.decode` do by name; "bfp8" is the default in the
    catalog.

    Args:
        block_size: N, at least 1.
        mantissa_bits: m, 2 to 24, the sign included.
        name: "bfp{m}_b{N}" unless given.

    Raises:
        FormatError: a size out of range.
    """
    exponent = FORMATS["e8m0"]
    assert isinstance(exponent, FloatFormat)
    return blocks_of_shared_exponent(exponent=exponent, block_size=block_size, mantissa_bits=mantissa_bits, name=name)


def resolve(text: str) -> str:
    """Return the canonical name for a canonical name or an alias of another library.

    For the borders (command line, files, checkpoints) only. Case and the prefix "torch." do not matter.

    Raises:
        UnknownName: neither; the nearest name is suggested.
    """
    written = text.strip().lower().removeprefix("torch.")
    if written in FORMATS or written in BLOCK_FORMATS:
        return written
    aliases = _aliases()
    if written not in aliases:
        known = [*names(), *block_names()]
        hint = nearest_name_hint(written, [*known, *aliases])
        raise UnknownName(f"unknown format {text!r}{hint} Known formats: {', '.join(known)}")
    return aliases[written]


def table(name: str) -> npt.NDArray[np.float64]:
    """Return the value of every code: float64 ``[2**bits]``, read-only.

    Raises:
        FormatError: the format has more than 20 bits, or is a block format.
        UnknownName: no format has that name.
    """
    format = get(name)
    if name in BLOCK_FORMATS:
        raise FormatError(
            f"the values of {name} depend on the scale of their block, so that it has no table; its codes are "
            f"{format.row.element}: look at the table of that format"
        )
    return value_table(format)


def decode(name: str, codes: Any) -> npt.NDArray[Any]:
    """Return the value of every code: integers in ``[0, 2**bits)``, any shape → float64, the same shape.

    For a block format `codes` is what `encode` gave (`BlockCodes`, or the bytes of GGUF), and the values are fp32.

    Raises:
        FormatError: `codes` are not integers, or one is out of range.
        UnknownName: no format has that name.
    """
    if name in BLOCK_FORMATS:
        return BLOCK_FORMATS[name].decode(codes)
    return decode_codes(get(name), codes)


def encode(
    name: str,
    x: npt.ArrayLike,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    *,
    seed: int | None = None,
    random_bits: int = MAX_RANDOM_BITS,
) -> Any:
    """Return the code that every value rounds to: real numbers, any shape → uint8/16/32/64, the same shape.

    A block format cuts the last dimension into blocks and gives `BlockCodes`, or the bytes of GGUF: uint8
    ``[..., num_bytes]``. Its values have to be exact in fp32, and saturate.

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
    if name in BLOCK_FORMATS:
        _raise_unless_saturating(name, overflow)
        return BLOCK_FORMATS[name].encode(x, rounding, seed=seed, random_bits=random_bits)
    return encode_values(get(name), x, rounding, overflow, seed=seed, random_bits=random_bits)


def round(
    name: str,
    x: npt.ArrayLike,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    *,
    seed: int | None = None,
    random_bits: int = MAX_RANDOM_BITS,
) -> npt.NDArray[Any]:
    """Return what is left of every value in a format: ``decode(encode(x))``, the shape of `x`.

    The values are float64, those of a block format fp32. Arguments and errors are those of `encode`.
    """
    return decode(name, encode(name, x, rounding, overflow, seed=seed, random_bits=random_bits))


def rows() -> tuple[FormatRow, ...]:
    """Return one row of facts per scalar format, for tables: floats before integers, wide before narrow."""
    return describe_all(FORMATS.values())


def block_rows() -> tuple[BlockRow, ...]:
    """Return one row of facts per block format, for tables: wide before narrow."""
    return describe_blocks(BLOCK_FORMATS.values())


def read_format_file(path: str | Path) -> tuple[Format | BlockFormat, ...]:
    """Read formats of one's own from a TOML file (`format_file` says how it is written); `add` takes them into use.

    Args:
        path: of a file of one or more ``[[format]]`` tables.

    Raises:
        FormatError: the file cannot be read, is no TOML, has no format, or one with a missing, unknown, contradictory
            or wrong field.
        UnknownName: a block format names a format that there is not.
    """
    return read_formats(path, FORMATS)


def add(format: Format | BlockFormat, *, origin: str = "a call of formats.add") -> None:
    """Take a format of one's own into the catalog of its kind, for as long as this process runs.

    Args:
        format: its record, say from `read_format_file`.
        origin: where it comes from, for messages.

    Raises:
        BitwrightError: another format has its name, or an alias that it claims; both origins are named.
    """
    taken = _aliases()
    own, other = (BLOCK_FORMATS, FORMATS) if isinstance(format, BlockFormat) else (FORMATS, BLOCK_FORMATS)
    for claimed in (format.name, *(alias.lower() for alias in format.aliases)):
        if claimed in taken or claimed in other or (claimed in own and claimed != format.name):
            raise FormatError(
                f"'{claimed}', claimed by format '{format.name}' in {origin}, already stands for "
                f"'{taken.get(claimed, claimed)}'; choose another name or alias"
            )
    if isinstance(format, BlockFormat):
        BLOCK_FORMATS.add(format, origin)
    else:
        FORMATS.add(format, origin)


def _aliases() -> dict[str, str]:
    found: dict[str, str] = {}
    for format in (*FORMATS.values(), *BLOCK_FORMATS.values()):
        for alias in format.aliases:
            written = alias.lower()
            if written in FORMATS or written in BLOCK_FORMATS or found.get(written, format.name) != format.name:
                raise TypeError(
                    f"alias '{alias}' of format '{format.name}' is already taken by '{found.get(written, written)}'"
                )
            found[written] = format.name
    return found


def _raise_unless_saturating(name: str, overflow: str) -> None:
    if overflow != "saturate":
        raise FormatError(
            f"overflow={overflow!r} was asked for, but the elements of {name} saturate: its scale keeps them in range; "
            "leave overflow out"
        )
