"""The chat task: which tokens are the assistant's, in templates of several kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from text_inputs import byte_tokenizer, split
from transformers import PreTrainedTokenizerFast

from bitwright.errors import DataError
from bitwright.search.documents import Document
from bitwright.search.task import TASKS, Encoder, Piece

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: Drops what earlier assistant turns said, as some templates drop their reasoning.
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}…{% else %}{{ m.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REFUSING = "{{ raise_exception('Conversation roles must alternate') }}"

TURNS = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four."},
)


class SlowTokenizer:
    """Without offsets: the task must read turns one by one."""

    is_fast = False

    def __init__(self, fast: PreTrainedTokenizerFast) -> None:
        self.fast, self.chat_template = fast, fast.chat_template

    def __call__(self, text: str, **options: Any) -> Any:
        return self.fast(text, **options)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return self.fast.apply_chat_template(messages, **options)


def pieces(tokenizer: Any, document: Document, room: int = 500) -> list[Piece]:
    return list(TASKS["chat"].pieces(Encoder(tokenizer), document, room))


def scored_text(tokenizer: PreTrainedTokenizerFast, piece: Piece) -> str:
    return tokenizer.decode([index for index, scored in zip(piece.ids, piece.scored, strict=True) if scored])


@pytest.mark.parametrize("slow", [False, True])
def test_the_assistants_tokens_are_scored_with_their_end(slow: bool) -> None:
    tokenizer = byte_tokenizer(chat_template=CHATML)
    (piece,) = pieces(SlowTokenizer(tokenizer) if slow else tokenizer, Document(text="x", messages=TURNS))
    assert scored_text(tokenizer, piece) == "Hello.<|end|>Four.<|end|>"
    assert tokenizer.decode(piece.ids) == tokenizer.apply_chat_template([*TURNS], tokenize=False)


def test_a_template_that_forgets_has_its_last_turn_scored() -> None:
    tokenizer = byte_tokenizer(chat_template=FORGETFUL)
    (piece,) = pieces(tokenizer, Document(text="x", messages=TURNS))
    assert scored_text(tokenizer, piece) == "Four.<|end|>"


def test_conversations_without_an_assistant_in_reach_are_left_out() -> None:
    tokenizer = byte_tokenizer(chat_template=CHATML)
    assert pieces(tokenizer, Document(text="x", messages=TURNS[:1])) == []
    assert pieces(tokenizer, Document(text="x", messages=TURNS), room=10) == []


def test_a_topic_becomes_questions_and_answers() -> None:
    tokenizer = byte_tokenizer(chat_template=CHATML)
    text = "first " * 30 + "\n\n" + "second " * 30
    first, second = pieces(tokenizer, Document(title="the word", text=text), room=64)
    whole = tokenizer.decode(first.ids), tokenizer.decode(second.ids)
    assert whole[0].startswith("<|user|>Explain: the word<|end|>\n<|assistant|>first first")
    assert whole[1].startswith("<|user|>Explain: the word (part 2)<|end|>\n<|assistant|>second")
    assert len(first.ids) == len(second.ids) == 64


def test_rows_are_padded_at_the_right_and_padding_is_not_scored(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{index}?"}, {"role": "assistant", "content": f"{index}!"}]}
        for index in range(300)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    tokenizer = byte_tokenizer(chat_template=CHATML)
    splits = split(tokenizer, path, task="chat", sequence_length=64)
    final = splits.final
    assert final.input_ids.shape == (64, 64)
    assert final.padding.any(dim=1).all() and not (final.padding & final.scored).any()
    for row in range(64):
        real = int((~final.padding[row]).sum())
        assert final.padding[row, real:].all()
        assert tokenizer.decode(final.input_ids[row, :real]).endswith("!<|end|>\n")
    digits = final.scored.sum(dim=1) - len("!<|end|>")
    assert int(digits.min()) >= 1 and int(digits.max()) <= 3


def test_the_built_in_docs_can_be_asked_about() -> None:
    splits = split(
        byte_tokenizer(chat_template=CHATML),
        "docs",
        task="chat",
        calibration_tokens=4096,
        evaluation_tokens=8192,
        sequence_length=128,
    )
    assert (splits.calibrate.num_sequences, splits.final.num_sequences) == (32, 64)


def test_no_template_is_refused() -> None:
    with pytest.raises(DataError, match="needs a chat template, and the model's tokenizer has none; use --task text"):
        split(byte_tokenizer(), "docs", task="chat")


def test_plain_text_is_no_conversation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {index} " * 30 for index in range(9)))
    with pytest.raises(DataError, match=r"needs conversations, and the text source holds plain text .*\.jsonl"):
        split(byte_tokenizer(chat_template=CHATML), tmp_path / "a.txt", task="chat")


def test_what_the_template_refuses_is_said() -> None:
    with pytest.raises(DataError, match=r"refuses a conversation with the roles user.*roles must alternate"):
        pieces(byte_tokenizer(chat_template=REFUSING), Document(text="x", messages=TURNS))


def test_too_few_conversations_in_reach_are_told_what_helps(tmp_path: Path) -> None:
    """A conversation is one sequence, so that shorter sequences make no more of them and may lose the answers."""
    rows = [
        {"messages": [{"role": "user", "content": f"{index:4d}" * 10}, {"role": "assistant", "content": "Yes."}]}
        for index in range(60)
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    tokenizer = byte_tokenizer(chat_template=CHATML)
    says = r" 24 sequences of 24 documents.*but 64 are needed; raise --sequence-length.*about 160 conversations"
    with pytest.raises(DataError, match=says):
        split(tokenizer, path, task="chat", sequence_length=128, evaluation_tokens=64 * 128)
    says = r"calibrate split .* 0 sequences of 12 documents.*but 10 are needed; lower --tokens, raise --sequence-length"
    with pytest.raises(DataError, match=says):
        split(tokenizer, path, task="chat")
