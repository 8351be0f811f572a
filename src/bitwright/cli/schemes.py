"""``bitwright schemes``: every preset that a site can be given, for weights and for values."""

from __future__ import annotations

from rich.text import Text

from bitwright.cli.table import new_console, new_table, print_table

#: Bits per weight are stated for a matrix whose sides every group size divides, bits per value for heads of this size.
_SIDE = 4096
_HEAD_DIM = 128


def schemes_command() -> None:
    """List the schemes: how weights are stored, and how activations, caches and other values are rounded."""
    from bitwright.quantize import SCHEMES
    from bitwright.quantize.catalogs import VALUE_SCHEMES

    table = new_table(("scheme", False), ("bits", True), ("activations", False), ("what it is", False))
    for scheme in SCHEMES.values():
        bits = "" if scheme.weights is None else f"{8 * scheme.weights.stored_bytes(_SIDE, _SIDE) / _SIDE**2:.3f}"
        activations = "" if scheme.activations is None else scheme.activations.format
        table.add_row(Text(scheme.name), bits, Text(activations), Text(scheme.description))
    console = new_console()
    print_table(console, table)
    console.print(Text(f"bits: stored bits per weight of a {_SIDE} × {_SIDE} matrix, scales included", style="dim"))
    console.print()
    values = new_table(("scheme of values", False), ("bits", True), ("where", False), ("what it is", False))
    for value_scheme in VALUE_SCHEMES.values():
        values.add_row(
            Text(value_scheme.name),
            f"{value_scheme.stored_bits(_HEAD_DIM):.3f}",
            Text(", ".join(sorted(value_scheme.roles))),
            Text(value_scheme.description),
        )
    print_table(console, values)
    console.print(Text(f"bits: per value of a head of {_HEAD_DIM}, scales included", style="dim"))
