"""One device = one TOML file in `devices/`; the folder is the list. No code branches on a device's name.

    name = "h100-sxm"                  # canonical; `aliases` are accepted at the borders
    [detect]                           # how the machine at hand is recognised: runtime_names (of a GPU) or cpu_flags
    [memory]                           # capacity_bytes, bandwidth_gb_per_s
    [matmul_tflops]                    # peak DENSE rate, keyed by format; multiply and add count as two operations
    [achieved.matmul_tflops]           # what somebody measured, optional
    [[links]]                          # one-way bandwidth to other devices

Every section of figures has `source` (where it can be looked up) and `certainty`: *read* there, *recalled*
(unchecked), *derived* by the arithmetic that `source` spells out, or *measured*. A format without a rate is one the
chip has no matrix unit for, or one of which nothing is known; it is never zero. Rates are with fp32 accumulation, and
without 2:4 sparsity (data sheets often print the doubled figure). GB is 10⁹ bytes.

The file is checked where it is read: unknown fields, missing figures, figures that are not positive, and formats that
no catalog has are `HardwareError`s that name the file and the field. After that a `Device` is a frozen record.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bitwright import formats
from bitwright.catalog import nearest_name_hint
from bitwright.errors import HardwareError, UnknownName

Certainty = Literal["read", "recalled", "derived", "measured"]
Kind = Literal["gpu", "cpu", "accelerator"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One way out of a device."""

    #: "NVLink4", "PCIe5 x16".
    kind: str
    #: 10⁹ bytes per second, in one direction, all lanes of one device together.
    one_way_gb_per_s: float
    source: str
    certainty: Certainty


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one chip can do. Read from a file by `read_device_file`; figures are peaks unless they say *achieved*."""

    name: str
    aliases: tuple[str, ...]
    vendor: str
    kind: Kind
    year: int
    #: Names that a runtime reports for this device (``torch.cuda.get_device_name``), compared exactly.
    runtime_names: tuple[str, ...]
    #: Instruction sets a processor must have to be this device (names of Linux's /proc/cpuinfo).
    cpu_flags: tuple[str, ...]
    memory_bytes: int
    #: Peak bandwidth of the device's own memory, 10⁹ bytes per second.
    memory_gb_per_s: float
    last_level_cache_bytes: int | None
    #: Format → peak dense rate in 10¹² operations per second; absent = not native, or unknown.
    matmul_tflops: Mapping[str, float]
    #: The same as somebody measured it; empty where nobody did.
    achieved_matmul_tflops: Mapping[str, float]
    achieved_memory_gb_per_s: float | None
    links: tuple[Link, ...]
    notes: tuple[str, ...]
    #: Section ("memory", "matmul_tflops", "achieved.matmul_tflops") → where its figures can be looked up.
    sources: Mapping[str, str]
    #: Section → how sure its figures are.
    certainties: Mapping[str, Certainty]


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _DetectSection(_Section):
    runtime_names: list[_Text] = []
    cpu_flags: list[_Text] = []


class _MemorySection(_Section):
    capacity_bytes: Annotated[int, Field(gt=0)]
    bandwidth_gb_per_s: _Positive
    last_level_cache_bytes: Annotated[int, Field(gt=0)] | None = None
    source: _Text
    certainty: Certainty


class _RatesSection(BaseModel):
    """Formats are the extra keys of this section; their names are checked by `_raise_if_unknown_format`."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, _Positive] = Field(init=False)
    source: _Text
    certainty: Certainty

    def rates(self) -> Mapping[str, float]:
        return MappingProxyType(dict(self.__pydantic_extra__))


class _AchievedSection(_Section):
    memory_gb_per_s: _Positive | None = None
    matmul_tflops: _RatesSection


class _LinkSection(_Section):
    kind: _Text
    one_way_gb_per_s: _Positive
    source: _Text
    certainty: Certainty


class _DeviceFile(_Section):
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    aliases: list[_Text] = []
    vendor: _Text
    kind: Kind
    year: Annotated[int, Field(ge=1990)]
    notes: list[_Text] = []
    detect: _DetectSection = _DetectSection()
    memory: _MemorySection
    matmul_tflops: _RatesSection
    achieved: _AchievedSection | None = None
    links: list[_LinkSection] = []


def read_device_file(path: str | Path) -> Device:
    """Read and check one device file, the catalog's or a user's.

    Raises:
        HardwareError: the file is missing or no TOML, a field is missing, unknown, or impossible, or a rate is given
            for an unknown format. The message names the file and the field.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HardwareError(
            f"device file '{path}' cannot be read ({error.strerror}); give the path of a .toml file"
        ) from error
    return _parse(content, str(path))


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
    """Read every file of `devices/`; two files that claim one name, alias or runtime name are an error naming both."""
    found: dict[str, Device] = {}
    claimed: dict[str, str] = {}
    folder = resources.files(__package__) / "devices"
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if not entry.name.endswith(".toml"):
            continue
        device = _parse(entry.read_bytes(), entry.name)
        for claim in (device.name, *device.aliases, *device.runtime_names):
            if claim in claimed:
                raise HardwareError(f"device name '{claim}' is claimed twice: in {claimed[claim]} and {entry.name}")
            claimed[claim] = entry.name
        found[device.name] = device
    return MappingProxyType(found)


def _parse(content: bytes, file: str) -> Device:
    try:
        data = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise HardwareError(f"device file '{file}' is no TOML ({error}); correct it at that place") from error
    try:
        fields = _DeviceFile.model_validate(data)
    except ValidationError as error:
        raise HardwareError(_describe(error, file)) from error
    _raise_if_no_or_unknown_format(fields.matmul_tflops, "matmul_tflops", file)
    sections: dict[str, _MemorySection | _RatesSection] = {
        "memory": fields.memory,
        "matmul_tflops": fields.matmul_tflops,
    }
    achieved = fields.achieved
    if achieved is not None:
        _raise_if_no_or_unknown_format(achieved.matmul_tflops, "achieved.matmul_tflops", file)
        sections["achieved.matmul_tflops"] = achieved.matmul_tflops
    return Device(
        name=fields.name,
        aliases=tuple(alias.lower() for alias in fields.aliases),
        vendor=fields.vendor,
        kind=fields.kind,
        year=fields.year,
        runtime_names=tuple(fields.detect.runtime_names),
        cpu_flags=tuple(fields.detect.cpu_flags),
        memory_bytes=fields.memory.capacity_bytes,
        memory_gb_per_s=fields.memory.bandwidth_gb_per_s,
        last_level_cache_bytes=fields.memory.last_level_cache_bytes,
        matmul_tflops=fields.matmul_tflops.rates(),
        achieved_matmul_tflops=achieved.matmul_tflops.rates() if achieved else MappingProxyType({}),
        achieved_memory_gb_per_s=achieved.memory_gb_per_s if achieved else None,
        links=tuple(Link(**link.model_dump()) for link in fields.links),
        notes=tuple(fields.notes),
        sources=MappingProxyType({key: section.source for key, section in sections.items()}),
        certainties=MappingProxyType({key: section.certainty for key, section in sections.items()}),
    )


def _raise_if_no_or_unknown_format(section: _RatesSection, field: str, file: str) -> None:
    rates = section.rates()
    known = formats.names()
    if not rates:
        raise HardwareError(
            f"device file '{file}': [{field}] has no rate; give at least one, such as `fp32 = 19.5` "
            "(10¹² dense operations per second)"
        )
    for name in rates:
        if name not in known:
            hint = nearest_name_hint(name, list(known))
            raise HardwareError(
                f"device file '{file}': field '{field}.{name}' is for an unknown format{hint} "
                f"Known formats: {', '.join(known)}"
            )


def _describe(error: ValidationError, file: str) -> str:
    """Say the first finding in full, and name the fields of the others."""
    first, *others = error.errors()
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        text = (
            f"device file '{file}': field '{field}' is missing; add it (or copy a file of hardware/devices as a start)"
        )
    elif first["type"] == "extra_forbidden":
        known = ", ".join(_DeviceFile.model_fields)
        text = f"device file '{file}': field '{field}' is unknown; remove it. Top-level fields are: {known}"
    else:
        rule = first["msg"].removeprefix("Input ").strip()
        text = f"device file '{file}': field '{field}' is {first['input']!r} but {rule}; correct it"
    if others:
        text += "; also wrong: " + ", ".join(
            "'" + ".".join(str(part) for part in other["loc"]) + "'" for other in others
        )
    return text
