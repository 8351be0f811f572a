"""Every place where a value, rather than a weight, has a precision: what a model computes, and what it keeps.

    model.layers.0.self_attn:k_cache              keys as the cache holds them                     state
    model.layers.0.self_attn:qk                   operands of q·k
    model.layers.0.self_attn:softmax              exp(score − max), and …:softmax_sum, their sum
    model.layers.0.self_attn:pv                   operands of p·v
    model.layers.0.self_attn:output               what attention returns
    model.layers.0.mlp:gate, :up or :gate_up      outputs of the first products
    model.layers.0.mlp:act                        output of the activation function
    model.layers.0.mlp:down                       output of the last product
    model.layers.0.input_layernorm:norm           input and output of a norm
    model.layers.0:residual                       every sum of the residual stream inside a layer
    model.layers.0.mlp.gate:logits                what a router chooses experts by

A site exists if its value was seen: the model is run once on a few tokens, and whatever passes is a site, with the
shape that it had. So nothing is guessed; what should have passed and did not is listed by `values_left_out`. A model
that takes no token ids cannot be run so, and has no value sites. A plain module's are read off its program instead
(`NamesItsValues`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bitwright.models.sites import Site, find_sites
from bitwright.models.value_calls import ATTENTION_PARTS, ValueCalls, activations_of, products_of

#: Part of a site's name → (role, kind).
PARTS: Mapping[str, tuple[str, Literal["activation", "state"]]] = {
    "k_cache": ("kv_cache", "state"),
    "v_cache": ("kv_cache", "state"),
    "qk": ("attn.qk", "activation"),
    "softmax": ("attn.softmax", "activation"),
    "softmax_sum": ("attn.softmax_sum", "activation"),
    "pv": ("attn.pv", "activation"),
    "output": ("attn.output", "activation"),
    "gate": ("mlp.up", "activation"),
    "up": ("mlp.up", "activation"),
    "gate_up": ("mlp.up", "activation"),
    "act": ("mlp.act", "activation"),
    "down": ("mlp.down", "activation"),
    "norm": ("norm", "activation"),
    "residual": ("residual", "activation"),
    "logits": ("router", "activation"),
}
#: Part → operands that are rounded there; "y" where a part is not listed.
OPERANDS: Mapping[str, tuple[str, ...]] = {
    "k_cache": ("k",),
    "v_cache": ("v",),
    "qk": ("q", "k"),
    "softmax": ("p",),
    "softmax_sum": ("sum",),
    "pv": ("p", "v"),
    "output": ("o",),
    "norm": ("input", "output"),
    "residual": ("h",),
}
#: Parts whose last dimension is the text's length (or one number), so that a site has heads but no width.
_PER_HEAD_ONLY = frozenset({"softmax", "softmax_sum"})
#: Tokens that the model is run on to see its values.
_NUM_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSite:
    """One place where values have a precision of their own."""

    #: Unique in the model: "<module>:<part>".
    name: str
    #: "activation": computed and used up; "state": kept from token to token.
    kind: Literal["activation", "state"]
    #: attn.qk, attn.softmax, attn.softmax_sum, attn.pv, attn.output, mlp.up, mlp.act, mlp.down, norm, residual,
    #: kv_cache, router.
    role: str
    #: Dotted name of the module that computes or keeps the values.
    module: str
    #: Sites of one group share a scheme; None for all that an engine does not tie.
    tied_group: str | None
    #: Heads of the values (query heads at q·k and p·v, key heads in caches); 1 outside attention.
    num_heads: int
    #: Numbers of one token in one head; 1 where they are as many as the text has tokens. Outside attention the width.
    head_dim: int
    #: Number of the layer; None outside layers.
    layer: int | None
    #: Tokens that a cache holds at most, where attention looks back no further; None where it keeps all.
    window: int | None = None

    @property
    def part(self) -> str:
        """What of the module it is: the end of the name."""
        return self.name.rpartition(":")[2]

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the values that are rounded there."""
        return OPERANDS.get(self.part, ("y",))

    @property
    def width(self) -> int:
        """Numbers of one token."""
        return self.num_heads * self.head_dim

    @property
    def shape(self) -> tuple[int, int]:
        """(num_heads, head_dim)."""
        return self.num_heads, self.head_dim


@runtime_checkable
class NamesItsValues(Protocol):
    """A model that knows its own value sites, since they cannot be read off its modules."""

    def value_sites(self) -> tuple[ValueSite, ...]:
        """Every value site, in forward order."""

    def unseen_values(self) -> Iterable[tuple[str, str]]:
        """Role, and what of it is no site, in one sentence."""


def find_value_sites(model: nn.Module) -> tuple[ValueSite, ...]:
    """Every value site of a model, layer by layer in forward order. Runs the model on a few tokens.

    Raises:
        ModelError: the model has no linear layer at all.
    """
    if isinstance(model, NamesItsValues):
        return model.value_sites()
    sites: dict[str, ValueSite] = {}
    for name, shape in _values_seen(model, find_sites(model)).items():
        module, _, part = name.rpartition(":")
        role, kind = PARTS[part]
        heads, head_dim = (shape[1], shape[3]) if part in ATTENTION_PARTS else (1, shape[-1])
        numbered = re.search(r"(?:^|\.)(\d+)(?=\.|$)", module)
        sites[name] = ValueSite(
            name=name,
            kind=kind,
            role=role,
            module=module,
            tied_group=None,
            num_heads=heads,
            head_dim=1 if part in _PER_HEAD_ONLY else head_dim,
            layer=int(numbered.group(1)) if numbered else None,
            window=_window(model, module) if kind == "state" else None,
        )
    return tuple(sites.values())


def values_left_out(model: nn.Module, roles: Collection[str] | None = None) -> tuple[str, ...]:
    """What should have been seen and was not, one sentence each: nothing can be chosen there.

    Args:
        model: as `find_value_sites` takes it; run on a few tokens.
        roles: of value sites that are asked about; None: all.
    """
    asked = frozenset(role for role, _ in PARTS.values()) if roles is None else frozenset(roles)
    if not asked:
        return ()
    if isinstance(model, NamesItsValues):
        return tuple(dict.fromkeys(sentence for role, sentence in model.unseen_values() if role in asked))
    if not _takes_token_ids(model):
        return (f"{type(model).__name__} takes no input_ids, so that it cannot be run to see its values",)
    weights = find_sites(model)
    seen = _values_seen(model, weights)
    left_out = [sentence for role, sentence in _unseen(model, weights, seen) if role in asked]
    return tuple(dict.fromkeys(left_out))


def _unseen(model: nn.Module, weights: tuple[Site, ...], seen: Collection[str]) -> Iterator[tuple[str, str]]:
    """Role, and what was expected of it and not seen."""
    reached = {name.rpartition(":")[0] for name in seen if name.endswith(":qk")}
    projections = {site.module.rpartition(".")[0] for site in weights if site.role in ("attn.q", "attn.qkv")}
    for module in sorted(projections - reached):
        sentence = (
            f"{module}: its attention does not go through transformers' attention registry, so that inner products, "
            "softmax and cache cannot be seen"
        )
        yield from ((PARTS[part][0], sentence) for part in ATTENTION_PARTS)
    if projections and not any(name.endswith(":residual") for name in seen):
        yield (
            "residual",
            "the residual stream: no list of modules has layers with attention in which its sums could be told",
        )
    products = products_of(model, weights)
    for name in products:
        if name not in seen:
            role = PARTS[name.rpartition(":")[2]][0]
            yield role, f"{name}: not computed by a function that can be watched (linear, addmm)"
    acting = {name.rpartition(":")[0] for name in activations_of(model, products)}
    up = {name.rpartition(":")[0] for name in products if PARTS[name.rpartition(":")[2]][0] == "mlp.up"}
    for module in sorted(up - acting):
        yield "mlp.act", f"{module}:act: its activation function is no module of its own"


def _values_seen(model: nn.Module, weights: tuple[Site, ...]) -> dict[str, tuple[int, ...]]:
    """Site name → shape of its first operand, in the order in which they were offered; of p·v with the width of v."""
    seen: dict[str, tuple[int, ...]] = {}

    def note(name: str, operand: str, value: Tensor) -> Tensor:
        shape = seen.setdefault(name, tuple(value.shape))
        if name.endswith(":pv"):
            seen[name] = (*shape[:3], value.shape[-1])
        return value

    if _takes_token_ids(model):
        with torch.no_grad(), ValueCalls(model, note, sites=weights):
            _run_briefly(model)
    return seen


def _takes_token_ids(model: nn.Module) -> bool:
    return "input_ids" in inspect.signature(model.forward).parameters


def _window(model: nn.Module, module: str) -> int | None:
    """How far back an attention layer looks: the layer's own statement."""
    window = getattr(model.get_submodule(module), "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None


def _run_briefly(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    device = next(model.parameters()).device
    ids = (torch.arange(_NUM_TOKENS, device=device) % getattr(config, "vocab_size", _NUM_TOKENS)).unsqueeze(0)
    inputs = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    model(**inputs)
