"""Plans of older schemas, read as plans of this one.

    1 → 2   fields were added (limits on time, device memory and stability, the workload, what binds, comparisons);
            what version 1 did not say is what the defaults of version 2 say

What was written is checked against the hashes of its own time first: an old plan is as safe from a changed byte as a
new one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitwright.errors import PlanError
from bitwright.plan.canonical import hash_json

#: Fields of a site that version 1 counted as the decision.
_DECIDED_IN_1 = ("name", "kind", "role", "module", "rows", "tied_group", "shape", "scheme", "rounding", "transform")


def upgrade_content(content: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the content of a ``plan.json`` in the newest schema; that of the newest as it is.

    Raises ``PlanError`` where an old plan's decision_hash does not fit its content.
    """
    if content["schema_version"] != 1:
        return content
    if content.get("decision_hash") != _decision_hash_1(content):
        raise PlanError(f"'{file}': decision_hash does not fit the sites and choices; make the plan again")
    return {**content, "schema_version": 2}


def _decision_hash_1(content: dict[str, Any]) -> str:
    """The decision_hash that version 1 wrote, from its JSON alone."""
    try:
        decided = {
            "schema_version": 1,
            "model": content["model"]["hash"],
            "calibration": content["calibration"]["hash"],
            "repair": content["repair"] and content["repair"]["hash"],
            "evaluation": content["evaluation"]["hash"],
            "sites": [{field: site[field] for field in _DECIDED_IN_1} for site in content["sites"]],
            **{key: content[key] for key in ("hardware", "task", "budget", "objective", "seed", "options")},
        }
    except (KeyError, TypeError):
        return ""
    return hash_json(decided)
