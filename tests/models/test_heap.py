"""Freed memory goes back to the system, which the kernel's own account of the process shows."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

#: Blocks of 8 MiB among small ones that stay; glibc has learnt from a freed block of 32 MiB to keep such in its heap.
_RUN = """
import ctypes, sys
from bitwright.models.heap import give_back_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024
def taken(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block
libc.free(taken(31 << 20))
before, large = resident(), []
for _ in range(20):
    large.append(taken(8 << 20))
    taken(100 << 10)
for block in large:
    libc.free(block)
if sys.argv[1] == "given back":
    assert give_back_freed_memory()
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have rules of their own")
@pytest.mark.parametrize(("said", "least", "most"), [("given back", 1, 8), ("left", 100, 200)])
def test_freed_blocks_leave_the_process(said: str, least: float, most: float) -> None:
    done = subprocess.run([sys.executable, "-c", _RUN, said], capture_output=True, text=True, check=True)
    assert least < float(done.stdout) < most
