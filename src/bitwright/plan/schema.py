"""The records a plan is made of: what was asked, what was chosen, what was predicted, and what was measured.

Every record is frozen, refuses unknown fields, and holds finite floats of nine significant digits (``canonical.py``).
KL is in nats per token, always ``KL(reference ‖ plan)`` with the loaded weights run in fp32 as the reference. Sizes are
in bytes, ``bits`` are stored bits per weight (codes + scales + zero points). Intervals are 95 % unless a record says
otherwise. Predicted and measured figures never share a field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from bitwright.plan.canonical import Number


class Record(BaseModel):
    """A frozen record of a plan; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelInfo(Record):
    """The model a plan is for."""

    name: str
    #: SHA-256 over names, shapes and bytes of the fp32 weights.
    hash: str
    #: Number of parameters; a tied weight counts once.
    params: int = Field(ge=0)
    #: What loading noticed, such as weights that already lie on a 4-bit grid.
    notes: tuple[str, ...] = ()


class TextInfo(Record):
    """One split of text: ``tokens`` counts the scored tokens."""

    source: str
    tokens: int = Field(ge=0)
    sequences: int = Field(ge=0)
    hash: str


class SearchOptions(Record):
    """The remaining inputs of a search: together with model, texts, budget and seed they repeat it."""

    schemes: tuple[str, ...]
    #: Roundings and transforms to choose from; empty means all that there are.
    roundings: tuple[str, ...] = ()
    transforms: tuple[str, ...] = ()
    #: Value schemes to choose from; empty where values stay as they are.
    value_schemes: tuple[str, ...] = ()
    #: The engine whose rules hold; None for those of the device alone.
    engine: str | None = None
    effort: Literal["default", "high"] = "default"
    include_head: bool
    #: Tokens per sequence.
    sequence_length: int = Field(gt=0)
    #: Calibration tokens asked for.
    calibration_tokens: int = Field(gt=0)
    #: Evaluation tokens asked for, for the repair and the final text each.
    evaluation_tokens: int = Field(gt=0)


class SiteChoice(Record):
    """A site, the choice made there, and what it costs."""

    name: str
    kind: Literal["weight", "activation", "state"]
    role: str
    #: Dotted name of the module that owns the parameter.
    module: str
    #: Rows [first, end) of the [out, in] matrix; None means all.
    rows: tuple[int, int] | None
    #: Sites of one group share a scheme.
    tied_group: str | None
    #: [out_features, in_features] of the site.
    shape: tuple[int, int]
    scheme: str
    rounding: str
    transform: str
    #: One sentence: why this choice.
    reason: str
    #: Stored bytes: codes, scales, zero points, padding.
    bytes: int = Field(ge=0)
    #: Stored bits per weight.
    bits: Number = Field(ge=0)
    #: KL with this site alone changed.
    predicted_kl: Number

    @property
    def role_label(self) -> str:
        """The role, told apart where weights and the values that they give have the same."""
        return role_label(self.kind, self.role)


def role_label(kind: str, role: str) -> str:
    """What a role of sites of a kind is called: ``"mlp.up"`` for weights, ``"mlp.up values"`` for what they give."""
    return f"{role} values" if kind == "activation" else role


class Summary(Record):
    """Totals of the plan."""

    #: Stored bits of the decoder's linear weights ÷ their number.
    effective_bits: Number = Field(ge=0)
    #: The same without scales and zero points, as peers count.
    nominal_bits: Number = Field(ge=0)
    #: Stored bytes of all weights of the model.
    weight_bytes: int = Field(ge=0)
    predicted_kl: Number


class Interval(Record):
    """A mean and its confidence interval."""

    mean: Number
    low: Number
    high: Number


class Perplexity(Record):
    """Perplexity of the reference and of the plan, and their ratio with its interval."""

    base: Number = Field(gt=0)
    plan: Number = Field(gt=0)
    ratio: Number = Field(gt=0)
    low: Number
    high: Number


class Repetition(Record):
    """Share of repeated 4-grams in long greedy generations, 0 … 1."""

    base: Number
    plan: Number


class Neighbours(Record):
    """How the nearest neighbours of the evaluation texts among each other change."""

    #: How many nearest neighbours.
    k: int = Field(gt=0)
    #: Share of the reference's k nearest that are among the plan's k nearest, 0 … 1.
    overlap: Interval


class EmbeddingFigures(Record):
    """What a plan does to the vectors of a sentence encoder."""

    #: Cosine between the vectors of a text under reference and plan.
    cosine: Interval
    #: The cosine that one text in twenty falls below.
    cosine_low: Interval
    neighbours: tuple[Neighbours, ...]
    #: Kendall's τ between both orders of the reference's ten nearest, −1 … 1; None with fewer texts.
    rank_correlation: Interval | None = None
    #: Texts that are ranked: all of the evaluation text.
    corpus: int = Field(gt=0)


class Measured(Record):
    """What the plan does on held-out text."""

    kl: Interval
    #: What a KL is per, here and in the plan's predictions.
    unit: Literal["token", "text"] = "token"
    #: KL of the same weights run in bf16: no plan can be told from noise below it.
    bf16_floor_kl: Number
    #: None where no tokens are predicted.
    ppl: Perplexity | None = None
    #: Share of tokens whose most likely prediction is the reference's, 0 … 1; None where none are predicted.
    top1_agreement: Interval | None = None
    #: None where tokens are predicted.
    embedding: EmbeddingFigures | None = None
    tokens: int = Field(ge=0)
    sequences: int = Field(ge=0)
    #: KL that one token in a thousand exceeds; None below 100,000 tokens, where it would be noise.
    kl_p999: Number | None = None
    repetition: Repetition | None = None
    #: Values beyond a format's range, before they are cast, per million rounded values; None where none are rounded.
    overflows: Number | None = None
    #: Share of the rounded rows (a token at one matrix) with such a value, 0 … 1: what falls back to a wider format
    #: where an engine checks.
    fallback_rate: Number | None = None
    #: Name of the text and its hash, where it is not the plan's own evaluation text.
    source: str | None = None
    hash: str | None = None
    #: Level of the intervals.
    confidence: Number = 0.95

    @property
    def quality(self) -> dict[str, float]:
        """The figures that a budget's quality limits are held against, by the limit's name."""
        found = {"max_kl": self.kl.mean}
        return found if self.ppl is None else {**found, "max_ppl_increase": self.ppl.ratio - 1}


class Limit(Record):
    """One limit of the budget and how it was met.

    ``measured``: met by a measurement (bytes counted exactly are measured); ``predicted``: met by a prediction, where
    it cannot be measured here; ``missed``: not met.
    """

    name: str
    limit: Number
    value: Number
    status: Literal["measured", "predicted", "missed"]

    @property
    def met(self) -> bool:
        return self.status != "missed"


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


class FrontierPoint(Record):
    """One plan of the Pareto front of size and quality."""

    effective_bits: Number = Field(ge=0)
    weight_bytes: int = Field(ge=0)
    predicted_kl: Number
    measured_kl: Number | None = None
    #: Scheme → number of sites.
    counts: Mapping[str, int] = Field(default_factory=dict)
    #: True for the point this plan is.
    chosen: bool = False


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


class Prediction(Record):
    """A predicted KL beside its measurement.

    ``site``: one site alone. ``role``: all sites of a role in one scheme, predicted before correction.
    ``plan_role``: all sites of a role as the plan has them, everything else as loaded. ``total``: a whole assignment.
    """

    #: "30 × attn.q in int4_g128", "attn.q as planned", "whole model at 4.80 bits", …
    what: str
    predicted_kl: Number
    measured_kl: Number
    kind: Literal["site", "role", "plan_role", "total"] = "site"
    #: Where it is one scheme.
    scheme: str | None = None
    #: Where it is one role.
    role: str | None = None


class Repair(Record):
    """A site raised after a measurement broke a limit. Spelled ``from`` and ``to`` in JSON."""

    site: str
    from_scheme: str = Field(validation_alias=AliasChoices("from", "from_scheme"), serialization_alias="from")
    to_scheme: str = Field(validation_alias=AliasChoices("to", "to_scheme"), serialization_alias="to")
    why: str
    measured_kl_before: Number
    measured_kl_after: Number | None = None


class Latency(Record):
    """Time on the plan's hardware; ``reference`` is the same model with bf16 weights on the same hardware."""

    prefill_tokens: int = Field(gt=0)
    prefill_s: Number
    decode_s_per_token: Number
    reference_prefill_s: Number | None = None
    reference_decode_s_per_token: Number | None = None
    status: Literal["predicted", "measured"] = "predicted"


class DeviceMemory(Record):
    """Bytes that have to fit on the device under the plan's workload: all predicted from shapes and choices."""

    weights: int = Field(ge=0)
    kv_cache: int = Field(ge=0)
    activations: int = Field(ge=0)
    workspace: int = Field(ge=0)

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.workspace


class Run(Record):
    """What happened to be so on one run: kept beside the plan in ``run.json``, never hashed."""

    #: ISO 8601 time in UTC.
    created: str | None = None
    #: Stage → seconds.
    timings: Mapping[str, Number] = Field(default_factory=dict)
    #: "model", "calibration", "evaluation" → where they lay.
    paths: Mapping[str, str] = Field(default_factory=dict)
    peak_memory_bytes: int | None = None
