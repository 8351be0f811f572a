"""What is kept comes back equal; damage counts as absence; other inputs never meet."""

from __future__ import annotations

import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bitwright.errors import DataError
from bitwright.search.cache import Cache, default_folder, open_cache
from bitwright.search.candidate import Candidate

CLIP = Candidate(scheme="int4_g32", rounding="clip")


def test_everything_comes_back_equal(tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path / "a" / "b")
    scores = {CLIP: {"x": 0.1 + 0.2, "y": 1e-30}, Candidate(scheme="fp16"): {"x": math.inf, "y": 0.0}}
    cache.write_scores(scores)
    assert cache.read_scores() == scores
    found = {"x/codes": np.arange(6, dtype=np.uint8).reshape(2, 3), "x/scales": np.ones((2, 1), np.float16)}
    cache.write_found(CLIP, found)
    again = cache.read_found(CLIP)
    assert again.keys() == found.keys()
    assert all(again[key].dtype == found[key].dtype and np.array_equal(again[key], found[key]) for key in found)
    assert cache.read_found(Candidate(scheme="int4_g32", rounding="gptq")) == {}
    cache.write_overflows({CLIP: {"x": 0.25}})
    assert cache.read_overflows() == {CLIP: {"x": 0.25}}
    cache.write_reached({"x": 7})
    assert cache.read_reached() == {"x": 7}
    cache.write_measured({"digest": 0.1})
    assert cache.read_measured() == {"digest": 0.1}
    head_inputs = torch.randn(2, 3, 4)
    cache.write_reference("t" * 64, head_inputs)
    reference = cache.read_reference("t" * 64)
    assert reference is not None and torch.equal(reference, head_inputs)
    assert cache.read_reference("u" * 64) is None


def test_nan_scores_survive(tmp_path: Path) -> None:
    """A choice that is unusable at a site has no number, which must not read as a missing one."""
    cache = Cache(folder=tmp_path)
    cache.write_scores({CLIP: {"x": math.nan}})
    assert math.isnan(cache.read_scores()[CLIP]["x"])


def test_nothing_is_kept_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = open_cache(None, model_hash="m", text_hash="t", seed=0, include_head=False)
    cache.write_scores({CLIP: {"x": 1.0}})
    cache.write_measured({"a": 1.0})
    assert cache.read_scores() == {} and cache.read_measured() == {} and cache.read_found(CLIP) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"null"])
def test_damaged_files_count_as_absent(tmp_path: Path, content: bytes) -> None:
    cache = Cache(folder=tmp_path)
    found, reference = "found-int4_g32-clip-none.safetensors", f"reference-{'t' * 16}.safetensors"
    for name in ("scores.json", "measured.json", found, reference):
        (tmp_path / name).write_bytes(content)
    assert cache.read_scores() == {} and cache.read_measured() == {} and cache.read_found(CLIP) == {}
    assert cache.read_reference("t" * 64) is None
    cache.write_measured({"a": 2.0})
    assert cache.read_measured() == {"a": 2.0}


def test_every_input_has_a_folder_of_its_own(tmp_path: Path) -> None:
    base = {"model_hash": "m", "text_hash": "t", "seed": 0, "include_head": False}
    others = [{"model_hash": "n"}, {"text_hash": "u"}, {"seed": 1}, {"include_head": True}]
    folders = [open_cache(tmp_path, **(base | other)).folder for other in [{}, *others]]  # type: ignore[arg-type]
    assert len(set(folders)) == 5
    assert open_cache(tmp_path, **base).folder == folders[0]  # type: ignore[arg-type]


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(folder=tmp_path)
    cache.write_measured({"a": 1.0})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"No space left on device.*--no-cache"):
        cache.write_measured({"a": 2.0})
    assert [path.name for path in tmp_path.iterdir()] == ["measured.json"]
    assert cache.read_measured() == {"a": 1.0}


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot keep statistics in the cache .*file"):
        Cache(folder=tmp_path / "file" / "below").write_measured({"a": 1.0})


def test_the_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "bitwright"
    for value, home in itertools.product(("",), (tmp_path / "home",)):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        monkeypatch.setenv("HOME", str(home))
        assert default_folder() == home / ".cache" / "bitwright"
