"""Attention from within: every operand, sum and cached state of every attention layer, whatever the architecture.

transformers' models compute attention by a function that they look up in a registry under the name that their config
holds (`AttentionInterface`), and keep keys and values by `Cache.update`. For the time of a `with` block the configs
name our function and `Cache.update` is ours; no module is touched, and afterwards both are what they were. The function
computes in the order in which fused kernels do, all of it in fp32:

    q' = q · scaling                   before anything is rounded: kernels fold 1/√d into q
    s  = softcap(q' kᵀ) + mask
    e  = exp(s − max s)                in [0, 1]; the largest is 1
    l  = Σ e (+ exp(sink − max s))     by blocks of 64 keys, from e before it is rounded
    o  = (e v) / l

Each value is offered on its way, as [batch, heads, tokens, head_dim], and what comes back is used in its place:

    part          operands     when
    k_cache       k            as it is written to the cache, after rotation; in a causal layer that runs without
                               one, before it is read, as if it had been
    v_cache       v            likewise
    qk            q, k         as operands of the product; k as the cache holds it, one per key head
    softmax       p            e
    softmax_sum   sum          l after each block
    pv            p, v         as operands of the product
    output        o            after the division

Keys and values are so seen by prefill as the cache holds them. Engines differ there: some attend to unrounded keys
while they write rounded ones, which this makes look slightly worse.

A model whose attention does not go through the registry is not reached, and `find_value_sites` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn

#: Under this name configs ask for our function.
IMPLEMENTATION = "bitwright_values"
#: Keys whose exponentials are added up in fp32 before the sum is offered.
SUM_BLOCK_KEYS = 64


class Offer(Protocol):
    """Sees a value, and says what is used in its place."""

    def __call__(self, name: str, operand: str, value: Tensor) -> Tensor:
        """Value of the site `name` ("<module>:<part>"), one of its operands: the value to go on with."""


#: Sees a value of one attention, and says what is used in its place: (part, operand, value) → value.
PartOffer = Callable[[str, str, Tensor], Tensor]


class AttentionCalls:
    """Context in which all attention layers of a model offer what they compute.

    Args:
        model: any model; only those of transformers have attention that can be reached.
        offer: called with every value.
        groups: site name → tokens that its cache rounds together (`ValueScheme.group_tokens`); 1 where absent.
    """

    def __init__(self, model: nn.Module, offer: Offer, groups: Mapping[str, int] | None = None) -> None:
        self._model = model
        self._offer = offer
        self._groups = groups or {}
        self._names: dict[int, str] = {}
        #: Attention modules whose keys and values went through a cache in the present call.
        self._cached: set[int] = set()

    def __enter__(self) -> AttentionCalls:
        self._names = {id(module): name for name, module in self._model.named_modules()}
        self._stack = ExitStack()
        configs = _configs(self._model)
        assert _calls_of(self._model) is None, "a second context on one model would have to share its values"
        if configs:
            self._stack.enter_context(_offering(configs))
            self._stack.enter_context(_among_active(self))
            self._stack.enter_context(_updates_offered())
            for module in filter(may_attend, self._model.modules()):
                self._stack.callback(module.register_forward_pre_hook(_set_current).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def name(self, module: nn.Module) -> str | None:
        """The module's dotted name; None if it is of another model."""
        return self._names.get(id(module))

    def offer(self, module: nn.Module, part: str, operand: str, value: Tensor) -> Tensor:
        """Pass a value on."""
        return self._offer(f"{self._names[id(module)]}:{part}", operand, value)

    def write(self, module: nn.Module, k: Tensor, v: Tensor, store: Callable[[Tensor, Tensor], Any]) -> Any:
        """Offer new keys and values, store them, and offer the groups of tokens that are full now."""
        self._cached.add(id(module))
        name = self._names[id(module)]
        group_k, group_v = (self._groups.get(f"{name}:{part}_cache", 1) for part in "kv")
        if group_k == 1:
            k = self.offer(module, "k_cache", "k", k)
        if group_v == 1:
            v = self.offer(module, "v_cache", "v", v)
        all_k, all_v, num_tokens = store(k, v)
        for part, group, kept in (("k", group_k, all_k), ("v", group_v, all_v)):
            if group > 1:
                for last in range(group, kept.shape[-2] + 1):
                    end = num_tokens - kept.shape[-2] + last  # counted from the beginning of the text
                    if end % group == 0 and end > num_tokens - k.shape[-2]:
                        tokens = kept[..., last - group : last, :]
                        tokens.copy_(self.offer(module, f"{part}_cache", part, tokens))
        return all_k, all_v

    def took_from_cache(self, module: nn.Module) -> bool:
        """Whether the present call's keys and values were offered when they were stored."""
        if id(module) in self._cached:
            self._cached.discard(id(module))
            return True
        return False


#: Contexts that are open, one a model, and the attention module that runs at present.
_ACTIVE: ContextVar[tuple[AttentionCalls, ...]] = ContextVar("_ACTIVE", default=())
_CURRENT: ContextVar[nn.Module | None] = ContextVar("_CURRENT", default=None)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' registry wants it: [batch, heads, tokens, head_dim] → [batch, tokens, heads, dim].

    Args:
        module: the attention layer that asks.
        query, key, value: after rotation; fewer heads of keys and values than of queries are shared by groups of them.
        attention_mask: added to the scores, or bool (True attends), or None.
        scaling: of the scores; 1/√head_dim unless given.
        is_causal: whether a missing mask means the causal one, where there is more than one query.
        softcap: scores become softcap · tanh(scores / softcap).
        s_aux: one more score per head that takes part in the softmax and has no value (a sink).
        position_bias: added to the scores.
    """
    calls = _calls_of(module)

    def offer(part: str, operand: str, values: Tensor) -> Tensor:
        return values if calls is None else calls.offer(module, part, operand, values)

    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if calls is not None and not calls.took_from_cache(module) and is_causal:
        key, value = offer("k_cache", "k", key), offer("v_cache", "v", value)
    if attention_mask is None and is_causal and query.shape[-2] > 1:
        num_queries, num_keys = query.shape[-2], key.shape[-2]
        attention_mask = causal_mask(num_queries, num_keys, query.device, first=num_keys - num_queries)
    o = attention(
        offer,
        query,
        key,
        value,
        attention_mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sink=None if s_aux is None else s_aux.float().reshape(1, -1, 1, 1),
        position_bias=position_bias,
    )
    return o.to(query.dtype).transpose(1, 2).contiguous(), None


def attention(
    offer: PartOffer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sink: Tensor | None = None,
    position_bias: Tensor | None = None,
    by_blocks: bool = True,
) -> Tensor:
    """Attention in the order of fused kernels, fp32 [batch, heads, tokens, head_dim]; every value is offered.

    Args:
        offer: called with part, operand and value.
        query, key, value: [batch, heads, tokens, head_dim]; heads of keys may be shared by groups of queries'.
        mask: added to the scores, or bool (True attends), or None.
        scaling, softcap, position_bias: as `attend` has them.
        sink: one more score per head, [1, heads, 1, 1].
        by_blocks: offer the sum after each block of keys; False: only the whole of it is computed.
    """
    q = offer("qk", "q", query.float() * scaling)
    k = offer("qk", "k", key.float())
    scores = q @ _per_query_head(k, q).transpose(-1, -2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    scores = _masked(scores, mask)
    highest = scores.detach().amax(-1, keepdim=True)
    highest = highest if sink is None else torch.maximum(highest, sink.detach())
    e = torch.exp(scores - highest)
    total = torch.zeros_like(highest) if sink is None else torch.exp(sink - highest)
    if by_blocks:
        total = sum_by_blocks(e, total, lambda so_far: offer("softmax_sum", "sum", so_far))
    else:
        total = total + e.sum(-1, keepdim=True)
    p = offer("pv", "p", offer("softmax", "p", e))
    v = offer("pv", "v", value.float())
    return offer("output", "o", (p @ _per_query_head(v, q)) / total)


def sum_by_blocks(e: Tensor, total: Tensor, offer: Callable[[Tensor], Tensor]) -> Tensor:
    """Exponentials added to a total block of keys by block; the sum so far is offered after each."""
    for block in e.split(SUM_BLOCK_KEYS, dim=-1):
        added = block.sum(-1, keepdim=True)
        # where all keys of a block are masked, kernels do not come by: the sum is not rounded once more
        total = torch.where(added > 0, offer(total + added), total)
    return total


def may_attend(module: nn.Module) -> bool:
    """Whether a module has what transformers' attention layers have: a place in the cache, or grouped heads."""
    return hasattr(module, "layer_idx") or hasattr(module, "num_key_value_groups")


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def causal_mask(num_queries: int, num_keys: int, device: torch.device, *, first: int) -> Tensor:
    """Bool [queries, keys]: query i attends to the keys up to number first + i."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(first)


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


# --- the registry, configs and caches of transformers, for the time of a block ----------------------------------------


def _configs(model: nn.Module) -> list[Any]:
    """Every config of the model that names an attention function, those above others first."""
    found: list[Any] = []

    def add(config: Any) -> None:
        if hasattr(config, "_attn_implementation") and not any(config is known for known in found):
            found.append(config)
            for key in getattr(config, "sub_configs", {}):
                add(getattr(config, key, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return found


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Attention step by step instead of torch's fused function, whose backward pass takes twice as long on a CPU.

    Scores of all heads are held at once, so that long texts are better off without.
    """
    with _asking_for("eager", [config for config in _configs(model) if config._attn_implementation == "sdpa"]):
        yield


@contextmanager
def _offering(configs: list[Any]) -> Iterator[None]:
    """Configs ask for our function."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)
    with _asking_for(IMPLEMENTATION, configs):
        yield


@contextmanager
def _asking_for(implementation: str, configs: list[Any]) -> Iterator[None]:
    """Configs name an attention function; afterwards what they named before."""
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = implementation
        yield
    finally:
        for config, known in zip(configs, before, strict=True):
            config._attn_implementation = known  # sets those below too, which come later in the list


@contextmanager
def _among_active(calls: AttentionCalls) -> Iterator[None]:
    token = _ACTIVE.set((*_ACTIVE.get(), calls))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def _calls_of(module: nn.Module | None) -> AttentionCalls | None:
    """The open context of the module's model."""
    return next((calls for calls in _ACTIVE.get() if module is not None and calls.name(module) is not None), None)


def _set_current(module: nn.Module, _: Any) -> None:
    _CURRENT.set(module)
    calls = _calls_of(module)
    if calls is not None:
        calls.took_from_cache(module)  # of an earlier call that ended early


@contextmanager
def _updates_offered() -> Iterator[None]:
    """Whatever an attention layer writes to a cache is offered on the way."""
    from transformers import Cache

    original = Cache.update

    def update(self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        module = _CURRENT.get()
        calls = _calls_of(module)
        if module is None or calls is None:
            return original(self, key_states, value_states, layer_idx, *args, **kwargs)

        def store(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
            all_k, all_v = original(self, k, v, layer_idx, *args, **kwargs)
            return all_k, all_v, int(self.get_seq_length(layer_idx))

        return calls.write(module, key_states, value_states, store)

    Cache.update = update
    try:
        yield
    finally:
        Cache.update = original
