"""CPU kernels on several threads, and with results that go past the caches: the same numbers as on one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from galleries import same_bits
from numba import njit
from torch import Tensor

from bitwright import formats
from bitwright.quantize import SCHEMES, TensorScheme
from bitwright.quantize.backends import cpu
from bitwright.quantize.backends import torch as torch_backend
from bitwright.quantize.backends.cpu import arrays
from bitwright.quantize.backends.cpu.team import Team, in_team, openmp_of_torch

ROOT = Path(__file__).parents[2]
#: One of each kind of number (float, integer, codebook), of rule, and of which numbers share a scale.
SCALED = ("mxfp4", "int4_g128", "nf4_g64", "nvfp4", "fp8_block")


@pytest.fixture(params=["in the caches", "past the caches", "without torch's OpenMP"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    if request.param == "past the caches":
        monkeypatch.setattr(arrays, "STREAMED_BYTES", 1)
    if request.param == "without torch's OpenMP":
        monkeypatch.setattr(arrays, "openmp_of_torch", lambda: None)
    yield
    torch.set_num_threads(before)


def matrix(dtype: torch.dtype) -> Tensor:
    """Enough numbers for three threads, whose rows do not divide by three; NaN, zeros and an outlier among them."""
    x = torch.randn(200, 512, generator=torch.Generator().manual_seed(0))
    x[7, 3], x[9], x[100, 300] = torch.nan, 0.0, 1e6
    return x.to(dtype)


def scheme_of(name: str) -> TensorScheme:
    scheme = SCHEMES[name].weights
    assert scheme is not None
    return scheme


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", SCALED)
def test_scaled(name: str) -> None:
    x, scheme = matrix(torch.float32), scheme_of(name)
    assert same_bits(cpu.fake_quantize(x, scheme), torch_backend.fake_quantize(x, scheme))
    packed, expected = cpu.pack(x, scheme), torch_backend.pack(x, scheme)
    assert torch.equal(packed.codes, expected.codes)
    assert same_bits(cpu.unpack(packed), torch_backend.unpack(expected))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp8_e4m3", "bf16", "int8", "nf4"])
def test_elementwise(name: str, dtype: torch.dtype) -> None:
    x, number = matrix(dtype), formats.get(name)
    assert same_bits(cpu.round_values(x, number), torch_backend.round_values(x, number))


@pytest.mark.usefixtures("threads")
def test_every_mode_and_delayed_scaling() -> None:
    x, number = matrix(torch.float32), formats.get("fp8_e5m2")
    drawn = cpu.round_values(x, number, rounding="stochastic", seed=5)
    assert same_bits(drawn, torch_backend.round_values(x, number, rounding="stochastic", seed=5))
    x[7, 3] = 0.0
    values, amax = cpu.scale_with_amax(x, number, torch.tensor(0.3))
    expected, largest = torch_backend.scale_with_amax(x, number, torch.tensor(0.3))
    assert same_bits(values, expected) and amax == largest == 1e6


_FIRST_CALL = """
import os, torch
from bitwright.quantize import SCHEMES, fake_quantize
torch.set_num_threads(3)
torch.ones(512, 512).sin()
before = len(os.listdir("/proc/self/task"))
fake_quantize(torch.ones(512, 512), SCHEMES["mxfp8"].weights)
print(torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(openmp_of_torch() is None, reason="torch has another OpenMP than GNU's here")
def test_kernels_run_on_the_threads_of_torch() -> None:
    """They start none of their own, and torch keeps its number of threads."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_CALL], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["3", "0"]


@njit(nogil=True, error_model="numpy")
def _mark(marks: Any, first: Any, last: Any, forbidden: Any) -> None:
    if first <= forbidden < last:
        raise ValueError("forbidden")
    for i in range(first, last):
        marks[i] += 1


@njit(nogil=True, error_model="numpy")
def _mark_parallel(marks: Any, count: Any, forbidden: Any, team: Any) -> None:
    in_team(_mark, (marks,), count, (forbidden,), team)


@pytest.mark.skipif(openmp_of_torch() is None, reason="torch has another OpenMP than GNU's here")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_a_team_does_every_item_once_and_says_that_a_kernel_failed(num_threads: int) -> None:
    openmp = openmp_of_torch()
    assert openmp is not None
    for count, step in ((17, 3), (16, 4), (5, 100)):
        team = Team(*openmp, np.int64(num_threads), np.int64(step))
        marks = np.zeros(count, np.int64)
        _mark_parallel(marks, count, -1, team)
        assert (marks == 1).all()
        with pytest.raises(RuntimeError, match="one of its threads"):
            _mark_parallel(marks, count, count - 1, team)


def test_results_that_do_not_begin_with_a_cache_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "STREAMED_BYTES", 1)
    x, scheme = matrix(torch.float32), scheme_of("mxfp4")
    for offset in (1, 4, 16):
        out = torch.empty(x.numel() + offset)[offset:].view(x.shape)
        assert same_bits(cpu.fake_quantize(x, scheme, out=out), torch_backend.fake_quantize(x, scheme))


def test_rows_that_are_no_multiple_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "STREAMED_BYTES", 1)
    x = matrix(torch.float32)[:, :500].contiguous()
    for name in ("mxfp4", "int4_g128", "fp8_w"):
        assert same_bits(cpu.fake_quantize(x, scheme_of(name)), torch_backend.fake_quantize(x, scheme_of(name)))


def test_callers_on_several_threads_at_once() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = matrix(torch.float32)
        schemes = [scheme_of(name) for name in SCALED] * 4
        expected = {scheme: torch_backend.fake_quantize(x, scheme) for scheme in set(schemes)}
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda scheme: cpu.fake_quantize(x, scheme), schemes))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(values, expected[scheme]) for scheme, values in zip(schemes, found, strict=True))


def test_a_forked_process_works_on_one_thread() -> None:
    """As a worker of a DataLoader that was forked from a process whose kernels ran on several threads."""
    code = """
import os, sys, torch
from bitwright.quantize import SCHEMES, fake_quantize
torch.set_num_threads(2)
x = torch.randn(256, 512)
values = fake_quantize(x, SCHEMES["mxfp4"].weights).numpy()
child = os.fork()
if child == 0:  # compared by NumPy: torch's own operations on several threads hang here
    found = fake_quantize(x, SCHEMES["mxfp4"].weights).numpy()
    os._exit(0 if (found == values).all() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)
