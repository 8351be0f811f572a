"""``bitwright formats``: every number format and its range."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from bitwright import formats
from bitwright.cli.table import new_table


def formats_command() -> None:
    """List the number formats."""
    table = new_table(
        ("format", False),
        ("bits", True),
        ("layout", False),
        ("largest", True),
        ("smallest>0", True),
        ("digits", True),
        ("specials", False),
    )
    for row in formats.rows():
        smallest = row.min_subnormal if row.min_subnormal is not None else row.min_normal
        table.add_row(
            Text(row.name),
            str(row.bits),
            Text(row.layout),
            f"{row.max:.6g}" if row.max < 1e6 else f"{row.max:.4g}",
            f"{smallest:.3g}",
            f"{row.decimal_digits:.1f}",
            " ".join([*(["Inf"] if row.has_inf else []), *(["NaN"] if row.has_nan else [])]),
        )
    console = Console()
    console.print(table)
    console.print(Text("layout: sign·exponent·fraction bits; digits: decimal digits of the significand", style="dim"))
