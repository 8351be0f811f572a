"""``bitwright compare PLAN PLAN``: where two plans differ, and whether their quality differs beyond the noise."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bitwright.cli.output import write_json
from bitwright.cli.progress import Bars
from bitwright.cli.table import least_rows, new_console, new_table, print_rows, print_table
from bitwright.plan import PlanComparison, diff_sites, load_plan
from bitwright.plan.canonical import canonical_json
from bitwright.report.comparison_words import say_comparison, spell_signed
from bitwright.report.units import spell_bytes, spell_count, spell_interval, spell_seconds


def compare_command(
    first: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan folder.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="PLAN", help="The one held against it.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model, where it no longer lies where it was planned.")
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="SRC", help="Other text; default: the first plan's own evaluation text.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to measure on; never fewer than 64 sequences.", show_default=False)
    ] = None,
    sites: Annotated[bool, typer.Option("--sites", help="One line per site that differs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON and nothing else.")] = False,
) -> None:
    """Diff two plans of one model site by site, and test whether their quality differs beyond the noise.

    Both are measured on the same text. Exit code 3: the second plan is worse beyond the noise.
    """
    plans = [load_plan(first), load_plan(second)]
    diff_sites(*plans)
    # Heavy (torch): after everything that can be refused without it.
    from bitwright.quantize.backends.cpu.announce import announcing
    from bitwright.search.compare_plans import compare_plans

    with Bars() as bars, announcing(bars.waiting):
        found: PlanComparison = compare_plans(
            plans[0], plans[1], model=model, evaluation=evaluation, tokens=tokens, progress=bars
        )
    if json:
        write_json(canonical_json(found.model_dump(mode="json")))
    else:
        console = new_console()
        _print_differences(console, found, one_line_each=sites)
        console.print()
        _print_measurements(console, found, first, second)
        print_rows(console, least_rows(tokens, found.sequences, plans[0]))
    if found.verdict == "worse":
        raise typer.Exit(3)


def _print_differences(console: Console, found: PlanComparison, *, one_line_each: bool) -> None:
    """Sites that differ, by role and pair of choices or one by one."""
    if not found.sites:
        console.print(f"no difference: {spell_count(found.num_sites, 'site')} under the same choice")
        return
    table = new_table(
        ("site" if one_line_each else "site group", False),
        ("first", False),
        ("second", False),
        *(() if one_line_each else (("sites", True),)),
        ("size", True),
    )
    if one_line_each:
        for site in found.sites:
            table.add_row(Text(site.name), site.first or "–", site.second or "–", _signed_bytes(site.bytes))
    else:
        counts = Counter((site.role, site.first or "–", site.second or "–") for site in found.sites)
        sizes: Counter[tuple[str, str, str]] = Counter()
        for site in found.sites:
            sizes[site.role, site.first or "–", site.second or "–"] += site.bytes
        for key, count in counts.items():
            table.add_row(Text(key[0]), Text(key[1]), Text(key[2]), str(count), _signed_bytes(sizes[key]))
    print_table(console, table)
    console.print(Text(f"{len(found.sites)} of {spell_count(found.num_sites, 'site')} differ", style="dim"))


def _print_measurements(console: Console, found: PlanComparison, first: Path, second: Path) -> None:
    rows = []
    for name, path, num_bytes, kl, decode_s in (
        ("first", first, found.first_bytes, found.first_kl, found.first_decode_s),
        ("second", second, found.second_bytes, found.second_kl, found.second_decode_s),
    ):
        time = "" if decode_s is None else f", {spell_seconds(decode_s)} a token (predicted)"
        rows.append((name, f"{path}: KL {spell_interval(kl)}, {spell_bytes(num_bytes)}{time}"))
    rows.append(("difference", f"KL {spell_signed(found.difference)}, second less first"))
    rows.append(
        ("measured on", f"{found.source}, {spell_count(found.sequences, 'sequence')}, both the same; 95 % intervals")
    )
    print_rows(console, rows)
    style = {"better": "bold green", "within the noise": "bold", "worse": "bold red"}[found.verdict]
    console.print(Text(say_comparison(found), style=style))


def _signed_bytes(num_bytes: int) -> str:
    return "0" if num_bytes == 0 else f"{'+' if num_bytes > 0 else '−'}{spell_bytes(abs(num_bytes))}"
