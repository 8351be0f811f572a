"""``bitwright hardware``: the devices a plan can be made for.

Without a further verb it is the list; `show` and `profile` are files beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping

import typer
from rich.text import Text

from bitwright import hardware
from bitwright.cli.table import new_console, new_table, print_table
from bitwright.report.units import spell_bytes


def hardware_command(context: typer.Context) -> None:
    """List the devices, show one, or measure this machine."""
    if context.invoked_subcommand is None:
        list_command()


def list_command() -> None:
    """List the devices, and say which one this machine is."""
    table = new_table(
        ("device", False), ("memory", True), ("GB/s", True), ("dense TFLOP/s", False), ("also called", False)
    )
    for device in hardware.devices():
        table.add_row(
            Text(device.name),
            spell_bytes(device.memory_bytes),
            f"{device.memory_gb_per_s:g}",
            Text(spell_rates(device.matmul_tflops)),
            Text(", ".join(device.aliases)),
        )
    console = new_console()
    print_table(console, table)
    detected, reason = hardware.detect()
    console.print(Text(f"this machine: {detected.name} ({reason})"))


def spell_rates(rates: Mapping[str, float]) -> str:
    """Return "bf16 312, int8 624"."""
    return ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
