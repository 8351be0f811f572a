"""Which estimator predicts the KL of a change best, for weights, inputs and values; how far predictions can be trusted.

    python benchmarks/estimators.py
    python benchmarks/estimators.py --quick            few tokens, changes and layers: whether it runs; nothing is filed
    python benchmarks/estimators.py --predict-again    what a search predicts, anew, beside measurements that are filed:
                                                       for changes of scores and corrections that leave codes alone

The result goes to benchmarks/results/estimators.json, with machine and versions. The built-in model with its weights
dithered, 32 × 128 calibration tokens; changes of sites of every role in six layers, one at a time, each measured on 5 ×
128 tokens that served for nothing else (`single_changes.py`). A change shifts the text's log-likelihood at token t
by s_t = g_tᵀ δ_t, with g the gradient where it happens and δ_t what it changes there:

    weights    δ_t = E x_t, with one error E of the weight for all tokens
    inputs     δ_t = W (Q(x_t) − x_t), of a matrix whose weight stays
    values     δ_t = Q(v_t) − v_t, of caches, operands of attention, probabilities, norms, …

and the estimators of its KL are

    factored            as if outputs (of inputs and values: numbers) were independent: second moments of g and δ alone
    tokens              ½ E[s_t²]: every token for itself
    tokens, by head     the same with every head for itself (values; what `search/value_scores.py` does)
    windows of n        ½ E[(Σ_{t in window} s_t)²]: summed over n neighbouring tokens before squaring
    sequences           the same over whole sequences
    split               weights in windows of 32, inputs token by token (`search/score.py`)

all from the whole text. `as scored` is what a search knows: bounded samples of the tokens, and what codes gain from
having seen the text taken off (`search/optimism.py`). `after probes` is that times the factor of the role.

Then totals (one change at all sites at once), and pairs of neighbouring sites: KL(both) / (KL(one) + KL(other)), beside
the same ratio as windows of 32 predict it with the product of both shifts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics as averages
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from machine import machine, now

RESULT = Path(__file__).parent / "results" / "estimators.json"
#: What is wanted: of all single changes, of those of one scheme, and of whole plans.
WANTED = {"correlation_of_logarithms": 0.985, "share_within_1.6": 0.9, "total_within": 0.2}
_WINDOWS = (8, 16, 32, 64)
#: Weights alone: (scheme, rounding).
_WEIGHTS = (
    ("int3_g64", "rtn"),
    ("int4_g128", "rtn"),
    ("int4_g128", "gptq"),
    ("int4_g128", "gradient_aware"),
)
#: Weights with their inputs, and the inputs alone.
_WITH_INPUTS = ("fp8", "int8", "mxfp8")
#: Value scheme → roles at which it is tried; None: all that it fits.
_VALUES: Mapping[str, frozenset[str] | None] = {
    "fp8_e4m3_token": None,
    "int8_token": None,
    "fp8_e4m3_head": None,
    "fp8_e4m3_unit": None,
    "int8_unit": None,
    "int4_token_g32": None,
    "int4_channel_g32": None,
    "bf16_values": frozenset({"norm", "residual", "attn.softmax_sum"}),
}
#: Pairs of neighbouring sites: (role, layers further on), changed together in this scheme.
_PAIR_SCHEME = ("int3_g64", "rtn")
_PAIRS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "q, k": (("attn.q", 0), ("attn.k", 0)),
    "v → out": (("attn.v", 0), ("attn.out", 0)),
    "out → gate": (("attn.out", 0), ("mlp.gate", 0)),
    "gate, up": (("mlp.gate", 0), ("mlp.up", 0)),
    "gate → down": (("mlp.gate", 0), ("mlp.down", 0)),
    "gate, up → down": (("mlp.gate", 0), ("mlp.up", 0), ("mlp.down", 0)),
    "down → next gate": (("mlp.down", 0), ("mlp.gate", 1)),
}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    calibration: int = 32
    #: Sequences of the repair text, and of those that changes are measured on.
    repair: int = 16
    measured: int = 5
    length: int = 128
    layers: int = 6
    #: The model is cut to so many layers; None: all.
    kept_layers: int | None = None
    weights: tuple[tuple[str, str], ...] = _WEIGHTS
    with_inputs: tuple[str, ...] = _WITH_INPUTS
    values: tuple[str, ...] = tuple(_VALUES)


QUICK = Size(
    calibration=16,
    repair=2,
    measured=2,
    length=64,
    layers=2,
    kept_layers=5,
    weights=(("int3_g64", "rtn"), ("int4_g128", "gptq")),
    with_inputs=("int8",),
    values=("int8_token", "int4_channel_g32", "bf16_values"),
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One single change: what is predicted of it, and what was measured."""

    #: "weights", "weights and inputs", "inputs", "values".
    kind: str
    scheme: str
    site: str
    role: str
    estimates: dict[str, float]
    measured: float
    #: Relative standard error of what was measured.
    error: float

    @property
    def record(self) -> dict[str, Any]:
        """What the result file holds."""
        told = {name: float(f"{kl:.4g}") for name, kl in self.estimates.items()}
        return {
            "kind": self.kind,
            "scheme": self.scheme,
            "site": self.site,
            "role": self.role,
            "measured": float(f"{self.measured:.4g}"),
            "relative_error": round(self.error, 3),
            "estimates": told,
        }


class Told:
    """Progress: every stage in a line as it begins, with the processor's seconds so far."""

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Told]:
        """A stage of `total` steps."""
        print(f"{time.process_time():6.0f} s  {name} ({total})", flush=True)
        yield self

    def advance(self, steps: int = 1) -> None:
        """Steps are not told."""


# --- estimators ------------------------------------------------------------------------------------------------------


def of_shifts(shift_T: Any, length: int, num_scored: int) -> dict[str, float]:
    """½ E[(Σ s_t)²] over single tokens, windows and sequences of fp64 shifts [T], whole sequences after each other."""
    found = {}
    for width in (1, *_WINDOWS, length):
        if width <= length and shift_T.numel() % width == 0:
            name = {1: "tokens", length: "sequences"}.get(width, f"windows of {width}")
            found[name] = float(shift_T.reshape(-1, width).sum(-1).square().sum()) / (2 * num_scored)
    return found


def of_weight(x_TK: Any, g_TN: Any, error_NK: Any, length: int, num_scored: int) -> dict[str, float]:
    """Every estimator's KL of one error of a weight."""
    moment = x_TK.T @ x_TK / len(x_TK)
    damage_N = ((error_NK @ moment) * error_NK).sum(-1)
    factored = float(g_TN.square().sum(0) @ damage_N) / (2 * num_scored)
    return {"factored": factored, **of_shifts(weight_shifts(x_TK, g_TN, error_NK), length, num_scored)}


def weight_shifts(x_TK: Any, g_TN: Any, error_NK: Any) -> Any:
    """s_t of one error of a weight, fp64 [T]."""
    return ((g_TN @ error_NK) * x_TK).sum(-1).double()


def of_changes(delta_THD: Any, g_THD: Any, length: int, num_scored: int) -> dict[str, float]:
    """Every estimator's KL of changed numbers, [T, D] or by head [T, H, D]."""
    by_head_TH = (delta_THD * g_THD).sum(-1).double().reshape(len(delta_THD), -1)
    moments = g_THD.square().double().sum(0) * delta_THD.square().double().mean(0)
    return {
        "factored": float(moments.sum()) / (2 * num_scored),
        "tokens, by head": float(by_head_TH.square().sum()) / (2 * num_scored),
        **of_shifts(by_head_TH.sum(-1), length, num_scored),
    }


def added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Independent changes: their KLs add up."""
    return {name: math.fsum(part[name] for part in parts) for name in parts[0]}


# --- what a search knows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search knows after its probes, and the sites that are looked at."""

    subject: Any
    learned: Any
    values: Any
    problem: Any
    probes: tuple[Any, ...]
    #: Numbers of layers, rising.
    layers: tuple[int, ...]

    def weight_site(self, role: str, layer: int) -> Any:
        """The site of a role in a layer."""
        from single_changes import layer_of

        sites = self.subject.prices.decoder_sites
        return next(site for site in sites if site.role == role and layer_of(site.name) == layer)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the decoder's weights."""
        return tuple(dict.fromkeys(site.role for site in self.subject.prices.decoder_sites))


def search(size: Size) -> Searched:
    """Load, calibrate, score and probe, with all values in question."""
    from bitwright.models.load import load
    from bitwright.plan import Budget
    from bitwright.search.candidate import Candidate
    from bitwright.search.learn_choices import learn_scores
    from bitwright.search.optimize import open_meter
    from bitwright.search.probe import probe
    from bitwright.search.settings import settle
    from bitwright.search.subject import open_subject

    candidates = (
        *(Candidate(scheme=scheme, rounding=rounding) for scheme, rounding in size.weights),
        *(Candidate(scheme=scheme) for scheme in size.with_inputs),
    )
    settings = settle(
        Budget(max_kl=0.02),
        task="text",
        calibration="docs",
        evaluation="docs",
        schemes=list(dict.fromkeys(c.scheme for c in candidates)),
        values="all",
        tokens=size.calibration * size.length,
        evaluation_tokens=None,
        sequence_length=size.length,
        seed=0,
    )
    settings = replace(settings, candidates=candidates)
    told = Told()
    loaded = load("demo-dithered")
    if size.kept_layers is not None:
        loaded.model.model.layers = loaded.model.model.layers[: size.kept_layers]
        loaded.model.config.num_hidden_layers = size.kept_layers
    subject = open_subject(loaded, settings, cache=None, allow_pickle=False, progress=told)
    # a search would read more of it
    splits = replace(subject.splits, repair=subject.splits.repair.first(size.repair))
    subject = replace(subject, splits=splits)
    learned, values = learn_scores(subject, settings, told)
    meter = open_meter(subject, learned, values, told)
    problem, probes = probe(subject, settings, learned, meter, told)
    draw, num_layers = random.Random(0), len(subject.loaded.model.model.layers)
    bounds = [num_layers * i // size.layers for i in range(size.layers + 1)]
    # the next layer is looked at too
    layers = tuple(draw.randrange(first, min(last, num_layers - 1)) for first, last in itertools.pairwise(bounds))
    return Searched(subject=subject, learned=learned, values=values, problem=problem, probes=probes, layers=layers)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Every token's inputs, values and gradients at the sites that are looked at."""

    length: int
    num_scored: int
    #: Matrix name → inputs fp32 [T, K] and gradients fp32 [T, N].
    matrix: Callable[[str], tuple[Any, Any]]
    #: (value site, operand) → values and gradients fp32 [T, H, D].
    operand: Callable[[str, str], tuple[Any, Any]]


def look_closely(found: Searched, sites: Sequence[Any], value_sites: Sequence[Any]) -> Seen:
    """One more calibration pass that keeps every token, unrounded, at a few sites."""
    import bitwright.search.calibrate as calibration
    import bitwright.search.value_observer as observing
    from bitwright.search.value_scores import sample_groups

    subject = found.subject
    text = subject.splits.calibrate
    num_tokens = text.input_ids.numel()
    with (
        patch.object(calibration, "NUM_UNROUNDED_TOKENS", num_tokens),
        patch.object(observing, "SAMPLE_NUMBERS", 1 << 50),
        Told().stage("every token of some sites", len(sites) + len(value_sites)) as stage,
    ):
        observer = observing.ValueObserver(
            subject.loaded.model,
            value_sites,
            num_tokens=num_tokens,
            seed=0,
            groups=sample_groups(value_sites, list(_VALUES)),
            sites=subject.sites,
        )
        statistics = calibration.calibrate(subject.loaded.model, sites, text, seed=0, stage=stage, observers=[observer])

    def matrix(name: str) -> tuple[Any, Any]:
        kept = statistics.matrices[name]
        return kept.inputs.unrounded_RK, kept.g_TN.float()

    def operand(site: str, name: str) -> tuple[Any, Any]:
        values, gradients, stands_for = observer.seen[site, name].rows()
        assert float(stands_for.max()) == 1.0, "every token is to be kept"
        return values, gradients

    return Seen(length=text.input_ids.shape[1], num_scored=statistics.num_scored, matrix=matrix, operand=operand)


# --- single changes --------------------------------------------------------------------------------------------------


class Measuring:
    """Changes sites, measures, and tells what was predicted."""

    def __init__(self, found: Searched, seen: Seen, runs: Any) -> None:
        self._found, self._seen, self._runs = found, seen, runs
        self._model = found.subject.loaded.model

    def run(self, site_names: Sequence[str], rules: Mapping[str, Any], values: Mapping[Any, Any] | None = None) -> Any:
        """KL of every token under some rules that change these sites."""
        from single_changes import layer_of

        from bitwright.inference import emulate

        with emulate(self._model, self._found.subject.sites, rules, values=values):
            return self._runs.token_kl(min(layer_of(name) for name in site_names))

    def error(self, site: Any, choice: Any) -> Any:
        """Error of a site's weight under a choice."""
        from bitwright.models import site_weight

        weight = site_weight(self._model, site).contiguous()
        return self._found.learned.quantizer.values(site.name, choice, weight) - weight

    def shifts(self, site: Any, choice: Any) -> Any:
        """s_t of a site's weight under a choice."""
        return weight_shifts(*self._seen.matrix(site.parameter), self.error(site, choice))

    def weight(self, site: Any, choice: Any) -> Change:
        """A site's weight under a choice, and its inputs where the scheme rounds them."""
        from bitwright.quantize import SCHEMES

        x_TK, g_TN = self._seen.matrix(site.parameter)
        seen, scheme = self._seen, SCHEMES[choice.scheme].activations
        estimates = of_weight(x_TK, g_TN, self.error(site, choice), seen.length, seen.num_scored)
        if scheme is not None:
            inputs = self._inputs(site, scheme)
            split = estimates["windows of 32"] + inputs["tokens"]
            estimates = {**added([estimates, {name: inputs[name] for name in estimates}]), "split": split}
        rules = self._found.learned.quantizer.rules({site.name: choice})
        kind = "weights" if scheme is None else "weights and inputs"
        return self._change(kind, str(choice), site, estimates, self.run([site.name], rules), choice)

    def inputs(self, site: Any, scheme_name: str) -> Change:
        """A site's inputs alone."""
        from bitwright.inference import SiteRule
        from bitwright.quantize import SCHEMES

        scheme = SCHEMES[scheme_name].activations
        rules = {site.name: SiteRule(quantize_weight=lambda weight: weight, activations=scheme)}
        estimates = self._inputs(site, scheme)
        return self._change("inputs", f"{scheme_name} inputs", site, estimates, self.run([site.name], rules), None)

    def _inputs(self, site: Any, scheme: Any) -> dict[str, float]:
        from bitwright.models import site_weight
        from bitwright.quantize.static_scales import round_input

        x_TK, g_TN = self._seen.matrix(site.parameter)
        u_TK = g_TN @ site_weight(self._model, site)
        return of_changes(round_input(x_TK, scheme) - x_TK, u_TK, self._seen.length, self._seen.num_scored)

    def value(self, site: Any, choice: Any) -> Change:
        """A value site under a choice."""
        from bitwright.quantize.value_rounding import round_values

        rule = self._found.values.rules([site], {site.name: choice})
        parts = []
        for operand in site.operands:
            values_RHD, g_RHD = self._seen.operand(site.name, operand)
            scale = rule[site].scale(operand)
            rounded_RHD = round_values(values_RHD.transpose(0, 1), rule[site].scheme, scale).transpose(0, 1)
            parts.append(of_changes(rounded_RHD - values_RHD, g_RHD, self._seen.length, self._seen.num_scored))
        return self._change("values", str(choice), site, added(parts), self.run([site.name], {}, rule), choice)

    def _change(
        self, kind: str, scheme: str, site: Any, estimates: dict[str, float], token_kl: Any, choice: Any
    ) -> Change:
        from single_changes import mean_and_error

        from bitwright.search.correct import label_of

        if choice is not None:
            estimates["as scored"] = self._found.learned.scores[site.name][choice]
            estimates["after probes"] = self._found.problem.site_kl(site, choice)
        measured, error = mean_and_error(token_kl)
        change = Change(
            kind=kind,
            scheme=scheme,
            site=site.name,
            role=label_of(site),
            estimates=estimates,
            measured=measured,
            error=error,
        )
        told = estimates.get("after probes", estimates["tokens"])
        print(
            f"{time.process_time():6.0f} s  {site.name} {scheme}: {measured:.3g} ± {error:.0%}, {told:.3g} told",
            flush=True,
        )
        return change


def chosen_values(found: Searched, size: Size) -> list[tuple[Any, Any]]:
    """Value sites of two layers, each with every scheme that is tried there."""
    from single_changes import layer_of

    from bitwright.search.candidate import Candidate

    layers = {found.layers[1 % len(found.layers)], found.layers[-2]}
    chosen = []
    for site in found.subject.value_sites:
        if ".layers." in site.name and layer_of(site.name) in layers:
            known = found.learned.scores.get(site.name, {})
            for name in size.values:
                roles, choice = _VALUES[name], Candidate(scheme=name)
                if choice in known and (roles is None or site.role in roles):
                    chosen.append((site, choice))
    return chosen


def chosen_weights(found: Searched, size: Size) -> list[tuple[Any, Any]]:
    """Sites of every role in every other layer that is looked at, with every choice of weights: odd ones, then even."""
    from bitwright.search.candidate import Candidate

    choices = [Candidate(scheme=scheme, rounding=rounding) for scheme, rounding in size.weights]
    choices += [Candidate(scheme=scheme) for scheme in size.with_inputs]
    return [
        (found.weight_site(role, layer), choice)
        for index, choice in enumerate(choices)
        for role in found.roles
        for layer in found.layers[index % 2 :: 2]
    ]


# --- pairs and totals ------------------------------------------------------------------------------------------------


def measure_pairs(measuring: Measuring, found: Searched, seen: Seen, singles: Sequence[Change]) -> list[dict[str, Any]]:
    """Neighbouring sites together, beside each alone; measured, and as windows of 32 predict it."""
    from single_changes import mean_and_error

    from bitwright.search.candidate import Candidate

    choice = Candidate(scheme=_PAIR_SCHEME[0], rounding=_PAIR_SCHEME[1])
    alone = {change.site: change.measured for change in singles if change.scheme == str(choice)}
    quantizer = found.learned.quantizer
    pairs = []
    for kind, members in _PAIRS.items():
        for layer in found.layers[::2]:
            sites = [found.weight_site(role, layer + further) for role, further in members]
            for site in sites:
                if site.name not in alone:
                    alone[site.name] = float(measuring.run([site.name], quantizer.rules({site.name: choice})).mean())
            shifts = [measuring.shifts(site, choice) for site in sites]
            window = "windows of 32"
            apart = math.fsum(of_shifts(s, seen.length, seen.num_scored)[window] for s in shifts)
            together = of_shifts(sum(shifts), seen.length, seen.num_scored)[window]
            names = [site.name for site in sites]
            kl, error = mean_and_error(measuring.run(names, quantizer.rules(dict.fromkeys(names, choice))))
            pairs.append(
                {
                    "pair": kind,
                    "layer": layer,
                    "measured_together": float(f"{kl:.4g}"),
                    "measured_ratio": round(kl / math.fsum(alone[name] for name in names), 3),
                    "relative_error": round(error, 3),
                    "predicted_ratio": round(together / apart, 3),
                }
            )
            print(f"{time.process_time():6.0f} s  {pairs[-1]}", flush=True)
    return pairs


def judge_pairs(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far pairs are from adding up, kind by kind, and whether products of shifts tell it."""
    import numpy as np

    logs = np.log([[pair["measured_ratio"], pair["predicted_ratio"]] for pair in pairs])
    kinds: dict[str, list[float]] = {}
    for pair in pairs:
        kinds.setdefault(pair["pair"], []).append(pair["measured_ratio"])
    return {
        "median_ratio_by_kind": {kind: averages.median(ratios) for kind, ratios in kinds.items()},
        "median_ratio": round(float(np.exp(np.median(logs[:, 0]))), 3),
        "least_and_most": [min(map(min, kinds.values())), max(map(max, kinds.values()))],
        "share_within_20_percent": round(float(np.mean(np.abs(np.exp(logs[:, 0]) - 1) <= 0.2)), 3),
        "spread_of_log_ratio": round(float(logs[:, 0].std()), 3),
        "spread_left_by_products_of_shifts": round(float((logs[:, 0] - logs[:, 1]).std()), 3),
    }


def measure_totals(measuring: Measuring, found: Searched, size: Size) -> list[dict[str, Any]]:
    """Every change at all of its sites at once: scores summed, after role factors, and on the curve of totals."""
    totals = []
    for choice, sites in whole_models(found, size):
        of_weights = {s.name: choice for s in sites if s.kind == "weight"}
        values = found.values.rules([s for s in sites if s.kind != "weight"], {s.name: choice for s in sites})
        token_kl = measuring.run(["layers.0"], found.learned.quantizer.rules(of_weights), values)
        measured = float(f"{float(token_kl.mean()):.4g}")
        totals.append(
            {"what": f"{len(sites)} sites in {choice}", "measured": measured, **told_of(found, choice, sites)}
        )
        print(f"{time.process_time():6.0f} s  {totals[-1]}", flush=True)
    return totals


def whole_models(found: Searched, size: Size) -> Iterator[tuple[Any, list[Any]]]:
    """Every choice, and all sites that it can be made at."""
    from bitwright.search.candidate import Candidate

    choices = [Candidate(scheme=scheme, rounding=rounding) for scheme, rounding in size.weights]
    choices += [Candidate(scheme=scheme) for scheme in (*size.with_inputs, *size.values)]
    for choice in choices:
        everywhere = [s for s in (*found.subject.prices.decoder_sites, *found.subject.value_sites)
                      if choice in found.learned.scores.get(s.name, {})]  # fmt: skip
        sites = [s for s in everywhere if s.kind == "weight" or _VALUES[choice.scheme] is None
                 or s.role in _VALUES[choice.scheme]]  # fmt: skip
        if sites:
            yield choice, sites


def told_of(found: Searched, choice: Any, sites: Sequence[Any]) -> dict[str, float]:
    """What is predicted of one choice at many sites."""
    problem = found.problem
    corrected = problem.site_sum({site.name: choice for site in sites})
    kls = {
        "sum_of_scores": math.fsum(found.learned.scores[site.name][choice] for site in sites),
        "after_role_factors": corrected,
        "after_totals": problem.correction.total(corrected),
    }
    return {name: float(f"{kl:.4g}") for name, kl in kls.items()}


# --- what comes out --------------------------------------------------------------------------------------------------


def agreement(changes: Sequence[Change], name: str) -> dict[str, float]:
    """How well the estimates under `name` agree with the measurements."""
    import numpy as np

    logs = np.log([[change.estimates[name], change.measured] for change in changes])
    off = logs[:, 0] - logs[:, 1]
    noise = np.square([change.error for change in changes]).mean()
    return {
        "changes": len(changes),
        "correlation_of_logarithms": round(float(np.corrcoef(logs.T)[0, 1]), 4),
        # what exact predictions would reach, for the noise of what is measured
        "correlation_at_best": round(float(np.sqrt(max(0.0, 1 - noise / logs[:, 1].var()))), 4),
        "spread_of_log_ratio": round(float(off.std()), 3),
        "median_ratio": round(float(np.exp(np.median(off))), 3),
        "share_within_1.6": round(float(np.mean(np.abs(off) <= math.log(1.6))), 3),
    }


def compared(changes: Sequence[Change]) -> dict[str, Any]:
    """Every estimator by kind; as scored and after probes over everything, by scheme and by role."""
    kinds = dict.fromkeys(change.kind for change in changes)
    by_kind = {}
    for kind in kinds:
        some = [change for change in changes if change.kind == kind]
        by_kind[kind] = {name: agreement(some, name) for name in some[0].estimates}
    scored = [change for change in changes if "as scored" in change.estimates]

    def told(some: Sequence[Change]) -> dict[str, Any]:
        return {name: agreement(some, name) for name in ("as scored", "after probes")}

    return {
        "estimators": by_kind,
        "all_roles_and_schemes": told(scored),
        "by_scheme": {
            scheme: told([c for c in scored if c.scheme == scheme])
            for scheme in dict.fromkeys(c.scheme for c in scored)
        },
        "by_role": {
            role: told([c for c in scored if c.role == role]) for role in dict.fromkeys(c.role for c in scored)
        },
    }


def measure(size: Size) -> dict[str, Any]:
    """All changes, pairs and totals."""
    from single_changes import SingleChanges

    found = search(size)
    of_weights, of_values = chosen_weights(found, size), chosen_values(found, size)
    next_gates = [found.weight_site("mlp.gate", layer + 1) for layer in found.layers[::2]]
    in_layers = [found.weight_site(role, layer) for role in found.roles for layer in found.layers]
    looked_at = {site.name: site for site in (*in_layers, *next_gates)}
    order = [site for site in found.subject.sites if site.name in looked_at]
    value_sites = list(dict.fromkeys(site for site, _ in of_values))
    seen = look_closely(found, order, value_sites)
    runs = SingleChanges(found.subject.loaded.model, found.subject.splits.final.first(size.measured).input_ids)
    floor = runs.floor()
    print(f"{time.process_time():6.0f} s  {floor:.2g} nats of the model to itself, one sequence at a time")
    measuring = Measuring(found, seen, runs)
    changes = [measuring.weight(site, choice) for site, choice in of_weights]
    changes += [
        measuring.inputs(found.weight_site(role, layer), scheme)
        for scheme in size.with_inputs
        for role in found.roles
        for layer in found.layers[1::2][-2:]
    ]
    changes += [measuring.value(site, choice) for site, choice in of_values]
    # below ten times the floor a measurement says more of the order of sums than of the change
    told = [c for c in changes if c.measured > 10 * floor and min(c.estimates.values()) > 0]
    pairs = measure_pairs(measuring, found, seen, changes)
    return {
        "what": f"demo-dithered; {size.calibration} x {size.length} calibration tokens; probes on {size.repair} "
        f"sequences of the repair text; changes measured on {size.measured} x {size.length} final tokens",
        "wanted": WANTED,
        "layers": found.layers,
        "kl_of_another_order_of_sums": floor,
        "left_out_as_too_small": [f"{c.site} {c.scheme}" for c in changes if c not in told],
        "median_relative_error_of_measurements": round(averages.median(c.error for c in told), 3),
        **compared(told),
        "totals": measure_totals(measuring, found, size),
        "interaction": {**judge_pairs(pairs), "pairs": pairs},
        **corrections(found),
        "single_changes": [change.record for change in told],
    }


def corrections(found: Searched) -> dict[str, Any]:
    """What probes said, and the factors that came of it."""
    correction = found.problem.correction
    return {
        "rounding_factors": {rounding: round(f, 3) for rounding, f in correction.rounding_factors.items()},
        "role_factors": {role: round(f, 3) for role, f in correction.role_factors.items()},
        "measured_totals": [[float(f"{number:.4g}") for number in point] for point in correction.totals],
        "probes": [
            {"what": p.what, "predicted": float(f"{p.predicted_kl:.4g}"), "measured": float(f"{p.measured_kl:.4g}")}
            for p in found.probes
        ],
    }


def predict_again(size: Size, filed: Mapping[str, Any]) -> dict[str, Any]:
    """What is filed, with everything that a search predicts made anew, and which scores without data moved by 2 %."""
    found = search(size)
    known = {
        (site.name, str(choice)): (site, choice)
        for site, choice in (*chosen_weights(found, size), *chosen_values(found, size))
    }
    changes, moved = [], []
    for row in filed["single_changes"]:
        estimates = dict(row["estimates"])
        if "as scored" in estimates:
            site, choice = known[row["site"], row["scheme"]]
            before = estimates["as scored"]
            estimates["as scored"] = found.learned.scores[site.name][choice]
            estimates["after probes"] = found.problem.site_kl(site, choice)
            if choice.rounding == "rtn" and not math.isclose(estimates["as scored"], before, rel_tol=0.02):
                moved.append(f"{site.name} {choice}")  # another machine, or something that should not have changed
        changes.append(
            Change(
                kind=row["kind"],
                scheme=row["scheme"],
                site=row["site"],
                role=row["role"],
                estimates=estimates,
                measured=row["measured"],
                error=row["relative_error"],
            )
        )
    told = {
        f"{len(sites)} sites in {choice}": told_of(found, choice, sites) for choice, sites in whole_models(found, size)
    }
    return {
        **filed,
        "predicted_again": now(),
        "scores_without_data_that_moved": moved,
        **compared(changes),
        "totals": [{**row, **told[row["what"]]} for row in filed["totals"]],
        **corrections(found),
        "single_changes": [change.record for change in changes],
    }


def show(content: Mapping[str, Any]) -> None:
    """Tables and verdicts."""
    for kind, found in content["estimators"].items():
        print(f"\n{kind}: correlation of logarithms (at best), spread, median ratio, share within 1.6")
        for name, row in found.items():
            print(
                f"  {name:18} {row['correlation_of_logarithms']:.3f} ({row['correlation_at_best']:.3f})  "
                f"{row['spread_of_log_ratio']:.2f}  {row['median_ratio']:.2f}  {row['share_within_1.6']:.0%}"
            )
    for part in ("all_roles_and_schemes", "by_scheme", "by_role"):
        print(f"\n{part}: as scored → after probes")
        rows = {"": content[part]} if part == "all_roles_and_schemes" else content[part]
        for name, row in rows.items():
            before, after = row["as scored"], row["after probes"]
            print(
                f"  {name:26} {before['changes']:3} changes; correlation {before['correlation_of_logarithms']:.3f} → "
                f"{after['correlation_of_logarithms']:.3f} (at best {after['correlation_at_best']:.3f}); "
                f"within 1.6: {before['share_within_1.6']:.0%} → {after['share_within_1.6']:.0%}"
            )
    print("\ntotals: measured; predicted / measured of the sum of scores, after role factors, on the curve of totals")
    for row in content["totals"]:
        ratios = (row[k] / row["measured"] for k in ("sum_of_scores", "after_role_factors", "after_totals"))
        print(f"  {row['what']:40} {row['measured']:.3g}  " + "  ".join(f"{ratio:.2f}" for ratio in ratios))
    found = content["interaction"]
    print("\npairs: KL(both) / sum of KLs alone, median by kind")
    for kind, ratio in found["median_ratio_by_kind"].items():
        print(f"  {kind:20} {ratio:.2f}")
    for line in verdicts(content):
        print(line)


def verdicts(content: Mapping[str, Any]) -> list[str]:
    """What was wanted, and whether it is so."""
    after = content["all_roles_and_schemes"]["after probes"]
    wanted = WANTED["correlation_of_logarithms"]
    share = WANTED["share_within_1.6"]
    short = {s: r["after probes"]["share_within_1.6"] for s, r in content["by_scheme"].items()}
    short = {scheme: found for scheme, found in short.items() if found < share}
    off = {row["what"]: row["after_totals"] / row["measured"] - 1 for row in content["totals"]}
    far = {what: f"{deviation:+.0%}" for what, deviation in off.items() if abs(deviation) > WANTED["total_within"]}
    pairs = content["interaction"]
    far_kinds = [k for k, ratio in pairs["median_ratio_by_kind"].items() if abs(ratio - 1) > WANTED["total_within"]]
    told = pairs["spread_left_by_products_of_shifts"] < 0.7 * pairs["spread_of_log_ratio"]
    return [
        f"correlation {after['correlation_of_logarithms']:.4f}, wanted {wanted}: "
        + ("reached" if after["correlation_of_logarithms"] >= wanted else "missed"),
        f"{share:.0%} within 1.6 in each scheme: " + ("reached" if not short else f"missed by {short}"),
        "totals within 20 %: " + ("reached" if not far else f"missed by {far}"),
        f"neighbours: median ratio {pairs['median_ratio']}, "
        f"{pairs['share_within_20_percent']:.0%} of pairs within 20 % of adding up; "
        + (f"kinds that do not add up: {far_kinds}" if far_kinds else "no kind is systematically off")
        + (
            "; products of shifts tell most of it: worth modelling"
            if told
            else "; products of shifts tell little of it: nothing there to model with"
        ),
    ]


def main() -> None:
    """Measure, write, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tokens, layers and changes; nothing is filed")
    parser.add_argument("--predict-again", action="store_true", help="predict anew, beside filed measurements")
    asked = parser.parse_args()
    if asked.predict_again:
        content = predict_again(Size(), json.loads(RESULT.read_text(encoding="utf-8")))
        content["verdicts"] = verdicts(content)
        show(content)
        RESULT.write_text(written(content) + "\n", encoding="utf-8")
        return
    quick = asked.quick
    begin = time.perf_counter()
    content = measure(QUICK if quick else Size())
    content["verdicts"] = verdicts(content)
    times = {"seconds": round(time.perf_counter() - begin), "processor_seconds": round(time.process_time())}
    content = {"machine": machine(["torch", "numba", "transformers"]), "date": now(), **times, **content}
    show(content)
    if not quick:
        RESULT.write_text(written(content) + "\n", encoding="utf-8")


def written(content: Mapping[str, Any]) -> str:
    """JSON with one line for each single change, pair and total."""
    rows = {key: content[key] for key in ("single_changes", "totals", "probes")}
    text = json.dumps({**content, **dict.fromkeys(rows, "@")}, indent=1, ensure_ascii=False)
    for key, found in rows.items():
        lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in found)
        text = text.replace(f'"{key}": "@"', f'"{key}": [\n{lines}\n ]')
    return text


if __name__ == "__main__":
    main()
