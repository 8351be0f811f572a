"""Result files that grow point by point: what is done is on disk, and is not done again.

A point is one run, or whatever else takes long enough to be lost. Its key says what it is; the settings of the file say
under what all points were measured, and points under other settings are never mixed with new ones. A file is written
beside its place and renamed, so half of one never exists.

Results lie in benchmarks/results, or where `--out` says. Those of `--quick` lie in a folder for temporary files: they
show that a script runs, and say nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from machine import load_average, machine, now

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "transformers", "numpy", "numba")
QUICK_RESULTS = Path(tempfile.gettempdir()) / "bitwright-quick"


class Points:
    """The result file of one script.

    Args:
        name: of the file, `training-<name>.json`.
        what: one sentence on what was measured.
        settings: of all points, plain JSON.
        arguments: of the command line: where results go, and whether points are measured anew.
    """

    def __init__(self, name: str, what: str, settings: Mapping[str, Any], arguments: argparse.Namespace) -> None:
        folder = arguments.out or (QUICK_RESULTS if arguments.quick else RESULTS)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"training-{name}.json"
        self._what = what
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        found = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.points: dict[str, Any] = found.get("points", {})
        self._machine: dict[str, Any] = found.get("machine", {})
        if self.points and found["settings"] != self._settings:
            print(f"{self.path.name}: its points were measured under other settings and are dropped", file=sys.stderr)
            self.points = {}
        if arguments.again:
            self.points = {}

    def measure(self, key: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return a point, measured now unless it is there."""
        if key not in self.points:
            load = load_average()
            self.points[key] = {**make(), "load_average_before": load, "date": now()}
            self._machine = machine(PACKAGES)
            self.write()
            print(f"{key}: {spell(self.points[key])}", file=sys.stderr, flush=True)
        found: dict[str, Any] = self.points[key]
        return found

    def write(self, **further: Any) -> None:
        """Write the file, with what was made of all points."""
        import torch

        content = {
            "what": self._what,
            "date": now(),
            "machine": self._machine or machine(PACKAGES),
            "threads": torch.get_num_threads(),
            "settings": self._settings,
            **further,
            "points": self.points,
        }
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)

    def named(self, *prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """(rest of the key, point) of those whose key begins with these words."""
        for key, point in self.points.items():
            words = key.split(" ")
            if words[: len(prefix)] == list(prefix):
                yield " ".join(words[len(prefix) :]), point


def spell(point: Mapping[str, Any]) -> str:
    """The numbers and short words of a point, for the terminal."""
    shown = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in point.items()
        if isinstance(value, int | float | bool | None | str) and name not in ("date", "load_average_before")
    }
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def arguments_of(text: str | None) -> argparse.Namespace:
    """The command line that all scripts share."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of a few runs, filed in a temporary folder")
    parser.add_argument("--again", action="store_true", help="measure what is there already anew")
    parser.add_argument("--out", type=Path, help="folder for the results, in place of benchmarks/results")
    parser.add_argument("--plot", action="store_true", help="only tables and the plot of what is there")
    return parser.parse_args()
