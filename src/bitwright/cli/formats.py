"""``bitwright formats``: every number format, its range, and who computes in it.

Without a further verb it is the table; `show`, `compare` and `histogram` are files beside this one. The table gives up
columns where the terminal is narrow: first the devices, which then follow as a list, then the layout.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from bitwright import formats, hardware
from bitwright.cli.output import write_json
from bitwright.cli.table import new_console, new_table, print_table
from bitwright.formats import BlockFormat, Format, FormatRow

#: Columns that a list of devices needs to stand beside the rest.
_NATIVE_WIDTH = 34
#: More columns than any table takes.
_ALL_THE_ROOM = 1000

#: Every command takes formats of the user's own.
FormatFiles = Annotated[
    list[Path] | None,
    typer.Option("--format-file", metavar="FILE", help="A .toml file with a format of your own; may be repeated."),
]
#: How a number is rounded, and what becomes of one beyond the range.
Rounding = Annotated[str, typer.Option(metavar="MODE", help=f"One of {', '.join(formats.ROUNDINGS)}.")]
Overflow = Annotated[
    str, typer.Option(metavar="RULE", help=f"Beyond the range: one of {', '.join(formats.OVERFLOWS)}.")
]


def formats_command(
    context: typer.Context,
    format_file: FormatFiles = None,
    json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON and nothing else.")] = False,
) -> None:
    """List the number formats: range, precision, and which devices compute in them."""
    add_format_files(format_file)
    if context.invoked_subcommand is not None:
        return
    if json:
        write_json(json_text.dumps(table_rows(), indent=1, ensure_ascii=False) + "\n")
        return
    print_formats(new_console())


def add_format_files(paths: Sequence[Path] | None) -> None:
    """Make the formats of the files known, for this run. A file that is named twice is taken once.

    Raises:
        FormatError: a file cannot be read, or a name is taken.
    """
    for path in paths or ():
        for format in formats.read_format_file(path):
            if not _is_known(format):
                formats.add(format, origin=str(path))


def _is_known(format: Format | BlockFormat) -> bool:
    """Compared as text, since a golden value may be NaN, which nothing equals."""
    catalog: Mapping[str, object] = formats.BLOCK_FORMATS if isinstance(format, BlockFormat) else formats.FORMATS
    return format.name in catalog and repr(catalog[format.name]) == repr(format)


def native_devices() -> Mapping[str, tuple[str, ...]]:
    """Return format → short names of the devices with a matrix rate for it, in the order of their names."""
    found: dict[str, list[str]] = {}
    for device in hardware.devices():
        short = min((alias for alias in (device.name, *device.aliases) if device.name.startswith(alias)), key=len)
        for name in device.matmul_tflops:
            found.setdefault(name, []).append(short)
    return {name: tuple(devices) for name, devices in found.items()}


def table_rows() -> Mapping[str, list[Mapping[str, Any]]]:
    """Return both tables for machines: what `FormatRow` and `BlockRow` hold, and the devices."""
    native = native_devices()
    return {
        "formats": [{**asdict(row), "native": native.get(row.name, ())} for row in formats.rows()],
        "block_formats": [asdict(row) for row in formats.block_rows()],
    }


def print_formats(console: Console) -> None:
    """Print the table of scalar formats, then the one of block formats."""
    native = native_devices()
    narrow, middle = _scalar_table(layout=False, native=None), _scalar_table(layout=True, native=None)
    has_room = _width(console, middle) + _NATIVE_WIDTH <= console.width
    if has_room:
        print_table(console, _scalar_table(layout=True, native=native))
    else:
        print_table(console, middle if _width(console, middle) <= console.width else narrow)
    _say(console, "decimal digits: what the significand is worth; layout: bits of sign·exponent·fraction")
    if not has_room:
        console.print()
        _print_native(console, native)
    console.print()
    print_table(console, _block_table())
    _say(console, "bits: stored per value, scales included; block: how many values share a scale")


def spell_specials(row: FormatRow) -> str:
    """Return "Inf NaN", or what of it the format has."""
    return " ".join([*(["Inf"] if row.has_inf else []), *(["NaN"] if row.has_nan else [])])


def spell_largest(value: float) -> str:
    """Return a largest value in at most nine characters."""
    return f"{value:.6g}" if value < 1e6 else f"{value:.4g}".replace("e+", "e")


def _scalar_table(*, layout: bool, native: Mapping[str, tuple[str, ...]] | None) -> Table:
    table = new_table(
        ("format", False),
        ("bits", True),
        *([("layout", False)] if layout else []),
        ("largest", True),
        ("smallest\nnormal", True),
        ("smallest\nsubnormal", True),
        ("decimal\ndigits", True),
        ("steps/\noctave", True),
        ("specials", False),
        *([("native in", False)] if native is not None else []),
    )
    for row in formats.rows():
        table.add_row(
            Text(row.name),
            str(row.bits),
            *([Text(row.layout)] if layout else []),
            spell_largest(row.max),
            f"{row.min_normal:.3g}",
            "" if row.min_subnormal is None else f"{row.min_subnormal:.3g}",
            f"{row.decimal_digits:.1f}",
            "" if row.steps_per_octave is None else _spell_steps(row.steps_per_octave),
            spell_specials(row),
            *([Text(", ".join(native.get(row.name, ())))] if native is not None else []),
        )
    return table


def _spell_steps(steps: int) -> str:
    return str(steps) if steps < 1 << 20 else f"2^{steps.bit_length() - 1}"


def _print_native(console: Console, native: Mapping[str, tuple[str, ...]]) -> None:
    """One line for formats that the same devices compute in."""
    together: dict[tuple[str, ...], list[str]] = {}
    for row in formats.rows():
        if row.name in native:
            together.setdefault(native[row.name], []).append(row.name)
    table = new_table(("formats", False), ("native in", False))
    table.columns[0].no_wrap = False
    for devices, names in together.items():
        table.add_row(Text(", ".join(names)), Text(", ".join(devices)))
    print_table(console, table)


def _block_table() -> Table:
    table = new_table(
        ("block format", False), ("bits", True), ("element", False), ("block", True), ("scale", False), ("rule", False)
    )
    for row in formats.block_rows():
        table.add_row(
            Text(row.name),
            f"{row.bits_per_value:g}",
            Text(row.element),
            str(row.block_size),
            Text(row.scale_format),
            Text(row.rule),
        )
    return table


def _width(console: Console, table: Table) -> int:
    """How wide the table would be with all the room it likes."""
    return Measurement.get(console, console.options.update(width=_ALL_THE_ROOM), table).maximum


def _say(console: Console, text: str) -> None:
    console.print(Text(text, style="dim"))
