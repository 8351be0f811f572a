"""Taking steps of generation back: a cache as it was before them.

Layers that keep every token forget the last ones. Layers with a window have dropped, or overwritten, what stood at its
far end, so that it has to be remembered before a step:

    grows, keeps all               nothing: its last tokens are cropped
    grows, forgets behind it       what it held: a step puts new tensors in its place, so that to hold the old is enough
    fixed size                     a copy of its window, which a step overwrites

Of layers of other kinds (states of linear attention, caches of somebody's own) nothing is known, and no step is taken
back there (`can_step_back`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from bitwright.inference.cache.coded_cache import CodedLayer

#: Takes so many tokens back.
Undo = Callable[[int], None]


def can_step_back(cache: Any) -> bool:
    """Whether steps can be taken back in every layer."""
    return all(type(layer) in _REMEMBER for layer in getattr(cache, "layers", (None,)))


def remember(cache: Any) -> tuple[Undo, ...]:
    """What takes back the step that comes, and those after it; for caches that can step back."""
    return tuple(_REMEMBER[type(layer)](layer) for layer in cache.layers if layer.is_initialized)


def step_back(before: Sequence[Undo], num_tokens: int) -> None:
    """Bring a cache back to where it was remembered, `num_tokens` ago."""
    for undo in before:
        undo(num_tokens)


def _by_cropping(layer: Any) -> Undo:
    return lambda num_tokens: layer.crop(-num_tokens)


def _by_what_it_held(layer: DynamicSlidingWindowLayer) -> Undo:
    keys, values, length = layer.keys, layer.values, layer.cumulative_length

    def undo(num_tokens: int) -> None:
        layer.keys, layer.values, layer.cumulative_length = keys, values, length

    return undo


def _by_a_copy(layer: StaticSlidingWindowLayer) -> Undo:
    tensors = (layer.keys, layer.values, layer.cumulative_length)
    copies, length = [tensor.clone() for tensor in tensors], layer.cumulative_length_int

    def undo(num_tokens: int) -> None:
        for tensor, copied in zip(tensors, copies, strict=True):
            tensor.copy_(copied)  # in place: compiled models know where it lies
        layer.cumulative_length_int = length

    return undo


def _by_its_codes(layer: CodedLayer) -> Undo:
    return _by_cropping(layer) if layer.window is None else partial(_ignoring_number, layer.remember())


def _ignoring_number(undo: Callable[[], None], num_tokens: int) -> None:
    undo()


#: Kind of layer → what remembers it.
_REMEMBER: dict[type, Callable[[Any], Undo]] = {
    DynamicLayer: _by_cropping,
    StaticLayer: _by_cropping,
    DynamicSlidingWindowLayer: _by_what_it_held,
    StaticSlidingWindowLayer: _by_a_copy,
    CodedLayer: _by_its_codes,
}
