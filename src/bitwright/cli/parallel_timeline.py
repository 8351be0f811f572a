"""``bitwright parallel timeline MODEL --cluster … --out trace.json``: what of a training step overlaps what.

The trace opens in ui.perfetto.dev and chrome://tracing; a name that ends in .svg is drawn instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
from bitwright.cli.table import new_console, print_rows
from bitwright.cli.usage import UsageMistake, raise_if_there
from bitwright.report.units import spell_bytes, spell_count, spell_seconds

#: What is searched no further than it can be drawn, unless --fix says otherwise.
_DRAWN = "schedule=1f1b"


def timeline_command(
    model: ModelArgument,
    out: Annotated[
        list[Path], typer.Option(metavar="FILE", help="trace.json (Perfetto, Chrome) or timeline.svg; repeat it.")
    ],
    cluster: ClusterOption = None,
    cluster_file: ClusterFileOption = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="A training policy; auto: what the device runs.")
    ] = "bf16-mixed",
    global_batch: GlobalBatchOption = None,
    seq: SequenceOption = 4096,
    optimizer: OptimizerOption = "adamw",
    hardware_name: HardwareOption = None,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="AXIS=SIZE", help="Draw this layout: tp=8, pp=4, zero=1 …")
    ] = None,
) -> None:
    """Draw the step of the best layout, or of the one that --fix gives, zero-bubble schedules left out.

    Exit code 3: no layout fits; nothing is written.
    """
    for path in out:
        if path.suffix not in (".json", ".svg"):
            raise UsageMistake(f"--out is {str(path)!r}; it takes a file that ends in .json or .svg")
        raise_if_there(path)
    from bitwright.parallel.job import position_note
    from bitwright.parallel.planner import plan_layouts
    from bitwright.parallel.timeline import timeline
    from bitwright.parallel.trace_file import trace_text
    from bitwright.parallel.trace_svg import svg_text

    given = fix or []
    request = read_request(
        model=model,
        cluster=cluster,
        cluster_file=cluster_file,
        policies=[policy],
        global_batch=global_batch,
        sequence=seq,
        optimizer=optimizer,
        hardware_name=hardware_name,
        fixed=given if any(text.partition("=")[0] == "schedule" for text in given) else [_DRAWN, *given],
    )
    plan = plan_layouts(request, limit=1)
    if plan.nearest_miss is not None:
        over = spell_bytes(plan.nearest_miss.memory.total - plan.usable_bytes)
        typer.echo(
            f"out of memory: no layout fits; the nearest, {plan.nearest_miss.job.layout}, is {over} over", err=True
        )
        raise typer.Exit(3)
    best = plan.candidates[0]
    drawn = timeline(best.job)
    for path in out:
        path.write_text(svg_text(drawn) if path.suffix == ".svg" else trace_text(drawn), encoding="utf-8")
    print_rows(
        new_console(highlight=False),
        [
            *((("chosen", chosen),) if (chosen := policy_reason([policy], request)) else ()),
            *((("note", note),) if (note := position_note(request.shape, seq)) else ()),
            ("layout", f"{best.layout}: {spell_seconds(best.time.seconds)} a step (predicted)"),
            (
                "drawn",
                f"{drawn.drawn} of {drawn.num_micro_batches} micro-batches, {spell_count(len(drawn.events), 'event')}",
            ),
            *(("written", str(path)) for path in out),
        ],
    )
