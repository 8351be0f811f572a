"""What precision on the wire does to a sum: the schedules of `collectives` with numbers that are rounded on their way.

A library that reduces bf16 tensors adds in fp32 and keeps bf16: contributions are rounded once, and each partial sum
where it is kept. What a schedule does then decides. With contributions of one size, u the format's unit roundoff:

    ring            sums of 2 to n numbers are rounded: u · √(1 + (2 + … + n)/n) = u · √((n + 3)/2 − 1/n)
    tree            all sums of a level together weigh n numbers: u · √(1 + log2 n)
    two-shot        all n numbers are added in one place in fp32, and the sum is rounded once: u · √2, whatever n

So a ring in bf16 loses half of a bit with each doubling of ranks, and the two-shot all-reduce (an all-to-all, an fp32
sum, an all-gather) sends the same bytes and loses none. Formats of 8 bits carry one fp32 scale for each block; with
*error feedback* a rank keeps what its rounding lost and adds it to its next gradient, so that the mean over steps
arrives although no single step does (`ErrorFeedback`).

Sources: Seide et al. 2014 (feedback); Micikevicius et al. 2022, FP8 formats (a scale); NVIDIA/nccl src/device/reduce.h
(sums of bf16 are rounded at each rank). `hooks` does the same to the gradients of a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from bitwright import formats
from bitwright.catalog import nearest_name_hint
from bitwright.comms.collectives import num_chunks, schedule, stream
from bitwright.comms.simulate import Values, run, simulate
from bitwright.errors import CommsError, UnknownName
from bitwright.quantize.granularity import group
from bitwright.quantize.scheme import Scaling, TensorScheme

#: Numbers that share a scale where a format has one.
BLOCK_SIZE = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """How numbers travel."""

    name: str
    #: Format, and the scale that blocks of a flattened buffer share.
    scheme: TensorScheme

    @property
    def bits_per_number(self) -> float:
        """Bits of a number with its share of the scale."""
        return formats.FORMATS[self.scheme.format].bits + (0 if self.scheme.scaling is None else 32 / BLOCK_SIZE)

    def num_bytes(self, length: int) -> int:
        """Bytes of so many numbers and their scales."""
        scales = 0 if self.scheme.scaling is None else 4 * -(-length // BLOCK_SIZE)
        return -(-length * formats.FORMATS[self.scheme.format].bits // 8) + scales

    @property
    def largest(self) -> float:
        """The largest number that travels: the format's own, or what its fp32 scale reaches."""
        return float(formats.FORMATS["fp32" if self.scheme.scaling is not None else self.scheme.format].max)

    def rounded(self, values: npt.ArrayLike) -> Values:
        """Return what is left of values [..., length]: fp32 of the same shape, blocks along the last dimension.

        A block with NaN or ∞ under a scale is NaN throughout: nothing of it is to be trusted. Without a scale, what is
        too large becomes ∞ where the format has it.
        """
        with np.errstate(over="ignore"):
            x = np.asarray(values, dtype=np.float32)  # ∞ where fp32 is too small
        if self.scheme.format == "fp32":
            return x
        if self.scheme.scaling is None:
            return formats.round(self.scheme.format, x, overflow="ieee").astype(np.float32)
        length = x.shape[-1]
        padded = np.zeros((*x.shape[:-1], -(-length // BLOCK_SIZE) * BLOCK_SIZE), dtype=np.float32)
        padded[..., :length] = x
        blocks = padded.reshape(*x.shape[:-1], -1, BLOCK_SIZE)
        amax = np.abs(blocks).max(axis=-1, keepdims=True)
        is_finite = np.isfinite(amax)
        top = np.float32(formats.FORMATS[self.scheme.format].max)
        scale = np.where(is_finite & (amax > 0), amax, top) / top
        scale[scale == 0] = 1
        codes = formats.round(self.scheme.format, np.where(is_finite, blocks, 0) / scale).astype(np.float32)
        found = np.where(is_finite, codes * scale, np.float32(np.nan))
        return found.reshape(padded.shape)[..., :length]


def _scaled(format: str) -> TensorScheme:
    return TensorScheme(format=format, scaling=Scaling(granularity=group(BLOCK_SIZE), scale_format="fp32"))


#: Name → how numbers travel under it.
WIRE_FORMATS: Mapping[str, WireFormat] = MappingProxyType(
    {
        name: WireFormat(name=name, scheme=scheme)
        for name, scheme in (
            ("fp32", TensorScheme(format="fp32")),
            ("bf16", TensorScheme(format="bf16")),
            ("fp16", TensorScheme(format="fp16")),
            ("fp8_e4m3", _scaled("fp8_e4m3")),
            ("fp8_e5m2", _scaled("fp8_e5m2")),
            ("int8", _scaled("int8")),
        )
    }
)


def wire_format(name: str) -> WireFormat:
    """Return a format of the wire by its name, or another library's name of it.

    Raises:
        UnknownName: nothing travels under that name.
    """
    written, known = name.strip().lower(), list(WIRE_FORMATS)
    of_wire = f"{nearest_name_hint(written, known)} Formats of the wire: {', '.join(known)}"
    try:
        canonical = written if written in WIRE_FORMATS else formats.resolve(name)
    except UnknownName as error:
        # Its own message lists formats that do not travel.
        raise UnknownName(f"unknown format of the wire {name!r}{of_wire}") from error
    if canonical not in WIRE_FORMATS:
        raise UnknownName(f"format {name!r} does not travel{of_wire}")
    return WIRE_FORMATS[canonical]


def all_reduced(
    contributions_NL: npt.ArrayLike,
    wire: WireFormat,
    algorithm: str = "ring",
    *,
    ranks_per_node: int | None = None,
) -> Values:
    """Return the sum as every rank holds it after an all-reduce whose numbers travel in a format: fp32 [N, L].

    Args:
        contributions_NL: a row for each of N ranks.
        wire: what travels, and is kept between steps.
        algorithm: of the all-reduce; the two-shot one adds all contributions in fp32.
        ranks_per_node: for algorithms that know nodes.
    """
    start = wire.rounded(contributions_NL)
    made = schedule("all_reduce", algorithm, len(start), ranks_per_node=ranks_per_node)
    return simulate(made, start, settle=wire.rounded)


@dataclass(frozen=True, kw_only=True, slots=True)
class WireError:
    """How far a sum is from that of fp64."""

    wire: str
    algorithm: str
    num_ranks: int
    #: ‖sum − exact‖ / ‖exact‖ over all numbers.
    relative_error: float


def error_growth(
    wires: Sequence[str], algorithms: Sequence[str], ranks: Sequence[int], *, length: int = 2048, seed: int = 0
) -> tuple[WireError, ...]:
    """Return the errors of all-reduces of independent normal numbers, for each format, algorithm and number of ranks.

    Args:
        wires: names of formats of the wire.
        algorithms: of all-reduces; "ring", "tree", "two_shot" …
        ranks: each 2 or more; 1,024 take seconds.
        length: numbers that each rank brings.
        seed: of the numbers.
    """
    found = []
    for count in ranks:
        if count < 2:
            raise CommsError(f"{count} ranks have no sum to lose; give 2 or more")
        given = np.random.default_rng(seed).standard_normal((count, length)).astype(np.float32)
        exact = given.astype(np.float64).sum(axis=0)
        for name in wires:
            wire = wire_format(name)
            for algorithm in algorithms:
                total = _sum_at_rank_zero(wire.rounded(given), wire, algorithm)
                error = float(np.linalg.norm(total - exact) / np.linalg.norm(exact))
                found.append(WireError(wire=name, algorithm=algorithm, num_ranks=count, relative_error=error))
    return tuple(found)


def _sum_at_rank_zero(start: Values, wire: WireFormat, algorithm: str) -> Values:
    """The sum that rank 0 ends with, without keeping the schedule of a thousand ranks."""
    count, length = start.shape
    if algorithm == "two_shot":
        # What its two steps do, in one place: contributions added in fp32 by rank, rounded once.
        return wire.rounded(np.add.reduce(start, axis=0, dtype=np.float32))
    chunks = num_chunks("all_reduce", algorithm, count)
    bounds = [index * length // chunks for index in range(chunks + 1)]
    return run(stream("all_reduce", algorithm, count), start.copy(), bounds, wire.rounded)[0]


@dataclass(kw_only=True)
class ErrorFeedback:
    """Gradients of step after step over a two-shot all-reduce, with or without what rounding lost before.

    Each rank owns a shard. What rounding took from a rank's contribution it owes, and the owner of a shard also what
    rounding took from the sum; both are added to their contributions at the next step. So all that has arrived and all
    that is owed add up to all that was given. A block whose sum is not finite arrived nowhere and leaves nothing owed:
    ∞ − ∞ would spoil every later step.
    """

    wire: WireFormat
    is_on: bool = True
    #: Blocks that were not finite so far.
    num_reset_blocks: int = 0
    _owed_NL: Values | None = None

    def step(self, gradients_NL: npt.ArrayLike) -> Values:
        """Return the sum of one step as every rank gets it, fp32 [L]; what is lost stays for the next one."""
        given = np.asarray(gradients_NL, dtype=np.float32)
        wanted = given if self._owed_NL is None or not self.is_on else given + self._owed_NL
        with np.errstate(invalid="ignore", over="ignore"):
            sent = self.wire.rounded(wanted)
            total = np.add.reduce(sent, axis=0, dtype=np.float32)
            received = self.wire.rounded(total)
            owed = wanted - sent
            num_ranks, length = given.shape
            owners = np.arange(length) // (-(-length // (num_ranks * BLOCK_SIZE)) * BLOCK_SIZE)
            owed[owners, np.arange(length)] += total - received
        lost = np.logical_or.reduceat(~np.isfinite(received), np.arange(0, length, BLOCK_SIZE))
        owed[:, np.repeat(lost, BLOCK_SIZE)[:length]] = 0
        self.num_reset_blocks += int(lost.sum())
        self._owed_NL = owed
        return received


def safe_ranks(wire: str, algorithm: str = "ring", *, tolerance: float = 2.0**-7) -> int:
    """Return up to how many ranks (a power of two, at most 65,536) a sum stays within a relative error of fp64's.

    By the laws at the top of the module (doubling as trees), with u the root mean square of the format's rounding of a
    normal number. The default tolerance is that of a bf16 number itself, 2⁻⁷. Two ranks lose a tenth more than the law
    says in formats without a scale: the sum of two of their numbers often lies half way between two others.
    """
    unit = _mean_roundoff(wire_format(wire))
    best = 1
    for power in range(1, 17):
        n = 1 << power
        ring = math.sqrt((n + 3) / 2 - 1 / n)
        spread = {"ring": ring, "two_shot": math.sqrt(2)}.get(algorithm, math.sqrt(1 + power))
        if unit * spread > tolerance:
            break
        best = n
    return best


def _mean_roundoff(wire: WireFormat) -> float:
    """Root mean square of what rounding once does to normal numbers, relative to them."""
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    return float(np.linalg.norm(wire.rounded(x).astype(np.float64) - x) / np.linalg.norm(x))
