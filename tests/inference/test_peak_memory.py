"""Peak memory: what a block takes at most, whatever it gives back."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from bitwright.inference.generation import peak_memory
from bitwright.inference.generation.peak_memory import PeakMemory

MEGABYTES = 1_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sets back the mark of a process")
def test_memory_that_was_given_back_is_counted_and_what_was_there_is_not() -> None:
    held = np.ones(200 * MEGABYTES, dtype=np.uint8)
    del held
    peak = PeakMemory("cpu")
    with peak:
        held = np.ones(100 * MEGABYTES, dtype=np.uint8)
        del held
    assert peak.bytes is not None and 95 * MEGABYTES < peak.bytes < 130 * MEGABYTES


def test_a_system_that_does_not_tell_gives_no_number(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(peak_memory, "_CLEAR", peak_memory.Path(str(tmp_path)) / "nowhere" / "clear_refs")
    peak = PeakMemory("cpu")
    with peak:
        pass
    assert peak.bytes is None
