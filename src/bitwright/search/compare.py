"""Reference against plan, token by token.

For every scored token, with p the reference (the loaded weights run in fp32) and q the plan, both over the vocabulary:

    KL       Σ_v p_v (log p_v − log q_v)            nats per token
    nll      −log q(the token that is there)        perplexity = exp(mean nll)
    top-1    argmax p = argmax q

The reference is not run again for every plan. Where the model's logits are nothing but its head applied to the head's
input (checked on the first batch), the head's inputs are kept (hidden · 4 bytes a token, not vocabulary · 4) and the
logits are computed from them; otherwise an unchanged copy of the model runs beside the plan, or, where memory is short,
the logits lie on disk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright.errors import ModelError
from bitwright.models.loaded import has_head
from bitwright.models.spool import Kept, Spool
from bitwright.search.output import Array
from bitwright.search.progress import Stage
from bitwright.search.text import TextSet

#: Tokens per forward pass, and the most logits of one; those of reference and plan are in memory together, in fp32.
BATCH_TOKENS = 1024
MAX_BATCH_LOGITS = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenEffects:
    """What a plan did to each scored token; sums over each sequence, [sequences], unless said otherwise."""

    #: Scored tokens of each sequence.
    num_scored: Array
    #: Sum of KL(reference ‖ plan), nats.
    kl: Array
    #: Sum of −log p of the true tokens under the reference and under the plan, nats.
    nll_reference: Array
    nll_plan: Array
    #: Tokens at which both rank the same token first.
    num_agreeing: Array
    #: KL of every scored token, [tokens], in the order of the text.
    token_kl: Array = field(default_factory=lambda: np.empty(0))

    @property
    def mean_kl(self) -> float:
        """Nats per token."""
        return float(self.kl.sum() / self.num_scored.sum())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reference:
    """The loaded weights run in fp32 on one text."""

    text: TextSet
    #: Inputs of the output head, fp32 [sequences, length, hidden]; None where logits are more than the head's output.
    head_inputs: Tensor | None
    #: The head's own weight [vocabulary, hidden] and bias: a copy of the reference, whatever a plan does to the model.
    #: None where no linear layer makes the logits.
    head_weight: Tensor | None
    head_bias: Tensor | None
    #: Where `head_inputs` is None, either an unchanged copy of the model, which computes the logits, or the logits of
    #: each batch on disk: first sequence → where they lie.
    model: nn.Module | None = None
    spool: Spool | None = None
    spooled: Mapping[int, Kept] = field(default_factory=dict)
    batch_tokens: int = BATCH_TOKENS

    @property
    def kept(self) -> Tensor | None:
        """What a later run on the same text can start from."""
        return self.head_inputs

    def logits(self, rows: slice) -> Tensor:
        """fp32 [sequences in rows, length, vocabulary]; rows begin as one of the batches of `batch_tokens` does."""
        if self.head_inputs is not None and self.head_weight is not None:
            return F.linear(self.head_inputs[rows], self.head_weight, self.head_bias)
        if self.spool is not None:
            return self.spool.read(self.spooled[rows.start])[: rows.stop - rows.start]
        assert self.model is not None
        return run_logits(self.model, self.text.input_ids[rows])


def run_logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Logits in fp32, [sequences, length, vocabulary]; the model may compute in any dtype."""
    logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits.float()


def batches(text: TextSet, num_tokens: int = BATCH_TOKENS) -> Iterator[slice]:
    """Slices over sequences of at most so many tokens (at least one sequence)."""
    length = text.input_ids.shape[1]
    step = max(1, num_tokens // length)
    for start in range(0, text.num_sequences, step):
        yield slice(start, min(start + step, text.num_sequences))


@torch.no_grad()
def run_reference(
    model: nn.Module,
    text: TextSet,
    stage: Stage,
    known_head_inputs: Tensor | None = None,
    spool: Spool | None = None,
) -> Reference:
    """Run the model as it is and keep what later comparisons need.

    Args:
        model: fp32, unchanged.
        text: what it is run on.
        stage: advanced by one per sequence.
        known_head_inputs: the result of an earlier run on the same text; the model is then not run.
        spool: where logits go that are more than the head's output; None: a copy of the model computes them anew.

    Raises:
        ModelError: the model has no output head, or its logits are not finite.
    """
    if not has_head(model):
        raise ModelError(
            f"{type(model).__name__} has no linear output head, so there are no next-token distributions to compare; "
            "pass a causal language model"
        )
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    head_weight = head.weight.detach() if isinstance(head, nn.Linear) else None
    head_bias = head.bias.detach() if isinstance(head, nn.Linear) and head.bias is not None else None
    num_tokens = BATCH_TOKENS if head_weight is None else min(BATCH_TOKENS, MAX_BATCH_LOGITS // head_weight.shape[0])
    by_head = partial(Reference, text=text, head_weight=head_weight, head_bias=head_bias, batch_tokens=num_tokens)
    if known_head_inputs is not None:
        stage.advance(text.num_sequences)
        return by_head(head_inputs=known_head_inputs)
    kept: list[Tensor] = []
    for rows in batches(text, num_tokens):
        with _capture_input(head) as captured:
            logits = run_logits(model, text.input_ids[rows])
        if not all(bool(torch.isfinite(of_sequence).all()) for of_sequence in logits):
            raise ModelError(
                f"the reference's logits are not finite in sequences {rows.start} to {rows.stop - 1} of "
                f"{text.source!r}; no plan can be compared with it: check the checkpoint (a bf16 model saved as fp16?)"
            )
        stage.advance(rows.stop - rows.start)
        if (
            head_weight is None
            or len(captured) != 1
            or not torch.equal(F.linear(captured[0], head_weight, head_bias), logits)
        ):
            stage.advance(text.num_sequences - rows.stop)
            return by_head(
                head_inputs=None,
                model=copy.deepcopy(model) if spool is None else None,
                spool=spool,
                spooled={} if spool is None else _spool_logits(model, text, num_tokens, spool),
            )
        kept.append(captured[0].clone())
    return by_head(head_inputs=torch.cat(kept))


def _spool_logits(model: nn.Module, text: TextSet, num_tokens: int, spool: Spool) -> dict[int, Kept]:
    return {rows.start: spool.keep(run_logits(model, text.input_ids[rows])) for rows in batches(text, num_tokens)}


class _capture_input:
    """Keeps the input of a module's calls while open; of no module, nothing."""

    def __init__(self, module: nn.Module | None) -> None:
        self._hooks = ExitStack()
        self._module = module

    def __enter__(self) -> list[Tensor]:
        inputs: list[Tensor] = []
        if self._module is not None:
            handle = self._module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
            self._hooks.callback(handle.remove)
        return inputs

    def __exit__(self, *_: object) -> None:
        self._hooks.close()


@torch.no_grad()
def compare(
    reference: Reference, run: Callable[[Tensor], Tensor], stage: Stage, num_sequences: int | None = None
) -> TokenEffects:
    """Compare a way of running the model with its reference.

    Args:
        reference: the fp32 run of the same text.
        run: input ids [sequences, length] → fp32 logits [sequences, length, vocabulary].
        stage: advanced by one per sequence.
        num_sequences: only the first so many sequences; None means all.

    Raises:
        ModelError: the plan's logits are not finite.
    """
    text = reference.text
    last = text.num_sequences if num_sequences is None else min(num_sequences, text.num_sequences)
    sums: list[Tensor] = []
    token_kls: list[Tensor] = []
    for batch in batches(text, reference.batch_tokens):
        rows = slice(batch.start, min(batch.stop, last))
        if rows.start >= rows.stop:
            break
        for found, token_kl in _batch_effects(reference, run, rows):
            sums.append(found)
            token_kls.append(token_kl)
        if not all(bool(torch.isfinite(found).all()) for found in sums[rows.start :]):
            raise ModelError(
                f"the plan's logits are not finite in sequences {rows.start} to {rows.stop - 1} of {text.source!r}: "
                "a number format overflows on this text; leave the one with the smallest range out of the schemes "
                "(fp16 ends at 65504, bf16 does not)"
            )
        stage.advance(rows.stop - rows.start)
    columns = torch.stack(sums).double().numpy()
    return TokenEffects(
        num_scored=columns[:, 0],
        kl=columns[:, 1],
        nll_reference=columns[:, 2],
        nll_plan=columns[:, 3],
        num_agreeing=columns[:, 4],
        token_kl=torch.cat(token_kls).numpy(),
    )


def _batch_effects(
    reference: Reference, run: Callable[[Tensor], Tensor], rows: slice
) -> Iterator[tuple[Tensor, Tensor]]:
    """`_sequence_effects` of some sequences; their logits are gone before those of the next are made."""
    text = reference.text
    plan_BLV, reference_BLV = run(text.input_ids[rows]), reference.logits(rows)
    for i, (ids_L, scored_L) in enumerate(zip(text.input_ids[rows], text.scored[rows], strict=True)):
        yield _sequence_effects(reference_BLV[i], plan_BLV[i], ids_L, scored_L)


def _sequence_effects(reference_LV: Tensor, plan_LV: Tensor, ids_L: Tensor, scored_L: Tensor) -> tuple[Tensor, Tensor]:
    """Of one sequence: [scored tokens, KL, both negative log-likelihoods, agreements] summed, and the KL of each token.

    Logits at t predict token t + 1.
    """
    predicts = scored_L[1:]
    reference, plan = reference_LV[:-1][predicts], plan_LV[:-1][predicts]
    targets = ids_L[1:][predicts].unsqueeze(-1)
    agreeing = (reference.argmax(-1) == plan.argmax(-1)).double().sum()
    log_p = reference.log_softmax(-1)
    log_q = plan.log_softmax(-1)
    nll_reference = -log_p.gather(-1, targets).double().sum()
    nll_plan = -log_q.gather(-1, targets).double().sum()
    # rounding may leave a KL of zero a hair below it
    kl = (log_p.exp() * log_q.neg_().add_(log_p)).sum(-1).double().clamp(min=0.0)
    return torch.stack([predicts.double().sum(), kl.sum(), nll_reference, nll_plan, agreeing]), kl
