"""What a choice weighs, and how long it will take.

Bytes are exact: codes, scales, offsets and the padding of a row to whole bytes. What no choice touches (norms, biases,
and the embedding and head unless they are asked for) weighs what it does in the checkpoint. Time is the roofline's,
linear layer by linear layer, and always *predicted*: nothing is run on that hardware here.

    effective bits   stored bits of the decoder's linear weights ÷ their number
    nominal bits     the same without scales and offsets, as peers count
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitwright.hardware import Device, roofline
from bitwright.models import Site
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Latency
from bitwright.quantize import SCHEMES
from bitwright.search.candidate import Candidate

#: Roles that are no part of the decoder's linear weights.
END_ROLES = frozenset({"embedding", "lm_head"})
#: Roles that keep their loaded format: a router's error moves tokens to other experts, which no derivative sees (its
#: predicted KL was 70 times too low on a trained mixture of experts), and its weights are few.
KEPT_ROLES = frozenset({"router"})
#: A choice that leaves a site as it is.
AS_LOADED = Candidate(scheme="as_loaded")
#: Prompt length of the predicted prefill time, tokens.
PREFILL_TOKENS = 512

#: site name → choice, for every site of the model.
Assignment = Mapping[str, Candidate]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Weights of one model in bytes."""

    sites: tuple[Site, ...]
    #: Site name → stored bytes in the checkpoint.
    loaded_bytes: Mapping[str, int]
    #: Stored bits of one weight in the checkpoint, scales left in (5.0 for Q4_1).
    loaded_bits: Mapping[str, float]
    #: Bytes of all parameters that are no site.
    other_bytes: int

    def site_bytes(self, site: Site, choice: Candidate) -> int:
        """Stored bytes of a site under a choice."""
        weights = SCHEMES[choice.scheme].weights
        return self.loaded_bytes[site.name] if weights is None else weights.stored_bytes(*site.shape)

    def model_bytes(self, assignment: Assignment) -> int:
        """Stored bytes of all weights of the model."""
        return self.other_bytes + sum(self.site_bytes(site, assignment[site.name]) for site in self.sites)

    def effective_bits(self, assignment: Assignment) -> float:
        """Stored bits per weight of the decoder's linear weights."""
        linears = self.decoder_sites
        stored = sum(self.site_bytes(site, assignment[site.name]) for site in linears)
        return 8 * stored / max(1, sum(site.num_weights for site in linears))

    def nominal_bits(self, assignment: Assignment) -> float:
        """Code bits per weight of the decoder's linear weights."""
        linears = self.decoder_sites
        total = 0.0
        for site in linears:
            weights = SCHEMES[assignment[site.name].scheme].weights
            total += site.num_weights * (self.loaded_bits[site.name] if weights is None else weights.nominal_bits)
        return total / max(1, sum(site.num_weights for site in linears))

    @property
    def decoder_sites(self) -> tuple[Site, ...]:
        """The decoder's linear sites."""
        return tuple(site for site in self.sites if site.role not in END_ROLES)


def price_model(loaded: LoadedModel, sites: Sequence[Site]) -> Prices:
    """Bytes of every site and of everything else, as the checkpoint stores them."""
    in_sites = {site.parameter for site in sites}
    loaded_bits = {site.name: loaded.loaded_bits[site.parameter] for site in sites}
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
    )


def predict_latency(prices: Prices, assignment: Assignment, device: Device) -> Latency:
    """Prefill and decode time of the linear layers on a device, beside the same model in bf16; KV cache left out."""
    bf16 = {site.name: Candidate(scheme="bf16") for site in prices.sites}
    return Latency(
        prefill_tokens=PREFILL_TOKENS,
        prefill_s=_linear_time_s(prices, assignment, device, PREFILL_TOKENS),
        decode_s_per_token=_linear_time_s(prices, assignment, device, 1),
        reference_prefill_s=_linear_time_s(prices, bf16, device, PREFILL_TOKENS),
        reference_decode_s_per_token=_linear_time_s(prices, bf16, device, 1),
        status="predicted",
    )


def _linear_time_s(prices: Prices, assignment: Assignment, device: Device, tokens: int) -> float:
    total = 0.0
    for site in prices.sites:
        if site.role == "embedding":
            continue
        choice = assignment[site.name]
        scheme = SCHEMES[choice.scheme]
        wanted = scheme.activations.format if scheme.activations is not None else "bf16"
        compute, _ = roofline.compute_format(device, wanted)
        total += roofline.matmul_time(
            device,
            tokens=tokens,
            out_features=site.shape[0],
            in_features=site.shape[1],
            weight_bits=8 * prices.site_bytes(site, choice) / site.num_weights,
            compute_format=compute,
        ).seconds
    return total
