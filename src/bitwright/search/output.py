"""What of a model is compared: its predictions of the next token, or the vectors it puts texts at.

Everything that is chosen and proved rests on one number, KL(reference ‖ plan). An output says of which distributions:

    tokens      categorical, over the vocabulary, one at each scored token
    embedding   Gaussian of unit variance around the unit vector of a text, one a text

A file in `outputs/` defines ``OUTPUTS``, a tuple of `OutputKind`; a task names the kind that it asks for. The kind is
opened for a model and is then an `Output`: it samples what calibration backpropagates, runs the reference, compares a
plan with it, and tells the figures of a proof. Nothing else knows which output it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bitwright.catalog import Catalog
from bitwright.errors import BudgetError
from bitwright.models.loaded import LoadedModel
from bitwright.models.spool import Spool
from bitwright.plan import Budget
from bitwright.search.progress import Stage
from bitwright.search.task import TASKS
from bitwright.search.text import TextSet

Array = npt.NDArray[np.float64]


class Reference(Protocol):
    """The loaded weights run in fp32 on one text, as an output keeps it."""

    @property
    def text(self) -> TextSet: ...

    @property
    def kept(self) -> Tensor | None:
        """What a later run on the same text can start from, fp32 with sequences first; None where nothing can."""


class Effects(Protocol):
    """What a plan did to each sequence."""

    @property
    def num_scored(self) -> Array:
        """How many predictions of each sequence count, [sequences]."""

    @property
    def kl(self) -> Array:
        """Their KL(reference ‖ plan) summed, nats, [sequences]."""

    @property
    def mean_kl(self) -> float:
        """Nats per scored prediction."""


class Output(Protocol):
    """What is compared, of one model."""

    @property
    def unit(self) -> Literal["token", "text"]:
        """What a KL is per."""

    @property
    def generates(self) -> bool:
        """Does it have a perplexity, and does the model continue text?"""

    def log_likelihood(
        self, model: nn.Module, ids: Tensor, scored: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, int]:
        """Run the model and sample an outcome from its own prediction.

        Args:
            model: the model, gradients on.
            ids, scored: [sequences, length], as a `TextSet` has them.
            generator: draws the outcome.

        Returns:
            What to backpropagate (0-d, nats), and of how many scored predictions it is the sum.
        """

    def run_reference(
        self,
        model: nn.Module,
        text: TextSet,
        stage: Stage,
        known: Tensor | None = None,
        spool: Spool | None = None,
    ) -> Reference:
        """Run the unchanged model; `stage` advances by one per sequence.

        Args:
            known: what an earlier run kept.
            spool: where what outgrows the memory may go.

        Raises:
            ModelError: what the model puts out is not finite; the sequences are named.
        """

    def compare(self, reference: Any, model: nn.Module, stage: Stage, num_sequences: int | None = None) -> Effects:
        """Compare a model as it now computes with its reference, on the first `num_sequences` sequences (None: all).

        Raises:
            ModelError: what the model puts out is not finite; the sequences are named.
        """

    def figures(self, effects: Any, seed: int) -> Mapping[str, Any]:
        """The fields of `Measured` that this output has beside the KL, with intervals of a bootstrap by `seed`."""


@dataclass(frozen=True, kw_only=True)
class OutputKind:
    """One kind of output."""

    name: str
    description: str
    #: Opens it for a model. Raises ModelError where the model puts out no such thing.
    open: Callable[[LoadedModel], Output]


OUTPUTS: Catalog[OutputKind] = Catalog(
    kind="output", package="bitwright.search.outputs", attribute="OUTPUTS", record_type=OutputKind
)
"""Outputs, one file each: a module defines OUTPUTS, a tuple of `OutputKind`."""


def open_output(task: str, loaded: LoadedModel) -> Output:
    """What a task compares, of this model.

    Raises:
        UnknownName: no such task.
        ModelError: the model puts out no such thing.
    """
    return OUTPUTS[TASKS[task].output].open(loaded)


def raise_if_not_measurable(budget: Budget, output: Output, task: str) -> None:
    """Raise BudgetError for a limit on what the output does not have."""
    if budget.max_ppl_increase is not None and not output.generates:
        raise BudgetError(
            f"max_ppl_increase limits perplexity, and the task '{task}' predicts no tokens; limit max_kl instead"
        )
