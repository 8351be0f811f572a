"""Every layout that a planner tries.

    gpus = dp · tp · cp · pp      all ways; tp and cp up to the GPUs of a node, since their collectives lie on the
                                  critical path; cp for long sequences; ep over dp · cp, for experts
    micro-batch                   1 to 16 sequences
    ZeRO                          0 to 3 over all data-parallel GPUs, and 3 within a node (HSDP); with a pipeline 0 and
                                  1: 2 cannot be, and 3 would gather whole stages for every micro-batch
    schedule of a pipeline        1f1b, interleaved by 2 and 4, and the two zero-bubble ones

An axis that is given (`fixed`) is not searched. What cannot be is counted by its reason (`layout.why_not`).
Recomputation is not here: it costs time whatever else there is, so the planner takes as little as fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from bitwright.errors import ParallelError
from bitwright.hardware.model_shape import ModelShape
from bitwright.parallel.layout import Layout, Recompute, Schedule, why_not

_MICRO_BATCHES = (1, 2, 4, 8, 16)
#: (schedule of a pipeline, chunks on each stage).
_SCHEDULES: tuple[tuple[Schedule, int], ...] = (
    ("1f1b", 1),
    ("1f1b", 2),
    ("1f1b", 4),
    ("zero-bubble", 1),
    ("zero-bubble-v", 1),
)
#: From what costs no time to what costs most.
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "operations", "full")
#: Axes that can be given with a size → the least of it: ZeRO 0 divides nothing, a group of 0 is all GPUs.
LEAST_SIZES = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero": 0, "zero_group": 0, "micro_batch": 1, "interleave": 1}
#: Axes that can be given with a word → the words.
WORDS: Mapping[str, tuple[str, ...]] = {"schedule": get_args(Schedule), "recompute": get_args(Recompute)}
#: Tokens of a sequence from which it is worth cutting.
_LONG_SEQUENCE = 16384


def layouts(
    shape: ModelShape,
    *,
    sequence: int,
    global_batch: int,
    num_gpus: int,
    node: int,
    fixed: Mapping[str, Any],
    refused: Counter[str],
) -> Iterator[Layout]:
    """Yield every layout that can be.

    Args:
        shape: of the model.
        sequence, global_batch: of a step.
        num_gpus, node: of the cluster, and of one node of it.
        fixed: axis → its size or word where it is given.
        refused: why layouts cannot be → how many; counted here.
    """
    for axes in _axes(shape, sequence, num_gpus, node, fixed):
        for micro in _given(fixed, "micro_batch", _MICRO_BATCHES):
            for zero, group in _zeros(axes, fixed, node, refused):
                for schedule, interleave in _schedules(axes["pp"], fixed):
                    layout = Layout(
                        dp=axes["dp"],
                        tp=axes["tp"],
                        cp=axes["cp"],
                        pp=axes["pp"],
                        ep=axes["ep"],
                        zero=zero,
                        zero_group=group,
                        micro_batch=micro,
                        schedule=schedule,
                        interleave=interleave,
                        is_sequence_parallel=axes["tp"] > 1,
                    )
                    reason = why_not(
                        layout, shape, sequence=sequence, num_gpus=num_gpus, global_batch=global_batch
                    )  # fmt: skip
                    if reason is None:
                        yield layout
                    else:
                        refused[reason] += 1


def raise_if_no_axes(fixed: Sequence[tuple[str, int | str]]) -> None:
    """Raise for what cannot be given.

    Raises:
        ParallelError: no such axis, a size below its least, an unknown word, or an axis twice.
    """
    seen: dict[str, int | str] = {}
    for axis, value in fixed:
        if axis in seen:
            raise ParallelError(f"{axis}={seen[axis]} and {axis}={value} cannot both be; give {axis} once")
        seen[axis] = value
        if axis in WORDS:
            if value not in WORDS[axis]:
                raise ParallelError(f"{axis} is {value!r}; there are {', '.join(WORDS[axis])}")
        elif axis not in LEAST_SIZES:
            raise ParallelError(f"there is no axis {axis!r} to give; there are {', '.join((*LEAST_SIZES, *WORDS))}")
        elif not isinstance(value, int) or value < LEAST_SIZES[axis]:
            raise ParallelError(
                f"{axis} is {value}; its least size is {LEAST_SIZES[axis]}: correct it, or leave it out"
            )


def possible_sizes(
    axis: str,
    shape: ModelShape,
    *,
    sequence: int,
    global_batch: int,
    num_gpus: int,
    node: int,
    fixed: Mapping[str, Any],
) -> tuple[int | str, ...]:
    """Return the sizes, or words, of one axis with which there is a layout; other arguments as `layouts` has them."""
    divided = {"micro_batch": global_batch, "ep": shape.num_experts, "interleave": shape.num_layers}.get(axis, num_gpus)
    sizes = range(4) if axis == "zero" else [size for size in range(1, divided + 1) if divided % size == 0]
    found: list[int | str] = []
    for value in WORDS.get(axis, tuple(sizes)):
        tried = layouts(
            shape,
            sequence=sequence,
            global_batch=global_batch,
            num_gpus=num_gpus,
            node=node,
            fixed={**fixed, axis: value},
            refused=Counter(),
        )
        if next(tried, None) is not None:
            found.append(value)
    return tuple(found)


def dp_sizes(shape: ModelShape, *, sequence: int, num_gpus: int, node: int, fixed: Mapping[str, Any]) -> list[int]:
    """Return the numbers of data-parallel copies that the other axes leave, whatever the batch."""
    return sorted({axes["dp"] for axes in _axes(shape, sequence, num_gpus, node, fixed)})


def recomputes(fixed: Mapping[str, Any]) -> tuple[Recompute, ...]:
    """Return what may be computed again, from what costs no time to what costs most."""
    return _given(fixed, "recompute", _RECOMPUTES)


def _given(fixed: Mapping[str, Any], axis: str, all_of_them: tuple[Any, ...]) -> tuple[Any, ...]:
    return (fixed[axis],) if axis in fixed else all_of_them


def _axes(shape: ModelShape, sequence: int, gpus: int, node: int, fixed: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Sizes of dp, tp, cp, pp and ep."""

    def sizes(axis: str, most: int) -> tuple[int, ...]:
        return _given(fixed, axis, tuple(size for size in range(1, most + 1) if gpus % size == 0))

    for tp in sizes("tp", node):
        for cp in sizes("cp", node // tp if sequence >= _LONG_SEQUENCE else 1):
            for pp in sizes("pp", min(shape.num_layers, gpus // (tp * cp))):
                if gpus % (tp * cp * pp):
                    continue
                dp = gpus // (tp * cp * pp)
                for ep in sizes("ep", min(shape.num_experts, dp * cp)):
                    yield {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "ep": ep}


def _zeros(
    axes: Mapping[str, int], fixed: Mapping[str, Any], node: int, refused: Counter[str]
) -> list[tuple[int, int]]:
    """(ZeRO stage, GPUs that divide states: 0 for all)."""
    ranks = axes["dp"] * axes["cp"]
    stages = _given(fixed, "zero", (0,) if ranks == 1 else (0, 1, 2, 3) if axes["pp"] == 1 else (0, 1))
    group = fixed.get("zero_group", 0)
    if group and axes["dp"] % group:
        refused[f"zero_group {group} does not divide dp {axes['dp']}"] += 1
        return []
    if group:
        return [(stage, group) for stage in stages if stage]
    found = [(stage, 0) for stage in stages]
    inside = node // axes["tp"]
    if 3 in stages and axes["cp"] == axes["ep"] == axes["pp"] == 1 and 1 < inside < ranks and axes["dp"] % inside == 0:
        found.append((3, inside))
    return found


def _schedules(stages: int, fixed: Mapping[str, Any]) -> list[tuple[Schedule, int]]:
    """(schedule, chunks) of a pipeline; without one there is nothing to order."""
    known = _SCHEDULES if stages > 1 else _SCHEDULES[:1]
    if "schedule" in fixed:
        chunks = [count for name, count in known if name == fixed["schedule"]] or [1]
        known = tuple((fixed["schedule"], count) for count in chunks)
    if "interleave" in fixed and stages > 1:
        names = dict.fromkeys(name for name, _ in known)
        wanted = fixed["interleave"]
        known = tuple((name, wanted) for name in names if wanted == 1 or not name.startswith("zero-bubble"))
    return list(known)
