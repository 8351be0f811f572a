"""A training plan: in which format everything of a training step is computed and kept, site by site, with the evidence.

The same folder as any plan (``plan.json``, canonical, with its hashes; ``run.json`` beside it), of the kind "training".
A *site* is a matrix product by the name of its module, or one of the things that a step has once: norms, softmax, loss,
gradients, master weights, the optimizer's moments, what GPUs send each other.

What was measured in a short run stands beside each choice: ranges of operands, and the errors of the three products of
a linear layer under each recipe. All errors are relative, against products of the same numbers in fp32:
‖rounded − exact‖ / ‖exact‖ of each output over the tokens that were looked at; nine of ten outputs stay within.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from bitwright.errors import PlanError
from bitwright.plan.canonical import Number, canonical_json, hash_json
from bitwright.plan.schema import ModelInfo, Record, Run, TextInfo

#: The version this program writes, and the newest it reads.
TRAINING_SCHEMA_VERSION = 1

#: What a site of a training plan is.
TrainingKind = Literal[
    "matmul", "norm", "softmax", "loss", "grad", "master", "optim.m", "optim.v", "comm.grad", "comm.param"
]

#: Fields of a site that are the decision; the rest is evidence.
_DECIDED = {"name", "kind", "role", "choice"}


class RangeEvidence(Record):
    """What a format would do to the numbers of one operand, as they were in the run."""

    #: "x", "w", "g", or what the site is about.
    operand: str
    format: str
    #: Whether numbers are divided by a scale that puts the largest on the format's largest first.
    scaled: bool
    #: Largest magnitude.
    amax: Number
    #: Share of numbers that round to 0 and were not, and that round beyond the largest value, 0 … 1.
    flushed: Number
    clipped: Number


class ProductErrors(Record):
    """Relative errors of a linear layer's three products under a recipe, within which nine of ten outputs stay."""

    #: A policy whose recipe it is, or a format.
    recipe: str
    #: y = x Wᵀ, dx = g W, dW = gᵀ x.
    forward: Number
    dgrad: Number
    wgrad: Number

    @property
    def largest(self) -> float:
        """Of the three."""
        return max(self.forward, self.dgrad, self.wgrad)


class TrainingSite(Record):
    """One thing whose format is chosen."""

    #: The module's dotted name for a product; "norms", "softmax", "loss", … for the others.
    name: str
    kind: TrainingKind
    role: str
    #: A policy whose recipe of products is used, or a format.
    choice: str
    #: One sentence: why.
    reason: str
    #: [out, in] of a product's weight.
    shape: tuple[int, int] | None = None
    ranges: tuple[RangeEvidence, ...] = ()
    errors: tuple[ProductErrors, ...] = ()


class CandidatePolicy(Record):
    """A policy that was thought of, and what came of it."""

    name: str
    #: None where its recipe was measured and is used somewhere.
    why_not: str | None = None
    #: Products that are under it.
    sites: int = Field(default=0, ge=0)


class MemoryNeed(Record):
    """Bytes of one GPU at the largest instant of a step, predicted."""

    peak_bytes: int = Field(ge=0)
    device_bytes: int = Field(ge=0)
    #: Sequences of one GPU and tokens of each that it is stated for.
    batch: int = Field(gt=0)
    sequence: int = Field(gt=0)
    #: ZeRO stage.
    zero: int = Field(ge=0, le=3)
    recompute: Literal["none", "full"]


class TrainingPlan(Record):
    """How one model is to be trained on some hardware.

    Two plans are equal when their ``content_hash`` is. Raises ``PlanError`` where two sites share a name.
    """

    kind: Literal["training"] = "training"
    schema_version: Literal[1] = 1
    model: ModelInfo
    #: Canonical device name, why this one, and how many of them.
    hardware: str
    hardware_reason: str = ""
    gpus: int = Field(default=1, gt=0)
    #: The policy that everything but the sites' own choices follows, and why.
    policy: str
    policy_reason: str
    optimizer: str
    learning_rate: Number
    #: Relative error of a product up to which a recipe is taken.
    max_error: Number
    seed: int
    #: What the run read.
    text: TextInfo
    #: The loss of the run's text, nats per token, as the model was loaded.
    loss: Number
    sites: tuple[TrainingSite, ...]
    candidates: tuple[CandidatePolicy, ...] = ()
    memory: MemoryNeed
    notes: tuple[str, ...] = ()
    #: Package → version.
    versions: Mapping[str, str] = Field(default_factory=dict)

    _run: Run = PrivateAttr(default_factory=Run)

    @model_validator(mode="after")
    def _raise_if_twice(self) -> Self:
        names = [site.name for site in self.sites]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise PlanError(f"site '{twice}' appears twice in the plan; every site must have one choice")
        return self

    def site(self, name: str) -> TrainingSite:
        """Return the site called ``name``. Raises ``PlanError`` where the plan has none."""
        for site in self.sites:
            if site.name == name:
                return site
        raise PlanError(f"the plan has no site '{name}'; its sites are listed by: bitwright show PLAN --sites")

    @property
    def products(self) -> tuple[TrainingSite, ...]:
        """The sites that are matrix products."""
        return tuple(site for site in self.sites if site.kind == "matmul")

    @property
    def run(self) -> Run:
        """Timings, paths and date of the run that made this plan; no part of any hash."""
        return self._run

    def attach(self, run: Run) -> TrainingPlan:
        """Return a copy that carries ``run``."""
        copy = self.model_copy()
        copy._run = run
        return copy

    @cached_property
    def decision_hash(self) -> str:
        """SHA-256 over inputs, sites and choices."""
        fields = {"kind", "schema_version", "hardware", "gpus", "policy", "optimizer", "learning_rate", "max_error"}
        return hash_json(
            {
                **self.model_dump(mode="json", include={*fields, "seed"}),
                "model": self.model.hash,
                "text": self.text.hash,
                "sites": [site.model_dump(mode="json", include=_DECIDED) for site in self.sites],
            }
        )

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over all of ``plan.json`` but this hash."""
        return hash_json(self._content())

    def _content(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json"), "decision_hash": self.decision_hash}

    def to_json(self) -> str:
        """Return the text of ``plan.json``: canonical, so equal plans give equal bytes."""
        return canonical_json({**self._content(), "content_hash": self.content_hash})

    def __eq__(self, other: object) -> bool:
        return self.content_hash == other.content_hash if isinstance(other, TrainingPlan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.content_hash)
