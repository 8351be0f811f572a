"""Tables of what is measured beside other tools, and of how a search grows: peers-*.json and scale.json.

Files are filled in parts (`benchmarks/peers/run.py` and `benchmarks/scale.py` file each run as it ends), so that any
file, row or key can be missing still: a table shows what is there, and names the command where nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from measured import RESULTS, filed, markdown_table, missing, result

_NO_CELL = "–"
_Run = Mapping[str, Any]


def allocation_table(model: str) -> str:
    """KL of each tool's assignment, all rounded alike."""
    results = result(f"peers-{model}.json")
    alike = {} if results is None else {name: runs for name, runs in results.get("same_rounding", {}).items() if runs}
    if results is None or not alike:
        return missing(f"benchmarks/peers/run.py --model {model}")
    tables = [f"All rounded by `{name}`:\n\n{_grid(runs, _kl)}" for name, runs in alike.items()]
    return filed("\n\n".join(tables), results, f"peers-{model}.json")


def seconds_table(model: str) -> str:
    """Processor seconds and wall seconds of each run, from before loading to the last code."""
    results = result(f"peers-{model}.json")
    timed = [] if results is None else [run for run in results["runs"] if "cpu_s" in run.get("times", {})]
    if results is None or not timed:
        return missing(f"benchmarks/peers/run.py --model {model}")
    return filed(_grid(timed, _seconds), results, f"peers-{model}.json")


def stored_table(model: str) -> str:
    """All of bitwright's schemes free, within the stored bits of another tool's run."""
    results = result(f"peers-{model}.json")
    runs = [] if results is None else results["runs"]
    found = {(run["row"], run["tool"]): run for run in runs}
    rows = []
    for (row, tool), free in sorted(found.items()):
        other = found.get((row, "autoround"))
        if tool != "bitwright-free" or other is None:
            continue
        share = f"{free['kl'] / other['kl']:.2f}"
        rows.append((row, _stored(other), _kl(other), _stored(free), _kl(free), share))
    if results is None or not rows:
        return missing(f"benchmarks/peers/run.py --model {model} --tools autoround bitwright-free")
    titles = ("bits", "autoround stores:", "KL:", "bitwright-free stores:", "KL:", "share of autoround's KL:")
    return filed(markdown_table(titles, rows), results, f"peers-{model}.json")


def scale_table() -> str:
    """Peak memory and processor time over parameters, and over tokens, with the straight lines through them."""
    results = result("scale.json")
    if results is None or not (results.get("sizes") or results.get("tokens")):
        return missing("benchmarks/scale.py all")
    parts = []
    for part, key, title in (
        ("sizes", "parameters", "parameters:"),
        ("tokens", "calibration_tokens", "calibration tokens:"),
    ):
        points = sorted(results.get(part, {}).values(), key=lambda point: point[key])
        rows = [
            (f"{point[key]:,}", f"{point['peak_memory_gib']:.1f}", f"{point['processor_s'] / 60:.1f}")
            for point in points
            if "processor_s" in point
        ]
        if rows:
            parts.append(markdown_table((title, "peak memory, GiB:", "processor minutes:"), rows))
    parts += [_lines(results["lines"])] if results.get("lines") else []
    parts += [f"Each point is one whole search: {results['what']}."] if results.get("what") else []
    drawn = RESULTS / "scale.svg"
    parts += [f"![growth](../benchmarks/results/{drawn.name})"] if drawn.exists() else []
    return filed("\n\n".join(part for part in parts if part), results, "scale.json")


def _lines(lines: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        (name, f"{line['at_zero']:.2f}", f"{line['slope']:.2f}", f"{line['r_squared']:.4f}")
        for name, line in lines.items()
    ]
    return markdown_table(("straight line", "at 0:", "slope:", "R²:"), rows)


def _grid(runs: Sequence[_Run], cell: Callable[[_Run], str]) -> str:
    """Rows of bits against tools."""
    rows, tools = (list(dict.fromkeys(run[key] for run in runs)) for key in ("row", "tool"))
    cells = {(run["row"], run["tool"]): cell(run) for run in runs}
    lines = [(row, *(cells.get((row, tool), _NO_CELL) for tool in tools)) for row in sorted(rows)]
    return markdown_table(("bits", *(f"{tool}:" for tool in tools)), lines)


def _kl(run: _Run) -> str:
    return f"{run['kl']:.3g}"


def _stored(run: _Run) -> str:
    """Bits a weight with all scales, as the tool counts them, else with scales in fp16."""
    return f"{run.get('notes', {}).get('stored_bits') or run['stored_bits_with_fp16_scales']:.3f}"


def _seconds(run: _Run) -> str:
    times = run["times"]
    threads = times.get("threads", run.get("threads"))
    return f"{times['cpu_s']:.0f} ({times['wall_s']:.0f}{', one thread' if threads == 1 else ''})"
