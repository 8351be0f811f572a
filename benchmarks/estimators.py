"""Which estimator predicts the KL of a single change best: each against measurements of the same changes.

    python benchmarks/estimators.py

The result goes to benchmarks/results/estimators.json, with machine and versions. The built-in model with its weights
dithered, 32 × 128 calibration tokens; changes of sites of every role under several schemes and roundings, one site at a
time, measured on 8 × 128 tokens that served for nothing else. From the same inputs x and gradients g, with E the error
of a weight:

    factored       ½ Σ_o E[g_o²] (E A Eᵀ)_oo, A = E[x xᵀ]          diagonal of the gradients' moment
    tokens         ½ E[(g_tᵀ E x_t)²]                              every token for itself
    windows of n   ½ E[(Σ_{t in window} g_tᵀ E x_t)²]              summed over n neighbouring tokens before squaring
    sequences      the same over whole sequences

What roundings of activations add is scored token by token in all of them (`search/score.py`). Roundings that saw the
calibration text are told twice: as they are scored on it, and with the correction of `search/optimism.py`. Then every
change is made at all sites at once: the sum of the corrected scores beside what is measured, before any probe.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from machine import machine, now

RESULT = Path(__file__).parent / "results" / "estimators.json"
_SEQUENCE_LENGTH, _NUM_CALIBRATION, _NUM_MEASURED = 128, 32, 8
_SITES_PER_ROLE = 3
#: (scheme, rounding) of the changes.
_CHANGES = (
    ("int3_g64", "rtn"),
    ("int4_g128", "rtn"),
    ("int4_g128", "gptq"),
    ("int4_g128", "gradient_aware"),
    ("fp8", "rtn"),
    ("mxfp4", "rtn"),
)
_WINDOWS = (8, 16, 32, 64)


def estimates(x: Any, g: Any, error: Any, num_scored: int) -> dict[str, float]:
    """Every estimator's KL of one weight error: bf16 x [T, K] and g [T, N], fp32 E [N, K]."""
    import torch

    x_TK, g_TN = x.float(), g.float()
    num_tokens = len(x_TK)
    per_token = ((g_TN @ error) * x_TK).sum(-1).double()
    moment = x_TK.T @ x_TK / num_tokens
    damage_N = ((error @ moment) * error).sum(-1)
    found = {
        "factored": float(g_TN.square().sum(0) @ damage_N) / (2 * num_scored),
        "tokens": float(per_token.square().sum()) / (2 * num_scored),
    }
    for width in (*_WINDOWS, _SEQUENCE_LENGTH):
        padded = torch.nn.functional.pad(per_token, (0, -num_tokens % width))
        name = "sequences" if width == _SEQUENCE_LENGTH else f"windows of {width}"
        found[name] = float(padded.reshape(-1, width).sum(-1).square().sum()) / (2 * num_scored)
    return found


def summary(pairs: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """How well the estimates under `key` agree with the measurements."""
    import numpy as np

    logs = np.log([[pair["estimates"][key], pair["measured"]] for pair in pairs])
    ratios = np.exp(logs[:, 0] - logs[:, 1])
    by_change = {}
    for change in dict.fromkeys(pair["change"] for pair in pairs):
        some = [ratio for ratio, pair in zip(ratios, pairs, strict=True) if pair["change"] == change]
        by_change[change] = {
            "median_ratio": round(statistics.median(some), 3),
            "share_within_1.6": round(sum(1 / 1.6 <= ratio <= 1.6 for ratio in some) / len(some), 3),
        }
    return {
        "correlation_of_logarithms": round(float(np.corrcoef(logs.T)[0, 1]), 4),
        "spread_of_log_ratio": round(float(np.std(logs[:, 0] - logs[:, 1])), 3),
        "share_within_1.6": round(float(np.mean((ratios >= 1 / 1.6) & (ratios <= 1.6))), 3),
        "by_change": by_change,
    }


def open_model() -> tuple[Any, Any, Any, Any]:
    """The model, its decoder sites by role, the calibration text and the text to measure on."""
    from bitwright.models import find_sites
    from bitwright.models.load import load
    from bitwright.search.text import split_text
    from bitwright.search.verify import vocabulary_size

    loaded = load("demo-dithered")
    sites = [site for site in find_sites(loaded.model) if site.role not in ("embedding", "lm_head")]
    splits = split_text(
        loaded.tokenizer,
        task="text",
        calibration="docs",
        evaluation="docs",
        calibration_tokens=_NUM_CALIBRATION * _SEQUENCE_LENGTH,
        evaluation_tokens=64 * _SEQUENCE_LENGTH,
        sequence_length=_SEQUENCE_LENGTH,
        seed=0,
        vocabulary_size=vocabulary_size(loaded),
    )
    return loaded, sites, splits.calibrate, splits.final.first(_NUM_MEASURED)


def measure() -> dict[str, Any]:
    """All changes, measured and estimated."""
    import torch

    from bitwright.inference import emulate
    from bitwright.models import site_weight
    from bitwright.search.calibrate import calibrate
    from bitwright.search.candidate import Candidate
    from bitwright.search.compare import compare, run_logits, run_reference
    from bitwright.search.optimism import measure_optimism
    from bitwright.search.progress import Silent
    from bitwright.search.quantizer import Quantizer
    from bitwright.search.score import score, seen_at

    loaded, sites, calibration, measured = open_model()
    quantizer = Quantizer(shapes={site.name: site.shape for site in sites})
    candidates = [Candidate(scheme=scheme, rounding=rounding) for scheme, rounding in _CHANGES]
    draw = random.Random(0)
    by_role = {role: [s for s in sites if s.role == role] for role in dict.fromkeys(s.role for s in sites)}
    sampled = [site for role in by_role.values() for site in draw.sample(role, _SITES_PER_ROLE)]
    pairs: list[dict[str, Any]] = []
    with torch.no_grad(), Silent().stage("estimators", 1) as stage:
        found = calibrate(loaded.model, sites, calibration, seed=0, stage=stage)
        begin = time.perf_counter()
        optimism = measure_optimism(loaded.model, sites, found, candidates)
        optimism_s = time.perf_counter() - begin
        reference = run_reference(loaded.model, measured, stage)
        sums = dict.fromkeys(candidates, 0.0)
        for at in score(loaded.model, sites, found, quantizer, candidates, optimism):
            for candidate in candidates:
                sums[candidate] += at.kl[candidate]
            if at.site not in sampled:
                continue
            weight = site_weight(loaded.model, at.site).contiguous()
            seen = seen_at(at.site, at.site.parameter, found)
            assert seen is not None and seen.g_TN is not None
            for candidate in candidates:
                error = quantizer.values(at.site.name, candidate, weight) - weight
                weights = estimates(seen.x_TK, seen.g_TN, error, found.num_scored)
                factor = optimism.get((at.site.role, candidate), 1.0)
                inputs = at.kl[candidate] - factor * weights["windows of 32"]
                told = {name: kl + max(inputs, 0.0) for name, kl in weights.items()}
                with emulate(loaded.model, sites, quantizer.rules({at.site.name: candidate})) as model:
                    run = compare(reference, lambda ids, model=model: run_logits(model, ids), stage)
                pairs.append(
                    {
                        "site": at.site.name,
                        "role": at.site.role,
                        "change": str(candidate),
                        "measured": run.mean_kl,
                        "estimates": {**told, "windows of 32, corrected": at.kl[candidate]},
                    }
                )
                print(
                    at.site.name, candidate, f"{run.mean_kl:.3g} measured, {at.kl[candidate]:.3g} predicted", flush=True
                )
        totals = []
        for candidate in candidates:
            rules = quantizer.rules(dict.fromkeys((site.name for site in sites), candidate))
            with emulate(loaded.model, sites, rules) as model:
                run = compare(reference, lambda ids, model=model: run_logits(model, ids), stage)
            totals.append({"change": str(candidate), "predicted": sums[candidate], "measured": run.mean_kl})
    return {
        "what": "demo-dithered; 32 x 128 calibration tokens; single changes measured on 8 x 128 final tokens",
        "changes": len(pairs),
        "seconds_of_the_correction": round(optimism_s, 1),
        "optimism": {f"{role} {candidate}": round(factor, 3) for (role, candidate), factor in optimism.items()},
        "estimators": {name: summary(pairs, name) for name in pairs[0]["estimates"]},
        "totals": totals,
        "single_changes": pairs,
    }


def main() -> None:
    """Measure, write, and print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    begin = time.perf_counter()
    content = measure()
    about = {"machine": machine(["torch", "numba"]), "date": now(), "seconds": round(time.perf_counter() - begin)}
    content = {**about, **content}
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name, found in content["estimators"].items():
        print(f"{name:26} {found['correlation_of_logarithms']:.3f} {found['spread_of_log_ratio']:.2f}")
    for total in content["totals"]:
        print(f"{total['change']:26} {total['predicted']:.3g} predicted, {total['measured']:.3g} measured")


if __name__ == "__main__":
    main()
