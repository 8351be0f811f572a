"""Bytes that the busiest rank puts on the links of each level, by collective and algorithm.

S is the whole buffer as nccl-tests counts it: the vector of an all-reduce, the gathered output of an all-gather, the
full input of a reduce-scatter or all-to-all. n ranks; at a level k units, of g ranks each:

    ring all-reduce                  2(n−1)/n · S/g      one crossing of each unit's border, shared by the g ranks
    ring all-gather, reduce-scatter   (n−1)/n · S/g
    tree all-reduce                  2·S/g, at k = 2 S/g up or down to two children; the busiest node, not the mean
    NVLS, multimem all-reduce        (1 + 1/n)·S         the switch adds and copies; one node only
    NVLS in nodes, tree between      (1 + 1/k)·S inside, as the tree above
    SHARP all-reduce                 S/g                 switches between nodes add, and NVLS inside
    hierarchical all-reduce          2(k−1)/k · S/g      rings inside nodes, around rings between them; two levels only
    one-shot, two-shot all-reduce    (n−1)·S, 2(n−1)/n·S every rank reads all peers; one node only
    pairwise all-to-all              (N−g)/n · S         N ranks in one unit of the level above
    broadcast by a ring, P2P         S/g, S

Sources: Thakur, Rabenseifner and Gropp 2005 (ring, pairwise); Sanders, Speck and Träff 2009 (double trees: the busiest
rank sends 2S although the mean is 2(n−1)/n·S); NVIDIA/nccl src/graph/tuning.cc (what NCCL counts). Schedules, which a
test can run, are in `collectives`; these forms also cover what a switch does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bitwright.comms.closed_forms import CLOSED_FORMS
from bitwright.comms.schedule import Layout

#: Collectives, as nccl-tests names them, and the factor f of bus bandwidth: busbw = f · S/t.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a level stands in a group."""

    #: Ranks of the group.
    n: int
    #: Units that the level joins.
    k: int
    #: Ranks below each unit.
    g: int
    #: The level is the innermost one that the group spans.
    innermost: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WireForm:
    """One collective by one algorithm."""

    op: str
    algorithm: str
    #: Place → bytes on the level's links of the busiest rank, per byte of the buffer.
    per_byte: Callable[[Place], float]
    #: Steps one after the other, for latency: "ring" (n − 1 each phase), "tree" (2 log₂ k), "direct" (1).
    steps: str
    #: Rounds through all ranks: an all-reduce has two.
    phases: int = 1
    #: Ranks → messages one after the other, where "direct" ones are more than the phases.
    rounds: Callable[[int], int] | None = None
    #: Only where one level joins all ranks.
    one_level: bool = False
    #: Only where a level joins units of several ranks.
    several_levels: bool = False
    #: Place → steps at the level, where levels work one after the other rather than at once, and there are two of them.
    sequential_steps: Callable[[Place], int] | None = None
    #: A library of collectives may choose it; kernels of serving engines have to be asked for.
    is_chosen: bool = True
    #: Needs a switch that adds: at the "innermost" level, or at "all" of them; "" needs none.
    switch: str = ""


def _tree(place: Place) -> float:
    return (2.0 if place.k > 2 else 1.0) / place.g


def _nvls(place: Place) -> float:
    return 1 + 1 / place.k


def _rings(place: Place) -> float:
    return 2 * (place.k - 1) / place.k / place.g


def _all_to_all(place: Place) -> float:
    return (place.k - 1) * place.g / place.n


_NATIVE: tuple[WireForm, ...] = (
    WireForm(op="all_reduce", algorithm="ring", per_byte=lambda p: 2 * (p.n - 1) / p.n / p.g, steps="ring", phases=2),
    WireForm(op="all_reduce", algorithm="tree", per_byte=_tree, steps="tree", phases=2),
    WireForm(
        op="all_reduce", algorithm="nvls", per_byte=_nvls, steps="tree", phases=2, one_level=True, switch="innermost"
    ),
    WireForm(
        op="all_reduce",
        algorithm="nvls_tree",
        per_byte=lambda p: _nvls(p) if p.innermost else _tree(p),
        steps="tree",
        phases=2,
        several_levels=True,
        switch="innermost",
    ),
    WireForm(
        op="all_reduce",
        algorithm="sharp",
        per_byte=lambda p: _nvls(p) if p.innermost else 1 / p.g,
        steps="tree",
        phases=2,
        several_levels=True,
        switch="all",
    ),
    WireForm(
        op="all_reduce",
        algorithm="multimem",
        per_byte=_nvls,
        steps="direct",
        one_level=True,
        is_chosen=False,
        switch="innermost",
    ),
    WireForm(
        op="all_reduce",
        algorithm="one_shot",
        per_byte=lambda p: p.n - 1,
        steps="direct",
        one_level=True,
        is_chosen=False,
    ),
    WireForm(
        op="all_reduce",
        algorithm="two_shot",
        per_byte=lambda p: 2 * (p.n - 1) / p.n,
        steps="direct",
        phases=2,
        one_level=True,
        is_chosen=False,
    ),
    WireForm(
        op="all_reduce",
        algorithm="hierarchical",
        per_byte=_rings,
        steps="ring",
        several_levels=True,
        is_chosen=False,
        sequential_steps=lambda p: 2 * (p.k - 1),
    ),
    WireForm(op="all_gather", algorithm="ring", per_byte=lambda p: (p.n - 1) / p.n / p.g, steps="ring"),
    WireForm(op="reduce_scatter", algorithm="ring", per_byte=lambda p: (p.n - 1) / p.n / p.g, steps="ring"),
    WireForm(op="all_to_all", algorithm="pairwise", per_byte=_all_to_all, steps="direct"),
    WireForm(op="broadcast", algorithm="ring", per_byte=lambda p: 1 / p.g, steps="ring"),
    WireForm(op="send_recv", algorithm="direct", per_byte=lambda p: 1.0, steps="direct"),
)


def _of_schedule(op: str, algorithm: str) -> WireForm:
    """A schedule that libraries do not choose, where one level joins all ranks."""
    form = CLOSED_FORMS[op, algorithm]

    def layout(n: int) -> Layout:
        return Layout(ranks_per_node=n, num_segments=1)

    return WireForm(
        op=op,
        algorithm=algorithm,
        per_byte=lambda p: float(form.busiest(p.n, layout(p.n))),
        steps="direct",
        rounds=lambda n: form.num_steps(n, layout(n)),
        one_level=True,
        is_chosen=False,
    )


#: What a switch or a library does, and the schedules beside it.
WIRE_FORMS: tuple[WireForm, ...] = (
    *_NATIVE,
    *(
        _of_schedule(op, algorithm)
        for op, algorithm in CLOSED_FORMS
        if (op, algorithm) not in {(form.op, form.algorithm) for form in _NATIVE}
    ),
)
