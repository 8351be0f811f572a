"""The plan: site → choice, with the evidence. The currency of the program: search writes it, everything else reads it.

Three hashes say what a plan is (all SHA-256 over canonical JSON, see ``canonical.py``):

- ``tensors_hash`` over what cannot be recomputed from the weights (names, dtypes, shapes, bytes of ``plan.tensors``);
- ``decision_hash`` over inputs, sites and choices only: equal for the same decision on any machine or engine;
- ``content_hash`` over all of ``plan.json`` (with the other two hashes in it): equal for the same decision with the
  same evidence. Timings, paths and the date are no part of it; they lie in ``plan.run``.

Hashes are computed, never passed in, so a plan in memory cannot carry a wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from bitwright.errors import PlanError
from bitwright.plan.budget import Budget, Objective
from bitwright.plan.canonical import canonical_json, hash_json, hash_tensors
from bitwright.plan.evidence import (
    DeviceMemory,
    LimitStudy,
    ParetoPoint,
    Robustness,
    RuledOutChoice,
    UniformComparison,
)
from bitwright.plan.schema import (
    FrontierPoint,
    Latency,
    Limit,
    Measured,
    ModelInfo,
    Prediction,
    Record,
    Repair,
    Run,
    SearchOptions,
    SiteChoice,
    Summary,
    TextInfo,
)
from bitwright.plan.workload import Workload

#: The version this program writes, and the newest it reads.
SCHEMA_VERSION = 3

#: Fields of a site that are its identity and the choice made there; the rest is evidence.
_DECIDED_SITE_FIELDS = frozenset(
    {"name", "kind", "role", "module", "rows", "tied_group", "shape", "scheme", "rounding", "transform"}
)
_EMPTY_TENSORS_HASH = hash_tensors({})


class Plan(Record):
    """Every site's choice for one model, and the evidence for it.

    Build it with fields, then attach what is not JSON: ``Plan(...).attach(tensors=..., run=...)``.
    Two plans are equal when their ``content_hash`` is.

    Raises ``PlanError`` where two sites share a name, sites of one tied group have different schemes,
    or ``met`` stands beside a missed limit.
    """

    schema_version: Literal[3] = 3
    model: ModelInfo
    #: Parameter of the model → hash of its fp32 values (`models.loaded.hash_each_weight`); empty in plans of older
    #: schemas. They say which tensors of another model differ.
    tensor_hashes: Mapping[str, str] = Field(default_factory=dict)
    #: Canonical device name.
    hardware: str
    #: Why this device: asked for, or how it was detected.
    hardware_reason: str = ""
    task: str
    budget: Budget
    #: The context and the batch that bytes on the device and times are stated for.
    workload: Workload = Workload()
    objective: Objective
    #: Why this objective: asked for, or which rule chose it.
    objective_reason: str = ""
    seed: int
    options: SearchOptions | None = None
    calibration: TextInfo
    #: The text on which plans were compared and mended; None where nothing was.
    repair: TextInfo | None = None
    #: The text that was looked at once, for ``measured``.
    evaluation: TextInfo
    sites: tuple[SiteChoice, ...]
    summary: Summary
    measured: Measured | None = None
    limits: tuple[Limit, ...] = ()
    met: bool
    #: Which limit binds, and what loosening it would buy.
    limit_studies: tuple[LimitStudy, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    #: The front over quality, memory, latency and stability, where it was asked for.
    pareto: tuple[ParetoPoint, ...] = ()
    #: The plan against one scheme everywhere of the same size.
    uniform: tuple[UniformComparison, ...] = ()
    #: How choice and quality move under other text, another seed and a longer context, where that was asked for.
    robustness: Robustness | None = None
    #: What the device or the engine does not have.
    ruled_out: tuple[RuledOutChoice, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    repairs: tuple[Repair, ...] = ()
    latency: Latency | None = None
    #: What has to fit on the device; None without a context.
    device_memory: DeviceMemory | None = None
    #: Anything a reader must know: shorter last groups, schemes left out, …
    notes: tuple[str, ...] = ()
    tensors_hash: str = _EMPTY_TENSORS_HASH
    #: Package → version.
    versions: Mapping[str, str] = Field(default_factory=dict)

    _tensors: Mapping[str, np.ndarray] = PrivateAttr(default_factory=lambda: MappingProxyType({}))
    _run: Run = PrivateAttr(default_factory=Run)

    @model_validator(mode="after")
    def _raise_if_inconsistent(self) -> Self:
        group_scheme: dict[str, SiteChoice] = {}
        names: set[str] = set()
        for site in self.sites:
            if site.name in names:
                raise PlanError(f"site '{site.name}' appears twice in the plan; every site must have one choice")
            names.add(site.name)
            if site.tied_group is None:
                continue
            first = group_scheme.setdefault(site.tied_group, site)
            if first.scheme != site.scheme:
                raise PlanError(
                    f"sites of the tied group '{site.tied_group}' must share a scheme, but '{first.name}' has "
                    f"{first.scheme} and '{site.name}' has {site.scheme}; give them one scheme"
                )
        missed = [limit.name for limit in self.limits if not limit.met]
        if self.met and missed:
            raise PlanError(f"the plan says it is met, but its limit '{missed[0]}' is missed; set met=False")
        return self

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """What cannot be recomputed from the weights alone, read-only: "<site>/<part>" → array."""
        return self._tensors

    @property
    def run(self) -> Run:
        """Timings, paths and date of the run that made this plan; no part of any hash."""
        return self._run

    def attach(self, *, tensors: Mapping[str, np.ndarray] | None = None, run: Run | None = None) -> Plan:
        """Return a copy that carries ``tensors`` ("<site>/<part>" → array) and ``run``; None keeps what is there.

        Raises ``PlanError`` for a tensor whose name is not that of a site followed by "/<part>".
        """
        held = self._tensors if tensors is None else MappingProxyType(dict(tensors))
        known = {site.name for site in self.sites}
        for name in held:
            site, slash, part = name.rpartition("/")
            if not slash or not part or site not in known:
                raise PlanError(f"tensor '{name}' belongs to no site of the plan; name it '<site>/<part>'")
        plan = self if tensors is None else self._validated({"tensors_hash": hash_tensors(held)})
        copy = plan.model_copy()
        copy._tensors = held
        copy._run = self._run if run is None else run
        return copy

    def replace(self, **changes: Any) -> Plan:
        """Return a copy with other fields, validated again; tensors and run stay."""
        if "tensors_hash" in changes:
            raise PlanError("tensors_hash follows from the tensors; use attach(tensors=...)")
        copy = self._validated(changes)
        copy._tensors, copy._run = self._tensors, self._run
        return copy

    def _validated(self, changes: Mapping[str, Any]) -> Plan:
        fields: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **changes})

    @property
    def kl_unit(self) -> str:
        """What every KL of the plan is per: "token", or "text" for a sentence encoder."""
        return "token" if self.measured is None else self.measured.unit

    def site(self, name: str) -> SiteChoice:
        """Return the site called ``name``. Raises ``PlanError`` where the plan has none."""
        for site in self.sites:
            if site.name == name:
                return site
        raise PlanError(f"the plan has no site '{name}'; its sites are listed by: bitwright show PLAN --sites")

    @cached_property
    def decision_hash(self) -> str:
        """SHA-256 over inputs, sites and choices."""
        return hash_json(
            {
                "schema_version": self.schema_version,
                "model": self.model.hash,
                "hardware": self.hardware,
                "task": self.task,
                "budget": self.budget.model_dump(mode="json"),
                "workload": self.workload.model_dump(mode="json"),
                "objective": self.objective,
                "seed": self.seed,
                "options": None if self.options is None else self.options.model_dump(mode="json"),
                "calibration": self.calibration.hash,
                "repair": None if self.repair is None else self.repair.hash,
                "evaluation": self.evaluation.hash,
                "sites": [site.model_dump(mode="json", include=set(_DECIDED_SITE_FIELDS)) for site in self.sites],
            }
        )

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over all of ``plan.json`` but this hash."""
        return hash_json(self._content())

    def _content(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json", by_alias=True), "decision_hash": self.decision_hash}

    def to_json(self) -> str:
        """Return the text of ``plan.json``: canonical, so equal plans give equal bytes."""
        return canonical_json({**self._content(), "content_hash": self.content_hash})

    def __eq__(self, other: object) -> bool:
        return self.content_hash == other.content_hash if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.content_hash)
