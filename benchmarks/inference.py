"""Running packed weights, measured against torch's bf16 in the same minutes.

    python benchmarks/inference.py matmul            products with packed weights: batch 1 and more
    python benchmarks/inference.py decode            whole models, token by token: the built-in one, and layers of 7B
    python benchmarks/inference.py fp8               what FP8 costs in perplexity, uniform and planned, and in fallbacks
    python benchmarks/inference.py matmul --quick    small matrices, few turns: whether it runs; nothing is filed

Results go to benchmarks/results/inference-<part>.json, with machine and versions; figures in the docs name these files.
Run it on an otherwise idle machine.

matmul: y = x Wᵀ with W of 4096 × 11008 and 4096 × 4096, Gaussian, x in bf16, on all threads that torch has. What is
compared runs in turn (`timing`): torch's linear layer on bf16 weights, the packed product, and a sum over the packed
bytes, which is as fast as memory is. Weights are rotated through copies that no cache holds together, all of them in
huge pages. Filed besides: the ways to multiply more tokens, each at several numbers of them, which is where the limits
in `quantize/backends/cpu/matmul.py` come from.

decode, fp8: see `inference_decode.py`, `inference_fp8.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
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

from bitwright.quantize import SCHEMES, PackedMatrix, TensorScheme, pack, packed_matmul, select_matmul, unpack
from bitwright.quantize.backends.cpu.matmul_parts import parts_of
from bitwright.quantize.backends.cpu.matmul_product import multiply

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
TARGETS = {"int4_g128": 4.5, "int8_w": 2.0, "fp8_w": 1.8, "fp6_w": 2.0}
#: The same of all at batch 16.
BATCH_TARGET = (16, 0.9)
MATMUL_SCHEMES = (
    "int4_g128", "int4_g32", "int4_g128_zp", "int3_g64", "int8_w", "int8_g128", "fp8_w", "fp8_block", "fp6_w", "mxfp8",
    "mxfp6", "mxfp4", "nvfp4",
)  # fmt: skip
TOKENS = (1, 4, 16)
#: Copies of a weight take at least so many bytes together, several times the largest cache.
ROTATED_BYTES = 160_000_000
WAYS = ("int4_g128", "int8_w", "fp8_w")
WAYS_SHAPE, WAYS_TOKENS = (4096, 4096), (8, 16, 64, 512)
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
        for name in MATMUL_SCHEMES:
            for row in product_rows(name, shape, weights, quick):
                rows.append(row)
                print(spell_row(row), flush=True)
    ways = [row for name in WAYS for row in way_rows(name, (256, 512) if quick else WAYS_SHAPE, quick)]
    for row in ways:
        print(row)
    missed = [spell_row(row) for row in rows if row["target"] is not None and row["ratio"] < row["target"]]
    print("\n".join(["below its target:", *missed]) if missed else "every target is met")
    if not quick:
        write("matmul", {"products": rows, "ways": ways}, load)


def product_rows(name: str, shape: tuple[int, int], weights: Iterator[Tensor], quick: bool) -> Iterator[dict[str, Any]]:
    """One scheme and shape, at several numbers of tokens."""
    matrix = matrix_of(name, shape)
    copies = rotated(lambda: copy_of(matrix), matrix.nbytes, quick)
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1]).bfloat16()
        calls: dict[str, Callable[[], object]] = {
            "bf16": lambda x=x: linear(x, next(weights)),
            "packed": lambda x=x: packed_matmul(x, next(copies)),
            "read": lambda: read(next(copies)),
        }
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
            "target": TARGETS.get(name) if tokens == 1 else BATCH_TARGET[1] if tokens == BATCH_TARGET[0] else None,
        }


def way_rows(name: str, shape: tuple[int, int], quick: bool) -> Iterator[dict[str, Any]]:
    """The ways to multiply more tokens than registers hold."""
    packed = pack(torch.randn(shape), scheme_of(name))
    weight, parts = in_huge_pages(packed.unpack().bfloat16()), parts_of(packed.scheme.text, packed.shape)
    tensors = parts.lay(packed)
    for tokens in WAYS_TOKENS:
        x = torch.randn(tokens, shape[1]).bfloat16()
        calls: dict[str, Callable[[], object]] = {
            "bf16": lambda x=x: linear(x, weight),
            "expanded in registers, for four tokens at a time": lambda x=x: multiply(x, parts, tensors, direct=len(x)),
            "expanded to the first cache": lambda x=x: multiply(x, parts, tensors),
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
    return (
        f"{row['scheme']:13s} {row['shape'][0]} x {row['shape'][1]:<6d} {row['tokens']:3d} tokens  "
        f"{timing.median_ms:7.3f} ms (least {timing.min_ms:7.3f})  {row['ratio']:5.2f} x bf16 "
        f"(least times {row['ratio_of_fastest']:5.2f})  {row['gb_per_s']:5.1f} GB/s, "
        f"{row['share_of_reading']:4.0%} of reading"
    )


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
