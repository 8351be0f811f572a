"""Small models, text, and one training run under a policy: what all proofs are made of.

    gpt2      4 layers of GPT-2 (Conv1D, LayerNorm, GELU), 128 wide, random
    llama     the same size of Llama (Linear, RMSNorm, SwiGLU, RoPE), random
    smollm2   the built-in SmolLM2-135M, fine-tuned

Random models read bytes, SmolLM2 tokens; the text is the interpreter's own documentation, a tenth of its documents held
out. A seed fixes weights and the order of text, so that runs under different policies are pairs: whatever is
equal in a run is equal in its pair. Learning rates rise, then fall to zero along a cosine.

Validation is that of the trained weights, widened to fp32 and run in fp32, for all alike: it judges what was learned,
not how the loss is computed.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import TrainingError
from bitwright.training.policy import Policy, policy_named
from bitwright.training.prepare import prepare

#: Name of a run without a policy: a plain loop around torch.autocast in fp16, without a loss scale and without a check.
UNGUARDED = "fp16, no scale"
#: What says that a run has died: the loss of so many steps in a row is not finite.
_DEAD_AFTER = 3
#: Swallowed updates are noted every so many steps; each note counts from the first step on.
_SWALLOWED_EVERY = 20
#: One of so many documents is held out.
_HELD_OUT = 10

#: What looks at a run: given its model, it returns what is called with the number of each step.
Look = Callable[[int], None]
Watch = Callable[[nn.Module], Look]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything about a run but its policy and seed."""

    model: str
    steps: int
    #: Sequences of a step, and tokens of each.
    batch: int = 8
    length: int = 64
    learning_rate: float = 1e-3
    warm_up: int = 20
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    #: Sequences of the validation.
    validation: int = 128
    #: Layers and width of random models.
    layers: int = 4
    width: int = 128
    #: Steps whose batch holds the outlier token (`outlier.py`), and only with it is there one in the model.
    outlier_steps: tuple[int, ...] = ()

    def quick(self) -> Setup:
        """The same, so short that it only shows that everything runs."""
        shorter: dict[str, Any] = {
            "steps": 8 if self.model in _RANDOM else 2,
            "warm_up": 2,
            "batch": 2,
            "length": 32,
            "validation": 4,
        }
        if self.outlier_steps:
            shorter["outlier_steps"] = (2, 5)
        return replace(self, layers=2, width=64, **shorter)


# --- models -----------------------------------------------------------------------------------------------------------

_VOCABULARY = 256


def build(setup: Setup, seed: int) -> nn.Module:
    """A model in fp32, ready to train: random under a seed, or the built-in one."""
    if setup.model == "smollm2":
        return copy.deepcopy(_smollm2()[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _RANDOM[setup.model](setup)
    if setup.outlier_steps:
        from outlier import plant

        plant(model)
    return model.train()


def _gpt2(setup: Setup) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=_VOCABULARY,
            n_positions=setup.length,
            n_embd=setup.width,
            n_layer=setup.layers,
            n_head=setup.width // 32,
            activation_function="gelu",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    model.loss_type = "ForCausalLM"  # which its name does not say
    return model


def _llama(setup: Setup) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=setup.width,
            intermediate_size=3 * setup.width,
            num_hidden_layers=setup.layers,
            num_attention_heads=setup.width // 32,
            num_key_value_heads=setup.width // 32,
            max_position_embeddings=setup.length,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


_RANDOM: dict[str, Callable[[Setup], nn.Module]] = {"gpt2": _gpt2, "llama": _llama}


@cache
def _smollm2() -> tuple[nn.Module, Any]:
    from bitwright.models.load import load

    loaded = load("demo")
    loaded.model.requires_grad_(True)
    loaded.model.config.use_cache = False
    return loaded.model.train(), loaded.tokenizer


# --- text -------------------------------------------------------------------------------------------------------------


@cache
def _text(model: str) -> tuple[Tensor, Tensor]:
    """Ids of the text to learn from and of that held out, int64 [tokens] each."""
    from bitwright.search.documents import CALIBRATION_SETS

    documents = [document.text for document in CALIBRATION_SETS["docs"].documents()]
    held_out = documents[::_HELD_OUT]
    learned = [text for number, text in enumerate(documents) if number % _HELD_OUT]
    return _ids(model, "\n\n".join(learned)), _ids(model, "\n\n".join(held_out))


def _ids(model: str, text: str) -> Tensor:
    if model == "smollm2":
        return torch.tensor(_smollm2()[1](text).input_ids)
    return torch.tensor(list(text.encode("utf-8")))


def batches(setup: Setup, seed: int) -> Iterator[Tensor]:
    """Ids of each step, int64 [batch, length]; the same for every policy."""
    learned, _ = _text(setup.model)
    generator = torch.Generator().manual_seed(seed)
    for step in range(setup.steps):
        starts = torch.randint(len(learned) - setup.length, (setup.batch,), generator=generator)
        ids = learned[starts[:, None] + torch.arange(setup.length)]
        if step in setup.outlier_steps:
            from outlier import TOKEN

            ids[0, setup.length // 2] = TOKEN
        yield ids


@torch.no_grad()
def validate(model: nn.Module, setup: Setup) -> float:
    """Mean loss per token of held-out text, of the weights in fp32; the model is fp32 afterwards."""
    _, held_out = _text(setup.model)
    rows = held_out[: len(held_out) // setup.length * setup.length].view(-1, setup.length)
    rows = rows[torch.linspace(0, len(rows) - 1, min(setup.validation, len(rows))).long()]
    model.float().eval()
    losses = [float(model(input_ids=part, labels=part).loss) * len(part) for part in rows.split(16)]
    return math.fsum(losses) / len(rows)


# --- a run ------------------------------------------------------------------------------------------------------------


def optimizer_of(model: nn.Module, setup: Setup) -> torch.optim.Optimizer:
    """AdamW, as everybody trains with."""
    return torch.optim.AdamW(
        model.parameters(), lr=setup.learning_rate, betas=(0.9, 0.95), weight_decay=setup.weight_decay
    )


def schedule_of(optimizer: torch.optim.Optimizer, setup: Setup) -> torch.optim.lr_scheduler.LambdaLR:
    """Up in a line, down to zero along a cosine."""

    def factor(step: int) -> float:
        up = (step + 1) / setup.warm_up
        return min(up, 0.5 * (1 + math.cos(math.pi * min(step / setup.steps, 1.0))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(
    setup: Setup,
    policy: str | Policy,
    seed: int,
    *,
    watch: Watch | None = None,
    **prepared: Any,
) -> dict[str, Any]:
    """One run.

    Args:
        setup: of the run.
        policy: a name of a policy, a policy, or `UNGUARDED`.
        seed: of weights and text.
        watch: called with the model; what it returns is called with the number of each step, while its gradients are
            there.
        prepared: further arguments of `prepare`.

    Returns:
        The losses of all steps (None where not finite), how many were skipped, the validation loss (None if the run
        died), when it died, and the median CPU seconds of a step.
    """
    model = build(setup, seed)
    optimizer = optimizer_of(model, setup)
    scheduler = schedule_of(optimizer, setup)
    look = None if watch is None else watch(model)
    if policy == UNGUARDED:
        take_step, close, run = _plain(model, optimizer, scheduler, setup, look), _nothing, None
    else:
        chosen = policy_named(policy) if isinstance(policy, str) else policy
        take_step, close, run = _guarded(model, optimizer, scheduler, setup, chosen, look, seed, prepared)
    losses, seconds, swallowed, given_up = [], [], [], None
    for ids in batches(setup, seed):
        begin = time.process_time()
        try:
            losses.append(take_step(ids))
        except TrainingError as error:
            given_up = str(error)
            break
        seconds.append(time.process_time() - begin)
        if run is None and len(losses) - _alive(losses) > _DEAD_AFTER:
            break
        if prepared.get("count_swallowed") and (len(losses) % _SWALLOWED_EVERY == 0 or len(losses) == setup.steps):
            swallowed.append({"step": len(losses), **{name: asdict(found) for name, found in run.swallowed.items()}})
    close()
    died = _died_at(losses) if given_up is None else len(losses)
    found = validate(model, setup) if died is None else math.nan
    outcome: dict[str, Any] = {
        "validation_loss": found if math.isfinite(found) else None,
        "died_at": died,
        "step_cpu_s": sorted(seconds)[len(seconds) // 2] if seconds else None,
        "losses": [round(loss, 5) if math.isfinite(loss) else None for loss in losses],
        "text": text_hash(setup, seed),
    }
    if run is not None:
        outcome["skipped"] = run.counters.skipped
        outcome["given_up"] = given_up
    if swallowed:
        outcome["swallowed"] = swallowed
    return outcome


def _plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, setup: Setup, look: Look | None
) -> Callable[[Tensor], float]:
    number = 0

    def take_step(ids: Tensor) -> float:
        nonlocal number
        with torch.autocast("cpu", torch.float16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), setup.max_grad_norm)
        if look is not None:
            look(number)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        number += 1
        return float(loss.detach())

    return take_step


def _guarded(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    setup: Setup,
    policy: Policy,
    look: Look | None,
    seed: int,
    prepared: dict[str, Any],
) -> tuple[Callable[[Tensor], float], Callable[[], None], Any]:
    run = prepare(
        model,
        optimizer,
        policy=policy,
        scheduler=scheduler,
        max_grad_norm=setup.max_grad_norm,
        seed=seed,
        emulate=True,
        monitor=None if look is None else lambda result: look(result.index),
        **prepared,
    )

    def take_step(ids: Tensor) -> float:
        with run.step() as step:
            step.backward(model(input_ids=ids, labels=ids).loss)
        assert step.result is not None
        return step.result.loss

    return take_step, run.close, run


def _nothing() -> None:
    """What a plain loop has to take back."""


def _died_at(losses: list[float]) -> int | None:
    """The first step of the losses at the end that are not finite, if they are enough of them."""
    return _alive(losses) if len(losses) - _alive(losses) >= _DEAD_AFTER else None


def _alive(losses: list[float]) -> int:
    """Steps up to the last one whose loss is finite."""
    return 1 + max((number for number, loss in enumerate(losses) if math.isfinite(loss)), default=-1)


def text_hash(setup: Setup, seed: int) -> str:
    """Names the ids of a run: pairs have the same."""
    digest = hashlib.sha256()
    for ids in batches(setup, seed):
        digest.update(ids.numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:12]
