"""A module that is not transformers', in the shape in which everything else takes a model.

    loaded = plain_model(my_gpt, tokenizer=tokenizer)
    plan = bitwright.optimize(model=loaded, budget=…)

What a search needs of a model beyond its forward is little, and this class says all of it:

    model(input_ids=…, use_cache=…, cache=…)   an object with .logits [sequences, length, vocabulary] and .cache
    get_output_embeddings()                    the nn.Linear that makes the logits, or None: then an unchanged copy of
                                               the model runs beside every plan as the reference
    get_input_embeddings()                     its weight has as many rows as there are token ids
    weight_sites()                             its sites (`models.sites.NamesItsSites`), here from its program
    value_sites(), unseen_values()             its values (`models.value_sites.NamesItsValues`), op by op
    offering(offer, names)                     in this context it runs as its program and offers them (`graph_run.py`)

The wrapped module is shared, not copied, and its parameters keep their names: sites of a plan are called as in the
module itself. A module has no cache that could be asked for, so that the "cache" is the ids seen so far, and generation
runs the whole text for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import ModelError
from bitwright.models.attention_calls import Offer
from bitwright.models.graph_run import GraphRun
from bitwright.models.graph_sites import find_graph_sites
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.models.site_file import sites_from_file
from bitwright.models.sites import Site
from bitwright.models.value_sites import PARTS, ValueSite

#: Computes logits [sequences, length, vocabulary] from ids [sequences, length].
LogitsOf = Callable[[nn.Module, Tensor], Tensor]
#: Sequences and tokens of the ids that a module is traced with, unless others are given.
_EXAMPLE_SHAPE = (2, 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainOutput:
    """What a `PlainModel` returns."""

    #: fp32 [sequences, length, vocabulary].
    logits: Tensor
    #: All ids so far, [sequences, length so far].
    cache: Tensor


class _Traced:
    """A module's program, traced when its values are first asked for; copies of a model share it."""

    def __init__(self, example_ids: Tensor) -> None:
        self._example_ids = example_ids
        self._found: GraphRun | str | None = None

    def __deepcopy__(self, memo: Any) -> _Traced:
        return self

    def run(self, module: nn.Module, logits: LogitsOf, sites: Sequence[Site], vocabulary: int) -> GraphRun | str:
        """The program; where there is none that can be trusted, why."""
        if self._found is None:
            try:
                self._found = GraphRun.of(module, self._example_ids, logits, sites, vocabulary)
            except ModelError as error:
                self._found = str(error)
        return self._found


@dataclass(frozen=True, kw_only=True, eq=False)
class _Offering:
    """An open context of a model."""

    model: PlainModel
    run: GraphRun
    offer: Offer
    names: Collection[str] | None

    def logits(self, ids: Tensor) -> Tensor:
        """Logits of the whole text, with values offered."""
        return self.run.logits(self.model.wrapped, ids, self.offer, self.names)


#: Contexts that are open.
_OFFERING: ContextVar[tuple[_Offering, ...]] = ContextVar("_OFFERING", default=())


class PlainModel(nn.Module):
    """Any module with logits, called as transformers' models are. It shares parameters and names with the module."""

    #: Its output is logits, whether or not a linear layer makes them.
    puts_out_logits = True

    def __init__(
        self,
        module: nn.Module,
        logits: LogitsOf,
        sites: tuple[Site, ...],
        vocabulary: int,
        num_positions: int | None,
        example_ids: Tensor,
    ) -> None:
        super().__init__()
        # the same dictionaries, so that whatever happens to one happens to both; a tuple hides the module from torch
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._modules = module._modules
        self._wrapped = (module,)
        self._logits = logits
        self._sites = sites
        self._vocabulary = vocabulary
        self._traced = _Traced(example_ids)
        self.config = None if num_positions is None else SimpleNamespace(max_position_embeddings=num_positions)
        self.train(module.training)

    @property
    def wrapped(self) -> nn.Module:
        """The module as it was given."""
        return self._wrapped[0]

    def forward(self, input_ids: Tensor, cache: Tensor | None = None, use_cache: bool = False, **_: Any) -> PlainOutput:
        """Logits of `input_ids`, which continue the ids in `cache`."""
        ids = input_ids if cache is None else torch.cat([cache, input_ids], dim=1)
        offered = next((offered for offered in reversed(_OFFERING.get()) if offered.model is self), None)
        logits = self._logits(self.wrapped, ids) if offered is None else offered.logits(ids)
        return PlainOutput(logits=logits[:, -input_ids.shape[1] :], cache=ids)

    def train(self, mode: bool = True) -> PlainModel:
        """Set the mode of the wrapped module too."""
        super().train(mode)
        self.wrapped.training = mode
        return self

    def weight_sites(self) -> tuple[Site, ...]:
        """The sites that were found when the module was wrapped."""
        return self._sites

    def value_sites(self) -> tuple[ValueSite, ...]:
        """The values that its program shows; none where it cannot be run as a program."""
        run = self._traced.run(self.wrapped, self._logits, self._sites, self._vocabulary)
        return () if isinstance(run, str) else run.values

    def unseen_values(self) -> Iterator[tuple[str, str]]:
        """Role, and what of it is no site, in one sentence."""
        run = self._traced.run(self.wrapped, self._logits, self._sites, self._vocabulary)
        name = type(self.wrapped).__name__
        if isinstance(run, str):
            reason = run
            yield from ((role, f"{name} shows no values: {reason}") for role, _ in PARTS.values())
            return
        yield "kv_cache", f"{name} keeps no keys and values from call to call"
        yield from run.left_out

    @contextmanager
    def offering(self, offer: Offer, names: Collection[str] | None) -> Iterator[None]:
        """Run as the program, for the time of the block, and offer the values of some sites; None: of all."""
        assert not any(offered.model is self for offered in _OFFERING.get()), "two contexts would share its values"
        run = self._traced.run(self.wrapped, self._logits, self._sites, self._vocabulary)
        if isinstance(run, str):
            yield
            return
        token = _OFFERING.set((*_OFFERING.get(), _Offering(model=self, run=run, offer=offer, names=names)))
        try:
            yield
        finally:
            _OFFERING.reset(token)

    def get_output_embeddings(self) -> nn.Module | None:
        """The nn.Linear with the head's weight; None where the head is something else."""
        return self._module_of("lm_head", nn.Linear)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding; where no nn.Embedding is, a stand-in without values that has its number of rows."""
        tables = [module for module in self.modules() if isinstance(module, nn.Embedding)]
        of_ids = [table for table in tables if table.num_embeddings == self._vocabulary]
        return of_ids[0] if of_ids else nn.Embedding(self._vocabulary, 1, device="meta")

    def _module_of(self, role: str, kind: type[nn.Module]) -> nn.Module | None:
        for site in self._sites:
            weight = self.get_parameter(site.parameter)
            for module in self.modules():
                if site.role == role and isinstance(module, kind) and getattr(module, "weight", None) is weight:
                    return module
        return None


def logits_of_output(module: nn.Module, ids: Tensor) -> Tensor:
    """Call a module with ids and find its logits: a tensor, the first of a tuple, `["logits"]`, or `.logits`."""
    output = module(ids)
    match output:
        case Tensor():
            return output
        case tuple() | list() if output and isinstance(output[0], Tensor):
            return output[0]
        case Mapping() if isinstance(output.get("logits"), Tensor):
            found: Tensor = output["logits"]
            return found
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"{type(module).__name__} returns a {type(output).__name__} without logits; pass logits=, a function of "
            "(module, ids) that returns them"
        )
    return logits


def plain_model(
    module: nn.Module,
    *,
    tokenizer: Any = None,
    name: str | None = None,
    logits: LogitsOf = logits_of_output,
    example_ids: Tensor | None = None,
    num_positions: int | None = None,
    site_file: Path | str | None = None,
) -> LoadedModel:
    """Wrap a module, so that everything that takes a model takes it.

    Args:
        module: becomes fp32, eval, without gradients, in place; shared, not copied.
        tokenizer: as of transformers; a search needs one to read its text.
        name: what plans call it; by default its class.
        logits: (module, ids [sequences, length]) → logits [sequences, length, vocabulary].
        example_ids: int64 [sequences, length] that the module is traced with; by default zeros.
        num_positions: the most tokens that it takes, if there is such a number.
        site_file: names the sites (`site_file.py`); the module is then not traced.

    Raises:
        ModelError: the module cannot be traced, nothing in it is a site, its logits have another shape, or its weights
            are not finite.
    """
    ids = torch.zeros(_EXAMPLE_SHAPE, dtype=torch.int64) if example_ids is None else example_ids
    module.float().eval().requires_grad_(False)
    notes: tuple[str, ...] = ()
    if site_file is not None:
        sites = sites_from_file(module, site_file)
    else:
        found = find_graph_sites(module, (ids,), call=logits)
        sites, notes = found.weights, tuple(kept.describe() for kept in found.kept)
    with torch.no_grad():
        shape = tuple(logits(module, ids).shape)
    if len(shape) != 3 or shape[:2] != tuple(ids.shape):
        raise ModelError(
            f"{type(module).__name__} gives logits of shape {list(shape)} for ids of shape {list(ids.shape)}, but "
            "[sequences, length, vocabulary] is needed; pass logits=, a function of (module, ids) that returns that"
        )
    model = PlainModel(module, logits, sites, vocabulary=shape[2], num_positions=num_positions, example_ids=ids)
    loaded = from_memory(model, tokenizer, name=type(module).__name__ if name is None else name)
    return replace(loaded, notes=(*loaded.notes, *notes))
