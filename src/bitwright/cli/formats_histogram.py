"""``bitwright formats histogram``: where the values of a checkpoint lie, and what each format would do to them.

The file is streamed: memory does not grow with it. Rows are octaves, the widest first; beside each stands what every
format makes of the values in it, so that the picture is read without colour.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bitwright import formats
from bitwright.cli.formats import FormatFiles, add_format_files
from bitwright.cli.number_text import spell_count
from bitwright.cli.progress import Bars
from bitwright.cli.table import new_console, new_table, print_rows, print_table
from bitwright.cli.usage import split_names
from bitwright.errors import FormatError
from bitwright.models.tensor_files import StoredTensor, list_tensors, select_tensors
from bitwright.models.tensor_survey import Survey, prepare_counting, readable_tensors, survey_tensors
from bitwright.quantize.range_shares import Fate, raise_if_unsigned
from bitwright.report.histogram_page import raise_if_no_place, write_histogram
from bitwright.report.units import spell_bytes, spell_decibels, spell_number, spell_share

_DEFAULT_FORMATS = "bf16,fp16,fp8_e5m2,fp8_e4m3,fp6_e3m2,fp4_e2m1"
#: More octaves than this are shown in twos, fours, …
_MAX_ROWS = 40
_SIGNS: Mapping[Fate, str] = {"normal": "█", "subnormal": "▒", "zero": "0", "overflow": ">"}
_STYLES: Mapping[Fate, str] = {"normal": "green", "subnormal": "yellow", "zero": "red", "overflow": "bold red"}
#: Of an octave, or several in one row, whose values do not all fare alike.
_MIXED = "*"
_LEGEND = "█ full precision   ▒ subnormal   0 rounds to 0   > too large   * mixed"
_MIN_BAR, _MAX_BAR = 8, 40
#: Characters that a tensor's name takes before it is folded.
_NAME_WIDTH = 28
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MIB = 1 << 20


def histogram_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A .safetensors file, an index of shards, or their folder.", show_default=False
        ),
    ],
    tensor: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Only these tensors: a whole name, or * for any part. May be repeated."),
    ] = None,
    only: Annotated[
        str, typer.Option("--formats", metavar="a,b,…", help="Formats to hold the values against.")
    ] = _DEFAULT_FORMATS,
    scaled: Annotated[
        bool, typer.Option("--scaled", help="Scale each tensor: its largest magnitude onto the format's largest value.")
    ] = False,
    per_tensor: Annotated[bool, typer.Option("--per-tensor", help="One line per tensor as well.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a plot: .png or .html.", show_default=False)
    ] = None,
    format_file: FormatFiles = None,
) -> None:
    """Show where a checkpoint's values lie: how many each format takes to 0, holds as subnormal, or cannot hold."""
    add_format_files(format_file)
    names = _scalar_formats(only)
    if out is not None:
        raise_if_no_place(out)
    tensors = select_tensors(list_tensors(file), tensor or ())
    readable, _ = readable_tensors(tensors)
    with Console(stderr=True).status("preparing (compiles the counting loops once, then keeps them on disk)"):
        prepare_counting(readable)
    survey = _read(tensors, names, sum(entry.num_bytes for entry in readable), scaled=scaled, per_tensor=per_tensor)
    console = new_console()
    _print_summary(console, file, survey)
    console.print()
    _print_octaves(console, survey)
    console.print()
    _print_shares(console, survey)
    if per_tensor:
        console.print()
        _print_tensors(console, survey)
    if out is not None:
        write_histogram(survey, file.name or str(file), out)
        console.print(Text(f"plot  {out}"))


def _scalar_formats(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(formats.resolve(name) for name in split_names(text, "format")))
    for name in names:
        if name not in formats.FORMATS:
            raise FormatError(
                f"{name} is a block format: what it does depends on which values share a scale, not on magnitudes "
                "alone; choose among " + ", ".join(name for name in formats.names() if formats.FORMATS[name].signed)
            )
        raise_if_unsigned(name)
    return names


def _read(
    tensors: tuple[StoredTensor, ...], names: tuple[str, ...], num_bytes: int, *, scaled: bool, per_tensor: bool
) -> Survey:
    num_read = 0
    started_s = time.perf_counter()
    with Bars() as bars, bars.stage("read, MiB", -(-num_bytes // _MIB)) as stage:

        def on_read(piece_bytes: int) -> None:
            nonlocal num_read
            stage.advance((num_read + piece_bytes) // _MIB - num_read // _MIB)
            num_read += piece_bytes

        survey = survey_tensors(tensors, names, scaled=scaled, per_tensor=per_tensor, on_read=on_read)
        if num_bytes % _MIB:
            stage.advance()
    elapsed_s = time.perf_counter() - started_s
    rate = f"{spell_bytes(num_bytes)} read at {spell_bytes(num_bytes / elapsed_s)}/s"
    Console(stderr=True).print(rate, markup=False, highlight=False)
    return survey


def _print_summary(console: Console, file: Path, survey: Survey) -> None:
    statistics = survey.statistics
    unusual = [
        f"{number:,} {what}"
        for number, what in ((statistics.num_nan, "NaN"), (statistics.num_inf, "Inf"), (statistics.num_zero, "zeros"))
        if number
    ]
    tensors = spell_count(survey.num_tensors, "tensor")
    rows = [
        ("file", _printable(str(file))),
        (
            "values",
            f"{statistics.num:,} in {tensors}; {', '.join(unusual) or 'no NaN, Inf or 0'}",
        ),
        (
            "magnitudes",
            f"largest {spell_number(statistics.amax)}, smallest but 0 "
            f"{spell_number(statistics.smallest if statistics.amax else None)}, rms {spell_number(statistics.rms)}",
        ),
    ]
    if survey.skipped:
        what = ", ".join(f"{number} of {dtype}" for dtype, number in survey.skipped.items())
        rows.append(
            ("left out", f"{spell_count(sum(survey.skipped.values()), 'tensor')} with no floats of whole bytes: {what}")
        )
    if survey.scaled:
        rows.append(("scaled", "each tensor's largest magnitude is put on the format's largest value"))
    print_rows(console, rows)


def _print_octaves(console: Console, survey: Survey) -> None:
    """One row per octave (or several together), the widest first; formats that find no room follow in a table more."""
    if not survey.octaves:
        num = survey.statistics.num_finite
        console.print(Text(f"all {num:,} finite values are 0, which every format here with a zero keeps"))
        return
    width = -(-(max(survey.octaves) - min(survey.octaves) + 1) // _MAX_ROWS)
    title = "× largest" if survey.scaled else "from"
    # Two columns of space after each column: its own padding and the table's.
    room = console.width - max(len(title), 6) - len("< 0.01 %") - 6
    tables = _split(survey.formats, room - _MIN_BAR)
    bar = max(_MIN_BAR, min(_MAX_BAR, room - max(sum(map(_column_width, names)) for names in tables)))
    for names in tables:
        _print_octave_table(console, survey, names, title, width, bar)
        if names is not tables[-1]:
            console.print()
    console.print(Text(_LEGEND, style="dim"))
    if width > 1:
        console.print(Text(f"{width} octaves a row, from the lower end of the lowest", style="dim"))


def _print_octave_table(
    console: Console, survey: Survey, names: Sequence[str], title: str, width: int, bar: int
) -> None:
    counts: dict[int, int] = {}
    for exponent, count in survey.octaves.items():
        counts[exponent // width] = counts.get(exponent // width, 0) + count
    largest, num = max(counts.values()), survey.statistics.num_finite
    table = new_table((title, True), ("share", True), ("", False))
    table.columns[2].no_wrap = True
    for name in names:
        table.add_column(Text(_head(name)), justify="center", no_wrap=True)
    for group in range(max(counts), min(counts) - 1, -1):
        count = counts.get(group, 0)
        octaves = range(group * width, (group + 1) * width)
        marks = (_mark([survey.fates[name].get(octave, frozenset()) for octave in octaves]) for name in names)
        table.add_row(
            f"2^{group * width}",
            spell_share(count / num),
            Text(_bar(count / largest, bar), style="cyan"),
            *marks,
        )
    print_table(console, table)


def _mark(octaves: Sequence[frozenset[Fate]]) -> Text:
    """What becomes of the values of a row; nothing where it has none."""
    fates = frozenset[Fate]().union(*octaves)
    if len(fates) != 1:
        return Text(_MIXED if fates else "", style="yellow")
    (fate,) = fates
    return Text(_SIGNS[fate], style=_STYLES[fate])


def _split(names: Sequence[str], room: int, narrowest: int = 0) -> list[list[str]]:
    """Divide formats over as many tables as it takes for their columns to fit."""
    tables: list[list[str]] = [[]]
    taken = 0
    for name in names:
        column = max(_column_width(name), narrowest + 2)
        if tables[-1] and taken + column > room:
            tables.append([])
            taken = 0
        tables[-1].append(name)
        taken += column
    return tables


def _column_width(name: str) -> int:
    return max(map(len, _head(name).split("\n"))) + 2


def _head(name: str) -> str:
    """A format's name on two lines."""
    return "\n".join(name.split("_", 1))


def _bar(share: float, room: int) -> str:
    """A bar of eighths of a character; what is not 0 shows."""
    eighths = max(round(8 * room * share), 1 if share else 0)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()).ljust(room)


def _print_shares(console: Console, survey: Survey) -> None:
    table = new_table(
        ("format", False),
        ("largest", True),
        ("→ 0", True),
        ("subnormal", True),
        ("too large", True),
        ("signal/noise", True),
    )
    for name, shares in survey.shares.items():
        table.add_row(
            Text(name),
            f"{formats.FORMATS[name].max:.6g}",
            spell_share(shares.flushed),
            spell_share(shares.subnormal),
            spell_share(shares.overflow),
            spell_decibels(shares.sqnr_db),
        )
    print_table(console, table)
    console.print(
        Text(
            "shares of the finite values; noise of rounding to nearest, the too large held at the largest", style="dim"
        )
    )


def _print_tensors(console: Console, survey: Survey) -> None:
    longest = max(len(_printable(row.name)) for row in survey.rows)
    for names in _split(survey.formats, console.width - min(longest, _NAME_WIDTH) - 11, len("< 0.01")):
        table = new_table(("tensor", False), ("largest", True), *((_head(name), True) for name in names))
        table.columns[0].no_wrap = False
        for row in survey.rows:
            lost = [row.shares[name].flushed + row.shares[name].overflow for name in names]
            table.add_row(
                Text(_printable(row.name)),
                "all NaN" if row.num and row.num == row.num_nan else spell_number(row.amax),
                *(spell_share(share).removesuffix(" %") for share in lost),
            )
        print_table(console, table)
    console.print(Text("under each format: % of the tensor's values that become 0 or are too large", style="dim"))


def _printable(name: str) -> str:
    """Names come from files: control characters are shown, not sent to the terminal."""
    return name if name.isprintable() else repr(name)
