"""Keys or values of one layer as codes: what a quantised cache keeps, token by token.

    scheme of values               kept
    none                           the numbers as they are
    static scale (tensor, head)    one code a number; scales are the plan's
    per token                      codes, and one scale (and minimum) a token and head, or a group of its channels
    per channel over n tokens      codes of whole groups of n tokens, one scale and minimum a channel; the latest tokens
                                   of a group that is not full are kept as they are (KIVI, arXiv:2402.02750)

Codes are bits as `quantize/pack.py` packs them. Reading gives the values that `value_rounding.round_values` gives, bit
for bit: what is measured with rounded values runs on these codes. Room grows by an eighth, so that a new token copies
nothing.

Tokens that lie beyond a static scale may be kept as they are beside the codes (`wide_tokens.py`).

Legend: B sequences, H heads, T tokens, D head_dim, n tokens of a unit (1, but for scales per channel).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from bitwright import formats
from bitwright.inference.cache.wide_tokens import WideTokens
from bitwright.inference.emulation.values import ValueRule
from bitwright.inference.fallback import Fallback
from bitwright.quantize import fake_quantize, pack, unpack
from bitwright.quantize.pack import PackedTensor, decode_numbers, encode_numbers, pack_bits, unpack_bits
from bitwright.quantize.scheme import TensorScheme
from bitwright.quantize.static_scales import overflows
from bitwright.quantize.value_rounding import spread

#: Tokens that room is made for at least.
_LEAST_ROOM = 32


class Coding(Protocol):
    """How units of tokens become tensors, each with one entry a unit."""

    @property
    def unit(self) -> int:
        """Tokens that are coded together."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """[B, H, U · unit, D] → name → [B, H, U, …]."""

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Undo it: [B, H, U · unit, D]."""


@dataclass(frozen=True, slots=True)
class AsTheyAre:
    """Numbers of the model's dtype."""

    unit: int = 1

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Nothing is done."""
        return {"values": x}

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Nothing is done."""
        return parts["values"].to(dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnderStaticScale:
    """One code a number, under a scale per head that the plan keeps; or no scale at all."""

    format: str
    #: fp32 [H] or [1]; None: numbers are rounded as they are.
    scale: Tensor | None
    rounding: str
    width: int
    unit: int = 1

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Codes uint8 [B, H, T, bytes]."""
        units, rule = (
            (x.float(), "ieee") if self.scale is None else (x.float() / spread(self.scale, x.float()), "saturate")
        )
        rounded = fake_quantize(units, TensorScheme(format=self.format), rounding=self.rounding, overflow=rule)
        number = formats.FORMATS[self.format]
        codes = pack_bits(encode_numbers(rounded, number).reshape(-1, self.width), number.bits)
        return {"codes": codes.view(*x.shape[:-1], -1)}

    def beyond(self, x: Tensor) -> Tensor:
        """Which numbers overflow, bool [B, H, T, D]."""
        found = overflows(
            x, TensorScheme(format=self.format), None if self.scale is None else spread(self.scale, x.float())
        )
        assert found is not None
        return found

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Values [B, H, T, D]."""
        codes, number = parts["codes"], formats.FORMATS[self.format]
        values = decode_numbers(unpack_bits(codes.reshape(-1, codes.shape[-1]), number.bits, self.width), number)
        values = values.view(*codes.shape[:-1], self.width)
        return (values if self.scale is None else values * spread(self.scale, values)).to(dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnderOwnScales:
    """Codes with scales found when they are written: per token, or per channel over a unit of tokens."""

    values: TensorScheme
    width: int
    unit: int = 1

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Codes, scales and minima, each [B, H, U, …]."""
        rows = x.float()
        if self.unit > 1:
            rows = rows.unflatten(-2, (-1, self.unit)).transpose(-1, -2)
        packed = pack(rows.reshape(-1, rows.shape[-1]), self.values)
        units = x.shape[-2] // self.unit
        found = {"codes": packed.codes, "scales": packed.scales, "offsets": packed.offsets}
        return {name: part.reshape(*x.shape[:2], units, -1) for name, part in found.items() if part is not None}

    def decode(self, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Values [B, H, T, D]."""
        sequences, heads, units = parts["codes"].shape[:3]
        rows = sequences * heads * units * (self.width if self.unit > 1 else 1)
        columns = self.unit if self.unit > 1 else self.width
        flat = {name: part.reshape(rows, -1) for name, part in parts.items()}
        packed = PackedTensor(
            scheme=self.values,
            shape=(rows, columns),
            codes=flat["codes"],
            scales=flat["scales"],
            offsets=flat.get("offsets"),
        )
        values = unpack(packed, dtype)
        if self.unit == 1:
            return values.view(sequences, heads, units, self.width)
        by_channel = values.view(sequences, heads, units, self.width, self.unit)
        return by_channel.transpose(-1, -2).reshape(sequences, heads, units * self.unit, self.width)


def coding_of(rule: ValueRule | None, operand: str, width: int, device: torch.device) -> Coding:
    """How a cache keeps an operand ("k" or "v") of heads that are `width` wide."""
    if rule is None:
        return AsTheyAre()
    scheme = rule.scheme
    if scheme.static or scheme.values.scaling is None:
        scale = rule.scale(operand)
        return UnderStaticScale(
            format=scheme.values.format,
            scale=None if scale is None else scale.to(device),
            rounding=scheme.rounding,
            width=width,
        )
    return UnderOwnScales(values=scheme.values, width=width, unit=scheme.group_tokens)


class TokenCodes:
    """Tokens that come one after the other, and are read all at once.

    Args:
        coding: how they are kept.
        fallback: what happens to tokens that overflow; None: they saturate.
    """

    def __init__(self, coding: Coding, fallback: Fallback | None = None) -> None:
        self.coding = coding
        self._wide = WideTokens(fallback) if fallback is not None and isinstance(coding, UnderStaticScale) else None
        self._parts: dict[str, Tensor] = {}
        self._num_units = 0
        #: Tokens of a unit that is not full: [B, H, t, D].
        self._tail: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return self._num_units * self.coding.unit + (0 if self._tail is None else self._tail.shape[-2])

    @property
    def nbytes(self) -> int:
        """Bytes of all room that there is, filled or not."""
        tensors = [*self._parts.values(), *([] if self._tail is None else [self._tail])]
        wide_bytes = 0 if self._wide is None else self._wide.nbytes
        return wide_bytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def append(self, x: Tensor) -> None:
        """Keep the tokens [B, H, T, D] behind those before."""
        unit = self.coding.unit
        if unit > 1:
            x = x if self._tail is None else torch.cat([self._tail, x], dim=-2)
            full = x.shape[-2] // unit * unit
            self._tail = x[..., full:, :].clone()
            x = x[..., :full, :]
        if x.shape[-2]:
            new = self.coding.encode(x)
            if self._wide is not None and isinstance(self.coding, UnderStaticScale):
                decoded = partial(self.coding.decode, new, x.dtype)
                self._wide.add(x, self.coding.beyond(x), decoded, self._num_units)
            self._write(new, x.shape[-2] // unit)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Everything that is kept, [B, H, T, D]."""
        found = []
        if self._num_units:
            values = self.coding.decode(self._filled(), dtype)
            found.append(values if self._wide is None else self._wide.put(values))
        if self._tail is not None and (self._tail.shape[-2] or not found):
            found.append(self._tail.to(dtype))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-2)

    def keep(self, first: int, end: int) -> int:
        """Forget the tokens before `first`, unit by unit, and those from `end` on.

        Returns how many tokens stand before `first` still: those of its unit. Of a unit that is cut at its end, the
        tokens that stay are kept as the numbers that they had become.
        """
        unit = self.coding.unit
        if end < self.num_tokens:
            cut = end % unit and end < self._num_units * unit
            values = (
                self.read(self._tail.dtype)[..., end - end % unit : end, :] if cut and self._tail is not None else None
            )
            if self._tail is not None:
                inside = max(0, end - self._num_units * unit)
                self._tail = self._tail[..., :inside, :].clone() if values is None else values.clone()
            self._num_units = min(self._num_units, end // unit)
        whole = min(first // unit, self._num_units)
        if self._wide is not None:
            self._wide.keep(whole, self._num_units)
        if whole:
            self._parts = {name: part[:, :, whole : self._num_units].clone() for name, part in self._parts.items()}
            self._num_units -= whole
        return first - whole * unit

    def remember(self) -> Callable[[], None]:
        """What brings back what is kept now: later tokens are written behind it, or into other tensors."""
        parts, num_units, tail = dict(self._parts), self._num_units, self._tail
        bring_wide_back = None if self._wide is None else self._wide.remember()

        def bring_back() -> None:
            self._parts, self._num_units, self._tail = dict(parts), num_units, tail
            if bring_wide_back is not None:
                bring_wide_back()

        return bring_back

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a choice of sequences to everything."""
        self._parts = {name: change(part) for name, part in self._parts.items()}
        self._tail = None if self._tail is None else change(self._tail)
        if self._wide is not None:
            self._wide.change(change)

    def _filled(self) -> dict[str, Tensor]:
        return {name: part[:, :, : self._num_units] for name, part in self._parts.items()}

    def _write(self, new: dict[str, Tensor], num_units: int) -> None:
        end = self._num_units + num_units
        for name, part in new.items():
            room = self._parts.get(name)
            if room is None or room.shape[2] < end:
                units = max(end + end // 8, -(-_LEAST_ROOM // self.coding.unit))
                larger = part.new_empty(*part.shape[:2], units, part.shape[3])
                if room is not None:
                    larger[:, :, : self._num_units] = room[:, :, : self._num_units]
                self._parts[name] = room = larger
            room[:, :, self._num_units : end] = part
        self._num_units = end
