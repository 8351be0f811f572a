"""Timelines: they end when the step does, lanes never overlap themselves, and both files are what they should be."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from bitwright.parallel.step_time import step_time
from bitwright.parallel.timeline import timeline
from bitwright.parallel.trace_file import trace_text
from bitwright.parallel.trace_svg import svg_text

from .conftest import MakeJob

LAYOUTS = [
    {"dp": 8, "zero": 3, "micro_batch": 2},
    {"dp": 4, "tp": 2, "zero": 1, "is_sequence_parallel": True},
    {"dp": 2, "pp": 4, "zero": 1},
    {"dp": 2, "tp": 2, "pp": 2, "interleave": 2, "zero": 1},
    {"pp": 8, "schedule": "gpipe"},
    {"dp": 8, "zero": 3, "zero_group": 4},
    {"dp": 4, "tp": 2, "zero": 2, "is_sequence_parallel": True},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_timeline_ends_when_the_step_does(make_job: MakeJob, layout: dict[str, object]) -> None:
    job = make_job(global_batch=32, **layout)
    assert timeline(job).end_s == pytest.approx(step_time(job).seconds, rel=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lane_does_one_thing_at_a_time(make_job: MakeJob, layout: dict[str, object]) -> None:
    lanes = defaultdict(list)
    for event in timeline(make_job(global_batch=32, **layout)).events:
        if event.lane != "pp":  # messages to different stages do pass each other
            lanes[event.stage, event.lane].append(event)
    for events in lanes.values():
        events.sort(key=lambda event: event.start_s)
        assert all(b.start_s >= a.end_s - 1e-9 for a, b in itertools.pairwise(events))


def test_a_pipeline_draws_what_its_passes_wait_for(make_job: MakeJob) -> None:
    job = make_job(global_batch=32, dp=2, tp=2, pp=2, zero=1, is_sequence_parallel=True)
    found, time = timeline(job), step_time(job)
    lanes = {(event.stage, event.lane) for event in found.events}
    assert {(stage, lane) for stage in (0, 1) for lane in ("compute", "tp", "dp", "pp")} <= lanes
    # Every micro-batch's collectives of every layer, forward and backward, half of the layers on a stage.
    waits = sum(event.duration_s for event in found.events if (event.stage, event.lane) == (0, "tp"))
    layers = job.shape.num_layers / 2
    assert waits == pytest.approx(16 * layers * (time.forward.tp + time.backward.tp))
    # A stage does nothing else while it waits.
    own = sorted((e for e in found.events if e.stage == 0 and e.lane in ("compute", "tp")), key=lambda e: e.start_s)
    assert all(b.start_s >= a.end_s - 1e-9 for a, b in itertools.pairwise(own))


def test_a_pipeline_passes_on_activations_and_gradients(make_job: MakeJob) -> None:
    found = timeline(make_job(global_batch=32, dp=2, pp=4, zero=1))
    sends = [event for event in found.events if event.lane == "pp"]
    by_stage = {
        (stage, word): sum(e.stage == stage and e.name.startswith(f"send {word}") for e in sends)
        for stage in range(4)
        for word in ("forward", "backward")
    }
    # 16 micro-batches; the last stage has nobody to pass activations to, the first nobody to pass gradients to.
    assert by_stage == {
        **{(stage, "forward"): 16 * (stage < 3) for stage in range(4)},
        **{(stage, "backward"): 16 * (stage > 0) for stage in range(4)},
    }


def test_a_long_step_is_cut_and_says_so(make_job: MakeJob) -> None:
    found = timeline(make_job(global_batch=512, pp=4, dp=2))
    assert (found.drawn, found.num_micro_batches) == (32, 256)
    assert "32 of 256 micro-batches" in found.title


def test_the_trace_is_one_that_perfetto_reads(make_job: MakeJob) -> None:
    found = timeline(make_job(global_batch=32, dp=2, pp=4, zero=1))
    trace = json.loads(trace_text(found))
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(found.events)
    assert all({"name", "cat", "pid", "tid", "ts", "dur"} <= event.keys() for event in complete)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    names = {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {(stage, f"stage {stage}") for stage in range(4)}
    threads = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in complete} == threads


def test_the_drawing_is_well_formed(make_job: MakeJob) -> None:
    job = make_job(global_batch=16, dp=8, zero=3)
    named = replace(job, shape=replace(job.shape, name="a<b>&c"))
    root = ElementTree.fromstring(svg_text(timeline(named)))
    assert root.tag.endswith("svg")
    assert len(list(root.iter("{http://www.w3.org/2000/svg}rect"))) > 64
