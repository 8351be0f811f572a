"""``bitwright schemes``: every preset a site can be given."""

from __future__ import annotations

from rich.text import Text

from bitwright.cli.table import new_console, new_table, print_table

#: Bits per weight are stated for a matrix whose sides every group size divides.
_SIDE = 4096


def schemes_command() -> None:
    """List the schemes: how weights are stored, and what activations are rounded to."""
    from bitwright.quantize import SCHEMES

    table = new_table(("scheme", False), ("bits", True), ("activations", False), ("what it is", False))
    for scheme in SCHEMES.values():
        bits = "" if scheme.weights is None else f"{8 * scheme.weights.stored_bytes(_SIDE, _SIDE) / _SIDE**2:.3f}"
        activations = "" if scheme.activations is None else scheme.activations.format
        table.add_row(Text(scheme.name), bits, Text(activations), Text(scheme.description))
    console = new_console()
    print_table(console, table)
    console.print(Text(f"bits: stored bits per weight of a {_SIDE} × {_SIDE} matrix, scales included", style="dim"))
