"""Every place of a model where a weight's precision is chosen, under one name.

A site is a matrix ``W`` of shape [out, in] with ``y = x Wᵀ``: a linear layer, the q rows of a fused qkv, one expert's
down projection, the embedding. Sites are found from module types, parameter shapes and the model's config, plus the
table in names.py; there is no branch on an architecture.

    model.layers.0.self_attn.q_proj                a linear layer
    transformer.h.0.attn.c_attn[q]                 rows of a fused matrix; q, k and v share a tied_group
    model.layers.0.mlp.experts.3.gate_up[gate]     rows of one expert's matrix inside a 3-D parameter
    model.layers.0.mlp.experts.3.down              one expert's matrix
    lm_head                                        the head; if it is the embedding too: one site with two uses

Norms, biases and position embeddings are no sites, nor are layers that hold packed codes: their precision is chosen. A
linear layer that no row of the table knows has role ``other``; none is dropped.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from bitwright.errors import ModelError
from bitwright.models.names import (
    EXPERT_PARAMETERS,
    EXPERT_ROLES,
    FORWARD_ORDER,
    FUSED_ROWS,
    INTERLEAVED_QKV,
    LINEAR_ROLES,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One weight matrix (or some rows of one) whose precision is chosen on its own."""

    #: Unique in the model: the module's dotted name, for parts followed by ``[q]`` or ``.3.down``.
    name: str
    #: What is stored there. Only weights so far.
    kind: Literal["weight"]
    #: attn.q, attn.k, attn.v, attn.qkv, attn.out, mlp.gate, mlp.up, mlp.down, router, expert.*,
    #: embedding, lm_head, other.
    role: str
    #: Dotted name of the module that computes with the parameter (the head, where head and embedding are tied).
    module: str
    #: Dotted name in ``model.named_parameters()``.
    parameter: str
    #: Rows [first, last) of the [out, in] matrix that this site covers; None means all.
    rows: tuple[int, int] | None
    #: Index into dim 0 of a 3-D parameter; None for a matrix.
    expert: int | None
    #: True if the parameter is stored [in, out] (Conv1D, some experts).
    transposed: bool
    #: Name of the fused matrix whose rows this site is a part of: its sites share a scheme where an engine fuses them.
    tied_group: str | None
    #: [out_features, in_features] of this site.
    shape: tuple[int, int]
    #: Dotted names of all modules that use this weight.
    uses: tuple[str, ...]

    @property
    def num_weights(self) -> int:
        """Number of weights the site covers."""
        return self.shape[0] * self.shape[1]


@runtime_checkable
class NamesItsSites(Protocol):
    """A model that knows its own weight sites, since they cannot be read off its modules."""

    def weight_sites(self) -> tuple[Site, ...]:
        """Every weight site, in the order that `find_sites` promises."""


def find_sites(model: nn.Module, site_file: Path | str | None = None) -> tuple[Site, ...]:
    """Return every weight site: the decoder's linear layers in forward order, then the embedding, then the head.

    Tied weights are one site; ``uses`` names every module that computes with them. With ``site_file`` the sites are
    those that it names, and no others (`site_file.py`). Raises ModelError, listing the modules seen and how to name
    sites by hand, for a model in which nothing is linear, and for a file that does not fit the model.
    """
    if site_file is not None:
        from bitwright.models.site_file import sites_from_file

        return sites_from_file(model, site_file)
    if isinstance(model, NamesItsSites):
        return model.weight_sites()
    config = _text_config(model)
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    uses = uses_of(model)
    embedding, head = _embedding_and_head(model, config)

    decoder: list[Site] = []
    ends: dict[int, Site] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for site in _sites_of_module(module_name, module, config, embedding, head):
            parameter = model.get_parameter(site.parameter)
            entry = replace(site, parameter=parameter_names[id(parameter)], uses=tuple(uses[id(parameter)]))
            if site.role in ("embedding", "lm_head"):
                # named_modules gives the embedding first: a tied head replaces it and becomes the one site
                if site.role == "lm_head" or id(parameter) not in ends:
                    ends[id(parameter)] = entry
            elif id(parameter) not in seen:
                decoder.append(entry)
        seen.update(id(parameter) for parameter in module.parameters(recurse=False))

    if not decoder and not any(site.role == "lm_head" for site in ends.values()):
        raise no_sites_error(model)
    return (*_in_forward_order(decoder), *sorted(ends.values(), key=lambda site: site.role == "lm_head"))


def no_sites_error(model: nn.Module, remarks: Sequence[str] = ()) -> ModelError:
    """The error for a model in which no site was found: the modules seen, and how to name sites by hand.

    Args:
        model: where nothing was found.
        remarks: what is known of its matrices.
    """
    leaves = [(name, type(module).__name__) for name, module in model.named_modules() if not list(module.children())]
    kinds = ", ".join(f"{kind} x{count}" for kind, count in sorted(Counter(kind for _, kind in leaves).items()))
    matrices = [f"{name} {list(p.shape)}" for name, p in model.named_parameters() if p.dim() >= 2]
    shown = "; ".join([*remarks[:3], f"matrices: {', '.join(matrices[:6]) or 'none'}{', …' * (len(matrices) > 6)}"])
    return ModelError(
        f"{type(model).__name__} has no linear layer to quantise (modules seen: {kinds or 'none'}); {shown}; pass a "
        'causal language model, or name its sites in a file given by --sites: [[site]] with module = "blocks.*.fc1" '
        'or parameter = "blocks.*.w", and role = "other"'
    )


def site_weight(model: nn.Module, site: Site) -> Tensor:
    """Return the site's weight as an [out, in] view of the parameter (no copy; writing to it changes the model)."""
    try:
        weight: Tensor = model.get_parameter(site.parameter)
    except AttributeError as error:
        raise ModelError(
            f"the model has no parameter {site.parameter!r}, which site {site.name!r} needs; "
            "use sites that find_sites returned for this very model"
        ) from error
    if site.expert is not None:
        weight = weight[site.expert]
    if site.transposed:
        weight = weight.T
    if site.rows is not None:
        weight = weight[site.rows[0] : site.rows[1]]
    if tuple(weight.shape) != site.shape:
        raise ModelError(
            f"site {site.name!r} has shape {list(site.shape)}, but the model's weight there is {list(weight.shape)}; "
            "use sites that find_sites returned for this very model"
        )
    return weight


# --- one module → its sites ------------------------------------------------------------------------------------------


def _sites_of_module(
    name: str, module: nn.Module, config: Any, embedding: nn.Module | None, head: nn.Module | None
) -> Iterator[Site]:
    if has_codes(module):
        # its precision is chosen; experts are asked parameter by parameter
        yield from _experts(name, module, config)
    elif module is embedding:
        yield _matrix(name, module, "embedding")
    elif module is head:
        yield _matrix(name, module, "lm_head")
    elif isinstance(module, nn.Linear):
        yield from _split(_matrix(name, module, role_of(name)), config)
    elif _is_conv1d(module):
        yield from _split(_matrix(name, module, role_of(name), transposed=True), config)
    else:
        yield from _router(name, module)
        yield from _experts(name, module, config)


def has_codes(module: nn.Module) -> bool:
    """Whether packed codes (`inference/packed`) stand where a module had a weight."""
    return any(getattr(child, "holds_codes", False) for child in module.children())


def _matrix(name: str, module: nn.Module, role: str, *, transposed: bool = False) -> Site:
    weight = module._parameters.get("weight")
    if weight is None:
        raise ModelError(
            f"the weight of '{name}', a {type(module).__name__}, is no parameter but computed from others; take that "
            "off first: torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
        )
    rows, columns = weight.shape
    return Site(
        name=name,
        kind="weight",
        role=role,
        module=name,
        parameter=f"{name}.weight" if name else "weight",
        rows=None,
        expert=None,
        transposed=transposed,
        tied_group=None,
        shape=(columns, rows) if transposed else (rows, columns),
        uses=(name,),
    )


def _router(name: str, module: nn.Module) -> Iterator[Site]:
    """A router that is no nn.Linear but holds a [experts, hidden] weight of its own."""
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 2 and role_of(name) == "router":
        yield _matrix(name, module, "router")


def _experts(name: str, module: nn.Module, config: Any) -> Iterator[Site]:
    """3-D parameters [experts, out, in] ([experts, in, out] where the module says is_transposed)."""
    known = {parameter: (short, role) for parameter, short, role in EXPERT_PARAMETERS}
    transposed = bool(getattr(module, "is_transposed", False))
    for parameter_name, parameter in module.named_parameters(recurse=False):
        is_expert_list = parameter_name in known or name.rpartition(".")[2] == "experts"
        if parameter.dim() != 3 or not is_expert_list:
            continue
        short, role = known.get(parameter_name, (parameter_name, "other"))
        num_experts, first, second = parameter.shape
        for expert in range(num_experts):
            whole = Site(
                name=f"{name}.{expert}.{short}",
                kind="weight",
                role=role,
                module=name,
                parameter=f"{name}.{parameter_name}",
                rows=None,
                expert=expert,
                transposed=transposed,
                tied_group=None,
                shape=(second, first) if transposed else (first, second),
                uses=(name,),
            )
            # an interleaved gate and up (gpt_oss) has no row range that is one of them
            yield from _split(whole, config) if getattr(module, "is_concatenated", True) else (whole,)


def _split(whole: Site, config: Any) -> Iterator[Site]:
    """Divide a fused matrix into its row ranges; anything else, or rows that do not add up, stays whole."""
    fusion = FUSED_ROWS.get(whole.role)
    counts: list[int] | None = None
    if fusion is not None:
        counts = _head_rows(config) if fusion.rows == "heads" else [whole.shape[0] // 2] * 2
    if fusion is None or counts is None or sum(counts) != whole.shape[0]:
        yield whole
        return
    first = 0
    for part, role, count in zip(fusion.parts, fusion.roles, counts, strict=True):
        yield replace(
            whole,
            name=f"{whole.name}[{part}]",
            role=role,
            rows=(first, first + count),
            tied_group=whole.name,
            shape=(count, whole.shape[1]),
        )
        first += count


def _head_rows(config: Any) -> list[int] | None:
    """Rows of q, k and v: heads · head_dim, kv_heads · head_dim twice; None if the config does not say."""
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not isinstance(heads, int) or getattr(config, "model_type", None) in INTERLEAVED_QKV:
        return None
    head_dim = getattr(config, "head_dim", None) or (hidden // heads if isinstance(hidden, int) else None)
    if head_dim is None:
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]


# --- names, types, order ---------------------------------------------------------------------------------------------


def role_of(name: str) -> str:
    """Role of a linear layer by its dotted name; ``other`` where no row of the table knows it."""
    parts = name.split(".")
    role = "other"
    for pattern, candidate in LINEAR_ROLES:
        if fnmatchcase(".".join(parts[-1 - pattern.count(".") :]), pattern):
            role = candidate
            break
    return EXPERT_ROLES.get(role, role) if "experts" in parts[:-1] else role


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer stored [in, out]. A model that has one has imported its module."""
    defining = sys.modules.get("transformers.pytorch_utils")
    return defining is not None and isinstance(module, defining.Conv1D)


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _embedding_and_head(model: nn.Module, config: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """The token embedding and the output head, as the model itself declares them, else None."""
    declared: Any = model
    embedding = declared.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    head = declared.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if embedding is None:
        vocabulary = getattr(config, "vocab_size", None)
        tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == vocabulary]
        embedding = tables[0] if tables else None
    return (
        embedding if isinstance(embedding, nn.Embedding) else None,
        head if isinstance(head, nn.Linear) else None,
    )


def uses_of(model: nn.Module) -> dict[int, list[str]]:
    """id of a parameter → names of the modules that hold it, in order."""
    uses: dict[int, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            names = uses.setdefault(id(parameter), [])
            if module_name not in names:
                names.append(module_name)
    return uses


def _in_forward_order(sites: list[Site]) -> list[Site]:
    """Layers in order of appearance; inside a numbered layer by role, experts one after the other, else as declared."""
    layer_rank: dict[str, int] = {}
    keys: dict[str, tuple[int, int, int]] = {}
    for site in sites:
        numbered = re.match(r"(.*?\.)?\d+(?=\.)", site.name)
        layer = numbered.group(0) if numbered else site.name
        family = "expert" if site.role.startswith("expert.") else site.role
        role = FORWARD_ORDER.index(family) if numbered else 0
        keys[site.name] = (layer_rank.setdefault(layer, len(layer_rank)), role, site.expert or 0)
    return sorted(sites, key=lambda site: keys[site.name])
