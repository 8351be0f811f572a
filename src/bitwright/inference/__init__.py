"""Run a model under a plan."""

from bitwright.inference.counters import Counters, Overflows, RunCounters
from bitwright.inference.emulation.emulate import SiteRule, emulate
from bitwright.inference.emulation.program import apply_to_program
from bitwright.inference.emulation.site_rules import (
    Chosen,
    codes_of,
    emulate_plan,
    input_tensors_of,
    rule_of,
    site_rules,
    tensors_of,
)
from bitwright.inference.emulation.values import ValueRule, emulate_values, value_rule, value_rules, value_tensors_of
from bitwright.inference.generation.generate import Generated, generate
from bitwright.inference.generation.sampling import Sampling
from bitwright.inference.hysteresis import FallbackSettings
from bitwright.inference.metrics import RunCollector
from bitwright.inference.packed.break_even import BreakEven, measure_break_even
from bitwright.inference.run_plan import apply
from bitwright.inference.run_report import RunReport, SiteRun
from bitwright.inference.static.calibration import calibrate_static
from bitwright.inference.static.drift import DriftLimits, StaticCheck, check_static

__all__ = [
    "BreakEven",
    "Chosen",
    "Counters",
    "DriftLimits",
    "FallbackSettings",
    "Generated",
    "Overflows",
    "RunCollector",
    "RunCounters",
    "RunReport",
    "Sampling",
    "SiteRule",
    "SiteRun",
    "StaticCheck",
    "ValueRule",
    "apply",
    "apply_to_program",
    "calibrate_static",
    "check_static",
    "codes_of",
    "emulate",
    "emulate_plan",
    "emulate_values",
    "generate",
    "input_tensors_of",
    "measure_break_even",
    "rule_of",
    "site_rules",
    "tensors_of",
    "value_rule",
    "value_rules",
    "value_tensors_of",
]
