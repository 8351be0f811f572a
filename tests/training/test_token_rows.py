"""Text → rows of tokens: what counts, what is filled up, what is refused; a byte is a token in these models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bitwright.errors import DataError, UnknownName
from bitwright.search.documents import Document
from bitwright.training.data.token_rows import IGNORED, make_token_rows, read_token_rows, share_out


def spell(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(ids.tolist())


def test_documents_lie_end_to_end_and_the_last_row_is_filled_up(tiny_tokenizer: Any) -> None:
    documents = [Document(text="abcdef"), Document(text="ghi")]  # 8 + 5 tokens with two newlines each
    rows = make_token_rows(documents, tiny_tokenizer, source="text", sequence_length=8)
    assert rows.num_rows == 2
    assert spell(tiny_tokenizer, rows.input_ids[0]) == "abcdef\n\n"
    assert spell(tiny_tokenizer, rows.input_ids[1][:5]) == "ghi\n\n"
    assert rows.padding is not None
    assert rows.padding.tolist() == [[False] * 8, [False] * 5 + [True] * 3]
    assert rows.labels[1, 5:].tolist() == [IGNORED] * 3
    assert (rows.labels[0] == rows.input_ids[0]).all()
    assert rows.num_scored == 7 + 4  # nothing predicts a row's first token


def test_rows_that_fit_have_no_padding(tiny_tokenizer: Any) -> None:
    rows = make_token_rows([Document(text="abcdef")] * 3, tiny_tokenizer, source="text", sequence_length=8)
    assert rows.padding is None
    assert rows.num_rows == 3  # no document is left out


def test_of_a_conversation_the_assistant_counts(tiny_tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    messages = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two!"}]
    file.write_text(json.dumps({"messages": messages}) + "\n")
    rows = read_token_rows(file, tiny_tokenizer, sequence_length=64, task="chat")
    counted = rows.input_ids[0][rows.labels[0] != IGNORED]
    assert spell(tiny_tokenizer, counted) == "two!<|im_end|>"
    assert rows.padding is not None


def test_the_hash_is_that_of_the_content(tiny_tokenizer: Any) -> None:
    def hashed(text: str, length: int) -> str:
        return make_token_rows([Document(text=text)], tiny_tokenizer, source="x", sequence_length=length).hash

    assert hashed("abcdefgh", 5) == hashed("abcdefgh", 5)
    assert len({hashed("abcdefgh", 5), hashed("abcdefgi", 5), hashed("abcdefgh", 10)}) == 3


def test_an_empty_file_is_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "nothing.txt"
    file.write_text("\n\n  \n")
    with pytest.raises(DataError, match="is empty; give a file with text"):
        read_token_rows(file, tiny_tokenizer, sequence_length=8)


def test_a_token_beyond_the_embedding_is_named(tiny_tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"row 1 of 'x' has the token id \d+ at position 3, .* 0 to 99; use the tokeni"):
        make_token_rows(
            [Document(text="!!!!!!!!~\n\n")], tiny_tokenizer, source="x", sequence_length=6, vocabulary_size=100
        )


def test_what_the_model_writes_itself_is_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(DataError, match="training on it teaches nothing; name a file"):
        read_token_rows("self", tiny_tokenizer, sequence_length=8)


def test_an_unknown_set_and_task_are_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(UnknownName, match="did you mean 'docs'"):
        read_token_rows("doc", tiny_tokenizer, sequence_length=8)
    with pytest.raises(UnknownName, match="did you mean 'chat'"):
        make_token_rows([Document(text="a")], tiny_tokenizer, source="x", sequence_length=8, task="chats")


def test_documents_kept_back_are_whole_and_about_their_share() -> None:
    documents = tuple(Document(text=f"{number:04d}" * 25) for number in range(200))
    train, kept = share_out(documents, 0.1, seed=3)
    assert sorted([*train, *kept], key=lambda document: document.text) == list(documents)
    assert len(kept) == 20
    assert share_out(documents, 0.1, seed=3) == (train, kept)
    assert share_out(documents, 0.1, seed=4)[1] != kept


def test_both_sides_get_a_document() -> None:
    two = (Document(text="a" * 1000), Document(text="b"))
    for share in (0.001, 0.999):
        assert {len(part) for part in share_out(two, share, seed=0)} == {1}
    with pytest.raises(DataError, match="a single document, so none can be kept back"):
        share_out(two[:1], 0.5, seed=0)
