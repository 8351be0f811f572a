"""``bitwright hardware profile``: measure this machine, and write it as a device file.

The file goes to stdout unless `--out` names one; progress goes to stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bitwright import hardware
from bitwright.cli.progress import Bars
from bitwright.cli.usage import UsageMistake
from bitwright.quantize.packed_products import PackedWeights


def profile_command(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="A new .toml file to write; default: stdout.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="What to call the device.")] = "this-machine",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller measurements: seconds.")] = False,
) -> None:
    """Measure matrix products and memory bandwidth of this machine by format, and write a device file.

    `bitwright hardware show FILE` reads it.
    """
    _raise_if_not_writable(out)
    gpu, packed = hardware.profile.has_gpu(), PackedWeights()
    console = Console(stderr=True)
    num_jobs = len(hardware.profile.jobs(gpu=gpu, quick=quick, packed=packed))
    with Bars(console) as bars, bars.stage("measure", num_jobs) as stage:

        def show(figure: str) -> None:
            stage.advance()
            console.print(figure, markup=False, highlight=False)

        profile = hardware.profile.measure(name=name, quick=quick, packed=packed, on_done=show)
    for sign in profile.disturbances:
        console.print(f"other work disturbs these figures: {sign}", markup=False, highlight=False)
    text = hardware.write_device_text(profile.device)
    if out is None:
        sys.stdout.write(text)
        return
    out.write_text(text, encoding="utf-8")
    console.print(f"wrote {out}; see it with: bitwright hardware show {out}", markup=False, highlight=False)


def _raise_if_not_writable(out: Path | None) -> None:
    """Measuring takes a while: what can be refused is refused before."""
    if out is None:
        return
    if out.suffix != ".toml":
        raise UsageMistake(f"--out is '{out}', but a device file ends in .toml; name one that does")
    if out.exists():
        raise UsageMistake(f"'{out}' exists, and a profile replaces nothing; give another name or remove it")
    if not out.absolute().parent.is_dir():
        raise UsageMistake(f"the folder of '{out}' does not exist; make it first")
