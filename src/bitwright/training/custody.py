"""While a run is open, its model and its optimizer are in its hands: nobody else steps, clears or prepares them.

Between a backward pass and the update gradients are multiplied by the loss scale, and some micro-batches of their step
may be missing. A step that somebody else takes then destroys the weights, and one after somebody cleared the gradients
is an update from nothing; both look like training. So these are errors until the run is closed:

    optimizer.step()         at any time, by the hook that torch calls before a step
    optimizer.zero_grad()    while gradients wait for their update; at other times it does nothing, and loops call it
    prepare(…)               of a model that shares a trained module with that of an open run, or of its optimizer

A copy of a model or an optimizer is free. Around an optimizer there may be others (accelerate's, Lightning's); the one
inside is meant, which all of them call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from bitwright.errors import TrainingError
from bitwright.training.gradients import GradientCheck

#: Modules with trained parameters, and optimizers, of runs that are open.
_MODULES: WeakSet[nn.Module] = WeakSet()
_OPTIMIZERS: WeakSet[torch.optim.Optimizer] = WeakSet()


def raise_if_under_a_run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise TrainingError for a model or an optimizer that an open run has."""
    what = "the model" if any(module in _MODULES for module in _trained_modules(model)) else None
    if what is None and _innermost(optimizer) in _OPTIMIZERS:
        what = "the optimizer"
    if what is not None:
        raise TrainingError(
            f"{what} is under a run already, prepared before; use that run, or call run.close() on it before the next "
            "prepare"
        )


def raise_if_gradients_are_gone(named: Iterable[tuple[str, nn.Parameter]], pending: int, accumulate: int) -> None:
    """Raise TrainingError if, of a step that has begun, no gradient is there.

    Args:
        named: parameters that the optimizer holds.
        pending: micro-batches that were differentiated.
        accumulate: those that make a step.
    """
    if all(parameter.grad is None for _, parameter in named):
        raise TrainingError(
            f"the gradients of {pending} of {accumulate} micro-batches are gone; leave zero_grad out: the run clears "
            "gradients after each update"
        )


def raise_if_nothing_to_update(check: GradientCheck, num_losses: int) -> None:
    """Raise TrainingError for a complete step without a gradient."""
    if check.num_gradients == 0:
        raise TrainingError(
            f"{num_losses} losses were differentiated, and no parameter that the optimizer holds has a gradient: they "
            "were cleared (leave zero_grad out: the run clears them after each update), or no loss depends on those "
            "parameters (make the optimizer from all that are trained)"
        )


class Custody:
    """A run's hold on its model and optimizer, until `remove`.

    Args:
        model: of the run.
        optimizer: stepped from now on inside `updating` alone.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.is_open = True
        #: Whether there are gradients that wait for their update; the run says so.
        self.has_gradients = False
        self._is_updating = False
        self._modules = _trained_modules(model)
        self._optimizer = _innermost(optimizer)
        _MODULES.update(self._modules)
        _OPTIMIZERS.add(self._optimizer)
        self._handle = self._optimizer.register_step_pre_hook(self._before_step)
        self._own_zero_grad = vars(self._optimizer).get("zero_grad")
        zero_grad = self._optimizer.zero_grad

        def zero_grad_unless_they_wait(*args: Any, **kwargs: Any) -> None:
            self._raise_if_they_wait()
            zero_grad(*args, **kwargs)

        vars(self._optimizer)["zero_grad"] = zero_grad_unless_they_wait

    def expect_gradients(self, first: nn.Parameter) -> None:
        """Before a backward pass of the run: the first of a step finds none.

        Args:
            first: of the parameters that the optimizer holds; looking at all would cost more than it finds.
        """
        if not self.has_gradients and first.grad is not None:
            raise TrainingError(
                "gradients are there before the first backward pass of a step, from a loss.backward() outside: they "
                "were not scaled; call model.zero_grad() after it"
            )
        self.has_gradients = True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The update of the run itself."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    def remove(self) -> None:
        """Let go of both."""
        if not self.is_open:
            return
        self.is_open = self.has_gradients = False
        self._handle.remove()
        if self._own_zero_grad is None:
            vars(self._optimizer).pop("zero_grad", None)
        else:
            vars(self._optimizer)["zero_grad"] = self._own_zero_grad
        _MODULES.difference_update(self._modules)
        _OPTIMIZERS.discard(self._optimizer)

    def _before_step(self, *_: Any) -> None:
        if not self._is_updating:
            raise TrainingError(
                "optimizer.step() was called by hand, and the optimizer is under a run, which scales gradients and "
                "checks them before it updates: leave optimizer.step() out (the end of `with run.step()` does it), or "
                "call run.close() first"
            )

    def _raise_if_they_wait(self) -> None:
        if self.has_gradients:
            raise TrainingError(
                "optimizer.zero_grad() was called while gradients wait for their update; leave optimizer.zero_grad() "
                "out: the run clears them after each update"
            )


def _trained_modules(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    inner = getattr(optimizer, "optimizer", None)
    return _innermost(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer
