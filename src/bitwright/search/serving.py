"""What a decoder takes beside its linear layers when it serves a context: cache, activations, workspace, attention.

    state (K and V caches)    bytes of `batch · context` tokens; decoding reads them once, prefill writes them once
    q·k and p·v               their multiplications, at the rate of the format they are rounded to
    softmax, router           nothing: scores stay on the chip
    any other value           written once and read once

Each of these is a site's own and adds up, which the roofline's maximum over a whole attention does not: where a step
computes as long as it reads, the sum is above it. All of it is *predicted*, at measured rates where the device file has
them; the formulas are those of `hardware/memory.py` and `hardware/latency.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bitwright.errors import BudgetError
from bitwright.hardware import Device, memory, roofline
from bitwright.hardware.decoder_shape import DecoderShape
from bitwright.hardware.latency import visible_pairs
from bitwright.hardware.memory import ServingMemory
from bitwright.models import Site
from bitwright.models.loaded import LoadedModel
from bitwright.models.shape import decoder_sizes, missing_sizes
from bitwright.models.value_sites import ValueSite
from bitwright.plan import Workload
from bitwright.quantize import VALUE_SCHEMES
from bitwright.search.candidate import Candidate

#: Which of a device's rates times are predicted with.
RATES: roofline.Rates = "achieved"
#: Bits of a value that nothing is chosen for: computed and kept in 16 bits, as served models are.
VALUE_BITS = 16.0
#: Roles whose values are multiplied with each other.
_PRODUCT_ROLES = frozenset({"attn.qk", "attn.pv"})
#: Roles whose values never leave the chip, or are a few numbers a token.
_FREE_ROLES = frozenset({"attn.softmax", "attn.softmax_sum", "router"})


def value_amounts(site: ValueSite, choice: Candidate, device: Device | None, workload: Workload) -> dict[str, float]:
    """Every quantity of one value site under a choice; nothing without a context."""
    if workload.context is None or site.role in _FREE_ROLES:
        return {}
    scheme = VALUE_SCHEMES[choice.scheme] if choice.scheme in VALUE_SCHEMES else None
    bits = VALUE_BITS if scheme is None else scheme.stored_bits(site.head_dim)
    if site.kind == "state":
        kept = memory.cache_bytes(
            num_tokens=workload.context if site.window is None else min(workload.context, site.window),
            num_kv_heads=site.num_heads,
            head_dim=site.head_dim,
            stored_bits=bits,
            batch=workload.batch,
        )
        seconds = 0.0 if device is None else roofline.read_time_s(device, kept, RATES)
        return {"device_bytes": kept, "decode_s": seconds, "prefill_s": seconds}
    if device is None:
        return {}
    if site.role in _PRODUCT_ROLES:
        compute, _ = roofline.compute_format(device, "bf16" if scheme is None else scheme.values.format)
        return {
            step: roofline.operation_time(
                device, flops={compute: product_operations(site, workload, queries)}, moved_bytes=0, rates=RATES
            ).seconds
            for step, queries in (("decode_s", 1), ("prefill_s", workload.context))
        }
    moved = 2 * workload.batch * site.width * bits / 8
    return {
        "decode_s": roofline.read_time_s(device, moved, RATES),
        "prefill_s": roofline.read_time_s(device, moved * workload.context, RATES),
    }


def product_operations(site: ValueSite, workload: Workload, query_tokens: int) -> float:
    """Operations of q·k or of p·v for so many new tokens of each sequence; 0 without a context, and elsewhere."""
    if workload.context is None or site.role not in _PRODUCT_ROLES:
        return 0.0
    return 2.0 * workload.batch * site.num_heads * site.head_dim * visible_pairs(query_tokens, workload.context)


def memory_beside_sites(
    loaded: LoadedModel, sites: Sequence[Site], device: Device | None, workload: Workload, *, caches_are_sites: bool
) -> ServingMemory | None:
    """Bytes of activations and workspace, and of a 16-bit KV cache where no site stands for it.

    None without a context; no weights are counted.

    Raises:
        BudgetError: the model's config does not tell the sizes that they follow from.
    """
    if workload.context is None or device is None:
        return None
    shape = decoder_shape(loaded, sites)
    if shape is None:
        raise BudgetError(
            f"the config of {loaded.name!r} does not tell layers, heads and widths, so nothing can be said of its "
            "memory under a context; leave context out, and limit the weights with max_memory"
        )
    kv_cache = 0
    if not caches_are_sites:
        kv_cache = memory.kv_cache_bytes(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_tokens=workload.context,
            batch=workload.batch,
            value_bits=VALUE_BITS,
        )
    found = memory.serving_memory(
        shape, device.kind, weights=1, kv_cache=kv_cache, batch=workload.batch, context=workload.context
    )
    return replace(found, weights=0)


def decoder_shape(loaded: LoadedModel, sites: Sequence[Site]) -> DecoderShape | None:
    """The sizes that memory follows from, as the config names them; None where it does not."""
    if missing_sizes(loaded.model):
        return None
    return DecoderShape(
        **decoder_sizes(loaded.model, sites),
        active_weights=max(1, sum(site.num_weights for site in sites if site.expert is None)),
    )
