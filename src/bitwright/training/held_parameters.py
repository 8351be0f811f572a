"""What a policy asks of a model's parameters and of the optimizer that holds them; and bringing them to their formats.

fp32 parameters are the masters of a mixed policy. A model that was loaded in 16 bits has none: what its updates need is
already rounded away, and a copy in fp32 would not bring it back, only hide it. So such a model is refused, with the way
to load it. Under a bf16 policy parameters are cast in place, norms and routers excepted; the optimizer holds the same
objects before and after.

Only parameters that are trained are asked about: a frozen base may be in any format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwright.errors import TrainingError
from bitwright.training.forward.islands import NARROW_DTYPES
from bitwright.training.forward.named_islands import is_router, island_parameters
from bitwright.training.gradients import raise_if_scaled_elsewhere
from bitwright.training.optimizer.elementwise import why_not_elementwise
from bitwright.training.optimizer.remainder import leave_remainder
from bitwright.training.optimizer.stand_ins import why_not_update
from bitwright.training.optimizer.update import UPDATES
from bitwright.training.policy import Policy
from bitwright.training.processes.ranks import unwrapped

#: What parameters and moments can be, as torch calls it.
DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def raise_if_no_model_or_optimizer(model: object, optimizer: object) -> None:
    """Raise TrainingError for what is no model, or no optimizer."""
    if not isinstance(model, nn.Module):
        raise TrainingError(f"model is {_shown(model)}; give a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TrainingError(
            f"optimizer is {_shown(optimizer)}; give one of torch.optim, or of a class derived from them, made from "
            "model.parameters()"
        )


def _shown(given: object) -> str:
    return f"a {type(given).__name__}" if isinstance(given, nn.Module | torch.optim.Optimizer) else repr(given)


def raise_if_unfit(model: nn.Module, optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    """Check model and optimizer against a policy; changes nothing.

    Raises:
        TrainingError: parameters without memory, nothing that is trained, no masters, an optimizer of other parameters,
            one that was made before the model was cast, or one in the hands of a GradScaler.
    """
    named = trained_parameters(model)
    if not named:
        raise TrainingError("no parameter of the model is trained (requires_grad is False everywhere); unfreeze some")
    for name, parameter in named.items():
        if parameter.is_meta:
            raise TrainingError(f"{name} is on the meta device and has no values; load the weights before prepare")
    if policy.parameters != "fp32" and isinstance(model, DistributedDataParallel):
        raise TrainingError(
            f"policy '{policy.name}' trains {policy.parameters} parameters and adds their gradients up in "
            f"{policy.gradients}, and DistributedDataParallel exchanges gradients in {policy.parameters}; spread the "
            "model by bitwright.training.processes.distributed.spread, after cast_parameters"
        )
    _raise_if_no_masters(named, policy)
    _raise_if_other_parameters(model, named, optimizer)
    _raise_if_cast_since(named, optimizer, policy)
    raise_if_scaled_elsewhere(optimizer)
    _raise_if_not_steppable(optimizer, policy)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter of those that are trained."""
    return {name: p for name, p in unwrapped(model).named_parameters() if p.requires_grad}


def _raise_if_no_masters(named: Mapping[str, nn.Parameter], policy: Policy) -> None:
    allowed = (
        (torch.float32, torch.float64) if policy.parameters == "fp32" else (torch.float32, DTYPES[policy.parameters])
    )
    for name, parameter in named.items():
        if parameter.dtype in allowed:
            continue
        found = _short(parameter.dtype)
        load = (
            "load it with dtype=torch.float32 (from_pretrained(…, dtype=torch.float32)), or call model.float() before"
        )
        if policy.parameters != "fp32":
            raise TrainingError(
                f"{name} is in {found}, and policy '{policy.name}' trains parameters in {policy.parameters}; {load} "
                "the optimizer is made, and prepare casts it"
            )
        raise TrainingError(
            f"{name} is in {found}, and policy '{policy.name}' needs fp32 parameters: they are the masters, and "
            f"updates smaller than a step of {found} would be lost; {load} the optimizer is made; or train in 16 bits "
            "with policy 'bf16-pure-sr'"
        )


def _raise_if_other_parameters(
    model: nn.Module, named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in held if id(parameter) not in own]
    if foreign:
        raise TrainingError(
            f"the optimizer holds {len(foreign)} of {len(held)} parameters that are not the model's (the first has "
            f"shape {list(foreign[0].shape)}); it was made for another model, or before this one was cast, moved or "
            "wrapped: make it from model.parameters() right before prepare"
        )
    if not any(id(parameter) in {id(p) for p in held} for parameter in named.values()):
        raise TrainingError(
            "the optimizer holds no parameter that is trained; make it from model.parameters() after unfreezing"
        )


def _raise_if_cast_since(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not _is_like(value, parameter) or value.dtype in (parameter.dtype, DTYPES[policy.moments]):
                continue
            raise TrainingError(
                f"the optimizer's {key} of {name} is {_short(value.dtype)}, and the parameter is "
                f"{_short(parameter.dtype)}: the model was cast after the optimizer's first step; cast first, then "
                "make the optimizer"
            )


def _raise_if_not_steppable(optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        needs = "the loss again within a step" if isinstance(optimizer, torch.optim.LBFGS) else "sparse gradients"
        raise TrainingError(
            f"{type(optimizer).__name__} needs {needs}, which a run does not have; use another optimizer, such as AdamW"
        )
    _raise_if_meant_for_a_graph(optimizer)
    why = why_not_update(optimizer, UPDATES[policy.update], policy.moments)
    if why is not None:
        raise TrainingError(why)
    # parameters that are fp32 so far are none after the cast
    if policy.parameters == "fp32" and policy.moments == "fp32":
        return
    why = why_not_elementwise(optimizer)
    if why is not None:
        raise TrainingError(
            f"{type(optimizer).__name__} cannot be stepped in pieces ({why}), which policy '{policy.name}' needs for "
            "what it keeps in less than fp32; use an elementwise optimizer (AdamW, SGD …), or policy 'bf16-mixed'"
        )


def _raise_if_meant_for_a_graph(optimizer: torch.optim.Optimizer) -> None:
    """Options that torch takes, and that fail in the first step."""
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise TrainingError(
                f"the optimizer has differentiable=True, and a run's step is in no graph of autograd; make it without: "
                f"{type(optimizer).__name__}(model.parameters(), …)"
            )
        if group.get("capturable") and any(parameter.device.type == "cpu" for parameter in group["params"]):
            raise TrainingError(
                "the optimizer has capturable=True, which torch steps on a GPU only, and its parameters are on cpu; "
                f"make it without: {type(optimizer).__name__}(model.parameters(), …)"
            )


def _is_like(value: object, parameter: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape


def unheld_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of parameters that are trained, and that the optimizer does not know of."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return tuple(name for name, parameter in trained_parameters(model).items() if id(parameter) not in held)


def cast_parameters(model: nn.Module, policy: Policy) -> str | None:
    """Bring parameters to the formats of a policy, in place; returns what was done, None if nothing.

    Trained parameters become `policy.parameters`. Norms and routers are fp32 where anything is computed in 16 bits:
    those that are trained, and routers in any case. Under an update rule that keeps what rounding takes away, what this
    cast takes away is kept as well: it waits at the parameter for its optimizer (`optimizer/remainder.py`).
    Call it before a model is spread over ranks; `prepare` calls it too.

    Raises:
        TrainingError: a parameter is spread over ranks already, in another format.
    """
    model = unwrapped(model)
    islands = {id(parameter) for parameter in island_parameters(model).values()}
    routers = {
        id(parameter)
        for name, module in model.named_modules()
        if is_router(name, module)
        for parameter in module.parameters()
    }
    due: list[tuple[nn.Parameter, torch.dtype]] = []
    for name, parameter in model.named_parameters():
        wanted = _wanted(parameter, policy, id(parameter) in islands, id(parameter) in routers)
        if wanted is None or parameter.dtype == wanted:
            continue
        if hasattr(parameter, "to_local"):
            raise TrainingError(
                f"{name} is spread over ranks in {_short(parameter.dtype)}, and is to be {_short(wanted)}; call "
                "cast_parameters(model, policy) before the model is spread"
            )
        due.append((parameter, wanted))
    for parameter, wanted in due:
        parameter.grad = None
        exact, parameter.data = parameter.data, parameter.data.to(wanted)
        if UPDATES[policy.update].is_compensated and wanted in NARROW_DTYPES:
            leave_remainder(parameter, exact)
    return _say(due)


def _wanted(parameter: nn.Parameter, policy: Policy, is_island: bool, is_router: bool) -> torch.dtype | None:
    """The dtype that a parameter is to have; None: whatever it has."""
    if not parameter.is_floating_point():
        return None
    if is_router or (is_island and parameter.requires_grad):
        return torch.float32 if parameter.dtype in NARROW_DTYPES else None
    if parameter.requires_grad and policy.parameters != "fp32":
        return DTYPES[policy.parameters]
    return None


def _say(due: Iterable[tuple[nn.Parameter, torch.dtype]]) -> str | None:
    numbers: dict[torch.dtype, int] = {}
    for parameter, wanted in due:
        numbers[wanted] = numbers.get(wanted, 0) + parameter.numel()
    cast = [f"{count:,} parameters were cast to {_short(dtype)}" for dtype, count in numbers.items()]
    return ", ".join(cast) or None


def _short(dtype: torch.dtype) -> str:
    names = {there: here for here, there in DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))
