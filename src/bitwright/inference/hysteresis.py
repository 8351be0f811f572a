"""How often something may overflow before it stays wide, so that nothing flaps.

A second pass for a few tokens costs as much as a pass for all of them where memory is the limit, so that what overflows
often is faster in the wide format alone. `Hysteresis` decides that: it holds wide when `enter` of the last `window`
calls overflowed, and lets go after `leave` calls in a row without. Between two switches to wide lie at least `leave`
calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from bitwright.errors import SchemeError


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackSettings:
    """How much falls back, and when.

    Raises:
        SchemeError: counts that are not positive, or more calls to enter than the window has.
    """

    #: Rows of one call that are computed again by themselves; more send all rows of it to the wide format.
    max_fallbacks_per_batch: int = 3
    #: Calls that are remembered.
    window: int = 16
    #: So many of them with an overflow, and the matrix stays wide.
    enter: int = 8
    #: So many calls in a row without one, and it is rounded again.
    leave: int = 16

    def __post_init__(self) -> None:
        if self.max_fallbacks_per_batch < 0 or self.enter < 1 or self.leave < 1 or self.window < self.enter:
            raise SchemeError(
                f"fallback settings {self.max_fallbacks_per_batch}, enter {self.enter} of {self.window}, leave "
                f"{self.leave} contradict each other; give at least 0 fallbacks, 1 ≤ enter ≤ window and leave ≥ 1"
            )


#: What `apply` does unless it is told.
DEFAULT_FALLBACK = FallbackSettings()


@dataclass(kw_only=True, slots=True)
class Hysteresis:
    """Whether a matrix is held wide: a state machine over calls."""

    settings: FallbackSettings
    is_wide: bool = False
    num_calm: int = 0
    recent: deque[bool] = field(default_factory=deque)

    def step(self, overflowed: bool) -> bool:
        """Take in one call; return whether the next one is held wide."""
        if self.is_wide:
            self.num_calm = 0 if overflowed else self.num_calm + 1
            if self.num_calm >= self.settings.leave:
                self.is_wide = False
                self.recent.clear()
            return self.is_wide
        self.recent.append(overflowed)
        if len(self.recent) > self.settings.window:
            self.recent.popleft()
        if sum(self.recent) >= self.settings.enter:
            self.is_wide, self.num_calm = True, 0
        return self.is_wide
