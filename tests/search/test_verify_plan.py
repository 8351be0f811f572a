"""A plan measured again, from scratch: the same numbers from the written folder, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_search import NoStage, random_text, text_set

from bitwright.errors import PlanError
from bitwright.inference import Overflows
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Plan, load_plan, write_plan
from bitwright.search.compare import TokenEffects
from bitwright.search.limits import judge
from bitwright.search.outputs.tokens import Tokens
from bitwright.search.verify import PlanRun, ReferenceFacts, bf16_floor, lasting_path, measured_record, verify


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_a_written_plan_measures_the_same(
    plan_of: Callable[[str], Plan], load_tiny: Callable[..., LoadedModel], tmp_path: Path, architecture: str
) -> None:
    plan = plan_of(architecture)
    read = load_plan(write_plan(plan, tmp_path / "plan"))
    assert read.content_hash == plan.content_hash
    assert verify(read, model=load_tiny(architecture)) == plan.measured


def test_other_text_and_fewer_tokens(
    plan_of: Callable[[str], Plan], load_tiny: Callable[..., LoadedModel], tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(f"The {i}th line says {i * 7919} and then some more words." for i in range(600)))
    found = verify(plan_of("llama"), model=load_tiny("llama"), evaluation=other, tokens=64 * 16)
    assert found.source == "other.txt" and found.kl.mean > 0
    assert found != plan_of("llama").measured


def test_the_wrong_model_is_an_error(plan_of: Callable[[str], Plan], load_tiny: Callable[..., LoadedModel]) -> None:
    for other in (load_tiny("llama", 1), load_tiny("gpt2")):
        with pytest.raises(PlanError, match="not those that the plan was made for"):
            verify(plan_of("llama"), model=other)


def test_a_plan_without_its_tensors_is_an_error(
    plan_of: Callable[[str], Plan], load_tiny: Callable[..., LoadedModel]
) -> None:
    plan = plan_of("gpt2")
    assert plan.tensors
    with pytest.raises(PlanError, match="hold no scales"):
        verify(plan.attach(tensors={}), model=load_tiny("gpt2"))


def test_a_plan_without_its_options_cannot_be_repeated(
    plan_of: Callable[[str], Plan], load_tiny: Callable[..., LoadedModel]
) -> None:
    with pytest.raises(PlanError, match="how its text was cut"):
        verify(plan_of("llama").replace(options=None), model=load_tiny("llama"))


def test_a_limit_is_kept_up_to_its_very_value() -> None:
    limits = judge({"max_kl": 0.02, "effective_bits": 4.5}, {"max_kl": 0.02, "effective_bits": 4.5000001})
    assert [(limit.name, limit.status, limit.met) for limit in limits] == [
        ("max_kl", "measured", True),
        ("effective_bits", "missed", False),
    ]


def test_the_tail_is_told_from_a_hundred_thousand_tokens_on() -> None:
    """The 99.9th percentile of 1 … n is known; with fewer tokens nothing is said."""
    facts = ReferenceFacts(bf16_floor_kl=1e-3, repetition=0.0)
    text = text_set(torch.zeros(100, 8, dtype=torch.int64), torch.ones(100, 8, dtype=torch.bool))
    for num_tokens, expected in ((99_900, None), (100_000, 99_900.001)):
        token_kl = np.arange(1.0, num_tokens + 1)
        per_sequence = np.full(100, num_tokens / 100)
        effects = TokenEffects(
            num_scored=per_sequence,
            kl=token_kl.reshape(100, -1).sum(1),
            nll_reference=per_sequence,
            nll_plan=per_sequence,
            num_agreeing=per_sequence,
            token_kl=token_kl,
        )
        run = PlanRun(effects=effects, repetition=0.0, rounded=Overflows())
        found = measured_record(run, Tokens(), facts, text, 0).kl_p999
        assert found == (None if expected is None else pytest.approx(expected))


def test_overflows_are_told_where_values_are_rounded(load_tiny: Callable[..., LoadedModel]) -> None:
    """Three values of a thousand beyond the range, in two of ten tokens; and nothing rounded."""
    model, text = load_tiny("llama").model, random_text(8, 16)
    reference = Tokens().run_reference(model, text, NoStage())
    effects = Tokens().compare(reference, model, NoStage())
    facts = ReferenceFacts(bf16_floor_kl=1e-3, repetition=0.0)
    rounded = Overflows(num_values=1000, num_overflows=3, num_tokens=10, num_overflowed_tokens=2)
    for counts, expected in ((rounded, (3000.0, 0.2)), (Overflows(), (None, None))):
        run = PlanRun(effects=effects, repetition=0.0, rounded=counts)
        found = measured_record(run, Tokens(), facts, text, 0)
        assert (found.overflows, found.fallback_rate) == expected


def test_the_bf16_floor_is_the_kl_of_the_model_in_bf16(load_tiny: Callable[..., LoadedModel]) -> None:
    model = load_tiny("llama").model
    reference = Tokens().run_reference(model, random_text(8, 16), NoStage())
    assert 1e-7 < bf16_floor(model, Tokens(), reference, NoStage()) < 1e-2
    assert next(model.parameters()).dtype == torch.float32


def test_a_text_or_model_that_is_gone_is_named_with_what_to_do(plan_of: Callable[[str], Plan], tmp_path: Path) -> None:
    plan = plan_of("llama")
    gone = str(tmp_path / "gone")
    moved = plan.attach(run=plan.run.model_copy(update={"paths": {**plan.run.paths, "model": gone}}))
    with pytest.raises(PlanError, match=r"model lay at .*gone.* give it with --model"):
        verify(moved)


def test_files_are_remembered_by_their_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.txt").write_text("text")
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert lasting_path("own.txt") == str(tmp_path / "own.txt")
    assert [lasting_path(name) for name in ("docs", "demo", "owner/name")] == ["docs", "demo", "owner/name"]
