"""What matrices tell a loop that may not wait for the device: that something overflowed, and what it tells them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(kw_only=True, slots=True, eq=False)
class OverflowWatch:
    """What the matrices of one model share, for loops that may not wait for the device."""

    #: Only mark overflows: whoever sets it reads `seen` later.
    late: bool = False
    #: Everything wide, whatever the inputs are.
    wide: bool = False
    #: Whether anything overflowed since it was taken, bool 0-d on the device.
    seen: Tensor | None = None

    def mark(self, overflowed_M: Tensor) -> None:
        """Remember that something overflowed, without looking."""
        found = overflowed_M.any()
        self.seen = found if self.seen is None else self.seen | found

    def take(self) -> Tensor | None:
        """What was seen, and forget it."""
        seen, self.seen = self.seen, None
        return seen
