"""Communication: collectives as schedules, what precision costs on the wire, how long one collective takes.

    from bitwright.comms import collective_time, topology

    collective_time("all_reduce", 64 << 20, topology("h100x8x2"))      # predicted, with algorithm and reason

`topology`, `topology_file` and `topologies/` say what joins the ranks; `wire_bytes` what an algorithm sends there;
`nccl_tuner` what NCCL would choose; `cost_model` the time. Nothing of these needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwright.lazy_page import open_lazily

if TYPE_CHECKING:
    from bitwright.comms.cost_model import LAUNCHES, CollectiveCost, algorithms, collective_time
    from bitwright.comms.topology import Curve, Level, Topology
    from bitwright.comms.topology_file import TOPOLOGIES, read_topology_file, topology, write_topology_text

__all__ = [
    "LAUNCHES",
    "TOPOLOGIES",
    "CollectiveCost",
    "Curve",
    "Level",
    "Topology",
    "algorithms",
    "collective_time",
    "read_topology_file",
    "topology",
    "write_topology_text",
]

_HOMES = {
    "cost_model": ("LAUNCHES", "CollectiveCost", "algorithms", "collective_time"),
    "topology": ("Curve", "Level", "Topology"),
    "topology_file": ("TOPOLOGIES", "read_topology_file", "topology", "write_topology_text"),
}

open_lazily(__name__, {name: f"bitwright.comms.{module}" for module, names in _HOMES.items() for name in names})
