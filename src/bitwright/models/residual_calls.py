"""The residual stream: the chain of sums that starts with a layer's input.

A layer adds its branches to what it was given: x + attention, then that + mlp. Modules do not show these sums, but
every function call of torch can be watched, and a sum belongs to the stream if one of its operands *is* the stream so
far: the layer's input, or the last such sum. So sequential and parallel blocks are found alike, with and without norms
behind their branches. Where a layer ends on something else (a norm behind the sum), its output is the stream's next
value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bitwright.models.attention_calls import Offer

_SUMS = frozenset({torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__})


class ResidualCalls(TorchFunctionMode):
    """Context in which every value of the residual stream inside the given layers is offered.

    Args:
        layers: site name → layer. Operand: "h", [..., hidden].
        offer: sees a value, and says what is used in its place.
    """

    def __init__(self, layers: Mapping[str, nn.Module], offer: Offer) -> None:
        super().__init__()
        self._layers = layers
        self._offer = offer
        self._site: str | None = None
        self._stream: Any = None
        self._handles: list[Any] = []

    def __enter__(self) -> ResidualCalls:
        for name, layer in self._layers.items():
            self._handles.append(layer.register_forward_pre_hook(self._begin(name), with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._end))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._site = self._stream = None

    def _begin(self, name: str) -> Any:
        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._site = name
            self._stream = args[0] if args else kwargs.get("hidden_states")

        return begin

    def _end(self, _: nn.Module, __: Any, output: Any) -> Any:
        site, self._site = self._site, None
        last = output[0] if isinstance(output, tuple) else output
        if site is None or last is self._stream or not isinstance(last, Tensor):
            return None
        offered = self._offer(site, "h", last)
        return (offered, *output[1:]) if isinstance(output, tuple) else offered

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._site is None or func not in _SUMS or not any(operand is self._stream for operand in args[:2]):
            return result
        self._stream = self._offer(self._site, "h", result)
        return self._stream
