"""``bitwright optimize MODEL``: choose the precision of every site, prove it, write the plan folder and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bitwright.cli.evidence import print_evidence
from bitwright.cli.output import write_json
from bitwright.cli.progress import Bars
from bitwright.cli.table import new_console, print_groups, print_summary
from bitwright.cli.usage import split_names
from bitwright.plan import (
    REPORT_FILE,
    Budget,
    Plan,
    Workload,
    parse_bytes,
    parse_ratio,
    parse_seconds,
    raise_if_not_replaceable,
    settle_budget,
    write_plan,
)
from bitwright.report import raise_if_no_report_extra, render_report

_LIMITS = "Limits (any mix of them)"
_SERVING = "What it has to serve, and where"
_TEXT = "Text"
_CHOICES = "Choices"
_EVIDENCE = "More evidence (each takes time)"


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
    nominal_bits: Annotated[
        float | None, typer.Option(help="The same without scales, as other tools count.", rich_help_panel=_LIMITS)
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="All that must fit: weights, KV cache, activations, workspace. Needs --context.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    latency_sla: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time of one decode step, between two tokens of a sequence: 0.02 or 20ms.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    min_tokens_per_s: Annotated[
        float | None,
        typer.Option(help="Tokens that all sequences of the batch gain together per second.", rich_help_panel=_LIMITS),
    ] = None,
    prefill_sla: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time to read the prompts of the batch.", rich_help_panel=_LIMITS),
    ] = None,
    max_overflow_risk: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Values beyond a format's range, expected per million.", rich_help_panel=_LIMITS
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            metavar="memory|kl|latency",
            help="What is made small within the limits; follows from them if left out.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Device to plan for; default: this machine. See: bitwright hardware list.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    device_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A device of your own, as TOML.", rich_help_panel=_SERVING)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Engine whose rules hold: vllm, llama.cpp, …", rich_help_panel=_SERVING),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens kept per sequence: memory and times then count the KV cache, and its format is chosen too.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences served at once.", rich_help_panel=_SERVING)] = 1,
    schemes: Annotated[
        str | None,
        typer.Option(metavar="a,b,…", help="Schemes to choose from; see: bitwright schemes.", rich_help_panel=_CHOICES),
    ] = None,
    rounding: Annotated[
        str | None,
        typer.Option(metavar="a,b,…", help="Roundings to choose from: rtn, clip, gptq, …", rich_help_panel=_CHOICES),
    ] = None,
    transforms: Annotated[
        str | None,
        typer.Option(metavar="a,b,…", help="Transforms to choose from: none, awq, …", rich_help_panel=_CHOICES),
    ] = None,
    values: Annotated[
        str,
        typer.Option(
            metavar="auto|none|cache|all",
            help="Which values to round; auto is the KV cache under a --context.",
            rich_help_panel=_CHOICES,
        ),
    ] = "auto",
    effort: Annotated[
        str,
        typer.Option(
            metavar="default|high",
            help="high refines codes once every site has its scheme: minutes more.",
            rich_help_panel=_CHOICES,
        ),
    ] = "default",
    include_head: Annotated[
        bool, typer.Option("--include-head", help="Choose for embedding and output head too.", rich_help_panel=_CHOICES)
    ] = False,
    sites: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Names the sites of a model, as TOML.", rich_help_panel=_CHOICES),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            metavar="text|chat|embedding",
            help="text scores every token, chat the assistant's only, embedding compares vectors of texts.",
            rich_help_panel=_TEXT,
        ),
    ] = "text",
    calibration: Annotated[
        str,
        typer.Option(
            metavar="SRC", help="A .txt, .jsonl or .parquet file, docs, code, or self.", rich_help_panel=_TEXT
        ),
    ] = "docs",
    evaluation: Annotated[
        str, typer.Option(metavar="SRC", help="The same, for the proof.", rich_help_panel=_TEXT)
    ] = "docs",
    tokens: Annotated[int, typer.Option(min=1, help="Calibration tokens.", rich_help_panel=_TEXT)] = 4096,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.", rich_help_panel=_TEXT)] = 128,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto",
            help="Measure the whole front over quality, memory, latency and stability.",
            rich_help_panel=_EVIDENCE,
        ),
    ] = False,
    pareto_points: Annotated[
        int, typer.Option(min=2, max=100, help="Points of the front.", rich_help_panel=_EVIDENCE)
    ] = 12,
    robustness: Annotated[
        bool,
        typer.Option(
            "--robustness",
            help="Search again on other text and with another seed; measure at longer contexts.",
            rich_help_panel=_EVIDENCE,
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of everything that draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Plan folder; default: NAME-plan.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print plan.json on stdout and nothing else there.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled checkpoints, which can run code.")
    ] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither read nor keep statistics and scores.")] = False,
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="Keep statistics and codes on disk; the plan is the same.")
    ] = False,
    spool: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where --low-memory and --effort high keep them; default: the cache's disk."),
    ] = None,
) -> None:
    """Choose the precision of every layer within your limits, and prove the choice on held-out text.

    Exit code 3: a limit is missed; the best plan is written all the same and says by how much.
    """
    budget = Budget(
        max_kl=max_kl,
        max_ppl_increase=None if max_ppl_increase is None else parse_ratio(max_ppl_increase),
        max_memory_bytes=None if max_memory is None else parse_bytes(max_memory),
        effective_bits=effective_bits,
        nominal_bits=nominal_bits,
        device_memory_bytes=None if device_memory is None else parse_bytes(device_memory),
        latency_sla_s=None if latency_sla is None else parse_seconds(latency_sla),
        min_tokens_per_s=min_tokens_per_s,
        prefill_sla_s=None if prefill_sla is None else parse_seconds(prefill_sla),
        max_overflow_risk=max_overflow_risk,
    )
    workload = Workload(context=context, batch=batch)
    settle_budget(budget, objective, workload)
    folder = out if out is not None else default_folder(model)
    raise_if_not_replaceable(folder)
    raise_if_no_report_extra()
    options: dict[str, Any] = {} if not no_cache else {"cache": None}
    for name, kind, text in (
        ("schemes", "scheme", schemes),
        ("roundings", "rounding", rounding),
        ("transforms", "transform", transforms),
    ):
        if text is not None:
            options[name] = split_names(text, kind)
    if pareto:
        options["pareto_points"] = pareto_points
    # Heavy (torch): after everything that can be refused without it.
    from bitwright.quantize.backends.cpu.announce import announcing
    from bitwright.search.optimize import optimize

    with Bars() as bars, announcing(bars.waiting):
        plan: Plan = optimize(
            model,
            budget=budget,
            workload=workload,
            hardware=hardware,
            device_file=device_file,
            engine=engine,
            values=values,
            effort=effort,
            site_file=sites,
            robustness=robustness,
            low_memory=low_memory,
            spool=spool,
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
        print_evidence(console, plan)
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
