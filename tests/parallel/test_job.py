"""Which models are modelled at all: decoders of equal layers, told by their number of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from bitwright import comms
from bitwright.errors import ParallelError
from bitwright.hardware import KNOWN_MODELS
from bitwright.models.shape import shape_of
from bitwright.parallel.job import raise_if_not_modelled
from bitwright.parallel.planner import PlanRequest
from bitwright.parallel.serving_plan import ServingRequest
from bitwright.training.policy import policy_named

SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128}


def config_of(folder: Path, config: transformers.PretrainedConfig) -> Path:
    config.save_pretrained(folder)
    return folder


def test_every_model_that_is_known_by_name_is_modelled() -> None:
    for name in KNOWN_MODELS.records:
        raise_if_not_modelled(KNOWN_MODELS.get(name).shape)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SIZES, intermediate_size=176, num_key_value_heads=2),
        transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=128),
        transformers.MixtralConfig(**SIZES, intermediate_size=96, num_key_value_heads=2, num_local_experts=4),
        transformers.Gemma3TextConfig(**SIZES, intermediate_size=96, num_key_value_heads=2, head_dim=32),
    ],
    ids=lambda config: config.model_type,
)
def test_decoders_of_equal_layers_are(tmp_path: Path, config: transformers.PretrainedConfig) -> None:
    raise_if_not_modelled(shape_of(config_of(tmp_path, config)))


def test_latent_attention_and_first_layers_without_experts_are_refused(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(
        **SIZES, intermediate_size=176, moe_intermediate_size=32, num_key_value_heads=4, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    shape = shape_of(config_of(tmp_path / "latent", config))
    topology = comms.topology("h100x8")
    with pytest.raises(ParallelError, match=r"'latent' is no decoder of equal layers .* Latent attention \(MLA\)"):
        PlanRequest(
            shape=shape, sequence=128, global_batch=8, topology=topology, policies=(policy_named("bf16-mixed"),)
        )
    with pytest.raises(ParallelError, match="'latent' is no decoder of equal layers"):
        ServingRequest(shape=shape, topology=topology, context=128, batches=(1,))
