"""Asks the real llama.cpp; runs in its own environment, and knows nothing of bitwright.

    python llama_cpp_runner.py request.json answer.json

request: {"model": file, "texts": [[token id, …], …], "prompts": [[token id, …], …], "strings": [text, …],
"new_tokens": n, "threads": n}
answer: {"logprobs": per text, one a token but the first; "greedy": token ids per prompt; "tokens": ids per string;
"load_s", "decode_tokens_per_s": of the greedy texts; "system": what llama.cpp says of its kernels}

The package xllamacpp brings llama.cpp as a library whose C functions are exported; it is called here with ctypes, since
its Python interface has no logits of a prompt. Parameters of models and contexts are records that grow from release to
release: they are passed on as llama.cpp fills them, with the sizes of context and batch, their first numbers, set, and
with a cache in fp32 and attention step by step, so that weights and their inputs are all that is rounded. That the
numbers are what they are is asked back (`llama_n_ctx`). Records of this size, by value, lie on the stack (System V,
x86-64), where a longer one does no harm.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp

#: Places in the record of a context, in words of 32 bits, and what stands there.
_FLASH_ATTENTION, _CACHE_TYPES = 13, (26, 27)
_F32, _F16 = 0, 1


class _Opaque(ctypes.Structure):
    """A record of llama.cpp's, of which only the first numbers are known."""

    _fields_ = (("numbers", c_uint32 * 256),)


class _Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


def _library() -> Any:
    package = Path(xllamacpp.__file__).parent
    library = ctypes.CDLL(str(next(package.glob("xllamacpp*.so"))))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "llama_backend_init": (None, []),
        "llama_log_set": (None, [c_void_p, c_void_p]),
        "llama_model_default_params": (_Opaque, []),
        "llama_context_default_params": (_Opaque, []),
        "llama_model_load_from_file": (c_void_p, [c_char_p, _Opaque]),
        "llama_init_from_model": (c_void_p, [c_void_p, _Opaque]),
        "llama_model_get_vocab": (c_void_p, [c_void_p]),
        "llama_vocab_n_tokens": (c_int32, [c_void_p]),
        "llama_n_ctx": (c_uint32, [c_void_p]),
        "llama_n_batch": (c_uint32, [c_void_p]),
        "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
        "llama_batch_init": (_Batch, [c_int32, c_int32, c_int32]),
        "llama_decode": (c_int32, [c_void_p, _Batch]),
        "llama_get_logits": (POINTER(c_float), [c_void_p]),
        "llama_get_memory": (c_void_p, [c_void_p]),
        "llama_memory_clear": (None, [c_void_p, c_bool]),
        "llama_print_system_info": (c_char_p, []),
        "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_SILENT = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)(lambda *_: None)


class Model:
    """A loaded file with one context."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        self.library = library = _library()
        library.llama_log_set(ctypes.cast(_SILENT, c_void_p), None)
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"RuntimeError: llama.cpp does not load {path}")
        settings = library.llama_context_default_params()
        settings.numbers[0], settings.numbers[1] = context, context
        if tuple(settings.numbers[place] for place in _CACHE_TYPES) != (_F16, _F16):
            raise SystemExit("RuntimeError: the records of this llama.cpp have the types of the cache elsewhere")
        for place in _CACHE_TYPES:
            settings.numbers[place] = _F32
        settings.numbers[_FLASH_ATTENTION] = 0
        self.context = library.llama_init_from_model(self.model, settings)
        if not self.context or library.llama_n_ctx(self.context) < context:
            raise SystemExit("RuntimeError: the records of this llama.cpp begin with other numbers than are set here")
        library.llama_set_n_threads(self.context, threads, threads)
        self.vocabulary = library.llama_model_get_vocab(self.model)
        self.num_tokens = library.llama_vocab_n_tokens(self.vocabulary)
        self.batch = library.llama_batch_init(context, 0, 1)

    def forget(self) -> None:
        """Empty the cache."""
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)

    def logits(self, ids: list[int], start: int, *, last_only: bool = False) -> np.ndarray:
        """Logits [tokens, vocabulary] of tokens that follow `start` others."""
        batch = self.batch
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place] = token, start + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = not last_only or place == len(ids) - 1
        if self.library.llama_decode(self.context, batch):
            raise SystemExit("RuntimeError: llama_decode failed")
        rows = 1 if last_only else len(ids)
        found = np.ctypeslib.as_array(self.library.llama_get_logits(self.context), (rows, self.num_tokens))
        return found.astype(np.float64)

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, with special tokens around it as the file says, and those in it read as such."""
        raw = text.encode()
        ids = (c_int32 * (len(raw) + 8))()
        count = self.library.llama_tokenize(self.vocabulary, raw, len(raw), ids, len(ids), True, True)
        return list(ids[:count])


def main() -> None:
    """Answer one request."""
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    start = time.perf_counter()
    longest = max(map(len, [*request["texts"], *request["prompts"]])) + request["new_tokens"] + 1
    model = Model(request["model"], -(-longest // 256) * 256, request["threads"])
    load_s = time.perf_counter() - start
    logprobs = []
    for ids in request["texts"]:
        model.forget()
        logits = model.logits(ids, 0)[:-1]
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        logprobs.append(log_p[np.arange(len(ids) - 1), ids[1:]].tolist())
    greedy: list[list[int]] = []
    decode_s = 0.0
    for ids in request["prompts"]:
        model.forget()
        best = int(model.logits(ids, 0, last_only=True)[0].argmax())
        new = [best]
        start = time.perf_counter()
        while len(new) < request["new_tokens"]:
            best = int(model.logits([best], len(ids) + len(new) - 1, last_only=True)[0].argmax())
            new.append(best)
        decode_s += time.perf_counter() - start
        greedy.append(new)
    answer = {
        "logprobs": logprobs,
        "greedy": greedy,
        "tokens": [model.tokenize(text) for text in request["strings"]],
        "load_s": load_s,
        "decode_tokens_per_s": sum(len(new) - 1 for new in greedy) / decode_s if decode_s else None,
        "system": model.library.llama_print_system_info().decode(),
    }
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
