"""Many names of sites in few words."""

from __future__ import annotations

from bitwright.export import spell_sites


def test_layers_of_one_kind_are_one_entry() -> None:
    names = [f"model.layers.{layer}.mlp.{part}_proj" for layer in (0, 1, 2, 5) for part in ("up", "down")]
    assert spell_sites(names) == "model.layers.{0-2,5}.mlp.up_proj, model.layers.{0-2,5}.mlp.down_proj"


def test_a_single_layer_and_a_name_without_one_stand_as_they_are() -> None:
    assert spell_sites(["model.layers.7.mlp.up_proj", "lm_head"]) == "model.layers.7.mlp.up_proj, lm_head"


def test_values_and_experts_are_told_apart_by_what_follows_the_first_number() -> None:
    names = ["h.0.attn:k_cache", "h.1.attn:k_cache", "h.0.experts.0.up", "h.0.experts.1.up", "h.1.experts.0.up"]
    assert spell_sites(names) == "h.{0-1}.attn:k_cache, h.{0-1}.experts.0.up, h.0.experts.1.up"


def test_experts_of_all_layers_are_one_entry() -> None:
    names = [
        f"h.{layer}.experts.{expert}.{part}" for layer in (0, 1) for expert in (0, 1, 2) for part in ("up", "down")
    ]
    assert spell_sites(names) == "h.{0-1}.experts.{0-2}.up, h.{0-1}.experts.{0-2}.down"
    assert spell_sites(names[:6]) == "h.0.experts.{0-2}.up, h.0.experts.{0-2}.down"
