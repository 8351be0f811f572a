"""Run a model under a plan."""

from bitwright.inference.apply import emulate_plan, input_tensors_of, site_rules, tensors_of
from bitwright.inference.counters import Counters, Overflows
from bitwright.inference.emulate import SiteRule, emulate

__all__ = [
    "Counters",
    "Overflows",
    "SiteRule",
    "emulate",
    "emulate_plan",
    "input_tensors_of",
    "site_rules",
    "tensors_of",
]
