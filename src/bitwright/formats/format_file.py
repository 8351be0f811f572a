"""Formats of one's own, from a TOML file: what ``--format-file my.toml`` reads.

    [[format]]
    name = "fp8_e3m4_finite"
    kind = "float"                        # float, integer, codebook
    exponent_bits = 3
    fraction_bits = 4
    bias = 3
    specials = "none"                     # none, ieee, top_nan, sign_nan: `types.Specials`
    source = "trial of 2026, page 2"
    golden = [[0x30, 1.0], [0x7F, 31.0]]  # code → value pairs, checked when the file is read

A table has the fields of its record (`FloatFormat`, `IntFormat`, `CodebookFormat`) under their own names. ``signed``,
``has_zero``, ``aliases`` and ``golden`` may be left out, ``source`` not: a figure that nobody can look up is of no use
to the next reader. The values of a codebook are rounded to fp32, in which kernels keep them.

Everything is refused before anything is taken: a file with one wrong table gives no format at all.
Rejected: importing a Python file, since opening a file of facts should not run it.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitwright.catalog import nearest_name_hint
from bitwright.errors import FormatError
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

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_MISSING: Any = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatTable:
    """One [[format]] of a file: its fields are taken one by one, and what nobody took is unknown."""

    #: The file and the table in it, for messages.
    place: str
    fields: Mapping[str, Any]
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
            hint = nearest_name_hint(key, [name for name in self.fields if name not in self.asked])
            raise FormatError(f"{self.place}: '{key}' is missing{hint}")
        is_number = kind is float and type(value) is int
        if type(value) is not kind and not is_number and value is not default:
            raise FormatError(f"{self.place}: '{key}' is {value!r}; give {_TYPE_NAMES[kind]}")
        return value

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


def read_format_file(path: str | Path) -> tuple[Format, ...]:
    """Read formats from a TOML file. They are checked and returned, not yet in the catalog: see `formats.add`.

    Args:
        path: of a file of one or more ``[[format]]`` tables.

    Raises:
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
    formats = tuple(_read_table(f"{path}, [[format]] {number}", table) for number, table in enumerate(tables, start=1))
    seen: set[str] = set()
    for format in formats:
        if format.name in seen:
            raise FormatError(f"{path}: format '{format.name}' is defined twice; rename one of them")
        seen.add(format.name)
    return formats


def _read_table(place: str, fields: Mapping[str, Any]) -> Format:
    table = FormatTable(place=place, fields=fields, asked={})
    name = table.take("name", str)
    if not _NAME.fullmatch(name):
        raise FormatError(f"{place}: '{name}' is no name; write lower-case letters, digits and _, a letter first")
    kind = table.take("kind", str)
    if kind not in KINDS:
        hint = nearest_name_hint(kind, list(KINDS))
        raise FormatError(f"{place}: unknown kind '{kind}'{hint} Known: {', '.join(KINDS)}")
    try:
        format = KINDS[kind](table, name)
    except FormatError as error:
        if str(error).startswith(place):
            raise
        raise FormatError(f"{place}: {error}") from error
    table.raise_if_unknown()
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


#: What ``kind`` may say, and who reads the other fields.
KINDS: Mapping[str, Callable[[FormatTable, str], Format]] = {
    "float": _read_float,
    "integer": _read_integer,
    "codebook": _read_codebook,
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
