"""`tokens`: the model's predictions of the next token, over the vocabulary (`compare.py` has the arithmetic).

Calibration draws a token from each prediction: the gradients of its log-likelihood then have the true Fisher
information as their second moment (Kunstner et al., "Limitations of the empirical Fisher approximation", 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.errors import ModelError
from bitwright.models.loaded import LoadedModel, has_head
from bitwright.models.spool import Spool
from bitwright.plan import Perplexity
from bitwright.search import bootstrap
from bitwright.search.compare import Reference, TokenEffects, compare, run_logits, run_reference
from bitwright.search.output import OutputKind
from bitwright.search.progress import Stage
from bitwright.search.text import TextSet

#: Tokens from which on the 99.9th percentile of token KL is told: a hundred tokens then lie beyond it.
TAIL_TOKENS = 100_000


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Predictions of the next token."""

    unit: Literal["token", "text"] = "token"
    generates: bool = True

    def log_likelihood(
        self, model: nn.Module, ids: Tensor, scored: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, int]:
        """Σ log p(y_t), y_t drawn from the model's prediction of every scored token; not finite where that is not."""
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[:, :-1]
        counts = scored[:, 1:]
        log_p = (logits.flatten(0, 1) if bool(counts.all()) else logits[counts]).float().log_softmax(-1)
        if not bool(torch.isfinite(log_p.detach().sum())):
            return log_p.detach().sum(), int(log_p.shape[0])
        return log_p.gather(-1, draw(log_p.detach(), generator)).sum(), int(log_p.shape[0])

    def run_reference(
        self,
        model: nn.Module,
        text: TextSet,
        stage: Stage,
        known: Tensor | None = None,
        spool: Spool | None = None,
    ) -> Reference:
        """See `compare.run_reference`."""
        return run_reference(model, text, stage, known, spool)

    def compare(
        self, reference: Reference, model: nn.Module, stage: Stage, num_sequences: int | None = None
    ) -> TokenEffects:
        """See `compare.compare`."""
        return compare(reference, lambda ids: run_logits(model, ids), stage, num_sequences)

    def figures(self, effects: TokenEffects, seed: int) -> Mapping[str, Any]:
        """Perplexities and their ratio, the share of tokens with the same first, and the tail of token KL."""
        num_tokens = float(effects.num_scored.sum())
        ratio = bootstrap.ppl_ratio_estimate(effects, seed)
        return {
            "ppl": Perplexity(
                base=float(np.exp(effects.nll_reference.sum() / num_tokens)),
                plan=float(np.exp(effects.nll_plan.sum() / num_tokens)),
                ratio=ratio.mean,
                low=ratio.low,
                high=ratio.high,
            ),
            "top1_agreement": bootstrap.agreement_estimate(effects, seed).interval,
            "kl_p999": float(np.quantile(effects.token_kl, 0.999)) if num_tokens >= TAIL_TOKENS else None,
        }


def draw(log_p_TV: Tensor, generator: torch.Generator) -> Tensor:
    """One token from each distribution, int64 [T, 1]: where its cumulated probabilities reach a number drawn from them.

    (`torch.multinomial` draws a number for every token of the vocabulary, which took as long as the head.)
    """
    reached_TV = log_p_TV.exp().cumsum(-1)
    drawn_T1 = torch.rand(log_p_TV.shape[0], 1, generator=generator) * reached_TV[:, -1:]
    return torch.searchsorted(reached_TV, drawn_T1, right=True).clamp_(max=log_p_TV.shape[1] - 1)


def _open(loaded: LoadedModel) -> Tokens:
    if not has_head(loaded.model):
        raise ModelError(
            f"{type(loaded.model).__name__} has no linear output head, so there are no next-token distributions to "
            "compare; pass a causal language model, or use --task embedding for a sentence encoder"
        )
    return Tokens()


OUTPUTS = (OutputKind(name="tokens", description="predictions of the next token, over the vocabulary", open=_open),)
