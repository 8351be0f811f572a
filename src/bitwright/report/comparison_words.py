"""What a measured difference between plans says, in sentences that follow from its interval and from nothing else."""

from __future__ import annotations

from bitwright.plan import Interval, PlanComparison, UniformComparison, Verdict
from bitwright.report.units import spell_bytes, spell_interval, spell_number

#: Verdict on a plan against a uniform one → what may be said of it.
_AGAINST_UNIFORM: dict[Verdict, str] = {
    "better": "the plan is better beyond the noise",
    "within the noise": "no gain is claimed: the difference is within the noise",
    "worse": "the plan is worse beyond the noise",
}


def say_uniform(plan_bytes: int, found: UniformComparison) -> str:
    """A plan of so many bytes against one scheme everywhere."""
    return (
        f"{found.scheme} everywhere ({found.effective_bits:.2f} effective bits, "
        f"{_relative_size(found.weight_bytes, plan_bytes)}) has KL {spell_number(found.uniform_kl)}, the plan "
        f"{spell_number(found.plan_kl)} on the same {found.sequences} sequences, a difference of "
        f"{spell_signed(found.difference)}: {_AGAINST_UNIFORM[found.verdict]}"
        f"{_size_clause(plan_bytes, found.weight_bytes)}"
    )


def _size_clause(plan_bytes: int, uniform_bytes: int) -> str:
    """What sets the verdict right where the sizes differ visibly."""
    share = plan_bytes / max(uniform_bytes, 1) - 1
    return "" if abs(share) < 0.01 else f", at {100 * abs(share):.2g} % {'fewer' if share < 0 else 'more'} bytes"


def say_comparison(found: PlanComparison) -> str:
    """The verdict on the second plan."""
    words: dict[Verdict, str] = {
        "better": "the second plan is better beyond the noise",
        "within the noise": "the difference in quality is within the noise",
        "worse": "the second plan is worse beyond the noise",
    }
    return f"{words[found.verdict]}, and {_relative_size(found.second_bytes, found.first_bytes)}"


def spell_signed(interval: Interval) -> str:
    """``"−0.0171 [−0.0184, −0.0158]"``."""
    return spell_interval(interval).replace("-", "−") if interval.mean < 0 else f"+{spell_interval(interval)}"


def _relative_size(num_bytes: int, than: int) -> str:
    if num_bytes == than:
        return "of equal size"
    share = abs(num_bytes / max(than, 1) - 1)
    percent = "less than 0.1 %" if share < 5e-4 else f"{100 * share:.2g} %"
    return f"{percent} {'larger' if num_bytes > than else 'smaller'}, {spell_bytes(num_bytes)}"
