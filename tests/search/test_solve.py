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


@st.composite
def groups_of_options(draw: st.DrawFn, max_groups: int = 4) -> list[list[Option]]:
    """1–4 groups of 1–5 options; KLs over six decades, zero and equal ones among them."""
    kls = st.one_of(st.sampled_from([0.0, 0.01, 0.02]), st.floats(-5, 1).map(lambda e: 10.0**e))
    groups = []
    for _ in range(draw(st.integers(1, max_groups))):
        counts = draw(st.booleans())
        options = draw(st.lists(st.tuples(kls, st.integers(1, 60)), min_size=1, max_size=5))
        groups.append(
            [
                Option(key=f"o{i}", kl=kl, num_bytes=8 * num_bytes, counts_as_decoder=counts)
                for i, (kl, num_bytes) in enumerate(options)
            ]
        )
    return groups


def every_assignment(groups: list[list[Option]]) -> list[Solution]:
    return [Solution(options=options) for options in itertools.product(*groups)]


def keeps(solution: Solution, limits: dict[str, float]) -> bool:
    values = {"max_kl": solution.kl, "max_bytes": solution.num_bytes, "max_decoder_bytes": solution.decoder_bytes}
    return all(values[name] <= limit * (1 + 1e-9) for name, limit in limits.items())


@given(groups_of_options(), st.data())
@EXAMPLES
def test_equals_the_best_of_all_assignments(groups: list[list[Option]], data: st.DataObject) -> None:
    """Either objective, any subset of the three limits, each at the value of some assignment or between two."""
    everything = every_assignment(groups)
    anchor = data.draw(st.sampled_from(everything))
    factor = st.sampled_from([0.7, 1.0, 1.0, 1.3])
    possible = {
        "max_kl": anchor.kl * data.draw(factor),
        "max_bytes": anchor.num_bytes * data.draw(factor),
        "max_decoder_bytes": anchor.decoder_bytes * data.draw(factor),
    }
    limits = {name: value for name, value in possible.items() if data.draw(st.booleans())}
    allowed = [solution for solution in everything if keeps(solution, limits)]
    least_bytes = solve(groups, minimize="bytes", **limits)
    least_kl = solve(groups, minimize="kl", **limits)
    if not allowed:
        assert least_bytes is None and least_kl is None
        return
    assert least_bytes is not None and least_kl is not None
    assert keeps(least_bytes, limits) and keeps(least_kl, limits)
    smallest = min(solution.num_bytes for solution in allowed)
    assert least_bytes.num_bytes == smallest
    best_of_smallest = min(solution.kl for solution in allowed if solution.num_bytes == smallest)
    assert least_bytes.kl == pytest.approx(best_of_smallest, rel=1e-6, abs=1e-12)
    assert least_kl.kl == pytest.approx(min(solution.kl for solution in allowed), rel=1e-6, abs=1e-12)


@given(groups_of_options(), st.integers(8, 2000), st.integers(0, 500))
@EXAMPLES
def test_more_budget_is_never_worse(groups: list[list[Option]], num_bytes: int, more: int) -> None:
    tight = solve(groups, minimize="kl", max_bytes=num_bytes)
    loose = solve(groups, minimize="kl", max_bytes=num_bytes + more)
    if tight is not None:
        assert loose is not None
        assert loose.kl <= tight.kl * (1 + 1e-9)


@given(groups_of_options(), st.integers(2, 8))
@EXAMPLES
def test_no_point_of_the_front_is_dominated(groups: list[list[Option]], num_points: int) -> None:
    points = front(groups, num_points)
    assert 1 <= len(points) <= num_points
    for before, after in itertools.pairwise(points):
        assert before.num_bytes < after.num_bytes
        assert before.kl > after.kl
    for point in points:
        for other in every_assignment(groups):
            assert not (other.num_bytes <= point.num_bytes and other.kl < point.kl * (1 - 1e-6) - 1e-12)
            assert not (other.num_bytes < point.num_bytes and other.kl <= point.kl * (1 - 1e-6))


@given(groups_of_options(max_groups=1))
@EXAMPLES
def test_undominated_options_are_those_that_nothing_beats(groups: list[list[Option]]) -> None:
    (options,) = groups
    kept = undominated(options)
    for before, after in itertools.pairwise(kept):
        assert before.num_bytes < after.num_bytes and before.kl > after.kl
    for option in options:
        assert any(k.num_bytes <= option.num_bytes and k.kl <= option.kl for k in kept)


def test_a_size_limit_is_exact_to_the_byte() -> None:
    """Sums of 10⁸ bytes: one byte below the smallest assignment there is nothing, at it there is one."""
    sizes = [7_077_889, 3_538_945, 1_769_473, 28_311_553]
    groups = [[Option(key="s", kl=0.5, num_bytes=n), Option(key="l", kl=0.1, num_bytes=2 * n)] for n in sizes * 3]
    smallest = sum(sizes) * 3
    assert solve(groups, minimize="kl", max_bytes=smallest - 1) is None
    exact = solve(groups, minimize="kl", max_bytes=smallest)
    assert exact is not None and exact.num_bytes == smallest
    upgraded = solve(groups, minimize="kl", max_bytes=smallest + min(sizes) - 1)
    assert upgraded is not None and upgraded.num_bytes == smallest
    upgraded = solve(groups, minimize="kl", max_bytes=smallest + min(sizes))
    assert upgraded is not None and upgraded.num_bytes == smallest + min(sizes)


def test_one_hopeless_option_does_not_hide_the_others() -> None:
    """An overflowing format predicted at 10⁹ nats; the optimum among the rest differs in the sixth decimal."""
    groups = [
        [
            Option(key="overflows", kl=1e9, num_bytes=10),
            Option(key="poor", kl=2e-5 + i * 1e-6, num_bytes=20),
            Option(key="good", kl=1e-6, num_bytes=40),
        ]
        for i in range(6)
    ]
    found = solve(groups, minimize="kl", max_bytes=6 * 20 + 3 * 20)
    assert found is not None
    assert [option.key for option in found.options] == ["poor"] * 3 + ["good"] * 3


def test_limits_below_zero_and_empty_problems() -> None:
    option = Option(key="a", kl=0.0, num_bytes=8, counts_as_decoder=False)
    assert solve([[option]], minimize="kl", max_decoder_bytes=-1.0) is None
    assert solve([[option]], minimize="kl", max_decoder_bytes=0.0) is not None
    assert solve([], minimize="kl") == Solution(options=())
    assert solve([], minimize="bytes", max_bytes=-1.0) is None


def test_the_solver_prints_nothing() -> None:
    """The plan is all that `--json` may print; HiGHS's banner comes from C, where no Python redirection sees it."""
    program = (
        "from bitwright.search.solve import Option, solve\n"
        "options = [Option(key='a', kl=1.0, num_bytes=1), Option(key='b', kl=0.3, num_bytes=2)]\n"
        "assert solve([options] * 5, minimize='kl', max_bytes=8) is not None\n"
        "assert solve([options] * 5, minimize='bytes', max_kl=2.0) is not None\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout == "" and finished.stderr == ""
