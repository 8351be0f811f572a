"""``bitwright verify PLAN --static PROMPTS``: do a plan's static scales fit these prompts, or those found on them?

Without a rule the plan's own scales are held against all prompts. With one, scales are found anew on three prompts of
four and held against the fourth, and a plan that has them is written.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from bitwright.cli.output import write_json
from bitwright.cli.progress import Bars
from bitwright.cli.table import new_console, new_table, print_rows, print_table
from bitwright.cli.usage import UsageMistake
from bitwright.errors import DataError
from bitwright.plan import Plan, raise_if_not_replaceable, write_plan
from bitwright.report.units import spell_count

if TYPE_CHECKING:
    from torch import Tensor

    from bitwright.inference.static.drift import StaticCheck

#: Every so many prompts one is held out.
_HELD_OUT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticRequest:
    """What was asked for.

    Raises:
        UsageMistake: a rule without a place for the plan, or the other way round.
    """

    #: A text file, or a built-in set.
    prompts: str
    model: str | None
    #: How scales are found; None: they are not.
    rule: str | None
    percentile: float
    #: Where the new plan goes.
    out: Path | None
    #: At most so many tokens; None: all.
    tokens: int | None

    def __post_init__(self) -> None:
        if (self.rule is None) != (self.out is None):
            raise UsageMistake(
                "scales that are found anew are written as a plan of their own: give both --rule and --out, or neither "
                "to look at those of the plan"
            )


def verify_static(plan: Plan, request: StaticRequest, json: bool) -> None:
    """Check, or find and check. Exit code 3: some scales do not fit."""
    if request.out is not None:
        raise_if_not_replaceable(request.out)
    from bitwright.inference.planned_model import open_model
    from bitwright.inference.static.calibration import calibrate_static
    from bitwright.inference.static.drift import check_static
    from bitwright.search.documents import raise_if_no_source

    raise_if_no_source(request.prompts)
    with Bars() as bars:
        with bars.waiting("loading the model"):
            loaded, sites = open_model(plan, request.model)
        prompts = list(_prompts(loaded, request))
        if request.rule is None:
            found_on, held_out = None, prompts
        else:
            found_on, held_out = _dealt(prompts, request.prompts)
            with bars.waiting("finding scales"):
                plan = calibrate_static(
                    plan, loaded, found_on, rule=request.rule, percentile=request.percentile, sites=sites
                )
        with bars.waiting("holding scales against prompts"):
            check = check_static(plan, loaded, held_out, prompts=found_on, sites=sites)
    if request.out is not None:
        write_plan(plan, request.out)
    if json:
        write_json(json_format.dumps(asdict(check), indent=2) + "\n")
    else:
        _print_check(new_console(), plan, request, check)
    if check.findings:
        raise typer.Exit(3)


def _prompts(loaded: Any, request: StaticRequest) -> Iterator[Tensor]:
    """Ids of all prompts, [1, T] each, none longer than the model's positions."""
    from bitwright.inference.generation.text_stream import encode_prompt
    from bitwright.search.documents import read_source

    left = request.tokens
    for document in read_source(request.prompts).documents:
        for part in encode_prompt(loaded.tokenizer, document.text).split(loaded.num_positions or 1 << 30, dim=1):
            if left is not None:
                part = part[:, :left]
                left -= part.shape[1]
            if part.shape[1]:
                yield part


def _dealt(prompts: list[Tensor], source: str) -> tuple[list[Tensor], list[Tensor]]:
    """Those to find scales on, and those held out."""
    if len(prompts) < _HELD_OUT:
        raise DataError(
            f"'{source}' has {spell_count(len(prompts), 'prompt')}, and every {_HELD_OUT}th is held out; give "
            f"{_HELD_OUT} or more"
        )
    held_out = prompts[_HELD_OUT - 1 :: _HELD_OUT]
    return [ids for place, ids in enumerate(prompts) if place % _HELD_OUT != _HELD_OUT - 1], held_out


def _print_check(console: Console, plan: Plan, request: StaticRequest, check: StaticCheck) -> None:
    rows = [("model", plan.model.name)]
    if request.rule is not None:
        rows.append(("scales", plan.notes[-1]))
    rows.append(
        ("held against", f"{spell_count(check.num_tokens, 'token')}, {spell_count(check.num_sites, 'static site')}")
    )
    if request.out is not None:
        rows += [("plan", str(request.out)), ("next", f"bitwright verify {request.out}")]
    print_rows(console, rows)
    if not check.findings:
        console.print(Text("every static scale fits these prompts", style="bold green"))
        return
    table = new_table(("site", False), ("does not fit", False), ("why", False))
    for finding in check.findings:
        table.add_row(Text(finding.site), Text(finding.what), Text(finding.sentence))
    print_table(console, table)
    num_sites = len({finding.site for finding in check.findings})
    console.print(Text(f"{num_sites} of {spell_count(check.num_sites, 'static site')} do not fit", style="red"))
