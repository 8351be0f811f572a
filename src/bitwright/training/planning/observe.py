"""One short run of a model, looked at: its products under every recipe, gradients, norms, loss and updates.

A few batches go forward and backward in fp32, the reference. Every linear layer is watched (`observe_product.py`).
Beside that: gradients of all parameters and their squares, what norms read, the loss in bf16, and what one step of
AdamW would lose in bf16 parameters and moments. Weights are as they were afterwards; nothing is updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitwright.errors import TrainingError
from bitwright.quantize.statistics import TensorStatistics, empty_statistics, measure_statistics
from bitwright.search.progress import Progress, Silent
from bitwright.training.optimizer.swallowed import Swallowed, count_swallowed, count_swallowed_average
from bitwright.training.planning.observe_product import ObservedProduct, WatchedProduct
from bitwright.training.product_recipe import ProductRecipe

#: AdamW's averages.
_BETAS = (0.9, 0.999)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Observation:
    """What a short run showed."""

    products: tuple[ObservedProduct, ...]
    #: Of all parameters' gradients, and of their squares.
    gradients: TensorStatistics
    squares: TensorStatistics
    #: ‖bf16(g) − g‖ / ‖g‖ over all gradients.
    gradient_rounding: float
    #: Inputs of norms; None where the model has none.
    norms: TensorStatistics | None
    #: Mean loss, nats per token, and the same with cross-entropy in bf16.
    loss: float
    loss_in_bf16: float
    #: Updates of bf16 parameters, and of bf16 moments, that rounding to nearest would swallow.
    updates: Swallowed
    first_moments: Swallowed
    second_moments: Swallowed


def observe(
    model: nn.Module,
    modules: Sequence[str],
    batches: Sequence[Mapping[str, Tensor]],
    recipes: Mapping[str, ProductRecipe],
    *,
    learning_rate: float,
    seed: int = 0,
    progress: Progress | None = None,
) -> Observation:
    """Run a model forward and backward over some batches, and return what was seen.

    Args:
        model: a causal language model of transformers with fp32 weights; it is as it was afterwards.
        modules: names of its linear layers.
        batches: at least two, of ``input_ids`` and ``labels``.
        recipes: name → recipe, whose errors are measured.
        learning_rate: of the update that swallowed ones are counted for.
        seed: of stochastic rounding.
        progress: shown to the user.

    Raises:
        TrainingError: fewer than two batches, parameters that are not fp32, or a loss that is not finite.
    """
    _raise_if_unfit(model, batches)
    watched = {name: WatchedProduct(name=name, recipes=recipes, seed=seed) for name in modules}
    whole = _Whole(learning_rate=learning_rate)
    with _trainable(model), _hooked(model, watched, whole), torch.enable_grad():
        progress = Silent() if progress is None else progress
        with progress.stage("observe", len(batches)) as stage:
            for index, batch in enumerate(batches):
                out = model(**batch, use_cache=False)
                whole.see_loss(out.logits, batch["labels"], index)
                out.loss.backward()
                whole.see_gradients(model)
                model.zero_grad(set_to_none=True)
                stage.advance()
    return whole.observation(tuple(entry.observed(model) for entry in watched.values()))


# --- the whole model --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class _Whole:
    learning_rate: float
    gradients: TensorStatistics = field(default_factory=empty_statistics)
    squares: TensorStatistics = field(default_factory=empty_statistics)
    norms: TensorStatistics = field(default_factory=empty_statistics)
    losses: list[float] = field(default_factory=list)
    losses_in_bf16: list[float] = field(default_factory=list)
    #: Squared error of gradients in bf16, and their squares.
    rounding: list[float] = field(default_factory=lambda: [0.0, 0.0])
    updates: Swallowed = field(default_factory=Swallowed)
    first: Swallowed = field(default_factory=Swallowed)
    second: Swallowed = field(default_factory=Swallowed)
    #: Parameter → bf16 first and second moment after the first batch.
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def see_loss(self, logits: Tensor, labels: Tensor, index: int) -> None:
        """The loss of a batch, and in bf16."""
        flat, targets = logits.detach()[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
        loss = float(F.cross_entropy(flat.float(), targets))
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of batch {index} is {loss}: weights or text give no finite loss in fp32; look for NaN in "
                "the checkpoint, and for tokens outside the vocabulary"
            )
        narrow = torch.log_softmax(flat.bfloat16(), dim=-1)
        self.losses.append(loss)
        self.losses_in_bf16.append(float(F.nll_loss(narrow, targets)))

    def see_norm(self, x: Tensor) -> None:
        """What a norm reads."""
        self.norms = self.norms + measure_statistics(x.detach())

    @torch.no_grad()
    def see_gradients(self, model: nn.Module) -> None:
        """Gradients of all parameters; what AdamW's first update loses, and averages from the second batch on."""
        for name, parameter in model.named_parameters():
            g = parameter.grad
            if g is None:
                continue
            self.gradients = self.gradients + measure_statistics(g)
            self.squares = self.squares + measure_statistics(g.square())
            self.rounding[0] += float((g.bfloat16().float() - g).double().square().sum())
            self.rounding[1] += float(g.double().square().sum())
            stored = self.moments.get(name)
            if stored is None:
                before = parameter.bfloat16()
                exact = before.float() - self.learning_rate * g.sign()
                self.updates += count_swallowed(before, exact, exact.bfloat16())
                self.moments[name] = g.bfloat16(), g.square().bfloat16()
            else:
                self.first += count_swallowed_average([stored[0]], [g], _BETAS[0])
                self.second += count_swallowed_average([stored[1]], [g.square()], _BETAS[1])

    def observation(self, products: tuple[ObservedProduct, ...]) -> Observation:
        return Observation(
            products=products,
            gradients=self.gradients,
            squares=self.squares,
            gradient_rounding=math.sqrt(self.rounding[0] / self.rounding[1]) if self.rounding[1] else 0.0,
            norms=self.norms if self.norms.num else None,
            loss=sum(self.losses) / len(self.losses),
            loss_in_bf16=sum(self.losses_in_bf16) / len(self.losses_in_bf16),
            updates=self.updates,
            first_moments=self.first,
            second_moments=self.second,
        )


@contextmanager
def _trainable(model: nn.Module) -> Iterator[None]:
    """Every parameter asks for a gradient inside; afterwards those do that did before, and none has one."""
    asked = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model.requires_grad_(True)
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(asked[name])


@contextmanager
def _hooked(model: nn.Module, watched: Mapping[str, WatchedProduct], whole: _Whole) -> Iterator[None]:
    handles = [model.get_submodule(name).register_forward_hook(_linear_hook(entry)) for name, entry in watched.items()]
    handles += [
        module.register_forward_hook(lambda module, args, output: whole.see_norm(args[0]))
        for module in model.modules()
        if is_norm(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _linear_hook(entry: WatchedProduct) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    return lambda module, args, output: entry.see(module, args[0], output)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: a leaf that is called one and has a gain."""
    gain = module._parameters.get("weight")
    return "norm" in type(module).__name__.lower() and gain is not None and gain.dim() == 1


def _raise_if_unfit(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> None:
    if len(batches) < 2:
        raise TrainingError(f"{len(batches)} batches; averages of gradients need at least two: give more text")
    other = next((name for name, p in model.named_parameters() if p.dtype != torch.float32), None)
    if other is not None:
        raise TrainingError(
            f"parameter '{other}' is {model.get_parameter(other).dtype}, and a run is observed in fp32; load the model "
            "with bitwright.models.load, or call model.float()"
        )
