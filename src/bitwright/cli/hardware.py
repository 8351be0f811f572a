"""``bitwright hardware``: the devices a plan can be made for."""

from __future__ import annotations

from rich.text import Text

from bitwright import hardware
from bitwright.cli.table import new_console, new_table, print_table
from bitwright.report.units import spell_bytes


def hardware_command() -> None:
    """List the devices, and say which one this machine is."""
    table = new_table(
        ("device", False), ("memory", True), ("GB/s", True), ("dense TFLOP/s", False), ("also called", False)
    )
    for device in hardware.devices():
        rates = ", ".join(f"{name} {rate:g}" for name, rate in device.matmul_tflops.items())
        table.add_row(
            Text(device.name),
            spell_bytes(device.memory_bytes),
            f"{device.memory_gb_per_s:g}",
            Text(rates),
            Text(", ".join(device.aliases)),
        )
    console = new_console()
    print_table(console, table)
    detected, reason = hardware.detect()
    console.print(Text(f"this machine: {detected.name} ({reason})"))
