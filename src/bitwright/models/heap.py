"""What the C library does with memory that is freed.

glibc takes blocks of up to 32 MiB from one heap, and what a pass over a model frees stays with the process wherever a
block that is still in use lies above it: after one calibration of 1.5 billion weights 2.2 GiB (`benchmarks/scale.py`).

Rejected: blocks of a MiB and more mapped one by one (M_MMAP_THRESHOLD). All of it goes back at once, but every
temporary of a search for codes then comes with fresh pages to clear, and scoring took nearly twice as long.
"""

from __future__ import annotations

import ctypes


def give_back_freed_memory() -> bool:
    """Give the system back all whole pages that are free in the C library's heaps.

    Returns:
        Whether there were any; False also where the C library has no ``malloc_trim`` (glibc has).
    """
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    malloc_trim.argtypes = [ctypes.c_size_t]
    return bool(malloc_trim(0))
