"""``bitwright comm fit``: measured collectives → a topology file, with what it leaves unexplained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bitwright.cli.usage import UsageMistake, raise_if_there
from bitwright.comms.bench_file import fit_bench_files
from bitwright.comms.fit import Fit
from bitwright.comms.topology_file import write_topology_text
from bitwright.report.units import spell_bytes, spell_percent, spell_seconds


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
    found = fit_bench_files(bench, name, dtype)
    console = Console(stderr=True)
    _print(console, found, residuals)
    text = write_topology_text(found.topology)
    if out is None:
        sys.stdout.write(text)
        return
    out.write_text(text, encoding="utf-8")
    console.print(f"wrote {out}; use it with: --cluster {out}", markup=False, highlight=False)


def _print(console: Console, found: Fit, with_rows: bool) -> None:
    groups: dict[tuple[str, str], list[float]] = {}
    for row, error in found.residuals:
        groups.setdefault((row.op, row.algorithm or ""), []).append(error)
        if with_rows:
            console.print(
                f"{row.op} {row.algorithm} {spell_bytes(row.num_bytes)}: measured {spell_seconds(row.time_s)}, model "
                f"{spell_percent(error, signed=True)}",
                markup=False,
                highlight=False,
            )
    for (op, algorithm), errors in groups.items():
        mean = sum(map(abs, errors)) / len(errors)
        worst = max(errors, key=abs)
        console.print(
            f"{op} by {algorithm}: {len(errors)} sizes, mean error {spell_percent(mean)}, worst "
            f"{spell_percent(worst, signed=True)}",
            markup=False,
            highlight=False,
        )
    for note in found.topology.notes[1:]:
        console.print(f"note: {note}", markup=False, highlight=False)
