"""Runs and times one operation at a time on this machine, for `profile.py`; imports torch when used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

#: out, in of the weight that one token is multiplied by: the MLP of a model of seven billion parameters.
MATVEC = (11008, 4096)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How large and how long the measurements are on one kind of machine."""

    #: m, n, k of the matrix products.
    shapes: tuple[tuple[int, int, int], ...]
    #: Bytes of the tensor that is read and copied.
    streamed_bytes: int
    #: Seconds of repeats for one figure.
    slice_s: float


class PackedProducts(Protocol):
    """Products with packed weights, which the package brings along (`quantize/packed_products.py`)."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats that weights are packed in."""

    def prepare(self, name: str, x_MK: torch.Tensor, w_NK: torch.Tensor) -> tuple[Callable[[], object], int, str]:
        """What multiplies, the bytes of the packed weight, and which kernel it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One figure to measure."""

    what: Literal["matmul", "matvec", "packed", "read", "copy", "launch"]
    format: str = "fp32"
    #: m, n, k of a product.
    shape: tuple[int, int, int] = (0, 0, 0)

    @property
    def place(self) -> str:
        """What falls away together: all plain products of a format, or one way of moving it."""
        return self.format if self.what in ("matmul", "matvec") else f"{self.what} {self.format}"

    @property
    def is_moving(self) -> bool:
        """Whether it is the bytes that count: of a product, where it is with one token."""
        return self.what in ("matvec", "read", "copy") or (self.what == "packed" and self.shape[0] == 1)

    def __str__(self) -> str:
        if self.what == "launch":
            return self.what
        return f"{self.what} {self.format} {' x '.join(map(str, self.shape))}" if any(self.shape) else self.place


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured figure."""

    job: Job
    #: TFLOP/s of a product, 10⁹ bytes per second of what moves, seconds of a launch.
    value: float
    #: How far the median of the repeats lies above the best time, as a share of it.
    spread: float
    repeats: int
    #: Which kernel it was, where that is chosen.
    how: str = ""

    def __str__(self) -> str:
        unit = "s" if self.job.what == "launch" else "GB/s" if self.job.is_moving else "TFLOP/s"
        kernel = f" ({self.how})" if self.how else ""
        return (
            f"{self.job}: {self.value:.4g} {unit}, best of {self.repeats}, median {100 * self.spread:.0f} % "
            f"slower{kernel}"
        )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What to run, and the 10¹² operations or 10⁹ bytes of one run."""

    run: Callable[[], object]
    amount: float
    how: str = ""


class Bench:
    """Runs one job on one device of torch.

    Args:
        gpu: the first GPU, or the processor.
        effort: how large and how long.
        packed: what multiplies with packed weights; None: no job asks for it.
    """

    def __init__(self, *, gpu: bool, effort: Effort, packed: PackedProducts | None = None) -> None:
        import torch

        self._torch = torch
        self._gpu = gpu
        self._device = torch.device("cuda" if gpu else "cpu")
        self._effort = effort
        self._packed = packed

    def figure(self, job: Job, *, inputs: str = "bf16") -> Figure:
        """Measure; `inputs` is the format of what is multiplied with packed weights."""
        prepared = self._prepare(job, inputs)
        best_s, spread, repeats = self.time(prepared.run, slice_s=self._effort.slice_s)
        value = best_s if job.what == "launch" else prepared.amount / best_s
        return Figure(job=job, value=value, spread=spread, repeats=repeats, how=prepared.how)

    def time(self, run: Callable[[], object], *, slice_s: float) -> tuple[float, float, int]:
        """Return the best seconds of one run, how far the median lies above, and how many samples there were."""
        run()
        self._synchronize()
        first_s = self._sample(run, 1)
        # one sample is long beside the clock, and on a GPU beside its launches
        inner = max(1, min(1000, round((0.01 if self._gpu else 0.001) / max(first_s, 1e-9))))
        samples: list[float] = []
        end_s = time.perf_counter() + slice_s
        while len(samples) < 3 or (time.perf_counter() < end_s and len(samples) < 500):
            samples.append(self._sample(run, inner) / inner)
        best_s = min(samples)
        return best_s, statistics.median(samples) / best_s - 1, len(samples)

    def product(self, name: str, m: int, n: int, k: int) -> Callable[[], object]:
        """Return x[m, k] @ W[n, k]ᵀ in a format, with its operands made."""
        torch = self._torch
        x_MK, w_NK = torch.randn(m, k, device=self._device), torch.randn(n, k, device=self._device)
        if name == "int8":
            codes_MK, codes_KN = (32 * x_MK).to(torch.int8), (32 * w_NK).to(torch.int8).T
            return lambda: torch._int_mm(codes_MK, codes_KN)
        if name in ("fp8_e4m3", "fp8_e5m2"):
            # of two factors in E5M2 there is no product: it is the format of gradients, which meet weights in E4M3
            one = torch.ones((), device=self._device)
            fp8_MK, fp8_KN = x_MK.to(self._dtype(name)), w_NK.to(torch.float8_e4m3fn).T
            return lambda: torch._scaled_mm(fp8_MK, fp8_KN, one, one, out_dtype=torch.bfloat16)
        if name == "tf32":
            return self._in_tf32(x_MK, w_NK.T)
        dtype = self._dtype(name)
        left_MK, right_KN = x_MK.to(dtype), w_NK.to(dtype).T
        return lambda: left_MK @ right_KN

    def _dtype(self, name: str) -> torch.dtype:
        torch = self._torch
        known = {
            "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
            "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
        }  # fmt: skip
        if name not in known:
            raise NotImplementedError(f"torch has no dtype of {name}: it lies packed in bytes")
        return known[name]

    def _in_tf32(self, x_MK: torch.Tensor, w_KN: torch.Tensor) -> Callable[[], object]:
        torch = self._torch

        def multiply() -> object:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            try:
                return x_MK @ w_KN
            finally:
                torch.set_float32_matmul_precision(before)

        return multiply

    def _prepare(self, job: Job, inputs: str) -> _Prepared:
        torch = self._torch
        m, n, k = job.shape
        if job.what == "matmul":
            return _Prepared(self.product(job.format, m, n, k), 2e-12 * m * n * k)
        if job.what == "matvec":
            return _Prepared(self.product(job.format, m, n, k), 1e-9 * n * k * self._dtype(job.format).itemsize)
        if job.what == "packed":
            assert self._packed is not None
            x_MK = torch.randn(m, k, device=self._device).to(self._dtype(inputs))
            run, num_bytes, how = self._packed.prepare(job.format, x_MK, torch.randn(n, k, device=self._device))
            amount = 1e-9 * num_bytes if job.is_moving else 2e-12 * m * n * k
            return _Prepared(run, amount, f"{inputs} inputs, {how}")
        if job.what == "launch":
            number = torch.zeros(1, device=self._device)
            return _Prepared(lambda: number.add_(1), 0.0)
        dtype = self._dtype(job.format)
        source = torch.ones(self._effort.streamed_bytes // dtype.itemsize, device=self._device).to(dtype)
        moved = 1e-9 * source.numel() * dtype.itemsize
        if job.what == "read":
            # not the sum, which torch widens 8 bits for: it is bound by that, and not by memory
            return _Prepared(source.max, moved)
        target = torch.empty_like(source)
        return _Prepared(lambda: target.copy_(source), 2 * moved)

    def _sample(self, run: Callable[[], object], inner: int) -> float:
        started_s = time.perf_counter()
        for _ in range(inner):
            run()
        self._synchronize()
        return time.perf_counter() - started_s

    def _synchronize(self) -> None:
        if self._gpu:
            self._torch.cuda.synchronize()
