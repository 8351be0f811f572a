"""Run a model under a plan."""

from bitwright.inference.apply import emulate_plan, input_tensors_of, site_rules, tensors_of
from bitwright.inference.counters import Counters, Overflows
from bitwright.inference.emulate import SiteRule, emulate
from bitwright.inference.values import ValueRule, emulate_values, value_rules, value_tensors_of

__all__ = [
    "Counters",
    "Overflows",
    "SiteRule",
    "ValueRule",
    "emulate",
    "emulate_plan",
    "emulate_values",
    "input_tensors_of",
    "site_rules",
    "tensors_of",
    "value_rules",
    "value_tensors_of",
]
