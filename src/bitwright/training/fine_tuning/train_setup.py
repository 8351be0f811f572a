"""A configuration → the model, its text, its optimizer, and the run under a policy.

Whatever can be refused without the model is refused before it is loaded; whatever needs it, before the first step. Of
many processes each reads the same text and the same weights, and takes its own rows (`batches.py`).

The order is: load, adapters, formats of parameters, onto the device, spread over ranks, wire, optimizer, policy. An
optimizer that was made earlier would hold parameters that are no longer the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bitwright import models
from bitwright.comms.hooks import WireHook, register
from bitwright.comms.wire import wire_format
from bitwright.errors import TrainingError
from bitwright.models.loaded import LoadedModel, has_head
from bitwright.search.documents import raise_if_no_source
from bitwright.search.task import TASKS
from bitwright.training.checkpoints.random_state import seed_generators
from bitwright.training.data.batches import Batches
from bitwright.training.data.token_rows import TokenRows, make_token_rows, read_training_documents, share_out
from bitwright.training.fine_tuning.config import CommunicationConfig, TrainConfig
from bitwright.training.fine_tuning.schedules import make_schedule
from bitwright.training.held_parameters import cast_parameters
from bitwright.training.lora import LoraSettings, add_lora
from bitwright.training.optimizer.optimizers import make_optimizer
from bitwright.training.policy import Policy
from bitwright.training.prepare import find_policy, prepare
from bitwright.training.processes.distributed import spread
from bitwright.training.processes.ranks import Ranks
from bitwright.training.run import TrainingRun


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Everything that a training loop needs."""

    run: TrainingRun
    batches: Batches
    #: None: nothing is measured.
    validation: TokenRows | None
    tokenizer: Any
    #: What a person should know of how it was set up.
    notes: tuple[str, ...]
    #: None: gradients travel as the way to spread a model has them travel.
    exchange: WireHook | None

    @property
    def learning_rate(self) -> float:
        """Of the step to come, of the optimizer's first group."""
        return float(self.run.optimizer.param_groups[0]["lr"])


def set_up(config: TrainConfig, ranks: Ranks, device: torch.device) -> Prepared:
    """Load and assemble; see the opening of this file.

    Args:
        config: what is asked.
        ranks: all that train together.
        device: where this process computes.

    Raises:
        UnknownName, TrainingError, ModelError, DataError, MissingExtra: something does not exist or does not fit.
    """
    settings = None if config.lora is None else LoraSettings(**config.lora.model_dump())
    TASKS[config.data.task]
    for source in (config.data.train, config.data.validation):
        if source is not None:
            raise_if_no_source(source)
    policy = find_policy(config.policy, device)
    if config.communication is not None:
        _raise_if_not_exchanged(config.communication, policy.policy, ranks)
    if settings is not None:
        _raise_if_adapters_have_no_masters(settings, policy.policy)
    seed_generators(config.seed)
    loaded = models.load(config.model, allow_pickle=config.allow_pickle)
    train, validation, notes = _read_rows(config, loaded)
    model = _trainable(loaded)
    if settings is not None:
        model = add_lora(model, settings)
    cast_parameters(model, policy.policy)
    model = spread(model.to(device), config.parallel, ranks)
    exchange, said = _exchange(config.communication, model)
    optimizer = make_optimizer(config.optimizer.name, model.parameters(), config.optimizer.options)
    schedule = make_schedule(
        optimizer,
        config.schedule.kind,
        steps=config.steps,
        warmup_steps=config.schedule.warmup_steps,
        final_share=config.schedule.final_share,
    )
    run = prepare(
        model,
        optimizer,
        policy=config.policy,
        accumulate=config.accumulate,
        max_grad_norm=config.max_grad_norm,
        scheduler=schedule,
        seed=config.seed,
        emulate=config.emulate,
    )
    # what is drawn while training (dropout) differs from rank to rank, what the model is made of does not
    seed_generators((config.seed + ranks.rank) % 2**63)
    batches = Batches(train, batch=config.batch, seed=config.seed, rank=ranks.rank, world_size=ranks.world_size)
    return Prepared(
        run=run,
        batches=batches,
        validation=validation,
        tokenizer=loaded.tokenizer,
        notes=(*loaded.notes, *notes, *said),
        exchange=exchange,
    )


def _raise_if_not_exchanged(asked: CommunicationConfig, policy: Policy, ranks: Ranks) -> None:
    """Refuse a format that nothing would travel in."""
    name = wire_format(asked.wire).name
    if policy.parameters != "fp32" and ranks.world_size > 1:
        raise TrainingError(
            f"communication.wire is '{name}', and policy '{policy.name}' exchanges gradients in "
            f"{policy.gradients} when the backward pass is over; leave [communication] out, or train under a policy "
            "with fp32 parameters"
        )


def _exchange(asked: CommunicationConfig | None, model: nn.Module) -> tuple[WireHook | None, tuple[str, ...]]:
    """How gradients travel, where it was asked for; and what is to be said of it."""
    if asked is None:
        return None, ()
    if not isinstance(model, DistributedDataParallel):
        return None, (f"communication.wire is '{asked.wire}', and one process sends no gradients",)
    hook = register(model, wire=asked.wire, error_feedback=asked.error_feedback)
    feedback = ", and what rounding loses is sent with the next" if asked.error_feedback else ""
    return hook, (f"gradients travel in {hook.wire.name}, added up in fp32{feedback}",)


def _raise_if_adapters_have_no_masters(settings: LoraSettings, policy: Policy) -> None:
    if settings.adapters != "fp32" and policy.parameters == "fp32":
        raise TrainingError(
            f"lora.adapters is '{settings.adapters}', and policy '{policy.name}' keeps what it trains in fp32, or "
            'updates would be lost; write adapters = "fp32", or train under policy = "bf16-pure-sr"'
        )


def _trainable(loaded: LoadedModel) -> nn.Module:
    """The loaded model with gradients on and in training mode; anything but a causal language model is refused."""
    model: nn.Module = loaded.model
    if loaded.pooling is not None or not has_head(model):
        raise TrainingError(
            f"'{loaded.name}' predicts no tokens ({type(model).__name__}), and what is trained here are causal "
            "language models; choose one"
        )
    return model.requires_grad_(True).train()


def _read_rows(config: TrainConfig, loaded: LoadedModel) -> tuple[TokenRows, TokenRows | None, tuple[str, ...]]:
    """Rows to train on, rows to measure on, and what is to be said of them."""
    data = config.data
    model: Any = loaded.model
    known = getattr(model.config, "max_position_embeddings", None)
    if known is not None and data.sequence_length > known:
        raise TrainingError(
            f"data.sequence_length is {data.sequence_length}, and '{loaded.name}' knows {known} positions; lower it"
        )
    documents = read_training_documents(data.train)
    notes: tuple[str, ...] = ()
    kept_back: tuple[Any, ...] = ()
    if data.validation is not None:
        kept_back = read_training_documents(data.validation)
        shared = {document.text for document in documents} & {document.text for document in kept_back}
        if shared:
            notes = (f"{len(shared)} documents of '{data.validation}' also stand in '{data.train}'",)
    elif data.validation_share:
        documents, kept_back = share_out(documents, data.validation_share, seed=config.seed)

    def rows(part: tuple[Any, ...], source: str, max_rows: int | None = None) -> TokenRows:
        return make_token_rows(
            part,
            loaded.tokenizer,
            source=source,
            sequence_length=data.sequence_length,
            task=data.task,
            vocabulary_size=model.get_input_embeddings().num_embeddings,
            max_rows=max_rows,
        )

    validation = rows(kept_back, data.validation or data.train, config.evaluation.max_sequences) if kept_back else None
    return rows(documents, data.train), validation, notes
