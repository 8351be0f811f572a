"""What precision on the wire does to sums, as ranks grow from 2 to 1,024 and over many steps (simulated).

    python benchmarks/wire_error.py [--quick]        # writes results/wire-error.json unless --quick

Errors are against fp64, of independent normal numbers; the law beside them is u·√(n/2) for a ring, with u the root mean
square of one rounding. The second table is of a gradient that stays the same: what the mean over steps is off by, with
and without what rounding lost being added to the next step.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from bitwright.comms.wire import ErrorFeedback, error_growth, wire_format

RESULT = Path(__file__).parent / "results" / "wire-error.json"
FORMATS = ("bf16", "fp16", "fp8_e4m3", "int8")
ALGORITHMS = ("ring", "tree", "halving_doubling", "two_shot")


def growth(quick: bool) -> list[dict[str, object]]:
    """Errors by format, algorithm and ranks."""
    rows = []
    for ranks in (2, 8, 32, 128) if quick else (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        for name in FORMATS:
            # The ring of a thousand ranks has two million messages; the other formats follow the same law.
            own = ALGORITHMS if ranks <= 256 or name == "bf16" else ("tree", "two_shot")
            for row in error_growth([name], own, [ranks], length=1024):
                rows.append({"format": name, "algorithm": row.algorithm, "ranks": ranks, "error": row.relative_error})
                print(f"{name:9} {row.algorithm:17} {ranks:5} ranks  {row.relative_error:.3e}", flush=True)
    return rows


def feedback(quick: bool) -> list[dict[str, object]]:
    """Error of the mean over steps, of a gradient with a few large numbers."""
    random = np.random.default_rng(0)
    gradient = (random.standard_normal((8, 1024)) * np.exp(2 * random.standard_normal(1024))).astype(np.float32)
    exact = gradient.astype(np.float64).sum(axis=0)
    rows = []
    for name in FORMATS:
        for is_on in (False, True):
            state = ErrorFeedback(wire=wire_format(name), is_on=is_on)
            total = np.zeros(1024)
            for step in range(1, (100 if quick else 1000) + 1):
                total += state.step(gradient)
                if step in (1, 10, 100, 1000):
                    error = float(np.linalg.norm(total / step - exact) / np.linalg.norm(exact))
                    rows.append({"format": name, "feedback": is_on, "steps": step, "error": error})
                    print(f"{name:9} feedback {'on ' if is_on else 'off'} {step:5} steps  {error:.3e}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 128 ranks and 100 steps; writes nothing")
    options = parser.parse_args()
    told = {"growth": growth(options.quick), "feedback": feedback(options.quick)}
    ring = {
        row["ranks"]: row["error"] for row in told["growth"] if (row["format"], row["algorithm"]) == ("bf16", "ring")
    }
    first, last = min(ring), max(ring)
    slope = math.log(ring[last] / ring[8]) / math.log(last / 8)
    print(f"ring in bf16: error grows as ranks to the power {slope:.2f} from 8 to {last} ranks (law: 0.5)")
    assert first == 2
    if not options.quick:
        RESULT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
