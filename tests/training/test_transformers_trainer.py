"""transformers' own Trainer under a policy: the losses of our own loop, its schedule, its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_prepare_plan import plan
from training_runs import random_rows, with_dropout

from bitwright.errors import TrainingError
from bitwright.training.prepare import prepare

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from bitwright.training.integrations.transformers_trainer import PolicyCallback  # noqa: E402

ROWS = random_rows(24)


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return ROWS.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": ROWS.input_ids[index].long(), "labels": ROWS.labels[index].long()}


def new_trainer(model: Any, folder: Path, *, policy: str | None, callbacks: Any = (), **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "lr_scheduler_type": "linear",
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "seed": 3,
            **options,
        },
    )
    trainer = transformers.Trainer(
        model=model.requires_grad_(True), args=arguments, train_dataset=Rows(), callbacks=list(callbacks)
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if policy is not None:
        trainer.add_callback(PolicyCallback(trainer, policy=policy))
    return trainer


def logged(trainer: Any, name: str = "loss") -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def own_losses(model: Any, policy: str, folder: Path) -> tuple[list[float], list[float], Any]:
    """The same batches, in the same order, through `prepare`."""
    trainer = new_trainer(model, folder, policy=None)
    transformers.set_seed(3)
    batches = iter(trainer.get_train_dataloader())
    optimizer = trainer.create_optimizer()
    run = prepare(model.train(), optimizer, policy=policy, accumulate=2, max_grad_norm=0.5, seed=3)
    losses, norms = [], []
    for done in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (6 - done) / 6
        with run.step() as step:
            for _ in range(2):
                step.backward(model(**next(batches)).loss)
        losses.append(run.last.loss)
        norms.append(run.last.grad_norm)
    return losses, norms, model


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", "fp8-hybrid", "bf16-pure-sr"])
def test_losses_are_those_of_our_own_loop(policy: str, make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    trainer = new_trainer(make_tiny_model("llama"), tmp_path, policy=policy)
    trainer.train()
    losses, norms, model = own_losses(make_tiny_model("llama"), policy, tmp_path)
    # two micro-batches of equal length: the mean of means, which the Trainer adds up in another order
    assert logged(trainer) == pytest.approx(losses, rel=1e-6)
    assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=1e-6)
    for here, there in zip(trainer.model.parameters(), model.parameters(), strict=True):
        assert here.dtype == there.dtype
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


class TalksOfOneWordAndOfMany(torch.utils.data.Dataset):
    """Every other row has two tokens to learn from, the others all."""

    def __len__(self) -> int:
        return ROWS.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = ROWS.labels[index].long()
        if index % 2:
            labels[3:] = -100
        return {"input_ids": ROWS.input_ids[index].long(), "labels": labels}


@pytest.mark.parametrize("counts_tokens", [True, False])
def test_the_loss_of_a_step_is_that_of_all_its_micro_batches(
    counts_tokens: bool, make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Of their tokens, as the Trainer weighs them; or the mean of their means, for a model that cannot be told."""
    model = make_tiny_model("llama")
    results: list[Any] = []
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 8}
    trainer = new_trainer(model, tmp_path, policy=None, learning_rate=0.0, **options)
    trainer.train_dataset = TalksOfOneWordAndOfMany()
    trainer.model_accepts_loss_kwargs = counts_tokens
    trainer.add_callback(PolicyCallback(trainer, policy="fp16-mixed", monitor=results.append))
    transformers.set_seed(3)
    micro_batches = list(trainer.get_train_dataloader())
    trainer.train()
    expected = []
    for first in range(0, len(micro_batches), 3):
        sums, counts = [], []
        for batch in micro_batches[first : first + 3]:
            labels = batch["labels"][:, 1:]
            with torch.no_grad(), torch.autocast("cpu", torch.float16):
                logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
            nll = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), labels, reduction="sum")
            sums.append(float(nll))
            counts.append(int((labels != -100).sum()))
        means = [total / count for total, count in zip(sums, counts, strict=True)]
        expected.append(sum(sums) / sum(counts) if counts_tokens else sum(means) / len(means))
    assert [result.loss for result in results] == pytest.approx(expected, rel=1e-3)
    assert [result.loss for result in results] == pytest.approx(logged(trainer), rel=1e-5)


def test_a_micro_batch_whose_loss_is_not_finite_is_named(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    results: list[Any] = []
    model = make_tiny_model("llama")

    class Spoiled(transformers.Trainer):
        num_losses = 0

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            self.num_losses += 1
            loss = super().compute_loss(*arguments, **keywords)
            return loss * torch.nan if self.num_losses == 3 else loss

    arguments = new_trainer(model, tmp_path, policy=None, max_steps=2).args
    trainer = Spoiled(model=model, args=arguments, train_dataset=Rows())
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(PolicyCallback(trainer, policy="bf16-mixed", monitor=results.append))
    trainer.train()
    assert [result.skipped for result in results] == [None, "the loss of micro-batch 1 of 2 is nan"]


def test_a_skipped_step_moves_neither_weights_nor_learning_rate(
    make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_tiny_model("llama")

    class Spoiled(transformers.Trainer):
        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*arguments, **keywords)
            return loss * torch.inf if self.state.global_step == 2 else loss

    arguments = new_trainer(model, tmp_path, policy=None).args
    trainer = Spoiled(model=model, args=arguments, train_dataset=Rows())
    trainer.remove_callback(transformers.PrinterCallback)
    callback = PolicyCallback(trainer, policy="fp16-mixed")
    trainer.add_callback(callback)
    trainer.train()
    assert callback.run is not None
    assert (callback.run.counters.skipped, callback.run.counters.updates) == (1, 5)
    assert logged(trainer, "loss_scale")[:6] == [65536.0, 65536.0, 32768.0, 32768.0, 32768.0, 32768.0]
    assert logged(trainer, "skipped_steps")[:4] == [0, 0, 1, 1]
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    rates = logged(trainer, "learning_rate")
    assert rates[2] == rates[3]


def test_callbacks_see_gradients_that_are_unscaled_and_clipped(
    make_tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    seen: list[tuple[float, float]] = []

    class Watch(transformers.TrainerCallback):
        def __init__(self, model: Any) -> None:
            self.model = model
            self.before = model.lm_head.weight.detach().clone()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            norms = [parameter.grad.norm() for parameter in self.model.parameters()]
            moved = (self.model.lm_head.weight.detach() - self.before).abs().max()
            seen.append((torch.stack(norms).norm().item(), moved.item()))

    model = make_tiny_model("llama")
    trainer = new_trainer(model, tmp_path, policy="fp16-mixed", callbacks=[Watch(model)], max_steps=1)
    trainer.train()
    ((norm, moved),) = seen
    assert logged(trainer, "grad_norm")[0] > 0.5
    assert (norm, moved) == (pytest.approx(0.5, rel=1e-4), 0.0)


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed", "fp8-hybrid", "bf16-pure-sr", "bf16-pure-kahan"])
def test_resuming_is_not_having_stopped(policy: str, make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = new_trainer(with_dropout(make_tiny_model("llama")), tmp_path, policy=policy, **saving)
    whole.train()
    checkpoint = tmp_path / "checkpoint-3"
    assert (checkpoint / "bitwright.json").is_file()
    again = new_trainer(with_dropout(make_tiny_model("llama", 7)), tmp_path, policy=policy)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert logged(again)[-3:] == logged(whole)[-3:]
    for here, there in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(here, there)


def test_a_checkpoint_of_another_policy_is_told(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    new_trainer(make_tiny_model("llama"), tmp_path, policy="bf16-mixed", save_strategy="steps", save_steps=3).train()
    other = new_trainer(make_tiny_model("llama"), tmp_path, policy="fp16-mixed")
    with pytest.raises(TrainingError, match="saved under policy 'bf16-mixed', and this run's is 'fp16-mixed'"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    (tmp_path / "checkpoint-3" / "bitwright.json").unlink()
    plain = new_trainer(make_tiny_model("llama"), tmp_path, policy="bf16-mixed")
    with pytest.raises(TrainingError, match=r"has no 'bitwright\.json'"):
        plain.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_plan_gives_each_layer_its_recipe(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = make_tiny_model("llama")
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    choices = {name: "mxfp8" if name.endswith("up_proj") else "bf16" for name in layers}
    trainer = new_trainer(model, tmp_path, policy=None, max_steps=1)
    callback = PolicyCallback(trainer, policy=plan(choices, policy="fp8-hybrid"))
    trainer.add_callback(callback)
    trainer.train()
    assert callback.run is not None and callback.run.products is not None
    emulated = {row.module for row in callback.run.products.table() if row.kernel == "emulated"}
    assert emulated == {name for name, choice in choices.items() if choice == "mxfp8"}


def test_evaluation_runs_under_the_policy(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    trainer = new_trainer(make_tiny_model("llama"), tmp_path, policy="bf16-mixed", max_steps=1)
    trainer.train()
    found = trainer.evaluate(Rows())["eval_loss"]
    model = trainer.model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        batch = {"input_ids": ROWS.input_ids.long(), "labels": ROWS.labels.long()}
        expected = float(model(**batch).loss)
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_callback_of_another_trainer(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    first = new_trainer(make_tiny_model("llama"), tmp_path, policy=None)
    second = new_trainer(make_tiny_model("llama"), tmp_path, policy=None)
    second.add_callback(PolicyCallback(first, policy="bf16-mixed"))
    with pytest.raises(TrainingError, match=r"made for another Trainer.*PolicyCallback\(trainer"):
        second.train()
    with pytest.raises(TrainingError, match="trainer is None"):
        PolicyCallback(None)


def test_two_callbacks(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    trainer = new_trainer(make_tiny_model("llama"), tmp_path, policy="bf16-mixed")
    trainer.add_callback(PolicyCallback(trainer, policy="fp32"))
    with pytest.raises(TrainingError, match="under a run already"):
        trainer.train()


@pytest.mark.parametrize("policy", ["fp16-mixed", "fp8-hybrid", "bf16-pure-sr"])
def test_training_twice(policy: str, make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    trainer = new_trainer(make_tiny_model("llama"), tmp_path, policy=policy)
    trainer.train()
    before = logged(trainer)
    trainer.train()
    assert len(before) == 6 and logged(trainer)[0] < before[0]
    (callback,) = (found for found in trainer.callback_handler.callbacks if isinstance(found, PolicyCallback))
    assert callback.run is not None and callback.run.counters.updates == 6
    assert callback.run.counters.micro_batches == 12  # two a step


def test_two_precisions_at_once_are_refused(make_tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the Trainer has mixed precision 'bf16' of its own"):
        new_trainer(make_tiny_model("llama"), tmp_path, policy="bf16-mixed", bf16=True)
