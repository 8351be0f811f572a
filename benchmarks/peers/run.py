"""bitwright beside NVIDIA ModelOpt and AutoRound: the same model, tokens, sites, schemes, ties and bits, one evaluator.

    python benchmarks/peers/run.py                                    every row of the built-in model
    python benchmarks/peers/run.py --model demo-dithered --rows 4.00 4.62 --tools bitwright autoround
    python benchmarks/peers/run.py --tables                           only print what is there

Weight-only {int4, int8}, symmetric, in groups of 128 along in_features (576 columns leave a last group of 64), decoder
linears only, q/k/v tied and gate/up tied. Bits are nominal, scales not counted, and counted by the evaluator. Each tool
runs in a process of its own, in an environment of its own; what comes back are the weights that it computes with, and
`evaluate.py` measures the mean token KL to the fp32 model, for all alike. Seconds run from before the model is read to
when the last weight has its codes.

A run that is done is kept and not done again (--fresh does), so a table may be filled in parts. Results go to
benchmarks/results/peers-<model>.json; what that file has of the same model and text, and this machine's cache has not,
stays there, with the date, commit and versions of its own run. Run it on an otherwise idle machine: each run files the
load that it began under.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tables
from environments import HERE, cache_folder, python_of

sys.path.insert(0, str(HERE.parent))
import machine

RESULTS = HERE.parent / "results"
_Run = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One way of quantising."""

    script: str
    #: Whose environment; None: bitwright's own.
    environment: str | None = None
    arguments: tuple[str, ...] = ()


TOOLS = {
    "modelopt": Tool(script="modelopt_peer.py", environment="modelopt"),
    "modelopt-awq": Tool(script="modelopt_peer.py", environment="modelopt", arguments=("--algorithm", "awq_lite")),
    "autoround": Tool(script="autoround_peer.py", environment="autoround"),
    "autoround-200": Tool(script="autoround_peer.py", environment="autoround", arguments=("--iters", "200")),
    "bitwright": Tool(script="ours.py"),
    "bitwright-clip": Tool(script="ours.py", arguments=("--roundings", "rtn", "clip")),
    "bitwright-gptq": Tool(script="ours.py", arguments=("--roundings", "gptq")),
    "bitwright-high": Tool(script="ours.py", arguments=("--effort", "high")),
    "bitwright-high-further": Tool(script="ours.py", arguments=("--effort", "high", "--further")),
    "bitwright-free": Tool(script="ours.py"),
}
#: What says nothing: the built-in model's weights lie on a grid of 4 bits, which a free choice of schemes finds.
MEANINGLESS = {("demo", "bitwright-free")}
#: Whose bits reached are the limit of bitwright's runs.
LEADERS = ("modelopt", "autoround")
#: Whose assignments are compared under the same roundings.
ALLOCATORS = (*LEADERS, "bitwright")
#: Runs whose weights lie on the disk at once; each takes as much room as the model.
_RUNS_AT_ONCE = 9
#: What every tool's assignment is rounded by, in turn.
SAME_ROUNDINGS = {"rtn + clip": ("rtn", "clip"), "gradient_aware": ("rtn", "gradient_aware")}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of bits."""

    bits: float
    group_size: int = 128
    #: The tools that run besides LEADERS and bitwright.
    also: tuple[str, ...] = ()

    @property
    def is_uniform(self) -> bool:
        """Whether one scheme makes up the row."""
        return self.bits in (4, 8)

    @property
    def tools(self) -> tuple[str, ...]:
        """In the order of TOOLS, in which a row is run."""
        wanted = {*ALLOCATORS, *self.also}
        return tuple(tool for tool in TOOLS if tool in wanted)


ROWS = {
    "4.00": Row(
        bits=4,
        also=(
            "modelopt-awq",
            "autoround-200",
            "bitwright-clip",
            "bitwright-gptq",
            "bitwright-high",
            "bitwright-high-further",
        ),
    ),
    "4.62": Row(bits=4.62, also=("autoround-200", "bitwright-high", "bitwright-free")),
    "4.80": Row(bits=4.8, also=("modelopt-awq",)),
    "5.31": Row(bits=5.31, also=("bitwright-high", "bitwright-high-further", "bitwright-free")),
    "5.50": Row(bits=5.5),
    "6.30": Row(bits=6.3, also=("bitwright-free",)),
    "6.50": Row(bits=6.5),
    "4.00 g64": Row(bits=4, group_size=64),
    "5.31 g64": Row(bits=5.31, group_size=64),
}
#: Rows of a model when none are named.
DEFAULT_ROWS = {
    "demo": tuple(ROWS),
    "demo-dithered": ("4.00", "4.62", "5.31", "6.30"),
    "demo-encoder": ("4.00", "4.62", "5.31"),
    "small-qwen2": ("4.00", "4.62", "5.31"),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one model's files lie."""

    model: str

    @property
    def folder(self) -> Path:
        return cache_folder() / "models" / self.model

    def run(self, row: str, tool: str) -> Path:
        return cache_folder() / "runs" / self.model / f"{row.replace(' ', '-')}_{tool}"

    def allocation(self, roundings: str, run: Path) -> Path:
        return cache_folder() / "runs" / self.model / f"under {roundings}".replace(" ", "-") / run.name


def prepare(place: Place) -> None:
    """Write model and tokens where they are missing."""
    if not (place.folder / "facts.json").exists():
        subprocess.run([sys.executable, HERE / "prepare.py", place.model, place.folder], check=True)


def quantize(place: Place, row_name: str, tool_name: str) -> None:
    """One run of one tool, and its evaluation."""
    row, tool, out = ROWS[row_name], TOOLS[tool_name], place.run(row_name, tool_name)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    load = machine.load_average()
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        print(f"{place.model}, {row_name}: {tool_name} …", file=sys.stderr)
        done = subprocess.run(
            [
                python_of(tool.environment), HERE / tool.script, place.folder, out, *_limit(place, row_name, tool_name),
                "--group-size", str(row.group_size), *tool.arguments,
            ],
            stdout=log, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    if done.returncode:
        print(f"  failed, and is left out: see {out / 'log.txt'}", file=sys.stderr)
        (out / "failed.json").write_text(json.dumps({"reason": _reason(out / "log.txt")}), encoding="utf-8")
        return
    evaluate(place, [out], row.group_size, {"load_average": load, "when": machine.now(), "commit": machine.commit()})


def _reason(log: Path) -> str:
    """The last error that a log tells, or its last line."""
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), "".join(lines[-1:]))


def _limit(place: Place, row_name: str, tool_name: str) -> list[str]:
    """The row's bits; for bitwright no more than the others reached, stored ones where its schemes are free."""
    bits = ROWS[row_name].bits
    if not tool_name.startswith("bitwright"):
        return ["--bits", str(bits)]
    reached = {
        leader: json.loads(path.read_text(encoding="utf-8"))
        for leader in LEADERS
        if (path := place.run(row_name, leader) / "evaluation.json").exists()
    }
    if tool_name == "bitwright-free":
        if not reached:
            raise SystemExit(
                f"bitwright-free needs the stored bits of {' or '.join(LEADERS)} at {row_name}: run it first"
            )
        return ["--free", str(min(found["stored_bits_with_fp16_scales"] for found in reached.values()))]
    return ["--bits", str(min([bits, *(found["nominal_bits"] for found in reached.values())]))]


def evaluate(place: Place, runs: list[Path], group_size: int, facts: dict[str, Any]) -> None:
    """Measure runs; their weights are not kept."""
    answer = subprocess.run(
        [sys.executable, HERE / "evaluate.py", place.folder, *runs, "--group-size", str(group_size)],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    for run, found in zip(runs, json.loads(answer.stdout), strict=True):
        (run / "evaluation.json").write_text(json.dumps({**found, **facts}, indent=1) + "\n", encoding="utf-8")
        (run / "weights.safetensors").unlink()


def allocate(place: Place, roundings: str, rows: list[str]) -> None:
    """Every tool's assignment under the same roundings; where all layers have the same bits there is none."""
    for group_size in sorted({ROWS[row].group_size for row in rows}):
        runs = [
            run
            for row in rows
            for tool in ALLOCATORS
            if ROWS[row].group_size == group_size and not ROWS[row].is_uniform
            if ((run := place.run(row, tool)) / "evaluation.json").exists()
            if not (place.allocation(roundings, run) / "evaluation.json").exists()
        ]
        for start in range(0, len(runs), _RUNS_AT_ONCE):
            some = runs[start : start + _RUNS_AT_ONCE]
            outs = [place.allocation(roundings, run) for run in some]
            print(f"{place.model}: {len(some)} assignments under {roundings} …", file=sys.stderr)
            subprocess.run(
                [
                    sys.executable, HERE / "allocation.py", place.folder, *some, "--out", outs[0].parent,
                    "--group-size", str(group_size), "--roundings", *SAME_ROUNDINGS[roundings],
                ],
                check=True,
            )  # fmt: skip
            evaluate(place, outs, group_size, {})


def collect(place: Place, filed: dict[str, Any] | None) -> dict[str, Any]:
    """All that is there of a model, for the result file: runs in the cache, then those that are only `filed`."""
    runs, failed = [], []
    for row_name, row in ROWS.items():
        for tool in row.tools:
            folder = place.run(row_name, tool)
            facts = {"row": row_name, "tool": tool, "group_size": row.group_size}
            if (folder / "evaluation.json").exists():
                runs.append({**facts, **_read(folder)})
            elif (folder / "failed.json").exists():
                failed.append({**facts, **json.loads((folder / "failed.json").read_text(encoding="utf-8"))})
    facts = json.loads((place.folder / "facts.json").read_text(encoding="utf-8"))
    alike = {
        roundings: [
            {"row": run["row"], "tool": run["tool"], **_read(folder)}
            for run in runs
            if (
                (folder := place.allocation(roundings, place.run(run["row"], run["tool"]))) / "evaluation.json"
            ).exists()
        ]
        for roundings in SAME_ROUNDINGS
    }
    if filed is not None and filed["facts"] == facts:
        done = [*runs, *failed]
        runs, failed = _with_older(runs, filed["runs"], done), _with_older(failed, filed["failed"], done)
        alike = {name: _with_older(new, filed["same_rounding"].get(name, []), new) for name, new in alike.items()}
    return {
        "machine": machine.machine(["torch", "transformers"]),
        "facts": facts,
        "what": " ".join(__doc__.split("\n\n")[2].split()),
        "runs": runs,
        "failed": failed,
        "same_rounding": alike,
    }


def _with_older(new: list[_Run], older: list[_Run], done: list[_Run]) -> list[_Run]:
    """`new`, and of `older` what is not `done` again, in the order of ROWS and TOOLS."""
    again = {(run["row"], run["tool"]) for run in done}
    together = [*new, *(run for run in older if (run["row"], run["tool"]) not in again)]
    rows, tools = list(ROWS), list(TOOLS)
    return sorted(together, key=lambda run: (rows.index(run["row"]), tools.index(run["tool"])))


def _read(folder: Path) -> dict[str, Any]:
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    bits = result.pop("bits")
    counts = {f"{b:g}": sum(value == b for value in bits.values()) for b in sorted(set(bits.values()))}
    return {**evaluation, **result, "layers_per_bits": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DEFAULT_ROWS, default="demo")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="all that the model has unless named")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--fresh", action="store_true", help="do again what is done")
    parser.add_argument("--no-allocation", action="store_true", help="leave out the tables of equal rounding")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    place, rows = Place(model=arguments.model), arguments.rows or list(DEFAULT_ROWS[arguments.model])
    if not arguments.tables:
        prepare(place)
        for row_name in rows:
            for tool_name in ROWS[row_name].tools:
                done = (place.run(row_name, tool_name) / "evaluation.json").exists()
                if (place.model, tool_name) in MEANINGLESS:
                    continue
                if tool_name in arguments.tools and (arguments.fresh or not done):
                    quantize(place, row_name, tool_name)
        if not arguments.no_allocation:
            for roundings in SAME_ROUNDINGS:
                allocate(place, roundings, rows)
    path = RESULTS / f"peers-{place.model}.json"
    found = collect(place, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(tables.render(found))


if __name__ == "__main__":
    main()
