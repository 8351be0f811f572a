"""``bitwright comm time allreduce --cluster h100x8x16 --size 64MiB``: each algorithm's time, which is taken, why."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bitwright.cli.output import write_json
from bitwright.cli.parallel import ClusterFileOption, ClusterOption, read_topology
from bitwright.cli.table import new_console, new_table, print_rows, print_table
from bitwright.comms.cost_model import LAUNCHES, CollectiveCost, algorithms, collective_time, refusals
from bitwright.comms.explain import collective_name
from bitwright.comms.sizes import parse_sizes, spell_count
from bitwright.comms.topology import Topology
from bitwright.report.units import spell_bytes, spell_seconds


def time_command(
    collective: Annotated[
        str,
        typer.Argument(
            metavar="COLLECTIVE", help="allreduce, allgather, reducescatter, broadcast, alltoall or sendrecv."
        ),
    ],
    cluster: ClusterOption = None,
    cluster_file: ClusterFileOption = None,
    size: Annotated[str, typer.Option(metavar="SIZES", help="64MiB, or 1KiB,64MiB, or 1KiB..1GiB.")] = "64MiB",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Of a group; default: the whole cluster.", show_default=False)
    ] = None,
    stride: Annotated[int, typer.Option(min=1, help="GPUs from one rank of the group to the next.")] = 1,
    launch: Annotated[
        str, typer.Option(metavar="NAME", help=f"How the collective is started: {', '.join(LAUNCHES)}.")
    ] = "graph",
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
) -> None:
    """Say how long a collective takes on a cluster by every algorithm, which one is chosen, and why.

    Sizes are those of nccl-tests: the whole vector, the gathered output, the full input.
    """
    op = collective_name(collective)
    whole = read_topology(cluster, cluster_file)
    group = whole if ranks is None and stride == 1 else whole.group(ranks or whole.num_ranks // stride, stride=stride)
    answers = [_answer(op, num_bytes, group, launch) for num_bytes in parse_sizes(size)]
    refused = refusals(op, group) if group.num_ranks > 1 else {}
    if json:
        facts = {
            "collective": op,
            "cluster": whole.spelled,
            "ranks": group.num_ranks,
            "stride": stride,
            "launch": launch,
            "status": "predicted",
            "sizes": [_facts(chosen, costs) for chosen, costs in answers],
            "refused": refused,
        }
        write_json(json_format.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        return
    console = new_console(highlight=False)
    across = " and ".join(f"{members} by {level.kind}" for level, members, _ in group.spanned) or "one rank"
    print_rows(console, [("collective", f"{op}, {spell_count(group.num_ranks, 'rank')} of {whole.spelled}: {across}")])
    console.print()
    if len(answers) == 1:
        _print_one(console, *answers[0])
    else:
        _print_several(console, answers)
    for reason in dict.fromkeys(refused.values()):
        names = ", ".join(name for name, why in refused.items() if why == reason)
        console.print(Text(f"{names}: {reason}", style="dim"))
    for level, count in group.grown:
        beyond = f"{count} by {level.kind}, where the file describes {level.members}"
        console.print(Text(f"{beyond}: its rates and latencies are taken for more", style="dim"))
    console.print(
        Text("All predicted; ≈ by the rate of the links, where nobody measured the algorithm's.", style="dim")
    )


_Answer = tuple[CollectiveCost, tuple[CollectiveCost, ...]]


def _answer(op: str, num_bytes: int, group: Topology, launch: str) -> _Answer:
    """What is chosen; and all that there is, the fastest first."""
    chosen = collective_time(op, num_bytes, group, launch=launch)
    if group.num_ranks == 1:
        return chosen, (chosen,)
    costs = [collective_time(op, num_bytes, group, name, launch=launch) for name in algorithms(op, group)]
    return chosen, tuple(sorted(costs, key=lambda cost: cost.time_s))


def _print_one(console: Console, chosen: CollectiveCost, costs: Sequence[CollectiveCost]) -> None:
    columns = ("time", "of it\nlatency", "algbw\nGB/s", "busbw\nGB/s")
    table = new_table(
        ("", False),
        ("algorithm", False),
        *((name, True) for name in columns),
        ("slowest level", False),
        ("a rank\nsends", True),
    )
    for cost in costs:
        is_chosen = cost.algorithm == chosen.algorithm
        protocol = f" ({chosen.protocol})" if is_chosen and chosen.protocol else ""
        table.add_row(
            Text("→" if is_chosen else ""),
            Text(cost.algorithm + protocol, style="bold" if is_chosen else ""),
            Text(_spell_time(cost)),
            spell_seconds(cost.latency_s),
            f"{cost.algbw_gb_per_s:.1f}",
            f"{cost.busbw_gb_per_s:.1f}",
            Text(cost.bound),
            spell_bytes(cost.wire_bytes),
        )
    print_table(console, table)
    console.print()
    print_rows(console, [("chosen", f"{chosen.algorithm}, since {chosen.reason}"), *_quicker(chosen, costs)])


def _spell_time(cost: CollectiveCost) -> str:
    return ("" if cost.is_measured else "≈ ") + spell_seconds(cost.time_s)


def _quicker(chosen: CollectiveCost, costs: Sequence[CollectiveCost]) -> list[tuple[str, str]]:
    """What this model has as faster than the library's choice; of figures that are as well known as those of that."""
    best = next((cost for cost in costs if cost.is_measured == chosen.is_measured), chosen)
    if best.time_s >= 0.98 * chosen.time_s:
        return []
    saved = 1 - best.time_s / chosen.time_s
    return [("faster", f"{best.algorithm} by {saved:.0%}, which has to be asked for")]


def _print_several(console: Console, answers: Sequence[_Answer]) -> None:
    names = sorted({cost.algorithm for _, costs in answers for cost in costs})
    table = new_table(("size", True), *((name, True) for name in names), ("chosen", False))
    for chosen, costs in answers:
        times = {cost.algorithm: _spell_time(cost) for cost in costs}
        cells = [Text(times[n], style="bold" if n == chosen.algorithm else "") for n in names]
        table.add_row(spell_bytes(chosen.num_bytes), *cells, Text(chosen.algorithm))
    print_table(console, table)


def _facts(chosen: CollectiveCost, costs: Sequence[CollectiveCost]) -> dict[str, object]:
    return {
        "bytes": chosen.num_bytes,
        "chosen": chosen.algorithm,
        "protocol": chosen.protocol,
        "reason": chosen.reason,
        "algorithms": [
            {
                "algorithm": cost.algorithm,
                "time_s": cost.time_s,
                "latency_s": cost.latency_s,
                "algbw_gb_per_s": cost.algbw_gb_per_s,
                "busbw_gb_per_s": cost.busbw_gb_per_s,
                "bound": cost.bound,
                "wire_bytes": cost.wire_bytes,
                "is_measured": cost.is_measured,
            }
            for cost in costs
        ],
    }
