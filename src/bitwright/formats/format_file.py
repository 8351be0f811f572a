"""Formats of one's own, from a TOML file: what ``--format-file my.toml`` reads.

    [[format]]
    name = "fp8_e3m4_finite"
    kind = "float"                        # float, integer, codebook, block
    exponent_bits = 3
    fraction_bits = 4
    bias = 3
    specials = "none"                     # none, ieee, top_nan, sign_nan: `types.Specials`
    source = "trial of 2026, page 2"
    golden = [[0x30, 1.0], [0x7F, 31.0]]  # code → value pairs, checked when the file is read

    [[format]]
    name = "mx_e3m4"
    kind = "block"
    element = "fp8_e3m4_finite"           # a format that bitwright knows, or of a table above
    block_size = 32
    scale_format = "e8m0"
    scale_rule = "ocp_floor"              # ocp_floor, round_up, amax
    source = "trial of 2026, page 3"

A table has the fields of its record (`FloatFormat`, `IntFormat`, `CodebookFormat`) under their own names; that of a
`BlockFormat` names its element and its scale format, and has no ``golden``. ``signed``, ``has_zero``,
``element_exponent``, ``tensor_scale``, ``aliases`` and ``golden`` may be left out, ``source`` not: a figure that nobody
can look up is of no use to the next reader. The values of a codebook are rounded to fp32, in which kernels keep them.

Everything is refused before anything is taken: a file with one wrong table gives no format at all.
Rejected: importing a Python file, since opening a file of facts should not run it.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.catalog import nearest_name_hint
from bitwright.errors import FormatError, UnknownName
from bitwright.formats.blocks import BlockFormat
from bitwright.formats.decode import decode_codes
from bitwright.formats.types import (
    IEEE_SPECIALS,
    NO_SPECIALS,
    SIGN_NAN_SPECIALS,
    TOP_NAN_SPECIALS,
    CodebookFormat,
    FloatFormat,
    Format,
    Golden,
    IntFormat,
    Specials,
)

#: What ``specials`` may say.
SPECIALS: Mapping[str, Specials] = {
    "none": NO_SPECIALS,
    "ieee": IEEE_SPECIALS,
    "top_nan": TOP_NAN_SPECIALS,
    "sign_nan": SIGN_NAN_SPECIALS,
}

#: What a table may hold, whatever its kind.
_FIELDS = frozenset(
    {"kind", "scale_format"}.union(
        *({field.name for field in fields(record)} for record in (FloatFormat, IntFormat, CodebookFormat, BlockFormat))
    )
)
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MISSING: Any = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatTable:
    """One [[format]] of a file: its fields are taken one by one, and what nobody took is unknown."""

    #: The file and the table in it, for messages.
    place: str
    fields: Mapping[str, Any]
    #: Scalar formats that the table may name.
    known: Mapping[str, Format]
    #: Fields that were asked for so far.
    asked: dict[str, None]

    def take(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """Return a field.

        Raises:
            FormatError: it is absent and has no default, or of another type.
        """
        self.asked[key] = None
        value = self.fields.get(key, default)
        if value is _MISSING:
            hint = nearest_name_hint(key, [name for name in self.fields if name not in _FIELDS])
            raise FormatError(f"{self.place}: '{key}' is missing{hint}")
        is_number = kind is float and type(value) is int
        if type(value) is not kind and not is_number and value is not default:
            raise FormatError(f"{self.place}: '{key}' is {value!r}; give {_TYPE_NAMES[kind]}")
        return value

    def take_format(self, key: str) -> Format:
        """Return the format that a field names.

        Raises:
            FormatError: the field is absent or no text.
            UnknownName: there is no such format; the nearest one is suggested.
        """
        name = self.take(key, str)
        if name not in self.known:
            hint = nearest_name_hint(name, list(self.known))
            raise UnknownName(
                f"{self.place}: '{key}' names the unknown format '{name}'{hint} Name a scalar format that "
                "`bitwright formats` lists, or one of a table above"
            )
        return self.known[name]

    def raise_if_unknown(self) -> None:
        """Refuse fields that nothing asked for.

        Raises:
            FormatError: there is one; the nearest known name is suggested.
        """
        known = list(self.asked)
        for key in self.fields:
            if key not in self.asked:
                hint = nearest_name_hint(key, known)
                raise FormatError(f"{self.place}: unknown field '{key}'{hint} Known: {', '.join(known)}")


_TYPE_NAMES = {str: "text", int: "a whole number", bool: "true or false", list: "a list", float: "a number"}


def read_formats(path: str | Path, known: Mapping[str, Format]) -> tuple[Format | BlockFormat, ...]:
    """Read formats from a TOML file. They are checked and returned, not yet in the catalog: see `formats.add`.

    Args:
        path: of a file of one or more ``[[format]]`` tables.
        known: scalar formats that block formats of the file may name, by name.

    Raises:
        UnknownName: a block format names a format that is neither known nor in a table above.
        FormatError: the file cannot be read, is no TOML, has no format, or one with a missing, unknown, contradictory
            or wrong field.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: is no TOML ({error}); mend that line") from error
    unknown = [key for key in document if key != "format"]
    tables = document.get("format")
    if unknown or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        found = f", not {', '.join(repr(key) for key in document)}" if document else ", and this one is empty"
        raise FormatError(f"{path}: a format file is made of [[format]] tables{found}")
    read: dict[str, Format | BlockFormat] = {}
    for number, table in enumerate(tables, start=1):
        scalars = {name: format for name, format in read.items() if not isinstance(format, BlockFormat)}
        format = _read_table(f"{path}, [[format]] {number}", table, {**known, **scalars})
        if format.name in read:
            raise FormatError(f"{path}: format '{format.name}' is defined twice; rename one of them")
        read[format.name] = format
    return tuple(read.values())


def _read_table(place: str, fields: Mapping[str, Any], known: Mapping[str, Format]) -> Format | BlockFormat:
    table = FormatTable(place=place, fields=fields, known=known, asked={})
    name = table.take("name", str)
    if not _NAME.fullmatch(name):
        raise FormatError(f"{place}: '{name}' is no name; write lower-case letters, digits and _, a letter first")
    kind = table.take("kind", str)
    if kind not in KINDS:
        hint = nearest_name_hint(kind, list(KINDS))
        raise FormatError(f"{place}: unknown kind '{kind}'{hint} Known: {', '.join(KINDS)}")
    try:
        format = KINDS[kind](table, name)
    except (FormatError, UnknownName) as error:
        if str(error).startswith(place):
            raise
        raise FormatError(f"{place}: {error}") from error
    table.raise_if_unknown()
    if not isinstance(format, BlockFormat):
        _raise_if_golden_is_wrong(place, format)
    return format


def _read_float(table: FormatTable, name: str) -> Format:
    specials = table.take("specials", str)
    if specials not in SPECIALS:
        hint = nearest_name_hint(specials, list(SPECIALS))
        raise FormatError(f"{table.place}: unknown specials '{specials}'{hint} Known: {', '.join(SPECIALS)}")
    return FloatFormat(
        name=name,
        exponent_bits=table.take("exponent_bits", int),
        fraction_bits=table.take("fraction_bits", int),
        bias=table.take("bias", int),
        specials=SPECIALS[specials],
        signed=table.take("signed", bool, True),
        has_zero=table.take("has_zero", bool, True),
        aliases=read_aliases(table),
        source=table.take("source", str),
        golden=read_golden(table),
    )


def _read_integer(table: FormatTable, name: str) -> Format:
    return IntFormat(
        name=name,
        bits=table.take("bits", int),
        signed=table.take("signed", bool, True),
        aliases=read_aliases(table),
        source=table.take("source", str),
        golden=read_golden(table),
    )


def _read_codebook(table: FormatTable, name: str) -> Format:
    values = table.take("values", list)
    if not all(_is_number(value) for value in values):
        raise FormatError(f"{table.place}: 'values' holds something that is no number; list one number per code")
    return CodebookFormat(
        name=name,
        bits=table.take("bits", int),
        values=tuple(_to_fp32(value) for value in values),
        aliases=read_aliases(table),
        source=table.take("source", str),
        golden=tuple((code, _to_fp32(value)) for code, value in read_golden(table)),
    )


def _read_block(table: FormatTable, name: str) -> BlockFormat:
    scale = table.take_format("scale_format")
    if not isinstance(scale, FloatFormat):
        raise FormatError(f"{table.place}: 'scale_format' is {scale.name}; scales are floats, such as e8m0 or fp16")
    return BlockFormat(
        name=name,
        element=table.take_format("element"),
        element_exponent=table.take("element_exponent", int, 0),
        block_size=table.take("block_size", int),
        scale=scale,
        scale_rule=table.take("scale_rule", str),
        tensor_scale=table.take("tensor_scale", bool, False),
        aliases=read_aliases(table),
        source=table.take("source", str),
    )


#: What ``kind`` may say, and who reads the other fields.
KINDS: Mapping[str, Callable[[FormatTable, str], Format | BlockFormat]] = {
    "float": _read_float,
    "integer": _read_integer,
    "codebook": _read_codebook,
    "block": _read_block,
}


def read_aliases(table: FormatTable) -> tuple[str, ...]:
    """Return the aliases of a format, if it has any.

    Raises:
        FormatError: they are no list of texts.
    """
    aliases = table.take("aliases", list, [])
    if not all(isinstance(alias, str) and alias.strip() for alias in aliases):
        raise FormatError(f"{table.place}: 'aliases' is {aliases!r}; list texts")
    return tuple(aliases)


def read_golden(table: FormatTable) -> Golden:
    """Return the golden values of a format, if it has any.

    Raises:
        FormatError: they are no list of [code, value] pairs.
    """
    golden = table.take("golden", list, [])
    for pair in golden:
        if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and _is_number(pair[1])):
            raise FormatError(
                f"{table.place}: 'golden' holds {pair!r}; list pairs of a code and its value: [0x38, 1.0]"
            )
    return tuple((code, float(value)) for code, value in golden)


def _raise_if_golden_is_wrong(place: str, format: Format) -> None:
    for code, expected in format.golden:
        if not 0 <= code < 1 << format.bits:
            raise FormatError(
                f"{place}: golden code {code} is not in [0, 2**{format.bits}), the codes of {format.name}"
            )
        found = float(decode_codes(format, np.array(code)))
        same = found == expected and math.copysign(1, found) == math.copysign(1, expected)
        if not (same or (math.isnan(found) and math.isnan(expected))):
            raise FormatError(
                f"{place}: code {code:#x} of {format.name} is {found!r} by its other fields, but {expected!r} by "
                "'golden'; correct one of them"
            )


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 1023)


def _to_fp32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))
