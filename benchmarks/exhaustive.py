"""Every fp32 number, all 2^32 of them, rounded by bitwright and by other libraries, and compared bit for bit.

    python benchmarks/exhaustive.py                                     all of it, to benchmarks/results/exhaustive.json
    python benchmarks/exhaustive.py --formats fp8_e4m3 --backends cpu   that part, in the place of what was there
    python benchmarks/exhaustive.py --chunks 8                          eight chunks of 256; nothing is written
    python benchmarks/exhaustive.py --markdown                          the table of a result that is there

Tested are the kernels of the `cpu` backend, the `torch` backend and the NumPy `reference` (which is `formats.round`).
The judges are the casts of torch and of ml_dtypes, and gfloat's rounding where neither has the format. NaN equals NaN
whatever its payload; −0 is not +0. Each overflow rule is judged by what a library can say about it:

    as it is      the cast of x, for the rule that is named after the library, and those that agree with it
    clamped       the cast of x clamped to ± the largest number, for rules that saturate: what saturating means
    in range      the cast of x where |x| is at most the largest number, for what is left

Rules that put the same three numbers in the place of overflow, Inf and NaN are one rule to a backend, and run once
(over 16-bit inputs each by itself). In a format without NaN no library has a say about NaN but ml_dtypes under its own
rule: elsewhere NaN stays NaN, or becomes the largest number under `te`.

The `cpu` and `torch` backends round all 2^32 numbers. The reference would take an hour or more, and rounds what
decides: every number at most 2^12 away from one where some library's result changes (as found among all 2^32), and
every 2^8th of the others. Its arithmetic is monotone between two such places, and it is seen to be right at both ends.
`--whole-reference` does without that argument. Numbers are rounded 2^16 at a time; kernels write results of 32 MiB and
more another way, so that `--backends cpu --per-call 8388608` is a check of its own.

bf16 and fp16 inputs are all looked at too: their values are the judge's, narrowed by torch.

One difference is known, counted by itself and named: ml_dtypes takes a NaN into FP6 and FP4 to the zero of the *other*
sign, bitwright to −0 always, since the sign of a NaN means nothing (IEEE 754 §6.3).

Exit code: 0; 1 if anything else differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # one process per core instead; read when torch is imported
# glibc, in the processes to come: memory that was freed is kept, not given back and zeroed anew for every array
os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 28), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}

import gfloat
import ml_dtypes
import numpy as np
import torch
from machine import machine, now
from numba import njit
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bitwright import formats
from bitwright.formats import FloatFormat, overflow_values

RESULT_FILE = Path(__file__).parent / "results" / "exhaustive.json"
PACKAGES = ("torch", "ml_dtypes", "gfloat", "numpy", "numba")
BACKENDS = ("cpu", "torch", "reference")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: 256 chunks of 2^24 numbers, in pieces that fit the cache of a core unless a command line says otherwise.
CHUNK, PIECE, NUM_CHUNKS = 1 << 24, 1 << 16, 256
#: Chunks worth looking at first: around 1; the ends of FP8 and fp16; Inf and NaN; zeros; the subnormals of fp16.
FIRST_CHUNKS = (0x3F, 0xBF, 0x43, 0x47, 0x7F, 0xFF, 0x00, 0x80, 0xC3, 0xC7, 0x3E, 0xBE, 0x40, 0xC0, 0x33, 0xB3, 0x32)
#: How far around a change of the result the reference looks, and at which part of the rest.
NEAR, STEP = 1 << 12, 1 << 8
NUM_SHOWN = 5

ML_DTYPES: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,  # NumPy's own
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "fp8_e4m3_ieee": ml_dtypes.float8_e4m3,
    "fp8_e3m4": ml_dtypes.float8_e3m4,
}
TORCH = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
}
#: tf32 is binary32 with 10 fraction bits; gfloat's record of that.
GFLOAT = {
    "tf32": gfloat.FormatInfo(
        name="tf32",
        k=19,
        precision=11,
        bias=127,
        has_nz=True,
        domain=gfloat.Domain.Extended,
        num_high_nans=2**10 - 1,
        has_subnormals=True,
        is_signed=True,
        is_twos_complement=False,
    )
}
FORMATS = (*ML_DTYPES, *GFLOAT)

Words = np.ndarray  # uint32: fp32 bit patterns


# --- the judges -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Oracle:
    """A library that rounds too."""

    name: str
    #: The overflow rule that it follows.
    rule: str
    #: fp32 numbers → the fp32 words of what they are rounded to.
    words: Callable[[np.ndarray], Words]


@cache
def oracles(format: str) -> tuple[Oracle, ...]:
    """The libraries that have a format."""
    found = []
    if format in TORCH:
        dtype = TORCH[format]
        codes_dtype = torch.uint8 if dtype.itemsize == 1 else torch.uint16
        every_code = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32).to(codes_dtype)
        table = every_code.view(dtype).float().numpy().view(np.uint32)

        def by_torch(x: np.ndarray) -> Words:
            return decode(table, torch.from_numpy(x).to(dtype).view(codes_dtype).numpy())

        found.append(Oracle(name="torch", rule="torch", words=by_torch))
    if format in ML_DTYPES:
        np_dtype = np.dtype(ML_DTYPES[format])
        np_codes = np.uint8 if np_dtype.itemsize == 1 else np.uint16
        np_table = np.arange(1 << 8 * np_dtype.itemsize, dtype=np_codes).view(np_dtype).astype(np.float32)
        np_table = np_table.view(np.uint32)

        def by_ml_dtypes(x: np.ndarray) -> Words:
            return decode(np_table, x.astype(np_dtype).view(np_codes))

        found.append(Oracle(name="ml_dtypes", rule="ml_dtypes", words=by_ml_dtypes))
    if format in GFLOAT:
        info = GFLOAT[format]

        def by_gfloat(x: np.ndarray) -> Words:
            return gfloat.round_ndarray(info, x.astype(np.float64)).astype(np.float32).view(np.uint32)

        found.append(Oracle(name="gfloat", rule="ieee", words=by_gfloat))
    return tuple(found)


@njit
def decode(table: Any, codes: Any) -> Any:
    """The word of every code."""
    words = np.empty(codes.size, np.uint32)
    for i in range(codes.size):
        words[i] = table[codes[i]]
    return words


@njit
def count_differences(found: Any, expected: Any) -> Any:
    """How many words differ, every NaN being the same."""
    magnitude, inf = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
    count = 0
    for i in range(found.size):
        both_nan = ((found[i] & magnitude) > inf) & ((expected[i] & magnitude) > inf)
        count += (found[i] != expected[i]) & (not both_nan)
    return count


# --- what is compared -------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One comparison that every number goes through."""

    format: str
    backend: str
    dtype: str
    rules: tuple[str, ...]
    oracle: str
    asked: str
    #: How many numbers the backend is given at a time: what is large may take another path.
    per_call: int


@dataclass(kw_only=True, slots=True)
class Tally:
    """What a comparison found."""

    inputs: int = 0
    differences: int = 0
    #: Of NaN whose zero has the other sign in ml_dtypes; not among the differences.
    known_differences: int = 0
    #: Of the backend alone.
    seconds: float = 0.0
    #: (input, found, expected) words.
    first: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.inputs += other.inputs
        self.differences += other.differences
        self.known_differences += other.known_differences
        self.seconds += other.seconds
        self.first = sorted(self.first + other.first)[:NUM_SHOWN]


Tallies = dict[Case, Tally]


@cache
def rule_groups(format: str) -> tuple[tuple[str, ...], ...]:
    """The overflow rules, those together that put the same numbers in."""
    groups: dict[str, list[str]] = {}
    for rule in formats.OVERFLOWS:
        groups.setdefault(repr(overflow_values(formats.get(format), rule)), []).append(rule)
    return tuple(map(tuple, groups.values()))


class Judge:
    """What the libraries say about one piece of numbers; each cast is made once."""

    def __init__(self, format: str, x: np.ndarray) -> None:
        number = formats.get(format)
        assert isinstance(number, FloatFormat)
        self.number, self.format, self.x = number, format, x
        self.largest = np.float32(number.max)
        self.is_inside = bool((np.abs(x) <= self.largest).all())
        self.known: dict[tuple[str, str], Words] = {}

    def verdicts(self, rules: tuple[str, ...]) -> Iterator[tuple[str, str, Words]]:
        """(library, what it was asked, words) of every library that can judge these rules here."""
        stand_in = overflow_values(self.number, rules[0])
        for oracle in oracles(self.format):
            if oracle.rule in rules:
                yield oracle.name, "as it is", self._words(oracle, "as it is")
            elif stand_in.beyond == stand_in.infinite == self.number.max:
                words = self._words(oracle, "as it is" if self.is_inside else "clamped")
                yield oracle.name, "clamped", words if self.number.has_nan else self._with_nan(words, rules)
            elif self.is_inside:
                yield oracle.name, "in range", self._words(oracle, "as it is")

    def changes(self, last: dict[str, Any]) -> list[int]:
        """Places where a library's result is not that of the number before. `last`: its result before the piece, which
        becomes that at the end."""
        places: set[int] = set()
        for oracle in oracles(self.format):
            words = self._words(oracle, "as it is")
            before = np.concatenate([[last.get(oracle.name, words[0])], words[:-1]])
            places.update(np.flatnonzero(words != before).tolist())
            last[oracle.name] = words[-1]
        return sorted(places)

    def _words(self, oracle: Oracle, asked: str) -> Words:
        if (oracle.name, asked) not in self.known:
            x = np.clip(self.x, -self.largest, self.largest) if asked == "clamped" else self.x
            self.known[oracle.name, asked] = oracle.words(x)
        return self.known[oracle.name, asked]

    def _with_nan(self, words: Words, rules: tuple[str, ...]) -> Words:
        nan = self.largest if "te" in rules else np.float32(np.nan)
        return words if self.is_inside else np.where(np.isnan(self.x), nan.view(np.uint32), words)


def compare(x: np.ndarray, found: Words, expected: Words, number: FloatFormat) -> Tally:
    """Compare the words of one piece."""
    tally = Tally(inputs=x.size, differences=int(count_differences(found, expected)))
    if tally.differences:
        differs = (found != expected) & ~(np.isnan(found.view(np.float32)) & np.isnan(expected.view(np.float32)))
        if not number.has_nan:
            known = differs & np.isnan(x) & np.signbit(x) & (found == 0x80000000) & (expected == 0)
            tally.known_differences = int(known.sum())
            tally.differences -= tally.known_differences
            differs &= ~known
        for place in np.flatnonzero(differs)[:NUM_SHOWN]:
            tally.first.append((int(x.view(np.uint32)[place]), int(found[place]), int(expected[place])))
    return tally


# --- the work of one process ------------------------------------------------------------------------------------------


def start_process() -> None:
    torch.set_num_threads(1)
    np.seterr(all="ignore")


def look_at_chunk(format: str, backends: Sequence[str], whole_reference: bool, per_call: int, chunk: int) -> Tallies:
    """Every number of one chunk."""
    tallies: Tallies = {}
    begin = chunk * CHUNK
    fast = [backend for backend in backends if backend != "reference" or whole_reference]
    is_near = np.zeros(CHUNK, np.bool_)
    last: dict[str, Any] = {}
    for first in range(0, CHUNK, per_call):
        x = numbers(np.arange(begin + first, begin + first + per_call))
        judge = Judge(format, x)
        look_under_all_rules(tallies, fast, judge, per_call)
        if len(fast) < len(backends):
            for place in judge.changes(last):
                is_near[max(0, first + place - NEAR) : first + place + NEAR] = True
    if len(fast) < len(backends):
        is_near[:NEAR] = is_near[-NEAR:] = is_near[::STEP] = True
        words = begin + np.flatnonzero(is_near)
        for first in range(0, words.size, PIECE):
            look_under_all_rules(tallies, ["reference"], Judge(format, numbers(words[first : first + PIECE])), PIECE)
    return tallies


def numbers(words: np.ndarray) -> np.ndarray:
    """fp32 numbers of words."""
    return words.astype(np.uint32).view(np.float32)


def look_under_all_rules(tallies: Tallies, backends: Sequence[str], judge: Judge, per_call: int) -> None:
    for backend in backends:
        for rules in rule_groups(judge.format):
            look(
                tallies, Case(judge.format, backend, "fp32", rules, "", "", per_call), judge, torch.from_numpy(judge.x)
            )


def look_at_short_inputs(format: str, backends: Sequence[str]) -> Tallies:
    """Every bf16 and every fp16 number, each rule by itself."""
    tallies: Tallies = {}
    for dtype_name, dtype in DTYPES.items():
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
        judge = Judge(format, x.float().numpy())
        for backend in backends:
            for rule in formats.OVERFLOWS:
                look(tallies, Case(format, backend, dtype_name, (rule,), "", "", x.numel()), judge, x)
    return tallies


def look(tallies: Tallies, case: Case, judge: Judge, x: torch.Tensor) -> None:
    """Round one piece under one rule; add what every library says about it."""
    backend = import_module(f"bitwright.quantize.backends.{case.backend}")
    if backend.why_not_round(judge.number, x.dtype, "nearest_even", case.rules[0]) is not None:
        return
    begin = time.perf_counter()
    rounded = backend.round_values(x, judge.number, overflow=case.rules[0])
    seconds = time.perf_counter() - begin
    found = rounded.float().numpy().view(np.uint32)
    group = next(rules for rules in rule_groups(case.format) if case.rules[0] in rules)
    for oracle, asked, words in judge.verdicts(group):
        if x.dtype != torch.float32:  # what fp32 holds is narrowed, by torch
            words = torch.from_numpy(words.view(np.float32)).to(x.dtype).float().numpy().view(np.uint32)
        tally = compare(judge.x, found, words, judge.number)
        tally.seconds = seconds
        tallies.setdefault(case._replace(oracle=oracle, asked=asked), Tally()).add(tally)


# --- the run ----------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, console: Console) -> bool:
    """Look at everything, show it on the way; write it if it is whole. False if anything differs."""
    wanted, backends, num_chunks = arguments.formats, arguments.backends, arguments.chunks
    look = partial(
        look_at_chunk, backends=backends, whole_reference=arguments.whole_reference, per_call=arguments.per_call
    )
    chunks = list(dict.fromkeys([*FIRST_CHUNKS, *range(NUM_CHUNKS)]))[:num_chunks]
    is_whole, all_equal = num_chunks == NUM_CHUNKS, True
    here = machine(PACKAGES)
    columns = (
        TextColumn("{task.description:14}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]:6.1f} M numbers/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    pool = ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn"), initializer=start_process)
    with pool, Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting", total=len(wanted) * len(chunks), rate=0.0)
        begin = time.perf_counter()
        for format in wanted:
            progress.update(bar, description=format)
            format_begin = time.perf_counter()
            tallies = pool.submit(look_at_short_inputs, format, backends).result()
            for job in as_completed([pool.submit(look, format, chunk=chunk) for chunk in chunks]):
                for case, tally in job.result().items():
                    tallies.setdefault(case, Tally()).add(tally)
                done = progress.tasks[0].completed + 1
                progress.update(bar, advance=1, rate=done * CHUNK / 1e6 / (time.perf_counter() - begin))
            all_equal &= show(tallies, format, time.perf_counter() - format_begin, console)
            if is_whole:
                write(tallies, here)
    return all_equal


def show(tallies: Tallies, format: str, seconds: float, console: Console) -> bool:
    """Print one line per format, and the first differences; False if there are any."""
    differences = sum(tally.differences for tally in tallies.values())
    known = sum(tally.known_differences for tally in tallies.values())
    compared = sum(tally.inputs for tally in tallies.values())
    note = f" ({known:,} signs of NaN made zero)" if known else ""
    console.print(f"{format:14} {compared:>17,} results compared, {differences:,} differ{note}; {seconds:.0f} s")
    for case, tally in tallies.items():
        if tally.differences:
            rules = ", ".join(case.rules)
            console.print(
                f"  {case.backend}, {case.dtype}, {rules}: {tally.differences:,} of {tally.inputs:,} are not those of "
                f"{case.oracle} ({case.asked})"
            )
            for words in tally.first:
                x, found, expected = (f"0x{word:08x} {np.uint32(word).view(np.float32):.9g}" for word in words)
                console.print(f"    {x}: {found}, {case.oracle} {expected}")
    return differences == 0


def write(tallies: Tallies, ran_on: dict[str, Any]) -> None:
    """File what was found, in the place of what was there of the same formats, backends and dtypes.

    Results of another machine or other versions are dropped; each names the commit that it is of. A line of 16-bit
    inputs is of several rules.
    """
    here = {key: value for key, value in ran_on.items() if key != "commit"}
    kept: list[dict[str, Any]] = []
    if RESULT_FILE.exists():
        content = json.loads(RESULT_FILE.read_text(encoding="utf-8"))
        if content["machine"] == here:
            replaced = {(case.format, case.backend, case.dtype, case.per_call) for case in tallies}
            keys = ("format", "backend", "dtype", "per_call")
            kept = [r for r in content["results"] if tuple(r[key] for key in keys) not in replaced]
    lines: dict[Case, Tally] = {}
    rules: dict[Case, tuple[str, ...]] = {}
    for case, tally in tallies.items():
        line = case if case.dtype == "fp32" else case._replace(rules=())
        rules[line] = case.rules if line == case else (*rules.get(line, ()), *case.rules)
        lines.setdefault(line, Tally()).add(tally)
    for case, tally in lines.items():
        counts = {key: getattr(tally, key) for key in ("inputs", "differences", "known_differences")}
        when = {"backend_s": round(tally.seconds, 2), "date": now(), "commit": ran_on["commit"]}
        kept.append(case._replace(rules=rules[case])._asdict() | counts | when)
    kept.sort(
        key=lambda r: (FORMATS.index(r["format"]), BACKENDS.index(r["backend"]), r["dtype"] != "fp32", r["per_call"])
    )
    refused = {
        f"{format}, {backend}": reasons
        for format in FORMATS
        for backend in BACKENDS
        if (reasons := why_not(format, backend))
    }
    facts = {
        "machine": here,
        "what": "all 2^32 fp32, 2^16 bf16 and 2^16 fp16 numbers, rounded to nearest even; of the fp32 numbers the "
        "reference rounds those within 2^12 of a change of the result, and every 2^8th (unless `inputs` says 2^32)",
        "known_differences": "NaN into a format without one: ml_dtypes gives the zero of the other sign, the rule "
        "ml_dtypes always -0",
        "refused": refused,
    }
    RESULT_FILE.parent.mkdir(exist_ok=True)
    results = ",\n".join(f"  {json.dumps(line)}" for line in kept)
    text = f'{json.dumps(facts, indent=1)[:-2]},\n "results": [\n{results}\n ]\n}}\n'
    RESULT_FILE.write_text(text, encoding="utf-8")


def why_not(format: str, backend: str) -> dict[str, str]:
    """The overflow rules that a backend does not know for a format, each with its reason."""
    module = import_module(f"bitwright.quantize.backends.{backend}")
    reasons = {
        rule: module.why_not_round(formats.get(format), torch.float32, "nearest_even", rule)
        for rule in formats.OVERFLOWS
    }
    return {rule: reason for rule, reason in reasons.items() if reason is not None}


def markdown() -> str:
    """The result file as a table: differences among the results compared."""
    results = json.loads(RESULT_FILE.read_text(encoding="utf-8"))["results"]
    lines = [
        f"| format | judged by | {' | '.join(f'`{backend}`' for backend in BACKENDS)} |",
        f"| --- | --- |{' --- |' * len(BACKENDS)}",
    ]
    for format in FORMATS:
        cells, judges = [], dict[str, None]()
        for backend in BACKENDS:
            found = [r for r in results if (r["format"], r["backend"]) == (format, backend)]
            judges |= dict.fromkeys(r["oracle"] for r in found)
            differences, inputs = (sum(r[key] for r in found) for key in ("differences", "inputs"))
            cells.append(f"{differences:,} of {inputs:,}" if found else "–")
        if judges:
            lines.append(f"| `{format}` | {', '.join(judges)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="NAME")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--chunks", type=int, default=NUM_CHUNKS, help="how many of the 256; fewer write no result")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--per-call", type=int, default=PIECE, help="numbers rounded at a time, a power of two to 2^24")
    parser.add_argument("--whole-reference", action="store_true", help="all 2^32 numbers through the reference too")
    parser.add_argument("--markdown", action="store_true", help="print the table of the result file")
    arguments = parser.parse_args()
    if arguments.markdown:
        print(markdown())
        return 0
    return 0 if run(arguments, Console()) else 1


if __name__ == "__main__":
    sys.exit(main())
