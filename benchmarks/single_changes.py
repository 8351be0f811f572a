"""The KL of single changes, measured: only the layers from the change on are run, and small KLs are not lost.

A change of one site costs 1e-6 nats and less. Σ p (log p − log q) in fp32 cannot tell that from the rounding of its
logarithms: their sums are off by 1e-6 each. With d = log p − log q the same KL is

    Σ_v p_v (exp(−d_v) − 1 + d_v)

since Σ q = Σ p. No term is negative, and what shifts all d alike enters squared. Reference and change run the same
text in the same batches, so that nothing but the change differs; `floor` is what another order of summation makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

#: Tokens over which the KL is averaged before its standard error is told: those of one block go together.
_BLOCK_TOKENS = 32


class SingleChanges:
    """Measures changes of a decoder on one text, each from its own layer on.

    Args:
        model: fp32, a transformers decoder with its layers at `model.layers`, each of which returns hidden states.
        input_ids: int64 [sequences, length]; all of it is run at once.
    """

    def __init__(self, model: Any, input_ids: Tensor) -> None:
        self._model = model
        self._layers = model.model.layers
        self._ids = input_ids
        #: Layer → its input, fp32 [sequences, length, hidden].
        self._inputs: list[Tensor] = []
        with torch.no_grad(), ExitStack() as stack:
            for layer in self._layers:
                hook = layer.register_forward_pre_hook(self._keep_input, with_kwargs=True)
                stack.callback(hook.remove)
            logits = model(input_ids=input_ids, use_cache=False).logits
        self._log_p = torch.stack([of_sequence[:-1].log_softmax(-1) for of_sequence in logits])

    def token_kl(self, first_layer: int = 0) -> Tensor:
        """KL of every predicted token under the model as it is now, fp64 [sequences, length − 1].

        Args:
            first_layer: layers before it are as they were.
        """
        with torch.no_grad(), self._skipped(first_layer):
            logits = self._model(inputs_embeds=self._inputs[first_layer], use_cache=False).logits
        return torch.stack([_token_kl(log_p, now) for log_p, now in zip(self._log_p, logits, strict=True)])

    def floor(self) -> float:
        """Mean KL of the unchanged model, one sequence at a time, to itself."""
        with torch.no_grad():
            kls = [
                _token_kl(log_p, self._model(input_ids=ids[None], use_cache=False).logits[0])
                for log_p, ids in zip(self._log_p, self._ids, strict=True)
            ]
        return float(torch.stack(kls).mean())

    def _keep_input(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inputs.append((args[0] if args else kwargs["hidden_states"]).clone())

    @contextmanager
    def _skipped(self, first_layer: int) -> Iterator[None]:
        """Layers before the first hand on what they are given."""
        skipped = list(self._layers)[:first_layer]
        for layer in skipped:
            layer.forward = _hand_on
        try:
            yield
        finally:
            for layer in skipped:
                del layer.forward


def layer_of(site_name: str) -> int:
    """Number of the layer that a site lies in."""
    found = re.search(r"\.layers\.(\d+)", f".{site_name}")
    assert found is not None, site_name
    return int(found.group(1))


def mean_and_error(token_kl: Tensor) -> tuple[float, float]:
    """Mean of the tokens' KLs and its relative standard error, from means over blocks of neighbouring tokens."""
    blocks = token_kl.flatten().tensor_split(max(2, token_kl.numel() // _BLOCK_TOKENS))
    means = torch.stack([block.mean() for block in blocks])
    mean = float(token_kl.mean())
    return mean, float(means.std() / len(means) ** 0.5) / max(mean, 1e-300)


def _hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _token_kl(log_p: Tensor, logits: Tensor) -> Tensor:
    d = log_p - logits[:-1].log_softmax(-1)
    return (log_p.exp() * (torch.expm1(-d) + d)).sum(-1).double()
