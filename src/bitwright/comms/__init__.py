"""Communication: collectives as schedules, what precision costs on the wire, how long one collective takes.

    from bitwright.comms import all_reduced, collective_time, schedule, schedule_time, simulate, topology, wire_format

    collective_time("all_reduce", 64 << 20, topology("h100x8x2"))      # predicted, with algorithm and reason
    ring = schedule("all_reduce", "ring", 4)                           # who sends what to whom, when
    simulate(ring, [[1.0, 2, 3, 4]] * 4)                               # what every rank holds in the end
    all_reduced(gradients, wire_format("bf16"), "ring")                # the same with numbers that travel in bf16

What joins the ranks stands in `topology`, `topology_file` and `topologies/`; what an algorithm sends in `algorithms/`,
`closed_forms` and `wire_bytes`; how long it takes in `cost_model` (what NCCL would do, `nccl_tuner`) and
`schedule_cost` (any schedule, message by message); what `fit` makes of measured times. None of these needs torch.
`run_schedule`, `hooks`, `bench` and `peers` work between processes, over torch.distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwright.lazy_page import open_lazily

if TYPE_CHECKING:
    from bitwright.comms.collectives import ALGORITHMS, algorithms_of, schedule
    from bitwright.comms.cost_model import LAUNCHES, CollectiveCost, algorithms, collective_time, refusals
    from bitwright.comms.fit import Timed, calibrate, fit_curves
    from bitwright.comms.hooks import fsdp_advice, register
    from bitwright.comms.run_schedule import run_schedule
    from bitwright.comms.schedule import Schedule, Transfer
    from bitwright.comms.schedule_cost import schedule_time
    from bitwright.comms.simulate import simulate
    from bitwright.comms.topology import Curve, Level, Topology
    from bitwright.comms.topology_file import TOPOLOGIES, read_topology_file, topology, write_topology_text
    from bitwright.comms.wire import WIRE_FORMATS, all_reduced, error_growth, safe_ranks, wire_format

_HOMES = {
    "collectives": ("ALGORITHMS", "algorithms_of", "schedule"),
    "cost_model": ("LAUNCHES", "CollectiveCost", "algorithms", "collective_time", "refusals"),
    "fit": ("Timed", "calibrate", "fit_curves"),
    "hooks": ("fsdp_advice", "register"),
    "run_schedule": ("run_schedule",),
    "schedule": ("Schedule", "Transfer"),
    "schedule_cost": ("schedule_time",),
    "simulate": ("simulate",),
    "topology": ("Curve", "Level", "Topology"),
    "topology_file": ("TOPOLOGIES", "read_topology_file", "topology", "write_topology_text"),
    "wire": ("WIRE_FORMATS", "all_reduced", "error_growth", "safe_ranks", "wire_format"),
}

__all__ = [
    "ALGORITHMS",
    "LAUNCHES",
    "TOPOLOGIES",
    "WIRE_FORMATS",
    "CollectiveCost",
    "Curve",
    "Level",
    "Schedule",
    "Timed",
    "Topology",
    "Transfer",
    "algorithms",
    "algorithms_of",
    "all_reduced",
    "calibrate",
    "collective_time",
    "error_growth",
    "fit_curves",
    "fsdp_advice",
    "read_topology_file",
    "refusals",
    "register",
    "run_schedule",
    "safe_ranks",
    "schedule",
    "schedule_time",
    "simulate",
    "topology",
    "wire_format",
    "write_topology_text",
]

open_lazily(__name__, {name: f"bitwright.comms.{module}" for module, names in _HOMES.items() for name in names})
