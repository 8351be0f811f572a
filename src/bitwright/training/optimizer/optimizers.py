"""An optimizer of torch by its name, with its own options.

Every class of `torch.optim` that takes a step from dense gradients, without being handed the loss again, is known by
its name in lower case: adamw, sgd, adafactor, … Options are its arguments, so what torch adds is there. Weight decay
pulls matrices towards zero and leaves vectors (biases, factors of norms) alone, as is usual for transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitwright.catalog import nearest_name_hint
from bitwright.errors import TrainingError, UnknownName


def known_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the classes of torch.optim by name in lower case."""
    return {
        name.lower(): found
        for name, found in vars(torch.optim).items()
        if isinstance(found, type)
        and issubclass(found, torch.optim.Optimizer)
        and found is not torch.optim.Optimizer
        and not _asks_for_the_loss_again(found)
        and found is not torch.optim.SparseAdam
    }


def _asks_for_the_loss_again(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether a step cannot be taken without a closure (L-BFGS)."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def raise_if_unusable_optimizer(name: str, options: Mapping[str, Any]) -> None:
    """Raise UnknownName for a name or an option that torch does not have; the nearest is suggested."""
    known = known_optimizers()
    if name not in known:
        raise UnknownName(
            f"unknown optimizer {name!r}{nearest_name_hint(name, list(known))} Known optimizers: "
            f"{', '.join(sorted(known))}"
        )
    allowed = [option for option in inspect.signature(known[name]).parameters if option != "params"]
    for option in options:
        if option not in allowed:
            raise UnknownName(
                f"optimizer '{name}' has no option {option!r}{nearest_name_hint(option, allowed)} Its options: "
                f"{', '.join(allowed)}"
            )


def make_optimizer(name: str, parameters: Iterable[Tensor], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer of those parameters that are trained.

    Raises:
        UnknownName: no such optimizer or option.
        TrainingError: nothing is trained, or torch refuses an option's value.
    """
    raise_if_unusable_optimizer(name, options)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise TrainingError("no parameter of the model is trained (requires_grad is False everywhere); unfreeze some")
    groups: list[dict[str, Any]] = [{"params": trained}]
    if options.get("weight_decay", _default(name, "weight_decay")):
        matrices = [parameter for parameter in trained if parameter.ndim >= 2]
        vectors = [parameter for parameter in trained if parameter.ndim < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
    made: dict[str, Any] = {
        option: tuple(value) if isinstance(value, list) else value for option, value in options.items()
    }
    build: Any = known_optimizers()[name]
    try:
        return build(groups, **made)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise TrainingError(f"optimizer '{name}' with {made} is refused by torch ({error}); correct it") from error


def _default(name: str, option: str) -> Any:
    """What torch takes where an option is not given; None where the class has no such option."""
    parameter = inspect.signature(known_optimizers()[name]).parameters.get(option)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
