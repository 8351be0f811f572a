"""``bitwright comm fit``: measured collectives → a topology file, with what it leaves unexplained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bitwright.cli.usage import UsageMistake, raise_if_there
from bitwright.comms.bench_file import fit_bench_files
from bitwright.comms.fit import Fit, Timed
from bitwright.comms.sizes import spell_count
from bitwright.comms.topology_file import write_topology_text
from bitwright.report.units import spell_bytes, spell_percent, spell_seconds

#: Mean error of a curve from which on it is no description of what was measured.
_LARGE_ERROR = 0.15


def fit_command(
    bench: Annotated[
        list[Path],
        typer.Argument(metavar="BENCH…", help="Files of `comm bench --out`: innermost level first, one for each."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="A new .toml file to write; default: stdout.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="What to call the topology.")] = "this-cluster",
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose times are fitted, where files have several types.")
    ] = None,
    residuals: Annotated[bool, typer.Option("--residuals", help="Show every row beside its prediction.")] = False,
) -> None:
    """Fit latency, bandwidth and half size of every collective and algorithm to what was measured.

    Two files make two levels: a run inside one node first, then a run with one rank on each node.
    """
    if out is not None and out.suffix != ".toml":
        raise UsageMistake(f"--out is '{out}', but a topology file ends in .toml; name one that does")
    if out is not None:
        raise_if_there(out)
        if not out.absolute().parent.is_dir():
            raise UsageMistake(f"the folder of '{out}' does not exist; make it first")
    found = fit_bench_files(bench, name, dtype)
    console = Console(stderr=True)
    _print(console, found, residuals)
    text = write_topology_text(found.topology)
    if out is None:
        sys.stdout.write(text)
        return
    out.write_text(text, encoding="utf-8")
    console.print(f"wrote {out}; use it with: --cluster-file {out}", markup=False, highlight=False)


def _print(console: Console, found: Fit, with_rows: bool) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    curves = list(_by_curve(found))
    if with_rows:
        for where, rows in curves:
            for row, error in rows:
                say(
                    f"{where}{row.op} {row.algorithm} {spell_bytes(row.num_bytes)}: measured "
                    f"{spell_seconds(row.time_s)}, model {spell_percent(error, signed=True)}"
                )
    warnings = []
    for where, rows in curves:
        name = f"{where}{rows[0][0].op} by {rows[0][0].algorithm}"
        mean = sum(abs(error) for _, error in rows) / len(rows)
        worst = max((error for _, error in rows), key=abs)
        sizes = spell_count(len({row.num_bytes for row, _ in rows}), "size")
        say(f"{name}: {sizes}, mean error {spell_percent(mean)}, worst {spell_percent(worst, signed=True)}")
        if mean > _LARGE_ERROR:
            warnings.append(
                f"{name} is off by more than {spell_percent(_LARGE_ERROR)} on average; measure it again, with nothing "
                "else running"
            )
    for warning in warnings:
        say(f"warning: {warning}")
    for note in found.topology.notes[1:]:
        say(f"note: {note}")


def _by_curve(found: Fit) -> Iterator[tuple[str, list[tuple[Timed, float]]]]:
    """(level, where there are several; rows with their errors) of each curve: residuals stand in the curves' order."""
    rows = iter(found.residuals)
    levels = found.topology.levels
    for level in levels:
        for curve in level.curves:
            yield f"{level.kind}: " if len(levels) > 1 else "", list(islice(rows, len(curve.residuals)))
