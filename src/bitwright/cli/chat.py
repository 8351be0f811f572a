"""``bitwright chat PLAN``: talk to the model as a plan has it, turn by turn.

Keys and values of what was said are kept: a turn reads what is new, from where the chat and the cache part. Where the
model has no positions left, the oldest turns are forgotten, which is said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from bitwright.cli.run_ import (
    ModelOption,
    ModeOption,
    NewTokensOption,
    PlanArgument,
    SeedOption,
    TemperatureOption,
    TopPOption,
    open_planned,
    say_speed,
    write_text,
)
from bitwright.errors import DataError
from bitwright.plan import load_plan
from bitwright.report.units import spell_count

#: What ends a chat, as the end of the input does.
_ENDINGS = ("/exit", "/quit")


def chat_command(
    plan: PlanArgument,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told before the first turn.")
    ] = None,
    max_new_tokens: NewTokensOption = 256,
    mode: ModeOption = "auto",
    model: ModelOption = None,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.9,
    seed: SeedOption = 0,
) -> None:
    """Talk to the model as the plan has it: one line a turn, /exit or the end of the input ends it."""
    planned, tokenizer = open_planned(load_plan(plan), model, mode)
    from bitwright.inference.generation.sampling import Sampling

    console = Console(stderr=True, highlight=False)
    chat = _Chat(planned=planned, tokenizer=tokenizer, max_new_tokens=max_new_tokens)
    if system is not None:
        chat.messages.append({"role": "system", "content": system})
    turn = 0
    while (line := _ask(console)) is not None:
        if not line.strip():
            continue
        # another seed for every turn, or the same question had the same answer
        sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed + turn)
        try:
            num_forgotten = chat.make_room(line)
        except DataError as error:
            if not chat.began:
                raise
            console.print(f"not said: {error}", markup=False, style="red")
            continue
        if num_forgotten:
            oldest = spell_count(num_forgotten, "turn")
            console.print(f"the context is full: the oldest {oldest} of this chat are forgotten", style="yellow")
        found = chat.answer(line, sampling)
        console.print(say_speed(planned, found), markup=False, style="dim")
        turn += 1


def _ask(console: Console) -> str | None:
    """The next line; None at the end."""
    try:
        line = console.input("[bold]you: [/bold]")
    except EOFError:
        return None
    return None if line.strip() in _ENDINGS else line


@dataclass(kw_only=True, eq=False)
class _Chat:
    planned: Any
    tokenizer: Any
    max_new_tokens: int
    messages: list[dict[str, str]] = field(default_factory=list)
    cache: Any = None
    #: Tokens whose keys and values are in the cache.
    known: list[int] = field(default_factory=list)

    @property
    def began(self) -> bool:
        """Whether something was answered already."""
        return self.cache is not None

    def make_room(self, text: str) -> int:
        """Forget the oldest turns, as many as leave room for something to be said and answered; return how many.

        Raises:
            DataError: there would be none with all of them forgotten; none is then.
        """
        from bitwright.inference.generation.generate import raise_if_too_long
        from bitwright.inference.generation.text_stream import encode_chat

        told = [message for message in self.messages if message["role"] == "system"]
        turns = self.messages[len(told) :]
        for num_forgotten in range(len(turns) // 2 + 1):
            kept = [*told, *turns[2 * num_forgotten :]]
            num_tokens = encode_chat(self.tokenizer, [*kept, {"role": "user", "content": text}]).shape[1]
            try:
                raise_if_too_long(self.planned, num_tokens, self.max_new_tokens)
            except DataError:
                if 2 * num_forgotten == len(turns):
                    raise
                continue
            self.messages = kept
            return num_forgotten
        raise AssertionError("turns are pairs")

    def answer(self, text: str, sampling: Any) -> Any:
        """Say something, for which there is room, and write what the model says to it."""
        from bitwright.inference.generation.generate import generate
        from bitwright.inference.generation.text_stream import TextStream, encode_chat, stop_ids_of

        messages = [*self.messages, {"role": "user", "content": text}]
        ids = encode_chat(self.tokenizer, messages)
        first = self._part(ids[0].tolist())
        pieces: list[str] = []

        def write(piece: str) -> None:
            pieces.append(piece)
            write_text(piece)

        stream = TextStream(self.tokenizer, write)
        found = generate(
            self.planned,
            ids[:, first:],
            max_new_tokens=self.max_new_tokens,
            sampling=sampling,
            stop_ids=stop_ids_of(self.planned, self.tokenizer),
            on_tokens=lambda tokens: None if tokens[0] is None else stream.add(tokens[0]),
            cache=self.cache,
        )
        stream.end()
        write_text("\n")
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        self.cache = found.cache
        self.known = [*ids[0].tolist(), *found.tokens[0]][: int(self.cache.get_seq_length())]
        return found

    def _part(self, ids: list[int]) -> int:
        """Where what is said and what the cache holds part; the cache forgets what comes after."""
        if self.cache is None:
            return 0
        pairs = zip(self.known, ids[:-1], strict=False)  # one token at least has to be read
        first = next((at for at, (known, wanted) in enumerate(pairs) if known != wanted), None)
        first = min(len(self.known), len(ids) - 1) if first is None else first
        held = int(self.cache.get_seq_length())
        if any(getattr(layer, "is_sliding", False) for layer in self.cache.layers):
            self.cache, first = None, 0
        elif held > first:
            self.cache.crop(first - held)
        return first
