"""Run a model under a plan."""

from bitwright.inference.apply import (
    Chosen,
    codes_of,
    emulate_plan,
    input_tensors_of,
    rule_of,
    site_rules,
    tensors_of,
)
from bitwright.inference.counters import Counters, Overflows, RunCounters
from bitwright.inference.emulate import SiteRule, emulate
from bitwright.inference.fallback import FallbackSettings
from bitwright.inference.graph import apply_to_program
from bitwright.inference.run_plan import apply
from bitwright.inference.run_report import RunReport, SiteRun
from bitwright.inference.values import ValueRule, emulate_values, value_rule, value_rules, value_tensors_of

__all__ = [
    "Chosen",
    "Counters",
    "FallbackSettings",
    "Overflows",
    "RunCounters",
    "RunReport",
    "SiteRule",
    "SiteRun",
    "ValueRule",
    "apply",
    "apply_to_program",
    "codes_of",
    "emulate",
    "emulate_plan",
    "emulate_values",
    "input_tensors_of",
    "rule_of",
    "site_rules",
    "tensors_of",
    "value_rule",
    "value_rules",
    "value_tensors_of",
]
