"""What holds for every exporter: a refusal leaves nothing, two writes give equal bytes, what is written can be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import small_model, uniform
from safetensors.torch import load_file
from transformers import AutoTokenizer

from bitwright.errors import ExportError
from bitwright.export import EXPORTERS, Exporter, export, supported_schemes
from bitwright.models.loaded import LoadedModel
from bitwright.plan.engine import get_engine
from bitwright.quantize import SCHEMES

TARGETS = tuple(EXPORTERS)


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer: Any) -> LoadedModel:
    return small_model(tiny_tokenizer)


def coded_schemes(name: str) -> list[str]:
    """Schemes with codes that a target takes for its first engine; those first whose kernels other tests compile."""
    engines = EXPORTERS[name].engines
    taken = supported_schemes(name, engines[0] if engines else None)
    coded = [scheme for scheme in taken if scheme in SCHEMES and getattr(SCHEMES[scheme].weights, "scaling", None)]
    return sorted(coded, key=lambda scheme: scheme not in ("int4_g64", "int4_g32", "int4_g128", "fp8"))


@pytest.mark.parametrize("name", TARGETS)
def test_an_exporter_is_complete(name: str) -> None:
    exporter = EXPORTERS[name]
    assert isinstance(exporter, Exporter)
    assert exporter.description and not exporter.description.endswith(".")
    assert set(exporter.engines) <= set(exporter.loaded_by) != set()
    for engine in exporter.engines:
        get_engine(engine)
    assert coded_schemes(name), f"{name} takes no scheme with codes"


@pytest.mark.parametrize("name", TARGETS)
def test_two_writes_are_equal_byte_for_byte(loaded: LoadedModel, tmp_path: Path, name: str) -> None:
    schemes = coded_schemes(name)
    for scheme in schemes[:2]:
        plan = uniform(loaded, scheme)
        files = []
        for attempt in ("first", "second"):
            export(plan, loaded, name, tmp_path / scheme / attempt)
            files.append({p.name: p.read_bytes() for p in (tmp_path / scheme / attempt).rglob("*") if p.is_file()})
        assert files[0].keys() == files[1].keys()
        assert [file for file in files[0] if files[0][file] != files[1][file]] == []


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_refused_leaves_nothing(loaded: LoadedModel, tmp_path: Path, name: str) -> None:
    engines = EXPORTERS[name].engines
    taken = supported_schemes(name, engines[0] if engines else None)
    refused = [scheme for scheme in SCHEMES if scheme not in (*taken, "as_loaded")]
    if not refused:
        assert not engines, "what an engine loads cannot express everything"
    for scheme in refused[:2]:
        plan = uniform(loaded, scheme)
        with pytest.raises(ExportError, match=r"14 of 14 sites.*nothing was written"):
            export(plan, loaded, name, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_written_can_be_read(loaded: LoadedModel, tmp_path: Path, name: str) -> None:
    report = export(uniform(loaded, coded_schemes(name)[0]), loaded, name, tmp_path / "out")
    read = 0
    for file in (tmp_path / "out").iterdir():
        match file.suffix:
            case ".safetensors":
                assert all(
                    not t.is_floating_point() or torch.isfinite(t.float()).all() for t in load_file(file).values()
                )
                read += 1
            case ".json":
                json.loads(file.read_text(encoding="utf-8"))
                read += 1
    assert read or any(file.endswith(".gguf") for file in report.files)
    if "tokenizer.json" in report.files:
        text = "Bytes, and an é."
        assert AutoTokenizer.from_pretrained(tmp_path / "out").decode(loaded.tokenizer(text).input_ids) == text
    assert set(report.files) == {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
