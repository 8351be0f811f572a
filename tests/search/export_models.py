"""A small model that exports are made of, plans for it, and weights read out of what was written, number by number."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from small_plans import choice, plan_of, uniform_plan
from torch import Tensor

from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.models.sites import Site, find_sites
from bitwright.plan import Plan

PROMPT = torch.arange(24).unsqueeze(0) * 7 % 250


def small_model(tokenizer: Any = None, *, seed: int = 0, **changes: Any) -> LoadedModel:
    """A random llama whose widths every group size of the schemes divides: hidden 128, two layers."""
    import transformers

    sizes = {
        "vocab_size": 260,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": 259,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**sizes, **changes}))
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.weight.data.uniform_(0.5, 1.5)
    return from_memory(model, tokenizer, name="small")


def for_model(plan: Plan, loaded: LoadedModel) -> Plan:
    """The plan, made for these weights."""
    return plan.replace(model=plan.model.model_copy(update={"hash": loaded.hash, "name": loaded.name}))


def uniform(loaded: LoadedModel, scheme: str, part: str | None = None) -> Plan:
    """All sites but the ends under one scheme."""
    return for_model(uniform_plan(find_sites(loaded.model), scheme, part), loaded)


def planned(
    loaded: LoadedModel, scheme_of: Callable[[Site], str], tensors: Mapping[str, np.ndarray] | None = None
) -> Plan:
    """A scheme for every site."""
    sites = find_sites(loaded.model)
    return for_model(plan_of([choice(site, scheme_of(site)) for site in sites], tensors), loaded)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= load_file(file)
    return found


def stored_json(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """A file of a folder."""
    content: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return content


def bits_of_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Numbers of `bits` bits out of the bitstream of int32 words, [rows, words] → [rows, count], one bit at a time."""
    stream = words.astype("<i4").view(np.uint8)
    single = np.unpackbits(stream, axis=1, bitorder="little")[:, : bits * count].reshape(len(words), count, bits)
    return (single.astype(np.int64) << np.arange(bits)).sum(-1)


def names(sites: Sequence[Site]) -> list[str]:
    """Names of sites."""
    return [site.name for site in sites]
