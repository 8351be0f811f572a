"""`self`: text sampled from the model itself, for when there is none (`speaker.py` has the how and why).

A plan can be chosen on it. What proves a plan should be text that somebody wrote: where the proof rests on sampled
text too, the plan says so.
"""

from __future__ import annotations

from bitwright.search.documents import CalibrationSet

CALIBRATION_SETS = (
    CalibrationSet(
        name="self",
        description="text sampled from the model itself, at temperature 1",
        source="the model in question",
        is_sampled=True,
    ),
)
