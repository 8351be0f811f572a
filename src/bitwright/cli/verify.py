"""``bitwright verify PLAN``: measure a plan again, from scratch, if asked on other text. Changes no file."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from bitwright.cli.output import write_json
from bitwright.cli.progress import Bars
from bitwright.cli.table import least_rows, measured_rows, new_console, new_table, print_rows, print_table
from bitwright.cli.usage import UsageMistake, split_names
from bitwright.plan import Measured, Plan, load_plan
from bitwright.plan.canonical import canonical_json
from bitwright.report.units import LIMIT_TITLES, spell_interval, spell_limit_value, spell_number

if TYPE_CHECKING:
    from bitwright.search.harness import TaskResult


def verify_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan folder.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model, where it no longer lies where it was planned.")
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="SRC", help="Other text; default: the plan's own evaluation text.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens to measure on; never fewer than 64 sequences. With --static: at most so many; default: all.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASK,…",
            help="Tasks of the lm-evaluation-harness instead: names it knows, or .yaml files of yours.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Documents of each task; default: all.", show_default=False)
    ] = None,
    static: Annotated[
        str | None,
        typer.Option(
            metavar="PROMPTS", help="Hold static scales against these prompts instead: a text file, or a built-in set."
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            metavar="min_max|percentile|mse",
            help="With --static: find the scales anew, on three prompts of four; the fourth is held against them.",
        ),
    ] = None,
    percentile: Annotated[
        float, typer.Option(help="With --rule percentile: percent of the magnitudes that are reached.")
    ] = 99.99,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --rule: where the plan with the new scales goes.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the measurement as JSON and nothing else.")] = False,
) -> None:
    """Measure a plan again, from scratch.

    Exit code 3: a quality limit of the plan's budget is missed in this measurement, or a static scale does not fit.
    """
    if static is None and (rule is not None or out is not None):
        raise UsageMistake("--rule and --out are for static scales: say on which prompts with --static PROMPTS")
    loaded = load_plan(plan)
    if static is not None:
        if tasks is not None or evaluation is not None:
            raise UsageMistake("--static looks at scales, --tasks and --evaluation measure: ask for one at a time")
        from bitwright.cli.verify_static import StaticRequest, verify_static

        request = StaticRequest(prompts=static, model=model, rule=rule, percentile=percentile, out=out, tokens=tokens)
        verify_static(loaded, request, json)
        return
    if tasks is not None:
        _verify_on_tasks(loaded, split_names(tasks, "task"), model, limit, json)
        return
    from bitwright.quantize.backends.cpu.announce import announcing
    from bitwright.search.optimize import verify

    with Bars() as bars, announcing(bars.waiting):
        measured: Measured = verify(loaded, model=model, evaluation=evaluation, tokens=tokens, progress=bars)
    missed = missed_limits(loaded, measured)
    if json:
        write_json(canonical_json(measured.model_dump(mode="json")))
    else:
        console = new_console()
        print_rows(console, [("plan", str(plan)), ("model", loaded.model.name), *measured_rows(measured)])
        if loaded.measured is not None:
            before = loaded.measured.kl
            interval = f"KL {before.mean:.3g} [{before.low:.3g}, {before.high:.3g}] nats per {measured.unit}"
            print_rows(console, [("in the plan", interval)])
        print_rows(console, least_rows(tokens, measured.sequences, loaded))
        for sentence in missed:
            console.print(Text(sentence, style="red"))
        if not loaded.budget.limits_quality:
            console.print(Text("the plan has no quality limit that this could be held against", style="dim"))
        elif not missed:
            console.print(Text("every quality limit of the plan holds here", style="bold green"))
    if missed:
        raise typer.Exit(3)


def _verify_on_tasks(plan: Plan, tasks: Sequence[str], model: str | None, limit: int | None, json: bool) -> None:
    """Both models on tasks, metric by metric."""
    from bitwright.inference.planned_model import open_model
    from bitwright.search.harness import run_tasks

    with Bars() as bars:
        loaded, sites = open_model(plan, model)
        results = run_tasks(plan, loaded, tasks, sites=sites, limit=limit, progress=bars)
    if json:
        write_json(json_format.dumps([_facts(result) for result in results], indent=2) + "\n")
        return
    table = new_table(
        ("task", False),
        ("metric", False),
        ("documents", True),
        ("reference", True),
        ("plan", True),
        ("plan − reference", True),
    )
    for result in results:
        difference = "" if result.difference is None else spell_interval(result.difference)
        figures = (f"{result.num_documents:,}", spell_number(result.reference), spell_number(result.plan), difference)
        table.add_row(Text(result.task), Text(result.metric), *figures)
    console = new_console()
    print_table(console, table)
    console.print(Text("brackets are 95 % intervals, paired over documents", style="dim"))


def _facts(result: TaskResult) -> dict[str, object]:
    difference = None if result.difference is None else result.difference.model_dump(mode="json")
    return {**asdict(result), "difference": difference}


def missed_limits(plan: Plan, measured: Measured) -> list[str]:
    """Return one sentence per quality limit of the plan that ``measured`` breaks."""
    values = measured.quality
    return [
        f"missed: {LIMIT_TITLES[name]} {spell_limit_value(name, values[name])}, limit {spell_limit_value(name, limit)}"
        for name, limit in plan.budget.limits.items()
        if name in values and values[name] > limit
    ]
