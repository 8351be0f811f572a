"""Measure, compare with the limits, and mend: nothing is promised that was not seen on text it was not chosen on.

On the *repair* text, with the upper end of the measured interval as the figure that must keep the limit:

    far off (more than 10 %)   the prediction of totals takes on the measurement, and the problem is solved again
    a little over              sites are raised by measured blame: the likeliest culprits are raised one at a time, the
                               drop in KL is measured, and those with the largest drop per cost stay raised
    kept                       done; a plan that stays far below its limit is solved again once, towards it
    too many overflows         what was counted takes the place of what was expected, and the problem is solved again
                               (`overflow_risk.py`), before all else

Cost is what better quality is paid with: bytes, or seconds where time is made small. The *final* text is not touched
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bitwright.inference import Counters
from bitwright.plan import Budget, Repair
from bitwright.search.bootstrap import kl_estimate, ppl_ratio_estimate
from bitwright.search.candidate import Candidate
from bitwright.search.limits import cost_quantity
from bitwright.search.measure import Meter
from bitwright.search.output import Effects
from bitwright.search.overflow_risk import measured_risk, with_counts
from bitwright.search.price import Assignment
from bitwright.search.problem import Problem
from bitwright.search.progress import Progress
from bitwright.search.solve import KL, Option, Solution, undominated

#: How often an assignment is measured whole, at most.
MAX_ROUNDS = 5
#: Beyond this distance from its limit a plan is solved again rather than mended.
FAR = 0.10
#: A new solution aims this much below the limit.
MARGIN = 0.04
#: Largest factor by which a new solution may aim above the measured KL.
MAX_STEP = 8.0
#: Sites whose blame is measured in one round, and the sequences it is measured on.
NUM_SUSPECTS = 5
BLAME_SEQUENCES = 8


@dataclass(frozen=True, kw_only=True)
class Mended:
    """What stands after mending."""

    assignment: dict[str, Candidate]
    #: The problem with what was measured on the way.
    problem: Problem
    #: Effects of the assignment on the repair text.
    effects: Effects
    repairs: tuple[Repair, ...]
    notes: tuple[str, ...]
    #: The mean KL that the solver was told to keep; None where quality is not limited.
    max_total_kl: float | None = None
    #: Limits that no assignment is predicted to keep.
    unreachable: tuple[str, ...] = ()


def quality_figures(effects: Effects, budget: Budget, seed: int) -> dict[str, tuple[float, float, float]]:
    """Quality limit → (limit, measured mean, upper end of its 95 % interval)."""
    figures = {}
    if budget.max_kl is not None:
        kl = kl_estimate(effects, seed)
        figures["max_kl"] = (budget.max_kl, kl.mean, kl.high)
    if budget.max_ppl_increase is not None:
        ratio = ppl_ratio_estimate(effects, seed)
        figures["max_ppl_increase"] = (budget.max_ppl_increase, ratio.mean - 1, ratio.high - 1)
    return figures


def mend(
    problem: Problem,
    meter: Meter,
    *,
    budget: Budget,
    objective: str,
    max_total_kl: float | None,
    seed: int,
    progress: Progress,
) -> Mended:
    """Solve, measure on the meter's text, and change the solution until the quality limits are kept or cannot be.

    Args:
        problem: what can be chosen.
        meter: measures on the repair text.
        budget, objective: what has to be kept, and what is made small.
        max_total_kl: the mean KL that the first solution aims for, nats per token; None where quality is not limited.
        seed: of the resampling.
        progress: shows the stages.
    """
    with progress.stage("solve", 1) as stage:
        solution, unreachable = problem.solve(budget, objective, max_total_kl)
        stage.advance()
    num_sequences = meter.reference.text.num_sequences
    repairs: list[Repair] = []
    notes: list[str] = []
    tightened = False
    kept: tuple[Solution, Effects, list[Repair]] | None = None
    for round_number in range(MAX_ROUNDS):
        assignment = problem.assignment(solution)
        counters: Counters | None = None if budget.max_overflow_risk is None else {}
        with progress.stage("measure on the repair text", num_sequences) as stage:
            effects = meter.effects(assignment, None, stage, counters)
        repairs = [
            r if r.measured_kl_after is not None else r.model_copy(update={"measured_kl_after": effects.mean_kl})
            for r in repairs
        ]
        problem = _recalibrate(problem, assignment, effects.mean_kl)
        figures = quality_figures(effects, budget, seed)
        ratio = max((upper / limit for limit, _, upper in figures.values()), default=0.0)
        name = max(figures, key=lambda n: figures[n][2] / figures[n][0], default="")
        risk = 0.0 if counters is None else measured_risk(problem.prices, assignment, counters)
        overflows = counters is not None and risk > budget.limits["max_overflow_risk"]
        if ratio <= 1 and not overflows:
            kept = solution, effects, repairs
        last = round_number == MAX_ROUNDS - 1
        if counters is not None and overflows and not last:
            problem = with_counts(problem, assignment, counters)
            again, unreachable = _solve_calmer(problem, budget, objective, max_total_kl)
            if problem.assignment(again) != assignment:
                notes.append(
                    f"on the repair text {risk:.4g} values in a million overflowed against a limit of "
                    f"{budget.max_overflow_risk:g}: solved again, with what was counted"
                )
                solution, repairs = again, []
                continue
        near = ratio >= 1 - FAR or effects.mean_kl == 0
        if not figures or last or (ratio <= 1 and (near or tightened or objective == "kl")):
            break
        if ratio <= 1 or ratio > 1 + FAR:
            aim = _aim(effects.mean_kl, ratio)
            again, unreachable = problem.solve(budget, objective, aim)
            max_total_kl = aim
            if again == solution:
                break
            tightened = tightened or ratio <= 1
            notes.append(
                f"on the repair text {name} reached {figures[name][2]:.4g} (upper end of 95 %) against a limit of "
                f"{figures[name][0]:.4g}: {'solved again, towards it' if ratio <= 1 else 'solved again, to keep it'}"
            )
            solution, repairs = again, []
            continue
        raised, made = _raise_by_blame(problem, solution, meter, effects, ratio, (budget, objective), progress)
        if not made:
            break
        repairs = [*repairs, *made]
        solution = raised
    if (ratio > 1 or overflows) and kept is not None:
        solution, effects, repairs = kept
        notes.append("nothing smaller was found that keeps the limits on the repair text: an earlier plan stands")
    return Mended(
        assignment=problem.assignment(solution),
        problem=problem,
        effects=effects,
        repairs=tuple(repairs),
        notes=tuple(notes),
        max_total_kl=max_total_kl,
        unreachable=unreachable,
    )


def _solve_calmer(
    problem: Problem, budget: Budget, objective: str, max_total_kl: float | None
) -> tuple[Solution, tuple[str, ...]]:
    """A solution whose expected overflows lie a margin below their limit, or where there is none, within it."""
    limit = budget.limits["max_overflow_risk"]
    calmer = budget.model_copy(update={"max_overflow_risk": (1 - MARGIN) * limit})
    found, unreachable = problem.solve(calmer, objective, max_total_kl)
    return problem.solve(budget, objective, max_total_kl) if unreachable else (found, unreachable)


def _aim(mean_kl: float, ratio: float) -> float:
    """The mean KL at which the worst figure should lie a margin below its limit; log perplexity moves with KL.

    One step goes no further than MAX_STEP times the measured KL: perplexity can even fall, and then says nothing.
    """
    return mean_kl * (1 - MARGIN) / max(ratio, 1 / MAX_STEP)


def _recalibrate(problem: Problem, assignment: Assignment, measured: float) -> Problem:
    return replace(problem, correction=problem.correction.with_total(problem.site_sum(assignment), measured))


def _raise_by_blame(
    problem: Problem,
    solution: Solution,
    meter: Meter,
    effects: Effects,
    ratio: float,
    asked: tuple[Budget, str],
    progress: Progress,
) -> tuple[Solution, list[Repair]]:
    """Raise the groups with the largest measured drop of KL per cost until their drops make up the excess."""
    limits = problem.limits(asked[0], None)
    cost = cost_quantity(asked[1], asked[0], problem.prices)
    suspects = _suspects(problem, solution, limits, cost)
    count = min(BLAME_SEQUENCES, meter.reference.text.num_sequences)
    before = float(effects.kl[:count].sum() / effects.num_scored[:count].sum())
    blame: dict[int, float] = {}
    with progress.stage("measure blame", len(suspects) * count) as stage:
        for index, raised in suspects.items():
            blame[index] = before - meter.kl(problem.assignment(_raised(solution, index, raised)), count, stage)
    excess = before * (1 - (1 - MARGIN / 2) / ratio)
    made: list[Repair] = []
    dropped = 0.0
    for index in sorted(blame, key=lambda i: -blame[i] / _extra(solution.options[i], suspects[i], cost)):
        if dropped >= excess or blame[index] <= 0:
            break
        candidate = _raised(solution, index, suspects[index])
        if not _fits(candidate, limits):
            continue
        group = problem.groups[index]
        made.append(
            Repair(
                site=group.sites[0].tied_group or group.sites[0].name,
                from_scheme=solution.options[index].key,
                to_scheme=suspects[index].key,
                why=f"raising it alone lowered the measured KL by {blame[index]:.3g} nats",
                measured_kl_before=effects.mean_kl,
            )
        )
        solution = candidate
        dropped += blame[index]
    return solution, made


def _suspects(problem: Problem, solution: Solution, limits: Mapping[str, float], cost: str) -> dict[int, Option]:
    """Group index → next better option, for the groups that promise the largest drop per cost."""
    gains: dict[int, tuple[float, Option]] = {}
    for index, (group, option) in enumerate(zip(problem.groups, solution.options, strict=True)):
        ladder = undominated(group.options, (cost, KL))
        better = [o for o in ladder if o.amount(cost) > option.amount(cost) and o.kl < option.kl]
        if better:
            gains[index] = ((option.kl - better[0].kl) / _extra(option, better[0], cost), better[0])
    best = sorted(gains, key=lambda index: -gains[index][0])[:NUM_SUSPECTS]
    return {index: gains[index][1] for index in best if _fits(_raised(solution, index, gains[index][1]), limits)}


def _raised(solution: Solution, index: int, option: Option) -> Solution:
    options = list(solution.options)
    options[index] = option
    return Solution(options=tuple(options))


def _extra(option: Option, raised: Option, cost: str) -> float:
    return max(raised.amount(cost) - option.amount(cost), 1e-30)


def _fits(solution: Solution, limits: Mapping[str, float]) -> bool:
    return all(solution.amount(quantity) <= limit for quantity, limit in limits.items())
