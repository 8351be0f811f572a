"""What kernels reach on a device: one TOML file a device in `efficiencies/`, found from many published products.

    device             a name of `hardware/devices`
    num_units          processors that each compute one tile at a time
    launch_s           from the end of one kernel to the start of the next
    memory_share       of the peak bandwidth, for large transfers
    half_bytes         a transfer of so many bytes reaches half of that
    prologue_columns   columns of the summed dimension that starting and ending a tile cost
    sharpness          how far computing and moving overlap: 1 not at all, large: only the slower one counts
    [matmul_share]     format → share of the peak that full tiles reach
    [attention_share]  forward, backward: share of the 16-bit peak that fused attention reaches; stored: batched
                       products whose scores are written out
    sustained_share    of what a product reaches alone, in a step that runs for hours: clocks fall under load
    contention         how much slower products run beside a collective
    unaligned_share    of the 16-bit peak, where a head is no multiple of 8 wide and the matrix units are not used

A figure is a property of the device and its library, fitted to all rows of a sweep together; none is one row's. A
device without a file takes the `DEFAULT` record, whose shares lie between those known, and the reason says so.
`[matmul_share]` without a format takes the share of the nearest wider one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from bitwright.catalog import FileCatalog
from bitwright.errors import HardwareError
from bitwright.fact_file import parse_facts, read_content
from bitwright.hardware.device import Certainty, Device

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """What kernels reach on one device, in the words of the top of the file."""

    name: str
    num_units: int
    launch_s: float
    memory_share: float
    half_bytes: float
    prologue_columns: float
    sharpness: float
    matmul_share: Mapping[str, float]
    attention_forward_share: float
    attention_backward_share: float
    attention_stored_share: float
    unaligned_share: float
    contention: float
    sustained_share: float
    source: str
    certainty: Certainty

    def share(self, format: str) -> float:
        """Return the share of a format's peak that full tiles reach; of an unlisted one the least that is listed."""
        return self.matmul_share.get(format, min(self.matmul_share.values()))


#: Of a device of which no products are known.
DEFAULT = Efficiency(
    name="default",
    num_units=128,
    launch_s=3e-6,
    memory_share=0.83,
    half_bytes=2e6,
    prologue_columns=57,
    sharpness=3.0,
    matmul_share=MappingProxyType({"bf16": 0.75, "fp16": 0.75, "fp8_e4m3": 0.70, "fp4_e2m1": 0.60}),
    attention_forward_share=0.45,
    attention_backward_share=0.40,
    attention_stored_share=0.45,
    unaligned_share=0.125,
    contention=1.4,
    sustained_share=0.88,
    source="shares between those of the devices that have a file",
    certainty="recalled",
)


class _AttentionSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    forward: _Share
    backward: _Share
    stored: _Share


class _EfficiencyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    device: _Text
    num_units: Annotated[int, Field(gt=0)]
    launch_s: _Positive
    memory_share: _Share
    half_bytes: _Positive
    prologue_columns: _Positive
    sharpness: Annotated[float, Field(ge=1)]
    unaligned_share: _Share
    contention: Annotated[float, Field(ge=1)]
    sustained_share: _Share
    matmul_share: Annotated[dict[_Text, _Share], Field(min_length=1)]
    attention_share: _AttentionSection
    source: _Text
    certainty: Certainty


def parse_efficiency(content: bytes, file: str) -> Efficiency:
    """Return the record of a file's content; `file` is what errors call it.

    Raises:
        HardwareError: no TOML, or a field is missing, unknown or impossible.
    """
    fields = parse_facts(content, file, _EfficiencyFile, kind="efficiency", error=HardwareError)
    return Efficiency(
        name=fields.device,
        num_units=fields.num_units,
        launch_s=fields.launch_s,
        memory_share=fields.memory_share,
        half_bytes=fields.half_bytes,
        prologue_columns=fields.prologue_columns,
        sharpness=fields.sharpness,
        matmul_share=MappingProxyType(fields.matmul_share),
        attention_forward_share=fields.attention_share.forward,
        attention_backward_share=fields.attention_share.backward,
        attention_stored_share=fields.attention_share.stored,
        unaligned_share=fields.unaligned_share,
        contention=fields.contention,
        sustained_share=fields.sustained_share,
        source=fields.source,
        certainty=fields.certainty,
    )


#: Every device whose products are known, by the device's name.
EFFICIENCIES: FileCatalog[Efficiency] = FileCatalog(
    kind="efficiency",
    package="bitwright.parallel",
    folder="efficiencies",
    read=parse_efficiency,
    aliases=lambda record: (),
    error=HardwareError,
)


def read_efficiency_file(path: str | Path) -> Efficiency:
    """Read and check one file of a user's.

    Raises:
        HardwareError: the file cannot be read, or as `parse_efficiency`.
    """
    return parse_efficiency(read_content(path, kind="efficiency", error=HardwareError), str(path))


def efficiency_of(device: Device) -> tuple[Efficiency, str]:
    """Return what kernels reach on a device, and why that record was taken."""
    found = EFFICIENCIES.records.get(device.name)
    if found is not None:
        return found, f"{device.name}: {found.source}"
    return DEFAULT, f"nobody's products on {device.name} are known here: {DEFAULT.source}"
