"""``bitwright show PLAN``: the table of a plan that was written before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.evidence import print_evidence
from bitwright.cli.output import write_json
from bitwright.cli.table import new_console, print_groups, print_sites, print_summary
from bitwright.cli.train_plan import print_training_plan
from bitwright.plan import load_plan
from bitwright.plan.training_folder import is_training_plan, load_training_plan


def show_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan folder or its plan.json.", show_default=False)],
    sites: Annotated[bool, typer.Option("--sites", help="One line per site.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print plan.json and nothing else.")] = False,
) -> None:
    """Show the table of a plan."""
    if is_training_plan(plan):
        _show_training(plan, sites, json)
        return
    loaded = load_plan(plan)
    if json:
        write_json(loaded.to_json())
        return
    console = new_console()
    if sites:
        print_sites(console, loaded)
    else:
        print_groups(console, loaded)
        print_evidence(console, loaded)
    console.print()
    print_summary(console, loaded)


def _show_training(path: Path, sites: bool, json: bool) -> None:
    plan = load_training_plan(path)
    if json:
        write_json(plan.to_json())
    else:
        print_training_plan(new_console(highlight=False), plan, sites=sites)
