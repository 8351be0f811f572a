"""`chat`: conversations in the model's own chat template, only the assistant's tokens scored.

A row with ``messages`` is one conversation and one sequence: rendered, cut at the right, padded at the right.
Built-in sets hold no conversations; their documents become some by this rule: the user asks "Explain: <title>", and
the assistant answers with the text. A text longer than a sequence (at four characters a token) is cut at blank lines
into parts; the question for the second says "(part 2)", and so on.

Which tokens are the assistant's: the turn starts where the rendering of all messages before it, generation prompt
included, ends; it ends where the rendering of all messages up to it ends, white space left out (so the end-of-turn
token is scored). A template that rewrites earlier turns (some drop their reasoning) makes these no prefix of the
whole; such turns are not scored. Templates need no ``{% generation %}`` mark for this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bitwright.errors import DataError, MissingExtra
from bitwright.search.documents import Document, Message
from bitwright.search.task import Encoder, Piece, Task

_CHARS_PER_TOKEN = 4


def _pieces(encoder: Encoder, document: Document, room: int) -> Iterator[Piece]:
    if getattr(encoder.tokenizer, "chat_template", None) is None:
        raise DataError(
            "task 'chat' needs a chat template, and the model's tokenizer has none; use --task text, or a chat model"
        )
    for messages in _conversations(document, room):
        whole = _render(encoder, messages, prompt=False)
        ids, scored = _encode(encoder, whole, _assistant_spans(encoder, messages, whole))
        if any(scored[1:room]):
            yield Piece(ids=ids[:room], scored=scored[:room])


def _conversations(document: Document, room: int) -> Iterator[Sequence[Message]]:
    if document.messages is not None:
        yield document.messages
        return
    if document.title is None:
        raise DataError(
            f"task 'chat' needs conversations, and the text source holds plain text ({document.text[:40]!r}); give a "
            '.jsonl file with {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]} '
            "in each row, or use --task text"
        )
    for number, part in enumerate(_parts(document.text, max_chars=_CHARS_PER_TOKEN * room), start=1):
        question = f"Explain: {document.title}" + (f" (part {number})" if number > 1 else "")
        yield ({"role": "user", "content": question}, {"role": "assistant", "content": part})


def _parts(text: str, max_chars: int) -> Iterator[str]:
    """Cut a text into parts of at most `max_chars` characters, at blank lines where there is one."""
    rest = text.strip()
    while len(rest) > max_chars:
        cut = rest.rfind("\n\n", 1, max_chars)
        cut = cut if cut > 0 else max_chars
        yield rest[:cut].strip()
        rest = rest[cut:].strip()
    if rest:
        yield rest


def _assistant_spans(encoder: Encoder, messages: Sequence[Message], whole: str) -> list[tuple[int, int]]:
    """Return the character ranges of the assistant's turns in the rendered conversation, in order."""
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(encoder, messages[:index], prompt=True)
        until = _render(encoder, messages[: index + 1], prompt=False)
        if whole.startswith(before) and whole.startswith(until) and len(until) > len(before):
            spans.append((len(before), len(before) + len(until[len(before) :].rstrip())))
    return spans


def _encode(encoder: Encoder, whole: str, spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return ids and whether each starts inside one of the spans."""
    encoded = encoder.encode_with_offsets(whole)
    if encoded is not None:
        all_ids, starts = encoded
        return all_ids, tuple(any(first <= start < last for first, last in spans) for start in starts)
    # A tokenizer without offsets reads the turns one by one, as it does when a prompt is continued.
    ids: tuple[int, ...] = ()
    scored: tuple[bool, ...] = ()
    position = 0
    for first, last in (*spans, (len(whole), len(whole))):
        for text, is_assistant in ((whole[position:first], False), (whole[first:last], True)):
            part = encoder.encode(text) if text else ()
            ids += part
            scored += (is_assistant,) * len(part)
        position = last
    return ids, scored


def _render(encoder: Encoder, messages: Sequence[Message], *, prompt: bool) -> str:
    try:
        from jinja2.exceptions import TemplateError
    except ImportError as error:
        raise MissingExtra("jinja2", "hf", "rendering a chat template") from error
    try:
        rendered = encoder.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=prompt
        )
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(
            f"the model's chat template refuses a conversation with the roles {roles} ({error}); correct the row so "
            "that it follows the template's rules"
        ) from error
    return str(rendered)


TASKS = (
    Task(
        name="chat",
        description="conversations in the model's chat template, the assistant's tokens scored",
        packed=False,
        pieces=_pieces,
    ),
)
