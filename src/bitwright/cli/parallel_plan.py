"""``bitwright parallel plan MODEL --cluster h100x8x16``: the best layouts of a step, what they take, and why.

Exit code 3: no layout fits; the one that misses by least is shown.
"""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from bitwright.cli.output import write_json
from bitwright.cli.parallel import (
    ClusterFileOption,
    ClusterOption,
    GlobalBatchOption,
    HardwareOption,
    ModelArgument,
    OptimizerOption,
    SequenceOption,
    policy_reason,
    read_request,
)
from bitwright.cli.table import new_console, new_table, print_rows, print_table
from bitwright.report.units import spell_bytes, spell_count, spell_percent, spell_seconds

if TYPE_CHECKING:
    from bitwright.parallel.numerics import Numerics
    from bitwright.parallel.planner import Candidate, NearestMiss, ParallelPlan, PlanRequest


def plan_command(
    model: ModelArgument,
    cluster: ClusterOption = None,
    cluster_file: ClusterFileOption = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A training policy; auto: what the device runs; repeat it to compare. Default: bf16-mixed.",
        ),
    ] = None,
    global_batch: GlobalBatchOption = None,
    seq: SequenceOption = 4096,
    optimizer: OptimizerOption = "adamw",
    hardware_name: HardwareOption = None,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="AXIS=SIZE", help="Do not search an axis: tp=8, pp=1, zero=3 …")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many layouts.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
) -> None:
    """Find the best way to divide a training step over a cluster.

    Exit code 3: no layout fits into memory; the one that misses by least is shown.
    """
    from bitwright.parallel.planner import plan_layouts

    policies = policy or ["bf16-mixed"]
    request = read_request(
        model=model,
        cluster=cluster,
        cluster_file=cluster_file,
        policies=policies,
        global_batch=global_batch,
        sequence=seq,
        optimizer=optimizer,
        hardware_name=hardware_name,
        fixed=fix or [],
    )
    plan = plan_layouts(request, limit=top)
    chosen = policy_reason(policies, request)
    if json:
        facts = plan_facts(request, plan) | {"policy_reason": chosen}
        write_json(json_format.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    else:
        _print(new_console(highlight=False), request, plan, chosen)
    if plan.nearest_miss is not None:
        raise typer.Exit(3)


def _print(console: Console, request: PlanRequest, plan: ParallelPlan, chosen: str) -> None:
    from bitwright.parallel.advice import beside_it, bottleneck_of, changes, reason_of
    from bitwright.parallel.job import position_note

    shape = request.shape
    tokens = spell_count(request.global_batch * request.sequence, "token")
    print_rows(
        console,
        [
            ("model", f"{shape.name}, {shape.num_parameters:,} parameters"),
            ("cluster", f"{request.topology.spelled}: {request.topology.num_ranks} × {plan.device.name}"),
            *((("chosen", chosen),) if chosen else ()),
            ("step", f"{request.global_batch} × {request.sequence} = {tokens}"),
            *((("note", note),) if (note := position_note(shape, request.sequence)) else ()),
            ("layouts", _spell_counts(plan)),
            *((("batch", _spell_batch(request, plan)),) if plan.ruled_out_dp else ()),
        ],
    )
    console.print()
    if plan.nearest_miss is not None:
        _print_miss(console, plan.nearest_miss, plan, request.optimizer)
        return
    table = new_table(
        ("", True),
        ("layout", False),
        ("memory", True),
        ("step", True),
        ("tokens/s\nper GPU", True),
        ("MFU", True),
        ("comm\nexposed", True),
    )
    for rank, found in enumerate(plan.candidates, start=1):
        table.add_row(Text(str(rank)), *_cells(found, several=len(request.policies) > 1))
    print_table(console, table)
    console.print()
    best = plan.candidates[0]
    rows = [(f"why {rank}", reason_of(found.job, found.time)) for rank, found in enumerate(plan.candidates, start=1)]
    rows.append(("bottleneck", bottleneck_of(best.time)))
    rows.append(("beside it", beside_it(best.time)))
    for change in changes(best.job, best.time, _others(request, plan)):
        note = f" ({change.note})" if change.note else ""
        rows.append(("what if", f"{change.what}: {change.gain:+.1%} tokens/s{note}"))
    rows.append(("kernels", plan.efficiency_reason.split(";")[0]))
    print_rows(console, rows)
    console.print(
        Text(
            "All predicted. MFU: 6 operations a weight and token, causal attention; nothing recomputed counts.",
            style="dim",
        )
    )


def _spell_counts(plan: ParallelPlan) -> str:
    alike = f", {plan.num_alike} of them slower variants in micro-batch or schedule" if plan.num_alike else ""
    cannot = sum(count for _, count in plan.refused)
    return f"{plan.num_fit} fit{alike}; {plan.num_too_large} are too large, {cannot} cannot be"


def _spell_batch(request: PlanRequest, plan: ParallelPlan) -> str:
    sizes, is_one = ", ".join(map(str, plan.ruled_out_dp)), request.global_batch == 1
    return (
        f"{spell_count(request.global_batch, 'sequence')} {'rules' if is_one else 'rule'} out dp {sizes}; a multiple "
        f"of {plan.even_batch} allows {'it' if len(plan.ruled_out_dp) == 1 else 'them'} (--global-batch)"
    )


def _others(request: PlanRequest, plan: ParallelPlan) -> tuple[Numerics, ...]:
    """Policies that were not asked for and that the device multiplies natively."""
    from bitwright.parallel.numerics import faster_numerics

    return faster_numerics(plan.device, [policy.name for policy in request.policies])


def _cells(found: Candidate, *, several: bool) -> tuple[Text, ...]:
    name = f"{found.layout}, {found.policy}" if several else str(found.layout)
    return (
        Text(name),
        Text(spell_bytes(found.memory.total)),
        Text(spell_seconds(found.time.seconds)),
        Text(f"{found.time.tokens_per_s_per_gpu:,.0f}"),
        Text(spell_percent(found.time.mfu)),
        Text(spell_percent(found.exposed_share)),
    )


def _print_miss(console: Console, miss: NearestMiss, plan: ParallelPlan, optimizer: str) -> None:
    memory = miss.memory
    over, usable = spell_bytes(memory.total - plan.usable_bytes), spell_bytes(plan.usable_bytes)
    console.print(
        Text(
            f"out of memory: no layout fits; the nearest is {over} over the {usable} that a step may fill of "
            f"{plan.device.name}",
            style="bold red",
        )
    )
    print_rows(
        console,
        [
            ("nearest", f"{miss.job.layout}, {miss.policy}: {spell_bytes(memory.total)}"),
            ("states", f"{spell_bytes(memory.states)}; before ZeRO: {_spell_states(miss.policy, optimizer)}"),
            ("activations", spell_bytes(memory.activations)),
            ("gathered", spell_bytes(memory.gathered)),
            ("logits", spell_bytes(memory.logits)),
            ("around", spell_bytes(memory.around)),
            ("next", "more GPUs, devices with more memory, shorter sequences, or an optimizer with fewer moments"),
        ],
    )


def _spell_states(policy: str, optimizer: str) -> str:
    """Bytes of a parameter, and why there are more than `bitwright memory` counts of a model under autocast."""
    from bitwright.parallel.policy_memory import memory_facts
    from bitwright.training.policy import policy_named

    bits = memory_facts(policy_named(policy), optimizer=optimizer).states
    if not bits.masters:
        return f"{bits.bytes_per_parameter:g} bytes a parameter"
    copies = bits.parameters / 8
    return (
        f"{bits.bytes_per_parameter:g} bytes a parameter: {bits.bytes_per_parameter - copies:g}, and {copies:g} of "
        "working copies that are kept through the step (masters in the optimizer)"
    )


def plan_facts(request: PlanRequest, plan: ParallelPlan) -> dict[str, object]:
    """Return a plan as plain figures."""
    from bitwright.parallel.advice import bottleneck_of, changes, ranked_parts, reason_of
    from bitwright.parallel.job import position_note

    facts: dict[str, object] = {
        "model": request.shape.name,
        "parameters": request.shape.num_parameters,
        "cluster": request.topology.spelled,
        "device": plan.device.name,
        "gpus": request.topology.num_ranks,
        "sequence": request.sequence,
        "global_batch": request.global_batch,
        "note": position_note(request.shape, request.sequence),
        "num_fit": plan.num_fit,
        "num_alike": plan.num_alike,
        "num_too_large": plan.num_too_large,
        "ruled_out_dp": list(plan.ruled_out_dp),
        "usable_bytes": plan.usable_bytes,
        "status": "predicted",
    }
    if plan.nearest_miss is not None:
        miss = plan.nearest_miss
        return facts | {
            "fits": False,
            "nearest_miss": {
                "layout": asdict(miss.job.layout),
                "policy": miss.policy,
                "memory_bytes": miss.memory.total,
                "memory": asdict(miss.memory),
                "over_bytes": miss.memory.total - plan.usable_bytes,
            },
        }
    layouts = [
        {
            "layout": asdict(found.layout),
            "spelled": str(found.layout),
            "policy": found.policy,
            "memory_bytes": found.memory.total,
            "memory": asdict(found.memory),
            "step_s": found.time.seconds,
            "parts_s": dict(found.time.parts),
            "tokens_per_s_per_gpu": found.time.tokens_per_s_per_gpu,
            "mfu": found.time.mfu,
            "exposed_share": found.exposed_share,
            "why": reason_of(found.job, found.time),
        }
        for found in plan.candidates
    ]
    best = plan.candidates[0]
    return facts | {
        "fits": True,
        "layouts": layouts,
        "bottleneck": bottleneck_of(best.time),
        "ranking": [asdict(part) for part in ranked_parts(best.time)],
        "changes": [asdict(change) for change in changes(best.job, best.time, _others(request, plan))],
    }
