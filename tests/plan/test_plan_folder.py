"""A plan on disk: there completely or not at all, and the same after reading."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from fabricated_plan import make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwright.errors import PlanError
from bitwright.plan import (
    SCHEMA_VERSION,
    Plan,
    Prediction,
    Run,
    Workload,
    load_plan,
    parse_plan,
    raise_if_not_replaceable,
    write_plan,
)
from bitwright.plan.canonical import canonical_json, hash_json

finite = st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e12, max_value=1e12)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
arrays = st.sampled_from(["float64", "float32", "float16", "int8", "uint8", "int32", "bool"]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), min_size=0, max_size=3).map(
        lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    )
)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@settings(max_examples=25, deadline=None)
@given(
    kl=finite,
    notes=st.lists(texts, max_size=3),
    source=texts,
    tensors=st.dictionaries(st.sampled_from(["a", "b.c", "ü"]), arrays, max_size=3),
    timings=st.dictionaries(texts, finite, max_size=2),
)
def test_plan_to_folder_to_plan_is_the_identity(kl, notes, source, tensors, timings):
    plan = make_plan(
        num_layers=1,
        notes=tuple(notes),
        predictions=(Prediction(what=source, predicted_kl=kl, measured_kl=-kl),),
    )
    plan = plan.attach(tensors={f"lm_head/{name}": array for name, array in tensors.items()}, run=Run(timings=timings))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "plan"
        write_plan(plan, folder)
        first = tree(folder)
        again = load_plan(folder)
        assert again == plan
        assert again.model_dump() == plan.model_dump()
        assert again.run == plan.run
        assert again.tensors.keys() == plan.tensors.keys()
        for name, array in plan.tensors.items():
            assert again.tensors[name].dtype == array.dtype
            np.testing.assert_array_equal(again.tensors[name], array, strict=True)
        write_plan(again, folder)
        assert tree(folder) == first
        assert parse_plan(first["plan.json"].decode()).tensors_hash == plan.tensors_hash


def test_files_are_what_their_formats_say(tmp_path: Path):
    plan = make_plan()
    folder = write_plan(plan, tmp_path / "deep" / "er" / "plan", extra_files={"report.html": b"<p>"})
    assert sorted(tree(folder)) == ["plan.json", "report.html", "run.json", "tensors.safetensors"]
    assert json.loads((folder / "plan.json").read_text()) == json.loads(plan.to_json())
    assert safetensors.numpy.load_file(folder / "tensors.safetensors").keys() == plan.tensors.keys()
    assert os.listdir(tmp_path / "deep" / "er") == ["plan"]
    assert load_plan(folder / "plan.json") == plan


def test_text_is_canonical(tmp_path: Path):
    text = (write_plan(make_plan(), tmp_path / "plan") / "plan.json").read_text()
    assert text.endswith("}\n")
    assert text == canonical_json(json.loads(text))


@pytest.mark.parametrize("failing_call", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("older", [False, True])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch, failing_call: int, older: bool):
    target = tmp_path / "new" / "plan"
    if older:
        write_plan(make_plan(num_layers=2), target)
    before = tree(tmp_path)
    calls = iter(range(100))
    real = os.fsync

    def full(descriptor: int) -> None:
        if next(calls) == failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match=r"No space left on device; nothing was written"):
        write_plan(make_plan(), target, extra_files={"report.html": b"x"})
    assert tree(tmp_path) == before
    assert older or not list(tmp_path.iterdir())


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_plan(make_plan(), tmp_path / "plan")
    assert not list(tmp_path.iterdir())


def test_a_failed_rename_puts_the_older_plan_back(tmp_path: Path, monkeypatch):
    old = make_plan(num_layers=2)
    target = write_plan(old, tmp_path / "plan")
    real = os.rename

    def refuse_new(source, destination):
        if str(source).endswith(".tmp"):
            raise OSError(errno.EIO, "Input/output error")
        real(source, destination)

    monkeypatch.setattr(os, "rename", refuse_new)
    with pytest.raises(PlanError, match="Input/output error"):
        write_plan(make_plan(), target)
    assert load_plan(target) == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan"]


def test_only_a_plan_folder_is_replaced(tmp_path: Path):
    mine = tmp_path / "thesis"
    mine.mkdir()
    write_plan(make_plan(num_layers=1), mine)
    (mine / "chapter.tex").write_text("years of work")
    with pytest.raises(PlanError, match=r"also holds 'chapter\.tex'"):
        write_plan(make_plan(), mine)
    (mine / "plan.json").unlink()
    with pytest.raises(PlanError, match="not a plan folder"):
        write_plan(make_plan(), mine)
    assert (mine / "chapter.tex").read_text() == "years of work"
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(PlanError, match="is a file"):
        raise_if_not_replaceable(file)
    with pytest.raises(PlanError, match="is a file"):
        raise_if_not_replaceable(file / "plan")


def test_an_extra_file_cannot_take_the_plans_place(tmp_path: Path):
    for name in ("plan.json", "../escape", ""):
        with pytest.raises(PlanError, match="plain name"):
            write_plan(make_plan(), tmp_path / "plan", extra_files={name: b""})


def rewritten(folder: Path, **changes: object) -> None:
    """Change plan.json as a newer or careless program would: with hashes that fit."""
    content = json.loads((folder / "plan.json").read_text())
    content.update(changes)
    del content["content_hash"]
    content["content_hash"] = hash_json(content)
    (folder / "plan.json").write_text(canonical_json(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_plan(make_plan(num_layers=2), tmp_path / "plan")


def test_missing(tmp_path: Path):
    with pytest.raises(PlanError, match="there is no plan at"):
        load_plan(tmp_path / "nothing")
    with pytest.raises(PlanError, match=r"has no plan\.json"):
        load_plan(tmp_path)


def test_newer_schema(folder: Path):
    rewritten(folder, schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(PlanError, match=f"and this bitwright reads up to {SCHEMA_VERSION}; upgrade"):
        load_plan(folder)


#: Written by the versions of this program that wrote these schemas.
OLD_SCHEMAS = {version: Path(__file__).with_name(f"plan_of_schema_{version}.json") for version in (1, 2)}


@pytest.mark.parametrize("version", OLD_SCHEMAS)
def test_a_plan_of_an_old_schema_is_read_in_this_one(version: int):
    old = json.loads(OLD_SCHEMAS[version].read_text(encoding="utf-8"))
    plan = load_plan(OLD_SCHEMAS[version])
    assert old["schema_version"] == version and plan.schema_version == SCHEMA_VERSION
    assert [site.name for site in plan.sites] == [site["name"] for site in old["sites"]]
    limits = {name: value for name, value in old["budget"].items() if name in plan.budget.limits and value is not None}
    assert plan.budget.limits == limits != {}
    assert plan.measured is not None and plan.measured.kl.mean == old["measured"]["kl"]["mean"]
    if version == 1:
        assert plan.workload == Workload() and plan.uniform == () and plan.limit_studies == ()
    assert plan.tensor_hashes == {}
    assert parse_plan(plan.to_json()) == plan


@pytest.mark.parametrize("version", OLD_SCHEMAS)
def test_an_old_plan_is_as_safe_as_a_new_one(version: int, tmp_path: Path):
    """A changed byte breaks the content hash; with that mended, a changed choice breaks its own decision hash."""
    changed = tmp_path / "plan.json"
    text = OLD_SCHEMAS[version].read_text(encoding="utf-8")
    changed.write_text(text.replace('"scheme": "bf16"', '"scheme": "int8_w"', 1), encoding="utf-8")
    with pytest.raises(PlanError, match="not what was written"):
        load_plan(changed)
    content = json.loads(changed.read_text(encoding="utf-8"))
    del content["content_hash"]
    changed.write_text(canonical_json({**content, "content_hash": hash_json(content)}), encoding="utf-8")
    with pytest.raises(PlanError, match="decision_hash does not fit"):
        load_plan(changed)


@pytest.mark.parametrize("version", [0, -1, "1", True, None])
def test_impossible_schema(folder: Path, version: object):
    rewritten(folder, schema_version=version)
    with pytest.raises(PlanError, match="never existed"):
        load_plan(folder)


def test_truncated(folder: Path):
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text[: len(text) // 2])
    with pytest.raises(PlanError, match="no complete JSON"):
        load_plan(folder)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b'{"a": 1}', b"", b"[" * 100_000])
def test_something_else_called_plan_json(folder: Path, content: bytes):
    (folder / "plan.json").write_bytes(content)
    with pytest.raises(PlanError):
        load_plan(folder)


def test_changed_by_hand(folder: Path):
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"scheme": "int8_w"', '"scheme": "int4_g128"', 1))
    with pytest.raises(PlanError, match="not what was written"):
        load_plan(folder)


def test_nan_and_unknown_and_missing_fields(folder: Path):
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"seed": 0', '"seed": NaN'))
    with pytest.raises(PlanError, match="NaN"):
        load_plan(folder)
    (folder / "plan.json").write_text(text)
    rewritten(folder, surprise=1)
    with pytest.raises(PlanError, match="surprise"):
        load_plan(folder)
    (folder / "plan.json").write_text(text)
    rewritten(folder, summary={})
    with pytest.raises(PlanError, match=r"summary\.effective_bits"):
        load_plan(folder)
    (folder / "plan.json").write_text(text)
    rewritten(folder, decision_hash="0" * 64)
    with pytest.raises(PlanError, match="decision_hash"):
        load_plan(folder)


def test_tensors_missing_damaged_or_of_another_plan(folder: Path):
    file = folder / "tensors.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(PlanError, match="damaged"):
        load_plan(folder)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(PlanError, match="belongs to another plan"):
        load_plan(folder)
    file.unlink()
    with pytest.raises(PlanError, match="is missing"):
        load_plan(folder)


def test_run_may_be_absent_but_not_damaged(folder: Path):
    (folder / "run.json").write_text("{")
    with pytest.raises(PlanError, match="may be deleted"):
        load_plan(folder)
    (folder / "run.json").unlink()
    plan: Plan = load_plan(folder)
    assert plan.run == Run()


def test_a_mount_point_is_refused_before_long_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path)
    with pytest.raises(PlanError, match="is a mount point"):
        raise_if_not_replaceable(tmp_path)
    raise_if_not_replaceable(tmp_path / "plan")
