"""``bitwright hardware show NAME|FILE``: one device with all its figures, and where each comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bitwright import hardware
from bitwright.cli.hardware import spell_rates
from bitwright.cli.table import new_console, print_rows
from bitwright.hardware import Device, MatmulRule
from bitwright.report.units import spell_bytes


def show_command(
    device: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A device, or the path of a device file (.toml).")],
) -> None:
    """Show one device: memory, rates, rules of its matrix unit, links, notes and sources."""
    print_device(new_console(), find_device(device))


def find_device(text: str) -> Device:
    """Return the device of a name or of a file's path; what ends in .toml is a file.

    Raises:
        HardwareError: the file is missing or wrong.
        UnknownName: no device has that name.
    """
    return hardware.read_device_file(Path(text)) if text.endswith(".toml") else hardware.get(text)


def print_device(console: Console, device: Device) -> None:
    """Print one device."""
    rows = [
        ("device", f"{device.name}, {device.vendor}, {device.year}"),
        ("also called", ", ".join(device.aliases)),
        ("memory", f"{spell_bytes(device.memory_bytes)} at {device.memory_gb_per_s:g} GB/s{_origin(device, 'memory')}"),
        (
            "last-level cache",
            spell_bytes(device.last_level_cache_bytes) if device.last_level_cache_bytes is not None else "",
        ),
        ("dense peak, TFLOP/s", spell_rates(device.matmul_tflops) + _origin(device, "matmul_tflops")),
    ]
    if device.achieved_matmul_tflops:
        achieved = spell_rates(device.achieved_matmul_tflops) + _origin(device, "achieved.matmul_tflops")
        rows.append(("achieved, TFLOP/s", achieved))
    if device.achieved_memory_gb_per_s is not None:
        rows.append(("achieved, GB/s", f"{device.achieved_memory_gb_per_s:g}"))
    for way, rates in device.achieved_gb_per_s.items():
        rows.append((f"{way}, GB/s", spell_rates(rates) + _origin(device, f"achieved.{way}_gb_per_s")))
    if device.launch_s is not None:
        rows.append(("launch", f"{1e6 * device.launch_s:.3g} µs"))
    rows += [
        (f"link {link.kind}", f"{link.one_way_gb_per_s:g} GB/s one way ({link.certainty}: {link.source})")
        for link in device.links
    ]
    rows += [("note", note) for note in device.notes]
    rows += [(f"products of {', '.join(rule.formats)}", _spell_rule(rule)) for rule in device.matmul_rules]
    print_rows(console, [row for row in rows if row[1]])


def _spell_rule(rule: MatmulRule) -> str:
    scales = "scales outside the sum"
    if rule.group_size is not None:
        scales = f"{' or '.join(rule.scale_formats)} scales per {rule.group_size} along in_features"
    sizes = f"in_features a multiple of {rule.in_features_multiple}, out_features of {rule.out_features_multiple}"
    kept = "" if rule.accumulator_bits is None else f"; sums keep {rule.accumulator_bits} significant bits"
    return f"{scales}; {sizes}{kept} ({rule.certainty}: {rule.source})"


def _origin(device: Device, section: str) -> str:
    return f" ({device.certainties[section]}: {device.sources[section]})"
