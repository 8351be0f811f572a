"""Lightning's Trainer under a policy: a precision plugin.

    trainer = lightning.Trainer(plugins=[PolicyPrecision("bf16-mixed")], gradient_clip_val=1.0)
    trainer.fit(module, data)

Lightning keeps its loop. The plugin is asked for the context of forward passes, for backward passes, and for the
optimizer's step; it checks, clips and updates, or skips. `gradient_clip_val` is the run's max_grad_norm (by norm; by
value is refused), and `accumulate_grad_batches` works as it is. The run's state lies in Lightning's checkpoints, and is
compared with the policy when it is loaded.

`on_before_optimizer_step` sees gradients that are unscaled, checked and clipped. Lightning moves schedulers after
skipped steps too. At the end of an epoch it divides fewer micro-batches by the number of a full step: the gradient is
as much shorter, and `run.last.loss` smaller. One optimizer, automatic optimization.

Lightning's DDP spreads the module as it does. Policies that train bf16 parameters take `Replicated` in its place: DDP
would round their gradients, which are fp32, to bf16 on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from bitwright.errors import TrainingError
from bitwright.training.asked_policy import GivenPolicy
from bitwright.training.checkpoints.run_state import run_state, set_run_state
from bitwright.training.held_parameters import cast_parameters
from bitwright.training.integrations.loop_driver import LoopDriver
from bitwright.training.prepare import find_policy, prepare
from bitwright.training.processes.distributed import spread
from bitwright.training.processes.ranks import Ranks
from bitwright.training.run import TrainingRun


class PolicyPrecision(Precision):  # type: ignore[misc]
    """Makes Lightning train under a policy.

    Args:
        policy: as `prepare` takes it.
        options: further arguments of `prepare` (`device`, `emulate`, `seed`, `patience`).

    Raises:
        TrainingError: more than one optimizer, or clipping by value; or what `prepare` raises, when fitting begins.
    """

    def __init__(self, policy: GivenPolicy = "auto", **options: Any) -> None:
        self._wanted = policy
        self._options = options
        self._driver: LoopDriver | None = None
        #: Whether the next backward pass is the last of its step.
        self._is_last = False

    @property
    def run(self) -> TrainingRun:
        """The run, once fitting has begun."""
        if self._driver is None:
            raise TrainingError("the plugin has no run yet; call trainer.fit first")
        return self._driver.run

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepare the run; called with the model on its device, before checkpoints are loaded."""
        if not optimizers:  # nothing is trained: validate, test, predict
            return model, optimizers, lr_schedulers
        if self._driver is not None and self._driver.run.optimizer is optimizers[0]:
            return model, optimizers, lr_schedulers  # validated or tested after it was fitted
        if len(optimizers) > 1:
            raise TrainingError(f"the module has {len(optimizers)} optimizers, and a run has one; give it one")
        trainer: Any = _module_of(model).trainer
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm not in (None, "norm"):
            raise TrainingError(
                "gradient_clip_algorithm is 'value', which turns a gradient; under a policy gradients are clipped by "
                "norm: set it to 'norm'"
            )
        if self._driver is not None:  # fitted again, with an optimizer of its own
            self._driver.run.close()
        policy = find_policy(self._wanted, next(model.parameters()).device).policy
        if policy.parameters != "fp32" and isinstance(model, DistributedDataParallel):
            model = spread(model.module, "ddp", Ranks.of_process_group())
        run = prepare(
            model,
            optimizers[0],
            policy=self._wanted,
            max_grad_norm=trainer.gradient_clip_val or None,
            **self._options,
        )
        self._driver = LoopDriver(run)
        return model, optimizers, lr_schedulers

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Bring parameters to the policy's formats, before the module is spread and the optimizer is made."""
        device = next(module.parameters()).device
        cast_parameters(module, find_policy(self._wanted, device).policy)
        return module

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The region of forward passes, of training and of evaluation."""
        if self._driver is None:
            yield
            return
        with self._driver.forward():
            yield

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Differentiate a loss that Lightning has divided by its number of micro-batches."""
        assert self._driver is not None
        self._driver.backward(tensor, is_last=self._is_last)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the last micro-batch, then check, clip, and update or skip."""
        assert self._driver is not None
        if not model.automatic_optimization:
            raise TrainingError(
                "the module steps its optimizer itself (automatic_optimization = False); call "
                "bitwright.training.prepare in its training_step, without this plugin"
            )
        self._is_last = True
        try:
            result = closure()
        finally:
            self._is_last = False
        self._driver.settle()
        call._call_callback_hooks(model.trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(model.trainer, "on_before_optimizer_step", optimizer)
        self._driver.finish()
        return result

    def state_dict(self) -> dict[str, Any]:
        """What the policy adds to Lightning's checkpoint."""
        return {} if self._driver is None else run_state(self._driver.run)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where a checkpoint left off."""
        if self._driver is not None and state_dict:
            set_run_state(self._driver.run, state_dict, "the checkpoint")


def _module_of(model: nn.Module) -> Any:
    """The LightningModule itself, where a strategy has wrapped it."""
    return model if hasattr(model, "trainer") else getattr(model, "module", model)
