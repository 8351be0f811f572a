"""Tensors come back from disk bit for bit; nothing is left there; a full disk is told."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitwright.errors import DataError
from bitwright.models.spool import InMemory, OnDisk, Spool, SpooledArrays, output_head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (3, 5, 7)).to(dtype)
    with Spool(tmp_path) as spool:
        before = spool.keep(torch.tensor(float("nan")))
        kept = spool.keep(values.transpose(0, 2))
        empty = spool.keep(torch.empty(0, 4))
        assert torch.equal(spool.read(kept), values.transpose(0, 2)) and spool.read(kept).dtype == dtype
        assert spool.read(before).isnan() and spool.read(before).shape == ()
        assert spool.read(empty).shape == (0, 4)


def test_room_reads_as_zeros_until_it_is_written(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        first, second = spool.reserve((2, 3), torch.float32), spool.reserve((2, 3), torch.bfloat16)
        assert not spool.read(second).any()
        spool.write(first, torch.full((2, 3), 7.0))
        spool.write(second, torch.full((3,), 1 / 3))
        assert not spool.read(first).sub(7).any()
        assert torch.equal(spool.read(second), torch.full((2, 3), 1 / 3).bfloat16())


def test_a_spool_has_no_name_and_closes_with_its_last_user(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    num_open = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    spool = Spool(folder)
    spool.keep(torch.ones(1000))
    assert list(folder.iterdir()) == []
    del spool
    if num_open is not None:
        assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Spool(tmp_path) as spool:
        kept = spool.keep(torch.ones(4))
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(DataError, match=r"cannot spool to '.*No space left.* GiB are free there.*--spool"):
            spool.keep(torch.ones(1 << 20))
        assert torch.equal(spool.read(kept), torch.ones(4))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot spool to '.*file'.*--spool"):
        Spool(tmp_path / "file")


def test_arrays_are_a_mapping(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "b": np.array(1.5, np.float32), "c": np.ones(3, "f2")}
    with Spool(tmp_path) as spool:
        spooled = SpooledArrays(spool)
        spooled.update(arrays)
        assert list(spooled) == list(arrays) and "a" in spooled and "d" not in spooled and spooled.get("d") is None
        for name, array in arrays.items():
            assert spooled[name].dtype == array.dtype and np.array_equal(spooled[name], array)
            assert spooled[name].shape == array.shape
        del spooled["b"]
        assert len(spooled) == 2


def test_originals(tmp_path: Path, make_tiny_model: Any) -> None:
    """What was written once is not written again; a head that a reference holds stays in memory."""
    model = make_tiny_model("llama")
    head = output_head(model)
    assert head == {"lm_head.weight"}
    assert output_head(make_tiny_model("qwen2")) == {"model.embed_tokens.weight"}  # tied
    assert output_head(torch.nn.Linear(2, 2)) == frozenset()
    with Spool(tmp_path) as spool:
        for originals in (OnDisk(spool, head), InMemory()):
            for _ in range(2):
                for name, parameter in model.named_parameters():
                    originals.keep(name, parameter.data)
                for name, parameter in model.named_parameters():
                    found = originals.read(name)
                    assert torch.equal(found, parameter.data)
                    in_memory = isinstance(originals, InMemory) or name in head
                    assert (found.data_ptr() == parameter.data_ptr()) == in_memory
        end = spool.reserve((0,), torch.uint8).offset
    assert end == 4 * sum(p.numel() for n, p in model.named_parameters() if n not in head)
