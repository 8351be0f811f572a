"""The most memory that something took while it ran, beyond what was held when it began.

    peak = PeakMemory("cpu");  with peak: …;  peak.bytes

On a GPU torch's allocator counts it. On a CPU it is the high-water mark of the process's resident memory, which Linux
sets back on request ("5" to /proc/self/clear_refs, proc(5)); memory that allocators kept from before and use again is
not seen, so the first run of several is the one to ask. Elsewhere there is no mark that can be set back, and no number.

Rejected: counting tensors (kernels allocate outside of torch, and a mode that sees every tensor slows what is timed);
the mark of the process's whole life (loading a model takes more than running it).
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures a `with` block.

    Args:
        device_type: where what runs in it keeps its tensors.
    """

    def __init__(self, device_type: str) -> None:
        self._on_gpu = device_type == "cuda"
        self._before = 0
        #: None where the system does not tell.
        self.bytes: int | None = None

    def __enter__(self) -> Self:
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        elif _sets_back_the_mark():
            self._before = _resident("VmRSS")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._on_gpu:
            self.bytes = torch.cuda.max_memory_allocated() - self._before
        elif self._before:
            self.bytes = max(0, _resident("VmHWM") - self._before)


def _sets_back_the_mark() -> bool:
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:  # another system, or one that forbids it
        return False
    return True


def _resident(line: str) -> int:
    """Bytes of one line of the process's status."""
    (found,) = (row for row in _STATUS.read_text(encoding="ascii").splitlines() if row.startswith(f"{line}:"))
    return int(found.split()[1]) * 1024
