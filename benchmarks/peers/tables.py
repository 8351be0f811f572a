"""The tables of a result file, in Markdown."""

from __future__ import annotations

import math
from typing import Any


def render(found: dict[str, Any]) -> str:
    """KL at equal bits, allocation alone, and time."""
    parts = [
        f"### {found['facts']['model']}: {found['facts']['what']}",
        _grid("Mean token KL to the fp32 model (nominal bits reached)", found["runs"], _kl),
        _ratios(found["runs"]),
        *(
            _grid(f"The same assignments, all rounded by {roundings}", runs, _kl)
            for roundings, runs in found["same_rounding"].items()
            if runs
        ),
        _grid("CPU seconds (wall seconds), from before loading to the last code", found["runs"], _seconds),
        _free(found["runs"]),
        _grid("Peak memory, GiB", found["runs"], lambda run: f"{run['times']['peak_memory_gib']:.1f}"),
    ]
    failed = [f"{run['tool']} at {run['row']}: {run['reason']}" for run in found["failed"]]
    return "\n\n".join([part for part in parts if part] + failed)


def _free(runs: list[dict[str, Any]]) -> str:
    """Everything free at the same stored bits."""
    rows = [run["row"] for run in runs if run["tool"] == "bitwright-free"]
    there = [run for run in runs if run["row"] in rows and run["tool"] in ("autoround", "bitwright-free")]
    if not rows:
        return ""
    return _grid("Mean token KL (stored bits, scales counted), all of bitwright's schemes free", there, _stored)


def _stored(run: dict[str, Any]) -> str:
    bits = run["notes"].get("stored_bits", run["stored_bits_with_fp16_scales"])
    return f"{_digits(run['kl'])} ({bits:.3f})"


def _digits(value: float) -> str:
    """Three of them."""
    return f"{value:.3g}" if value < 0.001 else f"{value:.{2 - math.floor(math.log10(value))}f}"


def _ratios(runs: list[dict[str, Any]]) -> str:
    """bitwright's KL as a share of each other tool's at the same row."""
    ours = {run["row"]: run["kl"] for run in runs if run["tool"] == "bitwright"}
    others = [run for run in runs if run["row"] in ours and run["tool"] != "bitwright"]
    if not others:
        return ""
    return _grid("bitwright's KL as a share of the others'", others, lambda run: f"{ours[run['row']] / run['kl']:.2f}")


def _kl(run: dict[str, Any]) -> str:
    return f"{_digits(run['kl'])} ({run['nominal_bits']:.3f})"


def _seconds(run: dict[str, Any]) -> str:
    alone = ", one thread" if run["times"].get("threads") == 1 else ""
    return f"{run['times']['cpu_s']:.0f} ({run['times']['wall_s']:.0f}{alone})"


def _grid(title: str, runs: list[dict[str, Any]], cell: Any) -> str:
    """Rows of bits against tools."""
    rows = list(dict.fromkeys(run["row"] for run in runs))
    tools = list(dict.fromkeys(run["tool"] for run in runs))
    cells = {(run["row"], run["tool"]): cell(run) for run in runs}
    lines = [
        f"| bits | {' | '.join(tools)} |",
        f"| --- |{' --- |' * len(tools)}",
        *(f"| {row} | {' | '.join(cells.get((row, tool), '–') for tool in tools)} |" for row in rows),
    ]
    return f"**{title}**\n\n" + "\n".join(lines)
