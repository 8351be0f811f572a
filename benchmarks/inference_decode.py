"""Whole models token by token under packed plans, beside the same models in bf16: the part decode of `inference.py`.

Reading a prompt and going on with it (`bitwright.inference.generation.speed`), one model after the other in
every round, with all weights and caches in this process: SmolLM2-135M, and four layers of the shape of Llama 7B with
Gaussian weights and a small vocabulary, in which weights are what a step reads. Filed with the bytes of weights in
memory and in the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from unsearched_plans import uniform_plan, with_coded_caches

from bitwright.inference import RunReport, apply
from bitwright.inference.generation.speed import measure_speed
from bitwright.inference.packed.model import plain_copy
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.plan import Plan

DECODE_SCHEMES = ("int4_g128", "int8_w", "fp8_w", "fp6_w", "mxfp4_w", "nvfp4_w")
#: How many tokens per second of those in bf16, in the layers of 7B.
DECODE_TARGETS = {"int4_g128": 3.0}
#: How far bytes of weights in memory may be from those of the plan.
BYTES_TARGET = 0.01
#: How the plan with coded caches keeps them, and its title.
CODED_CACHES = "fp8_e4m3_token"
CODED = f"int4_g128, caches {CODED_CACHES}"
PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 128, 32, 5


def measure(*, quick: bool) -> dict[str, Any]:
    """Models under packed plans beside the same in bf16."""
    sources: dict[str, Callable[[], tuple[LoadedModel, dict[str, Plan]]]] = {
        "SmolLM2-135M": small_model,
        "four layers of Llama 7B": lambda: layers_of_7b(quick=quick),
    }
    rows = []
    for title, make in sources.items():
        for row in decode_rows(title, *make(), quick):
            rows.append(row)
            print(spell_decode_row(row), flush=True)
    missed = [spell_decode_row(row) for row in rows if row["misses"]]
    print("\n".join(["beside its target:", *missed]) if missed else "every target is met")
    return {"rows": rows, "rounds": ROUNDS}


def small_model() -> tuple[LoadedModel, dict[str, Plan]]:
    """The built-in model: the ends stay as loaded, and once more in int8."""
    loaded = load("demo")
    plans = {scheme: uniform_plan(loaded, scheme) for scheme in DECODE_SCHEMES}
    plans["int4_g128, ends int8_w"] = uniform_plan(loaded, "int4_g128", "int8_w")
    return loaded, plans | {CODED: with_coded_caches(plans["int4_g128"], loaded, CODED_CACHES)}


def layers_of_7b(*, quick: bool) -> tuple[LoadedModel, dict[str, Plan]]:
    """Four decoder layers of Llama 7B's shape; without their time or memory where it is quick."""
    hidden, mlp, heads = (256, 512, 4) if quick else (4096, 11008, 32)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=4, num_attention_heads=heads,
        max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(std=hidden**-0.5)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are no parameters
    loaded = from_memory(model, None, name="layers-of-7b")
    plans = {scheme: uniform_plan(loaded, scheme) for scheme in DECODE_SCHEMES}
    return loaded, plans | {CODED: with_coded_caches(plans["int4_g128"], loaded, CODED_CACHES)}


def decode_rows(title: str, loaded: LoadedModel, plans: dict[str, Plan], quick: bool) -> Iterator[dict[str, Any]]:
    """One model under every plan, each beside bf16."""
    models: dict[str, Any] = {"bf16": plain_copy(loaded.model, torch.bfloat16)}
    for name, plan in plans.items():
        models[name] = apply(plan, loaded, mode="packed", dtype=torch.bfloat16)
    del loaded
    new_tokens, rounds = (4, 1) if quick else (NEW_TOKENS, ROUNDS)
    found = measure_speed(models, batch=1, prompt_tokens=PROMPT_TOKENS, new_tokens=new_tokens, repeats=rounds)
    for name, speed in found.items():
        row = {
            "model": title,
            "plan": name,
            **dataclasses.asdict(speed),
            "decode_tokens_per_s": speed.decode_tokens_per_s,
            "decode_ratio": speed.decode_tokens_per_s / found["bf16"].decode_tokens_per_s,
            "prefill_tokens_per_s": speed.prefill_tokens_per_s,
            "prefill_ratio": speed.prefill_tokens_per_s / found["bf16"].prefill_tokens_per_s,
            "decode_target": None if quick or title == "SmolLM2-135M" else DECODE_TARGETS.get(name),
        }
        if name in plans:
            row |= bytes_of(models[name].bitwright_run)
        row["misses"] = [
            *(["decode"] if row["decode_target"] and row["decode_ratio"] < row["decode_target"] else []),
            *(["bytes"] if abs(row.get("packed_bytes_over_plan", 0.0)) > BYTES_TARGET else []),
        ]
        yield row


def bytes_of(run: RunReport) -> dict[str, float]:
    """Bytes of the sites that hold codes, in memory and in the plan; those that stay as loaded are in bf16 here."""
    coded = [site for site in run.sites if site.scheme != "as_loaded"]
    in_memory, planned = sum(site.bytes for site in coded), sum(site.plan_bytes for site in coded)
    return {
        "packed_bytes": in_memory,
        "packed_plan_bytes": planned,
        "packed_bytes_over_plan": in_memory / planned - 1,
        "plan_bytes": run.other_bytes + sum(site.plan_bytes for site in run.sites),
    }


def spell_decode_row(row: dict[str, Any]) -> str:
    """One line."""
    over = f", codes {row['packed_bytes_over_plan']:+.2%} of the plan's" if "packed_bytes_over_plan" in row else ""
    return (
        f"{row['model']:24s} {row['plan']:32s} decode {row['decode_tokens_per_s']:7.2f} tokens/s "
        f"({row['decode_ratio']:5.2f} x bf16)  prefill {row['prefill_tokens_per_s']:8.1f} "
        f"({row['prefill_ratio']:5.2f})  weights {row['weight_bytes'] / 1e6:8.1f} MB{over}, "
        f"cache {row['cache_bytes'] / 1e6:.2f} MB"
    )
