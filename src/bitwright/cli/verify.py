"""``bitwright verify PLAN``: measure a plan again, from scratch, if asked on other text. Changes no file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bitwright.cli.output import write_json
from bitwright.cli.progress import Bars
from bitwright.cli.table import measured_rows, new_console, print_rows
from bitwright.plan import Measured, Plan, load_plan
from bitwright.plan.canonical import canonical_json
from bitwright.report.units import LIMIT_TITLES, spell_limit_value


def verify_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan folder.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model, where it no longer lies where it was planned.")
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="SRC", help="Other text; default: the plan's own evaluation text.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to measure on.", show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the measurement as JSON and nothing else.")] = False,
) -> None:
    """Measure a plan again, from scratch.

    Exit code 3: a quality limit of the plan's budget is missed in this measurement.
    """
    loaded = load_plan(plan)
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
        for sentence in missed:
            console.print(Text(sentence, style="red"))
        if not missed:
            console.print(Text("every quality limit of the plan holds here", style="bold green"))
    if missed:
        raise typer.Exit(3)


def missed_limits(plan: Plan, measured: Measured) -> list[str]:
    """Return one sentence per quality limit of the plan that ``measured`` breaks."""
    values = measured.quality
    return [
        f"missed: {LIMIT_TITLES[name]} {spell_limit_value(name, values[name])}, limit {spell_limit_value(name, limit)}"
        for name, limit in plan.budget.limits.items()
        if name in values and values[name] > limit
    ]
