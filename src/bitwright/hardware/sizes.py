"""What sizes have to be before bytes are counted for them."""

from __future__ import annotations

from bitwright.errors import HardwareError


def raise_if_not_positive(**sizes: float) -> None:
    """Raise HardwareError, naming the first size that is not above zero."""
    for name, value in sizes.items():
        if not value > 0:
            raise HardwareError(f"{name} is {value}, but bytes are counted for positive sizes only; correct it")


def raise_if_negative(**sizes: float) -> None:
    """Raise HardwareError, naming the first size that is below zero."""
    for name, value in sizes.items():
        if not value >= 0:
            raise HardwareError(f"{name} is {value}, but a number of bits is never negative; use 0 where there is none")
