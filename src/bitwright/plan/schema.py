"""The records a plan is made of: what was asked, what was chosen, what was predicted, and what was measured.

Every record is frozen, refuses unknown fields, and holds finite floats of nine significant digits (``canonical.py``).
KL is in nats per scored prediction (a token, or an encoder's text), always ``KL(reference ‖ plan)`` with the loaded
weights run in fp32 as the reference. Sizes are in bytes, ``bits`` are stored bits per weight (codes + scales + zero
points). Intervals are 95 % unless a record says otherwise. Predicted and measured figures never share a field.
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
    #: KL with this site alone changed; of "learned" codes, what was predicted before they were refined.
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
    #: Before any codes were refined ("learned"): nothing predicts what that gains.
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
    #: What a prediction counts with: the device's peaks, or rates that were measured where its file has them.
    rates: Literal["peak", "achieved"] = "peak"


class Run(Record):
    """What happened to be so on one run: kept beside the plan in ``run.json``, never hashed."""

    #: ISO 8601 time in UTC.
    created: str | None = None
    #: Stage → seconds.
    timings: Mapping[str, Number] = Field(default_factory=dict)
    #: "model", "calibration", "evaluation" → where they lay.
    paths: Mapping[str, str] = Field(default_factory=dict)
    peak_memory_bytes: int | None = None
