"""``bitwright formats show``: one number in one format, bit by bit; or one block; or the facts of a format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bitwright import formats
from bitwright.cli.formats import FormatFiles, Overflow, Rounding, add_format_files, native_devices, spell_specials
from bitwright.cli.formats_show_block import print_block, print_block_facts
from bitwright.cli.number_text import spell_binary, spell_number, spell_percent, spell_short, spell_signed, spell_step
from bitwright.cli.table import new_console, print_rows
from bitwright.cli.usage import UsageMistake, raise_if_option
from bitwright.formats import FloatFormat, Format, IntFormat
from bitwright.formats.describe import describe
from bitwright.formats.explain import Explanation, Neighbour, Point, beyond_range, chances, explain, explain_code
from bitwright.formats.written_number import parse_code, parse_number

#: The colour of the n-th field of a code, from the top; lines and names tell them apart without colour.
_FIELD_STYLES = ("bold magenta", "bold cyan", "bold green")
#: Digits of a value that are always shown; a longer one is cut, with its exact binary form beside it.
_ALL_DIGITS = 60


def show_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="FORMAT", help="A format, or another library's name of it.")],
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="NUMBER", help="0.1, -0, 1e-45, 0x1.8p3, inf, nan; for a block format, its block."),
    ] = None,
    code: Annotated[str | None, typer.Option(metavar="CODE", help="A code in place of a number: 0x3dcd.")] = None,
    rounding: Rounding = "nearest_even",
    overflow: Overflow = "ieee",
    format_file: FormatFiles = None,
) -> None:
    """Show numbers in one format, bit by bit.

    With exact value, error in ulps, both neighbours, and what each overflow rule makes of them. Without a number: the
    facts of the format.
    """
    words = values or []
    raise_if_option(context, [name, *words])
    add_format_files(format_file)
    canonical = formats.resolve(name)
    console = new_console(highlight=False)
    if canonical not in formats.FORMATS:
        if code is not None:
            raise UsageMistake(
                f"{canonical} stores blocks, which no single --code stands for; give the block's numbers"
            )
        block_format = formats.BLOCK_FORMATS[canonical]
        if words:
            print_block(console, block_format, words, rounding)
        else:
            print_block_facts(console, block_format)
        return
    format = formats.FORMATS[canonical]
    if code is not None:
        if words:
            raise UsageMistake(f"--code {code} was given along with {' '.join(words)}; give one or the other")
        _print_code(console, explain_code(format, parse_code(format, code)))
    elif not words:
        _print_facts(console, format)
    # All are worked out before the first is printed: bad input prints nothing.
    outcomes = [_outcomes(format, word, rounding, overflow) for word in words]
    for index, (word, found) in enumerate(zip(words, outcomes, strict=True)):
        if index:
            console.print()
        for chance, outcome in found:
            _print_number(console, word, outcome, chance, rounding, overflow)


def _outcomes(format: Format, word: str, rounding: str, overflow: str) -> Sequence[tuple[Fraction | None, Explanation]]:
    number = parse_number(word)
    mode = formats.ROUNDINGS.get(rounding)
    if mode is not None and mode.needs_seed:
        return chances(format, number, overflow)
    return [(None, explain(format, number, rounding, overflow))]


def _print_number(
    console: Console, word: str, outcome: Explanation, chance: Fraction | None, rounding: str, overflow: str
) -> None:
    title = Text(f"{word} in {outcome.point.format.name}", style="bold")
    if chance is not None:
        title.append(f", with chance {spell_number(100 * chance, digits=6)} %")
    console.print(title)
    _print_bits(console, outcome.point)
    rows = _point_rows(outcome.point)
    if outcome.error is not None:
        rows.insert(3, ("error", _spell_error(outcome)))
        if outcome.error and outcome.ulp is not None:
            rows.insert(4, ("1 ulp", f"{spell_step(outcome.ulp)}, the step of {outcome.point.format.name} at {word}"))
    rows.append(("rounding", rounding))
    rows.append(("overflow", _spell_overflow(outcome, overflow)))
    print_rows(console, rows)


def _print_code(console: Console, point: Point) -> None:
    console.print(Text(f"code {_hex(point.format, point.code)} of {point.format.name}", style="bold"))
    _print_bits(console, point)
    print_rows(console, [*_point_rows(point), ("overflow", _spell_beyond(point.format))])


def _print_bits(console: Console, point: Point) -> None:
    """Names over bits, with lines between the fields and a colour for each."""
    names, bits = Text("  "), Text("  ")
    for index, field in enumerate(point.fields):
        if index:
            names.append(" │ ")
            bits.append(" │ ")
        width = max(len(field.name), len(field.bits))
        style = _FIELD_STYLES[index]
        names.append(field.name.ljust(width), style=style.removeprefix("bold "))
        bits.append(field.bits.ljust(width), style=style)
    console.print(names)
    console.print(bits)


def _point_rows(point: Point) -> list[tuple[str, str]]:
    groups = "_".join(field.bits for field in point.fields)
    return [
        ("code", f"{_hex(point.format, point.code)} = 0b{groups}"),
        ("class", _spell_kind(point)),
        ("value", _spell_value(point.value)),
        ("below", _spell_neighbour(point.format, point.below, "−")),
        ("above", _spell_neighbour(point.format, point.above, "+")),
    ]


def _spell_kind(point: Point) -> str:
    format, sign = point.format, "−" if math.copysign(1, point.value) < 0 else ""
    if not math.isfinite(point.value):
        return point.kind
    size = abs(Fraction(point.value))
    match format:
        case FloatFormat() if point.kind == "normal":
            exponent = math.frexp(point.value)[1] - 1
            field = exponent + format.bias
            factor = spell_number(size / Fraction(2) ** exponent, digits=24)
            cut = "≈ " if factor.startswith("≈") else ""
            product = f"{cut}{sign}2^{exponent} × {factor.removeprefix(cut)}"
            return (
                f"normal: {product}; exponent {spell_number(Fraction(exponent))} = field {field} − bias {format.bias}"
            )
        case FloatFormat() if point.kind == "subnormal":
            smallest = Fraction(2) ** (format.emin - format.fraction_bits)
            steps = int(size / smallest)
            return (
                f"subnormal: {sign}{steps} × {spell_binary(smallest)}; "
                f"{steps.bit_length()} of {format.fraction_bits + 1} significant bits left"
            )
        case IntFormat() if format.signed:
            return f"integer in two's complement: the sign bit is worth {spell_number(Fraction(format.min))}"
        case _ if point.kind == "codebook entry":
            return f"codebook entry {point.code} of 0 to {(1 << format.bits) - 1}"
        case _:
            return point.kind


def _spell_value(value: float) -> str:
    text = spell_number(value, digits=_ALL_DIGITS)
    return f"{text}; exactly {spell_binary(Fraction(value))}" if text.startswith("≈") else text


def _spell_error(outcome: Explanation) -> str:
    if outcome.fate == "sign lost":
        return "none, but the sign of the zero is lost"
    if not outcome.error:
        return "none: the number is kept exactly"
    parts = [spell_signed(outcome.error, 24)]
    if outcome.relative_error is not None:
        parts.append(spell_percent(outcome.relative_error))
    if outcome.error_ulps is not None:
        parts.append(f"{spell_signed(outcome.error_ulps, 4).removeprefix('≈ ')} ulp")
    return ", ".join(parts)


def _spell_neighbour(format: Format, neighbour: Neighbour | None, sign: str) -> str:
    if neighbour is None:
        return "none"
    distance = "" if neighbour.distance is None else f", {sign}{spell_step(neighbour.distance)}"
    return f"{spell_number(neighbour.value, digits=24)} ({_hex(format, neighbour.code)}){distance}"


def _spell_overflow(outcome: Explanation, overflow: str) -> str:
    format = outcome.point.format
    if not outcome.out_of_range:
        return f"no; {_spell_beyond(format)}"
    return f"yes, and {overflow} was applied: {_spell_rules(outcome.by_rule)}"


def _spell_beyond(format: Format) -> str:
    return f"beyond {spell_short(Fraction(format.max))}: {_spell_rules(beyond_range(format))}"


def _spell_rules(by_rule: Mapping[str, float]) -> str:
    """Rules of one outcome together: "saturate, te → 448; ieee → NaN"."""
    together: dict[str, list[str]] = {}
    for rule, value in by_rule.items():
        together.setdefault(spell_short(value), []).append(rule)
    if len(together) == 1:
        return f"every rule → {next(iter(together))}"
    return "; ".join(f"{', '.join(rules)} → {value}" for value, rules in together.items())


def _hex(format: Format, code: int) -> str:
    return f"0x{code:0{-(-format.bits // 4)}x}"


def _print_facts(console: Console, format: Format) -> None:
    row = describe(format)
    console.print(Text(row.name, style="bold"))
    rows = [
        ("bits", f"{row.bits}: {row.layout}"),
        ("range", f"{_spell_value(row.min)} to {_spell_value(row.max)}"),
        ("smallest normal", _spell_value(row.min_normal)),
        ("smallest subnormal", "none" if row.min_subnormal is None else _spell_value(row.min_subnormal)),
        ("decimal digits", f"{row.decimal_digits:.1f}"),
        ("steps per octave", "they do not grow" if row.steps_per_octave is None else str(row.steps_per_octave)),
        ("specials", spell_specials(row) or "none"),
        ("overflow", _spell_beyond(format)),
        ("native in", ", ".join(native_devices().get(row.name, ())) or "no device that is known here"),
        ("also called", ", ".join(row.aliases)),
        ("source", row.source),
    ]
    print_rows(console, rows)
