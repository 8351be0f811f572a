"""What is done to a value that a model computes or keeps, rather than to a weight: its format, and who shares a scale.

Values of attention are [heads, tokens, head_dim], all others [tokens, width], which counts as one head. Along that:

    axis        who shares a scale                                  when it is found
    tensor      all values of the site                              in calibration (static)
    head        all values of one head                              in calibration (static)
    token       one token of one head, or groups along it           on every call (dynamic)
    channel     one channel of one head over a group of tokens      when the group of tokens is full

A dynamic scale per tensor or per head would depend on tokens that come later and on what else is in the batch; engines
that offer one find it in calibration, so there is none here. Per channel is KIVI's way with keys (arXiv:2402.02750):
a few channels of K are large at every token, so that a scale per channel resolves the others. The tokens of a group
that is not yet full stay as they are.

Probabilities lie in [0, 1] whatever the text is: their scale is 1 / the format's largest number, with nothing to
calibrate. (FlashAttention-3 multiplies them by 2⁸ before the cast to E4M3, where this is 448: floats resolve both
alike.)

A scheme is a record; nothing branches on its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from bitwright.errors import SchemeError
from bitwright.formats.round import find_mode
from bitwright.quantize.scheme import TensorScheme

Axis = Literal["tensor", "head", "token", "channel"]

#: Operands whose values are known to stay within [0, bound].
OPERAND_BOUNDS: dict[str, float] = {"p": 1.0}

#: Rows for which stored bits are counted, so that what a whole tensor shares is spread over many.
_MANY_TOKENS = 1 << 12


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueScheme:
    """A named preset: how the values of a site are rounded, or stored.

    Raises:
        SchemeError: axis, scaling and `static` contradict each other.
    """

    name: str
    #: One line for tables.
    description: str
    #: Document that defines it, or the engine convention it follows.
    source: str
    #: Format and scaling. Granularity ROW is one scale per token and head (axis "token") or per channel and group of
    #: tokens (axis "channel", where group(n) says how many tokens); TENSOR for static scales and where there are none.
    values: TensorScheme
    axis: Axis
    #: True: scales are found in calibration and kept; what goes beyond them later saturates.
    static: bool
    #: Roles of value sites at which it makes sense.
    roles: frozenset[str]
    #: Parts of those roles ("k_cache"); empty means all.
    parts: frozenset[str] = frozenset()
    #: Whether a search chooses from it unless it is told what to choose from.
    in_default_search: bool = True
    #: How the cast rounds: a name in `formats.ROUNDINGS` that draws no random bits.
    rounding: str = "nearest_even"

    def __post_init__(self) -> None:
        if find_mode(self.rounding).needs_seed:
            raise SchemeError(
                f"value scheme '{self.name}' rounds {self.rounding}, and the values of a model are rounded alike on "
                "every call; give it a mode without random bits"
            )
        if self.axis not in get_args(Axis):
            raise SchemeError(f"unknown axis {self.axis!r}; use one of {', '.join(get_args(Axis))}")
        scaling = self.values.scaling
        whole = self.axis in ("tensor", "head")
        if self.static != (whole and scaling is not None):
            raise SchemeError(
                f"value scheme '{self.name}' has axis {self.axis!r}, {'a' if scaling else 'no'} scaling and static "
                f"{self.static}; scales per tensor or head are static, those per token or channel dynamic"
            )
        if scaling is None:
            return
        scope = scaling.granularity.scope
        if (scope != "tensor") if whole else (scope not in ("row", "group")):
            raise SchemeError(
                f"value scheme '{self.name}' has axis {self.axis!r} and granularity {scaling.granularity}; "
                f"give it {'TENSOR' if whole else 'ROW or group(n)'}"
            )
        if self.static and (scaling.symmetry != "symmetric" or scaling.tensor_scale or scaling.rule != "amax"):
            raise SchemeError(
                f"value scheme '{self.name}' is static: its scaling must be symmetric, one level, by amax"
            )
        if self.axis == "channel" and scope != "group":
            raise SchemeError(
                f"value scheme '{self.name}' has axis 'channel'; group(n) says how many tokens share a scale"
            )

    @property
    def group_tokens(self) -> int:
        """Tokens that are rounded together: a group of axis "channel", else 1."""
        scaling = self.values.scaling
        return scaling.granularity.group_size if self.axis == "channel" and scaling is not None else 1

    def stored_bits(self, head_dim: int) -> float:
        """Bits per stored value of a head of `head_dim`, scales included; static scales weigh nothing per token."""
        if self.static or self.values.scaling is None:
            return float(self.values.nominal_bits)
        rows, columns = (head_dim, self.group_tokens) if self.axis == "channel" else (_MANY_TOKENS, head_dim)
        return 8 * self.values.stored_bytes(rows, columns) / (rows * columns)

    def fits(self, role: str, part: str) -> bool:
        """Whether it is meant for sites of that role and part."""
        return role in self.roles and (not self.parts or part in self.parts)
