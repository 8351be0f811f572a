"""Which limit binds and how far a request is out of reach, in sentences: the same in HTML and in the terminal."""

from __future__ import annotations

from bitwright.plan import Limit, LimitStudy, Plan
from bitwright.report.units import (
    is_lower_limit,
    spell_bytes,
    spell_limit_value,
    spell_number,
    spell_seconds,
)

#: Quantity that is made small → what it is called.
_OBJECTIVES = {
    "kl": "the predicted KL is",
    "weight_bytes": "the weights are",
    "device_bytes": "what has to fit on the device is",
    "decode_s": "the predicted time of a decode step is",
}


def say_limits(plan: Plan) -> tuple[str, ...]:
    """One sentence for every limit that binds or cannot be reached; one for all others together."""
    said = [sentence for study in plan.limit_studies if (sentence := _say(study, plan)) is not None]
    loose = [study.name for study in plan.limit_studies if study.before is not None and not study.binds]
    if loose and len(loose) < len(plan.limit_studies):
        said.append(f"{_list(loose)} {'does' if len(loose) == 1 else 'do'} not bind")
    return tuple(said)


def spell_quantity(quantity: str, amount: float) -> str:
    """An amount of what is made small, in its own unit."""
    if quantity.endswith("_bytes"):
        return spell_bytes(amount)
    return spell_seconds(amount) if quantity.endswith("_s") else spell_number(amount)


def say_bound(limit: Limit) -> str:
    """``"90.0 MiB"``, or ``"at least 100"`` of a lower limit."""
    bound = spell_limit_value(limit.name, limit.limit)
    return f"at least {bound}" if is_lower_limit(limit.name) else bound


def _say(study: LimitStudy, plan: Plan) -> str | None:
    if study.before is None:
        return _out_of_reach(study)
    if not study.binds:
        return None
    what = _OBJECTIVES.get(study.objective, f"{study.objective} is")
    bought = [
        f"{100 * step.by:g} % {_way(study.name)} {_gain(study, step.value)}"
        for step in study.loosened
        if step.value < study.before
    ]
    if not bought:
        most = max(step.by for step in study.loosened)
        return f"{study.name} binds, but {100 * most:g} % {_way(study.name)} would buy nothing: choices are whole"
    now = spell_quantity(study.objective, study.before)
    here = _in_plan(study.objective, plan)
    if here is not None and spell_quantity(study.objective, here) != now:
        now += f" at the optimum of the predictions, {spell_quantity(study.objective, here)} in the plan"
    return f"{study.name} binds: {what} {now}; {', '.join(bought)}"


def _in_plan(quantity: str, plan: Plan) -> float | None:
    """What is made small, as the plan has it after everything that measurements changed."""
    return {
        "kl": plan.summary.predicted_kl,
        "weight_bytes": plan.summary.weight_bytes,
        "device_bytes": None if plan.device_memory is None else plan.device_memory.total,
        "decode_s": None if plan.latency is None else plan.latency.decode_s_per_token,
    }.get(quantity)


def _way(name: str) -> str:
    return "less" if is_lower_limit(name) else "more"


def _gain(study: LimitStudy, value: float) -> str:
    """What a looser limit would make of the objective: KL anew, amounts by their difference."""
    assert study.before is not None
    if study.objective == "kl":
        return f"would make it {spell_number(value)}"
    return f"would save {spell_quantity(study.objective, study.before - value)}"


def _out_of_reach(study: LimitStudy) -> str | None:
    if study.alone is None:
        return None
    asked, alone = (spell_limit_value(study.name, value) for value in (study.limit, study.alone))
    bound = "at least" if is_lower_limit(study.name) else "at most"
    sentence = f"{study.name} of {bound} {asked}: the best alone is {alone}"
    if not _keeps(study, study.alone):
        sentence += f" ({_excess(study)}; no choice of the allowed schemes reaches it)"
    if study.given_others is None:
        return f"{sentence}; the other limits already contradict each other"
    return f"{sentence}, with all others kept {spell_limit_value(study.name, study.given_others)}"


def _keeps(study: LimitStudy, value: float) -> bool:
    return value >= study.limit if is_lower_limit(study.name) else value <= study.limit


def _excess(study: LimitStudy) -> str:
    assert study.alone is not None
    if study.limit == 0:
        return "over"
    share = abs(study.alone / study.limit - 1)
    return f"{100 * share:.3g} % {'short' if is_lower_limit(study.name) else 'over'}"


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
