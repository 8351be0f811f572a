"""What is kept between runs: scores, codes, reference runs and measurements, by model, data and choice.

    <folder>/<key>/scores.json          candidate → site → predicted KL before probes
                   found-<choice>.safetensors      codes, scales … of sites, as a plan keeps them
                   reached.json         site → calibration tokens that reached it
                   overflows.json       candidate → site → overflows per scored prediction
                   measured.json        digest of an assignment and a text → measured KL
                   reference-<text>.safetensors    head inputs of the fp32 reference

The key is a hash of the model's weights, the calibration text, the seed and the version of the estimator: any other
input is another folder. Files are written beside their place and renamed, so a reader never sees half of one; a file
that cannot be read counts as absent and is made again. The folder is `$XDG_CACHE_HOME/bitwright` (or
`~/.cache/bitwright`), and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from bitwright.errors import DataError, ModelError
from bitwright.search.candidate import Candidate
from bitwright.search.stored_arrays import StoredArrays, write_arrays

#: Raise this when scores of the same inputs would come out different.
ESTIMATOR_VERSION = 10


def default_folder() -> Path:
    """Where caches lie unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bitwright"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache:
    """The cache of one (model, calibration text, seed); without a folder nothing is kept."""

    folder: Path | None

    def read_scores(self) -> dict[Candidate, dict[str, float]]:
        """Candidate → site → KL."""
        return {_read_key(key): sites for key, sites in self._read_json("scores.json").items()}

    def write_scores(self, scores: Mapping[Candidate, Mapping[str, float]]) -> None:
        """Replace all scores."""
        self._write_json("scores.json", {_key(c): s for c, s in scores.items()})

    def read_found(self, choice: Candidate) -> dict[str, np.ndarray]:
        """What was found for a choice: "<site>/<part>" → array, as a plan keeps it."""
        return dict(self.open_found(choice))

    def open_found(self, choice: Candidate) -> Mapping[str, np.ndarray]:
        """The same, each array read when it is asked for; until what was found is replaced."""
        if self.folder is None or not (self.folder / _found_file(choice)).exists():
            return {}
        try:
            return StoredArrays(self.folder / _found_file(choice))
        except ModelError:
            return {}

    def write_found(self, choice: Candidate, tensors: Mapping[str, np.ndarray]) -> None:
        """Replace all that was found for a choice."""
        self._write(_found_file(choice), lambda file: write_arrays(file, tensors))

    def read_reached(self) -> dict[str, int]:
        """Site → calibration tokens that reached it."""
        return self._read_json("reached.json")

    def write_reached(self, reached: Mapping[str, int]) -> None:
        """Replace all counts."""
        self._write_json("reached.json", reached)

    def read_overflows(self) -> dict[Candidate, dict[str, float]]:
        """Candidate → site → overflows per scored prediction."""
        return {_read_key(key): sites for key, sites in self._read_json("overflows.json").items()}

    def write_overflows(self, overflows: Mapping[Candidate, Mapping[str, float]]) -> None:
        """Replace all counts."""
        self._write_json("overflows.json", {_key(c): s for c, s in overflows.items()})

    def read_measured(self) -> dict[str, float]:
        """Digest → number."""
        return self._read_json("measured.json")

    def write_measured(self, measured: Mapping[str, float]) -> None:
        """Replace all measurements."""
        self._write_json("measured.json", measured)

    def read_texts(self) -> tuple[str, ...] | None:
        """Texts that were sampled from the model, or None."""
        found = self._read_json("texts.json").get("texts")
        return None if found is None else tuple(found)

    def write_texts(self, texts: Sequence[str]) -> None:
        """Keep texts that were sampled from the model."""
        self._write_json("texts.json", {"texts": list(texts)})

    def read_reference(self, text_hash: str) -> Tensor | None:
        """Head inputs fp32 [sequences, length, hidden], or None."""
        return self._read_tensors(f"reference-{text_hash[:16]}.safetensors").get("head_inputs")

    def write_reference(self, text_hash: str, head_inputs: Tensor) -> None:
        """Keep the head inputs of a text."""
        self._write_tensors(f"reference-{text_hash[:16]}.safetensors", {"head_inputs": head_inputs})

    def _read_json(self, name: str) -> dict:
        if self.folder is None:
            return {}
        try:
            content = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError, UnicodeDecodeError):
            return {}
        return content if isinstance(content, dict) else {}

    def _write_json(self, name: str, content: Mapping) -> None:
        self._write(name, lambda file: file.write(json.dumps(content, sort_keys=True).encode()))

    def _read_tensors(self, name: str) -> dict[str, Tensor]:
        if self.folder is None or not (self.folder / name).exists():
            return {}
        try:
            return dict(load_file(self.folder / name))
        except SafetensorError:
            return {}

    def _write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        content = save({key: value.contiguous().clone() for key, value in tensors.items()})
        self._write(name, lambda file: file.write(content))

    def _write(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(self.folder / name, write)
        except OSError as error:
            raise DataError(
                f"cannot keep statistics in the cache '{self.folder}' ({error.strerror}); make room or permit writing "
                "there, set XDG_CACHE_HOME to another folder, or pass --no-cache"
            ) from error


def _key(choice: Candidate) -> str:
    return f"{choice.scheme}/{choice.rounding}/{choice.transform}"


def _read_key(key: str) -> Candidate:
    scheme, rounding, transform = key.split("/")
    return Candidate(scheme=scheme, rounding=rounding, transform=transform)


def _found_file(choice: Candidate) -> str:
    return f"found-{_key(choice).replace('/', '-')}.safetensors"


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)  # gone already where it took its place


def open_cache(
    folder: Path | None,
    *,
    model_hash: str,
    text_hash: str,
    seed: int,
    include_head: bool,
    shared: Mapping[str, str] | None = None,
) -> Cache:
    """The cache for these inputs, below `folder`; None keeps nothing. Factors that sites share are not their own."""
    if folder is None:
        return Cache(folder=None)
    parts = [str(ESTIMATOR_VERSION), torch.__version__, model_hash, text_hash, str(seed), str(include_head)]
    key = "\n".join([*parts, *([json.dumps(dict(shared), sort_keys=True)] if shared else [])])
    return Cache(folder=folder / hashlib.sha256(key.encode()).hexdigest()[:24])
