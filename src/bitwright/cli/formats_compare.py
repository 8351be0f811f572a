"""``bitwright formats compare``: what becomes of the same numbers in every format, one word a cell."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bitwright import formats
from bitwright.cli.formats import FormatFiles, Overflow, Rounding, add_format_files
from bitwright.cli.number_text import spell_number, spell_percent
from bitwright.cli.table import new_console, new_table, print_table
from bitwright.cli.usage import UsageMistake, raise_if_option, split_names
from bitwright.errors import FormatError
from bitwright.formats import Format
from bitwright.formats.explain import Explanation, Fate, explain
from bitwright.formats.written_number import Real, parse_number

#: Relative errors from here on are marked: three significant bits lose up to 1/16.
_LARGE_ERROR = Fraction(1, 16)
_STYLES: dict[Fate, str] = {
    "exact": "green",
    "subnormal": "yellow",
    "zero": "bold red",
    "sign lost": "yellow",
    "infinite": "bold red",
    "NaN": "bold magenta",
    "NaN lost": "bold magenta",
    "saturated": "red",
}
#: Columns that one number takes, and the formats' names before them.
_CELL_WIDTH, _NAME_WIDTH = 21, 15


def compare_command(
    context: typer.Context,
    values: Annotated[list[str], typer.Argument(metavar="NUMBER", help="0.1, -0, 1e-45, 0x1.8p3, inf, nan.")],
    only: Annotated[
        str | None, typer.Option("--formats", metavar="a,b,…", help="Formats to compare; default: all.")
    ] = None,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "ieee",
    format_file: FormatFiles = None,
) -> None:
    """Show what becomes of numbers in every format.

    Kept exactly, rounded by x %, subnormal, → 0, → Inf, → NaN, or saturated.
    """
    raise_if_option(context, values)
    add_format_files(format_file)
    numbers = [parse_number(value) for value in values]
    names = [row.name for row in formats.rows()] if only is None else split_names(only, "format")
    records = [_scalar_format(name) for name in names]
    cells = [[spell_fate(record, number, rounding, overflow) for number in numbers] for record in records]
    console = new_console()
    a_row = max(1, (console.width - _NAME_WIDTH) // _CELL_WIDTH)
    for start in range(0, len(numbers), a_row):
        if start:
            console.print()
        _print_table(console, values[start : start + a_row], records, [row[start : start + a_row] for row in cells])
    console.print(
        Text(
            f"rounding {rounding}, overflow rule {overflow}; %: how much of itself a number gains or loses", style="dim"
        )
    )


def _scalar_format(name: str) -> Format:
    canonical = formats.resolve(name)
    if canonical not in formats.FORMATS:
        raise UsageMistake(
            f"{canonical} stores blocks, and what becomes of a number there depends on its neighbours; "
            f"see: bitwright formats show {canonical} NUMBER…"
        )
    return formats.FORMATS[canonical]


def spell_fate(format: Format, x: Real, rounding: str, overflow: str) -> Text:
    """Return what became of a number in a few words."""
    try:
        outcome = explain(format, x, rounding, overflow)
    except FormatError:
        if x == x:
            raise
        return Text("has no NaN", style="bold magenta")
    return Text(_words(outcome), style=_style(outcome))


def _words(outcome: Explanation) -> str:
    kept = outcome.point
    match outcome.fate:
        case "exact":
            return "exact, subnormal" if kept.kind == "subnormal" else "exact"
        case "rounded" | "subnormal":
            assert outcome.relative_error is not None
            return f"{outcome.fate} {spell_percent(outcome.relative_error)}"
        case "sign lost":
            return "→ +0"
        case "saturated":
            return f"saturated at {_at_most_nine(kept.value)}"
        case _:
            return f"→ {spell_number(kept.value)}"


def _at_most_nine(value: float) -> str:
    digits = 6 if value == 0 or 1e-4 <= abs(value) < 1e6 else 3
    text = f"{value:.{digits}g}".replace("e+", "e")
    return f"−{text[1:]}" if value < 0 else text


def _style(outcome: Explanation) -> str:
    if outcome.fate == "rounded":
        error = outcome.relative_error
        return "yellow" if error is not None and abs(error) >= _LARGE_ERROR else ""
    return _STYLES[outcome.fate]


def _print_table(
    console: Console, titles: Sequence[str], records: Sequence[Format], cells: Sequence[Sequence[Text]]
) -> None:
    table = new_table(("format", False), *((title, False) for title in titles))
    for record, row in zip(records, cells, strict=True):
        table.add_row(Text(record.name), *row)
    print_table(console, table)
