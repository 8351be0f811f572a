"""What the C library does with memory that is freed.

glibc takes blocks from one heap, and learns from every large block that is freed to take the next of that size from
there too, up to 32 MiB. What a pass over a model frees then stays with the process wherever a small block lies above
it: after one calibration of 1.5 billion weights 2.2 GiB (`benchmarks/scale.py`).
"""

from __future__ import annotations

import ctypes

#: From which size on a block is mapped by itself.
LEAST_MAPPED_BYTES = 1 << 20
#: What may lie unused at the top of the heap; learnt from the same blocks otherwise.
_MOST_UNUSED_BYTES = 16 << 20
#: Numbers of the parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_back_large_blocks() -> bool:
    """From now on blocks of LEAST_MAPPED_BYTES and more are mapped one by one, and go back as soon as they are freed.

    That holds for the whole process and as long as it lives; a fresh block costs the time to clear its pages.

    Returns:
        Whether the C library can be told so: glibc can; others keep to their own rules.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return mallopt(_M_MMAP_THRESHOLD, LEAST_MAPPED_BYTES) == 1 and mallopt(_M_TRIM_THRESHOLD, _MOST_UNUSED_BYTES) == 1
