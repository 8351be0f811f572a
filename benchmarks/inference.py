"""Running packed weights, measured against torch's bf16 in the same minutes.

    python benchmarks/inference.py matmul            products with packed weights: batch 1 and more
    python benchmarks/inference.py processors        the same on what processors without AVX-512 have
    python benchmarks/inference.py decode            whole models, token by token: the built-in one, and layers of 7B
    python benchmarks/inference.py fp8               what FP8 costs in perplexity, uniform and planned, and in fallbacks
    python benchmarks/inference.py matmul --quick    small matrices, few turns: whether it runs; nothing is filed

Results go to benchmarks/results/inference-<part>.json, with machine and versions; figures in the docs name these files.
Run it on an otherwise idle machine.

matmul: y = x Wᵀ with W of 4096 × 11008 and 4096 × 4096, Gaussian, x in bf16, on all threads that torch has. What is
compared runs in turn (`timing`): torch's linear layer on bf16 weights, the packed product, and a sum over the packed
bytes, which is as fast as memory is. Weights are rotated through copies that no cache holds together, all of them in
huge pages. Every way in which the catalog stores weights is there once, under the name of its first scheme, and those
that torch's own packed operators hold, with these operators beside ours ("torch"). Filed besides: the ways to multiply
more tokens, each at several numbers of them, which is where the limits in `quantize/backends/cpu/matmul_ways.py` come
from.

processors: the same product compiled for processors that have less than this one, by a process of its own for each, in
which torch may not use more either; against torch's linear layer in bf16 and in fp32.

decode, fp8: see `inference_decode.py`, `inference_fp8.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import inference_decode
import inference_fp8
import torch
from machine import load_average, machine, now, why_not_quiet
from timing import Timing, in_turn
from torch import Tensor
from torch.nn.functional import linear

from bitwright.inference.packed.native_rows import select_native_layout
from bitwright.quantize import SCHEMES, PackedMatrix, TensorScheme, pack, packed_matmul, select_matmul, unpack
from bitwright.quantize.backends.cpu.features import processor_features
from bitwright.quantize.backends.cpu.matmul import DIRECT, EXPANDED, SCALED
from bitwright.quantize.backends.cpu.matmul_parts import parts_of
from bitwright.quantize.backends.cpu.matmul_product import multiply, way_of_parts
from bitwright.quantize.backends.cpu.matmul_ways import Step

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "numba", "llvmlite", "numpy")


def write(part: str, content: dict[str, Any], load: float | None) -> None:
    """Write one result file and name it."""
    RESULTS.mkdir(exist_ok=True)
    facts = {"date": now(), "machine": machine(PACKAGES), "threads": torch.get_num_threads(), "load_average": load}
    path = RESULTS / f"inference-{part}.json"
    path.write_text(json.dumps({**facts, **content}, indent=1) + "\n", encoding="utf-8")
    print(f"filed in {path}")


# --- matmul: packed products ------------------------------------------------------------------------------------------

SHAPES = ((4096, 11008), (4096, 4096))
#: How often it should be as fast as bf16 at batch 1, of those with a target.
TARGETS = {
    "int4_g128": 4.5,
    # as many bytes a second as in groups of 128: 4.125 bits a weight against 4.25 and 4.5
    "int4_g64": 4.37,
    "int4_g32": 4.12,
    "int8_w": 2.0,
    "fp8_w": 1.8,
    "fp6_w": 2.0,
}
#: The same at larger batches, of all that take fewer bytes than bf16.
BATCH_TARGET = 0.9
#: Every way in which the catalog stores weights, by its first scheme.
MATMUL_SCHEMES = tuple(
    {scheme.weights: scheme.name for scheme in reversed(list(SCHEMES.values())) if scheme.weights is not None}.values()
)[::-1]
#: Schemes that torch's own packed operators hold.
TORCH_SCHEMES = ("int4:g128:bf16", "int4:g32:bf16", "int8:row:bf16")
TOKENS = (1, 2, 4, 8, 16, 32, 64)
#: Copies of a weight take at least so many bytes together, several times the largest cache.
ROTATED_BYTES = 160_000_000
WAYS = ("int4_g128", "int8_w", "fp8_w", "nvfp4", "bfp8")
WAYS_STEPS = {
    "in registers, for four tokens at a time": Step(mode=DIRECT, columns=4, vectors=4),
    "in registers, for eight": Step(mode=DIRECT, columns=8, vectors=2),
    "once, to the first cache": Step(mode=EXPANDED, columns=4, vectors=4),
    "the same, times scales": Step(mode=SCALED, columns=4, vectors=4),
}
WAYS_SHAPE, WAYS_TOKENS = (4096, 4096), (2, 4, 8, 16, 64, 512)
#: Seconds that the turns of one comparison take, about.
_COMPARISON_S = 0.5


def measure_matmul(*, quick: bool) -> None:
    """Packed products against bf16 and against reading, and the ways to multiply more tokens."""
    load = load_average()
    if not quick and (disturbance := why_not_quiet(load)):
        print(disturbance, file=sys.stderr)
    shapes = ((256, 512),) if quick else SHAPES
    rows = []
    for shape in shapes:
        weights = rotated(lambda shape=shape: in_huge_pages(torch.randn(shape).bfloat16()), _bytes(shape, 16), quick)
        for name in (*MATMUL_SCHEMES, *TORCH_SCHEMES):
            for row in product_rows(name, shape, weights, quick):
                rows.append(row)
                print(spell_row(row), flush=True)
    ways = [row for name in WAYS for row in way_rows(name, (256, 512) if quick else WAYS_SHAPE, quick)]
    for row in ways:
        print(row)
    with_target = [row for row in rows if row["target"] is not None]
    missed = [f"{spell_row(row)}, wanted {row['target']}" for row in with_target if row["ratio"] < row["target"]]
    met = f"{len(with_target) - len(missed)} of {len(with_target)} targets are met"
    print("\n".join([f"{met}; below theirs:", *missed]) if missed else met)
    if not quick:
        write("matmul", {"products": rows, "ways": ways}, load)


def product_rows(name: str, shape: tuple[int, int], weights: Iterator[Tensor], quick: bool) -> Iterator[dict[str, Any]]:
    """One scheme and shape, at several numbers of tokens."""
    matrix = matrix_of(name, shape)
    copies = rotated(lambda: copy_of(matrix), matrix.nbytes, quick)
    operator, _ = select_native_layout(matrix.scheme, shape, "cpu", torch.bfloat16)
    of_torch = None
    if operator is not None:
        torchs = operator.prepare(pack(torch.randn(shape), matrix.scheme))
        of_torch = rotated(lambda: copy_of(torchs), torchs.nbytes, quick)
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1]).bfloat16()
        calls: dict[str, Callable[[], object]] = {
            "bf16": lambda x=x: linear(x, next(weights)),
            "packed": lambda x=x: packed_matmul(x, next(copies)),
            "read": lambda: read(next(copies)),
        }
        if of_torch is not None:
            calls["torch"] = lambda x=x: packed_matmul(x, next(of_torch))
        taken = in_turn(calls, repetitions_of(calls, quick))
        yield {
            "scheme": name,
            "shape": list(shape),
            "tokens": tokens,
            "layout": matrix.layout,
            "how": select_matmul(matrix.scheme, shape, "cpu", x.dtype).layout.how(tokens, matrix, x.dtype),
            "bytes": matrix.nbytes,
            "bytes_of_scheme": matrix.scheme.stored_bytes(*shape),
            **{f"{call}_ms": dataclasses.asdict(timing) for call, timing in taken.items()},
            "ratio": taken["bf16"].median_ms / taken["packed"].median_ms,
            "ratio_of_fastest": taken["bf16"].min_ms / taken["packed"].min_ms,
            "gb_per_s": matrix.nbytes / taken["packed"].median_ms / 1e6,
            "share_of_reading": taken["read"].median_ms / taken["packed"].median_ms,
            "torch_ratio": taken["bf16"].median_ms / taken["torch"].median_ms if "torch" in taken else None,
            "target": None if quick else target_of(name, tokens, matrix.nbytes < _bytes(shape, 16)),
        }


def target_of(name: str, tokens: int, is_smaller: bool) -> float | None:
    """How often it should be as fast as bf16; None without a target."""
    if tokens == 1:
        return TARGETS.get(name)
    return BATCH_TARGET if is_smaller else None


def way_rows(name: str, shape: tuple[int, int], quick: bool) -> Iterator[dict[str, Any]]:
    """The ways to multiply more tokens than registers hold."""
    packed = pack(torch.randn(shape), scheme_of(name))
    weight, parts = in_huge_pages(packed.unpack().bfloat16()), parts_of(packed.scheme.text, packed.shape)
    tensors = parts.lay(packed)
    steps = way_of_parts(parts, torch.bfloat16, processor_features()).steps
    is_scaled = any(step.mode == SCALED for step in steps)
    for tokens in WAYS_TOKENS:
        x = torch.randn(tokens, shape[1]).bfloat16()
        calls: dict[str, Callable[[], object]] = {
            "bf16": lambda x=x: linear(x, weight),
            **{
                words: lambda x=x, step=step: multiply(x, parts, tensors, step=step)
                for words, step in WAYS_STEPS.items()
                if step.mode != SCALED or is_scaled
            },
            "expanded to memory, for torch's bf16": lambda x=x: linear(x, unpack(packed, torch.bfloat16)),
        }
        taken = in_turn(calls, repetitions_of(calls, quick))
        yield {
            "scheme": name,
            "shape": list(shape),
            "tokens": tokens,
            **{f"{call} (ms)": round(timing.median_ms, 3) for call, timing in taken.items()},
        }


def scheme_of(name: str) -> TensorScheme:
    """How a scheme of the catalog stores weights."""
    scheme = SCHEMES[name].weights
    assert scheme is not None
    return scheme


def matrix_of(name: str, shape: tuple[int, int]) -> PackedMatrix:
    """Gaussian weights in the layout that is chosen for them."""
    packed = pack(torch.randn(shape), scheme_of(name))
    return select_matmul(packed.scheme, shape, "cpu", torch.bfloat16).layout.prepare(packed)


def copy_of(matrix: PackedMatrix) -> PackedMatrix:
    """The same in memory of its own, in huge pages as that which `prepare` gives."""
    return dataclasses.replace(matrix, parts={name: in_huge_pages(part) for name, part in matrix.parts.items()})


def in_huge_pages(x: Tensor) -> Tensor:
    """A copy; large ones lie in huge pages, which NumPy asks for and torch does not."""
    return torch.from_numpy(x.contiguous().reshape(-1).view(torch.uint8).numpy().copy()).view(x.dtype).reshape(x.shape)


def rotated(make: Callable[[], Any], num_bytes: int, quick: bool) -> Iterator[Any]:
    """Copies in turn, for ever."""
    return itertools.cycle([make() for _ in range(1 if quick else max(2, -(-ROTATED_BYTES // num_bytes)))])


def repetitions_of(calls: dict[str, Callable[[], object]], quick: bool) -> int:
    """As many turns as take about _COMPARISON_S."""
    if quick:
        return 2
    turn_ms = sum(timing.min_ms for timing in in_turn(calls, 1).values())
    return min(60, max(7, int(1000 * _COMPARISON_S / turn_ms)))


def read(matrix: PackedMatrix) -> None:
    """Read all parts, but for less than eight bytes of each, and add them up, by torch."""
    for part in matrix.parts.values():
        stored = part.reshape(-1).view(torch.uint8)
        stored[: len(stored) // 8 * 8].view(torch.int64).sum()


def spell_row(row: dict[str, Any]) -> str:
    """One line."""
    timing = Timing(**row["packed_ms"])
    of_torch = "" if row["torch_ratio"] is None else f", torch itself {row['torch_ratio']:5.2f} x bf16"
    return (
        f"{row['scheme']:14s} {row['shape'][0]} x {row['shape'][1]:<6d} {row['tokens']:3d} tokens  "
        f"{timing.median_ms:7.3f} ms (least {timing.min_ms:7.3f})  {row['ratio']:5.2f} x bf16 "
        f"(least times {row['ratio_of_fastest']:5.2f})  {row['gb_per_s']:5.1f} GB/s, "
        f"{row['share_of_reading']:4.0%} of reading{of_torch}"
    )


# --- processors: what others have -------------------------------------------------------------------------------------

#: What a process is told that its processor has: for our kernels, and for torch and what multiplies for it.
PROCESSORS = {
    "AVX2 (Haswell, Zen 1 to 3)": {
        "NUMBA_CPU_NAME": "x86-64-v3",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "AVX-512 without bf16 (Skylake, Cascade Lake)": {
        "NUMBA_CPU_NAME": "skylake-avx512",
        "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    },
}
PROCESSOR_SCHEMES = ("int4_g128", "int4_g32_zp", "int8_w", "fp8_w", "fp6_w", "mxfp4", "nvfp4", "nf4_g64")
PROCESSOR_TOKENS = (1, 4, 16)
#: Names the processor that a process of its own stands for.
_STANDS_FOR = "BITWRIGHT_BENCHMARK_PROCESSOR"


def measure_processors(*, quick: bool) -> None:
    """Packed products on what other processors have."""
    load = load_average()
    if (name := os.environ.get(_STANDS_FOR)) is not None:
        rows = [row for scheme in PROCESSOR_SCHEMES for row in processor_rows(scheme, quick)]
        print(json.dumps([{"processor": name, **row} for row in rows]))
        return
    found: list[dict[str, Any]] = []
    for name, settings in PROCESSORS.items():
        command = [sys.executable, __file__, "processors", "--threads", str(torch.get_num_threads())]
        said = subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            env={**os.environ, **settings, _STANDS_FOR: name}, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        found += json.loads(said)
        for row in found:
            if row["processor"] == name:
                print(
                    f"{name:45s} {row['scheme']:11s} {row['tokens']:3d} tokens  {row['packed_ms']['median_ms']:8.3f} ms"
                    f"  {row['ratio']:6.2f} x bf16, {row['ratio_of_fp32']:5.2f} x fp32  {row['how']}"
                )
    if not quick:
        write("processors", {"products": found}, load)


def processor_rows(name: str, quick: bool) -> Iterator[dict[str, Any]]:
    """One scheme, at several numbers of tokens."""
    shape = (256, 512) if quick else WAYS_SHAPE
    weights = rotated(lambda: in_huge_pages(torch.randn(shape).bfloat16()), _bytes(shape, 16), quick)
    wide = rotated(lambda: in_huge_pages(torch.randn(shape)), _bytes(shape, 32), quick)
    matrix = matrix_of(name, shape)
    copies = rotated(lambda: copy_of(matrix), matrix.nbytes, quick)
    for tokens in PROCESSOR_TOKENS:
        x = torch.randn(tokens, shape[1]).bfloat16()
        wide_x = x.float()
        calls: dict[str, Callable[[], object]] = {
            "bf16": lambda x=x: linear(x, next(weights)),
            "fp32": lambda x=wide_x: linear(x, next(wide)),
            "packed": lambda x=x: packed_matmul(x, next(copies)),
        }
        taken = in_turn(calls, repetitions_of(calls, quick))
        yield {
            "scheme": name,
            "shape": list(shape),
            "tokens": tokens,
            "how": select_matmul(matrix.scheme, shape, "cpu", x.dtype).layout.how(tokens, matrix, x.dtype),
            **{f"{call}_ms": dataclasses.asdict(timing) for call, timing in taken.items()},
            "ratio": taken["bf16"].median_ms / taken["packed"].median_ms,
            "ratio_of_fp32": taken["fp32"].median_ms / taken["packed"].median_ms,
        }


def _bytes(shape: tuple[int, int], bits: int) -> int:
    return shape[0] * shape[1] * bits // 8


def filing(part: str, measure: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    """A part that returns what it measured, warned beforehand and filed afterwards."""

    def run(*, quick: bool) -> None:
        load = load_average()
        if not quick and (disturbance := why_not_quiet(load)):
            print(disturbance, file=sys.stderr)
        found = measure(quick=quick)
        if not quick:
            write(part, found, load)

    return run


PARTS: dict[str, Callable[..., None]] = {
    "matmul": measure_matmul,
    "processors": measure_processors,
    "decode": filing("decode", inference_decode.measure),
    "fp8": filing("fp8", inference_fp8.measure),
}


def main() -> int:
    """Measure one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--quick", action="store_true", help="whether it runs; nothing is filed")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch and of kernels")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        for name, measure in PARTS.items():
            if arguments.part in (name, "all"):
                measure(quick=arguments.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
