"""``bitwright import CHECKPOINT --reference MODEL``: somebody else's quantised checkpoint as a plan."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from bitwright.cli.optimize import default_folder
from bitwright.cli.progress import Bars
from bitwright.cli.table import least_rows, new_console, new_table, print_rows, print_table
from bitwright.plan import Plan, raise_if_not_replaceable, write_plan
from bitwright.report.units import spell_bytes, spell_count

if TYPE_CHECKING:
    from bitwright.export.importer import Found

#: Reasons that are printed of what was left out.
_SHOWN_REASONS = 5


def import_command(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", help="A quantised model folder, or a .gguf file.", show_default=False),
    ],
    reference: Annotated[
        str,
        typer.Option(
            metavar="MODEL", help="The unquantised model: a folder, a hub id, a .gguf file, demo.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Plan folder; default: CHECKPOINT-plan.", show_default=False)
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Leave what no plan can express as the reference has it.")
    ] = False,
    evaluation: Annotated[str, typer.Option(metavar="SRC", help="Text that the plan is to be proved on.")] = "docs",
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Tokens of that text, and never fewer than 64 sequences, which are the default.",
            show_default=False,
        ),
    ] = None,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="Of how the text is dealt.")] = 0,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load a pickled reference, which can run code.")
    ] = False,
) -> None:
    """Turn a checkpoint that was quantised elsewhere into a plan, with its codes and scales exactly.

    Reads compressed-tensors, AWQ, GPTQ, FP8, ModelOpt and GGUF. The plan is one for the unquantised model: verify,
    compare and show take it as any other.
    """
    folder = default_folder(str(checkpoint)) if out is None else out
    raise_if_not_replaceable(folder)
    # Heavy (torch): after everything that can be refused without it.
    from bitwright.export.imported_plan import ProofText, plan_of
    from bitwright.export.importer import look, raise_if_refused, recognise, without_refused
    from bitwright.models.load import load
    from bitwright.search.documents import raise_if_no_source

    recognise(checkpoint)
    raise_if_no_source(evaluation)
    with Bars() as bars:
        with bars.stage("load the reference", 1) as stage:
            loaded = load(reference, allow_pickle=allow_pickle)
            stage.advance()
        with bars.stage("read the checkpoint", 1) as stage:
            found = look(checkpoint, loaded)
            stage.advance()
        if not partial:
            raise_if_refused(found)
        whole = without_refused(found)
        text = ProofText(evaluation=evaluation, evaluation_tokens=tokens, sequence_length=sequence_length, seed=seed)
        plan = plan_of(whole, loaded, text, reference_path=reference, progress=bars)
    write_plan(plan, folder)
    _print_found(new_console(), found, plan, folder, tokens)


def _print_found(console: Console, found: Found, plan: Plan, out: Path, tokens: int | None) -> None:
    """What was found, by scheme; what was left out; what to do next."""
    table = new_table(("in the checkpoint", False), ("scheme", False), ("sites", True), ("bits", True), ("size", True))
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    weights: Counter[tuple[str, str]] = Counter()
    for choice in plan.sites:
        key = (choice.reason.removeprefix("in the checkpoint").removeprefix(":").strip(), choice.scheme)
        counts[key] += 1
        sizes[key] += choice.bytes
        weights[key] += choice.shape[0] * choice.shape[1]
    for (words, scheme), count in counts.items():
        size = sizes[words, scheme]
        table.add_row(
            Text(words), Text(scheme), str(count), f"{8 * size / weights[words, scheme]:.2f}", spell_bytes(size)
        )
    print_table(console, table)
    console.print()
    print_rows(
        console,
        [
            ("checkpoint", f"{found.path} ({found.kind})"),
            ("reference", f"{plan.model.name}, {plan.model.params:,} parameters"),
            ("bits", f"{plan.summary.effective_bits:.2f} per decoder weight, scales included"),
            ("size", spell_bytes(plan.summary.weight_bytes)),
            ("text", f"{plan.evaluation.source}, {spell_count(plan.evaluation.sequences, 'sequence')}"),
            *least_rows(tokens, plan.evaluation.sequences, plan),
            *(("note", note) for note in plan.notes),
            *(("left out", f"{name}: {why}") for name, why in list(found.refused.items())[:_SHOWN_REASONS]),
            ("plan", str(out)),
            ("next", f"bitwright verify {out}"),
        ],
    )
