"""``bitwright comm explain``: one collective step by step, on numbers."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bitwright.cli.table import new_console, new_table, print_rows, print_table
from bitwright.cli.usage import UsageMistake, is_given
from bitwright.comms.collectives import ALGORITHMS
from bitwright.comms.explain import Explanation, Move, collective_name, description, explain, parse_data
from bitwright.comms.sizes import spell_count
from bitwright.comms.wire import WIRE_FORMATS, error_growth, wire_format

#: Ranks, and numbers of a rank, that buffers are shown of.
_SHOWN_RANKS = 8
_SHOWN_NUMBERS = 16
#: Messages of a step that are shown where more ranks take part.
_SHOWN_MOVES = 3
#: Ranks up to which the growth of errors is shown without being asked for more.
_GROWTH = (2, 4, 8, 16, 32, 64)


def explain_command(
    context: typer.Context,
    collective: Annotated[
        str,
        typer.Argument(
            metavar="COLLECTIVE", help="allreduce, allgather, reducescatter, broadcast, alltoall or sendrecv."
        ),
    ],
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="How many ranks take part.")] = 4,
    algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="ring, tree, two_shot …; default: ring where there is one.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="ROWS", help='One row a rank: "1,2,3,4;2,4,6,8;…". Default: 1,2,3 … times the rank.'),
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Consecutive ranks of a node, for hierarchical. Default: all.")
    ] = None,
    segments: Annotated[int, typer.Option(min=1, help="Pieces that a pipeline cuts its data into.")] = 2,
    dtype: Annotated[
        str | None, typer.Option(metavar="FORMAT", help=f"How numbers travel: {', '.join(WIRE_FORMATS)}.")
    ] = None,
    growth: Annotated[
        bool, typer.Option("--growth", help="With --dtype: errors of sums as ranks grow, beside other algorithms.")
    ] = False,
) -> None:
    """Tell one collective step by step: who sends what, bytes of each rank, the result.

    With --dtype, numbers are rounded on their way, and the result is held against fp64.
    """
    if growth and dtype is None:
        raise UsageMistake(
            "--growth tells what rounding on the way does to sums, and nothing is rounded; add --dtype bf16"
        )
    op = collective_name(collective)
    if growth and op != "all_reduce":
        raise UsageMistake(f"--growth is of all-reduces, and {op} is none; leave it out, or explain allreduce")
    if growth and algorithm is not None and ALGORITHMS[algorithm].needs_nodes:
        raise UsageMistake(
            f"--growth has no column of {algorithm}, whose sums depend on the ranks of a node; leave --growth out"
        )
    wire = None if dtype is None else wire_format(dtype)
    found = explain(
        op,
        algorithm,
        ranks,
        None if data is None else parse_data(data, ranks),
        ranks_per_node=ranks_per_node,
        num_segments=segments if is_given(context, "segments") else None,
        wire=wire,
    )
    console = new_console(highlight=False)
    _print(console, found, dtype)
    if growth:
        assert wire is not None
        _print_growth(console, wire.name, found.schedule.algorithm)


def _print(console: Console, found: Explanation, dtype: str | None) -> None:
    made = found.schedule
    head = f"{made.op} by {made.algorithm}, {spell_count(made.num_ranks, 'rank')}: {description(made.algorithm)}"
    console.print(Text(f"{head}; steps: {found.spelled_steps}"), soft_wrap=True)
    shows_numbers = made.num_ranks <= _SHOWN_RANKS and found.start.shape[1] <= _SHOWN_NUMBERS
    if shows_numbers:
        _print_buffers(console, "start", found.start.tolist())
    for number, step in enumerate(found.steps):
        console.print(Text(f"step {number + 1}", style="bold"))
        shown = step.moves if made.num_ranks <= _SHOWN_RANKS else step.moves[:_SHOWN_MOVES]
        for move in shown:
            console.print(Text(f"  {_spell_move(move, shows_numbers)}"), soft_wrap=True)
        if len(shown) < len(step.moves):
            console.print(Text(f"  and {len(step.moves) - len(shown)} more like these", style="dim"))
        if shows_numbers:
            _print_buffers(console, "then", step.buffers.tolist())
    if found.start.shape[1] <= _SHOWN_NUMBERS:
        console.print(Text("result", style="bold"))
        is_same = made.num_ranks > _SHOWN_RANKS and len(set(found.result)) == 1
        rows_told = [("every rank", found.result[0])] if is_same else _by_rank(found.result)
        for who, row in rows_told:
            console.print(Text(f"  {who}  {_spell_row(row)}"), soft_wrap=True)
    counts, size = found.counts, found.bytes_per_element
    per_rank = sorted(set(counts.sent))
    spread = f"{size * per_rank[0]:g}" if len(per_rank) == 1 else f"{size * per_rank[0]:g} to {size * per_rank[-1]:g}"
    beside_steps, beside_bytes = found.spelled_steps, f"busiest: {found.spelled_busiest}"
    if made.num_ranks == 1:
        beside_steps = beside_bytes = "one rank has nothing to send"
    elif found.has_to_divide is not None:
        beside_bytes += f", for lengths that {found.has_to_divide} divides"
    rows = [
        ("steps", f"{counts.num_steps}   ({beside_steps})"),
        ("bytes sent by a rank", f"{spread}   ({beside_bytes})"),
        ("bytes sent in all", f"{size * counts.total:g}, of buffers of {size * found.start.shape[1]:g}"),
        ("numbers travel as", dtype or "fp32, taken to be exact"),
    ]
    if found.relative_error is not None:
        rows.append(("against fp64", found.why_not_finite or f"relative error {found.relative_error:.3g}"))
    print_rows(console, rows)


def _by_rank(result: tuple[tuple[float, ...], ...]) -> list[tuple[str, tuple[float, ...]]]:
    return [(f"rank {rank}", row) for rank, row in enumerate(result)]


def _spell_move(move: Move, with_values: bool) -> str:
    slice_ = f"[{move.start}]" if move.stop - move.start == 1 else f"[{move.start}:{move.stop}]"
    verb = "keeps its" if move.source == move.destination else "added" if move.reduces else "copied"
    values = f" = {_spell_row(move.values)}" if with_values else ""
    return f"{move.source} → {move.destination}  {slice_}{values}  {verb}"


def _spell_row(row: object) -> str:
    assert isinstance(row, list | tuple)
    return ", ".join(f"{value:g}" for value in row) or "nothing"


def _print_buffers(console: Console, title: str, buffers: list[list[float]]) -> None:
    for rank, row in enumerate(buffers):
        head = title if rank == 0 else ""
        console.print(Text(f"  {head:5} rank {rank}  {_spell_row(row)}", style="dim"), soft_wrap=True)


def _print_growth(console: Console, dtype: str, algorithm: str) -> None:
    names = list(dict.fromkeys(("ring", "tree", "halving_doubling", "two_shot", algorithm)))
    table = new_table(("ranks", True), *((name, True) for name in names))
    for count in _GROWTH:
        rows = error_growth([dtype], names, [count], length=1024)
        table.add_row(str(count), *(f"{row.relative_error:.2e}" for row in rows))
    console.print(Text(f"relative error of all-reduces in {dtype} against fp64, normal numbers", style="bold"))
    print_table(console, table)
    console.print(Text("The ring's grows as √ranks; two-shot adds in fp32 in one place and rounds once.", style="dim"))
