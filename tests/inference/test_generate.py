"""Generation: the tokens of transformers' own, without a host that waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from small_plans import choice, plan_of, uniform_plan
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache, DynamicLayer
from value_models import make_value_model

from bitwright.errors import DataError
from bitwright.inference import FallbackSettings, apply
from bitwright.inference.counters import FallbackCounts
from bitwright.inference.generation.generate import generate
from bitwright.inference.generation.sampling import Chooser, Sampling
from bitwright.inference.generation.token_reader import DeviceClock, StreamCalls, TokenReader, bring
from bitwright.models import find_sites, find_value_sites

IDS = torch.arange(18).reshape(2, 9) * 7 % 256


def of_transformers(model: Any, ids: Tensor, num_tokens: int, mask: Tensor | None = None) -> list[list[int]]:
    mask = torch.ones_like(ids) if mask is None else mask
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return found[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("architecture", "kind", "lag"),
    [
        ("llama", "dynamic", 0),
        ("llama", "static", 1),
        ("gpt2", "dynamic", 1),
        ("gemma3", "dynamic", 0),
        ("gemma3", "static", 0),
    ],
)
def test_greedy_text_is_that_of_transformers(architecture: str, kind: Any, lag: int) -> None:
    model = make_value_model(architecture)
    planned = apply(uniform_plan(find_sites(model), "int4_g32"), model, mode="auto", dtype=torch.float32)
    found = generate(planned, IDS, max_new_tokens=7, cache_kind=kind, lag=lag)
    assert [list(tokens) for tokens in found.tokens] == of_transformers(planned, IDS, 7)
    assert found.num_steps == 6 and found.stopped == (False, False) and found.num_prompt_tokens == 9
    assert found.cache_bytes > 0


def test_prompts_of_different_lengths_are_padded_on_their_left() -> None:
    model = make_value_model("llama")
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    found = generate(model, IDS, max_new_tokens=5, attention_mask=mask)
    alone = generate(model, IDS[:1, 4:], max_new_tokens=5)
    assert [list(tokens) for tokens in found.tokens] == of_transformers(model, IDS, 5, mask)
    assert found.tokens[0] == alone.tokens[0]


@pytest.mark.parametrize("lag", [0, 1])
def test_stop_tokens_end_a_sequence_and_only_it(lag: int) -> None:
    model = make_value_model("llama")
    whole = generate(model, IDS, max_new_tokens=8).tokens
    stop = next(token for token in whole[0] if token not in whole[1])
    place = whole[0].index(stop)
    heard: list[list[int | None]] = []
    found = generate(model, IDS, max_new_tokens=8, stop_ids={stop}, on_tokens=heard.append, lag=lag)
    assert found.tokens == (whole[0][:place], whole[1]) and found.stopped == (True, False)
    assert [step[1] for step in heard] == list(whole[1])
    assert [step[0] for step in heard if step[0] is not None] == list(whole[0][:place])
    alone = generate(model, IDS[:1], max_new_tokens=8, stop_ids={stop}, lag=lag)
    assert alone.tokens == (whole[0][:place],) and alone.num_steps <= place + lag


def test_a_text_goes_on_from_its_cache() -> None:
    model = make_value_model("llama")
    whole = generate(model, IDS, max_new_tokens=3)
    first = generate(model, IDS[:, :6], max_new_tokens=1)
    second = generate(model, IDS[:, 6:], max_new_tokens=3, cache=first.cache)
    assert second.tokens == whole.tokens


class Waits(TorchDispatchMode):
    """Counts what makes a host wait for a device: numbers read one by one, and copies to where the host is."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts of calls that a loop over a GPU must not make: by method, and by what torch runs."""
    mode = Waits()

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def call(self: Tensor, *arguments: Any, **named: Any) -> Any:
            mode.counts[name] += 1
            return original(self, *arguments, **named)

        return call

    for name in ("item", "cpu", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(Tensor, name, counted(name))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: mode.counts.update(["synchronize"]))
    with mode:
        yield mode.counts


@pytest.mark.parametrize(
    ("architecture", "scheme", "lag"),
    [
        ("llama", "int4_g32", 0),
        ("llama", "int8_static", 0),
        ("llama", "int8_static", 1),
        ("gpt2", "int8", 1),
        ("gemma3", "int4_g32", 0),
    ],
)
def test_no_step_makes_the_host_wait(architecture: str, scheme: str, lag: int, waits: Counter[str]) -> None:
    """Whatever a step asked for would be asked for more often in more steps."""
    model = make_value_model(architecture)
    weights = uniform_plan(find_sites(model), scheme)
    caches = [site for site in find_value_sites(model) if site.role == "kv_cache"]
    plan = plan_of([*weights.sites, *(choice(site, "int8_token") for site in caches)], weights.tensors)
    planned = apply(plan, model, mode="auto", dtype=torch.float32)
    counts = []
    for num_tokens in (2, 2, 5):  # what is done once is done in the first
        waits.clear()
        generate(planned, IDS, max_new_tokens=num_tokens, sampling=Sampling(temperature=1.0, top_p=0.9), lag=lag)
        counts.append(dict(waits))
    assert counts[1] == counts[2]


def test_the_count_sees_what_waits(waits: Counter[str]) -> None:
    x = torch.ones(3)
    assert x.sum().item() == 3 and bool(x.any()) and int(x[0]) == 1
    x.cpu()
    assert waits["item"] == waits["__bool__"] == waits["__int__"] == waits["cpu"] == 1
    assert waits["aten._local_scalar_dense.default"] >= 3


#: A scale under which INT8 reaches all inputs of these models.
FAR = 0.05


def overflowing_plan(model: Any, scale: float, only: str = "") -> Any:
    """INT8 inputs under one scale, of matrices with that in their names; those of others reach far."""
    plan = uniform_plan(find_sites(model), "int8_static")
    tensors = {name: np.full_like(array, scale if only in name else FAR) for name, array in plan.tensors.items()}
    return plan.attach(tensors=tensors)


def overflowing(architecture: str, scale: float, only: str = "", **settings: int) -> Any:
    model = make_value_model(architecture)
    plan = overflowing_plan(model, scale, only)
    return apply(plan, model, mode="auto", dtype=torch.float32, fallback=FallbackSettings(**settings))


def told_of(planned: Any) -> dict[str, tuple[int, ...]]:
    """Matrix → everything that was counted of it."""
    fields = FallbackCounts.__dataclass_fields__
    fallbacks = planned.bitwright_run.counters.fallbacks
    return {name: tuple(getattr(counts, field) for field in fields) for name, counts in fallbacks.items()}


NEVER_HELD = {"window": 100, "enter": 100}


@pytest.mark.parametrize(
    ("scale", "only", "max_fallbacks"),
    [(1e-4, "", 3), (0.01, "down_proj", 0), (0.01, "down_proj", 1), (0.02, "up_proj", 3), (FAR, "", 3)],
)
def test_what_is_heard_late_is_the_same_rule(scale: float, only: str, max_fallbacks: int) -> None:
    """The tokens of looking at once, and its counts, matrix by matrix: of two sequences some overflow, or both."""
    runs = [overflowing("llama", scale, only, max_fallbacks_per_batch=max_fallbacks, **NEVER_HELD) for _ in range(2)]
    found = [generate(planned, IDS, max_new_tokens=12, lag=lag) for lag, planned in enumerate(runs)]
    assert found[1].tokens == found[0].tokens and found[1].num_steps == found[0].num_steps == 11
    assert told_of(runs[1]) == told_of(runs[0])
    assert found[1].cache.get_seq_length() == found[0].cache.get_seq_length()
    late, at_once = (planned.bitwright_run.counters for planned in reversed(runs))
    assert at_once.repeated_steps == at_once.overflowed_steps == 0
    assert late.repeated_steps == late.overflowed_steps == {1e-4: 11, FAR: 0}.get(scale, late.repeated_steps)
    assert (late.repeated_steps > 0) == (scale < FAR)


def test_a_storm_heard_late_repeats_no_more_than_holds() -> None:
    """Of twenty steps that overflow, those until matrices are held are run twice, and the one that was under way."""
    planned = overflowing("llama", 1e-4, window=6, enter=3, leave=6)
    generate(planned, IDS, max_new_tokens=21, lag=1)
    counters = planned.bitwright_run.counters
    assert counters.overflowed_steps == 20 and 2 <= counters.repeated_steps <= 3
    for counts in counters.fallbacks.values():
        assert counts.calls == 21 and counts.tokens == 2 * 20 + 18 and counts.overflowed_tokens >= counts.tokens - 2
        assert counts.held_calls >= 21 - 4 and counts.switches == 1


def test_what_overflowed_in_the_prompt_is_held_in_the_first_step() -> None:
    planned = overflowing("llama", 1e-4, window=1, enter=1, leave=3)
    generate(planned, IDS, max_new_tokens=6, lag=1)
    counters = planned.bitwright_run.counters
    assert counters.repeated_steps == 0 and counters.metrics()["fallback_held_calls"] == 14 * 5


def test_a_storm_that_moves_about_does_not_repeat_for_ever() -> None:
    """Every step overflows, in a matrix that itself overflows too seldom to be held."""
    planned = overflowing("llama", FAR, window=8, enter=4, leave=8)
    names = list(planned.bitwright_run.counters.fallbacks)
    step = -1

    def overflows_in_turn(name: str) -> Any:
        return lambda x: torch.ones(x.shape, dtype=torch.bool) if names[step % len(names)] == name else x > 1e9

    for name in names:
        planned.get_submodule(name.removesuffix(".weight")).packed.inputs.overflows = overflows_in_turn(name)

    def begin(*_: Any) -> None:
        nonlocal step
        step += 1

    planned.register_forward_pre_hook(begin)
    generate(planned, IDS, max_new_tokens=25, lag=1)
    counters = planned.bitwright_run.counters
    assert counters.overflowed_steps == 24 and counters.repeated_steps <= 5
    assert counters.metrics()["fallback_held_calls"] == 0


@pytest.mark.parametrize("kind", ["dynamic", "static", "codes"])
def test_a_window_that_slid_is_brought_back(kind: str) -> None:
    """Tokens of looking at once, from caches whose step overwrites what a repeated step needs: a window of 7."""
    model = make_value_model("gemma3")
    weights = overflowing_plan(model, 0.022, "up_proj")
    caches = [site for site in find_value_sites(model) if site.role == "kv_cache" and kind == "codes"]
    plan = plan_of([*weights.sites, *(choice(site, "int8_token") for site in caches)], weights.tensors)
    found, runs = [], []
    for lag in (0, 1):
        settings = FallbackSettings(**NEVER_HELD)
        runs.append(apply(plan, model, mode="auto", dtype=torch.float32, fallback=settings))
        cache_kind: Any = "static" if kind == "static" else "dynamic"
        found.append(generate(runs[-1], IDS, max_new_tokens=16, lag=lag, cache_kind=cache_kind))
    assert found[1].tokens == found[0].tokens and found[1].notes == ()
    assert told_of(runs[1]) == told_of(runs[0])
    assert runs[1].bitwright_run.counters.repeated_steps > 0


def test_a_cache_that_cannot_be_brought_back_runs_exactly_and_says_so() -> None:
    class OwnLayer(DynamicLayer):  # type: ignore[misc]
        pass

    at_once, late = (overflowing("llama", 0.02, "up_proj", **NEVER_HELD) for _ in range(2))
    expected = generate(at_once, IDS, max_new_tokens=12, lag=0)
    found = generate(late, IDS, max_new_tokens=12, lag=1, cache=Cache(layer_class_to_replicate=OwnLayer))
    assert found.tokens == expected.tokens and told_of(late) == told_of(at_once)
    counters = late.bitwright_run.counters
    assert counters.repeated_steps == 0 and counters.overflowed_steps > 0
    (note,) = found.notes
    assert note.startswith("no step is taken back in a cache of OwnLayer, so that what may overflow is computed")


@pytest.mark.parametrize(("architecture", "scale"), [("llama", 1e-4), ("llama", 0.02), ("gemma3", 0.02)])
def test_no_step_that_overflows_makes_the_host_wait(architecture: str, scale: float, waits: Counter[str]) -> None:
    """Inputs of matrices overflow, and keys and values in caches of codes; of the second model with windows."""
    model = make_value_model(architecture)
    weights = overflowing_plan(model, scale)
    caches = [site for site in find_value_sites(model) if site.role == "kv_cache"]
    scales = {f"{site.name}/scale": np.full(1, scale / 20, np.float32) for site in caches}
    sites = [*weights.sites, *(choice(site, "fp8_e4m3_tensor") for site in caches)]
    plan = plan_of(sites, {**weights.tensors, **scales})
    settings = FallbackSettings(**NEVER_HELD)
    planned: Any = apply(plan, model, mode="auto", dtype=torch.float32, fallback=settings)
    counts = []
    for num_tokens in (2, 2, 6):
        waits.clear()
        generate(planned, IDS, max_new_tokens=num_tokens, lag=1)
        counts.append(dict(waits))
    assert counts[1] == counts[2]
    assert planned.bitwright_run.counters.repeated_steps > 0
    fallbacks = planned.bitwright_run.counters.fallbacks
    assert all(fallbacks[site.name].token_fallbacks > 0 for site in caches)


def test_sampling_draws_what_it_says() -> None:
    """Shares of 20,000 draws, against the probabilities cut by hand."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -8.0]]).repeat(20_000, 1)
    probabilities = (logits[0] / 0.8).softmax(-1)
    for top_p, kept in ((1.0, 5), (0.9, 2), (0.3, 1)):
        drawn = Chooser(Sampling(temperature=0.8, top_p=top_p, seed=1), logits.device)(logits)
        shares = torch.bincount(drawn.flatten(), minlength=5) / len(logits)
        expected = torch.where(torch.arange(5) < kept, probabilities, 0.0)
        torch.testing.assert_close(shares, expected / expected.sum(), rtol=0, atol=0.015)
        again = Chooser(Sampling(temperature=0.8, top_p=top_p, seed=1), logits.device)(logits)
        assert torch.equal(drawn, again)
    assert int(Chooser(Sampling(), logits.device)(logits[:1])) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, r"top_p is 1.5; give the share"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Sampling(**settings)


def test_what_no_model_can_go_on_with_is_refused() -> None:
    model = make_value_model("llama")
    with pytest.raises(DataError, match="the prompt is empty"):
        generate(model, IDS[:, :0], max_new_tokens=3)
    with pytest.raises(DataError, match="0 new tokens were asked for"):
        generate(model, IDS, max_new_tokens=0)
    with pytest.raises(DataError, match=r"9 tokens of prompt and 504 new ones are more than the model's 512 positions"):
        generate(model, IDS, max_new_tokens=504)


def test_a_reader_reads_in_order_and_forgets_the_last() -> None:
    reader = TokenReader(torch.device("cpu"), 1)
    for first in range(3):
        reader.send(torch.tensor([[first], [10 + first]]))
    reader.forget(1)
    assert [reader.read(), reader.read()] == [[0, 10], [1, 11]]


class Recorded(StreamCalls):
    """A device that only notes what it is asked for: streams, events and moments by number."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.moments = 0

    def new_stream(self, device: torch.device) -> Any:
        return RecordedStream(self, "side")

    def current_stream(self, device: torch.device) -> Any:
        return RecordedStream(self, "model")

    def fixed_memory(self, like: Tensor) -> Tensor:
        self.calls.append("fixed memory")
        return RecordedTensor(self, torch.empty_like(like))  # type: ignore[return-value]

    def new_mark(self, device: torch.device) -> Any:
        self.moments += 1
        return RecordedEvent(self, f"mark {self.moments}", 1000.0 * self.moments**2)


class RecordedEvent:
    def __init__(self, record: Recorded, name: str, ms: float = 0.0) -> None:
        self.of, self.name, self.ms = record, name, ms

    def record(self, stream: Any) -> None:
        self.of.calls.append(f"{self.name} on {stream.name}")

    def synchronize(self) -> None:
        self.of.calls.append(f"wait for {self.name}")

    def elapsed_time(self, other: RecordedEvent) -> float:
        return other.ms - self.ms


class RecordedStream:
    def __init__(self, record: Recorded, name: str) -> None:
        self.of, self.name = record, name

    def wait_stream(self, other: RecordedStream) -> None:
        self.of.calls.append(f"{self.name} after {other.name}")

    def __enter__(self) -> None:
        self.of.calls.append(f"on {self.name}")

    def __exit__(self, *_: Any) -> None:
        self.of.calls.append(f"off {self.name}")

    def record_event(self) -> RecordedEvent:
        self.of.moments += 1
        self.of.calls.append(f"event {self.of.moments}")
        return RecordedEvent(self.of, f"event {self.of.moments}")


class RecordedTensor:
    def __init__(self, record: Recorded, numbers: Tensor) -> None:
        self.of, self.numbers = record, numbers

    def copy_(self, source: Any, non_blocking: bool = False) -> RecordedTensor:
        self.of.calls.append("copy, the host goes on" if non_blocking else "copy")
        self.numbers.copy_(source.numbers if isinstance(source, RecordedTensor) else source)
        return self

    def record_stream(self, stream: RecordedStream) -> None:
        self.of.calls.append(f"kept for {stream.name}")

    def reshape(self, *shape: int) -> Tensor:
        return self.numbers.reshape(*shape)

    def to(self, device: torch.device, non_blocking: bool) -> Any:
        self.of.calls.append("to the device, the host goes on" if non_blocking else "to the device")
        return self

    shape = property(lambda self: self.numbers.shape)
    dtype = property(lambda self: self.numbers.dtype)


def test_tokens_of_a_gpu_are_copied_beside_the_next_step() -> None:
    """On a stream that begins when the step has ended; the host waits for nothing but the copy of a step ago."""
    record = Recorded()
    record.fixed_memory = lambda like: RecordedTensor(record, torch.empty(like.shape, dtype=like.dtype))  # type: ignore
    reader = TokenReader(torch.device("cuda"), calls=record)
    assert reader.lag == 1
    one_copy = ["side after model", "on side", "copy, the host goes on", "kept for side"]
    for step in (1, 2):
        reader.send(RecordedTensor(record, torch.tensor([[step], [10 + step]])))  # type: ignore[arg-type]
    assert record.calls == [*one_copy, "event 1", "off side", *one_copy, "event 2", "off side"]
    record.calls.clear()
    assert reader.read() == [1, 11] and record.calls == ["wait for event 1"]


def test_times_of_a_gpu_are_its_own() -> None:
    """Marks lie on the stream of the model, and only the last is waited for, when the times are asked for."""
    record = Recorded()
    clock = DeviceClock(torch.device("cuda"), record)
    for _ in range(3):
        clock.mark()
    assert record.calls == ["mark 1 on model", "mark 2 on model", "mark 3 on model"]
    assert clock.seconds() == (3.0, 5.0) and record.calls[3:] == ["wait for mark 3"]
    here = DeviceClock(torch.device("cpu"))
    here.mark()
    here.mark()
    assert len(here.seconds()) == 1 and here.seconds()[0] >= 0


def test_a_prompt_goes_to_a_gpu_while_the_host_goes_on() -> None:
    record = Recorded()
    ids = torch.tensor([[1, 2, 3]])
    assert bring(ids, torch.device("cpu"), record) is ids and record.calls == []
    arrived: Any = bring(ids, torch.device("cuda"), record)
    assert torch.equal(arrived.numbers, ids)
    assert record.calls == ["fixed memory", "copy", "to the device, the host goes on"]
