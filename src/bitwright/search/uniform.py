"""The plan against one scheme everywhere: what choosing site by site has gained, measured.

A uniform plan gives every group of sites that is in question the same scheme, each site with the rounding that predicts
least. The rival is the uniform plan of equal weights or just larger; of several within a percent of its size the one
that predicts the least KL. Where it is visibly larger, or there is none, the one just smaller is a second rival, so
that the plan stands between two. All run on the same few sequences of the repair text, and each verdict follows from
the interval of the paired difference: a gain within the noise is not claimed.

The plan was mended on the repair text and its rivals were not, which favours the plan by less than the intervals are
wide (mending chooses among a handful of plans).

Predictions can be wrong, above all from little text: where a rival that keeps every limit and costs no more is measured
to be better, it is the plan.
"""

from __future__ import annotations

from dataclasses import replace

from bitwright.inference import Counters
from bitwright.plan import Budget, UniformComparison, verdict_of
from bitwright.search.candidate import Candidate
from bitwright.search.compare_plans import kl_difference
from bitwright.search.limits import largest_sums, objective_quantity
from bitwright.search.measure import Meter
from bitwright.search.mend import Mended
from bitwright.search.overflow_risk import measured_risk
from bitwright.search.problem import Problem
from bitwright.search.progress import Progress
from bitwright.search.solve import Solution

#: Sequences of the repair text that both are run on.
NUM_SEQUENCES = 16
#: Uniform plans whose sizes differ by less are of one size.
_SAME_SIZE = 1.01


def uniform_solutions(problem: Problem) -> dict[str, Solution]:
    """Scheme → the solution that gives it to every group, for the schemes that every group can have."""
    found: dict[str, Solution] = {}
    weight_groups = [group for group in problem.groups if group.sites[0].kind == "weight"]
    schemes = dict.fromkeys(
        choice.scheme for group in weight_groups for row in group.choices.values() for choice in row
    )
    for scheme in schemes:
        options = []
        for group in problem.groups:
            if group.sites[0].kind != "weight":
                # caches and activations are no part of the question: as good as they can be
                options.append(min(group.options, key=lambda option: option.kl))
                continue
            own = [o for o in group.options if all(choice.scheme == scheme for choice in group.choices[o.key])]
            if not own:
                break
            options.append(min(own, key=lambda option: option.kl))
        else:
            found[scheme] = Solution(options=tuple(options))
    return found


def rivals_of(problem: Problem, num_bytes: int) -> tuple[str, ...]:
    """Schemes whose uniform plans are the fair rivals of a plan of so many bytes: at most two."""
    solutions = uniform_solutions(problem)
    sizes = {s: problem.prices.model_bytes(problem.assignment(found)) for s, found in solutions.items()}

    def best(schemes: list[str]) -> list[str]:
        return [min(schemes, key=lambda scheme: (solutions[scheme].kl, scheme))] if schemes else []

    larger = min((size for size in sizes.values() if size >= num_bytes), default=None)
    smaller = max((size for size in sizes.values() if size < num_bytes), default=None)
    rivals = [] if larger is None else best([s for s, n in sizes.items() if larger <= n <= larger * _SAME_SIZE])
    if smaller is not None and (larger is None or larger > num_bytes * _SAME_SIZE):
        rivals += best([s for s, n in sizes.items() if smaller / _SAME_SIZE <= n <= smaller])
    return tuple(rivals)


def compare_with_uniform(mended: Mended, meter: Meter, seed: int, progress: Progress) -> tuple[UniformComparison, ...]:
    """Measure the uniform rivals of a plan; nothing where there is none, or where the plan is uniform itself."""
    problem, prices = mended.problem, mended.problem.prices
    count = min(NUM_SEQUENCES, meter.reference.text.num_sequences)
    own_kl, scored = mended.effects.kl[:count], mended.effects.num_scored[:count]
    found = []
    for scheme in rivals_of(problem, prices.model_bytes(mended.assignment)):
        rival = _rival(mended, scheme)
        if rival == mended.assignment:
            return ()
        with progress.stage(f"measure {scheme} everywhere", count) as stage:
            effects = meter.effects(rival, count, stage)
        difference = kl_difference(effects, mended.effects, seed).interval
        found.append(
            UniformComparison(
                scheme=scheme,
                effective_bits=prices.effective_bits(rival),
                weight_bytes=prices.model_bytes(rival),
                uniform_kl=effects.mean_kl,
                plan_kl=float(own_kl.sum() / scored.sum()),
                difference=difference,
                sequences=count,
                verdict=verdict_of(difference),
            )
        )
    return tuple(found)


def why_no_rival(mended: Mended, compared: tuple[UniformComparison, ...]) -> tuple[str, ...]:
    """Why a plan is held against no uniform one, as a note; none where it is, or where no weights are in question."""
    problem = mended.problem
    groups = [group for group in problem.groups if group.sites[0].kind == "weight"]
    if compared or not groups:
        return ()
    if uniform_solutions(problem):
        return ("the plan has one scheme for all weights in question: there is no uniform plan to hold it against",)
    lacking: dict[str, list[str]] = {}
    for scheme in dict.fromkeys(c.scheme for group in groups for row in group.choices.values() for c in row):
        without = (g for g in groups if not any(all(c.scheme == scheme for c in row) for row in g.choices.values()))
        lacking[scheme] = [site.name for group in without for site in group.sites]
    nearest = min(lacking, key=lambda scheme: len(lacking[scheme]))
    where, total = lacking[nearest], sum(len(group.sites) for group in groups)
    return (
        f"the plan is held against no uniform one, for no scheme is possible at every site in question: {nearest}, the "
        f"nearest, is not at {len(where)} of {total}, such as {where[0]}",
    )


def prefer_uniform(
    mended: Mended,
    compared: tuple[UniformComparison, ...],
    meter: Meter,
    *,
    budget: Budget,
    objective: str,
    seed: int,
    progress: Progress,
) -> Mended:
    """A rival in the place of a plan that is measured to be worse, on all of the repair text; else the plan.

    The rival keeps every limit that is no quality, and is no larger in what is made small.
    """
    problem, prices = mended.problem, mended.problem.prices
    limits, cost = largest_sums(budget, prices), objective_quantity(objective, prices)
    own = problem.totals(mended.assignment)
    for comparison in sorted(compared, key=lambda c: c.uniform_kl):
        rival = _rival(mended, comparison.scheme)
        amounts = problem.totals(rival)
        fits = all(amounts[quantity] <= limit for quantity, limit in limits.items())
        if comparison.verdict != "worse" or not fits or amounts.get(cost, 0) > own.get(cost, 0):
            continue
        counters: Counters | None = None if budget.max_overflow_risk is None else {}
        with progress.stage("measure on the repair text", meter.reference.text.num_sequences) as stage:
            effects = meter.effects(rival, None, stage, counters)
        if counters is not None and measured_risk(prices, rival, counters) > limits["overflow"]:
            continue
        if verdict_of(kl_difference(mended.effects, effects, seed).interval) == "better":
            note = (
                f"{comparison.scheme} everywhere keeps the limits and came to a KL of {effects.mean_kl:.4g} on the "
                f"repair text, the plan that was predicted to be the best to {mended.effects.mean_kl:.4g}: taken"
            )
            return replace(mended, assignment=rival, effects=effects, repairs=(), notes=(*mended.notes, note))
    return mended


def _rival(mended: Mended, scheme: str) -> dict[str, Candidate]:
    """One scheme for all weights; values stay as the plan has them: what is compared is the allocation of weights."""
    uniform = mended.problem.assignment(uniform_solutions(mended.problem)[scheme])
    return {**mended.assignment, **{site.name: uniform[site.name] for site in mended.problem.prices.sites}}
