"""The generators that a training step may draw from, read and set: torch's (every device), NumPy's and Python's.

Dropout draws from torch, data code from NumPy or `random`. What bitwright draws itself (stochastic rounding, the order
of the data) depends on counters that are part of its own states.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Begin every generator of this process anew; `seed` in [0, 2^63), of which NumPy takes the low 32 bits."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def read_random_state() -> dict[str, Any]:
    """Return the state of every generator of this process."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {
            "kind": str(kind),
            "keys": [int(key) for key in keys],
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set every generator to a state that was read; of GPUs, those that are there."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for index, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, index)
    numpy = state["numpy"]
    keys = np.array(numpy["keys"], dtype=np.uint32)
    np.random.set_state((numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    random.setstate(state["python"])
