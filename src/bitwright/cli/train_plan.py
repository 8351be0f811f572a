"""``bitwright train plan MODEL --hardware h100``: choose the precision of training from one short run, and keep it.

The plan is a folder, as those for serving are: `bitwright show` prints it, `training.prepare(policy=PLAN)` runs it, and
`bitwright export PLAN --to …` writes it for other programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bitwright import hardware
from bitwright.cli.hardware_show import find_device
from bitwright.cli.output import write_json
from bitwright.cli.progress import Bars
from bitwright.cli.table import new_console, new_table, print_rows, print_table
from bitwright.plan.folder import raise_if_not_replaceable
from bitwright.plan.training_folder import write_training_plan
from bitwright.plan.training_plan import TrainingPlan, TrainingSite
from bitwright.report.units import spell_bytes, spell_count, spell_share

_RUN, _GPU = "The run that is looked at", "One GPU of the training"


def plan_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a .gguf file, a hub id, or demo.")],
    hardware_name: Annotated[
        str | None,
        typer.Option("--hardware", metavar="NAME|FILE", help="What it is trained on; default: this machine."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many of them.")] = 1,
    max_error: Annotated[
        float, typer.Option(metavar="X", help="Relative error of a product up to which fewer bits are taken.")
    ] = 0.1,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="adamw, sgd, lion, …")] = "adamw",
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", metavar="X", help="Of the updates that bf16 may swallow.")
    ] = 1e-4,
    text: Annotated[
        str, typer.Option(metavar="SRC", help="A text file or a built-in set.", rich_help_panel=_RUN)
    ] = "docs",
    batches: Annotated[int, typer.Option(min=2, help="Batches.", rich_help_panel=_RUN)] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a batch.", rich_help_panel=_RUN)] = 2,
    seq: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.", rich_help_panel=_RUN)] = 256,
    gpu_batch: Annotated[int, typer.Option(min=1, help="Sequences at once.", rich_help_panel=_GPU)] = 1,
    gpu_seq: Annotated[int, typer.Option(min=1, help="Tokens of each.", rich_help_panel=_GPU)] = 2048,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of everything that draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Plan folder; default: NAME-training-plan.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print plan.json on stdout and nothing else there.")] = False,
) -> None:
    """Choose the training precision of every layer from one short run.

    Exit code 3: it does not fit on the hardware; the plan is written all the same and says by how much.
    """
    device, reason = (find_device(hardware_name), "asked for") if hardware_name else hardware.detect()
    folder = out if out is not None else Path(f"{Path(model).name.removesuffix('.gguf') or 'model'}-training-plan")
    raise_if_not_replaceable(folder)
    # Heavy (torch): after everything that can be refused without it.
    from bitwright.quantize.backends.cpu.announce import announcing
    from bitwright.training.planning.training_plan import PlanRequest, make_training_plan

    request = PlanRequest(
        device=device,
        device_reason=reason,
        gpus=gpus,
        optimizer=optimizer,
        learning_rate=learning_rate,
        max_error=max_error,
        text=text,
        batches=batches,
        batch=batch,
        sequence=seq,
        gpu_batch=gpu_batch,
        gpu_sequence=gpu_seq,
        seed=seed,
    )
    with Bars() as bars, announcing(bars.waiting):
        plan = make_training_plan(model, request, progress=bars)
    written = write_training_plan(plan, folder)
    if json:
        write_json(plan.to_json())
    else:
        print_training_plan(new_console(highlight=False), plan)
    typer.echo(f"plan    {written}", err=json)
    if plan.memory.peak_bytes > plan.memory.device_bytes:
        raise typer.Exit(3)


def print_training_plan(console: Console, plan: TrainingPlan, *, sites: bool = False) -> None:
    """Print a training plan: products by role and choice (or one by one), then everything that a step has once."""
    if sites:
        _print_products(console, plan)
    else:
        _print_roles(console, plan)
    console.print()
    table = new_table(("everything else", False), ("kept in", False), ("why", False))
    for site in plan.sites:
        if site.kind != "matmul":
            table.add_row(Text(site.name), Text(site.choice), Text(site.reason))
    print_table(console, table)
    console.print()
    memory = plan.memory
    fits = "fits" if memory.peak_bytes <= memory.device_bytes else "does not fit"
    step = f"{memory.batch} × {spell_count(memory.sequence, 'token')}, ZeRO {memory.zero}, recompute {memory.recompute}"
    rows = [
        ("model", f"{plan.model.name}, {plan.model.params:,} parameters"),
        ("hardware", f"{plan.gpus} × {plan.hardware} ({plan.hardware_reason})"),
        ("policy", f"{plan.policy}: {plan.policy_reason}"),
        ("looked at", f"{spell_count(plan.text.tokens, 'token')} of {plan.text.source}, loss {plan.loss:.3f}"),
        (
            "memory",
            f"{spell_bytes(memory.peak_bytes)} of {spell_bytes(memory.device_bytes)}: {fits} ({step}; predicted)",
        ),
        *(("not there", f"{entry.name}: {entry.why_not}") for entry in plan.candidates if entry.why_not),
        *(("note", note) for note in plan.notes),
    ]
    print_rows(console, rows)


def _print_roles(console: Console, plan: TrainingPlan) -> None:
    """One line per role and choice."""
    table = new_table(
        ("products", False),
        ("under", False),
        ("layers", True),
        ("largest\nerror", True),
        ("of inputs\n0 in fp8", True),
        ("of gradients\n0 in fp16", True),
        ("why", False),
    )
    groups: dict[tuple[str, str], list[TrainingSite]] = {}
    for site in plan.products:
        groups.setdefault((site.role, site.choice), []).append(site)
    roles = list(dict.fromkeys(role for role, _ in groups))
    for (role, choice), members in sorted(groups.items(), key=lambda item: roles.index(item[0][0])):
        table.add_row(
            Text(role),
            Text(choice),
            str(len(members)),
            _largest_error(members, choice),
            spell_share(_largest_share(members, "x", "fp8_e4m3")),
            spell_share(_largest_share(members, "g", "fp16")),
            Text(Counter(site.reason for site in members).most_common(1)[0][0]),
        )
    print_table(console, table)
    console.print(
        Text(
            "Errors are relative, of the worst layer and product: nine of ten outputs stay within; shares likewise.",
            style="dim",
        )
    )


def _print_products(console: Console, plan: TrainingPlan) -> None:
    """One line per product."""
    table = new_table(
        ("product", False),
        ("under", False),
        ("y", True),
        ("dx", True),
        ("dW", True),
        ("largest\nx", True),
        ("largest\ng", True),
        ("why", False),
    )
    for site in plan.products:
        found = next((entry for entry in site.errors if entry.recipe == site.choice), None)
        errors = ("–",) * 3 if found is None else tuple(f"{e:.2%}" for e in (found.forward, found.dgrad, found.wgrad))
        amax = {entry.operand: entry.amax for entry in site.ranges}
        table.add_row(
            Text(site.name), Text(site.choice), *errors, f"{amax['x']:.3g}", f"{amax['g']:.3g}", Text(site.reason)
        )
    print_table(console, table)


def _largest_error(members: Sequence[TrainingSite], choice: str) -> str:
    found = [entry.largest for site in members for entry in site.errors if entry.recipe == choice]
    return f"{max(found):.2%}" if found else "–"


def _largest_share(members: Sequence[TrainingSite], operand: str, number: str) -> float:
    return max(
        (e.flushed for site in members for e in site.ranges if e.operand == operand and e.format == number), default=0.0
    )
