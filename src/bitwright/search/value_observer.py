"""Values and their gradients on the way through calibration, a bounded sample of tokens per site.

Entered as an observer of `calibrate()`: each value at a value site is replaced by a view of itself, whose gradient is
that of *this* use alone (the input of a norm, say, without the stream that passes it by). Kept for every operand:

    rows    values and gradients of sampled tokens, fp32 and bf16 [R, H, D], and how many tokens each stands for
    amax    the largest magnitude in each head, over all tokens, fp32 [H]: what static scales are made of
    seen    how many rows there were

Damage is unevenly spread: the first token of a text may hold values a thousand times larger than any other, and be most
of what a scale per token costs. So tokens are drawn when their gradient is known, half of them by chance and half by
what a step of their largest value would move, (max |v| · ‖g‖)²; each counts by the inverse of its chance. Every site
draws for itself, so that errors of the sample average out over layers. Memory is bounded by about SAMPLE_NUMBERS per
operand, however long the text is. Where a scheme rounds groups of consecutive tokens, whole groups are drawn.

Legend: R sampled rows, H heads (1 outside attention), D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import ModelError
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
    #: fp32 [H].
    amax_H: Tensor
    #: Values fp32 [R, H, D], gradients bf16 of the same shape, and weights fp32 [R], batch by batch.
    batches: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """All kept values and gradients, fp32 [R, H, D], and the number of rows that each stands for, fp32 [R]."""
        width = max(values.shape[-1] for values, _, _ in self.batches)
        return (
            torch.cat([_widened(x, width) for x, _, _ in self.batches]),
            torch.cat([_widened(g.float(), width) for _, g, _ in self.batches]),
            torch.cat([weights for _, _, weights in self.batches]),
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
        self._batch = slice(0, 0)
        self._real_rows: Tensor | None = None
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
        self._batch, self._real_rows = rows, real_rows

    def _see(self, name: str, operand: str, value: Tensor) -> Tensor:
        watched = value.view_as(value) if value.requires_grad else value.detach().requires_grad_(True)
        in_heads = name.rpartition(":")[2] in ATTENTION_PARTS
        by_row = _by_row(value.detach(), in_heads=in_heads)
        found = self._found(name, operand, by_row)
        found.num_seen += by_row.shape[0]
        length, group = value.shape[-2] if in_heads else 1, self._groups.get(name, 1)

        def draw(g: Tensor) -> None:
            g_by_row = _by_row(g.detach(), in_heads=in_heads)
            if not bool(torch.isfinite(g_by_row.sum())):
                raise ModelError(
                    f"the gradient at {name} is not finite in the calibration batch of sequences {self._batch.start} "
                    f"to {self._batch.stop - 1}; the model overflows in the backward pass: check the checkpoint, or "
                    "calibrate on other text"
                )
            keep, weights = self._draw(by_row, g_by_row, length, group)
            found.batches.append((by_row[keep].clone(), g_by_row[keep].to(torch.bfloat16), weights))

        watched.register_hook(draw)
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

    def _draw(self, by_row: Tensor, g_by_row: Tensor, length: int, group: int) -> tuple[Tensor, Tensor]:
        """Which rows are kept, and how many rows each stands for; groups are consecutive rows of one sequence."""
        rows = torch.arange(by_row.shape[0]).view(-1, 1)
        if group > 1:
            rows = torch.arange(by_row.shape[0]).view(-1, length)[:, : length // group * group].reshape(-1, group)
        if not rows.numel():
            return rows.new_empty(0), by_row.new_empty(0)
        pull = (by_row.abs().amax((1, 2)).square() * g_by_row.square().sum((1, 2)))[rows].sum(-1)
        wanted = max(MIN_ROWS, SAMPLE_NUMBERS // by_row[0].numel()) / self._num_tokens * len(rows)
        by_pull = pull / pull.sum() if float(pull.sum()) > 0 else torch.full_like(pull, 1 / len(rows))
        chance = (wanted * (0.5 / len(rows) + 0.5 * by_pull)).clamp(max=1.0)
        drawn = torch.rand(len(rows), generator=self._generator) < chance
        return rows[drawn].reshape(-1), (1 / chance[drawn]).repeat_interleave(group)


def _by_row(value: Tensor, *, in_heads: bool) -> Tensor:
    """Values token by token, [rows, H, D]."""
    return value.transpose(1, 2).flatten(0, 1) if in_heads else value.reshape(-1, 1, value.shape[-1])
