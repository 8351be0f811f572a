"""Runs and times one operation at a time on this machine, for `profile.py`; imports torch when used."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One figure to measure."""

    what: Literal["matmul", "matvec", "read", "copy", "launch"]
    format: str = "fp32"
    #: m, n, k of a product.
    shape: tuple[int, int, int] = (0, 0, 0)

    def __str__(self) -> str:
        if self.what == "matmul":
            return f"matmul {self.format} {' x '.join(map(str, self.shape))}"
        return f"matvec {self.format} {MATVEC[0]} x {MATVEC[1]}" if self.what == "matvec" else self.what


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured figure."""

    job: Job
    #: TFLOP/s of a product, 10⁹ bytes per second of what moves, seconds of a launch.
    value: float
    #: How far the median of the repeats lies above the best time, as a share of it.
    spread: float
    repeats: int

    def __str__(self) -> str:
        unit = {"matmul": "TFLOP/s", "launch": "s"}.get(self.job.what, "GB/s")
        return f"{self.job}: {self.value:.4g} {unit}, best of {self.repeats}, median {100 * self.spread:.0f} % slower"


class Bench:
    """Runs one job on one device of torch."""

    def __init__(self, *, gpu: bool, effort: Effort) -> None:
        import torch

        self._torch = torch
        self._gpu = gpu
        self._device = torch.device("cuda" if gpu else "cpu")
        self._effort = effort

    def figure(self, job: Job) -> Figure:
        run, amount = self._prepare(job)
        best_s, spread, repeats = self.time(run, slice_s=self._effort.slice_s)
        return Figure(
            job=job, value=best_s if job.what == "launch" else amount / best_s, spread=spread, repeats=repeats
        )

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
        if name == "fp8_e4m3":
            one = torch.ones((), device=self._device)
            fp8_MK, fp8_KN = x_MK.to(torch.float8_e4m3fn), w_NK.to(torch.float8_e4m3fn).T
            return lambda: torch._scaled_mm(fp8_MK, fp8_KN, one, one, out_dtype=torch.bfloat16)
        if name == "tf32":
            return self._in_tf32(x_MK, w_NK.T)
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        left_MK, right_KN = x_MK.to(dtype), w_NK.to(dtype).T
        return lambda: left_MK @ right_KN

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

    def _prepare(self, job: Job) -> tuple[Callable[[], object], float]:
        """What to run, and the 10¹² operations or 10⁹ bytes of one run."""
        torch = self._torch
        if job.what == "matmul":
            m, n, k = job.shape
            return self.product(job.format, m, n, k), 2e-12 * m * n * k
        if job.what == "matvec":
            out_features, in_features = MATVEC
            bits = {"fp32": 32, "bf16": 16}[job.format]
            return self.product(job.format, 1, out_features, in_features), 1e-9 * out_features * in_features * bits / 8
        if job.what == "launch":
            number = torch.zeros(1, device=self._device)
            return lambda: number.add_(1), 0.0
        source = torch.ones(self._effort.streamed_bytes // 4, device=self._device)
        if job.what == "read":
            return source.sum, 4e-9 * source.numel()
        target = torch.empty_like(source)
        return lambda: target.copy_(source), 8e-9 * source.numel()

    def _sample(self, run: Callable[[], object], inner: int) -> float:
        started_s = time.perf_counter()
        for _ in range(inner):
            run()
        self._synchronize()
        return time.perf_counter() - started_s

    def _synchronize(self) -> None:
        if self._gpu:
            self._torch.cuda.synchronize()
