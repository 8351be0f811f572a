"""Quantising at the speed of memory: every verb against a memcpy of the same array, and against others' ways.

    python benchmarks/quantize.py                    everything, some twenty minutes; benchmarks/results/quantize.json
    python benchmarks/quantize.py --quick            small arrays, few repetitions: whether it runs; nothing is filed
    python benchmarks/quantize.py --only scaled      some groups, printed and not filed (--out FILE files them there)
    python benchmarks/quantize.py --markdown         the tables as Markdown; with --show those of the filed results

Groups: memcpy, elementwise, scaled, packing, amax, torch, ml_dtypes, gfloat, first_call.

The values are Gaussian, in runs of 64 under powers of two from 2^-6 to 2^6, one in a thousand fifty times as large;
bf16 values are the fp32 ones narrowed. Matrices of 8192 × 8192 (64 Mi) and of 1024 × 1024 (1 Mi, which the last cache
may hold: for the memcpy as well). Memcpy is torch's `copy_` into memory that is there, on all threads; it runs in turn
with what it is compared with (`timing`), and its time over ours is our share of its speed. Peers (`eager`,
`array_libraries`) run in turn with us too, allocating on both sides or on neither; which share of their values is equal
to ours, in a corner of the matrix, is stated as well (torch saturates E4M3 where we follow IEEE 754 and give NaN).

Needs the extra `tests` (ml_dtypes, gfloat) and an otherwise idle machine. Exit code: 0; 1 if anything failed (a missed
target is a result, no failure); 2 if there is nothing to show.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import array_libraries
import eager
import numpy as np
import torch
from machine import load_average, machine, now, why_not_quiet
from numba.core.errors import NumbaError
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rows import Row, as_record, from_record, markdown, spell_count, summary, table
from timing import Timing, in_turn
from torch import Tensor

from bitwright import formats
from bitwright.errors import BitwrightError
from bitwright.quantize import SCHEMES, TensorScheme, fake_quantize, pack, unpack
from bitwright.quantize.backends import cpu
from bitwright.quantize.pack import stored_dtype
from bitwright.quantize.select import select_packing, select_rounding, select_scaled

RESULT_FILE = Path(__file__).parent / "results" / "quantize.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ELEMENTWISE = (
    "bf16", "fp16", "tf32", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1",
)  # fmt: skip
SCALED = (
    "mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "int4_g128", "int4_g32", "int8_w", "fp8_w", "bfp8", "nf4_g64",
    "fp8_block",
)  # fmt: skip
PACKED = ("mxfp4", "int4_g128", "nvfp4", "mxfp6", "mxfp8", "int8_w")
#: Share of memcpy's speed that the project asks for.
SHARES = {"elementwise": 0.8, "scaled": 0.5, "packing": 0.5, "amax": 0.5}
#: How many times as fast as a peer. torch's casts of 16 bits are near the limit themselves.
TORCH_SPEEDUP, TORCH_16_BIT_SPEEDUP, ML_DTYPES_SPEEDUP, GFLOAT_SPEEDUP = 10.0, 1.5, 20.0, 100.0
#: Everything that is measured, and what it is called above its table.
GROUPS = {
    "memcpy": "memcpy and its like",
    "elementwise": "quantise–dequantise, numbers by themselves",
    "scaled": "quantise–dequantise, groups under a scale",
    "packing": "codes as bits, and back",
    "amax": "quantise under a known scale and find amax, in one read and one write",
    "torch": "against eager torch",
    "ml_dtypes": "against ml_dtypes",
    "gfloat": "against gfloat",
    "first_call": "first calls",
}
#: Where values are compared with those of peers: rows and columns that every scheme's groups divide.
_CORNER = (256, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How much is measured."""

    #: Rows (and columns) of the matrix: repetitions of us against memcpy, and against a peer.
    sides: dict[int, tuple[int, int]]
    #: Rows and columns of what gfloat quantises block by block.
    block_by_block: tuple[int, int]


FULL = Extent(sides={8192: (15, 9), 1024: (51, 15)}, block_by_block=(16, 1024))
QUICK = Extent(sides={1024: (3, 1), 256: (3, 1)}, block_by_block=(1, 1024))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Subject:
    """One matrix, memory for its values, and how often it is looked at."""

    dtype: str
    x: Tensor
    out: Tensor
    repetitions: int
    peer_repetitions: int
    extent: Extent

    @property
    def num_bytes(self) -> int:
        return self.x.numel() * self.x.element_size()

    @property
    def corner(self) -> Tensor:
        return self.x[: _CORNER[0], : _CORNER[1]].contiguous()

    def memcpy(self) -> object:
        return self.out.copy_(self.x)

    def row(self, group: str, what: str, timing: Timing, num_bytes: int | None, **more: Any) -> Row:
        gb_per_s = None if num_bytes is None else round(num_bytes / timing.median_ms / 1e6, 2)
        return Row(
            group=group, what=what, dtype=self.dtype, num_elements=self.x.numel(), gb_per_s=gb_per_s,
            ms=round(timing.median_ms, 4), min_ms=round(timing.min_ms, 4), max_ms=round(timing.max_ms, 4),
            repetitions=timing.repetitions, **more,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What gives some rows."""

    name: str
    run: Callable[[Subject], Iterator[Row]]


def values(side: int) -> Tensor:
    """The fp32 matrix [side, side] that everything runs on."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((side, side), generator=generator)
    exponents = torch.randint(-6, 7, (side, side // 64, 1), generator=generator)
    x.view(side, side // 64, 64).mul_(torch.exp2(exponents.float()))
    outliers = torch.randint(0, side * side, (side * side // 1000,), generator=generator)
    x.view(-1)[outliers] *= 50
    return x


# --- against memcpy ---------------------------------------------------------------------------------------------------


def against_memcpy(
    subject: Subject, group: str, what: str, call: Callable[[], object], num_bytes: int, *,
    target: float | None, allocates: bool = False, remark: str = "",
) -> Row:  # fmt: skip
    """A row of us in turn with memcpy, and with clone where the result is new memory."""
    calls: dict[str, Callable[[], object]] = {"memcpy": subject.memcpy, "ours": call}
    if allocates:
        calls["clone"] = subject.x.clone
    times = in_turn(calls, subject.repetitions)
    ours, memcpy_ms = times["ours"], times["memcpy"].median_ms
    clone_ratio = round(times["clone"].median_ms / ours.median_ms, 3) if allocates else None
    return subject.row(
        group, what, ours, num_bytes, against="memcpy", against_ms=round(memcpy_ms, 4),
        ratio=round(memcpy_ms / ours.median_ms, 3), target=target, clone_ratio=clone_ratio, remark=remark,
    )  # fmt: skip


def memcpys(subject: Subject) -> Iterator[Row]:
    source, target = array_libraries.to_numpy(subject.x), array_libraries.to_numpy(subject.out)
    calls = {
        "copy_ (memcpy)": subject.memcpy,
        "np.copyto, one thread": lambda: np.copyto(target, source),
        "clone, allocating": subject.x.clone,
    }
    times = in_turn(calls, subject.repetitions)
    memcpy_ms = times["copy_ (memcpy)"].median_ms
    for what, timing in times.items():
        ratio = round(memcpy_ms / timing.median_ms, 3)
        yield subject.row(
            "memcpy", what, timing, 2 * subject.num_bytes, against="memcpy", against_ms=memcpy_ms, ratio=ratio
        )


def elementwise(format: str) -> Case:
    scheme = TensorScheme(format=format)

    def run(subject: Subject) -> Iterator[Row]:
        x, out = subject.x, subject.out
        yield against_memcpy(
            subject, "elementwise", format, lambda: fake_quantize(x, scheme, out=out), 2 * subject.num_bytes,
            target=SHARES["elementwise"],
            remark=_unless_cpu(select_rounding(format, "cpu", x.dtype, overflow="ieee").backend),
        )  # fmt: skip

    return Case(name=format, run=run)


def scaled(name: str) -> Case:
    scheme = _weights(name)

    def run(subject: Subject) -> Iterator[Row]:
        x, out = subject.x, subject.out
        yield against_memcpy(
            subject, "scaled", name, lambda: fake_quantize(x, scheme, out=out), 2 * subject.num_bytes,
            target=SHARES["scaled"], remark=_unless_cpu(select_scaled(scheme, "cpu", x.dtype).backend),
        )  # fmt: skip

    return Case(name=name, run=run)


def packing(name: str) -> Case:
    scheme = _weights(name)
    bits = formats.get(scheme.format).bits

    def run(subject: Subject) -> Iterator[Row]:
        x, out = subject.x, subject.out
        packed = pack(x, scheme)
        num_bytes = subject.num_bytes + packed.nbytes
        remark = _unless_cpu(select_packing(scheme, "cpu", x.dtype).backend)
        what = f"{name}, {bits} bits"
        yield against_memcpy(
            subject, "packing", f"pack {what}", lambda: pack(x, scheme), num_bytes,
            target=SHARES["packing"], remark=remark,
        )  # fmt: skip
        yield against_memcpy(
            subject, "packing", f"unpack {what}", lambda: unpack(packed, x.dtype, out=out), num_bytes,
            target=SHARES["packing"], remark=remark,
        )  # fmt: skip
        yield against_memcpy(
            subject, "packing", f"unpack {what}, allocating", lambda: unpack(packed, x.dtype), num_bytes,
            target=None, allocates=True,
        )  # fmt: skip

    return Case(name=f"pack and unpack {name}", run=run)


def fused_amax(format: str) -> Case:
    number = formats.get(format)

    def run(subject: Subject) -> Iterator[Row]:
        x, out = subject.x, subject.out
        inv_scale = number.max / x.float().abs().amax()
        yield against_memcpy(
            subject, "amax", f"{format} under a known scale, and amax",
            lambda: cpu.scale_with_amax(x, number, inv_scale, out=out), 2 * subject.num_bytes, target=SHARES["amax"],
        )  # fmt: skip

    return Case(name=f"{format} with amax", run=run)


# --- against others ---------------------------------------------------------------------------------------------------


def against_peer(
    subject: Subject, group: str, what: str, ours: Callable[[], object], theirs: Callable[[], object], *,
    target: float | None, same_values: float | None, peer: str, part: float = 1.0, remark: str = "",
) -> Row:  # fmt: skip
    """A row of us in turn with a peer, who looks at `part` of the matrix only and has its time scaled."""
    times = in_turn({peer: theirs, "ours": ours}, subject.peer_repetitions, warm_up=1)
    peer_ms = times[peer].times(1 / part).median_ms
    return subject.row(
        group, what, times["ours"], 2 * subject.num_bytes, against=peer, against_ms=round(peer_ms, 4),
        ratio=round(peer_ms / times["ours"].median_ms, 2), target=target, same_values=same_values, remark=remark,
    )  # fmt: skip


def torch_elementwise(format: str) -> Case:
    number, scheme = formats.get(format), TensorScheme(format=format)
    target = TORCH_SPEEDUP if number.bits <= 8 else TORCH_16_BIT_SPEEDUP if number.bits == 16 else None
    rounded = eager.round_values(number)

    def run(subject: Subject) -> Iterator[Row]:
        x, out = subject.x, subject.out
        if stored_dtype(number) == x.dtype:
            return  # torch sees that there is nothing to do
        same = _same(fake_quantize(subject.corner, scheme), rounded(subject.corner))
        yield against_peer(
            subject, "torch", f"{format}, allocating", lambda: fake_quantize(x, scheme), lambda: rounded(x),
            target=target, same_values=same, peer="torch eager",
        )  # fmt: skip
        into = eager.round_values_into(number, x, out)
        if into is not None:
            yield against_peer(
                subject, "torch", f"{format}, into memory that is there", lambda: fake_quantize(x, scheme, out=out),
                into, target=target, same_values=same, peer="torch eager",
            )  # fmt: skip

    return Case(name=f"torch, {format}", run=run)


def torch_scaled(name: str) -> Case:
    scheme = _weights(name)
    theirs = eager.fake_quantize(scheme)

    def run(subject: Subject) -> Iterator[Row]:
        x, out = subject.x, subject.out
        same = _same(fake_quantize(subject.corner, scheme), theirs(subject.corner))
        yield against_peer(
            subject, "torch", f"{name}, allocating", lambda: fake_quantize(x, scheme), lambda: theirs(x),
            target=TORCH_SPEEDUP, same_values=same, peer="torch eager",
        )  # fmt: skip
        into = eager.fake_quantize_into(scheme, x, out)
        if into is not None:
            yield against_peer(
                subject, "torch", f"{name}, into memory that is there", lambda: fake_quantize(x, scheme, out=out),
                into, target=TORCH_SPEEDUP, same_values=same, peer="torch eager",
            )  # fmt: skip

    return Case(name=f"torch, {name}", run=run)


def ml_dtypes_elementwise(format: str) -> Case:
    scheme = TensorScheme(format=format)

    def run(subject: Subject) -> Iterator[Row]:
        x, corner = subject.x, subject.corner
        theirs, theirs_in_corner = (array_libraries.ml_dtypes_astype(format, part) for part in (x, corner))
        if theirs is None or theirs_in_corner is None:
            return
        yield against_peer(
            subject, "ml_dtypes", f"{format}, astype there and back", lambda: fake_quantize(x, scheme), theirs,
            target=ML_DTYPES_SPEEDUP, peer="ml_dtypes, one thread",
            same_values=_same(fake_quantize(corner, scheme), array_libraries.to_torch(theirs_in_corner())),
        )  # fmt: skip

    return Case(name=f"ml_dtypes, {format}", run=run)


def gfloat_arrays(
    what: str, scheme: TensorScheme, ways: Callable[[str, Tensor], dict[str, Callable[[], Any]]], name: str
) -> Case:
    """gfloat on whole arrays; of NumPy's arrays and torch's, the faster. The smallest matrix only, and fp32 values."""

    def run(subject: Subject) -> Iterator[Row]:
        x, corner = subject.x, subject.corner
        if x.shape[0] != min(subject.extent.sides):
            return
        calls = ways(name, x.float())
        if not calls:
            return
        times = in_turn(calls, 3, warm_up=1)
        fastest = min(calls, key=lambda library: times[library].median_ms)
        yield against_peer(
            subject, "gfloat", f"{name}, {what}", lambda: fake_quantize(x, scheme), calls[fastest],
            target=GFLOAT_SPEEDUP, peer=f"gfloat on {fastest} arrays", remark="gfloat takes the values as fp32",
            same_values=_same(
                fake_quantize(corner, scheme),
                array_libraries.to_torch(ways(name, corner.float())[fastest]()).to(corner.dtype),
            ),
        )  # fmt: skip

    return Case(name=f"gfloat, {name}", run=run)


def gfloat_elementwise(format: str) -> Case:
    scheme = TensorScheme(format=format)
    return gfloat_arrays("round_ndarray", scheme, array_libraries.gfloat_round, format)


def gfloat_scaled() -> Iterator[Case]:
    for name in SCALED:
        what = "round_ndarray of all blocks"
        yield gfloat_arrays(what, _weights(name), array_libraries.gfloat_blocks, name)
        yield gfloat_block_by_block(name)


def gfloat_block_by_block(name: str) -> Case:
    scheme = _weights(name)

    def run(subject: Subject) -> Iterator[Row]:
        x = subject.x
        if x.shape[0] != min(subject.extent.sides):
            return
        rows, columns = subject.extent.block_by_block
        part = x[:rows, :columns].contiguous()
        theirs = array_libraries.gfloat_quantize_block(name, part.float())
        if theirs is None:
            return
        yield against_peer(
            subject, "gfloat", f"{name}, quantize_block", lambda: fake_quantize(x, scheme), theirs,
            target=None, peer="gfloat, block by block", part=part.numel() / x.numel(),
            same_values=_same(fake_quantize(part, scheme), array_libraries.to_torch(theirs()).to(part.dtype)),
            remark=f"gfloat quantised {part.numel()} of the values; its time is scaled up",
        )  # fmt: skip

    return Case(name=f"gfloat block by block, {name}", run=run)


# --- first calls ------------------------------------------------------------------------------------------------------

_FIRST_CALL = """
import json, sys, time
start = time.perf_counter()
import torch
from bitwright.errors import BitwrightError
from bitwright.quantize import SCHEMES, TensorScheme, fake_quantize
imported = time.perf_counter()
schemes = {"fp8_e4m3": TensorScheme(format="fp8_e4m3"), "mxfp4": SCHEMES["mxfp4"].weights}
x = torch.randn(1024, 1024)
seconds = {}
for name, scheme in schemes.items():
    begin = time.perf_counter()
    fake_quantize(x, scheme)
    seconds[name] = time.perf_counter() - begin
print(json.dumps({"import": imported - start, **seconds}))
"""


def first_calls() -> Iterator[Row]:
    """What the first call of a process takes, with nothing on disk and with the kernels there."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("compiling", "from the cache on disk"):
            run = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL], env=os.environ | {"NUMBA_CACHE_DIR": folder},
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            seconds = json.loads(run.stdout.splitlines()[-1])
            imported = f"after importing torch and bitwright.quantize in {seconds.pop('import'):.2f} s"
            for name, taken in seconds.items():
                first = name == next(iter(seconds))
                ms = round(taken * 1e3, 1)
                yield Row(
                    group="first_call", what=f"first call, {kind}: {name}", dtype="fp32", num_elements=1 << 20,
                    ms=ms, min_ms=ms, max_ms=ms, repetitions=1,
                    remark=f"{imported}; loads Numba" if first else "in the same process",
                )  # fmt: skip


# --- the run ----------------------------------------------------------------------------------------------------------


def cases_of(group: str) -> list[Case]:
    """What a group measures of each matrix."""
    match group:
        case "memcpy":
            return [Case(name="memcpy", run=memcpys)]
        case "elementwise":
            return [elementwise(format) for format in ELEMENTWISE]
        case "scaled":
            return [scaled(name) for name in SCALED]
        case "packing":
            return [packing(name) for name in PACKED]
        case "amax":
            return [fused_amax("fp8_e4m3")]
        case "torch":
            return [*(torch_elementwise(format) for format in ELEMENTWISE), *(torch_scaled(name) for name in SCALED)]
        case "ml_dtypes":
            return [ml_dtypes_elementwise(format) for format in ELEMENTWISE]
        case "gfloat":
            return [*(gfloat_elementwise(format) for format in ELEMENTWISE), *gfloat_scaled()]
        case _:
            return []


def measure(wanted: Sequence[str], extent: Extent, console: Console) -> tuple[list[Row], list[str]]:
    """Every case of the groups on every matrix, largest first; one matrix is in memory at a time.

    Returns:
        What was measured, and what failed: the other minutes of the run are still wanted.
    """
    rows: list[Row] = []
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    cases = [case for group in wanted for case in cases_of(group)]
    with Progress(*columns, console=console, transient=True) as progress:
        has_first_calls = "first_call" in wanted
        task = progress.add_task("", total=len(cases) * len(extent.sides) * len(DTYPES) + has_first_calls)
        for side, (repetitions, peer_repetitions) in extent.sides.items():
            for dtype, torch_dtype in DTYPES.items():
                x = values(side).to(torch_dtype)
                subject = Subject(
                    dtype=dtype, x=x, out=torch.zeros_like(x), repetitions=repetitions,
                    peer_repetitions=peer_repetitions, extent=extent,
                )  # fmt: skip
                for case in cases:
                    name = f"{spell_count(x.numel()):>6} {dtype} {case.name}"
                    progress.update(task, description=f"{name:<44}")
                    try:
                        rows.extend(case.run(subject))
                    except (BitwrightError, NumbaError, RuntimeError, TypeError, ValueError) as error:
                        failures.append(f"{name.strip()}: {type(error).__name__}: {' '.join(str(error).split())}"[:400])
                    progress.advance(task)
        if has_first_calls:
            progress.update(task, description="first calls in new processes")
            rows.extend(first_calls())
            progress.advance(task)
    return rows, failures


def run_and_show(arguments: argparse.Namespace, console: Console) -> int:
    """Measure, file and print; 1 if anything failed."""
    wanted = arguments.only or list(GROUPS)
    load_before = load_average()
    disturbed = why_not_quiet(load_before)
    if disturbed is not None:
        console.print(f"[yellow]{disturbed}[/yellow]", soft_wrap=True, highlight=False)
    results: dict[str, Any] = {
        "what": "fake_quantize, pack and unpack against a memcpy of the same array and against peers; see quantize.py",
        "machine": machine(("torch", "numba", "llvmlite", "numpy", "ml_dtypes", "gfloat")),
        "threads": torch.get_num_threads(),
        "date": now(),
        "load_average_before": load_before,
    }
    rows, failures = measure(wanted, QUICK if arguments.quick else FULL, console)
    results["load_average_after"] = load_average()
    out: Path | None = arguments.out or (None if arguments.quick or arguments.only else RESULT_FILE)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        results["failures"] = failures
        results["groups"] = GROUPS
        results["rows"] = [as_record(row) for row in rows]
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print_rows(rows, arguments.markdown, console)
    if out is not None:
        console.print(f"filed: {out}", soft_wrap=True)
    for failure in failures:
        console.print(f"[red]failed:[/red] {escape(failure)}", soft_wrap=True, highlight=False)
    return 1 if failures else 0


def print_rows(rows: Sequence[Row], as_markdown: bool, console: Console) -> None:
    if as_markdown:
        print(markdown(rows, GROUPS))
        return
    for group, title in GROUPS.items():
        found = [row for row in rows if row.group == group]
        if found:
            console.print(table(found, title))
    console.print(summary(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small arrays and few repetitions; nothing is filed")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--show", action="store_true", help="measure nothing: print what was filed")
    parser.add_argument("--out", type=Path, help="where results are filed, or read from with --show")
    arguments = parser.parse_args()
    console = Console()
    if not arguments.show:
        return run_and_show(arguments, console)
    path: Path = arguments.out or RESULT_FILE
    if not path.exists():
        console.print(f"{path} is not there; run this without --show first", soft_wrap=True)
        return 2
    rows = [from_record(record) for record in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    print_rows([row for row in rows if row.group in (arguments.only or GROUPS)], arguments.markdown, console)
    return 0


# --- small things -----------------------------------------------------------------------------------------------------


def _weights(name: str) -> TensorScheme:
    scheme = SCHEMES[name].weights
    assert scheme is not None
    return scheme


def _unless_cpu(backend: str) -> str:
    return "" if backend == "cpu" else f"runs on backend {backend}"


def _same(ours: Tensor, theirs: Tensor) -> float:
    """Share of values that are equal, NaN being equal to NaN (and −0 to 0, which others give for integers)."""
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return round(float(equal.double().mean()), 6)


if __name__ == "__main__":
    sys.exit(main())
