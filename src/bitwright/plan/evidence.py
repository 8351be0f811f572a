"""What a plan shows beside its choices: which limit binds, the front, comparisons, robustness, what was ruled out.

Records as those of ``schema.py``. Predicted and measured figures never share a field; "predicted" is said by the
field's name or comment, all else was measured or counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from bitwright.plan.canonical import Number
from bitwright.plan.schema import Interval, Record


class Loosened(Record):
    """What loosening one limit would buy: the objective's figure at the optimum of the looser problem."""

    #: How much looser: 0.01 is 1 %.
    by: Number
    value: Number


class LimitStudy(Record):
    """Whether a limit binds and what loosening it would buy; or, out of reach, how near it can be brought.

    All figures are predictions of exact optima. `alone` and `given_others` are there where no assignment is predicted
    to keep all limits of the budget: the best figure of this limit whatever the others say, and with all others kept
    (None where they contradict each other without this one).
    """

    name: str
    limit: Number
    #: True where the optimum without this limit is better.
    binds: bool
    #: The quantity that was made small: kl, weight_bytes, device_bytes, decode_s.
    objective: str
    #: Its figure at the optimum under all limits; None where there is none.
    before: Number | None = None
    loosened: tuple[Loosened, ...] = ()
    alone: Number | None = None
    given_others: Number | None = None


class ParetoPoint(Record):
    """One plan of the front over quality, memory, latency and stability.

    Quality and stability are measured on the repair text, memory is counted, latency is predicted unless it says
    otherwise.
    """

    effective_bits: Number = Field(ge=0)
    weight_bytes: int = Field(ge=0)
    #: Weights, KV cache, activations and workspace; None without a context.
    device_bytes: int | None = None
    predicted_kl: Number
    kl: Interval
    decode_s_per_token: Number
    prefill_s: Number
    latency_status: Literal["predicted", "measured"] = "predicted"
    #: Values beyond a format's range, before they are cast, per million values: expected and measured.
    predicted_overflows: Number = 0.0
    overflows: Number = 0.0
    #: Share of tokens with an overflow at a matrix, which a server would compute again in a wider format, 0 … 1.
    fallback_rate: Number = 0.0
    #: Scheme → number of sites.
    counts: Mapping[str, int] = Field(default_factory=dict)
    #: True for the point this plan is.
    chosen: bool = False

    @property
    def memory_bytes(self) -> int:
        """What has to fit on the device where a context is given, else the weights."""
        return self.weight_bytes if self.device_bytes is None else self.device_bytes


class UniformComparison(Record):
    """The plan against one scheme everywhere, on the same sequences of the repair text (paired bootstrap)."""

    scheme: str
    effective_bits: Number = Field(ge=0)
    weight_bytes: int = Field(ge=0)
    #: Mean KL of the uniform plan and of this plan on these sequences, nats per token.
    uniform_kl: Number
    plan_kl: Number
    #: KL of this plan − KL of the uniform plan: below 0 this plan is better.
    difference: Interval
    sequences: int = Field(ge=0)
    verdict: Literal["better", "within the noise", "worse"]


class OtherChoice(Record):
    """The search again, under another calibration set or seed, and both plans on the same sequences."""

    #: "calibration on code", "seed 1", …
    what: str
    #: Share of the sites in question with the same choice, and with the same scheme, 0 … 1.
    same_choice: Number
    same_scheme: Number
    #: Of the other plan.
    predicted_kl: Number
    kl: Interval
    weight_bytes: int = Field(ge=0)
    #: Of this plan, on the same sequences.
    plan_kl: Number
    #: KL of the other plan − KL of this plan.
    difference: Interval
    sequences: int = Field(ge=0)


class LongerContext(Record):
    """This plan on longer texts."""

    sequence_length: int = Field(gt=0)
    kl: Interval
    tokens: int = Field(ge=0)
    sequences: int = Field(ge=0)


class Robustness(Record):
    """How the choice and its quality move under other text, another seed, and a longer context."""

    others: tuple[OtherChoice, ...] = ()
    contexts: tuple[LongerContext, ...] = ()
    #: What could not be measured, and why.
    notes: tuple[str, ...] = ()


class RuledOutChoice(Record):
    """Choices that a device or an engine does not have, left out before anything was scored."""

    scheme: str
    reason: str
    #: Number of sites, and the name of one of them.
    sites: int = Field(gt=0)
    example: str


class DeviceMemory(Record):
    """Bytes that have to fit on the device under the plan's workload: all predicted from shapes and choices."""

    weights: int = Field(ge=0)
    kv_cache: int = Field(ge=0)
    activations: int = Field(ge=0)
    workspace: int = Field(ge=0)

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.workspace
