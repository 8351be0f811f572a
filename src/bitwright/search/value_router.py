"""What it costs when rounding changes a router's choice of experts.

A router takes the k experts with the largest logits. Near the border between the k-th and the next, the smallest error
swaps one expert for another; the output then jumps by w · (E_b(x) − E_a(x)), which is no small change of any logit, and
a gradient does not see it: predictions by the gradient alone were 70 times too low.

The jump can be told from the gradient all the same, on average. With weights w_j that are a softmax over the chosen (or
renormalised), c_j = gᵀ E_j(x) the effect of expert j on the log-likelihood, and c̄ = Σ w_j c_j, the gradient at logit a
is w_a (c_a − c̄), and the swap shifts the log-likelihood by w_a (c_b − c_a). If the c of different experts are alike in
distribution and independent, with variance v,

    E[w_a² (c_a − c̄)²] = w_a² v ((1 − w_a)² + Σ_{j≠a} w_j²)          E[w_a² (c_b − c_a)²] = 2 w_a² v

so that, with a the k-th expert, the cost of a swap is ½ · 2 / ((1 − w_a)² + Σ_{j≠a} w_j²) · (gradient at logit a)².
Where k is 1 the weight is 1 whatever the logit is; nothing can be told, and the cost is NaN: measure it.

    KL ≈ (share of tokens whose choice changes) · (mean cost of a swap)

Few tokens lie near a border, so that shares are not counted but expected: with errors of variance s² at each logit and
a margin m between the k-th logit and the next, the choice changes with probability ½ erfc(m / 2s). The independence is
an assumption; probes of the role correct what it gets wrong.

Routers' weights are best kept high by default: they are a thousandth of a mixture's bytes,
and every one of their errors goes through such jumps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def flip_kl(
    logits_RE: Tensor, rounded_RE: Tensor, g_RE: Tensor, experts_per_token: int, weights_R: Tensor | None = None
) -> float:
    """Summed KL of changed choices over the rows, nats.

    Args:
        logits_RE: a router's logits, fp32 [R, experts].
        rounded_RE: the same with an error, of rounding them or of rounded weights.
        g_RE: gradient of the log-likelihood at the logits.
        experts_per_token: how many experts are chosen.
        weights_R: how many tokens each row stands for; one if left out.

    Returns:
        NaN where a single expert is chosen and the choice may change.
    """
    weights_R = torch.ones(len(logits_RE)) if weights_R is None else weights_R
    share = flip_share(logits_RE, rounded_RE, experts_per_token, weights_R)
    if share == 0.0:
        return 0.0
    if experts_per_token < 2:
        return math.nan
    top, chosen = logits_RE.topk(experts_per_token, dim=-1)
    w = top.softmax(-1)
    spread = (1 - w[:, -1]).square() + w[:, :-1].square().sum(-1)
    cost = g_RE.gather(-1, chosen[:, -1:]).squeeze(-1).square() / spread
    return share * float((weights_R * cost).double().sum())


def flip_share(logits_RE: Tensor, rounded_RE: Tensor, experts_per_token: int, weights_R: Tensor | None = None) -> float:
    """Expected share of tokens whose set of experts changes, 0 … 1."""
    if experts_per_token >= logits_RE.shape[-1] or not len(logits_RE):
        return 0.0
    ordered = logits_RE.topk(experts_per_token + 1, dim=-1).values.double()
    margin = ordered[:, -2] - ordered[:, -1]
    error = (rounded_RE - logits_RE).double().square().mean(-1).sqrt()
    chance = torch.where(error > 0, 0.5 * torch.erfc(margin / (2 * error)), 0.0)
    return float(chance.mean()) if weights_R is None else float((weights_R * chance).sum() / weights_R.sum())
