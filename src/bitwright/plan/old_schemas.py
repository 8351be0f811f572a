"""Plans of older schemas, read as plans of this one.

    1 → 2   fields were added (limits on time, device memory and stability, the workload, what binds, comparisons);
            what version 1 did not say is what the defaults of version 2 say
    2 → 3   hashes of single tensors were added; older plans have none

What was written is checked against the hashes of its own time first: an old plan is as safe from a changed byte as a
new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitwright.errors import PlanError
from bitwright.plan.canonical import hash_json

#: Fields of a site that versions 1 and 2 counted as the decision.
_DECIDED_SITE = ("name", "kind", "role", "module", "rows", "tied_group", "shape", "scheme", "rounding", "transform")
_DECIDED_IN_1 = ("hardware", "task", "budget", "objective", "seed", "options")
#: Older version → fields of the plan that it counted as they are.
_DECIDED = {1: _DECIDED_IN_1, 2: (*_DECIDED_IN_1, "workload")}


def upgrade_content(content: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the content of a ``plan.json`` in the newest schema; that of the newest as it is.

    Raises ``PlanError`` where an old plan's decision_hash does not fit its content.
    """
    decided = _DECIDED.get(content["schema_version"])
    if decided is None:
        return content
    if content.get("decision_hash") != _decision_hash(content, decided):
        raise PlanError(f"'{file}': decision_hash does not fit the sites and choices; make the plan again")
    return {**content, "schema_version": 3}


def _decision_hash(content: dict[str, Any], fields: tuple[str, ...]) -> str:
    """The decision_hash that an older version wrote, from its JSON alone."""
    try:
        decided = {
            "schema_version": content["schema_version"],
            "model": content["model"]["hash"],
            "calibration": content["calibration"]["hash"],
            "repair": content["repair"] and content["repair"]["hash"],
            "evaluation": content["evaluation"]["hash"],
            "sites": [{field: site[field] for field in _DECIDED_SITE} for site in content["sites"]],
            **{key: content[key] for key in fields},
        }
    except (KeyError, TypeError):
        return ""
    return hash_json(decided)
