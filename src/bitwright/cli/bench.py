"""``bitwright bench PLAN``: how fast the model runs as a plan has it, beside the same model in bf16."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from bitwright.cli.output import write_json
from bitwright.cli.progress import Bars
from bitwright.cli.run_ import ModelOption, ModeOption, PlanArgument
from bitwright.cli.table import new_console, new_table, print_table
from bitwright.plan import load_plan
from bitwright.report.units import spell_bytes, spell_count, spell_number

if TYPE_CHECKING:
    from bitwright.inference.generation.speed import Speed


def bench_command(
    plan: PlanArgument,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each begins with.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each goes on for.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that count; medians are shown.")] = 3,
    mode: ModeOption = "auto",
    model: ModelOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON and nothing else.")] = False,
) -> None:
    """Measure prefill, decode and memory of the model as the plan has it, and of the same model in bf16.

    Both run in this process, in turn, on the same tokens.
    """
    loaded_plan = load_plan(plan)
    import torch

    from bitwright.inference import apply
    from bitwright.inference.generation.generate import raise_if_too_long
    from bitwright.inference.generation.speed import measure_speed
    from bitwright.inference.modes import find_mode
    from bitwright.inference.packed.model import plain_copy
    from bitwright.inference.planned_model import open_model
    from bitwright.quantize.backends.cpu.announce import announcing

    find_mode(mode)
    with Bars() as bars, announcing(bars.waiting):
        with bars.waiting("loading the model"):
            loaded, sites = open_model(loaded_plan, model)
        raise_if_too_long(loaded.model, prompt_tokens, new_tokens)
        with bars.waiting("packing its weights"):
            models: dict[str, Any] = {
                "plan": apply(loaded_plan, loaded, mode=mode, sites=sites),
                "bf16": plain_copy(loaded.model, torch.bfloat16),
            }
        del loaded
        with bars.stage("measure", (repeats + 1) * len(models)) as stage:
            found = measure_speed(
                models,
                batch=batch,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                repeats=repeats,
                advance=stage.advance,
            )
    if json:
        write_json(json_format.dumps({name: _facts(speed) for name, speed in found.items()}, indent=2) + "\n")
        return
    console = new_console()
    print_table(console, _table(found["plan"], found["bf16"]))
    rounds = "one round" if repeats == 1 else f"medians of {repeats} rounds"
    threads = spell_count(torch.get_num_threads(), "thread")
    where = f"{rounds}, {batch} x {prompt_tokens} + {new_tokens} tokens, {threads}"
    console.print(Text(where, style="dim"))
    console.print(models["plan"].bitwright_run.table(), markup=False, soft_wrap=True)


def _facts(speed: Speed) -> dict[str, float | None]:
    return {
        **asdict(speed),
        "prefill_tokens_per_s": speed.prefill_tokens_per_s,
        "decode_tokens_per_s": speed.decode_tokens_per_s,
    }


def _table(plan: Speed, bf16: Speed) -> Any:
    table = new_table(("", False), ("plan", True), ("bf16", True), ("plan / bf16", True))
    rows = (
        ("prefill, tokens/s", plan.prefill_tokens_per_s, bf16.prefill_tokens_per_s, spell_number),
        ("decode, tokens/s", plan.decode_tokens_per_s, bf16.decode_tokens_per_s, spell_number),
        ("weights", plan.weight_bytes, bf16.weight_bytes, spell_bytes),
        ("KV cache", plan.cache_bytes, bf16.cache_bytes, spell_bytes),
        ("peak memory", plan.peak_bytes, bf16.peak_bytes, spell_bytes),
    )
    for title, ours, theirs, spell in rows:
        if ours is None or theirs is None:
            table.add_row(Text(title), "not told", "not told", "–")
            continue
        table.add_row(Text(title), spell(ours), spell(theirs), f"{ours / theirs:.2f}" if theirs else "–")
    return table
