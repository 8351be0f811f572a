"""bitwright chooses, proves and guards the numerical precision of LLM training and inference.

    plan = bitwright.optimize("demo", budget=bitwright.Budget(effective_bits=4.8))
    plan = bitwright.load_plan("demo-plan")
    bitwright.verify(plan, evaluation="my.txt")

Importing this package loads no torch: every name is fetched when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitwright.errors import BitwrightError
    from bitwright.plan import Budget, Plan, load_plan, write_plan
    from bitwright.report import write_report
    from bitwright.search.optimize import optimize, verify

_HOMES = {
    "BitwrightError": "bitwright.errors",
    "Budget": "bitwright.plan",
    "Plan": "bitwright.plan",
    "load_plan": "bitwright.plan",
    "optimize": "bitwright.search.optimize",
    "verify": "bitwright.search.optimize",
    "write_plan": "bitwright.plan",
    "write_report": "bitwright.report",
}

__all__ = ["BitwrightError", "Budget", "Plan", "load_plan", "optimize", "verify", "write_plan", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bitwright' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
