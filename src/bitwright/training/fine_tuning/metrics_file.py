"""`metrics.jsonl`: one line a step and one a measurement, written as they come.

    {"kind": "step", "step": 12, "loss": 2.31, "grad_norm": 0.84, "lr": 2e-05, "skipped": null, "scale": 65536.0, …}
    {"kind": "validation", "step": 50, "loss": 2.20, "error": 0.013, "tokens": 8128}

A run that is gone on with drops the lines after its checkpoint, so the file reads as if it had never stopped. A run
that was over measures once more what it has; a measurement of one step over so many tokens stands there once. Numbers
that JSON lacks (the loss of a step that was skipped) are written as text: "nan", "inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.errors import TrainingError


class MetricsFile:
    """Appends to a file, line by line.

    Args:
        path: of the file; made where it is missing.
        after_step: lines of later steps are dropped first.

    Raises:
        TrainingError: a line that is there is no JSON.
    """

    def __init__(self, path: Path, *, after_step: int = 0) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= after_step] if path.exists() else []
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self.path = path
        self._measured = {(line["step"], line.get("tokens")) for line in kept if line.get("kind") == "validation"}

    def add(self, record: Mapping[str, Any]) -> None:
        """Write one line, unless it is a measurement that is there."""
        if record.get("kind") == "validation" and (record["step"], record.get("tokens")) in self._measured:
            return
        plain = {name: _plain(value) for name, value in record.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain, allow_nan=False) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file. A last line that was cut off in writing is left out.

    Raises:
        TrainingError: a line in between is no JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise TrainingError(
                f"'{path}', line {number} is no JSON ({error.msg}); move the file away, a new one is begun"
            ) from error
    return found


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
