"""Allocation alone: whatever a tool assigned, rounded by bitwright's roundings, the same for all.

    python allocation.py FOLDER --group-size 128 --roundings rtn clip --out OUT RUN ...

Every site keeps the bits that the run's result.json gives it; of the given roundings it takes the one with the least
predicted KL. Written are OUT/<name of the run>/weights.safetensors and result.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import ours
import record

from bitwright.quantize import ROUNDINGS
from bitwright.search.candidate import Candidate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--roundings", nargs="+", choices=sorted(ROUNDINGS), required=True)
    arguments = parser.parse_args()

    stopwatch = record.Stopwatch()
    schemes = ours.named_schemes(arguments.group_size)
    search = ours.open_search(arguments.folder, schemes, arguments.roundings)
    for run in arguments.runs:
        bits = json.loads((run / "result.json").read_text(encoding="utf-8"))["bits"]
        assignment: dict[str, Candidate] = {}
        for site in search.sites:
            scheme = f"int{bits[site.name]:g}_g{arguments.group_size}"
            rivals = {c: kl for c, kl in search.learned.scores[site.name].items() if c.scheme == scheme}
            assignment[site.name] = min(rivals, key=lambda c: rivals[c])
        weights = search.weights(assignment)
        note = f"assignment of {run.name}"
        ours.write(arguments.out / run.name, search, assignment, weights, stopwatch.stop(), note)


if __name__ == "__main__":
    main()
