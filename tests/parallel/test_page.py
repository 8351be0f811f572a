"""The front page: every name resolves, and neither it nor a plan loads torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from bitwright import parallel

SOURCE = Path(__file__).parents[2] / "src"


def test_every_name_is_there() -> None:
    for name in parallel.__all__:
        assert not isinstance(getattr(parallel, name), ModuleType), name


def test_a_plan_needs_no_torch() -> None:
    code = """
import sys
from bitwright import comms, hardware, parallel
from bitwright.training.policy import policy_named
plan = parallel.plan_layouts(
    parallel.PlanRequest(
        shape=hardware.KNOWN_MODELS.get("llama-3-8b").shape,
        sequence=4096,
        global_batch=32,
        topology=comms.topology("h100x8"),
        policies=(policy_named("bf16-mixed"),),
    )
)
assert plan.candidates
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
