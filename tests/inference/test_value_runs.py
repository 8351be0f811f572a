"""What a report says of values and of attention is what happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_plans import choice, plan_of, uniform_plan
from torch.nn import functional as F
from value_models import make_value_model

from bitwright.inference import apply
from bitwright.models import find_sites, find_value_sites

IDS = torch.arange(14).reshape(2, 7) * 7 % 256
CACHES = {"k_cache": "int8_token", "v_cache": "int8_token"}


def planned_with(schemes: dict[str, str], mode: str) -> Any:
    """Parts of value sites → how they are rounded."""
    model = make_value_model("llama")
    values = [choice(site, schemes[site.part]) for site in find_value_sites(model) if site.part in schemes]
    plan = plan_of([*uniform_plan(find_sites(model), "int8_w").sites, *values])
    return apply(plan, model, mode=mode, dtype=torch.float32)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call of torch's fused attention."""
    calls: list[int] = []
    original = F.scaled_dot_product_attention

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return original(*arguments, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return calls


def run(planned: Any, *, use_cache: bool) -> None:
    with torch.no_grad():
        planned(input_ids=IDS, use_cache=use_cache)


@pytest.mark.parametrize("mode", ["emulate", "packed"])
def test_attention_that_is_rounded_inside_is_said_to_run_step_by_step(mode: str, fused_calls: list[int]) -> None:
    schemes = {**CACHES, "qk": "fp8_e4m3_token", "norm": "bf16_values", "down": "bf16_values"}
    planned = planned_with(schemes, mode)
    run(planned, use_cache=True)
    assert fused_calls == []
    report = planned.bitwright_run
    found = {value.name: (value.role, value.scheme, value.kernel) for value in report.values}
    layer = "model.layers.0"
    assert found[f"{layer}.self_attn:qk"] == ("attn.qk", "fp8_e4m3_token", "step by step, fp32")
    assert found[f"{layer}.self_attn:k_cache"] == ("kv_cache", "int8_token", "fp32" if mode == "emulate" else "codes")
    assert found[f"{layer}.mlp:down"][2] == ("fp32" if mode == "emulate" else "behind the kernel")
    assert found[f"{layer}.input_layernorm:norm"] == ("norm", "bf16_values", "fp32")
    assert len(found) == 2 * 6 + 1
    (note,) = (note for note in report.notes if "attention" in note)
    assert note.startswith(
        "attention runs step by step, fp32 in all layers, in place of sdpa, since attn.qk are rounded"
    )
    table = report.table().splitlines()
    assert any(line.split() == "attn.qk fp8_e4m3_token step by step, fp32 2".split() for line in table)
    assert sum(line.startswith("step by step, fp32: no kernel rounds inside attention") for line in table) == 1
    assert f"note: {note}" in table


def test_over_a_cache_of_codes_attention_is_the_model_s_own(fused_calls: list[int]) -> None:
    planned = planned_with(CACHES, "packed")
    run(planned, use_cache=True)
    assert len(fused_calls) == 2
    run(planned, use_cache=False)
    assert len(fused_calls) == 2
    (note,) = planned.bitwright_run.notes
    assert "without a cache, or with one of a fixed size, and is sdpa with one that grows" in note


def test_a_report_without_values_says_nothing_of_them(fused_calls: list[int]) -> None:
    planned = planned_with({}, "packed")
    run(planned, use_cache=True)
    report = planned.bitwright_run
    assert len(fused_calls) == 2 and report.values == () and "attention" not in report.table()
