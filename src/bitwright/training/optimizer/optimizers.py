"""An optimizer of torch by its name, with its own options.

Every class of `torch.optim` that takes a step from dense gradients, without being handed the loss again, is known by
its name in lower case: adamw, sgd, adafactor, … Options are its arguments, so what torch adds is there. Weight decay
pulls matrices towards zero and leaves vectors (biases, factors of norms) alone, as is usual for transformers.

torch checks few options when an optimizer is made, and some only in a step. So they are held against torch's own
annotations, and a small optimizer takes a step, before a model is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor

from bitwright.catalog import nearest_name_hint
from bitwright.errors import TrainingError, UnknownName

#: Options for what a run is not; torch takes them, and fails in the first step. Option → what it is for.
UNUSABLE_OPTIONS: Mapping[str, str] = {
    "differentiable": "a run's step is in no graph of autograd",
    "capturable": "a run's step is in no CUDA graph",
}

#: No boolean is a number, no text either; integers are.
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


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
    """Refuse what cannot be stepped, before there is anything to step.

    Raises:
        UnknownName: a name or an option that torch does not have; the nearest is suggested.
        TrainingError: an option's value is of another type than torch asks for, or no step can be taken with it.
    """
    known = known_optimizers()
    if name not in known:
        raise UnknownName(
            f"unknown optimizer {name!r}{nearest_name_hint(name, list(known))} Known optimizers: "
            f"{', '.join(sorted(known))}"
        )
    accepted = [option for option in inspect.signature(known[name]).parameters if option != "params"]
    offered = [option for option in accepted if option not in UNUSABLE_OPTIONS]
    for option in options:
        if option not in accepted:
            raise UnknownName(
                f"optimizer '{name}' has no option {option!r}{nearest_name_hint(option, offered)} Its options: "
                f"{', '.join(offered)}"
            )
    annotations = get_type_hints(known[name].__init__)
    for option, value in options.items():
        _raise_if_other_type(name, option, value, annotations.get(option, Any))
        if option in UNUSABLE_OPTIONS and value:
            raise TrainingError(
                f"optimizer '{name}' has {option} = {value!r}, and {UNUSABLE_OPTIONS[option]}; leave {option} out"
            )
    _raise_if_no_step(name, options)


def _raise_if_other_type(name: str, option: str, value: Any, annotation: Any) -> None:
    try:
        TypeAdapter(annotation, config=_STRICT).validate_python(_as_torch_takes_it(value))
    except ValidationError as error:
        wanted = annotation.__name__ if isinstance(annotation, type) else str(annotation)
        # TOML has no tensors, and no way to write nothing
        wanted = str(wanted).replace(" | torch.Tensor", "").replace(" | None", "")
        raise TrainingError(
            f"optimizer '{name}' has {option} = {value!r}, which is no {wanted} ({error.errors()[0]['msg']}); correct "
            "it, or leave it out"
        ) from error


def _raise_if_no_step(name: str, options: Mapping[str, Any]) -> None:
    """Let a small optimizer take a step; on the processor, where nothing is in the way of a run."""
    parameter = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer = _build(name, [{"params": [parameter]}], options)
    try:
        optimizer.step()
    except (ValueError, TypeError, RuntimeError, IndexError, AssertionError, ArithmeticError) as error:
        given = ", ".join(f"{option} = {value!r}" for option, value in options.items())
        raise TrainingError(f"optimizer '{name}' takes no step with {given} ({error}); correct its options") from error


def _as_torch_takes_it(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


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
    return _build(name, groups, options)


def _build(name: str, groups: list[dict[str, Any]], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    made = {option: _as_torch_takes_it(value) for option, value in options.items()}
    build: Any = known_optimizers()[name]
    try:
        made_optimizer: torch.optim.Optimizer = build(groups, **made)
        return made_optimizer
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise TrainingError(f"optimizer '{name}' with {made} is refused by torch ({error}); correct it") from error


def _default(name: str, option: str) -> Any:
    """What torch takes where an option is not given; None where the class has no such option."""
    parameter = inspect.signature(known_optimizers()[name]).parameters.get(option)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
