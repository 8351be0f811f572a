"""Run a model under a plan."""

from bitwright.inference.apply import emulate_plan, site_rules, tensors_of
from bitwright.inference.emulate import SiteRule, emulate

__all__ = ["SiteRule", "emulate", "emulate_plan", "site_rules", "tensors_of"]
