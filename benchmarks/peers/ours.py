"""bitwright on the same terms: the same tokens, the same two schemes, the same ties, the same bits.

What `bitwright optimize` does up to the solved plan, with the text handed over as tokens: calibrate, score, solve,
round. Left out are probes, repair and proof, which measure on text of their own, as no peer does.

    --roundings rtn clip     choose from these roundings; without it, from those that a search tries by itself
    --free BITS              all default schemes, at so many stored bits per weight, scales counted
    --effort high            codes are found again as that effort finds them (`search/refine.py`): each matrix makes up
                             for the errors of those before it, then scales are tuned. Taken as they come: a search
                             compares each step on the repair text, and falls back where it was no better
    --further                for that, more text of the documents that calibrate, as much as a search reads; no peer is
                             given it
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import record
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: F401, imported before time runs

from bitwright.models import Site, find_sites, site_weight
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget
from bitwright.plan.rules import get_engine, ties
from bitwright.quantize import ROUNDINGS, SCHEMES
from bitwright.search.cache import Cache
from bitwright.search.candidate import Candidate, candidates_of
from bitwright.search.correct import Correction
from bitwright.search.learn import Learned, learn
from bitwright.search.measure import Meter
from bitwright.search.output import Output, open_output
from bitwright.search.price import Prices, price_model
from bitwright.search.problem import build_problem
from bitwright.search.progress import Silent
from bitwright.search.refine import find_codes
from bitwright.search.settings import default_schemes
from bitwright.search.task import TASKS
from bitwright.search.text import TextSet

#: Fuses q, k, v and gate, up.
ENGINE = "vllm"


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is known before a limit is given."""

    loaded: LoadedModel
    sites: tuple[Site, ...]
    text: TextSet
    output: Output
    prices: Prices
    learned: Learned

    def assignment(self, budget: Budget) -> dict[str, Candidate]:
        """The best choice of every site within a budget."""
        problem = build_problem(
            self.prices,
            self.learned.scores,
            Correction(role_factors={}),
            include_head=False,
            ties=ties(self.sites, get_engine(ENGINE)),
        )
        solution, missed = problem.solve(budget, "kl", None)
        assert not missed, f"{budget} cannot be kept"
        return problem.assignment(solution)

    def weights(self, assignment: dict[str, Candidate]) -> dict[str, Tensor]:
        """Parameter name → dequantised weight."""
        return {
            site.parameter: self.learned.quantizer.values(
                site.name, assignment[site.name], site_weight(self.loaded.model, site).contiguous()
            )
            for site in self.sites
        }

    def refined(self, assignment: dict[str, Candidate], text: TextSet, folder: Path) -> Search:
        """The same with the codes of `--effort high`, found with `text`; `folder` is where it spools."""
        with Silent().stage("", 0) as stage:  # a meter has a reference; codes are found without one
            reference = self.output.run_reference(self.loaded.model, self.text.first(1), stage)
        meter = Meter(
            model=self.loaded.model,
            sites=self.sites,
            quantizer=self.learned.quantizer,
            output=self.output,
            reference=reference,
            cache=Cache(folder=None),
        )
        codes = find_codes(assignment, meter, text, seed=0, folder=folder, progress=Silent())
        assert codes.keys() == {site.name for site in self.sites}, "a site kept the codes that it had"
        quantizer = meter.with_codes(codes).quantizer
        return replace(self, learned=replace(self.learned, quantizer=quantizer))


def text_of(path: Path, whole_texts: bool) -> TextSet:
    """Tokens as a set of text; every prediction is scored, or every token of whole texts."""
    ids, mask = record.read_text(path)
    scored = mask.bool()
    if not whole_texts:
        scored[:, 0] = False
    return TextSet(
        source=path.name,
        description="tokens",
        input_ids=ids,
        scored=scored,
        padding=~mask.bool(),
        hash="",
    )


def open_search(folder: Path, schemes: Sequence[str], roundings: Sequence[str] | None) -> Search:
    """Load, calibrate and score."""
    loaded, task = load(folder), record.read_facts(folder)["task"]
    output = open_output(task, loaded)
    text = text_of(folder / "calibration.safetensors", TASKS[task].whole_texts)
    sites = tuple(site for site in find_sites(loaded.model) if site.role not in ("embedding", "lm_head"))
    candidates = candidates_of(schemes, roundings)
    learned = learn(
        loaded.model,
        sites,
        text,
        candidates,
        seed=0,
        cache=Cache(folder=None),
        progress=Silent(),
        output=output,
    )
    return Search(
        loaded=loaded, sites=sites, text=text, output=output, prices=price_model(loaded, sites), learned=learned
    )


def write(
    out: Path,
    search: Search,
    assignment: dict[str, Candidate],
    weights: dict[str, Tensor],
    times: dict[str, float],
    note: str,
) -> None:
    """Hand over as the peers do."""
    used: dict[str, int] = {}
    for site in search.sites:
        used[str(assignment[site.name])] = used.get(str(assignment[site.name]), 0) + site.num_weights
    record.write(
        out,
        bits={site.name: SCHEMES[assignment[site.name].scheme].weights.nominal_bits for site in search.sites},
        weights=weights,
        times=times,
        packages=["bitwright", "torch", "transformers"],
        notes={
            "what": note,
            "stored_bits": search.prices.effective_bits(assignment),
            "predicted_kl": sum(search.learned.scores[name][choice] for name, choice in assignment.items()),
            "weights_per_choice": used,
        },
    )


def named_schemes(group_size: int) -> list[str]:
    """The two schemes that every tool chooses from."""
    return [f"int{bits}_g{group_size}" for bits in (4, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    limit = parser.add_mutually_exclusive_group(required=True)
    limit.add_argument("--bits", type=float)
    limit.add_argument("--free", type=float, metavar="BITS")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--roundings", nargs="+", choices=sorted(ROUNDINGS))
    parser.add_argument("--effort", choices=["default", "high"], default="default")
    parser.add_argument("--further", action="store_true")
    arguments = parser.parse_args()
    if arguments.further and arguments.effort != "high":
        parser.error("--further is text that --effort high alone reads; add --effort high")
    schemes = named_schemes(arguments.group_size) if arguments.free is None else default_schemes()
    budget = Budget(nominal_bits=arguments.bits, effective_bits=arguments.free)

    stopwatch = record.Stopwatch()
    search = open_search(arguments.folder, schemes, arguments.roundings)
    assignment = search.assignment(budget)
    if arguments.effort == "high":
        text = search.text
        if arguments.further:
            whole_texts = TASKS[record.read_facts(arguments.folder)["task"]].whole_texts
            text = text.joined(text_of(arguments.folder / "further.safetensors", whole_texts))
        search = search.refined(assignment, text, arguments.out)
    weights = search.weights(assignment)
    times = stopwatch.stop()
    note = f"roundings {arguments.roundings or 'all'}, effort {arguments.effort}"
    write(arguments.out, search, assignment, weights, times, note)


if __name__ == "__main__":
    main()
