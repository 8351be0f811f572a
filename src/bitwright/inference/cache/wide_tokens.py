"""Tokens of a cache that lie beyond its codes: kept as they are, beside them.

A static scale reaches so far, and a key or value beyond it would be saturated for every token to come. By the rule of
`inference/fallback.py` such tokens are kept in the model's dtype: those of a call that overflow, all of them where they
are too many or come too often. Reading puts them in the place of what their codes give.

Where a host may not look (a decode loop over a GPU), a step that saturated something is run again, exactly, and all of
its tokens are kept then: those that overflow as they are, the others as their codes have them.

Legend: B sequences, H heads, T tokens of a call, D head_dim, W tokens kept so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bitwright.inference.fallback import Action, Fallback, places_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kept:
    """Some tokens: their places in ascending order (on the device int64 [W]), and values [B, H, W, D]."""

    places: tuple[int, ...]
    at_W: Tensor
    values: Tensor


@dataclass(slots=True, eq=False)
class WideTokens:
    """The tokens of one store that are kept as they are."""

    fallback: Fallback
    kept: Kept | None = field(default=None, kw_only=True)

    @property
    def nbytes(self) -> int:
        """Bytes of their values."""
        return 0 if self.kept is None else self.kept.values.numel() * self.kept.values.element_size()

    def add(self, x: Tensor, beyond: Tensor, decoded: Callable[[], Tensor], begin: int) -> None:
        """Keep of new tokens what the rule keeps.

        Args:
            x: [B, H, T, D].
            beyond: which of their numbers overflow.
            decoded: gives what their codes stand for.
            begin: the place of the first.
        """
        overflowed_B1T1 = beyond.any(-1, keepdim=True).any(1, keepdim=True)
        num_tokens = x.shape[-2]
        at = torch.arange(num_tokens, device=x.device)
        places: Sequence[int] = range(num_tokens)
        match self.fallback.decide(beyond, overflowed_B1T1.flatten()):
            case Action.NARROW:
                return
            case Action.WIDE:
                values = x
            case Action.BOTH:
                values = torch.where(self.fallback.rescued(overflowed_B1T1), x, decoded())
            case Action.TOKENS:
                at = places_of(overflowed_B1T1.any(0).flatten())
                values = torch.where(overflowed_B1T1, x, decoded()).index_select(-2, at)
                places = at.tolist()
        new = Kept(places=tuple(begin + place for place in places), at_W=at + begin, values=values.clone())
        self.kept = new if self.kept is None else _behind(self.kept, new)

    def put(self, values: Tensor) -> Tensor:
        """What codes stand for, with these tokens in their places."""
        if self.kept is None:
            return values
        return values.index_copy(-2, self.kept.at_W, self.kept.values.to(values.dtype))

    def keep(self, first: int, end: int) -> None:
        """Forget the tokens before `first`, which is 0 from then on, and those from `end` on."""
        if self.kept is None:
            return
        begin, stop = bisect_left(self.kept.places, first), bisect_left(self.kept.places, end)
        self.kept = (
            None
            if begin >= stop
            else Kept(
                places=tuple(place - first for place in self.kept.places[begin:stop]),
                at_W=self.kept.at_W[begin:stop] - first,
                values=self.kept.values[:, :, begin:stop],
            )
        )

    def remember(self) -> Callable[[], None]:
        """What brings back what is kept now."""
        kept = self.kept

        def bring_back() -> None:
            self.kept = kept

        return bring_back

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a choice of sequences."""
        if self.kept is not None:
            self.kept = replace(self.kept, values=change(self.kept.values))


def _behind(kept: Kept, new: Kept) -> Kept:
    return Kept(
        places=kept.places + new.places,
        at_W=torch.cat([kept.at_W, new.at_W]),
        values=torch.cat([kept.values, new.values], dim=-2),
    )
