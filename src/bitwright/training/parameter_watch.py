"""What a run would not train, or not as its policy says: parameters that come after `prepare`, and that no group holds.

A vocabulary that grows, a head that is replaced, adapters that are added: the new parameters have gradients, and the
optimizer has never heard of them. To compare all parameters in every step would cost a small model a few per cent of
it. Torch calls a hook whenever a module is given a parameter or a module, anywhere; it counts here, and parameters are
compared at the next step after it has counted. What no hook sees (a parameter that is unfrozen, and that no group
holds) is found by comparing at the steps 1, 2, 4, 8, … as well.

A parameter that a group has held all along and that is unfrozen later is looked for in every step. In fp32, in one
process, it trains as all others: it is its own master, and the optimizer makes its moments. In 16 bits (a frozen base)
it has no master. Where parameters are kept in less it was neither cast nor given gradients in fp32, and where processes
share the model, its gradients are not exchanged: so it is refused.

Rejected: a change in how many gradients there are, which mixtures of experts change all the time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from bitwright.errors import TrainingError
from bitwright.training.forward.islands import NARROW_DTYPES
from bitwright.training.processes.ranks import unwrapped

_LOG = logging.getLogger(__name__)

_PREPARE_AGAIN = "prepare again, and give the new run the state_dict of the old one"
_WHAT_NOW = f"call run.close(), make the optimizer from the model as it is, {_PREPARE_AGAIN}"


class ParameterWatch:
    """Compares a model's parameters with those that an optimizer holds.

    Args:
        model: of the run.
        optimizer: of the run.
        stored: format of the parameters that are trained, as policies call it.
        world_size: processes that share the model.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, stored: str = "fp32", world_size: int = 1
    ) -> None:
        self._model = unwrapped(model)
        self._optimizer = optimizer
        self._stored = stored
        self._world_size = world_size
        parameters = dict(self._model.named_parameters())
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._num_held = len(held)
        self._held = held
        #: Parameters whose gradients the run updates from.
        self.held = [(name, p) for name, p in parameters.items() if id(p) in held]
        #: Those that are trained otherwise, or not at all.
        self.unheld = [(name, p) for name, p in parameters.items() if p.requires_grad and id(p) not in held]
        #: Those that the optimizer holds, and that were not trained so far.
        self._frozen = [(name, p) for name, p in self.held if not p.requires_grad]
        self.is_sharded = any(hasattr(p, "to_local") for _, p in self.held)
        self._shapes = WeakIdKeyDictionary({p: p.shape for p in parameters.values()})
        self._num_told = 0
        #: What the hook had counted when parameters were last compared; None: never.
        self._compared_at: int | None = None
        _count_registrations()

    def raise_if_changed(self, num_steps: int) -> None:
        """Before a step: refuse a model or optimizer that has others than at first, and tell of those not held.

        Args:
            num_steps: steps before this one.

        Raises:
            TrainingError: trained parameters have joined the model, some have another shape or were unfrozen and cannot
                be trained as they are, or the optimizer has more or fewer.
        """
        self.raise_if_regrouped()
        self._take_in_unfrozen()
        # FSDP puts other parameters in their places between the forward and the backward pass
        is_due = self._compared_at != _NUM_REGISTERED[0] or num_steps & (num_steps - 1) == 0
        if is_due and not self.is_sharded:
            self._compare()
            self._compared_at = _NUM_REGISTERED[0]

    def raise_if_regrouped(self) -> None:
        """Refuse an optimizer that has more or fewer parameters than at first: they would be updated unchecked."""
        num_held = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if num_held != self._num_held:
            raise TrainingError(
                f"the optimizer held {self._num_held} parameters when the run was prepared, and holds {num_held}: of "
                f"those, gradients would be neither unscaled nor checked; call run.close(), {_PREPARE_AGAIN}"
            )

    def drop_others(self) -> None:
        """Forget the gradients of parameters that the optimizer does not hold."""
        for _, parameter in self.unheld:
            parameter.grad = None

    def _take_in_unfrozen(self) -> None:
        """Let parameters train that were frozen at first, or refuse them."""
        unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
        if not unfrozen:
            return
        some = f"{len(unfrozen)} parameters that were frozen when the run was prepared are trained now ({unfrozen[0]} "
        if self._world_size > 1:
            raise TrainingError(
                f"{some}first), and the {self._world_size} processes would not exchange their gradients; unfreeze them "
                "before the model is spread over processes"
            )
        if self._stored != "fp32":
            raise TrainingError(
                f"{some}first): they were neither brought to {self._stored} nor given gradients in fp32; call "
                f"run.close(), {_PREPARE_AGAIN}"
            )
        narrow = [name for name, p in self._frozen if p.requires_grad and p.dtype in NARROW_DTYPES]
        if narrow:
            raise TrainingError(
                f"{len(narrow)} parameters that were frozen when the run was prepared are trained now ({narrow[0]} "
                "first): they are in 16 bits, and the policy needs fp32 masters; call run.close(), bring them to fp32 "
                f"(parameter.data = parameter.data.float()), {_PREPARE_AGAIN}"
            )
        self._frozen = [(name, parameter) for name, parameter in self._frozen if not parameter.requires_grad]

    def _compare(self) -> None:
        held = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        if held != self._held:
            raise TrainingError(
                "the optimizer holds other parameters than when the run was prepared, whose gradients would be neither "
                f"unscaled nor checked; call run.close(), {_PREPARE_AGAIN}"
            )
        trained = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        joined = [name for name, parameter in trained if parameter not in self._shapes]
        if joined:
            raise TrainingError(
                f"{len(joined)} trained parameters joined the model since the run was prepared ({joined[0]} first), "
                f"and the optimizer does not hold them; {_WHAT_NOW}"
            )
        for name, parameter in trained:
            if parameter.shape != self._shapes[parameter]:
                raise TrainingError(
                    f"{name} has another shape since the run was prepared ({list(self._shapes[parameter])}, now "
                    f"{list(parameter.shape)}), and the optimizer's moments have not; {_WHAT_NOW}"
                )
        self.unheld = [(name, parameter) for name, parameter in trained if id(parameter) not in self._held]
        if len(self.unheld) > self._num_told:
            self._num_told = len(self.unheld)
            _LOG.warning("%s", say_unheld([name for name, _ in self.unheld]))


def say_unheld(names: Sequence[str]) -> str:
    """Say that parameters are trained, and that the optimizer does not know of them."""
    return f"{len(names)} trained parameters are in no group of the optimizer and stay as they are, {names[0]} first"


# --- what torch tells of modules --------------------------------------------------------------------------------------

#: How often a module of this process was given a parameter or a module.
_NUM_REGISTERED = [0]


@cache
def _count_registrations() -> None:
    """Count from now on, as long as the process lives."""

    def registered(*_: object) -> None:
        _NUM_REGISTERED[0] += 1

    register_module_parameter_registration_hook(registered)
    register_module_module_registration_hook(registered)
