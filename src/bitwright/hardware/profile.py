"""Measure the machine at hand and say it as a device: `bitwright hardware profile`.

    matmul     2 · m · n · k operations ÷ seconds, for each format that torch multiplies in, over several shapes
    matvec     bytes of a [11008, 4096] weight ÷ seconds, one token: what decoding reaches of the memory's bandwidth
    packed     the same two with the weight packed in a narrow format and the inputs not, by the kernels that plans run
               with (`quantize/packed_products.py`); bytes are those of codes and scales
    read, copy bytes of a tensor far larger than any cache ÷ seconds of finding its maximum, or of a copy, by format
    launch     seconds of an operation on one number

Each figure is the best of as many repeats as a time slice holds: other work on the machine only ever adds time. How far
the median lies above the best is reported beside it. As a device, the best shape of a format is its *peak* and the
median over the shapes is its *achieved* rate; the best of read, copy and matvec is the peak bandwidth, and matvec the
achieved one.

A format that reaches less than a tenth of the faster of fp32 and bf16 on a small trial has a loop for reference and no
matrix unit (fp16 and fp8 on most processors): it is skipped, and the reason is kept, as it is of all that torch cannot
do here. Bandwidths by format are kept in the device file beside the one that times are predicted with. Rejected: a mean
over repeats, which on a shared machine measures the neighbours.

Imports torch when called.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal

from bitwright.errors import HardwareError, SchemeError
from bitwright.hardware import bench
from bitwright.hardware.bench import Bench, Effort, Figure, Job, PackedProducts
from bitwright.hardware.detect import cpu_model
from bitwright.hardware.device import Device, MatmulRule
from bitwright.hardware.device_catalog import devices
from bitwright.hardware.device_file import NAME_PATTERN

#: A format slower than this share of the faster of fp32 and bf16 has no matrix unit.
_LEAST_SHARE = 0.1
#: m, n, k of the trial that finds such formats out.
_TRIAL = (128, 512, 512)
#: Formats in the order that they are measured in; the first two are what the others are compared with.
_FORMATS = ("fp32", "bf16", "tf32", "fp16", "int8", "fp8_e4m3", "fp8_e5m2", "int4")
#: Formats that a processor has no notion of.
_GPU_FORMATS = frozenset({"tf32"})
#: A median so far above the best is a sign that something else was running.
_DISTURBED = 0.5
_MATVEC_FORMATS = ("fp32", "bf16", "fp16")
#: Formats that are read and copied.
_MOVED_FORMATS = ("fp32", "bf16", "fp16", "int8", "fp8_e4m3", "fp8_e5m2", "int4")
#: What torch raises where it has no kernel; the first sentence says which.
_NO_KERNEL = (RuntimeError, NotImplementedError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What was measured, and the device that it makes."""

    device: Device
    figures: tuple[Figure, ...]
    #: Format, or "read …", "copy …", "packed …" → why it was not measured.
    skipped: Mapping[str, str] = field(default_factory=dict)

    #: One sentence for each sign that something else was running.
    disturbances: tuple[str, ...] = ()


def jobs(*, gpu: bool, quick: bool = False, packed: PackedProducts | None = None) -> tuple[Job, ...]:
    """Return what `measure` measures, in order; formats that turn out to have no matrix unit fall away."""
    effort = _effort(gpu=gpu, quick=quick)
    known = [name for name in _FORMATS if gpu or name not in _GPU_FORMATS]
    one_token, batch = (1, *bench.MATVEC), effort.shapes[-1]
    moving = (Job(what=what, format=name) for name in _MOVED_FORMATS for what in ("read", "copy"))
    vectors = (Job(what="matvec", format=name, shape=one_token) for name in _MATVEC_FORMATS)
    products = (Job(what="matmul", format=name, shape=shape) for name in known for shape in effort.shapes)
    narrow = () if packed is None else packed.formats
    packed_jobs = (Job(what="packed", format=name, shape=shape) for name in narrow for shape in (one_token, batch))
    return (*moving, Job(what="launch"), *vectors, *products, *packed_jobs)


def has_gpu() -> bool:
    """Say whether torch sees a GPU; then that is what is measured."""
    import torch

    return torch.cuda.is_available()


def measure(
    *,
    name: str,
    quick: bool = False,
    packed: PackedProducts | None = None,
    on_done: Callable[[str], None] = lambda what: None,
) -> Profile:
    """Measure this machine's GPU where torch sees one, else its processor with as many threads as torch uses.

    Args:
        name: of the device that comes out.
        quick: smaller matrices and fewer repeats: some ten seconds on two cores, in place of about a minute.
        packed: products with packed weights (`bitwright.quantize.packed_products.PackedWeights()`); None: without.
        on_done: is told of each job when it is over, with its figure or the reason that it was skipped.

    Raises:
        HardwareError: no device may be called so, or torch can multiply in no format.
    """
    if not re.match(NAME_PATTERN, name):
        raise HardwareError(
            f"a device cannot be called {name!r}; use lower-case letters, digits, '.' and '-', such as 'lab-server'"
        )
    busy = _busy()
    gpu = has_gpu()
    effort = _effort(gpu=gpu, quick=quick)
    runner = Bench(gpu=gpu, effort=effort, packed=packed)
    figures: list[Figure] = []
    skipped: dict[str, str] = {}
    trials: dict[str, float] = {}
    for job in jobs(gpu=gpu, quick=quick, packed=packed):
        is_plain = job.what in ("matmul", "matvec")
        if is_plain and job.format not in trials and job.format not in skipped:
            reason = _try(runner, job.format, trials)
            if reason:
                skipped[job.format] = reason
        if job.place not in skipped:
            try:
                figures.append(runner.figure(job, inputs="bf16" if "bf16" in trials else "fp32"))
            except (*_NO_KERNEL, SchemeError) as error:
                skipped[job.place] = _no_kernel(error)
        on_done(f"{job}: skipped, {skipped[job.place]}" if job.place in skipped else str(figures[-1]))
    figures = _without_reference_loops(figures, skipped)
    unsteady = [str(figure.job) for figure in figures if figure.spread > _DISTURBED]
    if unsteady:
        busy.append(f"repeats differ by more than {100 * _DISTURBED:.0f} %: {', '.join(unsteady)}")
    device = _as_device(name, figures, skipped, gpu=gpu)
    return Profile(
        device=replace(device, notes=(*device.notes, *busy)),
        figures=tuple(figures),
        skipped=MappingProxyType(skipped),
        disturbances=tuple(busy),
    )


def _busy() -> list[str]:
    """Whether other programs were running at the start, as the system counts them."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = os.cpu_count() or 1
    return [f"the load was {load:.1f} on {cores} cores at the start"] if load > cores / 2 else []


def _effort(*, gpu: bool, quick: bool) -> Effort:
    """The last shape is the product of a small batch; quick leaves out the middle ones."""
    if gpu:
        squares = [(size, size, size) for size in (4096, 8192)]
        shapes = (*squares[: 1 if quick else 2], (2048, 11008, 4096))
        return Effort(shapes=shapes, streamed_bytes=2**30, slice_s=0.1 if quick else 0.5)
    squares = [(size, size, size) for size in (512, 1024, 2048)]
    shapes = (*squares[: 1 if quick else 3], (256, 4096, 1024))
    return Effort(shapes=shapes, streamed_bytes=2**27 if quick else 2**28, slice_s=0.15 if quick else 1.0)


def _no_kernel(error: Exception) -> str:
    return f"there is no kernel for it here ({(str(error).splitlines() or [type(error).__name__])[0][:120]})"


def _try(runner: Bench, name: str, trials: dict[str, float]) -> str | None:
    """Return why a format is not worth measuring, or None and keep its rate."""
    try:
        multiply = runner.product(name, *_TRIAL)
        multiply()
    except _NO_KERNEL as error:
        return _no_kernel(error)
    best_s, _, _ = runner.time(multiply, slice_s=0.1)
    rate = 2e-12 * _TRIAL[0] * _TRIAL[1] * _TRIAL[2] / best_s
    fastest = max((trials[known] for known in _FORMATS[:2] if known in trials), default=0.0)
    if rate < _LEAST_SHARE * fastest:
        return _too_slow(rate, fastest)
    trials[name] = rate
    return None


def _without_reference_loops(figures: Sequence[Figure], skipped: dict[str, str]) -> list[Figure]:
    """The trial again, with what was measured: a short one errs where the machine is busy."""
    best: dict[str, float] = {}
    for figure in figures:
        if figure.job.what == "matmul":
            best[figure.job.format] = max(figure.value, best.get(figure.job.format, 0.0))
    fastest = max((best[name] for name in _FORMATS[:2] if name in best), default=0.0)
    for name, rate in best.items():
        if name not in _FORMATS[:2] and rate < _LEAST_SHARE * fastest:
            skipped[name] = _too_slow(rate, fastest)
    return [figure for figure in figures if figure.job.place not in skipped]


def _too_slow(rate: float, fastest: float) -> str:
    return f"{rate:.2g} TFLOP/s, less than a tenth of {fastest:.2g}: a loop for reference, no matrix unit"


def _as_device(name: str, figures: Sequence[Figure], skipped: Mapping[str, str], *, gpu: bool) -> Device:
    by_format: dict[str, list[float]] = {}
    for figure in figures:
        if figure.job.what == "matmul":
            by_format.setdefault(figure.job.format, []).append(figure.value)
    if not by_format:
        raise HardwareError(f"torch multiplies in none of {', '.join(_FORMATS)} here; measure where it does")
    moving = _bandwidths(figures)
    vectors = [figure.value for figure in figures if figure.job.what == "matvec"]
    (launch,) = [figure for figure in figures if figure.job.what == "launch"]
    machine, memory_bytes, kind, runtime_names = _machine(gpu=gpu)
    source = f"measured by `bitwright hardware profile` on {machine}, {datetime.now(UTC):%Y-%m-%d}"
    sections = ("memory", "matmul_tflops", "achieved.matmul_tflops", *(f"achieved.{way}_gb_per_s" for way in moving))
    blank = Device(
        name=name,
        aliases=(),
        vendor=machine,
        kind=kind,
        year=datetime.now(UTC).year,
        compute_capability=_compute_capability() if gpu else None,
        runtime_names=runtime_names,
        cpu_flags=(),
        memory_bytes=memory_bytes,
        memory_gb_per_s=_round(max(rate for of_format in moving.values() for rate in of_format.values())),
        last_level_cache_bytes=None,
        matmul_tflops=MappingProxyType({key: _round(max(rates)) for key, rates in by_format.items()}),
        achieved_matmul_tflops=MappingProxyType(
            {key: _round(statistics.median(rates)) for key, rates in by_format.items()}
        ),
        achieved_memory_gb_per_s=_round(max(vectors)) if vectors else None,
        achieved_gb_per_s=moving,
        launch_s=_round(launch.value),
        matmul_rules=(),
        links=(),
        notes=(
            "Peaks are the best shape's, achieved rates the median shape's; the year is that of the measurement.",
            *map(str, figures),
            *(f"{key} skipped: {reason}" for key, reason in skipped.items()),
        ),
        sources=MappingProxyType(dict.fromkeys(sections, source)),
        certainties=MappingProxyType(dict.fromkeys(sections, "measured")),
    )
    return replace(blank, matmul_rules=_known_rules(runtime_names, blank.matmul_tflops))


def _bandwidths(figures: Sequence[Figure]) -> Mapping[str, Mapping[str, float]]:
    """Way ("read", "copy", "matvec") → format → 10⁹ bytes per second; packed weights are read by products, too."""
    found: dict[str, dict[str, float]] = {}
    for figure in figures:
        if figure.job.is_moving:
            way = "matvec" if figure.job.what == "packed" else figure.job.what
            found.setdefault(way, {})[figure.job.format] = _round(figure.value)
    return MappingProxyType({way: MappingProxyType(of_format) for way, of_format in found.items()})


def _known_rules(runtime_names: tuple[str, ...], rates: Mapping[str, float]) -> tuple[MatmulRule, ...]:
    """What the catalog says of the same chip's products, of the formats that were measured."""
    known = [device for device in devices() if set(device.runtime_names) & set(runtime_names)]
    return tuple(rule for device in known for rule in device.matmul_rules if set(rule.formats) <= set(rates))


def _machine(*, gpu: bool) -> tuple[str, int, Literal["gpu", "cpu"], tuple[str, ...]]:
    """What it is, its memory in bytes, its kind, and the name that a runtime reports for it."""
    import torch

    if gpu:
        properties = torch.cuda.get_device_properties(0)
        chip = str(properties.name)
        return f"{chip}, torch {torch.__version__}", int(properties.total_memory), "gpu", (chip,)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    chip = cpu_model() or platform.machine()
    return f"{chip}, {torch.get_num_threads()} threads, torch {torch.__version__}", memory_bytes, "cpu", ()


def _compute_capability() -> float | None:
    """Of NVIDIA's GPU at hand; None of another's."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return None if torch.version.hip else properties.major + properties.minor / 10


def _round(value: float) -> float:
    return float(f"{value:.4g}")
