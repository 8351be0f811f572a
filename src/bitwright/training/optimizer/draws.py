"""Which random bits a step of stochastic rounding draws: a seed for every step and every tensor, from one seed.

`quantize` draws word i of a seed for element i. Two draws must not share a seed, or their roundings are the same ones.
So Philox itself makes the seeds: its counter is (step, what is rounded, which batch of it), its key the run's seed, and
two words of the block are the seed that is used. All of it is arithmetic on integers: the same on every machine, and a
checkpoint holds two numbers. Ranks that keep equal copies have to draw equal bits, so that no rank is in the counter.

Source: `formats/philox.py`. Rejected: seed + step, under which step 1 of seed 0 is step 0 of seed 1.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from bitwright.errors import TrainingError
from bitwright.formats.philox import philox4x32

_LOW = 0xFFFFFFFF


class Draws:
    """The seeds of a run.

    Args:
        seed: in [0, 2^64).

    Raises:
        TrainingError: the seed is no such number.
    """

    def __init__(self, seed: int = 0) -> None:
        if not 0 <= seed < 1 << 64:
            raise TrainingError(f"seed is {seed}; give a whole number in [0, 2**64)")
        self.seed = seed
        #: Steps that were taken.
        self.step = 0

    def seed_of(self, what: str, batch: int) -> int:
        """The seed, in [0, 2^64), for one of the things that this step rounds.

        Args:
            what: its name; the same in every step.
            batch: which of the things of that name.
        """
        counter = np.array([[self.step & _LOW], [self.step >> 32], [zlib.crc32(what.encode())], [batch]], np.uint64)
        low, high, _, _ = philox4x32(
            (counter[0], counter[1], counter[2], counter[3]), (self.seed & _LOW, self.seed >> 32)
        )
        return int(low[0]) | int(high[0]) << 32

    def advance(self) -> None:
        """End a step."""
        self.step += 1

    def state_dict(self) -> dict[str, int]:
        """Both numbers."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a `state_dict` left off."""
        self.seed, self.step = int(state["seed"]), int(state["step"])
