"""``bitwright run PLAN --prompt "…"``: go on with a text, with the model as a plan has it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from bitwright.cli.progress import Bars
from bitwright.errors import DataError
from bitwright.plan import Plan, load_plan
from bitwright.report.units import spell_bytes, spell_count, spell_number

if TYPE_CHECKING:
    from bitwright.inference.generation.generate import Generated

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan folder.", show_default=False)]
ModelOption = Annotated[
    str | None, typer.Option(metavar="MODEL", help="The model, where it no longer lies where it was planned.")
]
ModeOption = Annotated[
    str,
    typer.Option(
        metavar="auto|packed|native|emulate",
        help="Codes packed in memory, multiplied natively, or their exact fp32 values; auto: native, else packed.",
    ),
]
NewTokensOption = Annotated[int, typer.Option(min=1, help="Tokens to go on for at most.")]
TemperatureOption = Annotated[float, typer.Option(help="0 takes the likeliest token; 1 draws as predicted.")]
TopPOption = Annotated[float, typer.Option(metavar="P", help="Draw from the likeliest tokens that hold this share.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of the drawing.")]


def run_command(
    plan: PlanArgument,
    prompt: Annotated[str, typer.Option(help="Text to go on with.", show_default=False)],
    max_new_tokens: NewTokensOption = 64,
    mode: ModeOption = "auto",
    model: ModelOption = None,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    report: Annotated[bool, typer.Option("--report", help="Say what runs as what, and why.")] = False,
) -> None:
    """Go on with a prompt, with the model as the plan has it.

    The text goes to stdout as it comes, everything else to stderr.
    """
    if not prompt.strip():
        raise DataError(f"the prompt is {prompt!r}, and a model goes on with some text; write one")
    planned, tokenizer = open_planned(load_plan(plan), model, mode)
    from bitwright.inference.generation.generate import generate
    from bitwright.inference.generation.sampling import Sampling
    from bitwright.inference.generation.text_stream import TextStream, encode_prompt, stop_ids_of

    stream = TextStream(tokenizer, write_text)
    found = generate(
        planned,
        encode_prompt(tokenizer, prompt),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
        stop_ids=stop_ids_of(planned, tokenizer),
        on_tokens=lambda tokens: None if tokens[0] is None else stream.add(tokens[0]),
    )
    stream.end()
    write_text("\n")
    console = Console(stderr=True, highlight=False)
    console.print(say_speed(planned, found), markup=False)
    if report:
        console.print(planned.bitwright_run.table(), markup=False, soft_wrap=True)


def open_planned(plan: Plan, model: str | None, mode: str) -> tuple[Any, Any]:
    """The plan's model as the plan has it, and its tokenizer; says what takes time."""
    from bitwright.inference import apply
    from bitwright.inference.modes import find_mode
    from bitwright.inference.planned_model import open_model
    from bitwright.inference.static.origin import raise_if_stale
    from bitwright.quantize.backends.cpu.announce import announcing

    find_mode(mode)  # before anything is loaded
    raise_if_stale(plan)
    with Bars() as bars, announcing(bars.waiting):
        with bars.waiting("loading the model"):
            loaded, sites = open_model(plan, model)
        with bars.waiting("packing its weights"):
            planned = apply(plan, loaded, mode=mode, sites=sites)
    return planned, loaded.tokenizer


def write_text(text: str) -> None:
    """Write to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say_speed(planned: Any, found: Generated) -> str:
    """One line on a generation, and its notes."""
    tokens = sum(map(len, found.tokens))
    parts = [spell_count(tokens, "token")]
    if found.num_steps:
        parts.append(f"{spell_number(found.decode_tokens_per_s)} tokens/s")
    parts.append(f"weights {spell_bytes(planned.bitwright_run.weight_bytes)}")
    parts.append(f"cache {spell_bytes(found.cache_bytes)}")
    return "\n".join([", ".join(parts), *(f"note: {note}" for note in found.notes)])
