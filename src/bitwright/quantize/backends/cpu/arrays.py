"""Tensors as the arrays that kernels read and write, the threads that they run on, and memory for results.

Large results are allocated by NumPy, which asks for huge pages: memory fresh from the system otherwise costs several
times what it takes to fill it. Results larger than the caches are written past them (see `lanes`).
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitwright.quantize.backends.cpu import tiles
from bitwright.quantize.backends.cpu.announce import run
from bitwright.quantize.backends.cpu.lanes import CACHE_LINE
from bitwright.quantize.backends.cpu.steps import BLOCK
from bitwright.quantize.backends.cpu.team import Team, openmp_of_torch

#: What arrays hold a torch dtype's numbers; the kernels tell them apart by it.
ARRAY_DTYPES = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
#: Numbers per thread below which a second thread costs more than it brings.
MIN_PER_THREAD = 1 << 14
#: Bytes from which on results are allocated in huge pages; below, the C library gives out memory that was used before.
HUGE_BYTES = 1 << 25
#: Bytes from which on results are written past the caches.
STREAMED_BYTES = 1 << 25
_OWN_PROCESS = os.getpid()


def run_whole(
    one: Any, several: Any, arrays: tuple[Any, ...], numbers: int, arguments: tuple[Any, ...], multiple: int = BLOCK
) -> None:
    """Call a kernel for a flat array of so many numbers, in ranges that begin at multiples of a length."""
    run_rows(one, several, arrays, numbers, arguments, numbers, multiple)


def run_rows(
    one: Any,
    several: Any,
    arrays: tuple[Any, ...],
    num_rows: int,
    arguments: tuple[Any, ...],
    numbers: int,
    multiple: int = 1,
) -> None:
    """Call a kernel for all rows, on one thread or in ranges on several.

    Args:
        one: the kernel; called with `*arrays, first, last, *arguments`.
        several: the same, of all rows by a team; called with `*arrays, num_rows, *arguments, team`.
        arrays, num_rows, arguments: what it works on.
        numbers: how many there are in all, from which the threads that are worth it follow.
        multiple: a range begins at a multiple of it.
    """
    num_threads = min(num_rows, _num_threads(numbers))
    if num_threads <= 1:
        run(one, *arrays, 0, num_rows, *arguments)
        return
    step = -(-num_rows // (num_threads * multiple)) * multiple
    if openmp := openmp_of_torch():
        run(several, *arrays, num_rows, *arguments, Team(*openmp, np.int64(num_threads), np.int64(step)))
        return
    ranges = [(first, min(num_rows, first + step)) for first in range(0, num_rows, step)]
    run(one, *arrays, *ranges[0], *arguments)  # compiled once, not by each thread
    for done in [_own_threads().submit(one, *arrays, *some, *arguments) for some in ranges[1:]]:
        done.result()


@cache
def _own_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="bitwright")


def array_of(x: Tensor) -> Any:
    """The numbers of a contiguous tensor as a flat NumPy array that the kernels know."""
    flat = x.view(ARRAY_DTYPES[x.dtype]).reshape(-1)
    # Where many processes share a model, weights may be put together for one use and their memory freed afterwards
    # (FSDP), which torch forbids for ever once a tensor was handed out by `numpy()`.
    is_shared = torch.distributed.is_available() and torch.distributed.is_initialized()
    return np.from_dlpack(flat) if is_shared else flat.numpy()


def target_for(source: Tensor, out: Tensor | None) -> Tensor:
    """Where a kernel writes: `out` if it is contiguous, else new memory."""
    return out if out is not None and out.is_contiguous() else new_memory(source.shape, source.dtype)


def finished(target: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    """What was asked for: `out`, if it was given."""
    return target if out is None or target is out else out.copy_(target)


def new_memory(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory to write to: in huge pages where it is large."""
    if math.prod(shape) * dtype.itemsize < HUGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).reshape(shape)


def streams_to(target: Tensor, columns: int = BLOCK, size: int = BLOCK) -> bool | None:
    """True if results go past the caches, else None: they are larger than those, and blocks begin with cache lines."""
    if target.numel() * target.element_size() < STREAMED_BYTES or target.data_ptr() % CACHE_LINE:
        return None
    return True if columns % BLOCK == 0 and (size % BLOCK == 0 or size in (8, 16, 32)) else None


def _num_threads(numbers: int) -> int:
    """Threads for so many numbers; one in a process that was forked, where the threads of OpenMP do not exist."""
    if os.getpid() != _OWN_PROCESS:
        return 1
    return max(1, min(torch.get_num_threads(), numbers // MIN_PER_THREAD))


def row_length(numbers: int) -> int:
    """A length that divides a number of elements, near RUN_NUMBERS, so that threads share them; else all of them."""
    for length in (tiles.RUN_NUMBERS, 1024, 256, 64):
        if numbers % length == 0:
            return length
    return numbers


def cut_into_runs(rows: int, columns: int, size: int) -> tuple[int, int]:
    """Rows and columns of the same matrix cut anew for threads: into runs of whole groups where its rows hold such."""
    if columns % size or rows > 64:
        return rows, columns
    length = size * tiles.RUN_GROUPS
    return (rows * columns // length, length) if rows * columns % length == 0 else (rows, columns)
