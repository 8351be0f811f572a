"""What DDP hides behind the backward pass, measured over a network with known limits, beside what the model says.

    python benchmarks/network/overlap.py [--quick] [--pin 0,1]  # root; results/network-overlap.* unless --quick

The library's all-reduce is measured at a few sizes and fitted (`comms.fit`); `parallel.overlap.ddp_buckets` then says
when each bucket is ready, starts and ends. Exposed is what the exchange adds to the backward passes of a step, which
are measured alone too. The events of one measured step are drawn as a timeline (SVG, and a trace for Perfetto).
Wanted: within 20 %.

Layers wait and compute nothing: ranks that really computed would share what few processors there are with each other
and with the exchange, and the network would decide nothing. So this says how exchanges queue and hide, and nothing of
how they slow products down (γ of `parallel.overlap`), which is from published runs on GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from hosts import Cluster, launch, running
from machine import machine, now

from bitwright.comms import Level, Topology, collective_time
from bitwright.comms.fit import Timed, fit_curves
from bitwright.parallel.overlap import ddp_buckets
from bitwright.parallel.timeline import Event, Timeline
from bitwright.parallel.trace_file import trace_text
from bitwright.parallel.trace_svg import svg_text

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
MIB = 1 << 20
LAYERS, LAYER_BYTES = 8, MIB
SIZES = (64 << 10, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
#: What is wanted of exposed time.
MAX_ERROR = 0.20


def jobs_of(layer_s: float, quick: bool) -> dict[str, Any]:
    """Bucket sizes, micro-batches, with and without overlap."""
    variants = [(1, 1, True), (2, 1, True), (8, 1, True), (1, 1, False)]
    if not quick:
        variants += [(4, 1, True), (1, 4, True), (2, 4, True), (1, 4, False)]
    return {
        "sizes": SIZES,
        "repeats": 3 if quick else 7,
        "steps": [
            {
                "num_layers": LAYERS,
                "layer_bytes": LAYER_BYTES,
                "layer_s": layer_s,
                "bucket_bytes": count * LAYER_BYTES,
                "micro_batches": micro,
                "overlap": overlap,
            }
            for count, micro, overlap in variants
        ],
    }


def fitted(cluster: Cluster, rows: list[dict[str, Any]]) -> Topology:
    """All ranks as one level, with the curve of the library's all-reduce."""
    level = Level(
        kind="both levels", medium="network", members=cluster.num_ranks, one_way_gb_per_s=cluster.outer_mbit / 8000,
        hop_latency_s=None, full_mesh=False, switch_reduces=False, is_shared=False, curves=(),
        source="overlap benchmark", certainty="measured",
    )  # fmt: skip
    flat = Topology(
        name="bench", aliases=(), device=None, compute_capability=None, levels=(level,), counts=(cluster.num_ranks,)
    )  # fmt: skip
    return fit_curves(flat, [Timed(op="all_reduce", algorithm="ring", **row) for row in rows]).topology


def predicted_exposed_s(step: dict[str, Any], model: Topology) -> float:
    """What an exchange is said to add to the last backward pass."""
    backward = 2 * step["layer_s"] * step["num_layers"]
    total = step["num_layers"] * step["layer_bytes"]

    def collective_s(num_bytes: float) -> float:
        return collective_time("all_reduce", num_bytes, model, "ring").time_s

    if not step["overlap"]:
        return step["num_layers"] * collective_s(step["layer_bytes"])
    # Layers wait and compute nothing, so that exchanges do not slow them down.
    buckets = ddp_buckets(backward, total, step["bucket_bytes"], collective_s, contention=1.0)
    return buckets[-1].end_s - backward


def timeline(step: dict[str, Any]) -> Timeline:
    """The measured events of a step: layers as they wait, buckets as they were reduced."""
    seconds = 2 * step["layer_s"]
    passes = [
        Event(stage=0, lane="compute", name=f"layer {step['num_layers'] - 1 - index}", category="backward",
              start_s=index * seconds, duration_s=seconds)
        for index in range(step["num_layers"])
    ]  # fmt: skip
    end = seconds * step["num_layers"]
    free = 0.0
    reduced = []
    for index, event in enumerate(step["events"]):
        start = max(event["ready_s"], free)
        free = event["end_s"]
        reduced.append(
            Event(
                stage=0, lane="dp", name=f"bucket {index}, {event['num_bytes'] / MIB:.3g} MiB",
                category="exposed" if free > end else "collective", start_s=start, duration_s=max(0.0, free - start),
            )
        )  # fmt: skip
    title = f"DDP over the benchmark's network, measured: buckets of {step['bucket_bytes'] // MIB} MiB"
    # What is drawn is the last micro-batch, whose backward pass the exchange hides behind.
    return Timeline(title=title, events=(*passes, *reduced), drawn=1, num_micro_batches=step["micro_batches"])


def compare(steps: Sequence[dict[str, Any]], model: Topology) -> list[dict[str, Any]]:
    """What each measured step exposed, beside the prediction; events are left out."""
    rows = []
    for step in steps:
        measured, predicted = step["time_s"] - step["alone_s"], predicted_exposed_s(step, model)
        row = {key: value for key, value in step.items() if key != "events"}
        is_met = abs(predicted / measured - 1) <= MAX_ERROR
        rows.append(row | {"exposed_s": measured, "predicted_s": predicted, "is_met": is_met})
    return rows


def spell(row: dict[str, Any]) -> str:
    """A line about a step."""
    variant = f"buckets {row['bucket_bytes'] // MIB} MiB, {row['micro_batches']} micro-batches"
    return (
        f"{'met   ' if row['is_met'] else 'MISSED'} {variant}, overlap {'on ' if row['overlap'] else 'off'}: backward "
        f"{1e3 * row['alone_s']:.0f} ms alone, {1e3 * row['time_s']:.0f} ms, exposed {1e3 * row['exposed_s']:.0f} ms, "
        f"predicted {1e3 * row['predicted_s']:.0f} ms ({row['predicted_s'] / row['exposed_s'] - 1:+.1%})"
    )


def fit_of(rows: Sequence[dict[str, Any]], model: Topology) -> list[dict[str, Any]]:
    """The library's all-reduces, beside the curve that was fitted to them."""
    return [row | {"fitted_s": collective_time("all_reduce", row["num_bytes"], model, "ring").time_s} for row in rows]


def write(rows: Sequence[dict[str, Any]], all_reduces: Sequence[dict[str, Any]], drawn: Timeline, folder: Path) -> None:
    """The result file, and the drawn step."""
    filed = {
        "date": now(), "machine": machine(("torch", "numpy")), "rows": list(rows), "all_reduces": list(all_reduces),
    }  # fmt: skip
    (folder / "network-overlap.json").write_text(json.dumps(filed, indent=1) + "\n", encoding="utf-8")
    (folder / "network-overlap.svg").write_text(svg_text(drawn), encoding="utf-8")
    (folder / "network-overlap-trace.json").write_text(trace_text(drawn), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two nodes of two ranks, few variants; writes nothing")
    parser.add_argument("--pin", help="processors that the ranks run on, as taskset has them")
    options = parser.parse_args()
    cluster = Cluster(num_nodes=2, ranks_per_node=2, inner_mbit=400, outer_mbit=100)
    jobs = jobs_of(layer_s=0.1, quick=options.quick)
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "jobs.json", Path(folder) / "out.json"
        asked.write_text(json.dumps(jobs), encoding="utf-8")
        with running(cluster):
            launch(cluster, HERE / "overlap_worker.py", [str(asked), str(out)], timeout_s=900, pin=options.pin)
        found = json.loads(out.read_text(encoding="utf-8"))
    model = fitted(cluster, found["all_reduces"])
    rows = compare(found["steps"], model)
    for row in fit_of(found["all_reduces"], model):
        print(
            f"all-reduce of {row['num_bytes'] / MIB:g} MiB: {1e3 * row['time_s']:.0f} ms, as fitted "
            f"{1e3 * row['fitted_s']:.0f}"
        )
    print("\n".join(map(spell, rows)))
    missed = sum(not row["is_met"] for row in rows)
    print(f"{len(rows) - missed} of {len(rows)} exposed times predicted within {MAX_ERROR:.0%}")
    if not options.quick:
        write(rows, fit_of(found["all_reduces"], model), timeline(found["steps"][1]), RESULTS)


if __name__ == "__main__":
    main()
