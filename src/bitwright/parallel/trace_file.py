"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The Trace Event Format: an object with `traceEvents`; "X" events have `ts` and `dur` in microseconds, "M" events name
processes and threads. A stage is a process, a lane a thread.
"""

from __future__ import annotations

import json

from bitwright.parallel.timeline import Timeline

#: Lanes from top to bottom.
LANES = ("compute", "tp", "ep", "cp", "pp", "dp", "optimizer")


def trace_text(timeline: Timeline) -> str:
    """Return a timeline as the JSON of a Chrome trace."""
    stages = sorted({event.stage for event in timeline.events})
    used = {(event.stage, event.lane) for event in timeline.events}
    events: list[dict[str, object]] = []
    for stage in stages:
        name = "every GPU" if len(stages) == 1 else f"stage {stage}"
        events.append({"ph": "M", "name": "process_name", "pid": stage, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": stage, "args": {"sort_index": stage}})
        for thread, lane in enumerate(LANES):
            if (stage, lane) in used:
                events.append({"ph": "M", "name": "thread_name", "pid": stage, "tid": thread, "args": {"name": lane}})
    for event in timeline.events:
        events.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": event.category,
                "pid": event.stage,
                "tid": LANES.index(event.lane),
                "ts": round(event.start_s * 1e6, 3),
                "dur": round(event.duration_s * 1e6, 3),
            }
        )
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": timeline.title}}
    return json.dumps(whole, ensure_ascii=False) + "\n"
