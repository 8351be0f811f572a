"""Reading and writing a device file, and refusing it with the name of the file and the field.

Unknown fields, missing figures, figures that are not positive, formats that no catalog has, and matmul rules for
formats without a rate are `HardwareError`s. What the fields mean stands at the top of `device.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bitwright import formats
from bitwright.catalog import nearest_name_hint
from bitwright.errors import HardwareError
from bitwright.fact_file import field_of, parse_facts, read_content
from bitwright.hardware.device import Certainty, Device, Kind, Link, MatmulRule

#: What a device may be called.
NAME_PATTERN = r"^[a-z0-9][a-z0-9.-]*$"
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(gt=0)]
_Text = Annotated[str, Field(min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _DetectSection(_Section):
    runtime_names: list[_Text] = []
    cpu_flags: list[_Text] = []


class _MemorySection(_Section):
    capacity_bytes: _Count
    bandwidth_gb_per_s: _Positive
    last_level_cache_bytes: _Count | None = None
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
    launch_s: _Positive | None = None
    matmul_tflops: _RatesSection
    read_gb_per_s: _RatesSection | None = None
    copy_gb_per_s: _RatesSection | None = None
    matvec_gb_per_s: _RatesSection | None = None

    @property
    def bandwidths(self) -> dict[str, _RatesSection]:
        """Way of moving → rates by format, of those that are there."""
        ways = {"read": self.read_gb_per_s, "copy": self.copy_gb_per_s, "matvec": self.matvec_gb_per_s}
        return {way: section for way, section in ways.items() if section is not None}


class _LinkSection(_Section):
    kind: _Text
    one_way_gb_per_s: _Positive
    source: _Text
    certainty: Certainty


class _MatmulRuleSection(_Section):
    formats: Annotated[list[_Text], Field(min_length=1)]
    group_size: _Count | None = None
    scale_formats: list[_Text] = []
    in_features_multiple: _Count = 1
    out_features_multiple: _Count = 1
    accumulator_bits: _Count | None = None
    source: _Text
    certainty: Certainty


class _DeviceFile(_Section):
    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    aliases: list[_Text] = []
    vendor: _Text
    kind: Kind
    year: Annotated[int, Field(ge=1990)]
    compute_capability: _Positive | None = None
    notes: list[_Text] = []
    detect: _DetectSection = _DetectSection()
    memory: _MemorySection
    matmul_tflops: _RatesSection
    achieved: _AchievedSection | None = None
    matmul_rules: list[_MatmulRuleSection] = []
    links: list[_LinkSection] = []


def read_device_file(path: str | Path) -> Device:
    """Read and check one device file, the catalog's or a user's.

    Raises:
        HardwareError: the file is missing or no TOML, a field is missing, unknown, or impossible, or a rate is given
            for an unknown format. The message names the file and the field.
    """
    return parse_device(read_content(path, kind="device", error=HardwareError), str(path))


def parse_device(content: bytes, file: str) -> Device:
    """Return the device of a file's content; `file` is what errors call it. Raises as `read_device_file` does."""
    fields = parse_facts(content, file, _DeviceFile, kind="device", error=HardwareError, describe=_describe)
    _raise_if_no_or_unknown_format(fields.matmul_tflops, "matmul_tflops", file)
    sections: dict[str, _MemorySection | _RatesSection] = {
        "memory": fields.memory,
        "matmul_tflops": fields.matmul_tflops,
    }
    achieved = fields.achieved
    if achieved is not None:
        _raise_if_no_or_unknown_format(achieved.matmul_tflops, "achieved.matmul_tflops", file)
        sections["achieved.matmul_tflops"] = achieved.matmul_tflops
        for way, section in achieved.bandwidths.items():
            _raise_if_no_or_unknown_format(section, f"achieved.{way}_gb_per_s", file)
            sections[f"achieved.{way}_gb_per_s"] = section
    for index, rule in enumerate(fields.matmul_rules):
        _raise_if_impossible_rule(rule, f"matmul_rules.{index}", fields.matmul_tflops.rates(), file)
    return Device(
        name=fields.name,
        aliases=tuple(alias.lower() for alias in fields.aliases),
        vendor=fields.vendor,
        kind=fields.kind,
        year=fields.year,
        compute_capability=fields.compute_capability,
        runtime_names=tuple(fields.detect.runtime_names),
        cpu_flags=tuple(fields.detect.cpu_flags),
        memory_bytes=fields.memory.capacity_bytes,
        memory_gb_per_s=fields.memory.bandwidth_gb_per_s,
        last_level_cache_bytes=fields.memory.last_level_cache_bytes,
        matmul_tflops=fields.matmul_tflops.rates(),
        achieved_matmul_tflops=achieved.matmul_tflops.rates() if achieved else MappingProxyType({}),
        achieved_memory_gb_per_s=achieved.memory_gb_per_s if achieved else None,
        achieved_gb_per_s=MappingProxyType(
            {way: section.rates() for way, section in (achieved.bandwidths if achieved else {}).items()}
        ),
        launch_s=achieved.launch_s if achieved else None,
        matmul_rules=tuple(_to_rule(rule) for rule in fields.matmul_rules),
        links=tuple(Link(**link.model_dump()) for link in fields.links),
        notes=tuple(fields.notes),
        sources=MappingProxyType({key: section.source for key, section in sections.items()}),
        certainties=MappingProxyType({key: section.certainty for key, section in sections.items()}),
    )


def write_device_text(device: Device) -> str:
    """Return the text of a device file that reads back as `device`."""
    blocks = [
        _lines(
            name=device.name,
            aliases=device.aliases,
            vendor=device.vendor,
            kind=device.kind,
            year=device.year,
            compute_capability=device.compute_capability,
            notes=device.notes,
        )
    ]
    if device.runtime_names or device.cpu_flags:
        blocks.append(_lines("[detect]", runtime_names=device.runtime_names, cpu_flags=device.cpu_flags))
    memory = _lines(
        "[memory]",
        capacity_bytes=device.memory_bytes,
        bandwidth_gb_per_s=device.memory_gb_per_s,
        last_level_cache_bytes=device.last_level_cache_bytes,
    )
    blocks += [memory + _origin(device, "memory")]
    blocks += [_lines("[matmul_tflops]", **device.matmul_tflops) + _origin(device, "matmul_tflops")]
    if device.achieved_matmul_tflops:
        blocks.append(_lines("[achieved]", memory_gb_per_s=device.achieved_memory_gb_per_s, launch_s=device.launch_s))
        rates = _lines("[achieved.matmul_tflops]", **device.achieved_matmul_tflops)
        blocks.append(rates + _origin(device, "achieved.matmul_tflops"))
        for way, of_format in device.achieved_gb_per_s.items():
            section = f"achieved.{way}_gb_per_s"
            blocks.append(_lines(f"[{section}]", **of_format) + _origin(device, section))
    blocks += [_lines("[[matmul_rules]]", **asdict(rule)) for rule in device.matmul_rules]
    blocks += [_lines("[[links]]", **asdict(link)) for link in device.links]
    return "\n".join(blocks)


def _origin(device: Device, section: str) -> str:
    return _lines(source=device.sources[section], certainty=device.certainties[section])


def _lines(title: str = "", /, **fields: object) -> str:
    """A section; what is None or empty is left out. JSON spells text, numbers and lists of text as TOML does."""
    present = {name: value for name, value in fields.items() if value not in (None, ())}
    return "".join(
        line + "\n"
        for line in [title, *(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in present.items())]
        if line
    )


def _raise_if_no_or_unknown_format(section: _RatesSection, field: str, file: str) -> None:
    rates = section.rates()
    if not rates:
        raise HardwareError(
            f"device file '{file}': [{field}] has no rate; give at least one, such as `fp32 = 19.5` "
            "(10¹² dense operations per second)"
        )
    for name in rates:
        _raise_if_unknown_format(name, f"{field}.{name}", file)


def _raise_if_unknown_format(name: str, field: str, file: str) -> None:
    known = formats.names()
    if name not in known:
        raise HardwareError(
            f"device file '{file}': field '{field}' is for an unknown format{nearest_name_hint(name, list(known))} "
            f"Known formats: {', '.join(known)}"
        )


def _raise_if_impossible_rule(rule: _MatmulRuleSection, field: str, rates: Mapping[str, float], file: str) -> None:
    """A rule speaks of formats that have a rate, and of scale formats exactly where it has a group size."""
    for name in rule.formats:
        _raise_if_unknown_format(name, f"{field}.formats.{name}", file)
        if name not in rates:
            raise HardwareError(
                f"device file '{file}': field '{field}.formats' names {name}, which has no rate in [matmul_tflops]; "
                "add its rate there, or leave it out of the rule"
            )
    for name in rule.scale_formats:
        _raise_if_unknown_format(name, f"{field}.scale_formats.{name}", file)
    if (rule.group_size is None) != (not rule.scale_formats):
        raise HardwareError(
            f"device file '{file}': field '{field}' has group_size {rule.group_size} with scale_formats "
            f"{rule.scale_formats}; give both, for scales along in_features, or neither"
        )


def _to_rule(rule: _MatmulRuleSection) -> MatmulRule:
    fields = rule.model_dump()
    return MatmulRule(**{**fields, "formats": tuple(rule.formats), "scale_formats": tuple(rule.scale_formats)})


def _describe(error: ValidationError, file: str) -> str:
    """Say the first finding in full, and name the fields of the others."""
    first, *others = error.errors()
    field = field_of(first)
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
        text += "; also wrong: " + ", ".join(f"'{field_of(other)}'" for other in others)
    return text
