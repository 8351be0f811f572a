"""``bitwright export PLAN --to … --out DIR``: write a plan as the checkpoint of an engine.

``--list`` writes nothing: it says what there is to export to, and for a plan what stands against each. Without
``--model`` it says what the plan tells, and that it did not look at the model; with it, what `export` would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from bitwright.cli.progress import Bars
from bitwright.cli.table import new_console, new_table, print_rows, print_table
from bitwright.cli.usage import UsageMistake
from bitwright.plan import Plan, load_plan
from bitwright.plan.engine import get_engine
from bitwright.plan.training_folder import is_training_plan, load_training_plan
from bitwright.plan.training_plan import TrainingPlan
from bitwright.report.units import spell_bytes, spell_count

_CAN = "can be written"
_NOT_LOOKED_AT = "nothing in the plan stands against it; the model was not looked at"


def export_command(
    plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="A plan folder.", show_default=False)] = None,
    to: Annotated[
        str | None, typer.Option(metavar="TARGET", help="What to write: one of --list.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to: a folder that is not there yet.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model, where it no longer lies where it was planned.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help="Whose rules hold; default: the plan's own, else the target's first."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="fp16|bf16|fp32", help="Of all that has no codes; default: that of the checkpoint."),
    ] = None,
    list_targets: Annotated[
        bool, typer.Option("--list", help="Say what there is to export to, and what stands against it; write nothing.")
    ] = False,
) -> None:
    """Write a plan as the checkpoint of an engine, or a training plan as a part of a configuration.

    Whatever a checkpoint or its engine cannot express is refused, site by site, before a file is written; what a
    training program cannot be told is said.
    """
    if plan is not None and is_training_plan(plan):
        _export_training(load_training_plan(plan), to, out, list_targets)
        return
    if list_targets:
        asked = None if engine is None else get_engine(engine).name
        _list(None if plan is None else load_plan(plan), asked, model)
        return
    missing = [name for name, value in (("PLAN", plan), ("--to", to), ("--out", out)) if value is None]
    if plan is None or to is None or out is None:
        raise UsageMistake(f"{' and '.join(missing)} missing; or ask what there is: bitwright export --list")
    _export(load_plan(plan), to, out, model, engine, dtype)


def _export(plan: Plan, to: str, out: Path, model: str | None, engine: str | None, dtype: str | None) -> None:
    from bitwright.export import EXPORTERS, export, raise_if_refused
    from bitwright.export.driver import raise_if_not_new
    from bitwright.inference.planned_model import open_model
    from bitwright.inference.static.origin import raise_if_stale

    EXPORTERS[to]  # an unknown name, a folder that is there and a refusal are told before anything is loaded
    raise_if_not_new(out)
    raise_if_refused(plan, to, engine=engine)
    raise_if_stale(plan)
    with Bars() as bars:
        with bars.waiting("loading the model"):
            loaded, sites = open_model(plan, model)
        with bars.waiting(f"writing {to}"):
            report = export(plan, loaded, to, out, engine=engine, dtype=dtype, sites=sites)
    console = new_console(highlight=False)
    rows = [
        ("written", str(report.folder)),
        *(() if report.engine is None else (("for", f"{report.engine} ({report.engine_reason})"),)),
        ("dtype", f"{report.dtype} ({report.dtype_reason})"),
        ("size", f"{spell_bytes(sum(report.files.values()))} in {spell_count(len(report.files), 'file')}"),
    ]
    print_rows(console, rows)
    for note in report.notes:
        console.print(Text(note, style="dim"))


def _export_training(plan: TrainingPlan, to: str | None, out: Path | None, lists: bool) -> None:
    """Write a training plan for another program; or say which there are, and what stands against each."""
    from bitwright.export.training_target import TRAINING_TARGETS, export_training
    from bitwright.training.planning.planned_policy import policy_of_plan

    console = new_console(highlight=False)
    if lists:
        planned = policy_of_plan(plan)
        table = new_table(("target", False), ("what is written", False), ("stands against it", False))
        for name, target in TRAINING_TARGETS.items():
            table.add_row(Text(name), Text(target.description), Text(target.why_not(plan, planned) or ""))
        print_table(console, table)
        return
    missing = [name for name, value in (("--to", to), ("--out", out)) if value is None]
    if to is None or out is None:
        raise UsageMistake(f"{' and '.join(missing)} missing; or ask what there is: bitwright export --list PLAN")
    written = export_training(plan, to, out)
    print_rows(console, [("written", ", ".join(str(out / name) for name in written.files))])
    for note in written.notes:
        console.print(Text(note, style="dim"))


def _list(plan: Plan | None, engine: str | None, model: str | None) -> None:
    from bitwright.export import EXPORTERS, supported_schemes

    console = new_console(highlight=False)
    if plan is not None:
        _list_for(console, plan, engine, model)
        return
    listed = {name: exporter for name, exporter in EXPORTERS.items() if engine in (None, *exporter.loaded_by)}
    table = new_table(("target", False), ("loaded by", False), ("what is written", False))
    for name, exporter in listed.items():
        table.add_row(Text(name), Text(", ".join(exporter.loaded_by)), Text(exporter.description))
    print_table(console, table)
    for name, exporter in listed.items():
        console.print()
        for loader in exporter.engines or (None,):
            if engine is not None and loader not in (engine, None):
                continue
            schemes = supported_schemes(name, loader)
            console.print(Text(name if loader in (None, name) else f"{name} for {loader}", style="bold"))
            console.print(Padding(Text(", ".join(schemes) or "nothing"), (0, 0, 0, 2)))


def _list_for(console: Console, plan: Plan, engine: str | None, model: str | None) -> None:
    from bitwright.export import EXPORTERS, examine, examine_model, spell_sites

    opened = None
    if model is not None:
        from bitwright.inference.planned_model import open_model

        with Bars() as bars, bars.waiting("loading the model"):
            opened = open_model(plan, model)
    for name, exporter in EXPORTERS.items():
        if engine not in (None, *exporter.loaded_by):
            console.print(Text(name, style="bold"))
            console.print(Padding(Text(f"{engine} does not load it", style="dim"), (0, 0, 0, 2)))
            continue
        own = engine if engine in exporter.engines else None
        if opened is None:
            findings = examine(plan, name, engine=own)
        else:
            findings = examine_model(plan, opened[0], name, engine=own, sites=opened[1])
        title = Text(name, style="bold")
        if findings.engine is not None:
            title.append(f" for {findings.engine} ({findings.engine_reason})", style="dim")
        console.print(title)
        if not findings.refused:
            said = _NOT_LOOKED_AT if opened is None else _CAN
            console.print(Padding(Text(said, style="green"), (0, 0, 0, 2)))
        for item in findings.refused:
            console.print(Padding(Text(item.reason, style="red"), (0, 0, 0, 2)))
            if item.sites:
                counted = spell_count(len(item.sites), "site")
                console.print(Padding(Text(f"{counted}: {spell_sites(item.sites)}"), (0, 0, 0, 4)))
    if opened is None:
        console.print(Text("What only the model shows (fused weights, norms) is looked at with --model.", style="dim"))
