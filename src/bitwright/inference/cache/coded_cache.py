"""A KV cache of transformers that holds codes: FP8, INT8, INT4 per head, token or channel, as a plan says.

A `Cache` of transformers is a list of layers. `CodedLayer` is one that keeps what it is given as `token_codes.py` has
it, and gives back all values in the dtype of the model. Any new, empty and growing cache takes such layers, so that
whoever made it (`generate()`, a loop of one's own) need not know of it; `cache_bytes` says what it takes.

Layers that look back no further than a window forget what is behind it. Layers of a fixed size keep numbers: rounded
numbers, since values are rounded on their way in (`packed/value_hooks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from bitwright.inference.cache.token_codes import TokenCodes, coding_of
from bitwright.inference.emulation.values import Fallbacks, ValueRule
from bitwright.inference.fallback import Fallback
from bitwright.models.attention_calls import may_attend


class CodedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, as codes.

    Args:
        k_rule, v_rule: how they are kept; None: as they are.
        window: how many tokens back the layer looks, itself included; None: all.
        fallbacks: what happens to tokens whose keys, or values, overflow; None: they saturate.
    """

    def __init__(
        self,
        k_rule: ValueRule | None,
        v_rule: ValueRule | None,
        window: int | None,
        fallbacks: tuple[Fallback | None, Fallback | None] = (None, None),
    ) -> None:
        super().__init__()
        self.fallbacks = fallbacks
        self.k_rule, self.v_rule, self.window = k_rule, v_rule, window
        self.is_sliding = window is not None
        self.codes: tuple[TokenCodes, TokenCodes] | None = None
        #: Tokens that have come so far, and those that stand first in each store and are not looked at any more.
        self.num_seen = 0
        self._hidden = [0, 0]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the stores, now that widths and device are known."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self.codes = (
            TokenCodes(coding_of(self.k_rule, "k", key_states.shape[-1], self.device), self.fallbacks[0]),
            TokenCodes(coding_of(self.v_rule, "v", value_states.shape[-1], self.device), self.fallbacks[1]),
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep new keys and values [B, H, T, D], and give all that attention may look at."""
        if self.codes is None:
            self.lazy_initialization(key_states, value_states)
        assert self.codes is not None
        self.num_seen += key_states.shape[-2]
        found = []
        for place, (store, new) in enumerate(zip(self.codes, (key_states, value_states), strict=True)):
            store.append(new)
            found.append(store.read(new.dtype)[..., self._hidden[place] :, :])
        self._forget()
        return found[0], found[1]

    def get_seq_length(self) -> int:
        """Tokens that have come so far."""
        return self.num_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what attention looks at, once `query_length` tokens more have come."""
        kept = self.num_seen if self.window is None else min(self.num_seen, self.window - 1)
        return kept + query_length, self.num_seen - kept

    def get_max_length(self) -> int:
        """The most tokens that are kept; −1: no limit."""
        return -1 if self.window is None else self.window

    def reset(self) -> None:
        """Forget everything."""
        self.codes, self.num_seen, self._hidden, self.is_initialized = None, 0, [0, 0], False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; their number is negative, as transformers has it."""
        if tokens_to_remove == 0 or self.codes is None:
            return
        if tokens_to_remove > 0 or (self.window is not None and self.num_seen >= self.window):
            raise ValueError(
                f"cannot crop {tokens_to_remove} tokens: give a negative number, and no window that slid already"
            )
        self.num_seen = max(0, self.num_seen + tokens_to_remove)
        for store, hidden in zip(self.codes, self._hidden, strict=True):
            store.keep(0, self.num_seen + hidden)

    def remember(self) -> Callable[[], None]:
        """What brings the layer back to what it holds now, whatever has come or was forgotten since."""
        assert self.codes is not None
        seen, hidden, undo = self.num_seen, list(self._hidden), [store.remember() for store in self.codes]

        def bring_back() -> None:
            self.num_seen, self._hidden = seen, list(hidden)
            for bring_store_back in undo:
                bring_store_back()

        return bring_back

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The sequences of a beam search in another order."""
        self._change(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence several times."""
        self._change(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some sequences alone."""
        self._change(lambda part: part[indices, ...])

    @property
    def nbytes(self) -> int:
        """Bytes of all codes, scales and numbers."""
        return 0 if self.codes is None else sum(store.nbytes for store in self.codes)

    def _change(self, change: Any) -> None:
        for store in self.codes or ():
            store.change(change)

    def _forget(self) -> None:
        if self.window is None or self.codes is None:
            return
        for place, store in enumerate(self.codes):
            first = max(0, store.num_tokens - self.window + 1)
            self._hidden[place] = store.keep(first, store.num_tokens)


def coded_cache(
    model: nn.Module, kwargs: Mapping[str, Any], rules: Mapping[str, ValueRule], fallbacks: Fallbacks
) -> Any:
    """The cache of a forward, with layers of codes; None where it has none, or one that keeps its own.

    Args:
        model: whose forward it is.
        kwargs: of that forward; a cache is made where it would make one itself.
        rules: value site → rule; those of caches count.
        fallbacks: what happens to tokens that overflow.
    """
    cache = kwargs.get(cache_argument(kwargs))
    if cache is None and _makes_a_cache(model, kwargs):
        cache = DynamicCache(config=model.config)
    if cache is None or not hasattr(cache, "layers"):
        return None
    if any(isinstance(layer, CodedLayer) for layer in cache.layers):
        return cache
    return cache if _give_codes(cache, model, rules, fallbacks) else None


def cache_argument(kwargs: Mapping[str, Any]) -> str:
    """What a forward calls its cache: the old name where a caller still uses it."""
    return "past_key_values" if kwargs.get("past_key_values") is not None else "cache"


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache, of codes or not."""
    total = 0
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, CodedLayer):
            total += layer.nbytes
        else:
            tensors = [t for t in (layer.keys, layer.values) if isinstance(t, Tensor)]
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return total


def _makes_a_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    config: Any = getattr(model, "config", None)
    asked = kwargs.get("use_cache")
    wanted = getattr(config, "use_cache", False) if asked is None else asked
    return bool(wanted) and not model.training and not torch.is_grad_enabled() and config is not None


def _give_codes(cache: Any, model: nn.Module, rules: Mapping[str, ValueRule], fallbacks: Fallbacks) -> bool:
    """Put layers of codes into a cache that is empty and grows; whether it could be done for all layers in question."""
    wanted = _rules_of_layers(model, rules)
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= max(wanted):
            cache.layers.append(cache.layer_class_to_replicate())
    made = {}
    for index, (name, k_rule, v_rule) in wanted.items():
        layer = cache.layers[index] if index < len(cache.layers) else None
        if layer is None or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.is_initialized:
            return False
        of_layer = fallbacks.get((f"{name}:k_cache", "k")), fallbacks.get((f"{name}:v_cache", "v"))
        made[index] = CodedLayer(k_rule, v_rule, getattr(layer, "sliding_window", None), of_layer)
    for index, layer in made.items():
        cache.layers[index] = layer
    return True


def _rules_of_layers(
    model: nn.Module, rules: Mapping[str, ValueRule]
) -> dict[int, tuple[str, ValueRule | None, ValueRule | None]]:
    """Index of a layer in the cache → its module, and the rules of its keys and values."""
    found = {}
    for name, module in model.named_modules():
        k_rule, v_rule = rules.get(f"{name}:k_cache"), rules.get(f"{name}:v_cache")
        if may_attend(module) and (k_rule is not None or v_rule is not None):
            found[int(module.layer_idx)] = name, k_rule, v_rule
    return found
