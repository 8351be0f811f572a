"""What schedules have to come to: steps, and bytes sent per byte of the buffer, in closed form.

n ranks, k nodes of g ranks, m segments, S the whole buffer (nccl-tests' convention). `total` is over all ranks,
`busiest` of the rank that sends most; both are per S, exact where chunks are equal. p is the largest power of two ≤ n.

Sources stand in the files of `algorithms/`. The busiest rank of the double tree sends 2 S (n ≥ 4), although the mean is
2(n − 1)/n · S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from bitwright.comms.schedule import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedForm:
    """(ranks, layout) → steps and shares of S."""

    num_steps: Callable[[int, Layout], int]
    total: Callable[[int, Layout], Fraction]
    busiest: Callable[[int, Layout], Fraction]
    #: As people write them.
    spelled_steps: str
    spelled_busiest: str


def _log2_up(n: int) -> int:
    return (n - 1).bit_length()


def _even(share: Callable[[int, Layout], Fraction]) -> Callable[[int, Layout], Fraction]:
    return lambda n, layout: n * share(n, layout)


def _phase(n: int, layout: Layout) -> Fraction:
    return Fraction(n - 1, n)


def _two_phases(n: int, layout: Layout) -> Fraction:
    return 2 * Fraction(n - 1, n)


def _doubling_steps(n: int, layout: Layout) -> int:
    inside = n.bit_length() - 1
    return inside + (2 if n > 1 << inside else 0)


def _doubling_total(n: int, layout: Layout) -> Fraction:
    inside = n.bit_length() - 1
    return Fraction((1 << inside) * inside + 2 * (n - (1 << inside)))


def _doubling_busiest(n: int, layout: Layout) -> Fraction:
    inside = n.bit_length() - 1
    return Fraction(inside + (1 if n > 1 << inside else 0))


def _tree_busiest(n: int, layout: Layout) -> Fraction:
    return Fraction(1) if n == 2 else Fraction(3, 2) if n == 3 else Fraction(2)


def _hierarchical(n: int, layout: Layout) -> Fraction:
    g = layout.ranks_per_node
    k = n // g
    return 2 * Fraction(g - 1, g) + 2 * Fraction(k - 1, k) / g


def _one_phase(num_steps: Callable[[int, Layout], int], spelled_steps: str) -> ClosedForm:
    """Every rank sends all shards but its own, or all but one: a reduce-scatter, an all-gather, an all-to-all."""
    return ClosedForm(
        num_steps=num_steps,
        total=_even(_phase),
        busiest=_phase,
        spelled_steps=spelled_steps,
        spelled_busiest="(n − 1)/n · S",
    )


def _both_phases(num_steps: Callable[[int, Layout], int], spelled_steps: str) -> ClosedForm:
    """A reduce-scatter, then an all-gather."""
    return ClosedForm(
        num_steps=num_steps,
        total=_even(_two_phases),
        busiest=_two_phases,
        spelled_steps=spelled_steps,
        spelled_busiest="2(n − 1)/n · S",
    )


CLOSED_FORMS: dict[tuple[str, str], ClosedForm] = {
    ("all_reduce", "ring"): _both_phases(lambda n, layout: 2 * (n - 1), "2(n − 1)"),
    ("reduce_scatter", "ring"): _one_phase(lambda n, layout: n - 1, "n − 1"),
    ("all_gather", "ring"): _one_phase(lambda n, layout: n - 1, "n − 1"),
    ("broadcast", "ring"): ClosedForm(
        num_steps=lambda n, layout: n - 2 + layout.num_segments,
        total=lambda n, layout: Fraction(n - 1),
        busiest=lambda n, layout: Fraction(1),
        spelled_steps="n − 2 + m",
        spelled_busiest="S",
    ),
    ("all_reduce", "tree"): ClosedForm(
        num_steps=lambda n, layout: 2 * _log2_up(n) + layout.num_segments - 1,
        total=lambda n, layout: Fraction(2 * (n - 1)),
        busiest=_tree_busiest,
        spelled_steps="2⌈log2 n⌉ + m − 1",
        spelled_busiest="2 · S (n ≥ 4)",
    ),
    ("broadcast", "tree"): ClosedForm(
        num_steps=lambda n, layout: _log2_up(n - 1) + layout.num_segments,
        total=lambda n, layout: Fraction(n - 1),
        busiest=lambda n, layout: Fraction(1),
        spelled_steps="⌈log2 (n − 1)⌉ + m",
        spelled_busiest="S",
    ),
    ("all_reduce", "recursive_doubling"): ClosedForm(
        num_steps=_doubling_steps,
        total=_doubling_total,
        busiest=_doubling_busiest,
        spelled_steps="log2 p, + 2 where n > p",
        spelled_busiest="log2 p · S, + S where n > p",
    ),
    ("all_gather", "recursive_doubling"): _one_phase(lambda n, layout: _log2_up(n), "⌈log2 n⌉"),
    ("all_reduce", "halving_doubling"): _both_phases(lambda n, layout: 2 * _log2_up(n), "2⌈log2 n⌉"),
    ("reduce_scatter", "halving_doubling"): _one_phase(lambda n, layout: _log2_up(n), "⌈log2 n⌉"),
    ("all_reduce", "one_shot"): ClosedForm(
        num_steps=lambda n, layout: 1,
        total=lambda n, layout: Fraction(n * (n - 1)),
        busiest=lambda n, layout: Fraction(n - 1),
        spelled_steps="1",
        spelled_busiest="(n − 1) · S",
    ),
    ("all_gather", "one_shot"): _one_phase(lambda n, layout: 1, "1"),
    ("broadcast", "one_shot"): ClosedForm(
        num_steps=lambda n, layout: 1,
        total=lambda n, layout: Fraction(n - 1),
        busiest=lambda n, layout: Fraction(n - 1),
        spelled_steps="1",
        spelled_busiest="(n − 1) · S",
    ),
    ("all_reduce", "two_shot"): _both_phases(lambda n, layout: 2, "2"),
    ("reduce_scatter", "two_shot"): _one_phase(lambda n, layout: 1, "1"),
    ("all_to_all", "pairwise"): _one_phase(lambda n, layout: n - 1, "n − 1"),
    ("send_recv", "direct"): ClosedForm(
        num_steps=lambda n, layout: 1,
        total=lambda n, layout: Fraction(1),
        busiest=lambda n, layout: Fraction(1),
        spelled_steps="1",
        spelled_busiest="S",
    ),
    ("all_reduce", "hierarchical"): ClosedForm(
        num_steps=lambda n, layout: 2 * (layout.ranks_per_node - 1) + 2 * (n // layout.ranks_per_node - 1),
        total=_even(_hierarchical),
        busiest=_hierarchical,
        spelled_steps="2(g − 1) + 2(k − 1)",
        spelled_busiest="2(g − 1)/g · S + 2(k − 1)/k · S/g",
    ),
}
