"""What is known of each source beside its rows: its machine's network and its library's ways. None of it is fitted.

Bandwidths are of one GPU, one way. Inside a node: what large collectives reach on such nodes (235 GB/s on an A100, 360
on an H100, 680 on a B200, 310 on an MI300X). Between nodes: 0.9 of the adapters that a GPU has for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bitwright import hardware
from bitwright.hardware.device import Device
from bitwright.parallel.efficiency import Efficiency, efficiency_of, read_efficiency_file
from bitwright.parallel.job import Software
from bitwright.parallel.network import TwoLevelNetwork

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
    #: GB/s between nodes, of one GPU.
    link_gb_per_s: float
    gpus_per_node: int = 8
    #: Bits of a gradient on the wire and where it is summed.
    gradient_bits: float = 32.0
    is_sequence_parallel: bool = False
    #: ZeRO stage where the row says nothing.
    zero: int = 0


#: First part of a row's id → facts.
SOURCES: dict[str, SourceFacts] = {
    "llmf": SourceFacts(
        title="llm-foundry", software=replace(_EAGER, attention_speed=0.5), link_gb_per_s=45.0, gradient_bits=16, zero=3
    ),
    "tt": SourceFacts(title="torchtitan", software=_COMPILED, link_gb_per_s=45.0, is_sequence_parallel=True, zero=3),
    "ao": SourceFacts(title="torchao", software=_COMPILED, link_gb_per_s=45.0, zero=3),
    "pt": SourceFacts(title="PyTorch", software=_COMPILED, link_gb_per_s=45.0, zero=3),
    "fms": SourceFacts(title="fms-fsdp", software=_COMPILED, link_gb_per_s=5.6, gradient_bits=16, zero=3),
    "ds": SourceFacts(title="DeepSpeed", software=_EAGER, link_gb_per_s=22.0, gradient_bits=16, zero=3),
    "mlm": SourceFacts(title="Megatron-LM", software=_FUSED, link_gb_per_s=22.0),
    "mlmh": SourceFacts(
        title="Megatron-LM", software=_OVERLAPPED, link_gb_per_s=45.0, is_sequence_parallel=True, zero=1
    ),
    "kor": SourceFacts(
        title="Megatron-LM, Korthikanti", software=replace(_FUSED, attention="stored"), link_gb_per_s=22.0
    ),
    "mb": SourceFacts(
        title="Megatron-Bridge", software=_OVERLAPPED, link_gb_per_s=45.0, is_sequence_parallel=True, zero=1
    ),
    "bloom": SourceFacts(
        title="BLOOM",
        software=Software(
            attention="stored",
            elementwise_passes=1.3,
            overlaps_gradients=False,
            overlaps_parameters=False,
            overlaps_pipeline=False,
        ),
        link_gb_per_s=5.6,
        gradient_bits=16,
    ),
    "nt": SourceFacts(
        title="nanotron",
        software=Software(elementwise_passes=2.0, overlaps_parameters=False, overlaps_pipeline=False),
        link_gb_per_s=45.0,
        is_sequence_parallel=True,
    ),
}
#: Beginning of a row's device → device of the catalog, memory that differs, GPUs of a node, GB/s inside one.
_DEVICES: tuple[tuple[str, str, float | None, int, float], ...] = (
    ("H100-SXM-96GB-HBM2e", "h100-sxm", 2400, 8, 360),
    ("H100", "h100-sxm", None, 8, 360),
    ("H200", "h200-sxm", None, 8, 360),
    ("A100-SXM-40GB", "a100-sxm-40gb", None, 8, 235),
    ("A100", "a100-sxm", None, 8, 235),
    ("V100", "v100-sxm2", None, 16, 125),
    ("DGX-H100", "h100-sxm", None, 8, 360),
    ("DGX-B200", "b200", None, 8, 680),
    ("B200", "b200", None, 8, 680),
    ("DGX-GB200", "gb200", None, 72, 680),
    ("GB200", "gb200", None, 72, 680),
    ("DGX-GB300", "gb300", None, 72, 680),
    ("DGX-B300", "b300", None, 8, 680),
    ("MI300X", "mi300x", None, 8, 310),
)
_OWN = Path(__file__).parents[1] / "data" / "comm" / "devices"


def device_of(name: str) -> tuple[Device, Efficiency, int, float] | None:
    """Return (device, efficiency, GPUs of a node, GB/s inside one) of a row's device, or None where it is not known."""
    for start, known, bandwidth, per_node, inside in _DEVICES:
        if name.startswith(start):
            device, record = find_device(known)
            if bandwidth is not None:
                device = replace(device, memory_gb_per_s=bandwidth, memory_bytes=95 * 2**30)
            return device, record, per_node, inside
    return None


def find_device(name: str) -> tuple[Device, Efficiency]:
    """Return a device of the catalog or of `data/comm/devices`, and what kernels reach on it."""
    own = _OWN / f"{name}.toml"
    device = hardware.read_device_file(own) if own.exists() else hardware.get(name)
    record = _OWN / f"{name}-efficiency.toml"
    return device, read_efficiency_file(record) if record.exists() else efficiency_of(device)[0]


def network_of(facts: SourceFacts, per_node: int, inside: float, link: float | None = None) -> TwoLevelNetwork:
    """Return the network of a source's machine."""
    return TwoLevelNetwork(
        gpus_per_node=per_node, node_gb_per_s=inside, link_gb_per_s=facts.link_gb_per_s if link is None else link
    )
