"""``bitwright chat PLAN``: talk to the model as a plan has it, turn by turn.

Keys and values of what was said are kept: a turn reads what is new, from where the chat and the cache part.
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
from bitwright.plan import load_plan

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

    def answer(self, text: str, sampling: Any) -> Any:
        """Say something, and write what the model says to it."""
        from bitwright.inference.generation.generate import generate, raise_if_too_long
        from bitwright.inference.generation.text_stream import TextStream, encode_chat, stop_ids_of

        messages = [*self.messages, {"role": "user", "content": text}]
        ids = encode_chat(self.tokenizer, messages)
        raise_if_too_long(self.planned, ids.shape[1], self.max_new_tokens)
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
