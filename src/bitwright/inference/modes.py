"""The ways to run a plan, and the names of what is computed in.

emulate   fp32 values of the codes, on any device
packed    codes stay packed in memory and are expanded inside the kernel
native    the device multiplies codes with codes
auto      each site native where the device has that, else packed
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from bitwright import formats
from bitwright.catalog import nearest_name_hint
from bitwright.errors import UnknownName
from bitwright.quantize.pack import stored_dtype

Mode = Literal["emulate", "packed", "native", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)


def find_mode(name: str) -> Mode:
    """The mode of that name.

    Raises:
        UnknownName: there is none.
    """
    for mode in MODES:
        if mode == name:
            return mode
    raise UnknownName(f"unknown mode {name!r}{nearest_name_hint(name, list(MODES))} Known modes: {', '.join(MODES)}")


def spell_dtype(dtype: torch.dtype) -> str:
    """ "bf16", "fp16", "fp32" …"""
    for number in formats.FORMATS.values():
        if stored_dtype(number) == dtype:
            return number.name
    return str(dtype).removeprefix("torch.")
