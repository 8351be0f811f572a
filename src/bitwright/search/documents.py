"""Where text comes from: a file or a built-in set, read as documents.

A *document* is the unit that is never torn between splits, so that text which calibrates cannot also prove. Sources:

- a built-in set by name: one file in `calibration_sets/`, which defines ``CALIBRATION_SETS``;
- ``.txt`` (UTF-8): blocks between blank lines (lines, if there is no blank one), merged in order until a document has
  at least `MIN_DOCUMENT_CHARS` characters;
- ``.jsonl`` (UTF-8): one document a row, ``{"text": …}`` or ``{"messages": [{"role": …, "content": …}, …]}``;
- ``.parquet``: the same two columns (extra ``parquet``).

Documents without any visible character are left out, and so are repetitions of a document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright.catalog import Catalog, nearest_name_hint
from bitwright.errors import DataError, MissingExtra, UnknownName

#: Blocks of a .txt file are merged until a document has this many characters: enough for a sentence of context.
MIN_DOCUMENT_CHARS = 200

#: {"role": "user" | "assistant" | "system" | …, "content": text}
Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text that belongs together."""

    text: str
    #: What the text is about, where the source says so; the chat task asks for it.
    title: str | None = None
    #: The conversation that `text` was joined from, where the source holds conversations.
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class CalibrationSet:
    """A built-in set of documents; what it is, for tables and plans."""

    name: str
    description: str
    #: Where the text comes from, precisely enough to find it again.
    source: str
    #: Reads the documents, in a fixed order. Called when the set is used, never at import. None: see `is_sampled`.
    documents: Callable[[], tuple[Document, ...]] | None = None
    #: True: there is nothing to read; the model in question is asked for the documents.
    is_sampled: bool = False

    def __post_init__(self) -> None:
        assert self.is_sampled == (self.documents is None), f"{self.name}: either read or sampled"


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The documents of one source, distinct and in the source's order."""

    #: The set's name, or the file's name without its folder.
    name: str
    description: str
    #: Equal for two spellings of one source ("a.txt", "./a.txt"); may hold a local path, so it is no part of a plan.
    identity: str
    documents: tuple[Document, ...]


CALIBRATION_SETS: Catalog[CalibrationSet] = Catalog(
    kind="calibration set",
    package="bitwright.search.calibration_sets",
    attribute="CALIBRATION_SETS",
    record_type=CalibrationSet,
)


def is_sampled(source: str | Path) -> bool:
    """Is this the name of a set that the model in question is asked for?"""
    return str(source) in CALIBRATION_SETS and CALIBRATION_SETS[str(source)].is_sampled


def read_source(source: str | Path, sample: Callable[[], tuple[Document, ...]] | None = None) -> TextSource:
    """Read a built-in set (by name) or a file (by path) as documents.

    Args:
        source: a name in `CALIBRATION_SETS`, or a path.
        sample: asks the model in question for documents; needed for sets that are sampled from it.

    Raises:
        UnknownName: neither a set of that name nor a path.
        DataError: the file is missing, empty, broken, of another kind, or without text; says where.
        MissingExtra: a .parquet file, and pyarrow is not installed.
    """
    written = str(source)
    if written in CALIBRATION_SETS:
        known_set = CALIBRATION_SETS[written]
        read = sample if known_set.is_sampled else known_set.documents
        if read is None:
            raise DataError(f"the set '{written}' is sampled from a model, and none is at hand here; name another set")
        documents = _distinct(read(), written)
        return TextSource(
            name=written,
            description=f"{known_set.description} ({known_set.source})",
            identity=written,
            documents=documents,
        )
    raise_if_no_source(source)
    path = Path(source)
    documents = _distinct(_READERS[path.suffix.lower()](path), written)
    return TextSource(
        name=path.name, description=f"the file {path.name}", identity=str(path.resolve()), documents=documents
    )


def raise_if_no_source(source: str | Path) -> None:
    """Raise, as `read_source` does, where there is no such set and no such file: before a model is loaded."""
    written, path = str(source), Path(source)
    if written in CALIBRATION_SETS:
        return
    suffixes = ", ".join(_READERS)
    looks_like_a_path = bool(path.suffix) or len(path.parts) > 1 or path.exists()
    if not looks_like_a_path:
        known = sorted(CALIBRATION_SETS)
        raise UnknownName(
            f"unknown calibration set {written!r}{nearest_name_hint(written, known)} Known calibration sets: "
            f"{', '.join(known)}; or give the path of a file ({suffixes})"
        )
    if path.is_dir():
        raise DataError(
            f"text source '{written}' is a folder, but text is read from one file; name a file ({suffixes})"
        )
    if path.suffix.lower() not in _READERS:
        kind = f"of the kind '{path.suffix}'" if path.suffix else "without a suffix"
        raise DataError(f"text source '{written}' is a file {kind}, but text is read from {suffixes}; convert it")
    if not path.exists():
        raise DataError(
            f"text source '{written}' does not exist; correct the path, or name a built-in set: "
            f"{', '.join(sorted(CALIBRATION_SETS))}"
        )


def _distinct(documents: Iterable[Document], written: str) -> tuple[Document, ...]:
    kept: dict[str, Document] = {}
    for document in documents:
        if document.text.strip():
            kept.setdefault(document.text, document)
    if not kept:
        raise DataError(f"text source '{written}' holds no text; give a source with at least three documents")
    return tuple(kept.values())


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"text source '{path}' cannot be read ({error.strerror}); check the file and its rights"
        ) from error
    if not content.strip():
        raise DataError(f"text source '{path}' is empty; give a file with text")
    try:
        return content.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"text source '{path}' is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start} "
            f"({error.reason}); save the file as UTF-8"
        ) from error


def _read_txt(path: Path) -> Iterator[Document]:
    text = _read_text(path)
    blocks = [block.strip("\n") for block in re.split(r"\n[ \t]*\n", text)]
    blocks = [block for block in blocks if block.strip()]
    separator = "\n\n"
    if len(blocks) == 1:
        separator = "\n"
        blocks = [line for line in text.split("\n") if line.strip()]
    merged: list[str] = []
    for block in blocks:
        if merged and len(merged[-1]) < MIN_DOCUMENT_CHARS:
            merged[-1] += separator + block
        else:
            merged.append(block)
    if len(merged) > 1 and len(merged[-1]) < MIN_DOCUMENT_CHARS:
        last = merged.pop()
        merged[-1] += separator + last
    return (Document(text=block) for block in merged)


def _read_jsonl(path: Path) -> Iterator[Document]:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"text source '{path}', line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: no JSON ({error.msg} at column {error.colno}); correct or remove it") from error
        if not isinstance(row, dict):
            raise DataError(
                f'{where}: a row is an object such as {{"text": "…"}}, not {line.strip()[:40]!r}; correct it'
            )
        yield _document_from_row(row, where)


def _read_parquet(path: Path) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet", f"reading '{path}'") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [name for name in ("text", "messages") if name in names]
        if not columns:
            raise DataError(
                f"text source '{path}' has the columns {', '.join(names) or '(none)'}, but text is read from a column "
                "'text' or 'messages'; rename one"
            )
        number = 0
        for batch in file.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _document_from_row(
                    {name: value for name, value in row.items() if value is not None},
                    f"text source '{path}', row {number}",
                )
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"text source '{path}' is no readable parquet file ({error}); write it again, or use .jsonl"
        ) from error


_READERS: Mapping[str, Callable[[Path], Iterator[Document]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _document_from_row(row: Mapping[str, Any], where: str) -> Document:
    if "text" not in row and "messages" not in row:
        fields = ", ".join(map(str, row)) or "(none)"
        raise DataError(f"{where}: has no 'text' or 'messages', only {fields}; name the text's field 'text'")
    messages = _messages(row["messages"], where) if "messages" in row else None
    text = row.get("text")
    if text is None:
        text = "\n\n".join(message["content"] for message in messages or ())
    if not isinstance(text, str):
        raise DataError(f"{where}: 'text' is {type(text).__name__}, but must be a string; correct or remove the row")
    _raise_if_surrogate(text, where)
    return Document(text=text, messages=messages)


def _messages(value: object, where: str) -> tuple[Message, ...]:
    rule = 'must be a list of {"role": "…", "content": "…"}; correct or remove the row'
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise DataError(f"{where}: 'messages' is {type(value).__name__}, but {rule}")
    found: list[Message] = []
    for index, message in enumerate(value):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{where}: messages[{index}] is {str(message)[:60]!r}, but 'messages' {rule}")
        _raise_if_surrogate(content, where)
        found.append({"role": role, "content": content})
    return tuple(found)


def _raise_if_surrogate(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is half of a surrogate pair ({text[error.start]!a}), which is no text; "
            "correct or remove the row"
        ) from error
