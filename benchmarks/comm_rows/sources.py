"""What is known of each source beside its rows: its machine's network and its library's ways.

No row is fitted; but what a library is like (attention at 0.6 of the device's, eager work at 2 passes, what overlaps)
was settled with the errors of whole sources in sight, as were `packed_share` in `serving.py`, and `sustained_share` and
`expert_host_s` in the library.

Links are those of `comms/topologies`, or of `data/comm/topologies` where a source says what it has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from bitwright import hardware
from bitwright.comms.topology_file import TOPOLOGIES, read_topology_file
from bitwright.hardware.device import Device
from bitwright.parallel.efficiency import Efficiency, efficiency_of, read_efficiency_file
from bitwright.parallel.job import Software
from bitwright.parallel.network import ClusterNetwork

_EAGER = Software(elementwise_passes=2.0)
_FUSED = Software(elementwise_passes=1.3)
_COMPILED = Software(elementwise_passes=1.0)
#: Megatron with tp-comm-overlap.
_OVERLAPPED = replace(_FUSED, hidden_tp_share=0.7)


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """How a source trains."""

    title: str
    software: Software
    #: Topology of `comms/topologies` or `data/comm/topologies`; None: that of the device.
    topology: str | None = None
    #: Bits of a gradient on the wire and where it is summed.
    gradient_bits: float = 32.0
    is_sequence_parallel: bool = False
    #: ZeRO stage where the row says nothing.
    zero: int = 0


#: First part of a row's id → facts.
SOURCES: dict[str, SourceFacts] = {
    "llmf": SourceFacts(title="llm-foundry", software=replace(_EAGER, attention_speed=0.6), gradient_bits=16, zero=3),
    "tt": SourceFacts(title="torchtitan", software=_COMPILED, is_sequence_parallel=True, zero=3),
    "ao": SourceFacts(title="torchao", software=_COMPILED, zero=3),
    "pt": SourceFacts(title="PyTorch", software=_COMPILED, zero=3),
    "fms": SourceFacts(title="fms-fsdp", software=_COMPILED, gradient_bits=16, zero=3),
    "ds": SourceFacts(title="DeepSpeed", software=_EAGER, gradient_bits=16, zero=3),
    "mlm": SourceFacts(title="Megatron-LM", software=_FUSED),
    "mlmh": SourceFacts(title="Megatron-LM", software=_OVERLAPPED, is_sequence_parallel=True, zero=1),
    "kor": SourceFacts(title="Megatron-LM, Korthikanti", software=replace(_FUSED, attention="stored")),
    "mb": SourceFacts(title="Megatron-Bridge", software=_OVERLAPPED, is_sequence_parallel=True, zero=1),
    "bloom": SourceFacts(
        title="BLOOM",
        topology="jeanzay",
        software=Software(
            attention="stored",
            elementwise_passes=1.3,
            overlaps_gradients=False,
            overlaps_parameters=False,
            overlaps_pipeline=False,
        ),
        gradient_bits=16,
    ),
    "nt": SourceFacts(
        title="nanotron",
        topology="h100-efa",
        software=Software(elementwise_passes=2.0, overlaps_parameters=False, overlaps_pipeline=False),
        is_sequence_parallel=True,
    ),
}
#: Beginning of a row's device → device, its own memory bandwidth, and topology.
_DEVICES: tuple[tuple[str, str, float | None, str], ...] = (
    ("H100-SXM-96GB-HBM2e", "h100-sxm", 2400, "h100"),
    ("H100", "h100-sxm", None, "h100"),
    ("H200", "h200-sxm", None, "h200"),
    ("A100-SXM-40GB", "a100-sxm-40gb", None, "a100"),
    ("A100", "a100-sxm", None, "a100"),
    ("V100", "v100-sxm2", None, "dgx2"),
    ("DGX-H100", "h100-sxm", None, "h100"),
    ("DGX-B200", "b200", None, "b200"),
    ("B200", "b200", None, "b200"),
    ("DGX-GB200", "gb200", None, "gb200"),
    ("GB200", "gb200", None, "gb200"),
    ("DGX-GB300", "gb300", None, "gb200"),
    ("DGX-B300", "b300", None, "b300"),
    ("MI300X", "mi300x", None, "mi300x"),
)
_OWN = Path(__file__).parents[1] / "data" / "comm"


def device_of(name: str) -> tuple[Device, Efficiency, str] | None:
    """Return (device, efficiency, topology) of a row's device, or None where it is not known."""
    for start, known, bandwidth, topology in _DEVICES:
        if name.startswith(start):
            device, record = find_device(known)
            if bandwidth is not None:
                device = replace(device, memory_gb_per_s=bandwidth, memory_bytes=95 * 2**30)
            return device, record, topology
    return None


@lru_cache(maxsize=100)
def find_device(name: str) -> tuple[Device, Efficiency]:
    """Return a device of the catalog or of `data/comm/devices`, and what kernels reach on it."""
    own = _OWN / "devices" / f"{name}.toml"
    device = hardware.read_device_file(own) if own.exists() else hardware.get(name)
    record = _OWN / "devices" / f"{name}-efficiency.toml"
    return device, read_efficiency_file(record) if record.exists() else efficiency_of(device)[0]


def network_of(name: str, num_gpus: int) -> ClusterNetwork:
    """Return the network of so many GPUs of a topology of `comms/topologies` or `data/comm/topologies`."""
    own = _OWN / "topologies" / f"{name}.toml"
    whole = read_topology_file(own) if own.exists() else TOPOLOGIES.get(name)
    # Of a rack of 72, jobs take 64.
    inside = min(num_gpus, 1 << whole.levels[0].members.bit_length() - 1)
    counts = (inside,) if num_gpus <= inside else (inside, -(-num_gpus // inside))
    return ClusterNetwork(topology=whole.with_counts(counts))
