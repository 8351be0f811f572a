"""``bitwright optimize MODEL``: choose the precision of every site, prove it, write the plan folder and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bitwright.cli.output import write_json
from bitwright.cli.progress import Bars
from bitwright.cli.table import new_console, print_groups, print_summary
from bitwright.errors import SchemeError
from bitwright.plan import (
    REPORT_FILE,
    Budget,
    Plan,
    parse_bytes,
    parse_ratio,
    raise_if_not_replaceable,
    settle_budget,
    write_plan,
)
from bitwright.report import raise_if_no_report_extra, render_report

_LIMITS = "Limits"
_TEXT = "Text"
_CHOICES = "Choices"


def optimize_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face folder, a hub id, a .gguf file, 'demo' or 'demo-dithered'.",
            show_default=False,
        ),
    ],
    max_kl: Annotated[
        float | None,
        typer.Option(help="Mean KL(reference ‖ plan) in nats per token.", rich_help_panel=_LIMITS, show_default=False),
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(metavar="R", help="Increase of perplexity: 1% or 0.01.", rich_help_panel=_LIMITS),
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes of all weights: 90MiB, 1.5GB.", rich_help_panel=_LIMITS)
    ] = None,
    effective_bits: Annotated[
        float | None,
        typer.Option(help="Stored bits per decoder weight, scales included: 4.8.", rich_help_panel=_LIMITS),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(metavar="memory|kl", help="What is made small within the limits; follows from them if left out."),
    ] = None,
    schemes: Annotated[
        str | None,
        typer.Option(metavar="a,b,…", help="Schemes to choose from; see: bitwright schemes.", rich_help_panel=_CHOICES),
    ] = None,
    include_head: Annotated[
        bool, typer.Option("--include-head", help="Choose for embedding and output head too.", rich_help_panel=_CHOICES)
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Device to plan for; default: this machine. See: bitwright hardware."),
    ] = None,
    task: Annotated[
        str, typer.Option(help="text scores every token, chat the assistant's only.", rich_help_panel=_TEXT)
    ] = "text",
    calibration: Annotated[
        str,
        typer.Option(metavar="SRC", help="A .txt, .jsonl or .parquet file, docs, or code.", rich_help_panel=_TEXT),
    ] = "docs",
    evaluation: Annotated[
        str, typer.Option(metavar="SRC", help="The same, for the proof.", rich_help_panel=_TEXT)
    ] = "docs",
    tokens: Annotated[int, typer.Option(min=1, help="Calibration tokens.", rich_help_panel=_TEXT)] = 4096,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.", rich_help_panel=_TEXT)] = 128,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of everything that draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Plan folder; default: NAME-plan.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print plan.json on stdout and nothing else there.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled checkpoints, which can run code.")
    ] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither read nor keep statistics and scores.")] = False,
) -> None:
    """Choose the precision of every layer within your limits, and prove the choice on held-out text.

    Exit code 3: a limit is missed; the best plan is written all the same and says by how much.
    """
    budget = Budget(
        max_kl=max_kl,
        max_ppl_increase=None if max_ppl_increase is None else parse_ratio(max_ppl_increase),
        max_memory_bytes=None if max_memory is None else parse_bytes(max_memory),
        effective_bits=effective_bits,
    )
    settle_budget(budget, objective)
    folder = out if out is not None else default_folder(model)
    raise_if_not_replaceable(folder)
    raise_if_no_report_extra()
    options: dict[str, Any] = {} if not no_cache else {"cache": None}
    if schemes is not None:
        names = [name.strip() for name in schemes.split(",") if name.strip()]
        if not names:
            raise SchemeError(f"--schemes {schemes!r} names no scheme; list them with: bitwright schemes")
        options["schemes"] = names
    # Heavy (torch): after everything that can be refused without it.
    from bitwright.quantize.backends.cpu.announce import announcing
    from bitwright.search.optimize import optimize

    with Bars() as bars, announcing(bars.waiting):
        plan: Plan = optimize(
            model,
            budget=budget,
            hardware=hardware,
            task=task,
            calibration=calibration,
            evaluation=evaluation,
            tokens=tokens,
            sequence_length=sequence_length,
            include_head=include_head,
            objective=objective,
            seed=seed,
            allow_pickle=allow_pickle,
            progress=bars,
            **options,
        )
        with bars.stage("report", 1) as stage:
            report = render_report(plan)
            stage.advance()
    written = write_plan(plan, folder, extra_files={REPORT_FILE: report})
    if json:
        write_json(plan.to_json())
    else:
        console = new_console()
        print_groups(console, plan)
        console.print()
        print_summary(console, plan)
    # Paths go last, unwrapped, so that they can be copied; with --json they stay off stdout.
    typer.echo(f"plan    {_shown(written)}\nreport  {_shown(written / REPORT_FILE)}", err=json)
    if not plan.met:
        raise typer.Exit(3)


def default_folder(model: str) -> Path:
    """Return where a plan for ``model`` goes: "org/name" and "…/name.gguf" give "name-plan" in the working folder."""
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else path.name
    return Path(f"{name.removesuffix('.gguf') or 'model'}-plan")


def _shown(path: Path) -> str:
    """Return ``path`` relative to the working folder where it lies in it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
