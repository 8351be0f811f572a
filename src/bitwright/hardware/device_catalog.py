"""The folder `devices/` is the list of devices; a name or alias that two files claim is an error naming both."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType

from bitwright.catalog import nearest_name_hint
from bitwright.errors import HardwareError, UnknownName
from bitwright.hardware.device import Device
from bitwright.hardware.device_file import parse_device


def names() -> tuple[str, ...]:
    """Return the canonical name of every device, sorted."""
    return tuple(sorted(_catalog()))


def devices() -> tuple[Device, ...]:
    """Return every device, sorted by name."""
    return tuple(_catalog()[name] for name in names())


def get(name: str) -> Device:
    """Return a device by its name or an alias; case does not matter.

    Raises:
        UnknownName: no device has that name; the nearest one is suggested.
    """
    catalog = _catalog()
    written = name.strip().lower()
    by_alias = {alias: device for device in catalog.values() for alias in device.aliases}
    if written in catalog:
        return catalog[written]
    if written in by_alias:
        return by_alias[written]
    hint = nearest_name_hint(written, [*catalog, *by_alias])
    raise UnknownName(f"unknown device {name!r}{hint} Known devices: {', '.join(names())}")


@cache
def _catalog() -> Mapping[str, Device]:
    found: dict[str, Device] = {}
    claimed: dict[str, str] = {}
    folder = resources.files(__package__) / "devices"
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if not entry.name.endswith(".toml"):
            continue
        device = parse_device(entry.read_bytes(), entry.name)
        for claim in (device.name, *device.aliases, *device.runtime_names):
            if claim in claimed:
                raise HardwareError(f"device name '{claim}' is claimed twice: in {claimed[claim]} and {entry.name}")
            claimed[claim] = entry.name
        found[device.name] = device
    return MappingProxyType(found)
