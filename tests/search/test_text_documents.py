"""Reading sources: files of three kinds, built-in sets, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from bitwright.errors import DataError
from bitwright.search.documents import CALIBRATION_SETS, MIN_DOCUMENT_CHARS, Document, read_source


def test_txt_blocks_are_merged_to_documents(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {index}. " + "word " * 20 for index in range(10)]
    path = tmp_path / "a.txt"
    path.write_bytes("\r\n \r\n".join(paragraphs).encode())
    documents = read_source(path).documents
    assert len(documents) == 5
    assert all(len(document.text) >= MIN_DOCUMENT_CHARS for document in documents)
    assert "\n\n".join(document.text for document in documents).replace(" \n", "\n").split() == (
        " ".join(paragraphs).split()
    )


def test_txt_without_blank_lines_is_read_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n".join(f"Line {index}: " + "word " * 50 for index in range(10)))
    assert len(read_source(path).documents) == 10


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfHello.")
    assert read_source(tmp_path / "a.txt").documents[0].text == "Hello."


def test_jsonl_rows_are_documents_and_repetitions_go(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"text": "two", "id": 7}, {"text": "one"}, {"text": "  "}]
    # U+2028 may stand inside a JSON string and ends no row
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + '\n\n{"text": "three\u2028four"}\n', encoding="utf-8")
    assert [document.text for document in read_source(path).documents] == ["one", "two", "three\u2028four"]


def test_messages_are_text_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}')
    (document,) = read_source(path).documents
    assert document.text == "Hi\n\nHo"
    assert document.messages == ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"})


def test_parquet_has_the_same_columns(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "Hi"}], None]
    table = pyarrow.table({"text": ["one", "two"], "messages": messages, "other": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    documents = read_source(tmp_path / "a.parquet").documents
    assert [document.text for document in documents] == ["one", "two"]
    assert documents[0].messages == ({"role": "user", "content": "Hi"},) and documents[1].messages is None


@pytest.mark.parametrize("name", sorted(CALIBRATION_SETS))
class TestEverySet:
    """Laws of the catalog."""

    def test_it_says_what_it_is(self, name: str) -> None:
        assert CALIBRATION_SETS[name].name == name
        assert len(CALIBRATION_SETS[name].description) > 20 and len(CALIBRATION_SETS[name].source) > 20

    def test_its_documents_are_many_and_always_the_same(self, name: str) -> None:
        if CALIBRATION_SETS[name].is_sampled:
            with pytest.raises(DataError, match="sampled from a model, and none is at hand"):
                read_source(name)
            return
        documents = documents_of(name)
        assert len(documents) >= 50 and all(document.title for document in documents)
        assert 200_000 < sum(len(document.text) for document in documents) < 10_000_000
        assert documents == documents_of(name)


def documents_of(name: str) -> tuple[Document, ...]:
    read = CALIBRATION_SETS[name].documents
    assert read is not None
    return read()


def test_the_built_in_sets() -> None:
    assert {"code", "docs"} <= set(CALIBRATION_SETS)
    titles = [document.title for document in documents_of("docs")]
    assert 'The "assert" statement' in titles
    code = {document.title: document.text for document in documents_of("code")}
    assert '"""Conversion functions between RGB and other color systems.' in code["the Python module colorsys"]


def test_topics_of_the_docs_share_no_paragraph() -> None:
    # the topics as they stand do: "Special method names" holds "Emulating numeric types" whole
    owners: dict[str, str] = {}
    for document in documents_of("docs"):
        for paragraph in {" ".join(block.split()) for block in document.text.split("\n\n")}:
            if len(paragraph) >= 60:
                assert owners.setdefault(paragraph, str(document.title)) == document.title


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", r"a\.txt' is empty; give a file with text"),
        ("a.txt", b" \n\t\n", r"a\.txt' is empty"),
        ("a.txt", b"ab\xffcd", r"not UTF-8: byte 0xff at offset 2 \(invalid start byte\); save the file as UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"line 2: no JSON \(Expecting value at column"),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b", "id": 1}', r"line 2: has no 'text' or 'messages', only body, id"),
        ("a.jsonl", b"[1, 2]", r"line 1: a row is an object"),
        ("a.jsonl", b'{"text": 5}', r"line 1: 'text' is int, but must be a string"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"line 1: character 0 is half of a surrogate pair"),
        ("a.jsonl", b'{"messages": "hi"}', r"line 1: 'messages' is str, but must be a list"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', r"line 1: messages\[0\] is .*role.*must be a list of"),
        ("a.jsonl", b'{"messages": []}', r"holds no text"),
        ("a.jsonl", b'{"text": " "}', r"holds no text; give a source with at least three documents"),
        ("a.parquet", b"PAR1", r"a\.parquet' is no readable parquet file"),
        ("a.csv", b"x", r"of the kind '\.csv', but text is read from \.txt, \.jsonl, \.parquet; convert it"),
        ("README", b"x", r"a file without a suffix, but text is read from"),
    ],
)
def test_broken_files_say_where(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        read_source(tmp_path / name)


def test_parquet_without_text_names_its_columns(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has the columns body, id, but text is read from a column 'text'"):
        read_source(tmp_path / "a.parquet")


def test_missing_paths_and_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt' does not exist; .* built-in set: code, docs"):
        read_source(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match="is a folder"):
        read_source(tmp_path)
