"""Which limit binds, what loosening it would buy, and how far a request is out of reach.

A limit *binds* if the optimum without it is better. What loosening it by a little would buy is the optimum under the
loosened limit, solved anew: exact, and with every other limit as it was. The usual shadow price (the dual of the linear
relaxation) is rejected: choices are whole, and the relaxation promises fractions of them.

A request is out of reach if no assignment is predicted to keep all limits. Then each limit is told apart: the best that
it could be alone, whatever the others say, and the best with all others kept. The best of a time alone is what the
fastest allowed choice of every site takes on this device, at the rates that times are predicted with (`floor.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from bitwright.plan import QUALITY_LIMITS, Budget, LimitStudy, Loosened
from bitwright.search.limits import is_lower, objective_quantity, quality_target, quality_value, quantity_of, value_of
from bitwright.search.problem import Problem
from bitwright.search.solve import KL, Solution

#: By how much a binding limit is loosened to see what it buys.
LOOSENED_BY = (0.01, 0.05)
#: Relative differences of optima below this are the solver's tolerance.
_TOLERANCE = 1e-6


def study_limits(
    problem: Problem, budget: Budget, objective: str, max_total_kl: float | None
) -> tuple[LimitStudy, ...]:
    """One study for every limit of the budget.

    Args:
        problem: as measurements corrected it.
        budget, objective: what was asked.
        max_total_kl: the mean KL that the solver was told to keep; None where quality is not limited.
    """
    base = problem.best(objective_quantity(objective, problem.prices), problem.limits(budget, max_total_kl))
    if base is None:
        return tuple(_unreachable(problem, budget, objective, max_total_kl))
    return tuple(_bound(problem, budget, objective, max_total_kl, base))


def _bound(
    problem: Problem, budget: Budget, objective: str, max_total_kl: float | None, base: Solution
) -> Iterator[LimitStudy]:
    quantity = objective_quantity(objective, problem.prices)
    before = _figure(problem, quantity, base)

    def optimum(changed: Budget, target: float | None) -> float:
        found = problem.best(quantity, problem.limits(changed, target))
        assert found is not None, "a looser problem has a solution where a tighter one has"
        return _figure(problem, quantity, found)

    for name, limit in budget.limits.items():
        without = budget.model_copy(update={name: None})
        free = optimum(without, _target(budget, without, max_total_kl))
        loosened = []
        binds = free < before * (1 - _TOLERANCE)
        for by in LOOSENED_BY if binds else ():
            changed = budget.model_copy(update={name: limit / (1 + by) if is_lower(name) else limit * (1 + by)})
            loosened.append(Loosened(by=by, value=optimum(changed, _target(budget, changed, max_total_kl))))
        yield LimitStudy(
            name=name,
            limit=limit,
            binds=binds,
            objective=quantity,
            before=before,
            loosened=tuple(loosened),
        )


def _unreachable(problem: Problem, budget: Budget, objective: str, max_total_kl: float | None) -> Iterator[LimitStudy]:
    for name, limit in budget.limits.items():
        quantity = KL if name in QUALITY_LIMITS else quantity_of(name)
        without = budget.model_copy(update={name: None})
        alone = problem.best(quantity, {})
        others = problem.limits(without, _target(budget, without, max_total_kl))
        given = problem.best(quantity, {other: most for other, most in others.items() if other != quantity})
        assert alone is not None
        yield LimitStudy(
            name=name,
            limit=limit,
            binds=False,
            objective=objective_quantity(objective, problem.prices),
            alone=_value(problem, name, alone),
            given_others=None if given is None else _value(problem, name, given),
        )


def _target(before: Budget, after: Budget, max_total_kl: float | None) -> float | None:
    """The KL to keep under a changed budget: changed in proportion to what the first aim would be."""
    first, then = quality_target(before), quality_target(after)
    if first is None or then is None or max_total_kl is None:
        return None
    return max_total_kl * then / first


def _figure(problem: Problem, quantity: str, solution: Solution) -> float:
    """A quantity of the whole model: KL as totals are predicted, all else with what is fixed."""
    if quantity == KL:
        return problem.correction.total(solution.kl)
    return solution.amount(quantity) + problem.fixed.get(quantity, 0)


def _value(problem: Problem, name: str, solution: Solution) -> float:
    """The figure of a limit at a solution."""
    if name in QUALITY_LIMITS:
        return quality_value(name, problem.correction.total(solution.kl))
    return value_of(name, _figure(problem, quantity_of(name), solution), problem.prices)
