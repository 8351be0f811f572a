"""Predicted times of collectives against published ones (`data/collectives.json`), by source and by size.

    python benchmarks/collective_accuracy.py [--log WORD] [--write]

A *log* is one machine, tool, collective and number of ranks of one source. By a written rule, before any error is seen:

- a row that a message twice its size undercuts by a tenth is left out: nothing makes sending more take less time (the
  first row of a run often has the connections' set-up in it);
- a log of four rows or more calibrates its topology (`bitwright.comms.fit.calibrate`: latency, ceiling and half size,
  one factor each) on its smallest, median and largest size; the others are predicted;
- logs of fewer rows are predicted from the topology file as it is, but for the rows that its own figures are from.

Beside that rule the stricter one of `comm_accuracy.py`: all logs of a *source* share one calibration, on three of their
rows (ordered by ranks, then size: the first, the median, the last), whatever their machines and tools are.

Errors are |predicted/measured − 1|, their mean by size: at most 64 MiB and more, 1 to 64 MiB, below 1 MiB. Beside them:
the topology files as they are, on the same rows; and α + f·S/B with B the link's rate (the trivial roofline).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comm_rows.fit import fit_factors

from bitwright.comms import collective_time, topology
from bitwright.comms.fit import Timed, calibrate
from bitwright.comms.topology import Topology
from bitwright.comms.wire_bytes import BUS_FACTORS

DATA = Path(__file__).parent / "data" / "collectives.json"
RESULT = Path(__file__).parent / "results" / "collective-accuracy.json"
MIB = 1 << 20
#: (what, least size, size above it, largest mean error that the project asks for)
BANDS = (
    ("64 MiB and more", 64 * MIB, float("inf"), 0.10),
    ("1 to 64 MiB", MIB, 64 * MIB, 0.15),
    ("below", 0, MIB, 0.25),
)
#: How far from 1 factors are believed to be (of their logarithms), as in `bitwright.comms.fit`.
_WIDTHS = {"latency": 0.7, "ceiling": 0.3, "half_size": 0.7}
#: Latency that the roofline is given; it knows links only.
ROOFLINE_LATENCY_S = 10e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One row that was predicted."""

    log: int
    num_bytes: int
    measured_s: float
    predicted_s: float
    #: From the topology file as it is.
    uncalibrated_s: float
    roofline_s: float
    is_calibrated: bool

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def read_logs() -> list[dict[str, Any]]:
    """The logs of the data file."""
    return json.loads(DATA.read_text(encoding="utf-8"))["logs"]


def split_rows(log: dict[str, Any]) -> tuple[list[Timed], list[Timed], list[Timed]]:
    """(rows to calibrate on, rows to predict, rows that are left out), by the rule above."""
    rows = [Timed(op=log["op"], num_bytes=size, time_s=t, algorithm=log["algorithm"]) for size, t in log["rows"]]
    undercut = [
        row for row in rows if any(o.num_bytes >= 2 * row.num_bytes and o.time_s < 0.9 * row.time_s for o in rows)
    ]
    kept = [row for row in rows if row not in undercut]
    if len(kept) < 4:
        known = log.get("in_topology", [])
        return [], [row for row in kept if row.num_bytes not in known], undercut
    chosen = {0, len(kept) // 2, len(kept) - 1}
    return [kept[i] for i in sorted(chosen)], [row for i, row in enumerate(kept) if i not in chosen], undercut


def source_factors(logs: Sequence[tuple[dict[str, Any], Sequence[Timed]]]) -> tuple[dict[str, float], set[int]]:
    """(latency, ceiling and half size as factors, ids of the rows they are from) of all logs of a source together."""
    known = [(log, row, topology(log["topology"])) for log, rows in logs for row in rows]
    known.sort(key=lambda entry: (entry[2].num_ranks, entry[1].num_bytes))
    chosen = [known[0], known[len(known) // 2], known[-1]] if len(known) > 3 else []

    def predict(index: int, found: dict[str, float]) -> float:
        log, row, cluster = chosen[index]
        return _time(row, cluster.scaled(**found), log["launch"])

    return fit_factors(predict, [row.time_s for _, row, _ in chosen], _WIDTHS), {id(row) for _, row, _ in chosen}


def score_per_source() -> Iterator[Scored]:
    """Predict every row, those of a source by one calibration of all its machines."""
    by_source: dict[str, list[tuple[int, dict[str, Any], list[Timed]]]] = {}
    for index, log in enumerate(read_logs()):
        cal, rest, _ = split_rows(log)
        by_source.setdefault(log["source"], []).append((index, log, [*cal, *rest]))
    for logs in by_source.values():
        factors, used = source_factors([(log, rows) for _, log, rows in logs])
        for index, log, rows in logs:
            cluster = topology(log["topology"])
            for row in rows:
                if id(row) not in used:
                    yield Scored(
                        log=index,
                        num_bytes=row.num_bytes,
                        measured_s=row.time_s,
                        predicted_s=_time(row, cluster.scaled(**factors), log["launch"]),
                        uncalibrated_s=_time(row, cluster, log["launch"]),
                        roofline_s=roofline_s(row, cluster),
                        is_calibrated=bool(used),
                    )


def roofline_s(row: Timed, cluster: Topology) -> float:
    """α + f·S/B with the slowest link's rate of all ranks of a unit."""
    rate = min(level.one_way_gb_per_s * below for level, _, below in cluster.spanned)
    return ROOFLINE_LATENCY_S + row.num_bytes * BUS_FACTORS[row.op](cluster.num_ranks) / rate / 1e9


def score() -> Iterator[Scored]:
    """Predict every row that the rule leaves to be predicted."""
    for index, log in enumerate(read_logs()):
        cluster = topology(log["topology"])
        cal, rest, _ = split_rows(log)
        fitted = calibrate(cluster, cal, launch=log["launch"]).topology if cal else cluster
        for row in rest:
            yield Scored(
                log=index,
                num_bytes=row.num_bytes,
                measured_s=row.time_s,
                predicted_s=_time(row, fitted, log["launch"]),
                uncalibrated_s=_time(row, cluster, log["launch"]),
                roofline_s=roofline_s(row, cluster),
                is_calibrated=bool(cal),
            )


def _time(row: Timed, cluster: Topology, launch: str) -> float:
    return collective_time(row.op, row.num_bytes, cluster, row.algorithm, launch=launch).time_s


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def summarize(rows: Sequence[Scored]) -> list[dict[str, Any]]:
    """Mean absolute errors by band."""
    found = []
    for name, least, above, target in BANDS:
        own = [row for row in rows if least <= row.num_bytes < above]
        found.append(
            {
                "sizes": name,
                "rows": len(own),
                "mean_error": mean([abs(row.error) for row in own]),
                "median_error": sorted(abs(row.error) for row in own)[len(own) // 2] if own else float("nan"),
                "as_the_file_is": mean([abs(row.uncalibrated_s / row.measured_s - 1) for row in own]),
                "roofline": mean([abs(row.roofline_s / row.measured_s - 1) for row in own]),
                "target": target,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", help="show the rows of the logs whose machine or source has this word")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    logs, rows = read_logs(), list(score())
    by_source: dict[str, list[Scored]] = {}
    for row in rows:
        by_source.setdefault(logs[row.log]["source"], []).append(row)
    calibration = sum(len(split_rows(log)[0]) for log in logs)
    undercut = [(log, row) for log in logs for row in split_rows(log)[2]]
    left = json.loads(DATA.read_text(encoding="utf-8"))["left_out"]
    for index, log in enumerate(logs):
        if options.log and options.log.lower() in (log["machine"] + log["source"]).lower():
            print(log["machine"], log["tool"], log["op"], log["kernel"], log["topology"])
            for row in rows:
                if row.log == index:
                    file_error = row.uncalibrated_s / row.measured_s - 1
                    print(
                        f"  {row.num_bytes:>12} {1e6 * row.measured_s:10.1f} µs {row.error:+.1%} file {file_error:+.1%}"
                    )
    for source, own in by_source.items():
        file_error = mean([abs(r.uncalibrated_s / r.measured_s - 1) for r in own])
        print(f"{len(own):4} rows {mean([abs(r.error) for r in own]):6.1%} (file as it is {file_error:6.1%})  {source}")
    apart = list(score_per_source())
    for rule, line in [("", line) for line in summarize(rows)] + [("a source, ", line) for line in summarize(apart)]:
        print(
            f"{'met   ' if line['mean_error'] <= line['target'] else 'MISSED'} {rule}"
            f"{line['sizes']:16} {line['rows']:4} rows: mean {line['mean_error']:.1%} (target {line['target']:.0%}), "
            f"median {line['median_error']:.1%}; file as it is {line['as_the_file_is']:.1%}, "
            f"roofline {line['roofline']:.1%}"
        )
    in_files = sum(len(log.get("in_topology", [])) for log in logs)
    print(f"{len(rows)} rows predicted, {calibration} calibrated on, {in_files} in the topology files, {len(undercut)} "
          f"undercut by larger messages, {len(left)} left out by kind")  # fmt: skip
    if options.write:
        RESULT.write_text(
            json.dumps({"bands": summarize(rows), "per_source": summarize(apart)}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
