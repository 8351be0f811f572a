"""Schedules between real processes over a network with known limits, against the model fitted to pairs of ranks.

    python benchmarks/network/run.py [--quick] [--pin 0,1]        # root; writes results/network.json unless --quick

1. Messages of a few sizes between two ranks of a node, and of two nodes, both ways at once: α, B and H of each level
   (`comms.fit`).
2. Every collective by every algorithm, predicted from these alone (`comms.schedule_cost`), and measured.
3. All-reduces with a delay between nodes, small ones too; from which size on a ring beats a tree, and so on.

Links are slower than what the processors move, so that the network decides. Wanted: every prediction within 15 % from
1 MiB on, crossings within a factor 2; where two algorithms do not cross, model and measurement must say so both. Slow
schedules are repeated less often, so that a whole run takes less than 20 minutes (`planned_s`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from hosts import Cluster, launch, running
from machine import machine, now

from bitwright.comms import Level, Topology
from bitwright.comms.collectives import algorithms_of, schedule
from bitwright.comms.fit import Timed, fit_curves
from bitwright.comms.schedule_cost import schedule_time

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "network.json"
MIB = 1 << 20
#: Pieces of the tree's pipeline: several where bytes decide, one where steps do.
NUM_SEGMENTS, NUM_SEGMENTS_DELAYED = 4, 1
#: Sizes of messages that levels are fitted to: the smallest, and those that schedules cut large buffers into.
MESSAGES = (1 << 10, 128 << 10, 256 << 10, 512 << 10, MIB, 4 * MIB)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
#: Pairs of all-reduces: (better for small messages, better for large ones), as far as they cross.
CROSSINGS = (
    ("tree", "ring"),
    ("tree", "hierarchical"),
    ("ring", "hierarchical"),
    ("recursive_doubling", "ring"),
    ("two_shot", "hierarchical"),
)
#: What is wanted: of every algorithm from 1 MiB on, and as a factor of crossings.
MAX_ERROR, MAX_CROSSING = 0.15, 2.0
#: Repetitions of a schedule: as many as fit into so many seconds, by the links' limits.
MIN_REPEATS, MAX_REPEATS, SECONDS_EACH = 3, 7, 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One collective, measured and predicted."""

    op: str
    algorithm: str
    num_bytes: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One thing that is wanted, and what was found."""

    what: str
    found: str
    is_met: bool


def segments_of(cluster: Cluster) -> int:
    return NUM_SEGMENTS_DELAYED if cluster.delay_s else NUM_SEGMENTS


def nominal(cluster: Cluster) -> Topology:
    """Levels as their limits say, before anything is measured: for planning how long a run takes."""
    levels, counts = [], []
    for kind, mbit, count in (
        ("inside a node", cluster.inner_mbit, cluster.ranks_per_node),
        ("between nodes", cluster.outer_mbit / cluster.ranks_per_node, cluster.num_nodes),
    ):
        if count == 1:
            continue
        is_outer = kind == "between nodes"
        levels.append(_level(kind, mbit, count, is_outer, latency_s=1e-3 + cluster.delay_s * is_outer))
        counts.append(count)
    return Topology(
        name="limits", aliases=(), device=None, compute_capability=None, levels=tuple(levels), counts=tuple(counts)
    )  # fmt: skip


def _level(kind: str, mbit: float, members: int, is_outer: bool, *, latency_s: float | None = None) -> Level:
    return Level(
        kind=kind, medium="network", members=members, one_way_gb_per_s=mbit / 8000, hop_latency_s=latency_s,
        full_mesh=False, switch_reduces=False, is_shared=is_outer, curves=(), source="network benchmark",
        certainty="measured",
    )  # fmt: skip


def jobs_of(cluster: Cluster, sizes: dict[str, Sequence[int]]) -> dict[str, Any]:
    """What the ranks are told to do.

    Args:
        cluster: that they run on.
        sizes: of each collective, bytes.
    """
    pairs = [(0, 1)] if cluster.ranks_per_node > 1 else []
    pairs += [(0, cluster.ranks_per_node)] if cluster.num_nodes > 1 else []
    limits = nominal(cluster)
    schedules = []
    for op, own in sizes.items():
        for algorithm in algorithms_of(op):
            for size in own:
                seconds = predicted(cluster, limits, op, algorithm, size)
                repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(SECONDS_EACH / seconds)))
                schedules.append({"op": op, "algorithm": algorithm, "num_bytes": size, "repeats": repeats,
                                  "by_limits_s": seconds})  # fmt: skip
    return {
        "ranks_per_node": cluster.ranks_per_node,
        "num_segments": segments_of(cluster),
        "repeats": MAX_REPEATS,
        "messages": [
            {"source": source, "destination": destination, "num_bytes": size}
            for source, destination in pairs
            for size in MESSAGES
        ],
        "schedules": schedules,
    }


def planned_s(jobs: dict[str, Any]) -> float:
    """How long schedules take by the links' limits: each once to be checked, then repeated."""
    return sum(job["by_limits_s"] * (1 + job["repeats"]) for job in jobs["schedules"])


def measure(cluster: Cluster, jobs: dict[str, Any], pin: str | None) -> dict[str, Any]:
    """Build the cluster, run the jobs in it, take it down."""
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "jobs.json", Path(folder) / "out.json"
        asked.write_text(json.dumps(jobs), encoding="utf-8")
        with running(cluster):
            launch(cluster, HERE / "worker.py", [str(asked), str(out)], timeout_s=1500, pin=pin)
        return json.loads(out.read_text(encoding="utf-8"))


def fitted(cluster: Cluster, messages: Sequence[dict[str, Any]]) -> Topology:
    """Levels from pairs of ranks: `comm fit`, each level by itself."""
    levels = []
    rates = (("inside a node", cluster.inner_mbit, False), ("between nodes", cluster.outer_mbit, True))
    for kind, mbit, is_outer in rates:
        count = cluster.num_nodes if is_outer else cluster.ranks_per_node
        if count == 1:
            continue
        own = [m for m in messages if (m["destination"] >= cluster.ranks_per_node) == is_outer]
        alone = Topology(
            name="pair", aliases=(), device=None, compute_capability=None, levels=(_level(kind, mbit, 2, is_outer),),
            counts=(2,),
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
            op=job["op"],
            algorithm=job["algorithm"],
            num_bytes=job["num_bytes"],
            measured_s=job["time_s"],
            predicted_s=predicted(cluster, model, job["op"], job["algorithm"], job["num_bytes"]),
        )
        for job in found["schedules"]
    ]


def predicted(cluster: Cluster, model: Topology, op: str, algorithm: str, num_bytes: int) -> float:
    made = schedule(
        op,
        algorithm,
        cluster.num_ranks,
        ranks_per_node=cluster.ranks_per_node,
        num_segments=segments_of(cluster),
    )
    return schedule_time(made, num_bytes, model).time_s


def _ratios(rows: Sequence[Compared], small: str, large: str, is_measured: bool) -> list[tuple[int, float]]:
    """(size, logarithm of large's time over small's) of all-reduces, by size."""
    seconds = {
        name: {
            r.num_bytes: r.measured_s if is_measured else r.predicted_s
            for r in rows
            if (r.op, r.algorithm) == ("all_reduce", name)
        }
        for name in (small, large)
    }
    sizes = sorted(seconds[small].keys() & seconds[large].keys())
    return [(size, math.log(seconds[large][size] / seconds[small][size])) for size in sizes]


def crossing(rows: Sequence[Compared], small: str, large: str, is_measured: bool) -> float | None:
    """From which size on `large` is the faster, between two measured sizes by logarithms; None: it never changes."""
    ratios = _ratios(rows, small, large, is_measured)
    for (a, before), (b, after) in itertools.pairwise(ratios):
        if before > 0 >= after:
            part = before / (before - after)
            return math.exp(math.log(a) + part * (math.log(b) - math.log(a)))
    return None


def faster_throughout(rows: Sequence[Compared], small: str, large: str, is_measured: bool) -> str:
    """Which of two that do not cross is the faster, over all sizes together."""
    return large if sum(ratio for _, ratio in _ratios(rows, small, large, is_measured)) < 0 else small


def crossings_of(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """Every pair that can be compared: where it crosses, measured and predicted, or which is the faster throughout."""
    found = []
    for small, large in CROSSINGS:
        if len(_ratios(rows, small, large, True)) < 2:
            continue
        line: dict[str, Any] = {"from": small, "to": large}
        for word, is_measured in (("measured", True), ("predicted", False)):
            size = crossing(rows, small, large, is_measured)
            line[f"{word}_bytes"] = size
            line[f"{word}_faster"] = None if size else faster_throughout(rows, small, large, is_measured)
        found.append(line)
    return found


def is_near(line: dict[str, Any]) -> bool:
    """Whether a pair crosses within the factor that is wanted, or by both accounts not at all."""
    seen, said = line["measured_bytes"], line["predicted_bytes"]
    if seen and said:
        return bool(1 / MAX_CROSSING <= said / seen <= MAX_CROSSING)
    return not seen and not said and line["measured_faster"] == line["predicted_faster"]


def spell_crossing(line: dict[str, Any], word: str) -> str:
    """From which size on, or which of the two is always the faster."""
    size = line[f"{word}_bytes"]
    return f"from {size / MIB:.2f} MiB" if size else f"{line[f'{word}_faster']} throughout"


def verdicts_of(rows: Sequence[Compared], crossings: Sequence[dict[str, Any]]) -> list[Verdict]:
    """What is wanted, of every algorithm from 1 MiB on and of every crossing."""
    found = []
    for op, algorithm in dict.fromkeys((row.op, row.algorithm) for row in rows):
        large = [row for row in rows if (row.op, row.algorithm) == (op, algorithm) and row.num_bytes >= MIB]
        if not large:
            continue
        worst = max(large, key=lambda row: abs(row.error))
        told = f"worst {worst.error:+.1%} at {worst.num_bytes / MIB:g} MiB"
        found.append(Verdict(what=f"{op} by {algorithm}", found=told, is_met=abs(worst.error) <= MAX_ERROR))
    for line in crossings:
        told = f"{spell_crossing(line, 'measured')} measured, {spell_crossing(line, 'predicted')} predicted"
        found.append(Verdict(what=f"{line['to']} beats {line['from']}", found=told, is_met=is_near(line)))
    return found


def report(title: str, rows: Sequence[Compared], model: Topology) -> dict[str, Any]:
    """Print, and return what the result file keeps."""
    print(title)
    for level in model.levels:
        for curve in level.curves:
            print(
                f"  {level.kind}, {curve.ops[0]}: {1e3 * (curve.latency_s or 0):.2f} ms, "
                f"{1e3 * curve.ceiling_gb_per_s:.2f} MB/s a rank, half at {curve.half_size_bytes / 1024:.0f} KiB"
            )
    for row in rows:
        print(
            f"  {row.op:15} {row.algorithm:20} {row.num_bytes / MIB:8.3f} MiB  measured {1e3 * row.measured_s:8.1f} ms "
            f" predicted {1e3 * row.predicted_s:8.1f} ms  {row.error:+.1%}"
        )
    large = [row for row in rows if row.num_bytes >= MIB]
    print(f"  from 1 MiB on: mean error {sum(abs(r.error) for r in large) / len(large):.1%}")
    crossings = crossings_of(rows)
    verdicts = verdicts_of(rows, crossings)
    print(f"  wanted: from 1 MiB on within {MAX_ERROR:.0%}, crossings within a factor {MAX_CROSSING:g}")
    for verdict in verdicts:
        print(f"  {'met   ' if verdict.is_met else 'MISSED'} {verdict.what}: {verdict.found}")
    return {
        "title": title,
        "curves": [
            {
                "level": level.kind,
                "op": curve.ops[0],
                "latency_s": curve.latency_s,
                "gb_per_s_of_a_rank": curve.ceiling_gb_per_s,
                "half_size_bytes": curve.half_size_bytes,
            }
            for level in model.levels
            for curve in level.curves
        ],
        "rows": [asdict(row) for row in rows],
        "crossings": [{**line, "is_met": is_near(line)} for line in crossings],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def plan_of(quick: bool) -> list[tuple[str, Cluster, dict[str, Sequence[int]]]]:
    """(title, network, sizes of each collective) of what a run measures."""
    nodes = 2 if quick else 4
    plain = Cluster(num_nodes=nodes, ranks_per_node=2, inner_mbit=200, outer_mbit=50)
    # A relay handles every frame by itself: at these rates four of them leave the ranks their processors.
    slow = Cluster(num_nodes=nodes, ranks_per_node=2, inner_mbit=100, outer_mbit=25, delay_s=0.005)
    summed, moved = ((MIB,), (MIB,)) if quick else ((MIB, 2 * MIB, 4 * MIB), (MIB, 4 * MIB))
    around = (64 << 10, MIB) if quick else tuple(1 << power for power in range(11, 22))
    return [
        (f"{nodes} nodes of 2, no delay", plain, {**dict.fromkeys(COLLECTIVES, moved), "all_reduce": summed}),
        (
            f"{nodes} nodes of 2, 5 ms out of each node",
            slow,
            {**dict.fromkeys(COLLECTIVES, moved[:1]), "all_reduce": around},
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two nodes of two ranks, few sizes; writes nothing")
    parser.add_argument("--pin", help="processors that the ranks run on, as taskset has them")
    options = parser.parse_args()
    begun, told = time.monotonic(), []
    for title, cluster, sizes in plan_of(options.quick):
        jobs = jobs_of(cluster, sizes)
        print(f"{title}: {len(jobs['schedules'])} schedules, about {planned_s(jobs) / 60:.1f} min", flush=True)
        found = measure(cluster, jobs, options.pin)
        model = fitted(cluster, found["messages"])
        told.append(report(title, compare(cluster, found, model), model))
    missed = [verdict["what"] for cluster in told for verdict in cluster["verdicts"] if not verdict["is_met"]]
    count = sum(len(cluster["verdicts"]) for cluster in told)
    print(f"{count - len(missed)} of {count} wanted things met" + (f"; missed: {', '.join(missed)}" if missed else ""))
    seconds = time.monotonic() - begun
    print(f"{seconds / 60:.1f} min")
    if not options.quick:
        filed = {"date": now(), "machine": machine(("torch", "numpy")), "seconds": round(seconds), "clusters": told}
        RESULT.write_text(json.dumps(filed, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
