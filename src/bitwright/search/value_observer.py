"""Values and their gradients on the way through calibration, a bounded sample of tokens per site.

Entered as an observer of `calibrate()`: each value at a value site is replaced by a view of itself, whose gradient is
that of *this* use alone (the input of a norm, say, without the stream that passes it by). Kept for every operand:

    rows    values and gradients of sampled tokens, fp32 and bf16 [R, H, D]
    amax    the largest magnitude in each head, over all tokens, fp32 [H]: what static scales are made of
    seen    how many rows there were

Sampling is by ratio, so that memory is bounded by SAMPLE_NUMBERS per operand, however long the text is. Where a scheme
rounds groups of consecutive tokens, whole groups are sampled.

Legend: R sampled rows, H heads (1 outside attention), D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.models.sites import Site
from bitwright.models.value_calls import ATTENTION_PARTS, ValueCalls
from bitwright.models.value_sites import ValueSite

#: Numbers of an operand that are kept.
SAMPLE_NUMBERS = 1 << 17
#: Rows of an operand that are kept at least, where rows are very long.
MIN_ROWS = 256


@dataclass(kw_only=True, slots=True, eq=False)
class SeenValues:
    """What was seen of one operand of one site."""

    #: Rows (tokens, or tokens in each block of keys …) that passed.
    num_seen: int = 0
    num_kept: int = 0
    #: fp32 [H].
    amax_H: Tensor
    #: Pairs of values fp32 [R, H, D] and gradients bf16 of the same shape (an empty list where none flowed),
    #: batch by batch.
    batches: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)

    @property
    def per_kept(self) -> float:
        """How many rows a kept one stands for."""
        return self.num_seen / max(1, self.num_kept)

    def rows(self) -> tuple[Tensor, Tensor]:
        """All kept values and gradients, fp32 [R, H, D]; zero gradients where none flowed."""
        width = max(values.shape[-1] for values, _ in self.batches)
        gradients = [g[0].float() if g else torch.zeros_like(x) for x, g in self.batches]
        return (
            torch.cat([_widened(x, width) for x, _ in self.batches]),
            torch.cat([_widened(g, width) for g in gradients]),
        )


def _widened(x: Tensor, width: int) -> Tensor:
    """Probabilities of a shorter text have fewer columns: the rest is zero."""
    return x if x.shape[-1] == width else nn.functional.pad(x, (0, width - x.shape[-1]))


class ValueObserver:
    """Observer of calibration that collects values and gradients of value sites.

    Args:
        model: the model that is calibrated.
        value_sites: where to look.
        num_tokens: tokens of the whole text, padding included.
        seed: of the sample.
        groups: site name → consecutive tokens that are sampled together; 1 where absent.
        sites: the model's weight sites, if they are known already.
    """

    def __init__(
        self,
        model: nn.Module,
        value_sites: Sequence[ValueSite],
        *,
        num_tokens: int,
        seed: int,
        groups: Mapping[str, int] | None = None,
        sites: Sequence[Site] | None = None,
    ) -> None:
        self._num_tokens = num_tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._groups = groups or {}
        self._real_rows: Tensor | None = None
        #: Order in which the present batch's groups are sampled, by their number.
        self._orders: dict[int, Tensor] = {}
        #: (site name, operand) → what was seen.
        self.seen: dict[tuple[str, str], SeenValues] = {}
        self._calls = ValueCalls(model, self._see, names=[site.name for site in value_sites], sites=sites)

    def __enter__(self) -> ValueObserver:
        self._calls.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._calls.__exit__(*raised)

    def batch(self, rows: slice, real_rows: Tensor | None) -> None:
        """A forward and backward pass begins."""
        self._real_rows = real_rows
        self._orders.clear()

    def _see(self, name: str, operand: str, value: Tensor) -> Tensor:
        watched = value.view_as(value) if value.requires_grad else value.detach().requires_grad_(True)
        in_heads = name.rpartition(":")[2] in ATTENTION_PARTS
        by_row = _by_row(value.detach(), in_heads=in_heads)
        found = self._found(name, operand, by_row)
        keep = self._sample(by_row, value.shape[-2] if in_heads else 1, self._groups.get(name, 1))
        found.num_seen += by_row.shape[0]
        found.num_kept += keep.numel()
        gradients: list[Tensor] = []
        found.batches.append((by_row[keep].clone(), gradients))
        watched.register_hook(
            lambda g: gradients.append(_by_row(g.detach(), in_heads=in_heads)[keep].to(torch.bfloat16))
        )
        return watched

    def _found(self, name: str, operand: str, by_row: Tensor) -> SeenValues:
        """What is known of an operand, with the magnitudes of the present rows; padding does not count."""
        found = self.seen.setdefault((name, operand), SeenValues(amax_H=by_row.new_zeros(by_row.shape[1])))
        real = self._real_rows
        if real is not None and real.numel() == by_row.shape[0]:
            by_row = by_row[real]
        if by_row.numel():
            found.amax_H = torch.maximum(found.amax_H, by_row.abs().amax((0, 2)))
        return found

    def _sample(self, by_row: Tensor, length: int, group: int) -> Tensor:
        """Which rows are kept: whole groups of consecutive tokens of one sequence."""
        num_rows, width = by_row.shape[0], by_row[0].numel() if by_row.shape[0] else 1
        per_sequence = length // group if group > 1 else 0
        firsts = torch.arange(num_rows)
        if group > 1:
            first = torch.arange(per_sequence) * group
            firsts = (torch.arange(num_rows // length).unsqueeze(1) * length + first).reshape(-1)
        wanted = max(MIN_ROWS, SAMPLE_NUMBERS // width) / self._num_tokens
        count = min(firsts.numel(), max(1, round(firsts.numel() * wanted)))
        order = self._orders.get(firsts.numel())
        if order is None:
            order = self._orders[firsts.numel()] = torch.randperm(firsts.numel(), generator=self._generator)
        chosen = firsts[order[:count].sort().values]
        return (chosen.unsqueeze(1) + torch.arange(group)).reshape(-1)


def _by_row(value: Tensor, *, in_heads: bool) -> Tensor:
    """Values token by token, [rows, H, D]."""
    return value.transpose(1, 2).flatten(0, 1) if in_heads else value.reshape(-1, 1, value.shape[-1])
