"""A fabricated plan of realistic size and numbers: 30 layers × 7 sites and a tied head."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwright import plan as plans

#: scheme → (stored bits, relative KL)
SCHEMES = {"int4_g128": (4.125, 1.0), "int8_w": (8.03, 0.004), "bf16": (16.0, 0.00002)}
ROLES = {
    "attn.q": ("self_attn.q_proj", (576, 576), 0.3),
    "attn.k": ("self_attn.k_proj", (192, 576), 0.2),
    "attn.v": ("self_attn.v_proj", (192, 576), 1.4),
    "attn.out": ("self_attn.o_proj", (576, 576), 0.7),
    "mlp.gate": ("mlp.gate_proj", (1536, 576), 0.8),
    "mlp.up": ("mlp.up_proj", (1536, 576), 0.9),
    "mlp.down": ("mlp.down_proj", (576, 1536), 2.0),
}
HASH = "0123456789abcdef" * 4


def make_sites(num_layers: int = 30, seed: int = 0) -> tuple[plans.SiteChoice, ...]:
    rng = random.Random(seed)
    sites = []
    for layer in range(num_layers):
        for role, (module, shape, weight) in ROLES.items():
            edge = 3.0 * math.exp(-layer / 1.5) + 2.0 * math.exp(-(num_layers - 1 - layer) / 2)
            pain = 6e-4 * weight * (0.4 + edge) * math.exp(rng.gauss(0, 0.5))
            scheme = "int4_g128" if pain < 6e-4 else "int8_w" if pain < 2.5e-3 else "bf16"
            bits, relative = SCHEMES[scheme]
            name = f"model.layers.{layer}.{module}"
            sites.append(
                plans.SiteChoice(
                    name=name,
                    kind="weight",
                    role=role,
                    module=name,
                    rows=None,
                    tied_group=None,
                    shape=shape,
                    scheme=scheme,
                    rounding="clip" if scheme == "int4_g128" else "rtn",
                    transform="none",
                    reason="cheapest choice within the budget",
                    bytes=int(shape[0] * shape[1] * bits / 8),
                    bits=bits,
                    predicted_kl=pain * relative,
                )
            )
    sites.append(
        plans.SiteChoice(
            name="lm_head",
            kind="weight",
            role="lm_head",
            module="model.embed_tokens",
            rows=None,
            tied_group=None,
            shape=(49152, 576),
            scheme="as_loaded",
            rounding="rtn",
            transform="none",
            reason="embedding and head stay as they are without --include-head",
            bytes=49152 * 576 * 5 // 8,
            bits=5.0,
            predicted_kl=0.0,
        )
    )
    return tuple(sites)


def make_predictions(decoder: Sequence[plans.SiteChoice], total_kl: float, seed: int) -> tuple[plans.Prediction, ...]:
    """Like the search: each role in one scheme, whole assignments, each role as planned, the plan itself."""
    rng = random.Random(seed + 1)
    pain: dict[str, float] = {}
    planned: dict[str, float] = {}
    for site in decoder:
        pain[site.role] = pain.get(site.role, 0) + site.predicted_kl / SCHEMES[site.scheme][1]
        planned[site.role] = planned.get(site.role, 0) + site.predicted_kl
    roles = [
        plans.Prediction(
            what=f"{len(decoder) // len(pain)} × {role} in {scheme}",
            predicted_kl=kl * SCHEMES[scheme][1],
            measured_kl=kl * SCHEMES[scheme][1] * math.exp(rng.gauss(0, 0.22)),
            kind="role",
            scheme=scheme,
            role=role,
        )
        for (role, kl), scheme in zip(pain.items(), itertools.cycle(("int4_g128", "int4_g128", "int8_w")))
    ]
    totals = [
        plans.Prediction(what=f"whole model at {bits:.2f} bits", predicted_kl=kl, measured_kl=kl * ratio, kind="total")
        for bits, kl, ratio in ((4.14, 0.306, 0.95), (5.65, 0.087, 1.06), (7.72, 0.011, 1.04))
    ]
    as_planned = [
        plans.Prediction(
            what=f"{role} as planned",
            predicted_kl=kl,
            measured_kl=kl * math.exp(rng.gauss(0, 0.1)),
            kind="plan_role",
            role=role,
        )
        for role, kl in planned.items()
    ]
    whole_plan = plans.Prediction(
        what="the plan, on the final text", predicted_kl=total_kl, measured_kl=total_kl * 1.08, kind="total"
    )
    return (*roles, *totals, *as_planned, whole_plan)


def make_plan(*, num_layers: int = 30, seed: int = 0, missed: bool = False, **changes: Any) -> plans.Plan:
    sites = make_sites(num_layers, seed)
    decoder = [site for site in sites if site.role != "lm_head"]
    weights = sum(site.shape[0] * site.shape[1] for site in decoder)
    effective_bits = sum(site.bytes for site in decoder) * 8 / weights
    total_kl = sum(site.predicted_kl for site in sites)
    weight_bytes = sum(site.bytes for site in sites) + 70_000
    frontier = []
    for bits in (4.2, 4.4, 4.6, effective_bits, 5.2, 5.8, 6.6, 8.0, 10.0, 14.0):
        kl = total_kl * math.exp(-(bits - effective_bits) * 0.62)
        chosen = bits == effective_bits
        frontier.append(
            plans.FrontierPoint(
                effective_bits=bits,
                weight_bytes=int(weight_bytes + (bits - effective_bits) * weights / 8),
                predicted_kl=kl,
                measured_kl=total_kl * 1.08 if chosen else kl * 0.93 if bits in (4.6, 6.6) else None,
                counts={"int4_g128": 120, "int8_w": 80, "bf16": 10},
                chosen=chosen,
            )
        )
    interval = plans.Interval(mean=-0.02, low=-0.025, high=-0.015)
    fields: dict[str, Any] = dict(
        limit_studies=(
            plans.LimitStudy(
                name="max_kl",
                limit=0.15,
                binds=False,
                objective="kl",
                before=total_kl,
            ),
            plans.LimitStudy(
                name="effective_bits",
                limit=5.6,
                binds=True,
                objective="kl",
                before=total_kl,
                loosened=(
                    plans.Loosened(by=0.01, value=total_kl * 0.97),
                    plans.Loosened(by=0.05, value=total_kl * 0.86),
                ),
            ),
        ),
        uniform=(
            plans.UniformComparison(
                scheme="int4_g128",
                effective_bits=4.125,
                weight_bytes=int(weight_bytes * 0.9),
                uniform_kl=total_kl * 2,
                plan_kl=total_kl,
                difference=interval,
                sequences=16,
                verdict="better",
            ),
        ),
        model=plans.ModelInfo(
            name="SmolLM2-135M-Instruct",
            hash=HASH,
            params=134_515_008,
            notes=("weights already lie on a 4-bit grid of 32: int4_g32_min reproduces them exactly",),
        ),
        hardware="x86-avx512-bf16",
        hardware_reason="detected: this machine's processor",
        task="text",
        budget=plans.Budget(max_kl=0.15, effective_bits=5.6),
        objective="kl",
        objective_reason="size and quality are both limited: the best quality that fits",
        seed=0,
        options=plans.SearchOptions(
            schemes=tuple(SCHEMES),
            include_head=False,
            sequence_length=128,
            calibration_tokens=4096,
            evaluation_tokens=8192,
        ),
        calibration=plans.TextInfo(source="docs", tokens=4064, sequences=32, hash=HASH),
        repair=plans.TextInfo(source="docs", tokens=8128, sequences=64, hash=HASH[::-1]),
        evaluation=plans.TextInfo(source="docs", tokens=8128, sequences=64, hash=HASH[1:] + "0"),
        sites=sites,
        summary=plans.Summary(
            effective_bits=effective_bits,
            nominal_bits=effective_bits - 0.12,
            weight_bytes=weight_bytes,
            predicted_kl=total_kl,
        ),
        measured=plans.Measured(
            kl=plans.Interval(mean=total_kl * 1.08, low=total_kl * 0.99, high=total_kl * 1.18),
            bf16_floor_kl=3.1e-4,
            ppl=plans.Perplexity(base=19.71, plan=21.96, ratio=1.114, low=1.101, high=1.127),
            top1_agreement=plans.Interval(mean=0.887, low=0.879, high=0.895),
            tokens=8128,
            sequences=64,
            repetition=plans.Repetition(base=0.081, plan=0.084),
        ),
        limits=(
            plans.Limit(
                name="max_kl",
                limit=0.02 if missed else 0.15,
                value=total_kl * 1.08,
                status="missed" if missed else "measured",
            ),
            plans.Limit(name="effective_bits", limit=5.6, value=effective_bits, status="measured"),
        ),
        met=not missed,
        frontier=tuple(frontier),
        predictions=make_predictions(decoder, total_kl, seed),
        repairs=(
            plans.Repair(
                from_scheme="int4_g128",
                to_scheme="int8_w",
                site="model.layers.29.mlp.down_proj",
                why="largest measured blame on the repair text (12 % of the KL)",
                measured_kl_before=0.157,
                measured_kl_after=0.149,
            ),
        ),
        latency=plans.Latency(
            prefill_tokens=128,
            prefill_s=0.0121,
            decode_s_per_token=0.0041,
            reference_prefill_s=0.0133,
            reference_decode_s_per_token=0.0102,
        ),
        notes=("in int4_g128 the last group of a row is 64 long (576 = 4 · 128 + 64); some engines refuse that",),
        versions={"bitwright": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "numpy": "2.4.6"},
    )
    plan = plans.Plan(**{**fields, **changes})
    return plan.attach(
        tensors={
            "model.layers.0.mlp.down_proj/clip": np.linspace(0.5, 1, 576, dtype=np.float32).reshape(576, 1),
            "model.layers.0.mlp.down_proj/codes": np.arange(24, dtype=np.uint8).reshape(4, 6),
        },
        run=plans.Run(
            created="2026-01-02T03:04:05Z", timings={"calibrate": 41.2, "score": 12.0}, paths={"model": "demo"}
        ),
    )
