"""Tiny random models of architectures whose attention differs: grouped heads, norms of q and k, softcaps, sliding
windows, sinks, learned positions, fused projections, experts, and an encoder."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 260
ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "mixtral", "gpt_oss", "phi3", "bert")


def _config(architecture: str) -> Any:
    import transformers

    ids = {"pad_token_id": 259}
    decoder = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 256,
        "eos_token_id": 256,
        **ids,
    }
    heads = decoder | {"head_dim": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    match architecture:
        case "llama":
            return transformers.LlamaConfig(**decoder)
        case "qwen3":
            return transformers.Qwen3Config(**heads)
        case "gemma2":
            return transformers.Gemma2Config(
                **heads, sliding_window=7, query_pre_attn_scalar=32, attn_logit_softcapping=1.5
            )
        case "gemma3":
            layers = ["sliding_attention", "full_attention"]
            return transformers.Gemma3TextConfig(**heads, sliding_window=7, layer_types=layers)
        case "gpt2":
            return transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512)
        case "mixtral":
            return transformers.MixtralConfig(**decoder, **experts)
        case "gpt_oss":
            rope = {"rope_type": "default", "rope_theta": 10000.0}
            return transformers.GptOssConfig(**heads, **experts, sliding_window=7, rope_parameters=rope)
        case "phi3":
            return transformers.Phi3Config(**decoder)
        case "bert":
            return transformers.BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=512,
                **ids,
            )
    raise ValueError(f"no tiny config for {architecture!r}; there are {', '.join(ARCHITECTURES)}")


def make_value_model(architecture: str) -> Any:
    """A new random model: hidden 64, 2 layers, fp32, eval; biases and sinks are no zeros."""
    import transformers

    config = _config(architecture)
    config.initializer_range = 0.1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if architecture == "bert":
            model = transformers.AutoModel.from_config(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("bias", "sinks")):
                    parameter.normal_(std=0.1)
    return model.eval().requires_grad_(False)


def output_of(model: Any, **inputs: Any) -> torch.Tensor:
    """Logits, or an encoder's hidden states."""
    result = model(**inputs)
    return result.logits if hasattr(result, "logits") else result.last_hidden_state
