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
from bitwright.inference.counters import Counters, Overflows
from bitwright.inference.emulate import SiteRule, emulate
from bitwright.inference.graph import apply_to_program
from bitwright.inference.run_plan import apply
from bitwright.inference.values import ValueRule, emulate_values, value_rule, value_rules, value_tensors_of

__all__ = [
    "Chosen",
    "Counters",
    "Overflows",
    "SiteRule",
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
