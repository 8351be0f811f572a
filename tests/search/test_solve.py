"""The solver against enumeration of every assignment, and the laws of a front."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.search.solve import Option, Solution, front, solve, undominated

EXAMPLES = settings(max_examples=60, deadline=None)


#: Whole numbers, whole numbers that some options lack, and floats.
QUANTITIES = ("bytes", "decoder_bytes", "seconds")


@st.composite
def groups_of_options(draw: st.DrawFn, max_groups: int = 4) -> list[list[Option]]:
    """1–4 groups of 1–5 options; KLs and seconds over six decades, zero and equal ones among them."""
    floats = st.one_of(st.sampled_from([0.0, 0.01, 0.02]), st.floats(-5, 1).map(lambda e: 10.0**e))
    groups = []
    for _ in range(draw(st.integers(1, max_groups))):
        counts = draw(st.booleans())
        options = draw(st.lists(st.tuples(floats, st.integers(1, 60), floats), min_size=1, max_size=5))
        groups.append(
            [
                Option(
                    key=f"o{i}",
                    kl=kl,
                    amounts={"bytes": 8 * n, "seconds": seconds, **({"decoder_bytes": 8 * n} if counts else {})},
                )
                for i, (kl, n, seconds) in enumerate(options)
            ]
        )
    return groups


def every_assignment(groups: list[list[Option]]) -> list[Solution]:
    return [Solution(options=options) for options in itertools.product(*groups)]


def keeps(solution: Solution, limits: dict[str, float]) -> bool:
    return all(solution.amount(quantity) <= limit * (1 + 1e-9) for quantity, limit in limits.items())


@given(groups_of_options(), st.data())
@EXAMPLES
def test_equals_the_best_of_all_assignments(groups: list[list[Option]], data: st.DataObject) -> None:
    """Any objective, any subset of the limits, each at the value of some assignment or between two."""
    everything = every_assignment(groups)
    anchor = data.draw(st.sampled_from(everything))
    factor = st.sampled_from([0.7, 1.0, 1.0, 1.3])
    possible = {quantity: anchor.amount(quantity) * data.draw(factor) for quantity in ("kl", *QUANTITIES)}
    limits = {name: value for name, value in possible.items() if data.draw(st.booleans())}
    objective = data.draw(st.sampled_from(["kl", *QUANTITIES]))
    allowed = [solution for solution in everything if keeps(solution, limits)]
    found = solve(groups, minimize=objective, limits=limits)
    if not allowed:
        assert found is None
        return
    assert found is not None and keeps(found, limits)
    least = min(solution.amount(objective) for solution in allowed)
    assert found.amount(objective) == pytest.approx(least, rel=1e-6, abs=1e-12)
    if objective in ("bytes", "decoder_bytes"):
        assert found.amount(objective) == least
        best = min(solution.kl for solution in allowed if solution.amount(objective) == least)
        assert found.kl == pytest.approx(best, rel=1e-6, abs=1e-12)


@given(groups_of_options(), st.integers(8, 2000), st.integers(0, 500))
@EXAMPLES
def test_more_budget_is_never_worse(groups: list[list[Option]], num_bytes: int, more: int) -> None:
    tight = solve(groups, minimize="kl", limits={"bytes": num_bytes})
    loose = solve(groups, minimize="kl", limits={"bytes": num_bytes + more})
    if tight is not None:
        assert loose is not None
        assert loose.kl <= tight.kl * (1 + 1e-9)


@given(groups_of_options(), st.integers(2, 8), st.sampled_from(["bytes", "seconds"]))
@EXAMPLES
def test_no_point_of_the_front_is_dominated(groups: list[list[Option]], num_points: int, quantity: str) -> None:
    points = front(groups, num_points, quantity)
    assert 1 <= len(points) <= num_points
    for before, after in itertools.pairwise(points):
        assert before.amount(quantity) < after.amount(quantity)
        assert before.kl > after.kl
    for point in points:
        for other in every_assignment(groups):
            at_most = other.amount(quantity) <= point.amount(quantity)
            assert not (at_most and other.kl < point.kl * (1 - 1e-6) - 1e-12)


@given(groups_of_options(max_groups=1), st.permutations(["kl", *QUANTITIES]), st.integers(1, 4))
@EXAMPLES
def test_undominated_options_are_those_that_nothing_beats(
    groups: list[list[Option]], order: list[str], count: int
) -> None:
    (options,) = groups
    quantities = order[:count]
    kept = undominated(options, quantities)

    def beats(left: Option, right: Option) -> bool:
        return all(left.amount(q) <= right.amount(q) for q in quantities)

    assert [k.amount(quantities[0]) for k in kept] == sorted(k.amount(quantities[0]) for k in kept)
    for option in options:
        assert any(beats(k, option) for k in kept)
    for left, right in itertools.permutations(kept, 2):
        assert not beats(left, right)


def two_sizes(num_bytes: int) -> list[Option]:
    return [
        Option(key="s", kl=0.5, amounts={"bytes": num_bytes}),
        Option(key="l", kl=0.1, amounts={"bytes": 2 * num_bytes}),
    ]


def test_a_size_limit_is_exact_to_the_byte() -> None:
    """Sums of 10⁸ bytes: one byte below the smallest assignment there is nothing, at it there is one."""
    sizes = [7_077_889, 3_538_945, 1_769_473, 28_311_553]
    groups = [two_sizes(n) for n in sizes * 3]
    smallest = sum(sizes) * 3
    assert solve(groups, minimize="kl", limits={"bytes": smallest - 1}) is None
    exact = solve(groups, minimize="kl", limits={"bytes": smallest})
    assert exact is not None and exact.amount("bytes") == smallest
    upgraded = solve(groups, minimize="kl", limits={"bytes": smallest + min(sizes) - 1})
    assert upgraded is not None and upgraded.amount("bytes") == smallest
    upgraded = solve(groups, minimize="kl", limits={"bytes": smallest + min(sizes)})
    assert upgraded is not None and upgraded.amount("bytes") == smallest + min(sizes)


def test_one_hopeless_option_does_not_hide_the_others() -> None:
    """An overflowing format predicted at 10⁹ nats; the optimum among the rest differs in the sixth decimal."""
    groups = [
        [
            Option(key="overflows", kl=1e9, amounts={"bytes": 10}),
            Option(key="poor", kl=2e-5 + i * 1e-6, amounts={"bytes": 20}),
            Option(key="good", kl=1e-6, amounts={"bytes": 40}),
        ]
        for i in range(6)
    ]
    found = solve(groups, minimize="kl", limits={"bytes": 6 * 20 + 3 * 20})
    assert found is not None
    assert [option.key for option in found.options] == ["poor"] * 3 + ["good"] * 3


def test_what_is_small_in_one_quantity_can_be_right_for_another() -> None:
    """Three options, each the only one that keeps one of the limits: none of them is pruned away."""
    options = [
        Option(key="small", kl=0.3, amounts={"bytes": 1, "seconds": 3.0}),
        Option(key="fast", kl=0.3, amounts={"bytes": 3, "seconds": 1.0}),
        Option(key="exact", kl=0.0, amounts={"bytes": 9, "seconds": 9.0}),
    ]
    for limits, key in (({"bytes": 1}, "small"), ({"seconds": 1.0}, "fast"), ({}, "exact")):
        found = solve([options], minimize="kl", limits=limits)
        assert found is not None and found.options[0].key == key
    assert solve([options], minimize="kl", limits={"bytes": 1, "seconds": 1.0}) is None


def test_limits_below_zero_and_empty_problems() -> None:
    option = Option(key="a", kl=0.0, amounts={"bytes": 8})
    assert solve([[option]], minimize="kl", limits={"decoder_bytes": -1.0}) is None
    assert solve([[option]], minimize="kl", limits={"decoder_bytes": 0.0}) is not None
    assert solve([], minimize="kl") == Solution(options=())
    assert solve([], minimize="bytes", limits={"bytes": -1.0}) is None


def test_the_solver_prints_nothing() -> None:
    """The plan is all that `--json` may print; HiGHS's banner comes from C, where no Python redirection sees it."""
    program = (
        "from bitwright.search.solve import Option, solve\n"
        "options = [Option(key='a', kl=1.0, amounts={'n': 1}), Option(key='b', kl=0.3, amounts={'n': 2})]\n"
        "assert solve([options] * 5, minimize='kl', limits={'n': 8}) is not None\n"
        "assert solve([options] * 5, minimize='n', limits={'kl': 2.0}) is not None\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout == "" and finished.stderr == ""
