"""What the tests of the search share: text that is no built-in set, text sets made by hand, and small searches."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitwright import hardware
from bitwright.models import Site, find_sites
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Budget
from bitwright.quantize import SCHEMES as SCHEME_RECORDS
from bitwright.search.candidate import Candidate, candidates_of
from bitwright.search.correct import Correction
from bitwright.search.price import price_model
from bitwright.search.problem import Problem, build_problem
from bitwright.search.score import Scores
from bitwright.search.text import TextSet

#: A device by name, so that no test depends on the machine.
DEVICE = "x86-avx512-bf16"
SCHEMES = ("int4_g32", "int8_w", "bf16")
#: Of the choosing problems with made-up scores.
ROUNDINGS = ("rtn", "clip")
#: What most searches of the tests are asked for.
BUDGET = Budget(effective_bits=6.0)
ARCHITECTURES = ("llama", "gpt2", "qwen2", "gemma", "phi3", "mixtral")


def write_text(folder: Path, num_topics: int = 30) -> Path:
    """A .txt file of English prose with paragraphs."""
    path = folder / "prose.txt"
    path.write_text("\n\n".join(list(pydoc_data.topics.topics.values())[:num_topics]), encoding="utf-8")
    return path


def text_set(input_ids: Tensor, scored: Tensor | None = None, padding: Tensor | None = None) -> TextSet:
    """A text set of given ids [sequences, length]; every token but the first of a sequence is scored by default."""
    if scored is None:
        scored = torch.ones_like(input_ids, dtype=torch.bool)
        scored[:, 0] = False
    if padding is None:
        padding = torch.zeros_like(scored)
    return TextSet(
        source="by hand",
        description="ids of a test",
        input_ids=input_ids,
        scored=scored,
        padding=padding,
        hash=hashlib.sha256(input_ids.numpy().tobytes() + scored.numpy().tobytes()).hexdigest(),
    )


def random_text(num_sequences: int, length: int, seed: int = 0, vocabulary: int = 256) -> TextSet:
    generator = torch.Generator().manual_seed(seed)
    return text_set(torch.randint(0, vocabulary, (num_sequences, length), generator=generator))


class NoStage:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.steps = 0

    def advance(self, steps: int = 1) -> None:
        self.steps += steps


def search_options(text: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of `optimize` for a search of half a second."""
    defaults: dict[str, Any] = {
        "calibration": text,
        "evaluation": text,
        "tokens": 256,
        "evaluation_tokens": 64 * 16,
        "sequence_length": 16,
        "schemes": SCHEMES,
        "hardware": DEVICE,
        "cache": None,
    }
    return defaults | changes


def made_up_scores(sites: Sequence[Site], candidates: Sequence[Candidate], seed: int = 0) -> Scores:
    """Scores that fall by about a factor of 4 for every stored bit more, different from site to site."""
    draw = random.Random(seed)
    scores: Scores = {}
    for site in sites:
        pain = 10 ** draw.uniform(-4, -2)
        scores[site.name] = {}
        for candidate in candidates:
            weights = SCHEME_RECORDS[candidate.scheme].weights
            assert weights is not None
            bits = 8 * weights.stored_bytes(*site.shape) / site.num_weights
            scores[site.name][candidate] = pain * 4.0 ** (4 - bits) * (0.9 if candidate.rounding == "clip" else 1.0)
    return scores


def problem_of(
    loaded: LoadedModel, *, include_head: bool = False, seed: int = 0, scores: Scores | None = None
) -> Problem:
    """A choosing problem over a whole model with made-up scores (or these) and no correction."""
    sites = find_sites(loaded.model)
    candidates = candidates_of(SCHEMES, roundings=ROUNDINGS)
    return build_problem(
        price_model(loaded, sites, device=hardware.get(DEVICE)),
        made_up_scores(sites, candidates, seed) if scores is None else scores,
        Correction(role_factors={}),
        include_head=include_head,
    )
