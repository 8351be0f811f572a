"""What a choice costs: bytes, and how long it will take.

Bytes are exact: codes, scales, offsets and the padding of a row to whole bytes. What no choice touches (norms, biases,
and the embedding and head unless they are asked for) weighs what it does in the checkpoint. Time is the roofline's,
operation by operation, at measured rates where the device file has them (`hardware profile` writes such files), and
always *predicted*: nothing is run on that hardware here.

    weight_bytes     stored bytes of all weights
    decoder_bytes    those of the decoder's linear weights;  effective bits = 8 · decoder_bytes ÷ their number
    nominal_bits     code bits of the decoder's linear weights, without scales and offsets, as peers count
    device_bytes     weights, KV cache, activations and workspace under a workload
    decode_s         one decode step of the whole batch
    prefill_s        reading all prompts of the batch

Without a context the last three are those of the weights alone (`serving.py` has the rest).

Every quantity adds up over the sites and what is fixed, which is what the solver needs. Of a mixture of experts a step
reads those that its tokens are expected to be sent to: with k of E experts a token, one of them is needed by t tokens
with the probability 1 − (1 − k/E)^t.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwright.hardware import Device, roofline
from bitwright.hardware.memory import ServingMemory
from bitwright.models import Site
from bitwright.models.loaded import LoadedModel
from bitwright.models.value_sites import ValueSite
from bitwright.plan import DeviceMemory, Latency, Workload
from bitwright.quantize import SCHEMES
from bitwright.search.candidate import Candidate
from bitwright.search.serving import RATES, memory_beside_sites, value_amounts

#: Roles that are no part of the decoder's linear weights.
END_ROLES = frozenset({"embedding", "lm_head"})
#: Roles that keep their loaded format: a router's error moves tokens to other experts, which no derivative sees (its
#: predicted KL was 70 times too low on a trained mixture of experts), and its weights are few.
KEPT_ROLES = frozenset({"router"})
#: A choice that leaves a site as it is.
AS_LOADED = Candidate(scheme="as_loaded")
#: What configs call the number of experts that one token is sent to.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")

#: A place where weights or values have a precision.
AnySite = Site | ValueSite
#: site name → choice, for every site of the model.
Assignment = Mapping[str, Candidate]
#: quantity → amount.
Amounts = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Costs of one model's choices on one device under one workload."""

    sites: tuple[Site, ...]
    #: Site name → stored bytes in the checkpoint.
    loaded_bytes: Mapping[str, int]
    #: Stored bits of one weight in the checkpoint, scales left in (5.0 for Q4_1).
    loaded_bits: Mapping[str, float]
    #: Bytes of all parameters that are no site.
    other_bytes: int
    #: Sites of values: caches, operands of attention, activations, norms, …
    value_sites: tuple[ValueSite, ...] = ()
    #: What times are predicted for; None predicts none.
    device: Device | None = None
    workload: Workload = field(default_factory=Workload)
    #: Bytes on the device beside what is chosen; None without a context.
    beside: ServingMemory | None = None
    #: Site name → share of the tokens that reach it (experts), where it is not all of them.
    token_share: Mapping[str, float] = field(default_factory=dict)

    def site_bytes(self, site: Site, choice: Candidate) -> int:
        """Stored bytes of a site under a choice."""
        weights = SCHEMES[choice.scheme].weights
        return self.loaded_bytes[site.name] if weights is None else weights.stored_bytes(*site.shape)

    @property
    def all_sites(self) -> tuple[AnySite, ...]:
        """Sites of weights, then those of values."""
        return (*self.sites, *self.value_sites)

    def amounts(self, site: AnySite, choice: Candidate) -> Amounts:
        """Every quantity of one site under a choice; whole bytes are ints."""
        if isinstance(site, ValueSite):
            return value_amounts(site, choice, self.device, self.workload)
        num_bytes = self.site_bytes(site, choice)
        found: Amounts = {"weight_bytes": num_bytes, "device_bytes": num_bytes}
        if site.role not in END_ROLES:
            found["decoder_bytes"] = num_bytes
            found["nominal_bits"] = site.num_weights * self._nominal_bits(site, choice)
        if self.device is not None and site.role != "embedding":
            found["decode_s"] = self._linear_s(site, choice, self.workload.batch)
            # of a prompt's logits only the last are asked for
            per_sequence = 1 if site.role == "lm_head" else self.workload.prefill_tokens
            found["prefill_s"] = self._linear_s(site, choice, self.workload.batch * per_sequence)
        return found

    @property
    def num_values(self) -> int:
        """Values per token that choices could round: inputs of the decoder's matrices, and values at value sites."""
        return self._values_at(self.all_sites)

    def num_rounded(self, assignment: Assignment) -> int:
        """Those of them that an assignment rounds."""
        rounding = [
            site
            for site in self.all_sites
            if assignment[site.name] != AS_LOADED
            and (site.kind != "weight" or SCHEMES[assignment[site.name].scheme].activations is not None)
        ]
        return self._values_at(rounding)

    def _values_at(self, sites: Sequence[AnySite]) -> int:
        """Rows of one matrix read one input, which counts once; embedding and head are left out."""
        inputs: dict[str, int] = {}
        values = 0
        for site in sites:
            if isinstance(site, ValueSite):
                values += site.width * len(site.operands)
            elif site.role not in END_ROLES:
                inputs[site.tied_group or site.name] = site.shape[1]
        return values + sum(inputs.values())

    @property
    def fixed(self) -> Amounts:
        """Every quantity of what is no site."""
        return {
            "weight_bytes": self.other_bytes,
            "device_bytes": self.other_bytes + (0 if self.beside is None else self.beside.total),
        }

    def totals(self, assignment: Assignment) -> Amounts:
        """Every quantity of the whole model."""
        total: Counter[str] = Counter(self.fixed)
        for site in self.all_sites:
            total.update(self.amounts(site, assignment[site.name]))
        return dict(total)

    def model_bytes(self, assignment: Assignment) -> int:
        """Stored bytes of all weights of the model."""
        return self.other_bytes + sum(self.site_bytes(site, assignment[site.name]) for site in self.sites)

    def effective_bits(self, assignment: Assignment) -> float:
        """Stored bits per weight of the decoder's linear weights."""
        stored = sum(self.site_bytes(site, assignment[site.name]) for site in self.decoder_sites)
        return 8 * stored / max(1, self.num_decoder_weights)

    def nominal_bits(self, assignment: Assignment) -> float:
        """Code bits per weight of the decoder's linear weights."""
        total = sum(s.num_weights * self._nominal_bits(s, assignment[s.name]) for s in self.decoder_sites)
        return total / max(1, self.num_decoder_weights)

    @property
    def decoder_sites(self) -> tuple[Site, ...]:
        """The decoder's linear sites."""
        return tuple(site for site in self.sites if site.role not in END_ROLES)

    @property
    def num_decoder_weights(self) -> int:
        """Number of the decoder's linear weights."""
        return sum(site.num_weights for site in self.decoder_sites)

    def _nominal_bits(self, site: Site, choice: Candidate) -> float:
        weights = SCHEMES[choice.scheme].weights
        return self.loaded_bits[site.name] if weights is None else weights.nominal_bits

    def _linear_s(self, site: Site, choice: Candidate, tokens: int) -> float:
        """Expected time of a linear layer over so many tokens."""
        assert self.device is not None
        share = self.token_share.get(site.name, 1.0)
        needed = 1 - (1 - share) ** tokens
        scheme = SCHEMES[choice.scheme]
        compute, _ = roofline.compute_format(
            self.device, scheme.activations.format if scheme.activations is not None else "bf16"
        )
        return (
            needed
            * roofline.matmul_time(
                self.device,
                tokens=max(1, round(tokens * share / needed)),
                out_features=site.shape[0],
                in_features=site.shape[1],
                weight_bits=8 * self.site_bytes(site, choice) / site.num_weights,
                compute_format=compute,
                rates=RATES,
            ).seconds
        )


def price_model(
    loaded: LoadedModel,
    sites: Sequence[Site],
    *,
    value_sites: Sequence[ValueSite] = (),
    device: Device | None = None,
    workload: Workload | None = None,
) -> Prices:
    """Bytes of every site and of everything else, as the checkpoint stores them; times where a device is given.

    Raises:
        BudgetError: a context is given, and the model's config does not tell what memory follows from.
    """
    workload = workload if workload is not None else Workload()
    in_sites = {site.parameter for site in sites}
    loaded_bits = {site.name: loaded.loaded_bits[site.parameter] for site in sites}
    caches_are_sites = any(site.kind == "state" for site in value_sites)
    return Prices(
        sites=tuple(sites),
        loaded_bytes={site.name: round(site.num_weights * loaded_bits[site.name] / 8) for site in sites},
        loaded_bits=loaded_bits,
        other_bytes=round(
            sum(
                parameter.numel() * loaded.loaded_bits[name] / 8
                for name, parameter in loaded.model.named_parameters()
                if name not in in_sites
            )
        ),
        device=device,
        workload=workload,
        value_sites=tuple(value_sites),
        beside=memory_beside_sites(loaded, sites, device, workload, caches_are_sites=caches_are_sites),
        token_share=_token_shares(loaded.model, sites),
    )


def predict_latency(prices: Prices, assignment: Assignment) -> Latency:
    """Prefill and decode time on the prices' device, beside the same model with bf16 weights and KV cache."""
    bf16 = {site.name: Candidate(scheme="bf16") if site.kind == "weight" else AS_LOADED for site in prices.all_sites}
    plan, reference = prices.totals(assignment), prices.totals(bf16)
    return Latency(
        prefill_tokens=prices.workload.prefill_tokens,
        prefill_s=plan["prefill_s"],
        decode_s_per_token=plan["decode_s"],
        reference_prefill_s=reference["prefill_s"],
        reference_decode_s_per_token=reference["decode_s"],
        status="predicted",
        rates="peak" if prices.device is None or not roofline.has_achieved_rates(prices.device) else RATES,
    )


def device_memory(prices: Prices, assignment: Assignment) -> DeviceMemory | None:
    """What has to fit on the device under an assignment; None without a context."""
    if prices.beside is None:
        return None
    caches = sum(int(prices.amounts(site, assignment[site.name]).get("device_bytes", 0)) for site in prices.value_sites)
    return DeviceMemory(
        weights=prices.model_bytes(assignment),
        kv_cache=caches + prices.beside.kv_cache,
        activations=prices.beside.activations,
        workspace=prices.beside.workspace,
    )


def _token_shares(model: Any, sites: Sequence[Site]) -> dict[str, float]:
    """Site → expected share of tokens that reach it, for experts where the config says how many a token is sent to."""
    config = getattr(model, "config", None)
    per_token = next((n for name in _EXPERTS_PER_TOKEN if isinstance(n := getattr(config, name, None), int)), None)
    if per_token is None:
        return {}
    counts: dict[str, int] = {}
    for site in sites:
        if site.expert is not None:
            counts[site.module] = max(counts.get(site.module, 0), site.expert + 1)
    return {s.name: min(1.0, per_token / counts[s.module]) for s in sites if s.expert is not None}
