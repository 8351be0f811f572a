"""Reading safetensors files in pieces: what the safetensors library wrote comes back, what is damaged says so."""

from __future__ import annotations

import json
import os
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bitwright.errors import BitwrightError, FormatError, ModelError, UnknownName
from bitwright.models import tensor_survey
from bitwright.models.tensor_files import list_tensors, read_into, select_tensors
from bitwright.models.tensor_survey import measure_tensors, readable_tensors, survey_tensors

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def some_tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    tensors = {f"layer.{str(dtype)[6:]}": torch.randn(31, 7, generator=draw).to(dtype) for dtype in FLOATS}
    tensors["layer.scale"] = torch.ones(5).to(torch.float8_e8m0fnu)
    return {**tensors, "none": torch.empty(0, 4), "one": torch.tensor(2.5), "ids": torch.arange(9)}


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    """Write a file with any header: an object, or the text itself."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_shards(folder: Path, **shards: dict[str, torch.Tensor]) -> Path:
    """Write one file per shard and the index that lists them."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for shard, tensors in shards.items():
        save_file(tensors, folder / f"{shard}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{shard}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_every_tensor_is_listed_with_its_bytes(tmp_path: Path) -> None:
    written = some_tensors()
    save_file(written, tmp_path / "a.safetensors", metadata={"format": "pt"})
    listed = {tensor.name: tensor for tensor in list_tensors(tmp_path / "a.safetensors")}
    assert listed.keys() == written.keys()
    for name, tensor in written.items():
        assert listed[name].shape == tuple(tensor.shape)
        memory = bytearray(tensor.nbytes)
        read_into(memoryview(memory), listed[name], 0)
        assert bytes(memory) == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_statistics_of_a_file_are_those_of_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pieces smaller than a tensor, so that tensors are put together again.
    monkeypatch.setattr(tensor_survey, "_PIECE_BYTES", 64)
    written = some_tensors()
    save_file(written, tmp_path / "a.safetensors")
    readable, skipped = readable_tensors(list_tensors(tmp_path / "a.safetensors"))
    assert skipped == {"I64": 1}
    num_read = []
    for tensor, found in measure_tensors(readable, num_read.append):
        values = written.pop(tensor.name).double()
        assert (found.num, found.num_zero) == (values.numel(), int((values == 0).sum()))
        assert found.amax == (values.abs().max().item() if values.numel() else 0)
        assert found.total_squares == pytest.approx(values.square().sum().item(), rel=1e-12)
    assert list(written) == ["ids"]
    assert sum(num_read) == sum(tensor.num_bytes for tensor in readable) and max(num_read) == 64


def test_shards_are_read_through_their_index_or_their_folder(tmp_path: Path) -> None:
    one, two = {"a": torch.ones(3), "b": torch.zeros(2)}, {"c": torch.full((4,), 2.0)}
    index = write_shards(tmp_path / "sharded", one=one, two=two)
    (tmp_path / "sharded" / "other.safetensors").write_bytes(b"no part of the checkpoint")
    for source in (index, tmp_path / "sharded"):
        assert [tensor.name for tensor in list_tensors(source)] == ["a", "b", "c"]
    assert survey_tensors(list_tensors(index), ["bf16"]).statistics.num == 9
    index.unlink()
    (tmp_path / "sharded" / "other.safetensors").unlink()
    assert [tensor.name for tensor in list_tensors(tmp_path / "sharded")] == ["a", "b", "c"]
    save_file({"whole": torch.ones(1)}, tmp_path / "sharded" / "model.safetensors")
    assert [tensor.name for tensor in list_tensors(tmp_path / "sharded")] == ["whole"]


def test_an_empty_checkpoint_has_no_tensor(tmp_path: Path) -> None:
    assert list_tensors(write_raw(tmp_path / "a.safetensors", {})) == ()
    with pytest.raises(ModelError, match="no tensor at all"):
        readable_tensors(())


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "no valid JSON"),
        (b"\xff\xfe", b"", "no valid JSON"),
        (b"[" * 100_000, b"", "no valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "no valid JSON"),
        ([], b"", "no JSON object"),
        ({"a": 1}, b"", "dtype None"),
        ({"a": entry("F33")}, b"8" * 8, "'a' has the dtype 'F33', which is none of F64, F32"),
        ({"a": entry(["F32"])}, b"8" * 8, "dtype"),
        ({"a": entry(shape=[-2])}, b"8" * 8, "shape"),
        ({"a": entry(shape=[2.0])}, b"8" * 8, "shape"),
        ({"a": entry(shape=[True])}, b"8" * 8, "shape"),
        ({"a": entry(shape=None)}, b"8" * 8, "shape None"),
        ({"a": entry(offsets=[8, 0])}, b"8" * 8, "not the -8 bytes"),
        ({"a": entry(offsets=[0, 8, 16])}, b"8" * 8, "byte range"),
        ({"a": entry(shape=[3])}, b"8" * 8, "not the 8 bytes"),
        ({"a": entry(shape=[10**200, 10**200])}, b"8" * 8, "not the 8 bytes"),
        ({"a": entry()}, b"8" * 7, "tensors end at byte"),
        ({"a": entry()}, b"8" * 9, "tensors end at byte"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, b"8" * 12, "'b' overlaps"),
        ({"a": entry(offsets=[4, 12])}, b"8" * 12, "'a' leaves a gap"),
        (b'{"a": {}, "a": {}}', b"", "has 'a' twice"),
    ],
    ids=lambda part: str(part)[:30] if isinstance(part, str) else "",
)
def test_a_damaged_file_says_what_is_wrong(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = write_raw(tmp_path / "a.safetensors", header, data)
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        list_tensors(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, struct.pack("<Q", 3) + b"{}"])
def test_a_header_that_does_not_fit_its_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="damaged or no safetensors file"):
        list_tensors(tmp_path / "a.safetensors")


@pytest.mark.parametrize("content", [b"GGUF" * 99, b"# A read-me, not tensors.\n", b"PK\3\4" + bytes(300)])
def test_another_kind_of_file_is_known_by_how_it_begins(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="is no safetensors file: it begins with " + re.escape(repr(content[:9]))):
        list_tensors(tmp_path / "a.safetensors")


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(1)}, tmp_path / "whole.safetensors")
    content = (tmp_path / "whole.safetensors").read_bytes()
    for length in range(len(content)):
        (tmp_path / "cut.safetensors").write_bytes(content[:length])
        with pytest.raises(ModelError, match="damaged"):
            list_tensors(tmp_path / "cut.safetensors")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "a.safetensors")
    tensors = list_tensors(tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").write_bytes(b"gone")
    with pytest.raises(ModelError, match="became shorter"):
        list(measure_tensors(tensors))
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(ModelError, match="No such file"):
        list(measure_tensors(tensors))


def _drop_shard(folder: Path) -> None:
    (folder / "two.safetensors").unlink()


def _move_tensor(folder: Path) -> None:
    save_file({"d": torch.ones(1)}, folder / "two.safetensors")


def _index(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text) and None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_shard, "1 are missing (two.safetensors)"),
        (_move_tensor, "says that 'c' is in two.safetensors"),
        (_index("{"), "no valid JSON"),
        (_index("[]"), "no weight_map"),
        (_index('{"weight_map": {"a": 1}}'), "no weight_map"),
        (_index('{"weight_map": {"a": "../one.safetensors"}}'), "no file beside it"),
    ],
)
def test_an_index_that_does_not_fit_its_files(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    index = write_shards(tmp_path, one={"a": torch.ones(3)}, two={"c": torch.ones(1)})
    damage(tmp_path)
    with pytest.raises(ModelError, match=re.escape(message)):
        list_tensors(index)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"a": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match=r"'a' is in one.safetensors and in two.safetensors"):
        list_tensors(tmp_path)


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds no .safetensors file \(config.json\)"):
        list_tensors(tmp_path)
    with pytest.raises(ModelError, match="does not exist"):
        list_tensors(tmp_path / "absent.safetensors")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ModelError, match=f"{path} is no regular file"):
            list_tensors(path)


def test_globs_match_whole_names(tmp_path: Path) -> None:
    names = ["model.embed", "model.layers.0.q.weight", "model.layers.10.q.weight", "a[0]"]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "a.safetensors")
    tensors = list_tensors(tmp_path)

    def select(*patterns: str) -> set[str]:
        return {tensor.name for tensor in select_tensors(tensors, patterns)}

    assert select() == set(names)
    assert select("model.layers.?.*") == {"model.layers.0.q.weight"}
    assert select("*.q.weight", "model.embed") == set(names) - {"a[0]"}
    assert select("a[0]") == {"a[0]"}
    for part in ("q", "embed", "MODEL.*", "model.layers"):
        with pytest.raises(UnknownName, match="matches whole names"):
            select("model.embed", part)
    with pytest.raises(UnknownName, match=r"Nearest: model\.embed"):
        select("model.embedd")


def test_integers_and_packed_elements_are_left_out(tmp_path: Path) -> None:
    header = {
        "f4": entry("F4", [4], [0, 2]),
        "f6": entry("F6_E2M3", [4], [2, 5]),
        "bool": entry("BOOL", [3], [5, 8]),
        "f32": entry("F32", [1], [8, 12]),
    }
    path = write_raw(tmp_path / "a.safetensors", header, b"\0" * 8 + struct.pack("<f", -3))
    survey = survey_tensors(list_tensors(path), ["bf16"])
    assert survey.skipped == {"F4": 1, "F6_E2M3": 1, "BOOL": 1}
    assert (survey.num_tensors, survey.statistics.amax) == (1, 3.0)
    with pytest.raises(ModelError, match="no tensor of floats to look at \\(1 of F4\\)"):
        survey_tensors(select_tensors(list_tensors(path), ["f4"]), ["bf16"])


def test_scaled_shares_are_those_of_each_tensor_alone(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    small, large = (torch.randn(4000, generator=draw) * size for size in (1e-4, 1e4))
    save_file({"small": small, "large": large, "zero": torch.zeros(8)}, tmp_path / "a.safetensors")
    survey = survey_tensors(list_tensors(tmp_path), ["fp8_e4m3"], scaled=True, per_tensor=True)
    num_flushed = 0
    for values in (small, large):
        codes = (values * (448 / values.abs().max())).to(torch.float8_e4m3fn)
        num_flushed += int((codes.float() == 0).sum())
    assert survey.shares["fp8_e4m3"].flushed == pytest.approx(num_flushed / 8008, abs=2e-4)
    assert survey.shares["fp8_e4m3"].overflow == 0
    assert [row.name for row in survey.rows] == ["large", "small", "zero"]
    assert max(survey.octaves) == -1 and sum(survey.octaves.values()) == 8000


def test_only_nan_leaves_nothing_to_show(tmp_path: Path) -> None:
    save_file({"a": torch.full((3,), torch.nan)}, tmp_path / "a.safetensors")
    with pytest.raises(BitwrightError, match=r"none of the 3 values is finite \(3 NaN, 0 Inf\)"):
        survey_tensors(list_tensors(tmp_path), ["bf16"])


def test_tensors_without_values_leave_nothing_to_show(tmp_path: Path) -> None:
    save_file({"a": torch.empty(0, 4)}, tmp_path / "a.safetensors")
    with pytest.raises(BitwrightError, match="'a' has no values, so there is nothing to draw"):
        survey_tensors(list_tensors(tmp_path), ["bf16"])
    save_file({"a": torch.empty(0), "b": torch.empty(0)}, tmp_path / "a.safetensors")
    with pytest.raises(BitwrightError, match="the 2 tensors have no values"):
        survey_tensors(list_tensors(tmp_path), ["bf16"])


def test_unsigned_formats_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    tensors = list_tensors(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(FormatError, match="uint4 holds no negative numbers"):
        survey_tensors(tensors, ["bf16", "uint4"])


def test_memory_stays_small_whatever_the_size(tmp_path: Path) -> None:
    size = 96 << 20
    with open(write_raw(tmp_path / "a.safetensors", {"a": entry("BF16", [size // 2], [0, size])}), "r+b") as file:
        file.seek(0, 2)
        file.truncate(file.tell() + size)
    tensors = list_tensors(tmp_path)
    tensor_survey.prepare_counting(tensors)
    tracemalloc.start()
    (statistics,) = (found for _, found in measure_tensors(tensors))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert statistics.num_zero == size // 2
    assert peak < 64 << 20 and np.isinf(statistics.smallest)
