"""How a training run tells how far it is, without knowing who listens: the command line draws, a service writes rows.

    {"kind": "step", "step": 12, "loss": 2.31, "grad_norm": 0.84, "lr": 2e-05, "skipped": None, "scale": 65536.0,
     "level": "fp16", "epoch": 0.31, "tokens_per_s": 5120.0}
    {"kind": "validation", "step": 50, "loss": 2.20, "error": 0.013, "tokens": 8128}

The records are the lines of `metrics.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Watcher(Protocol):
    """Listens to a run."""

    def began(self, facts: Mapping[str, Any]) -> None:
        """The run is set up: `policy`, `reason`, `steps`, `first_step`, `trained_parameters`, `rows`, `notes`, …"""

    def stepped(self, record: Mapping[str, Any]) -> None:
        """A step was taken, or skipped."""

    def measured(self, record: Mapping[str, Any]) -> None:
        """The validation loss was measured."""

    def saved(self, checkpoint: Path, step: int) -> None:
        """A checkpoint is there."""


class Unwatched:
    """Nobody listens."""

    def began(self, facts: Mapping[str, Any]) -> None:
        """See `Watcher`."""

    def stepped(self, record: Mapping[str, Any]) -> None:
        """See `Watcher`."""

    def measured(self, record: Mapping[str, Any]) -> None:
        """See `Watcher`."""

    def saved(self, checkpoint: Path, step: int) -> None:
        """See `Watcher`."""
