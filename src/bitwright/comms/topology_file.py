"""Reading and writing a topology file, the folder of them, and names that spell counts.

    name = "h100"
    device = "h100-sxm"               # hardware/devices; NCCL chooses by its compute capability
    [[levels]]                        # innermost first
    kind = "NVSwitch"
    medium = "nvlink"                 # nvlink, pci or network: whose latencies hold
    members = 8                       # of a full unit
    one_way_gb_per_s = 450            # of one rank
    switch_reduces = true             # optional, as are full_mesh, is_shared and hop_latency_s
    source = "…"
    certainty = "read"
    [[levels.curves]]                 # what somebody measured there; optional
    algorithm = "ring"
    ceiling_gb_per_s = 366
    half_size_bytes = 8_388_608
    residuals = [[1048576, 0.03]]     # bytes, and what the curve is off by there, as `comm fit` writes

`topology.py` says what the fields mean. A missing link, an unknown field, or a figure that cannot be is a `CommsError`
that names the file and the field. `comm fit` writes such files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bitwright import hardware
from bitwright.catalog import FileCatalog, nearest_name_hint
from bitwright.comms.topology import Curve, Level, Medium, Topology
from bitwright.comms.wire_bytes import BUS_FACTORS, WIRE_FORMS
from bitwright.errors import CommsError
from bitwright.fact_file import field_of, parse_facts, read_content
from bitwright.hardware.device import Certainty

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(gt=0)]
_Text = Annotated[str, Field(min_length=1)]
_NAME = r"[a-z0-9][a-z0-9.-]*"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _CurveSection(_Section):
    algorithm: _Text
    ceiling_gb_per_s: _Positive
    half_size_bytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    latency_s: _Positive | None = None
    ops: list[_Text] = []
    residuals: list[Annotated[list[float], Field(min_length=2, max_length=2)]] = []


class _LevelSection(_Section):
    kind: _Text
    medium: Medium
    members: _Count
    one_way_gb_per_s: _Positive
    hop_latency_s: _Positive | None = None
    full_mesh: bool = False
    switch_reduces: bool = False
    is_shared: bool = False
    curves: list[_CurveSection] = []
    source: _Text
    certainty: Certainty


class _TopologyFile(_Section):
    name: Annotated[str, Field(pattern=f"^{_NAME}$")]
    aliases: list[_Text] = []
    device: _Text | None = None
    latency_ratio: _Positive = 1.0
    notes: list[_Text] = []
    levels: Annotated[list[_LevelSection], Field(min_length=1)]


def raise_if_no_name(name: str) -> None:
    """Refuse a name that no topology file may have.

    Raises:
        CommsError: it is none.
    """
    if re.fullmatch(_NAME, name) is None:
        raise CommsError(
            f"{name!r} cannot be a topology's name, which has small letters, digits, dots and hyphens and begins with "
            "a letter or digit; name it so, as in --name this-cluster"
        )


def read_topology_file(path: str | Path) -> Topology:
    """Read and check one topology file.

    Raises:
        CommsError: the file is missing or no TOML, or a field is missing, unknown or impossible; file and field are
            named.
        UnknownName: no device has the name of `device`.
    """
    return parse_topology(read_content(path, kind="topology", error=CommsError), str(path))


def parse_topology(content: bytes, file: str) -> Topology:
    """Return the topology of a file's content, all members of each level in it; raises as `read_topology_file`."""
    fields = parse_facts(content, file, _TopologyFile, kind="topology", error=CommsError, describe=_describe)
    levels = tuple(_level(section, f"levels.{index}", file) for index, section in enumerate(fields.levels))
    device = None if fields.device is None else hardware.get(fields.device)
    return Topology(
        name=fields.name,
        aliases=tuple(alias.lower() for alias in fields.aliases),
        device=None if device is None else device.name,
        compute_capability=None if device is None else device.compute_capability,
        levels=levels,
        notes=tuple(fields.notes),
        counts=tuple(level.members for level in levels),
        latency_ratio=fields.latency_ratio,
    )


def _level(section: _LevelSection, where: str, file: str) -> Level:
    known_algorithms = [form.algorithm for form in WIRE_FORMS]
    for index, curve in enumerate(section.curves):
        place = f"topology file '{file}': {where}.curves.{index}"
        if curve.algorithm not in known_algorithms:
            hint = nearest_name_hint(curve.algorithm, known_algorithms)
            raise CommsError(f"{place}.algorithm is {curve.algorithm!r}, which no algorithm is called{hint}")
        unknown = [op for op in curve.ops if op not in BUS_FACTORS]
        if unknown:
            raise CommsError(
                f"{place}.ops has {unknown[0]!r}, which no collective is called; use {', '.join(BUS_FACTORS)}"
            )
    return Level(
        kind=section.kind,
        medium=section.medium,
        members=section.members,
        one_way_gb_per_s=section.one_way_gb_per_s,
        hop_latency_s=section.hop_latency_s,
        full_mesh=section.full_mesh,
        switch_reduces=section.switch_reduces,
        is_shared=section.is_shared,
        curves=tuple(
            Curve(
                algorithm=curve.algorithm,
                ceiling_gb_per_s=curve.ceiling_gb_per_s,
                half_size_bytes=curve.half_size_bytes,
                latency_s=curve.latency_s,
                ops=tuple(curve.ops),
                residuals=tuple((int(num_bytes), error) for num_bytes, error in curve.residuals),
            )
            for curve in section.curves
        ),
        source=section.source,
        certainty=section.certainty,
    )


def _describe(error: ValidationError, file: str) -> str:
    first = error.errors()[0]
    field = field_of(first)
    if first["type"] == "missing":
        return f"topology file '{file}' lacks {field}; add it (links of every level need rate, medium and source)"
    return f"topology file '{file}': {field}: {first['msg'][0].lower()}{first['msg'][1:]}; correct that field"


#: Every topology that bitwright knows, one file each.
TOPOLOGIES: FileCatalog[Topology] = FileCatalog(
    kind="cluster",
    package="bitwright.comms",
    folder="topologies",
    read=parse_topology,
    aliases=lambda topology: topology.aliases,
    error=CommsError,
)


def topology(spelled: str) -> Topology:
    """Return a cluster by a name and its counts: "h100x8x16"; a name may be the path of a .toml file.

    Outer counts that are left out are one; a bare name is its innermost unit, full, a bare file all that it has.

    Raises:
        CommsError: counts that the topology has no levels for, or a file that cannot be read.
        UnknownName: no topology has that name.
    """
    written = spelled.strip().lower()
    known = {*TOPOLOGIES.names, *(alias for record in TOPOLOGIES.records.values() for alias in record.aliases)}
    # The longest name that is known: "rtx4090x4" is not 4090 of an "rt".
    for cut in [len(written), *(found.start() for found in reversed(list(re.finditer(r"x\d+", written))))]:
        name, counts = written[:cut], re.findall(r"x(\d+)", written[cut:])
        if name in known or name.endswith(".toml"):
            base = read_topology_file(spelled.strip()[:cut]) if name.endswith(".toml") else TOPOLOGIES.get(name)
            if counts:
                return base.with_counts(tuple(map(int, counts)))
            return base if name.endswith(".toml") else base.with_counts(base.counts[:1])
    return TOPOLOGIES.get(re.sub(r"(x\d+)+$", "", written))


def write_topology_text(topology: Topology) -> str:
    """Return the text of a topology file that reads back as `topology`, whose levels have its counts as members."""
    blocks = [
        _lines(
            name=topology.name,
            aliases=topology.aliases,
            device=topology.device,
            latency_ratio=None if topology.latency_ratio == 1 else topology.latency_ratio,
            notes=topology.notes,
        )
    ]
    for level, count in zip(topology.levels, topology.counts, strict=True):
        blocks.append(
            _lines(
                "[[levels]]",
                kind=level.kind,
                medium=level.medium,
                members=count,
                one_way_gb_per_s=level.one_way_gb_per_s,
                hop_latency_s=level.hop_latency_s,
                full_mesh=level.full_mesh or None,
                switch_reduces=level.switch_reduces or None,
                is_shared=level.is_shared or None,
                source=level.source,
                certainty=level.certainty,
            )
        )
        blocks += [
            _lines(
                "[[levels.curves]]",
                algorithm=curve.algorithm,
                ceiling_gb_per_s=curve.ceiling_gb_per_s,
                half_size_bytes=curve.half_size_bytes,
                latency_s=curve.latency_s,
                ops=curve.ops,
                residuals=curve.residuals,
            )
            for curve in level.curves
        ]
    return "\n".join(blocks)


def _lines(title: str = "", /, **fields: object) -> str:
    """A section; what is None or empty is left out. JSON spells text, numbers and lists as TOML does."""
    present = {name: value for name, value in fields.items() if value not in (None, ())}
    head = f"{title}\n" if title else ""
    return head + "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in present.items())
