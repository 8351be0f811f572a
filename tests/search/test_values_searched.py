"""Values through the whole job: in question, chosen, in the plan, and measured again from the written folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_embedding import encoder_tokenizer
from tiny_search import SCHEMES, search_options
from value_models import VOCABULARY

from bitwright.models import LoadedModel, find_value_sites, from_memory, values_left_out
from bitwright.models.pooling import Pooling
from bitwright.plan import Budget, Plan, load_plan, write_plan
from bitwright.plan.schema import role_label
from bitwright.quantize import VALUE_SCHEMES
from bitwright.search.optimize import optimize, verify

#: Something for every role: without a scale, one per token, static per head, probabilities.
VALUES = ("bf16_values", "int8_token", "fp8_e4m3_head", "fp8_e4m3_unit")
ATTENTION = {"attn.qk", "attn.softmax", "attn.softmax_sum", "attn.pv", "attn.output"}
LAYER = {"mlp.up", "mlp.act", "mlp.down", "norm", "residual"}
ROLES = {
    "llama": ATTENTION | LAYER | {"kv_cache"},
    "mixtral": ATTENTION | LAYER | {"kv_cache", "router"},
    "bert": ATTENTION | LAYER,
}


@pytest.fixture
def load(load_tiny: Callable[..., LoadedModel], make_tiny_encoder: Callable[..., Any]) -> Callable[[str], LoadedModel]:
    def make(architecture: str) -> LoadedModel:
        if architecture != "bert":
            return load_tiny(architecture)
        return from_memory(make_tiny_encoder(), encoder_tokenizer(), name="tiny-bert", pooling=Pooling(mode="mean"))

    return make


def rounded(plan: Plan) -> dict[str, str]:
    """Value site → scheme, of those that a plan rounds."""
    return {site.name: site.scheme for site in plan.sites if site.kind != "weight" and site.scheme != "as_loaded"}


@pytest.mark.parametrize(
    ("architecture", "values"), [("llama", "all"), ("mixtral", "all"), ("bert", "all"), ("llama", "cache")]
)
def test_values_are_chosen_and_measured_again_from_the_folder(
    load: Callable[[str], LoadedModel], prose: Path, tmp_path: Path, architecture: str, values: str
) -> None:
    loaded = load(architecture)
    task = "embedding" if architecture == "bert" else "text"
    options = search_options(prose, schemes=(*SCHEMES, *VALUES), values=values, task=task)
    plan = optimize(loaded, budget=Budget(effective_bits=6.0), **options)
    asked = {"kv_cache"} if values == "cache" else ROLES[architecture]
    found = {site.name: site for site in plan.sites if site.kind != "weight"}
    assert {site.role for site in found.values()} == asked
    assert set(rounded(plan)) == {site.name for site in find_value_sites(loaded.model) if site.role in asked}
    for site in found.values():
        scheme = VALUE_SCHEMES[site.scheme]
        keeps = scheme.static and site.role != "attn.softmax"  # probabilities have a scale that nothing tells
        assert any(name.startswith(f"{site.name}/") for name in plan.tensors) == keeps, site.name
        assert site.reason and site.predicted_kl >= 0
    assert not any("cannot be reached" in note for note in plan.notes)

    read = load_plan(write_plan(plan, tmp_path / "plan"))
    assert read.content_hash == plan.content_hash
    assert verify(read, model=load(architecture)) == plan.measured
    weights_alone = read.replace(sites=tuple(site for site in read.sites if site.kind == "weight"))
    without = verify(weights_alone, model=loaded)
    assert plan.measured is not None and plan.measured.kl.mean != without.kl.mean
    kind_of = {site.role: site.kind for site in found.values()}
    # one probe a role and the roles of the plan: each was measured, and changed something
    measured = {p.role: p.measured_kl for p in plan.predictions if p.kind == "role"}
    assert all(measured[role_label(kind_of[role], role)] > 0 for role in asked)
    assert 0.3 < plan.predictions[-1].predicted_kl / plan.measured.kl.mean < 3


def test_keys_per_channel_are_chosen_where_a_few_channels_are_large(
    make_tiny_model: Callable[..., Any], tiny_tokenizer: Any, prose: Path, tmp_path: Path
) -> None:
    """Two channels of K that hardly turn with the position are large at every token: a scale per token is theirs."""

    def loaded(outlier: float) -> LoadedModel:
        model = make_tiny_model("qwen2")
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.view(2, 16)[:, [7, 15]] += outlier
        return from_memory(model, tiny_tokenizer, name="tiny-qwen2")

    names = ("int8_w", "int8_token", "int4_token", "int4_channel_g32")

    def searched(outlier: float, budget: Budget, **changes: Any) -> Plan:
        options = search_options(prose, schemes=names, values="cache", sequence_length=32, evaluation_tokens=64 * 32)
        return optimize(loaded(outlier), budget=budget, **(options | changes))

    def of_keys(plan: Plan) -> set[str]:
        return {scheme for name, scheme in rounded(plan).items() if name.endswith(":k_cache")}

    plan = searched(40.0, Budget(effective_bits=9.0), schemes=("int8_w", "int4_token", "int4_channel_g32"))
    assert of_keys(plan) == {"int4_channel_g32"}
    assert {scheme for name, scheme in rounded(plan).items() if name.endswith(":v_cache")} == {"int4_token"}
    read = load_plan(write_plan(plan, tmp_path / "plan"))
    assert plan.measured is not None and verify(read, model=loaded(40.0)) == plan.measured
    per_token = read.replace(
        sites=tuple(
            site.model_copy(update={"scheme": "int4_token"}) if site.name.endswith(":k_cache") else site
            for site in read.sites
        )
    )
    assert verify(per_token, model=loaded(40.0)).kl.mean > 3 * plan.measured.kl.mean
    assert of_keys(searched(0.0, Budget(effective_bits=9.0))) == {"int8_token"}  # no large channels, no limit on bytes


def test_what_was_asked_for_and_cannot_be_reached_is_named(tiny_tokenizer: Any, prose: Path) -> None:
    """Bloom computes its attention by itself, outside transformers' registry."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4)
    bloom = from_memory(BloomForCausalLM(config).eval().requires_grad_(False), tiny_tokenizer, name="tiny-bloom")

    options = search_options(prose, schemes=("int8_w", "bf16_values"), values="cache")
    plan = optimize(bloom, budget=Budget(effective_bits=9.0), **options)
    (note,) = (note for note in plan.notes if "cannot be reached stay as they are" in note)
    for layer in (0, 1):
        assert f"transformer.h.{layer}.self_attention: its attention does not go through" in note
    assert "mlp" not in note
    everything = values_left_out(bloom.model)
    assert any(sentence.startswith("transformer.h.0.mlp:act: its activation") for sentence in everything)
