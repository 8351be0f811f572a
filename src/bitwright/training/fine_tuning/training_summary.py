"""What became of a run, and whether it came to anything: one that ends with NaN looks like any other that ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from bitwright.training.fine_tuning.validation import ValidationLoss


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSummary:
    """What became of a run."""

    #: Steps in all, those before it was gone on with included.
    steps: int
    skipped: int
    policy: str
    reason: str
    #: Mean loss of the last steps that were not skipped, at most ten; NaN where all were.
    loss: float
    validation: ValidationLoss | None
    #: Of this call.
    tokens: int
    seconds: float
    model: Path
    checkpoint: Path
    notes: tuple[str, ...]

    @property
    def trouble(self) -> str | None:
        """Why what was trained is of no use, or hardly; None: nothing speaks against it."""
        if self.validation is not None and not math.isfinite(self.validation.loss):
            return (
                f"the validation loss is {self.validation.loss}, so the model is of no use; look for the step where it "
                "began in metrics.jsonl, and begin anew with a lower learning rate or under another policy"
            )
        if 2 * self.skipped > self.steps:
            return (
                f"{self.skipped:,} of {self.steps:,} steps were skipped, so hardly anything was learned; metrics.jsonl "
                "says why each was: mend the data, lower the learning rate, or take another policy"
            )
        return None

    @property
    def tokens_per_s(self) -> float:
        """Tokens that were trained on in a second, of all processes together."""
        return self.tokens / self.seconds if self.seconds else 0.0
