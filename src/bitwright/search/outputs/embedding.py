"""`embedding`: the unit vector at which a sentence encoder puts a text.

Such vectors are used for their cosines, so what matters is how far each moves on the sphere. Read the vector e of a
text as the centre of a Gaussian of unit variance; then

    KL(reference ‖ plan) = ½ ‖e − e′‖² = 1 − cos(e, e′)        nats per text

and everything that is done with the KL of tokens can be done with this one. Calibration backpropagates ⟨r, e⟩ with
r ~ N(0, I), drawn anew for each text: its gradients have E[g gᵀ] = JᵀJ, the Fisher information of that Gaussian.

What users of an encoder see of an error is another order of search results. So the evaluation texts also serve as a
corpus: each text is a query, its neighbours among all others are ranked by cosine, with all vectors from the
reference and then with all from the plan, and told is

    top-k overlap       the share of the k nearest that stay among the k nearest
    rank correlation    Kendall's τ between both orders of the reference's ten nearest

Intervals: texts are drawn anew as queries, their corpus stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright.errors import ModelError
from bitwright.models.loaded import LoadedModel
from bitwright.models.pooling import Pooling
from bitwright.models.spool import Spool
from bitwright.plan import EmbeddingFigures, Neighbours
from bitwright.search.bootstrap import bootstrap
from bitwright.search.compare import batches
from bitwright.search.output import Array, OutputKind
from bitwright.search.progress import Stage
from bitwright.search.text import TextSet

#: Numbers of nearest neighbours whose change is told.
NEAREST = (1, 10)
#: The cosine that one text in twenty falls below stands beside the mean.
LOW_QUANTILE = 0.05


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingReference:
    """Vectors of every text, computed by the loaded weights in fp32."""

    text: TextSet
    #: Unit vectors, fp32 [texts, dims].
    kept: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class EmbeddingEffects:
    """What a plan did to the vector of each text."""

    #: Unit vectors, [texts, dims].
    reference_SD: Array
    plan_SD: Array

    @cached_property
    def num_scored(self) -> Array:
        """One for each text."""
        return np.ones(len(self.reference_SD))

    @cached_property
    def kl(self) -> Array:
        """½ ‖e − e′‖² of each text: the difference keeps its digits where 1 − cos would cancel."""
        found: Array = 0.5 * np.square(self.reference_SD - self.plan_SD).sum(-1)
        return found

    @property
    def mean_kl(self) -> float:
        """Nats per text."""
        return float(self.kl.mean())


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """The vectors of a sentence encoder after its pooling."""

    pooling: Pooling
    unit: Literal["token", "text"] = "text"
    generates: bool = False

    def log_likelihood(
        self, model: nn.Module, ids: Tensor, scored: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, int]:
        """Σ ⟨r, e⟩ over texts, r ~ N(0, I)."""
        e_SD = self.embed(model, ids, scored)
        r_SD = torch.randn(e_SD.shape, generator=generator)
        return (e_SD * r_SD).sum(), e_SD.shape[0]

    def embed(self, model: nn.Module, ids: Tensor, scored: Tensor) -> Tensor:
        """Unit vectors, fp32 [sequences, dims]; only scored tokens are attended to and pooled."""
        hidden: Tensor = model(input_ids=ids, attention_mask=scored.long()).last_hidden_state
        return F.normalize(self.pooling.pool(hidden.float(), scored), dim=-1)

    @torch.no_grad()
    def run_reference(
        self,
        model: nn.Module,
        text: TextSet,
        stage: Stage,
        known: Tensor | None = None,
        spool: Spool | None = None,
    ) -> EmbeddingReference:
        """Run the unchanged model on all texts, unless their vectors are known. See `Output`."""
        if known is not None:
            stage.advance(text.num_sequences)
            return EmbeddingReference(text=text, kept=known)
        whose = "the reference's vectors are not finite", "check the checkpoint (a bf16 model saved as fp16?)"
        return EmbeddingReference(text=text, kept=self._run(model, text, stage, text.num_sequences, whose))

    @torch.no_grad()
    def compare(
        self, reference: EmbeddingReference, model: nn.Module, stage: Stage, num_sequences: int | None = None
    ) -> EmbeddingEffects:
        """Compare the vectors of a model as it now computes with the reference's. See `Output`."""
        text = reference.text
        count = text.num_sequences if num_sequences is None else min(num_sequences, text.num_sequences)
        whose = (
            "the plan's vectors are not finite",
            "a number format overflows on this text: leave the one with the smallest range out of the schemes (fp16 "
            "ends at 65504, bf16 does not)",
        )
        found = self._run(model, text, stage, count, whose)
        return EmbeddingEffects(reference_SD=reference.kept[:count].double().numpy(), plan_SD=found.double().numpy())

    def _run(self, model: nn.Module, text: TextSet, stage: Stage, count: int, whose: tuple[str, str]) -> Tensor:
        kept: list[Tensor] = []
        for batch in batches(text):
            rows = slice(batch.start, min(batch.stop, count))
            if rows.start >= rows.stop:
                break
            kept.append(self.embed(model, text.input_ids[rows], text.scored[rows]))
            if not bool(torch.isfinite(kept[-1]).all()):
                raise ModelError(
                    f"{whose[0]} in sequences {rows.start} to {rows.stop - 1} of {text.source!r}: {whose[1]}"
                )
            stage.advance(rows.stop - rows.start)
        return torch.cat(kept)

    def figures(self, effects: EmbeddingEffects, seed: int) -> Mapping[str, Any]:
        """Cosines and changes of rank."""
        cosine_S = 1 - effects.kl
        num_texts = len(cosine_S)
        order = _Order.of(effects.reference_SD), _Order.of(effects.plan_SD)

        def mean_of(values_S: Array) -> Any:
            return bootstrap(lambda i: float(values_S[i].mean()), num_texts, seed).interval

        return {
            "embedding": EmbeddingFigures(
                cosine=mean_of(cosine_S),
                cosine_low=bootstrap(lambda i: float(np.quantile(cosine_S[i], LOW_QUANTILE)), num_texts, seed).interval,
                neighbours=tuple(
                    Neighbours(k=k, overlap=mean_of(overlap(*order, k))) for k in NEAREST if k < num_texts
                ),
                rank_correlation=(mean_of(kendall(*order, max(NEAREST))) if num_texts > max(NEAREST) else None),
                corpus=num_texts,
            )
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class _Order:
    """How each text ranks all others."""

    #: Cosines, [texts, texts]; −Inf to itself.
    cosine_SS: Array
    #: Texts by falling cosine; the text itself is last.
    ranked_SS: np.ndarray

    @staticmethod
    def of(e_SD: Array) -> _Order:
        cosine_SS = e_SD @ e_SD.T
        np.fill_diagonal(cosine_SS, -np.inf)
        return _Order(cosine_SS=cosine_SS, ranked_SS=np.argsort(-cosine_SS, axis=1, kind="stable"))


def overlap(reference: _Order, plan: _Order, k: int) -> Array:
    """Share of each text's k nearest that stay among its k nearest, [texts]."""
    same = reference.ranked_SS[:, :k, None] == plan.ranked_SS[:, None, :k]
    found: Array = same.any(-1).mean(-1)
    return found


def kendall(reference: _Order, plan: _Order, k: int) -> Array:
    """Kendall's τ between both orders of each text's k nearest by the reference, [texts].

    τ = (pairs in the same order − pairs in the other) / all pairs; a pair that the plan puts at one cosine counts 0.
    """
    nearest_Sk = reference.ranked_SS[:, :k]
    cosine_Sk = np.take_along_axis(plan.cosine_SS, nearest_Sk, axis=1)
    first, second = np.triu_indices(k, 1)
    found: Array = np.sign(cosine_Sk[:, first] - cosine_Sk[:, second]).mean(-1)
    return found


def _open(loaded: LoadedModel) -> Embedding:
    if loaded.pooling is None:
        raise ModelError(
            f"{loaded.name!r} predicts tokens, so it puts no texts at vectors; use --task text, or pass a sentence "
            "encoder such as demo-encoder"
        )
    return Embedding(pooling=loaded.pooling)


OUTPUTS = (
    OutputKind(name="embedding", description="unit vectors of a sentence encoder after its pooling", open=_open),
)
