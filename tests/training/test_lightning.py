"""Lightning's own Trainer under a policy: the losses of our own loop, accumulation, clipping, checkpoints."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import random_rows

from bitwright.errors import TrainingError
from bitwright.training.data.batches import Batches
from bitwright.training.prepare import prepare

pytest.importorskip("lightning")
# Lightning's own: what it calls of torch, and its advice on workers of data loaders
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*LeafSpec.*:FutureWarning", "ignore::UserWarning:lightning"
)

import lightning  # noqa: E402

from bitwright.training.integrations.lightning import PolicyPrecision  # noqa: E402

for _name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def batches_of(num_batches: int) -> list[dict[str, torch.Tensor]]:
    return list(itertools.islice(Batches(random_rows(), batch=2), num_batches))


class Module(lightning.LightningModule):
    """A causal language model with AdamW; remembers its losses."""

    def __init__(self, model: Any, *, spoiled: int | None = None) -> None:
        super().__init__()
        self.model = model.requires_grad_(True).train()
        self.losses: list[float] = []
        #: Of the gradients before each update.
        self.lengths: list[float] = []
        self.spoiled = spoiled

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss * torch.inf if index == self.spoiled else loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("validation", self.model(**batch).loss)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [parameter.grad.float().norm() for parameter in self.parameters()]
        self.lengths.append(torch.stack(norms).norm().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: Module, policy: str, folder: Path, num_batches: int = 12, **options: Any) -> Any:
    checkpoint = options.pop("ckpt_path", None)
    trainer = lightning.Trainer(
        plugins=[PolicyPrecision(policy)],
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **{"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **options},
    )
    data = torch.utils.data.DataLoader(batches_of(num_batches), batch_size=None)
    trainer.fit(module, data, ckpt_path=checkpoint, weights_only=False)
    return trainer


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", "fp8-hybrid", "bf16-pure-sr"])
def test_losses_are_those_of_our_own_loop(policy: str, make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    module = Module(make_tiny_model("llama"))
    trainer = fit(module, policy, tmp_path)
    model = make_tiny_model("llama").requires_grad_(True).train()
    run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), policy=policy, accumulate=2, max_grad_norm=0.5)
    losses = []
    for batch in batches_of(12):
        with run.step() as step:
            loss = model(**batch).loss
            step.backward(loss)
        losses.append(float(loss.detach()))
    assert module.losses == losses
    for here, there in zip(module.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(here, there)
    counters = trainer.precision_plugin.run.counters
    assert (counters.updates, counters.skipped, trainer.global_step) == (6, 0, 6)
    assert counters.micro_batches == 12
    # Lightning divides each by two, and rounds that
    assert trainer.precision_plugin.run.last.loss == pytest.approx(sum(losses[-2:]) / 2, rel=1e-6)
    assert module.lengths == pytest.approx([0.5] * 6, rel=1e-2)  # all of them are clipped


def test_a_skipped_step_changes_nothing(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    module = Module(make_tiny_model("llama"), spoiled=3)
    trainer = fit(module, "fp16-mixed", tmp_path)
    run = trainer.precision_plugin.run
    assert (run.counters.updates, run.counters.skipped, run.scale) == (5, 1, 2.0**15)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


@pytest.mark.parametrize("policy", ["fp16-mixed", "fp8-hybrid", "bf16-pure-sr", "bf16-pure-kahan"])
def test_resuming_is_not_having_stopped(policy: str, make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    whole = Module(make_tiny_model("llama"))
    fit(whole, policy, tmp_path, max_epochs=2)
    first = Module(make_tiny_model("llama"))
    fit(first, policy, tmp_path).save_checkpoint(tmp_path / "half.ckpt")
    again = Module(make_tiny_model("llama", 7))
    fit(again, policy, tmp_path, max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert first.losses + again.losses == whole.losses
    for here, there in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(here, there)


def test_a_checkpoint_of_another_policy_is_told(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    fit(Module(make_tiny_model("llama")), "bf16-mixed", tmp_path).save_checkpoint(tmp_path / "half.ckpt")
    with pytest.raises(TrainingError, match="saved under policy 'bf16-mixed', and this run's is 'fp8-hybrid'"):
        fit(Module(make_tiny_model("llama")), "fp8-hybrid", tmp_path, max_epochs=2, ckpt_path=tmp_path / "half.ckpt")


def test_validation_runs_under_the_policy(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    module = Module(make_tiny_model("llama"))
    trainer = fit(module, "bf16-mixed", tmp_path, num_batches=2)
    data = torch.utils.data.DataLoader(batches_of(1), batch_size=None)
    found = trainer.validate(module, data, verbose=False)[0]["validation"]
    module.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert found == pytest.approx(float(module.model(**batches_of(1)[0]).loss), rel=1e-6)


def test_clipping_by_value_is_refused(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="gradient_clip_algorithm is 'value'"):
        fit(Module(make_tiny_model("llama")), "fp32", tmp_path, gradient_clip_algorithm="value")
