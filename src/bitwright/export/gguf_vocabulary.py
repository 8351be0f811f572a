"""A tokenizer as llama.cpp builds it: tokens and their kinds, merges or scores, how text is split, special tokens.

llama.cpp has its own code for splitting text, by names of tokenizers whose expressions it knows. Which of them a
tokenizer is follows from what its tokenizer.json says of splitting, and from nothing else: `_SPLITTERS` is that table.
A tokenizer that splits otherwise is refused, for a model that is fed with other tokens answers worse, and silently.

    "gpt2"     byte-level BPE: tokens in GPT-2's alphabet, merges in order
    "llama"    BPE over pieces that begin with ▁, bytes as <0x41>: scores in place of merges, the first merge highest

Source: llama.cpp, src/llama-vocab.cpp (llm_tokenizer_bpe, llm_tokenizer_spm), gguf-py constants (TokenType).
Rejected: a hash of how one text is tokenised, as convert_hf_to_gguf.py has it: it knows released models only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitwright.errors import ExportError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: What a tokenizer splits by, in order → what llama.cpp calls one that does. "GPT-2" stands for its expression.
_SPLITTERS: Mapping[tuple[str, ...], str] = {
    ("GPT-2",): "gpt-2",
    ("digits", "GPT-2"): "smollm",
    (rf"{_CASES}{_WORDS}|\p{{N}}{{1,3}}{_REST}",): "llama-bpe",
    (rf"{_CASES}{_WORDS}|\p{{N}}{_REST}",): "qwen2",
}
#: A file has no empty list, and llama.cpp asks for one: symbols begin as single letters, so these two never meet.
_INERT_MERGE = "<no> <merges>"
#: transformers' name of a special token → llama.cpp's key.
_SPECIALS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What a file says of its tokenizer."""

    #: "gpt2" or "llama".
    model: str
    #: Name of the splitting code; "default" where it does not apply.
    splitter: str
    tokens: tuple[str, ...]
    #: ggml's kind of each token.
    kinds: tuple[int, ...]
    merges: tuple[str, ...] = ()
    #: One a token, for "llama".
    scores: tuple[float, ...] = ()
    #: llama.cpp's key → id.
    special_ids: Mapping[str, int]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool
    chat_template: str | None


def why_not_vocabulary(tokenizer: Any) -> str | None:
    """Why llama.cpp has no such tokenizer; None if it has."""
    try:
        read_vocabulary(tokenizer, 0)
    except ExportError as error:
        return str(error)
    return None


def read_vocabulary(tokenizer: Any, num_rows: int) -> Vocabulary:
    """The tokenizer of transformers in llama.cpp's terms.

    Args:
        tokenizer: a fast one.
        num_rows: rows of the embedding: ids that no token has are filled up.

    Raises:
        ExportError: llama.cpp has no such tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ExportError(
            f"{type(tokenizer).__name__} is no tokenizer of the tokenizers library, and GGUF needs its parts"
        )
    content = json.loads(backend.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise ExportError(f"the tokenizer is {model['type']}, and BPE is written")
    added = {token["id"]: token for token in content["added_tokens"]}
    texts = {number: text for text, number in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    count = max(num_rows, max(texts) + 1)
    pieces = bool(model.get("byte_fallback"))
    merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"])
    start, end = _added_around(tokenizer)
    return Vocabulary(
        model="llama" if pieces else "gpt2",
        splitter="default" if pieces else _splitter(content.get("pre_tokenizer")),
        tokens=tuple(texts.get(i, f"[PAD{i}]") for i in range(count)),
        kinds=tuple(_kind(i, texts, added, model.get("unk_token")) for i in range(count)),
        merges=() if pieces else merges or (_INERT_MERGE,),
        scores=_scores(texts, merges, count) if pieces else (),
        special_ids={
            key: number for name, key in _SPECIALS.items() if isinstance(number := getattr(tokenizer, name, None), int)
        },
        adds_bos=start,
        adds_eos=end,
        adds_space=pieces and _prepends_space(content.get("normalizer"), content.get("pre_tokenizer")),
        chat_template=tokenizer.chat_template if isinstance(getattr(tokenizer, "chat_template", None), str) else None,
    )


def _kind(number: int, texts: Mapping[int, str], added: Mapping[int, Any], unknown: str | None) -> int:
    if number not in texts:
        return _UNUSED
    if number in added:
        return _CONTROL if added[number]["special"] else _USER_DEFINED
    text = texts[number]
    if text == unknown:
        return _UNKNOWN
    return _BYTE if len(text) == 6 and text.startswith("<0x") and text.endswith(">") else _NORMAL


def _splitter(pre_tokenizer: Any) -> str:
    found = tuple(_steps(pre_tokenizer))
    if found in _SPLITTERS:
        return _SPLITTERS[found]
    raise ExportError(
        f"the tokenizer splits text by {' and '.join(map(repr, found)) or 'nothing'}, which llama.cpp has no name for "
        f"here; known are {', '.join(_SPLITTERS.values())}"
    )


def _steps(step: Any) -> Sequence[str]:
    """What a part of tokenizer.json splits by."""
    match step:
        case {"type": "Sequence", "pretokenizers": inner}:
            return [name for part in inner for name in _steps(part)]
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return ["GPT-2"]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return []
        case {"type": "Digits", "individual_digits": True}:
            return ["digits"]
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return [pattern]
        case None:
            return []
    return [str(step.get("type"))]


def _scores(texts: Mapping[int, str], merges: Sequence[str], count: int) -> tuple[float, ...]:
    """A score a token, such that what is merged first scores highest, and what no merge makes lowest."""
    rank: dict[str, int] = {}
    for place, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), place)
    return tuple(-float(rank.get(texts.get(i, ""), len(merges) + i)) for i in range(count))


def _prepends_space(normalizer: Any, pre_tokenizer: Any) -> bool:
    parts = (normalizer or {}).get("normalizers", [normalizer or {}])
    if any(part.get("type") == "Prepend" for part in parts):
        return True
    return (pre_tokenizer or {}).get("prepend_scheme") in ("always", "first")


def _added_around(tokenizer: Any) -> tuple[bool, bool]:
    """Whether a text gets the first token of texts before it, and the last one behind."""
    ids = tokenizer("a")["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    first, last = getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None)
    longer = len(ids) > len(bare)
    return longer and ids[0] == first and ids[: len(bare)] != bare, longer and ids[-1] == last and ids[
        -len(bare) :
    ] != bare
