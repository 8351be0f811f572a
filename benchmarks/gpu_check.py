"""The Triton kernels on a GPU: equal bit for bit, and how fast beside a copy; packed products, beside bf16's.

One run takes under eight minutes; of a part, less.

    python benchmarks/gpu_check.py                      on a machine with a GPU (make gpu-check)
    python benchmarks/gpu_check.py --quick              a tenth of the inputs and of the elements
    python benchmarks/gpu_check.py --part products      one part of it; products take under two minutes
    python benchmarks/gpu_check.py --cpu-interpreter    a tiny dry run without a GPU: its times mean nothing

Equality: a million stratified fp32 inputs of every format (tests/formats/stratified.py), rounded by the kernel, by
torch operations on the same GPU, and by the NumPy reference; every mode, every overflow rule, fp32, bf16 and fp16.
Under scales: one matrix with short last groups, zeros, NaN, Inf, subnormals and ties, under every scheme of the catalog
that the kernels take; values, codes, stored scales, bytes and back. Under a scale that is known (delayed scaling):
values and amax. Differences are counted by bit patterns, all NaN being one.

Speed: 64 Mi elements, the median of 15 runs after 3, beside a device copy of the same array. CUDA events tell how long
the GPU works: it is kept busy while Python prepares the launch, by clearing a gibibyte, which empties its caches too.
`call_ms` is what a caller waits for, with Python and the launch in it.

Products with packed weights are in gpu_products.py.

Results go to benchmarks/results/gpu-check.json after every check (of a dry run, nowhere): machine, versions, each
equality with its number of differences, each time and ratio. After seven minutes no check is begun; what was left out
is named. One part goes to gpu-check-<part>.json.

Exit code: 0; 1 if anything differs or fails; 2 if there is no GPU, or no Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ARGUMENTS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ARGUMENTS.add_argument("--quick", action="store_true", help="a tenth of the inputs and of the elements")
ARGUMENTS.add_argument("--cpu-interpreter", action="store_true", help="a dry run in Triton's interpreter")
PARTS = ("nearest", "scaled", "products", "delayed", "speed", "others")
ARGUMENTS.add_argument("--part", choices=PARTS, help="this part alone")
ARGUMENTS.add_argument("--out", type=Path, help="where the results go (default: benchmarks/results/gpu-check.json)")
if "--cpu-interpreter" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gpu_products import product_checks  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor  # noqa: E402

from bitwright import formats  # noqa: E402
from bitwright.errors import BitwrightError  # noqa: E402
from bitwright.formats import FloatFormat, Format  # noqa: E402
from bitwright.quantize import SCHEMES, Scaling, TensorScheme  # noqa: E402
from bitwright.quantize.backends import reference  # noqa: E402
from bitwright.quantize.backends import torch as torch_backend  # noqa: E402
from bitwright.quantize.backends import triton as kernels  # noqa: E402
from bitwright.quantize.granularity import ROW, TENSOR  # noqa: E402

ROOT = Path(__file__).parents[1]
RESULT_FILE = ROOT / "benchmarks" / "results" / "gpu-check.json"
#: No check is begun after this.
BUDGET_S = 420.0
NUM_WARM_UPS, NUM_RUNS = 3, 15
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: What the project asks for, as a share of the speed of a copy.
TARGETS = {"round": 0.8, "fake_quantize": 0.5, "pack": 0.5, "unpack": 0.5, "delayed": 0.5}
#: Formats of training, and one of each other kind.
DELAYED_FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1", "bf16", "int8", "nf4", "e8m0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How much is looked at."""

    device: str
    num_inputs: int
    #: [rows, columns] of matrices under scales; of those that NumPy looks at too.
    matrix: tuple[int, int]
    small_matrix: tuple[int, int]
    #: [rows, columns] of what is timed.
    timed: tuple[int, int]
    #: Formats and schemes: every one of so many.
    stride: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the results."""

    kind: str
    name: str
    run: Callable[[], list[dict[str, Any]]]


# --- inputs -----------------------------------------------------------------------------------------------------------


def stratified(number: Format, num: int) -> np.ndarray:
    """Inputs that reach every corner of a format; those of fp32 for fp64."""
    spec = spec_from_file_location("stratified", ROOT / "tests" / "formats" / "stratified.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.get("stratified")
    if module is None:
        module = module_from_spec(spec)
        sys.modules["stratified"] = module
        spec.loader.exec_module(module)
    x = module.quiet(module.stratified_inputs(formats.get("fp32") if number.name == "fp64" else number, max(num, 6000)))
    return x if num >= 6000 else np.random.default_rng(0).choice(x, num)


def mixed_matrix(shape: tuple[int, int]) -> Tensor:
    """Groups of every kind, at every power of two that fp32 has."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(shape, generator=generator)
    segments = torch.randint(-40, 40, (rows, -(-columns // 8)), generator=generator).repeat_interleave(8, dim=1)
    x *= torch.exp2(segments[:, :columns].float())
    x[1::7, 16:] = torch.where(x[1::7, 16:] > 0, 0.0, -0.0)
    x[2::7] *= 2.0**-120
    x[3::7] *= 2.0**85
    x[4::7] = (torch.randn(x[4::7].shape, generator=generator) * 8).round() / 4
    x[5, columns // 2], x[6, 3], x[12, columns - 1] = torch.nan, torch.inf, -torch.inf
    return x


# --- equality ---------------------------------------------------------------------------------------------------------


def difference(found: Tensor, expected: Tensor, x: Tensor | None = None) -> dict[str, Any]:
    """How many bit patterns differ, all NaN being one, and the first of them."""
    found, expected = found.detach(), expected.detach().to(found.device)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        problem = f"{found.dtype} {tuple(found.shape)} against {expected.dtype} {tuple(expected.shape)}"
        return {"num_values": found.numel(), "num_different": found.numel(), "first": problem}
    differs = _words(found) != _words(expected)
    count = int(differs.sum())
    result: dict[str, Any] = {"num_values": found.numel(), "num_different": count}
    if count:
        place = int(differs.flatten().nonzero()[0])
        seen = [found, expected] if x is None else [x, found, expected]
        result["first"] = " → ".join(str(tensor.flatten()[place].item()) for tensor in seen)
    return result


def _words(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point and x.element_size() > 1:
        x = x.masked_fill(x.isnan(), torch.nan).float()
        return x.view(torch.int32)
    return x.contiguous().view(torch.uint8)


def rounding_checks(extent: Extent, modes: str) -> Iterator[Check]:
    """`modes` "nearest": nearest even under every rule and dtype; "others": the other modes, rules taking turns."""
    numbers = list(formats.FORMATS.values())[:: extent.stride]
    rules = list(formats.OVERFLOWS)
    for first, number in enumerate(numbers):
        others = [mode for mode in formats.ROUNDINGS if mode != "nearest_even"]
        cases = [(mode, rules[(first + turn) % len(rules)], "fp32") for turn, mode in enumerate(others)]
        if modes == "nearest":
            seen = rules if isinstance(number, FloatFormat) else rules[:1]
            cases = [("nearest_even", rule, "fp32") for rule in seen]
            cases += [("nearest_even", "saturate", dtype) for dtype in ("bf16", "fp16")]
        yield Check(
            kind="equality",
            name=f"round {number.name}, {'nearest even' if modes == 'nearest' else 'other modes'}",
            run=lambda number=number, cases=cases: compare_rounding(extent, number, cases),
        )


def compare_rounding(extent: Extent, number: Format, cases: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    on_cpu = torch.from_numpy(stratified(number, extent.num_inputs).copy())
    results = []
    for mode, overflow, dtype in cases:
        reason = kernels.why_not_round(number, DTYPES[dtype], mode, overflow)
        if reason is not None:
            results.append({"format": number.name, "refused": reason})
            continue
        given = on_cpu.to(DTYPES[dtype])
        x = given.to(extent.device)
        settings: dict[str, Any] = {"rounding": mode, "overflow": overflow, "seed": 2**40 + 3, "random_bits": 24}
        found = kernels.round_values(x, number, **settings)
        expected = {"torch": torch_backend.round_values(x, number, **settings)}
        if dtype == "fp32":
            expected["numpy"] = reference.round_values(given, number, **settings)
        for judge, values in expected.items():
            case = {"format": number.name, "mode": mode, "overflow": overflow, "dtype": dtype, "against": judge}
            results.append(case | difference(found, values, x))
    return results


def schemes(extent: Extent) -> dict[str, TensorScheme]:
    """Every scheme of weights in the catalog, once, and one scale per tensor; those that the kernels take."""
    found = {name: scheme.weights for name, scheme in SCHEMES.items() if scheme.weights is not None}
    found["fp8 per tensor"] = TensorScheme(
        format="fp8_e5m2", scaling=Scaling(granularity=TENSOR, scale_format="fp32", rule="power_of_two")
    )
    found["fp6 per row, rounded up"] = TensorScheme(
        format="fp6_e2m3", scaling=Scaling(granularity=ROW, scale_format="e8m0", rule="round_up")
    )
    once = {scheme: name for name, scheme in reversed(found.items())}
    taken = {name: scheme for scheme, name in once.items() if kernels.why_not_scaled(scheme, torch.float32) is None}
    return dict(list(reversed(taken.items()))[:: extent.stride])


def scaled_checks(extent: Extent) -> Iterator[Check]:
    for name, scheme in schemes(extent).items():
        yield Check(kind="equality", name=f"under {name}", run=lambda s=scheme, n=name: compare_scaled(extent, n, s))


def compare_scaled(extent: Extent, name: str, scheme: TensorScheme) -> list[dict[str, Any]]:
    results = []
    assert scheme.scaling is not None

    def add(what: str, dtype: str, judge: str, found: Tensor | None, expected: Tensor | None) -> None:
        case = {"scheme": name, "what": what, "dtype": dtype, "against": judge}
        if found is None or expected is None:
            results.append(case | {"num_values": 0, "num_different": int(found is not expected)})
        else:
            results.append(case | difference(found, expected))

    for dtype, torch_dtype in DTYPES.items():
        x = mixed_matrix(extent.matrix).to(torch_dtype).to(extent.device)
        if scheme.scaling.granularity == TENSOR:
            x = x.nan_to_num(0.0, 1.0, -1.0)
        add("values", dtype, "torch", kernels.fake_quantize(x, scheme), torch_backend.fake_quantize(x, scheme))
        small = x[: extent.small_matrix[0], : extent.small_matrix[1]]
        expected = reference.fake_quantize(small.cpu(), scheme)
        add("values", dtype, "numpy", kernels.fake_quantize(small, scheme), expected)
        if dtype == "fp32":
            q, expected_q = kernels.quantize(x, scheme), torch_backend.quantize(x, scheme)
            for part in ("codes_NK", "scales_NG", "tensor_scale"):
                add(part, dtype, "torch", getattr(q, part), getattr(expected_q, part))
            packed, expected_packed = kernels.pack(x, scheme), torch_backend.pack(x, scheme)
            for part in ("codes", "scales", "tensor_scale"):
                add(f"packed {part}", dtype, "torch", getattr(packed, part), getattr(expected_packed, part))
            add("unpacked", dtype, "torch", kernels.unpack(packed), torch_backend.unpack(expected_packed))
    return results


def delayed_checks(extent: Extent) -> Iterator[Check]:
    for name in DELAYED_FORMATS[:: extent.stride]:
        number = formats.FORMATS[name]
        yield Check(kind="equality", name=f"delayed, {name}", run=lambda number=number: compare_delayed(extent, number))


def compare_delayed(extent: Extent, number: Format) -> list[dict[str, Any]]:
    """Values and amax under two scales: 1 finds codes and ties, a quotient as of max / amax all between them."""
    results = []
    on_cpu = torch.from_numpy(stratified(number, extent.num_inputs).copy())
    finite = torch.randn(extent.matrix, generator=torch.Generator().manual_seed(5))
    for dtype, given in ((dtype, given) for dtype in DTYPES for given in (on_cpu, finite)):
        narrow = given.to(DTYPES[dtype])
        x = narrow.to(extent.device)
        for inv_scale in (torch.tensor(1.0), torch.tensor(number.max / 3).float()):
            found = kernels.scale_with_amax(x, number, inv_scale.to(extent.device))
            expected = {"torch": torch_backend.scale_with_amax(x, number, inv_scale.to(extent.device))}
            if dtype == "fp32":
                codes = reference.round_values(narrow * inv_scale, number)
                expected["numpy"] = codes * (1 / inv_scale), torch.from_numpy(np.abs(narrow.numpy()).max(keepdims=True))
            for judge, pair in expected.items():
                case = {"format": number.name, "inv_scale": inv_scale.item(), "dtype": dtype, "against": judge}
                results.append(case | {"what": "values"} | difference(found[0], pair[0], x))
                results.append(case | {"what": "amax"} | difference(found[1], pair[1].reshape(())))
    return results


# --- speed ------------------------------------------------------------------------------------------------------------


def speed_checks(extent: Extent) -> Iterator[Check]:
    by_name = schemes(extent)
    for dtype in ("fp32", "bf16"):
        for name in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1", "int8", "int4", "nf4", "e8m0"):
            yield _speed(extent, "round", name, dtype, formats.get(name))
        yield _speed(extent, "round", "fp8_e4m3, stochastic", dtype, formats.get("fp8_e4m3"), rounding="stochastic")
        for name in ("fp8_e4m3", "fp8_e5m2", "int8"):
            yield _speed(extent, "delayed", name, dtype, formats.get(name))
        for name, scheme in by_name.items():
            yield _speed(extent, "fake_quantize", name, dtype, scheme)
        # the first scheme of each width of codes
        widths = {formats.get(scheme.format).bits: name for name, scheme in reversed(by_name.items())}
        for name, scheme in ((name, by_name[name]) for name in widths.values()):
            for verb in ("pack", "unpack"):
                yield _speed(extent, verb, name, dtype, scheme)


def _speed(extent: Extent, verb: str, name: str, dtype: str, target: Any, **settings: Any) -> Check:
    def run() -> list[dict[str, Any]]:
        x = torch.randn(extent.timed, device=extent.device, generator=torch.Generator(extent.device).manual_seed(1))
        x = x.to(DTYPES[dtype])
        out = torch.empty_like(x)
        match verb:
            case "round":
                work: Callable[[], object] = lambda: kernels.round_values(x, target, out=out, **settings)  # noqa: E731
            case "fake_quantize":
                work = lambda: kernels.fake_quantize(x, target, out=out)  # noqa: E731
            case "delayed":
                inv_scale = torch.tensor(100.0, device=extent.device)
                work = lambda: kernels.scale_with_amax(x, target, inv_scale, out=out)  # noqa: E731
            case "pack":
                work = lambda: kernels.pack(x, target)  # noqa: E731
            case _:
                packed = kernels.pack(x, target)
                work = lambda: kernels.unpack(packed, x.dtype)  # noqa: E731
        copy_ms, _ = median_ms(lambda: out.copy_(x), extent.device)
        work_ms, call_ms = median_ms(work, extent.device)
        moved = 2 * x.numel() * x.element_size()
        return [
            {
                "verb": verb,
                "what": name,
                "dtype": dtype,
                "num_elements": x.numel(),
                "ms": round(work_ms, 4),
                "copy_ms": round(copy_ms, 4),
                "call_ms": round(call_ms, 4),
                "copy_gb_per_s": round(moved / copy_ms / 1e6),
                "speed_ratio": round(copy_ms / work_ms, 3),
                "target_ratio": TARGETS[verb],
            }
        ]

    return Check(kind="speed", name=f"{verb} {name}, {dtype}", run=run)


def median_ms(work: Callable[[], object], device: str) -> tuple[float, float]:
    """Median time of the GPU's work, and of the whole call; one run where time means nothing."""
    if device == "cpu":
        elapsed_ms = _call_ms(work)
        return elapsed_ms, elapsed_ms
    for _ in range(NUM_WARM_UPS):
        work()
    torch.cuda.synchronize()
    call_ms = statistics.median(_call_ms(work) for _ in range(NUM_RUNS))
    cleared = torch.empty(2**30, dtype=torch.int8, device=device)
    gpu_ms = []
    for _ in range(NUM_RUNS):
        for _ in range(8):
            cleared.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        gpu_ms.append(start.elapsed_time(end))
    return statistics.median(gpu_ms), call_ms


def _call_ms(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3


# --- the run ----------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    """Device and versions."""
    found: dict[str, Any] = {"python": platform.python_version(), "device": device}
    for package in ("bitwright", "torch", "triton", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a package"
    if device == "cuda":
        facts = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": facts.name,
            "compute_capability": f"{facts.major}.{facts.minor}",
            "memory_gib": round(facts.total_memory / 2**30, 1),
            "multiprocessors": facts.multi_processor_count,
            "cuda": torch.version.cuda or torch.version.hip,
        }
    return found


def why_not_here(interpreted: bool) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'bitwright[triton]', then run this again"
    if not interpreted and not torch.cuda.is_available():
        return "torch sees no GPU here, and the kernels were not checked; run this on a machine with one"
    return None


def extent_of(arguments: argparse.Namespace) -> Extent:
    if arguments.cpu_interpreter:
        return Extent(device="cpu", num_inputs=600, matrix=(21, 72), small_matrix=(14, 72), timed=(8, 128), stride=5)
    if arguments.quick:
        return Extent(
            device="cuda", num_inputs=100_000, matrix=(128, 1000), small_matrix=(32, 1000), timed=(2048, 3072)
        )
    return Extent(device="cuda", num_inputs=1_000_000, matrix=(1024, 1000), small_matrix=(64, 1000), timed=(8192, 8192))


def run_checks(checks: list[Check], results: dict[str, Any], out: Path | None, console: Console) -> None:
    """Run what the budget allows; `results` is filled, and filed after every check."""
    from triton.errors import TritonError

    start = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(checks))
        for check in checks:
            if time.monotonic() - start > BUDGET_S:
                results["left_out"].append(check.name)
                continue
            progress.update(task, description=f"{check.name:<44}")
            begun = time.monotonic()
            try:
                rows = check.run()
            # a kernel that does not compile or run is a result, and the others are still wanted
            except (TritonError, BitwrightError, RuntimeError, ValueError, TypeError) as error:
                rows = [{"failed": f"{type(error).__name__}: {error}"[:2000]}]
            for row in rows:
                results[check.kind].append({"check": check.name} | row)
            bad = [row for row in rows if is_bad(row)]
            if bad:
                console.print(f"[red]{check.name}:[/red] {bad[0]}", soft_wrap=True, highlight=False)
            results["seconds"][check.name] = round(time.monotonic() - begun, 2)
            results["total_seconds"] = round(time.monotonic() - start, 1)
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            progress.advance(task)


def is_bad(row: dict[str, Any]) -> bool:
    return "failed" in row or row.get("num_different", 0) > 0


def all_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for kind in ("equality", "speed", "products") for row in results[kind]]


def show(results: dict[str, Any], console: Console) -> None:
    rows = [row for row in all_rows(results) if "num_values" in row]
    bad = [row for row in all_rows(results) if is_bad(row)]
    num_values = sum(row["num_values"] for row in rows)
    console.print(f"{len(rows)} comparisons of {num_values:,} values: {len(bad)} with differences or failures")
    table = Table("kernel", "dtype", "ms", "copy ms", "share of a copy's speed", "wanted")
    for row in results["speed"]:
        if "ms" in row:
            colour = "green" if row["speed_ratio"] >= row["target_ratio"] else "yellow"
            ratio = f"[{colour}]{row['speed_ratio']}[/{colour}]"
            table.add_row(
                f"{row['verb']} {row['what']}", row["dtype"], str(row["ms"]), str(row["copy_ms"]), ratio,
                str(row["target_ratio"]),
            )  # fmt: skip
    if table.row_count:
        console.print(table)
    show_products(results["products"], console)
    if results["left_out"]:
        console.print(f"left out after {BUDGET_S:.0f} s: {'; '.join(results['left_out'])}", soft_wrap=True)


def show_products(rows: list[dict[str, Any]], console: Console) -> None:
    columns = ("scheme", "tokens", "dtype", "largest error / allowed", "MB", "ms", "bf16 ms", "call ms", "× bf16")
    keys = ("scheme", "tokens", "dtype", "worst", "mb", "ms", "bf16_ms", "call_ms", "speed_ratio")
    table = Table(*columns, title="packed products")
    for row in rows:
        if "refused" in row:
            console.print(f"{row['scheme']}: {row['refused']}", soft_wrap=True)
        if "worst" in row:
            table.add_row(*(str(row.get(key, "")) for key in keys))
    if table.row_count:
        console.print(table)


def main() -> int:
    arguments = ARGUMENTS.parse_args()
    console = Console()
    reason = why_not_here(arguments.cpu_interpreter)
    if reason is not None:
        console.print(reason, soft_wrap=True)
        return 2
    extent = extent_of(arguments)
    parts: dict[str, Iterator[Check]] = {
        "nearest": rounding_checks(extent, "nearest"),
        "scaled": scaled_checks(extent),
        "products": (
            Check(kind="products", name=name, run=run)
            for name, run in product_checks(extent.device, arguments.cpu_interpreter, median_ms)
        ),
        "delayed": delayed_checks(extent),
        "speed": iter(list(speed_checks(extent))[:: extent.stride]),
        "others": rounding_checks(extent, "others"),
    }
    checks = [check for part in PARTS if arguments.part in (None, part) for check in parts[part]]
    # a dry run has nothing to tell anyone
    result_file = RESULT_FILE.with_stem(f"{RESULT_FILE.stem}-{arguments.part}") if arguments.part else RESULT_FILE
    out = arguments.out or (None if arguments.cpu_interpreter else result_file)
    results: dict[str, Any] = {
        "machine": machine(extent.device),
        "interpreted": arguments.cpu_interpreter,
        "quick": arguments.quick,
        "equality": [],
        "speed": [],
        "products": [],
        "left_out": [],
        "seconds": {},
    }
    console.print(" · ".join(f"{key} {value}" for key, value in results["machine"].items()), soft_wrap=True)
    run_checks(checks, results, out, console)
    show(results, console)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        console.print(f"results: {out}", soft_wrap=True)
    return int(any(is_bad(row) for row in all_rows(results)))


if __name__ == "__main__":
    sys.exit(main())
