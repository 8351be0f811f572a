"""Text from a model: prefill, then a decode loop in which the host waits for nothing.

    found = generate(planned, input_ids, max_new_tokens=64, stop_ids={tokenizer.eos_token_id})

The prompt runs at once, every token after it alone, against a cache. What a step needs of the step before stays on the
device: its token, the mask, the positions. The host hears of tokens as `token_reader.py` has it, tells the caller
(`on_tokens`), and looks for stop tokens; on a GPU one step late, so that at most one step is run for nothing. There is
no `.item()`, no `.cpu()` and no `synchronize` in a step (`tests/inference/test_generate.py` counts).

Where inputs of matrices may overflow (`fallback.py`), a GPU's counts are not looked at either: they come to the host
with the step's token, and are counted there. A step that saturated something is run once more, exactly, from the cache
as it was (`late_watch.py`). Steps that had to be run again often are exact at once; so are all of them where a cache
cannot be brought back, and `Generated.notes` says so.

Legend: B sequences, T tokens.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from bitwright.errors import DataError, MissingExtra
from bitwright.inference.generation.late_watch import LateWatch, WatchedStep
from bitwright.inference.generation.sampling import Chooser, Sampling
from bitwright.inference.generation.token_reader import DeviceClock, TokenReader, bring

#: Told of every step: the new token of each sequence that goes on still, None for those that have ended.
OnTokens = Callable[[list[int | None]], None]
CacheKind = Literal["dynamic", "static"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """What a model went on with."""

    #: New tokens of each sequence, stop tokens left out.
    tokens: tuple[tuple[int, ...], ...]
    #: Whether each sequence came to a stop token.
    stopped: tuple[bool, ...]
    num_prompt_tokens: int
    #: Decode steps that ran, after the first token, which the prefill gives.
    num_steps: int
    prefill_s: float
    decode_s: float
    #: Bytes of the cache at the end.
    cache_bytes: int
    #: The cache itself, for what comes next.
    cache: Any = field(repr=False, default=None)
    #: Anything a reader must know.
    notes: tuple[str, ...] = ()

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens of all sequences per second of decoding; 0 where there was none."""
        return len(self.tokens) * self.num_steps / self.decode_s if self.decode_s > 0 else 0.0


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
    sampling: Sampling | None = None,
    stop_ids: Collection[int] = (),
    on_tokens: OnTokens | None = None,
    cache: Any = None,
    cache_kind: CacheKind = "dynamic",
    lag: int | None = None,
) -> Generated:
    """Go on with prompts.

    Args:
        model: a causal language model of transformers, under a plan or not.
        input_ids: prompts [B, T], where the model is or on the host; with a cache, what comes behind what it holds.
        max_new_tokens: at most so many for each.
        attention_mask: [B, T] of 1 and 0, where shorter prompts are padded on their left; None: nothing is padded.
        sampling: how tokens are chosen; None: the likeliest.
        stop_ids: tokens that end a sequence.
        on_tokens: told of tokens as they come.
        cache: keys and values of what comes before the prompt; None: nothing does.
        cache_kind: "static" makes one of fixed size, for compiled models.
        lag: steps that the host hears late; None: 0 on a CPU, else 1.

    Raises:
        DataError: empty prompts, or more tokens than the model has positions for.
        MissingExtra: transformers is not installed.
    """
    from bitwright.inference.cache.coded_cache import cache_bytes

    past = 0 if cache is None else int(cache.get_seq_length())
    raise_if_too_long(model, past + input_ids.shape[1], max_new_tokens)
    batch, device = input_ids.shape[0], next(model.parameters()).device
    input_ids = bring(input_ids, device)
    if attention_mask is not None:
        attention_mask = bring(attention_mask, device)
    loop = _Loop(
        model=model,
        cache=_new_cache(model, cache_kind, input_ids.shape[1] + max_new_tokens) if cache is None else cache,
        choose=Chooser(sampling or Sampling(), device),
        reader=TokenReader(device, lag),
        run=getattr(model, "bitwright_run", None),
        known_arguments=frozenset(inspect.signature(cast(Any, model).forward).parameters),
        stop_ids=frozenset(stop_ids),
        mask=None if attention_mask is None else _whole_mask(attention_mask, past, max_new_tokens),
        num_past=past,
        produced=[[] for _ in range(batch)],
        stopped=[False] * batch,
        on_tokens=on_tokens,
    )
    clock = DeviceClock(device)
    clock.mark()
    loop.prefill(input_ids)
    clock.mark()
    loop.decode(max_new_tokens)
    clock.mark()
    prefill_s, decode_s = clock.seconds()
    return Generated(
        tokens=tuple(map(tuple, loop.produced)),
        stopped=tuple(loop.stopped),
        num_prompt_tokens=input_ids.shape[1],
        num_steps=loop.num_steps,
        prefill_s=prefill_s,
        decode_s=decode_s,
        cache_bytes=cache_bytes(loop.cache),
        cache=loop.cache,
        notes=loop.watch.notes,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Step:
    """A step of which the host has not heard: the tokens that went in, [B, 1], and where they stand."""

    inputs: Tensor
    positions: Tensor
    watched: WatchedStep = field(default_factory=WatchedStep)


@dataclass(kw_only=True, eq=False)
class _Loop:
    model: Any
    cache: Any
    choose: Chooser
    reader: TokenReader
    #: How the model runs, where it says so.
    run: Any
    #: Arguments that the model's forward has.
    known_arguments: frozenset[str]
    stop_ids: frozenset[int]
    #: [B, all tokens]; None: nothing is padded.
    mask: Tensor | None
    #: Tokens in the cache.
    num_past: int
    produced: list[list[int]]
    stopped: list[bool]
    on_tokens: OnTokens | None
    #: What runs next, once the prompt was read.
    next: _Step | None = None
    #: Steps of which the host has not heard.
    flying: deque[_Step] = field(default_factory=deque)
    num_heard: int = 0
    num_steps: int = 0
    watch: LateWatch = field(default_factory=lambda: LateWatch(run=None))

    def prefill(self, input_ids: Tensor) -> None:
        """Read the prompts and choose the first token."""
        end = self.num_past + input_ids.shape[1]
        if self.mask is None:
            positions = torch.arange(self.num_past, end, device=input_ids.device).expand_as(input_ids)
        else:
            positions = (self.mask[:, :end].cumsum(-1) - 1)[:, self.num_past :].clamp(min=0)
        self._run_step(_Step(inputs=input_ids, positions=positions))

    def decode(self, max_new_tokens: int) -> None:
        """Token by token, until all sequences have stopped or are as long as they may be."""
        assert self.next is not None
        self.watch = LateWatch.of(self.run, self.cache, self.reader.lag)
        with self.watch:
            while not all(self.stopped):
                has_room = self.num_heard + len(self.flying) < max_new_tokens
                if has_room and len(self.flying) <= self.reader.lag:
                    self._run_step(self.next)
                    self.num_steps += 1
                elif self.flying:
                    self._hear()
                else:
                    break

    def _run_step(self, step: _Step, *, is_repeated: bool = False) -> None:
        """Put tokens in, choose the next ones, and send them to the host."""
        watched = self.watch.before_step(self.cache, is_repeated=is_repeated)
        chosen = self.choose(self._logits(step))
        self.next = _Step(inputs=chosen, positions=step.positions[:, -1:] + 1)
        self.flying.append(replace(step, watched=watched))
        counts = self.watch.after_step(watched)
        self.reader.send(chosen if counts is None else torch.cat([chosen.flatten(), counts]))

    def _logits(self, step: _Step) -> Tensor:
        """Of the last token, [B, V]."""
        self.num_past += step.inputs.shape[1]
        optional = {"position_ids": step.positions, "logits_to_keep": 1}
        output = self.model(
            input_ids=step.inputs,
            attention_mask=None if self.mask is None else self.mask[:, : self.num_past],
            cache=self.cache,
            use_cache=True,
            **{name: value for name, value in optional.items() if name in self.known_arguments},
        )
        self.cache = output.cache
        logits: Tensor = output.logits[:, -1]
        return logits

    def _hear(self) -> None:
        """Take in the oldest tokens under way, or run their step again where something overflowed in it."""
        step = self.flying.popleft()
        numbers = self.reader.read()
        numbers, counts = numbers[: len(self.produced)], numbers[len(self.produced) :]
        if self.watch.must_repeat(step.watched, counts):
            self._repeat(step)
            return
        tokens: list[int | None] = []
        for sequence, token in enumerate(numbers):
            self.stopped[sequence] = self.stopped[sequence] or token in self.stop_ids
            tokens.append(None if self.stopped[sequence] else token)
            if not self.stopped[sequence]:
                self.produced[sequence].append(token)
        self.num_heard += 1
        if self.on_tokens is not None and any(token is not None for token in tokens):
            self.on_tokens(tokens)

    def _repeat(self, step: _Step) -> None:
        """Forget a step and those after it, and run it exactly."""
        num_forgotten = 1 + len(self.flying)
        self.watch.take_back(step.watched, num_forgotten)
        self.num_past -= num_forgotten
        self.num_steps -= len(self.flying)
        self.reader.forget(len(self.flying))
        self.flying.clear()
        self._run_step(step, is_repeated=True)


def raise_if_too_long(model: nn.Module, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise DataError for an empty prompt, nothing to say, or more tokens than the model has positions for."""
    if num_prompt_tokens == 0:
        raise DataError("the prompt is empty, and a model goes on with at least one token; give some text")
    if max_new_tokens < 1:
        raise DataError(f"{max_new_tokens} new tokens were asked for; ask for at least 1")
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and num_prompt_tokens + max_new_tokens > positions:
        raise DataError(
            f"{num_prompt_tokens} tokens of prompt and {max_new_tokens} new ones are more than the model's {positions} "
            "positions; shorten the prompt or ask for fewer tokens"
        )


def _whole_mask(attention_mask: Tensor, num_past: int, max_new_tokens: int) -> Tensor:
    """The mask of everything that there will be, [B, past + T + new]."""
    before = attention_mask.new_ones(attention_mask.shape[0], num_past)
    behind = attention_mask.new_ones(attention_mask.shape[0], max_new_tokens)
    return torch.cat([before, attention_mask, behind], dim=1)


def _new_cache(model: Any, kind: CacheKind, num_tokens: int) -> Any:
    try:
        from transformers import DynamicCache, StaticCache
    except ImportError as error:
        raise MissingExtra("transformers", "hf", "generating text") from error
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=num_tokens)
    return DynamicCache(config=model.config)
