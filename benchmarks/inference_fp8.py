"""What FP8 inputs and weights cost, in perplexity and in calls that fall back: the part fp8 of `inference.py`.

SmolLM2-135M under FP8 weights and inputs. One plan has it everywhere, another where a search found room for it
within MAX_PPL_INCREASE; both run with scales of inputs found per call (dynamic) and from prompts (static), on text that
neither saw: emulated, and executed as `bitwright run` does (packed codes in a bf16 model, tokens that overflow
multiplied unrounded). Perplexities are set against those of the same weights in bf16, with paired bootstrap intervals
over the sequences. Then what overflows costs: the rate of fallbacks at which rounding inputs stops to pay,
and what filling up shapes costs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from timing import in_turn
from torch import Tensor
from torch.nn.functional import cross_entropy
from unsearched_plans import uniform_plan

from bitwright.cli.progress import Bars
from bitwright.inference import apply
from bitwright.inference.counters import PaddingCounts
from bitwright.inference.packed.break_even import measure_break_even
from bitwright.inference.packed.model import plain_copy
from bitwright.inference.packed.native_rows import INT8_MULTIPLES, int8_rows
from bitwright.inference.packed.padding import Multiples, Padding
from bitwright.inference.static.calibration import calibrate_static
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget, Plan
from bitwright.quantize import SCHEMES, pack
from bitwright.search.optimize import optimize
from bitwright.search.text import Splits, split_text
from bitwright.search.verify import vocabulary_size

#: Of a plan with sensitive sites kept high: what the search is asked for, with 95 % certainty and on other text, and
#: what is held against bf16 here.
MAX_PPL_INCREASE = 0.01
FP8, FP8_STATIC = "fp8", "fp8_static"
#: Tokens of a call whose break-even is measured, and prompts that static scales are found on.
BREAK_EVEN_TOKENS, CALIBRATION_SEQUENCES = (1, 16, 128), 32


def measure(*, quick: bool) -> dict[str, Any]:
    """FP8 everywhere and where a plan has it, with dynamic and static scales."""
    with torch.inference_mode(False):  # a search takes gradients
        loaded = load("demo")
        planned, splits = planned_fp8(loaded, quick)
    calibration, held_out = splits.calibrate.input_ids[:CALIBRATION_SEQUENCES], splits.final.input_ids
    if quick:
        calibration, held_out = calibration[:2], held_out[:2]
    plans = {"uniform, dynamic": uniform_plan(loaded, FP8), "planned, dynamic": planned}
    for name in ("uniform", "planned"):
        static = with_scheme(plans[f"{name}, dynamic"], FP8, FP8_STATIC)
        plans[f"{name}, static"] = calibrate_static(static, loaded, [calibration], rule="min_max")
    plain = token_losses(plain_copy(loaded.model, torch.bfloat16), held_out)
    reference = {"fp32": token_losses(loaded.model, held_out)}
    losses = reference | {name: token_losses(apply(plan, loaded), held_out) for name, plan in plans.items()}
    runs = {f"{name}, executed": apply(plan, loaded, mode="auto") for name, plan in plans.items()}
    losses |= {name: token_losses(run, held_out) for name, run in runs.items()}
    rows = [{"plan": "bf16", "perplexity": float(plain.mean().exp())}]
    for name, found in losses.items():
        plan = plans.get(name.removesuffix(", executed"))
        rows.append({"plan": name, **against(found, plain), **kept_sites(plan), **how_it_ran(runs.get(name))})
    for row in rows:
        print(row, flush=True)
    even, padding = break_even_rows(loaded, quick), padding_rows(quick)
    for row in (*even, *padding):
        print(row)
    missed = [r for r in rows if r["plan"].startswith("planned") and r["increase"] > MAX_PPL_INCREASE]
    print(f"beside its target: {missed}" if missed else "every target is met")
    text = {"tokens": held_out.numel(), "hash": splits.final.hash, "calibration_tokens": calibration.numel()}
    return {"text": text, "perplexity": rows, "break_even": even, "padding": padding}


def planned_fp8(loaded: LoadedModel, quick: bool) -> tuple[Plan, Splits]:
    """FP8 weights and inputs where they are within the budget, bf16 elsewhere; and the text that it was found on."""
    splits = split_text(
        loaded.tokenizer,
        task="text",
        calibration="docs",
        evaluation="docs",
        calibration_tokens=4096,
        evaluation_tokens=8192,
        sequence_length=128,
        seed=0,
        vocabulary_size=vocabulary_size(loaded),
    )
    if quick:
        return uniform_plan(loaded, FP8), splits
    plan = optimize(
        loaded,
        budget=Budget(max_ppl_increase=MAX_PPL_INCREASE),
        schemes=(FP8, "bf16"),
        roundings=("rtn",),
        transforms=(),
        values="none",
        cache=None,
        progress=Bars(),
    )
    assert plan.evaluation.hash == splits.final.hash, "other text than the search's"
    return plan, splits


def with_scheme(plan: Plan, before: str, after: str) -> Plan:
    """The plan with one scheme in the place of another."""
    return plan.replace(
        sites=tuple(site.model_copy(update={"scheme": after}) if site.scheme == before else site for site in plan.sites)
    )


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Mean loss of each sequence, nats per token: fp64 [sequences]."""
    found = []
    for some in ids.split(8):
        logits = model(input_ids=some, use_cache=False).logits[:, :-1].float()
        losses = cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="none")
        found.append(losses.view(len(some), -1).double().mean(-1))
    return torch.cat(found)


def against(losses: Tensor, plain: Tensor) -> dict[str, Any]:
    """Perplexity beside that of bf16, with the 95 % interval of the ratio over the same sequences, drawn again."""
    difference = losses - plain
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, len(difference), (2000, len(difference)), generator=generator)
    ends = torch.quantile(difference[drawn].mean(-1), torch.tensor([0.025, 0.975], dtype=torch.float64)).expm1()
    return {
        "perplexity": float(losses.mean().exp()),
        "increase": float(difference.mean().expm1()),
        "interval": [float(end) for end in ends],
    }


def kept_sites(plan: Plan | None) -> dict[str, Any]:
    """How many sites a plan keeps high, by role, and its size."""
    if plan is None:
        return {}
    kept = [site for site in plan.sites if site.scheme == "bf16"]
    roles = {site.role: sum(other.role == site.role for other in kept) for site in kept}
    return {"sites_kept": len(kept), "kept_roles": roles, "weight_bytes": sum(site.bytes for site in plan.sites)}


def how_it_ran(run: Any) -> dict[str, Any]:
    """Kernel → sites, and what fell back, of a model that was executed."""
    if run is None:
        return {}
    report = run.bitwright_run
    counted = report.counters.metrics()
    names = ("tokens", "overflowed_tokens", "token_fallbacks", "batch_fallbacks", "held_calls")
    return {
        "kernels": dict(Counter(site.kernel for site in report.sites)),
        "dtype": str(report.dtype).removeprefix("torch."),
        "fallbacks": {name: counted.get(f"fallback_{name}", 0) for name in names},
    }


def break_even_rows(loaded: LoadedModel, quick: bool) -> list[dict[str, Any]]:
    """Share of calls with an overflow at which rounding inputs stops to pay, of one layer's matrices."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 1000, (1, 64), generator=generator)
    for scheme in (FP8_STATIC, "int8_static"):
        plan = calibrate_static(uniform_plan(loaded, scheme), loaded, [prompt])
        layer = apply(plan, loaded, mode="auto", dtype=torch.bfloat16).get_submodule("model.layers.0")
        for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"):
            for tokens in BREAK_EVEN_TOKENS[:1] if quick else BREAK_EVEN_TOKENS:
                weight: Any = layer.get_submodule(name).packed
                even = measure_break_even(weight, tokens, repeats=3 if quick else 51)
                rows.append(
                    {
                        "scheme": scheme,
                        "matrix": name,
                        "shape": list(weight.shape),
                        **dataclasses.asdict(even),
                        "rate": even.rate,
                    }
                )
    return rows


def padding_rows(quick: bool) -> list[dict[str, Any]]:
    """What filling up to a GPU's multiples costs INT8 products, of shapes that are none; here, on the CPU.

    A GPU's least number of tokens is left out: few tokens are another kernel on a CPU.
    """
    rows, multiples = [], dataclasses.replace(INT8_MULTIPLES["cuda"], min_tokens=0)
    scheme = SCHEMES["int8"]
    assert scheme.weights is not None and scheme.activations is not None
    for shape in ((577, 1531),) if quick else ((577, 1531), (4093, 4099), (4096, 4096)):
        packed = pack(torch.randn(shape), scheme.weights)
        for tokens in (8, 17, 130):
            x = pack(torch.randn(tokens, shape[1]), scheme.activations)
            counts = PaddingCounts()
            plain = int8_rows(packed, Padding(multiples=Multiples(), counts=PaddingCounts()))
            filled = int8_rows(packed, Padding(multiples=multiples, counts=counts))
            calls: dict[str, Callable[[], object]] = {
                "as it is": lambda plain=plain, x=x: plain.multiply_codes(x, torch.bfloat16),
                "filled": lambda filled=filled, x=x: filled.multiply_codes(x, torch.bfloat16),
            }
            taken = in_turn(calls, 2 if quick else 51)
            rows.append(
                {
                    "shape": list(shape),
                    "tokens": tokens,
                    "padded_share_of_inputs": counts.padded_share,
                    "padded_share_of_weights": filled.nbytes() / plain.nbytes() - 1,
                    **{f"{name} (ms)": round(timing.median_ms, 3) for name, timing in taken.items()},
                    "cost": taken["filled"].median_ms / taken["as it is"].median_ms - 1,
                }
            )
    return rows
