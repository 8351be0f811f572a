"""How fast `bitwright formats histogram` reads a checkpoint, and in how much memory.

    python benchmarks/histogram.py                  a GiB in fp32, then in bf16; benchmarks/results/histogram.json
    python benchmarks/histogram.py --folder /data   where the two files are made and removed

Each file is written, read once so that it lies in the page cache, and given to the command in a process of its own,
five times. The command says at what rate it read; beside that stand the whole process, with the interpreter's start and
all imports, and the largest memory that it held.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import load_average, machine, now, why_not_quiet
from rich.console import Console
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
RESULT_FILE = ROOT / "benchmarks" / "results" / "histogram.json"
GIB = 1 << 30
REPETITIONS = 5
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def write_checkpoint(path: Path, dtype: torch.dtype) -> None:
    """A GiB of Gaussian weights in tensors of 64 MiB."""
    columns = 4096
    rows = (64 << 20) // dtype.itemsize // columns
    draw = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{layer}.weight": (torch.randn(rows, columns, generator=draw) * 0.02).to(dtype) for layer in range(16)
    }
    save_file(tensors, path)


def read_once(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass


#: Runs the command, then tells its own largest memory: what the system tells of a child counts its parent's as well.
_COMMAND = """
import sys
from pathlib import Path
from bitwright.cli import main
code = main(sys.argv[1:])
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(peak, file=sys.stderr)
sys.exit(code)
"""


def run_command(path: Path) -> dict[str, float]:
    """One process: GiB/s that it says it read at, seconds of all of it, MiB that it held at most."""
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, "formats", "histogram", str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.perf_counter() - started_s
    rate = re.search(r"read at ([\d.]+) (\w+)/s", done.stderr)
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert rate is not None and peak is not None, done.stderr
    return {
        "read_gib_per_s": float(rate[1]) * _UNITS[rate[2]] / GIB,
        "process_s": seconds,
        "peak_mib": int(peak[1]) / 1024,
    }


def measure(folder: Path, console: Console) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        path = folder / f"{name}.safetensors"
        try:
            with console.status(f"a GiB of {name}"):
                write_checkpoint(path, dtype)
                read_once(path)
                run_command(path)  # compiles, if nothing did yet
                runs = [run_command(path) for _ in range(REPETITIONS)]
        finally:
            path.unlink(missing_ok=True)
        row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append({"dtype": name, **row, "runs": runs})
        console.print(
            f"{name}: read at {row['read_gib_per_s']:.2f} GiB/s, whole process {row['process_s']:.2f} s, "
            f"peak {row['peak_mib']:.0f} MiB"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of bitwright formats histogram.")
    parser.add_argument("--folder", type=Path, default=None, help="where a file of 1 GiB fits")
    arguments = parser.parse_args()
    console = Console()
    load = load_average()
    if disturbed := why_not_quiet(load):
        console.print(disturbed, style="yellow")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = measure(Path(folder), console)
    results = {
        "machine": machine(("torch", "numpy", "numba", "safetensors")),
        "measured": now(),
        "load_average_before": load,
        "wanted": {"read_gib_per_s": 1.0, "peak_mib": 300},
        "rows": rows,
    }
    RESULT_FILE.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"results  {RESULT_FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
