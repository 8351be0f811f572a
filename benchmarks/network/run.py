"""Schedules between real processes over a network with known limits, against the model fitted to single messages.

    python benchmarks/network/run.py [--quick] [--pin 0,1]        # root; writes results/network.json unless --quick

1. Messages of a few sizes between two ranks of a node, and of two nodes: α, B and H of each level (`comms.fit`).
2. Every all-reduce by every schedule, predicted from these alone (`comms.schedule_cost`), and measured.
3. The same with a delay between nodes; from which size on a ring beats a tree, and a hierarchical one beats both.

Links are slower than what the processors move, so that the network decides. What is asked for: predictions within 15 %
from 1 MiB on, crossings within a factor 2.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from hosts import Cluster, launch, running

from bitwright.comms import Level, Topology
from bitwright.comms.collectives import algorithms_of, schedule
from bitwright.comms.fit import Timed, fit_curves
from bitwright.comms.schedule_cost import schedule_time

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "network.json"
MIB = 1 << 20
#: Pieces of the tree's pipeline: several where bytes decide, one where steps do.
NUM_SEGMENTS, NUM_SEGMENTS_DELAYED = 4, 1
#: Sizes of messages that levels are fitted to: smaller ones pass within what a bucket holds, as if there were no limit.
MESSAGES = (1 << 10, MIB, 2 * MIB, 4 * MIB)
#: (better for small messages, better for large ones).
CROSSINGS = (("tree", "ring"), ("tree", "hierarchical"), ("recursive_doubling", "ring"), ("two_shot", "hierarchical"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One collective, measured and predicted."""

    algorithm: str
    num_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def segments_of(cluster: Cluster) -> int:
    return NUM_SEGMENTS_DELAYED if cluster.delay_s else NUM_SEGMENTS


def jobs_of(cluster: Cluster, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """What the ranks are told to do."""
    pairs = [(0, 1)] if cluster.ranks_per_node > 1 else []
    pairs += [(0, cluster.ranks_per_node)] if cluster.num_nodes > 1 else []
    return {
        "ranks_per_node": cluster.ranks_per_node,
        "num_segments": segments_of(cluster),
        "repeats": repeats,
        "messages": [
            {"source": source, "destination": destination, "num_bytes": size}
            for source, destination in pairs
            for size in MESSAGES
        ],
        "schedules": [
            {"op": "all_reduce", "algorithm": algorithm, "num_bytes": size}
            for algorithm in algorithms_of("all_reduce")
            for size in sizes
        ],
    }


def measure(cluster: Cluster, jobs: dict[str, Any], pin: str | None) -> dict[str, Any]:
    """Build the cluster, run the jobs in it, take it down."""
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "jobs.json", Path(folder) / "out.json"
        asked.write_text(json.dumps(jobs), encoding="utf-8")
        with running(cluster):
            launch(cluster, HERE / "worker.py", [str(asked), str(out)], timeout_s=1500, pin=pin)
        return json.loads(out.read_text(encoding="utf-8"))


def fitted(cluster: Cluster, messages: Sequence[dict[str, Any]]) -> Topology:
    """Levels from single messages: `comm fit`, each level by itself."""
    levels = []
    rates = (("inside a node", cluster.inner_mbit, False), ("between nodes", cluster.outer_mbit, True))
    for kind, mbit, is_outer in rates:
        own = [m for m in messages if (m["destination"] >= cluster.ranks_per_node) == is_outer]
        count = cluster.num_nodes if is_outer else cluster.ranks_per_node
        if count == 1:
            continue
        level = Level(
            kind=kind, medium="network", members=2, one_way_gb_per_s=mbit / 8000, hop_latency_s=None, full_mesh=False,
            switch_reduces=False, is_shared=is_outer, curves=(), source="network benchmark", certainty="measured",
        )  # fmt: skip
        alone = Topology(
            name="pair", aliases=(), device=None, compute_capability=None, levels=(level,), counts=(2,)
        )  # fmt: skip
        rows = [Timed(op="send_recv", algorithm="direct", num_bytes=m["num_bytes"], time_s=m["time_s"]) for m in own]
        found = fit_curves(alone, rows).topology.levels[0]
        # A message alone has the whole link of its node; the model's figures are of one rank.
        share = cluster.ranks_per_node if is_outer else 1
        curve = replace(found.curves[0], ceiling_gb_per_s=found.curves[0].ceiling_gb_per_s / share)
        levels.append(replace(found, members=count, curves=(curve,)))
    counts = tuple(level.members for level in levels)
    return Topology(
        name="bench", aliases=(), device=None, compute_capability=None, levels=tuple(levels), counts=counts
    )  # fmt: skip


def compare(cluster: Cluster, found: dict[str, Any], model: Topology) -> list[Compared]:
    """Every measured schedule beside its prediction."""
    return [
        Compared(
            algorithm=job["algorithm"],
            num_bytes=job["num_bytes"],
            measured_s=job["time_s"],
            predicted_s=predicted(cluster, model, job["algorithm"], job["num_bytes"]),
        )
        for job in found["schedules"]
    ]


def predicted(cluster: Cluster, model: Topology, algorithm: str, num_bytes: int) -> float:
    made = schedule(
        "all_reduce",
        algorithm,
        cluster.num_ranks,
        ranks_per_node=cluster.ranks_per_node,
        num_segments=segments_of(cluster),
    )
    return schedule_time(made, num_bytes, model).time_s


def crossing(rows: Sequence[Compared], small: str, large: str, is_measured: bool) -> float | None:
    """From which size on `large` is the faster, between two measured sizes by logarithms; None: it never changes."""
    seconds = {
        name: {r.num_bytes: r.measured_s if is_measured else r.predicted_s for r in rows if r.algorithm == name}
        for name in (small, large)
    }
    sizes = sorted(seconds[small].keys() & seconds[large].keys())
    ratios = [math.log(seconds[large][size] / seconds[small][size]) for size in sizes]
    for (a, before), (b, after) in zip(
        zip(sizes, ratios, strict=True), zip(sizes[1:], ratios[1:], strict=True), strict=False
    ):
        if before > 0 >= after:
            part = before / (before - after)
            return math.exp(math.log(a) + part * (math.log(b) - math.log(a)))
    return None


def report(title: str, rows: Sequence[Compared], model: Topology) -> dict[str, Any]:
    """Print, and return what the result file keeps."""
    print(title)
    for level in model.levels:
        curve = level.curves[0]
        print(f"  {level.kind}: {1e3 * (curve.latency_s or 0):.2f} ms, {1e3 * curve.ceiling_gb_per_s:.2f} MB/s a rank, "
              f"half at {curve.half_size_bytes / 1024:.0f} KiB")  # fmt: skip
    for row in rows:
        print(
            f"  {row.algorithm:20} {row.num_bytes / MIB:8.3f} MiB  measured {1e3 * row.measured_s:8.1f} ms  "
            f"predicted {1e3 * row.predicted_s:8.1f} ms  {row.error:+.1%}"
        )
    large = [row for row in rows if row.num_bytes >= MIB]
    worst = max(large, key=lambda row: abs(row.error))
    print(f"  from 1 MiB on: mean error {sum(abs(r.error) for r in large) / len(large):.1%}, worst {worst.error:+.1%} "
          f"({worst.algorithm})")  # fmt: skip
    crossings = []
    for small, big in CROSSINGS:
        seen, said = (crossing(rows, small, big, measured) for measured in (True, False))
        if seen is not None or said is not None:
            crossings.append({"from": small, "to": big, "measured_bytes": seen, "predicted_bytes": said})
            spelled = [f"{size / MIB:.2f} MiB" if size else "never here" for size in (seen, said)]
            print(f"  {big} beats {small} from {spelled[0]} measured, {spelled[1]} predicted")
    return {
        "title": title,
        "levels": [
            {"kind": x.kind, "latency_s": x.curves[0].latency_s, "gb_per_s_of_a_rank": x.curves[0].ceiling_gb_per_s}
            for x in model.levels
        ],
        "rows": [
            {
                "algorithm": r.algorithm,
                "num_bytes": r.num_bytes,
                "measured_s": r.measured_s,
                "predicted_s": r.predicted_s,
            }
            for r in rows
        ],
        "crossings": crossings,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two nodes of two ranks, few sizes; writes nothing")
    parser.add_argument("--pin", help="processors that the ranks run on, as taskset has them")
    options = parser.parse_args()
    nodes, repeats = (2, 3) if options.quick else (4, 5)
    sizes = (MIB, 4 * MIB) if options.quick else (MIB, 4 * MIB, 16 * MIB)
    around = (64 << 10, MIB) if options.quick else tuple(1 << power for power in range(12, 24))
    plain = Cluster(num_nodes=nodes, ranks_per_node=2, inner_mbit=400, outer_mbit=100)
    slow = replace(plain, delay_s=0.005)
    told = []
    for title, cluster, own in (("no delay", plain, sizes), ("5 ms out of each node", slow, around)):
        found = measure(cluster, jobs_of(cluster, own, repeats), options.pin)
        model = fitted(cluster, found["messages"])
        told.append(
            report(
                f"{cluster.num_nodes} nodes of {cluster.ranks_per_node}, {title}", compare(cluster, found, model), model
            )
        )
    if not options.quick:
        RESULT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
