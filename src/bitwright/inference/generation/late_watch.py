"""Overflows of which a decode loop hears late: what is remembered before a step, and whether it is run again.

    before the step    what takes it back in the cache, and whether it is exact (`overflow_watch.py`)
    after it           the marks that it left: their counts go to the host with its token
    when it is heard   its counts are counted; or nothing is, and it is run again, exactly

A loop that looks at once has nothing to watch, and neither has a model in which nothing can overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bitwright.inference.overflow_watch import Mark, counts_of
from bitwright.inference.run_report import RunReport

if TYPE_CHECKING:
    from bitwright.inference.cache.step_back import Undo


@dataclass(kw_only=True, slots=True, eq=False)
class WatchedStep:
    """What is known of a step of which the host has not heard."""

    is_exact: bool = False
    #: Whether it was run before.
    is_repeated: bool = False
    #: What takes it back.
    before: tuple[Undo, ...] = ()
    marks: tuple[Mark, ...] = ()


@dataclass(kw_only=True, slots=True, eq=False)
class LateWatch:
    """The watch of one decode loop."""

    #: Of the model; None where nothing is watched.
    run: RunReport | None
    #: Why no step can be taken back; None where they can.
    why_not_back: str | None = None
    #: Anything a reader must know.
    notes: tuple[str, ...] = field(default=())

    @staticmethod
    def of(run: Any, cache: Any, lag: int) -> LateWatch:
        """The watch of a loop that hears `lag` steps late, over a cache that holds its prompt."""
        if not isinstance(run, RunReport) or lag == 0 or not run.counters.fallbacks:
            return LateWatch(run=None)
        from bitwright.inference.cache.step_back import can_step_back

        if can_step_back(cache):
            return LateWatch(run=run)
        kinds = sorted({type(layer).__name__ for layer in getattr(cache, "layers", (cache,))})
        why_not = (
            f"no step is taken back in a cache of {', '.join(kinds)}, so that what may overflow is computed rounded "
            "and unrounded in every step"
        )
        return LateWatch(run=run, why_not_back=why_not)

    def __enter__(self) -> LateWatch:
        if self.run is not None:
            self.run.watch.late = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.run is not None:
            self.run.watch.late = self.run.watch.exact = False
            self.run.watch.take()

    def before_step(self, cache: Any, *, is_repeated: bool = False) -> WatchedStep:
        """Get ready for a step."""
        if self.run is None:
            return WatchedStep()
        from bitwright.inference.cache.step_back import remember

        watch = self.run.watch
        watch.exact = is_repeated or watch.steps.is_wide or self.why_not_back is not None
        before = remember(cache) if self.why_not_back is None else ()
        return WatchedStep(is_exact=watch.exact, is_repeated=is_repeated, before=before)

    def after_step(self, step: WatchedStep) -> Tensor | None:
        """Take the step's marks; their counts, int64 [2 · marks] on the device."""
        if self.run is None:
            return None
        step.marks = self.run.watch.take()
        if self.why_not_back is not None and any(mark.saturates for mark in step.marks):
            self.notes = (self.why_not_back,)
        return counts_of(step.marks)

    def must_repeat(self, step: WatchedStep, counts: Sequence[int]) -> bool:
        """Whether a step has to be run again, exactly; else what its counts tell is counted."""
        if self.run is None or not step.marks:
            return False
        told = list(zip(step.marks, counts[0::2], counts[1::2], strict=True))
        has_saturated = any(mark.saturates and num_tokens for mark, num_tokens, _ in told)
        if has_saturated and not step.is_exact:
            return True
        for mark, num_tokens, num_values in told:
            mark.hear(num_tokens, num_values)
        self.run.watch.steps.step(step.is_repeated or has_saturated)
        self.run.counters.overflowed_steps += any(num_tokens for _, num_tokens, _ in told)
        return False

    def take_back(self, step: WatchedStep, num_tokens: int) -> None:
        """Bring the cache back to where it was before a step, `num_tokens` ago, which is then run again."""
        from bitwright.inference.cache.step_back import step_back

        assert self.run is not None
        step_back(step.before, num_tokens)
        self.run.counters.repeated_steps += 1
