"""The folder `devices/` is the list of devices; a name or alias that two files claim is an error naming both."""

from __future__ import annotations

from bitwright.catalog import FileCatalog
from bitwright.errors import HardwareError
from bitwright.hardware.device import Device
from bitwright.hardware.device_file import parse_device

_DEVICES: FileCatalog[Device] = FileCatalog(
    kind="device",
    package="bitwright.hardware",
    folder="devices",
    read=parse_device,
    aliases=lambda device: device.aliases,
    claims=lambda device: device.runtime_names,
    error=HardwareError,
)


def names() -> tuple[str, ...]:
    """Return the canonical name of every device, sorted."""
    return _DEVICES.names


def devices() -> tuple[Device, ...]:
    """Return every device, sorted by name."""
    return tuple(_DEVICES.records[name] for name in names())


def get(name: str) -> Device:
    """Return a device by its name or an alias; case does not matter.

    Raises:
        UnknownName: no device has that name; the nearest one is suggested.
    """
    return _DEVICES.get(name)
