"""Train in low precision: one call sets up what runs in which format, and keeps it safe.

run = training.prepare(model, optimizer, policy="bf16-mixed")      # or "auto", a Policy, a training plan
for batch in batches:
    with run.step() as step:
        step.backward(model(**batch).loss)                         # scaling, clipping, skipping inside
print(run.describe())

Importing this page loads no torch: each name is fetched when it is first used, and policies are read without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bitwright.lazy_page import open_lazily

if TYPE_CHECKING:
    from bitwright.training.policy import POLICIES, Policy, policy_named

_HOMES = {
    "POLICIES": "bitwright.training.policy",
    "Policy": "bitwright.training.policy",
    "policy_named": "bitwright.training.policy",
}

__all__ = ["POLICIES", "Policy", "policy_named"]

open_lazily(__name__, _HOMES)
