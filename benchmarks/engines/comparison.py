"""What the checks of engines share: cases, plans without a search, the text that both sides are asked, and the loop.

A check exports each of its plans, has an engine answer in an environment of its own (`environments.py`), and holds that
against `bitwright.inference.apply`. Where inputs or caches are rounded, no two programs agree: an input that lies on
the edge between two codes falls to either side, and the next layer's inputs have moved by a whole step. So `apply` is
also held against itself with every product nudged by one part in a million, as sums of fp32 in another order differ:
what that alone moves is the plan's own *resolution*, and an engine is expected within it.

Rejected: nudging the embeddings alone by the last bit. Under codes of four bits so little may reach no edge: NVFP4 on
the built-in model gave 0.01, and 0.5 once it was 1e-5. vLLM's formula of NVFP4, which rounds 120 of 57.5 million inputs
to the other side, is 0.43 away from ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.export import share_tensor_scales
from bitwright.inference import calibrate_static
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site, find_sites
from bitwright.models.value_sites import ValueSite, find_value_sites
from bitwright.plan import Plan, SiteChoice, Summary, load_plan
from bitwright.quantize import SCHEMES
from bitwright.quantize.catalogs import VALUE_SCHEMES
from bitwright.search.documents import CALIBRATION_SETS

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "peers")]
import environments  # noqa: E402
import machine  # noqa: E402
from unsearched_plans import unsearched_plan  # noqa: E402

MAX_LOGPROB_DIFFERENCE = 0.02
MAX_PERPLEXITY_RATIO = 0.01
#: Our two best logits: closer than this, either may be first.
TIE = 0.05
#: Relative change of every product that measures a plan's resolution, and on how many texts.
NUDGE, NUM_NUDGED = 1e-6, 4
#: What an engine may differ by, in units of that resolution.
RESOLUTIONS = 1.25
NUM_TEXTS, TEXT_TOKENS = 12, 128
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 16, 32
NUM_CALIBRATED = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan that is made without a search: round-to-nearest, the ends as loaded."""

    scheme_of: Callable[[Site], str]
    #: Value scheme of all caches; None leaves them alone.
    cache: str | None = None
    #: Engine whose fused matrices share their tensor scales; None: each has its own.
    shared_for: str | None = None


@dataclass(frozen=True, kw_only=True)
class Text:
    """What both sides are asked."""

    texts: list[list[int]]
    prompts: list[list[int]]
    #: For static scales: neither of the two.
    calibration: list[list[int]]


#: (plan, model, the engine's python, arguments) → rows.
Check = Callable[[Plan, LoadedModel, Path, argparse.Namespace], Iterator[dict[str, Any]]]


def run_checks(
    doc: str,
    engine: str,
    cases: Mapping[str, Case],
    check: Check,
    spell: Callable[[dict[str, Any]], str],
    *,
    packages: Sequence[str],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The whole program: the cases and plans that were asked for, a printed row each, and a file of them."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(cases))
    parser.add_argument("--plan", type=Path, action="append", default=[], help="a plan folder; may be repeated")
    parser.add_argument("--results", type=Path, help="write the rows there as JSON")
    add_options(parser)
    args = parser.parse_args()
    python = environments.python_of(engine, HERE)
    loaded = load("demo")
    asked = args.cases or (() if args.plan else cases)
    plans: dict[str, Callable[[], Plan]] = {name: lambda name=name: made_plan(loaded, cases[name]) for name in asked}
    plans |= {path.name: lambda path=path: load_plan(path) for path in args.plan}
    rows = []
    for name, make in plans.items():
        for row in check(make(), loaded, python, args):
            rows.append({"case": name, **row})
            print(spell(rows[-1]), flush=True)
    if args.results is not None:
        content = {"machine": machine.machine(list(packages)), "rows": rows}
        args.results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# --- plans ------------------------------------------------------------------------------------------------------------


def made_plan(loaded: LoadedModel, case: Case) -> Plan:
    """The plan of a case; static scales are found by min_max."""
    sites = find_sites(loaded.model)
    chosen = [_choice(s, case.scheme_of(s)) for s in sites if s.role not in ("embedding", "lm_head")]
    if case.cache is not None:
        chosen += [_choice(s, case.cache) for s in find_value_sites(loaded.model) if s.role == "kv_cache"]
    nothing = Summary(effective_bits=0.0, nominal_bits=0.0, weight_bytes=0, predicted_kl=0.0)
    plan = unsearched_plan(loaded, chosen, nothing)
    if any(_is_static(choice) for choice in chosen):
        prompts = [torch.tensor([ids]) for ids in texts(loaded).calibration]
        plan = calibrate_static(plan, loaded, prompts, sites=sites)
    return plan if case.shared_for is None else share_tensor_scales(plan, loaded, case.shared_for, sites=sites)


def _is_static(choice: SiteChoice) -> bool:
    if choice.kind == "weight":
        return SCHEMES[choice.scheme].static_activations
    return VALUE_SCHEMES[choice.scheme].static


def _choice(site: Site | ValueSite, scheme: str) -> SiteChoice:
    return SiteChoice(
        name=site.name,
        kind=site.kind,
        role=site.role,
        module=site.module,
        rows=getattr(site, "rows", None),
        tied_group=site.tied_group,
        shape=site.shape,
        scheme=scheme,
        rounding="rtn",
        transform="none",
        reason="a case of the check",
        bytes=0,
        bits=0.0,
        predicted_kl=0.0,
    )


# --- text, and what a model makes of it -------------------------------------------------------------------------------


def texts(loaded: LoadedModel) -> Text:
    """Passages of the built-in documents, and openings of others."""
    documents = CALIBRATION_SETS["docs"].documents
    assert documents is not None
    ids = [loaded.tokenizer(document.text).input_ids for document in documents()]
    long = [tokens for tokens in ids if len(tokens) >= TEXT_TOKENS]
    prompts = long[NUM_TEXTS : NUM_TEXTS + NUM_PROMPTS]
    calibration = long[NUM_TEXTS + NUM_PROMPTS : NUM_TEXTS + NUM_PROMPTS + NUM_CALIBRATED]
    return Text(
        texts=[tokens[:TEXT_TOKENS] for tokens in long[:NUM_TEXTS]],
        prompts=[tokens[:PROMPT_TOKENS] for tokens in prompts],
        calibration=[tokens[:TEXT_TOKENS] for tokens in calibration],
    )


@torch.no_grad()
def logprobs(model: nn.Module, ids: list[int]) -> Tensor:
    """log p of every token but the first, fp32."""
    tokens = torch.tensor([ids])
    logits = model(input_ids=tokens).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def nudged(model: nn.Module, texts: list[list[int]]) -> list[Tensor]:
    """`logprobs` of texts with what every linear layer gives changed as by sums in another order."""
    generator = torch.Generator().manual_seed(0)

    def nudge(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * (1 + NUDGE * torch.randn(output.shape, generator=generator))

    hooks = [m.register_forward_hook(nudge) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        return [logprobs(model, ids) for ids in texts]
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def greedy_agrees(model: nn.Module, prompt: list[int], generated: list[int]) -> tuple[bool, int]:
    """Whether `generated` is our greedy text up to our first near-tie, and how many tokens that was."""
    tokens = torch.tensor([[*prompt, *generated]])
    best = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float().topk(2)
    for place, (values, choices) in enumerate(zip(best.values, best.indices, strict=True)):
        if values[0] - values[1] < TIE:
            return True, place
        if int(choices[0]) != generated[place]:
            return False, place
    return True, len(generated)


def last_error(stderr: str) -> str:
    """The last line of a traceback, and what its message goes on with."""
    lines = stderr.splitlines()
    places = [place for place, line in enumerate(lines) if "Error" in line and not line.startswith(" ")]
    return " ".join(line.strip() for line in lines[places[-1] : places[-1] + 3])[:400] if places else stderr[-300:]
