"""`bitwright import` gives a plan that verify, compare and show take; what was exported here comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_checkpoints as foreign
import pytest
import torch
from export_models import planned, small_model, uniform
from safetensors.torch import load_file, save_file

from bitwright.cli import main
from bitwright.export import export
from bitwright.export.imported_plan import ProofText, plan_of
from bitwright.export.importer import look, raise_if_refused
from bitwright.inference import apply, calibrate_static
from bitwright.models.loaded import from_memory
from bitwright.models.sites import find_sites
from bitwright.plan import load_plan
from bitwright.quantize import SCHEMES

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}


@pytest.fixture(scope="module")
def text(tmp_path_factory: Any) -> Path:
    file: Path = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(f"Paragraph {i} says {i * i}, no more than that." for i in range(400)))
    return file


@pytest.fixture(scope="module")
def checkpoint(make_tiny_folder: Callable[..., Path], tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("foreign") / "model"
    foreign.write(folder, make_tiny_folder("llama"), _GPTQ, foreign.gptq())
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_checkpoint_becomes_a_plan_that_every_verb_takes(
    checkpoint: Path,
    make_tiny_folder: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = ("--evaluation", text, "--tokens", 256, "--sequence-length", 16)
    monkeypatch.chdir(tmp_path)
    plan = tmp_path / "model-plan"  # by the name of the checkpoint
    code, said = run(capsys, "import", checkpoint, "--reference", make_tiny_folder("llama"), *size)
    assert code == 0 and "int4_g32_zp" in said and "14" in said and "bitwright verify" in said
    assert "256 were asked for; 64 sequences of 16 were taken" in said
    assert load_plan(plan).run.paths["checkpoint"] == str(checkpoint.resolve())
    code, said = run(capsys, "show", plan)
    assert code == 0 and "nothing was predicted" in " ".join(said.split())
    assert "neither predicted nor measured" in said and "the plan has no limits" in said
    assert "not every limit" not in said and "predicted only" not in said
    code, said = run(capsys, "verify", plan)
    assert code == 0 and "nats per token" in said
    assert "no quality limit that this could be held against" in said and "holds here" not in said
    assert "were asked for" not in said
    code, said = run(capsys, "verify", plan, "--tokens", 64)
    assert code == 0 and "64 were asked for; 64 sequences of 16 were taken" in said
    code, said = run(capsys, "compare", plan, plan)
    assert code == 0 and "within the noise" in said


def test_what_cannot_be_taken_is_an_error_unless_it_may_be_left(
    checkpoint: Path,
    make_tiny_folder: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.qzeros"]
    save_file(tensors, broken / "model.safetensors")
    asked = ("import", broken, "--reference", make_tiny_folder("llama"), "--out", tmp_path / "plan")
    code, said = run(capsys, *asked, "--evaluation", text)
    assert code == 2 and "model.layers.0.mlp.up_proj: it lacks the tensor" in said
    assert not (tmp_path / "plan").exists()
    size = ("--evaluation", text, "--tokens", 64, "--sequence-length", 16)
    code, said = run(capsys, *asked, *size, "--partial")
    assert code == 0 and "left out" in said
    assert load_plan(tmp_path / "plan").site("model.layers.0.mlp.up_proj").scheme == "as_loaded"


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere", "is not there"), ("text.txt", "neither a model folder nor a .gguf file")],
)
def test_what_is_no_checkpoint(
    path: str, message: str, make_tiny_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("text")
    reference = make_tiny_folder("llama")
    code, said = run(capsys, "import", tmp_path / path, "--reference", reference, "--out", tmp_path / "plan")
    assert code == 2 and message in said


@pytest.mark.parametrize("target", ["compressed-tensors", "gguf"])
def test_what_was_exported_is_imported_with_the_same_weights(
    target: str, tiny_tokenizer: Any, text: Path, tmp_path: Path
) -> None:
    loaded = small_model(tiny_tokenizer)
    ends = {"embedding": "as_loaded", "lm_head": "as_loaded"}
    schemes = {**ends, "attn.q": "int4_g32", "attn.k": "int4_g32", "attn.v": "int4_g32", "mlp.down": "int4_g32_zp"}
    others = {"compressed-tensors": "fp8", "gguf": "int8_g32"}[target]
    plan = planned(loaded, lambda site: schemes.get(site.role, others))
    export(plan, loaded, target, tmp_path / "out", dtype="fp32")
    found = look(tmp_path / "out" / "model.gguf" if target == "gguf" else tmp_path / "out", loaded)
    raise_if_refused(found)
    again = plan_of(found, loaded, ProofText(evaluation=text, evaluation_tokens=64, sequence_length=16))
    ours, theirs = apply(plan, loaded), apply(again, loaded)
    for site in find_sites(loaded.model):
        assert torch.equal(ours.get_parameter(site.parameter), theirs.get_parameter(site.parameter)), site.name
    if target == "compressed-tensors":
        inputs = {site.name: SCHEMES[site.scheme].activations for site in plan.sites}
        assert {s.name: SCHEMES[s.scheme].activations for s in again.sites if s.name in inputs} == inputs


@pytest.mark.parametrize(
    ("architecture", "scheme", "engine"),
    [("gpt2", "int8", "vllm"), ("gpt2", "int4_g32", "vllm"), ("mixtral", "int4_g32", "vllm"), ("llama", "nvfp4", None)],
)
def test_what_lies_otherwise_comes_back(
    make_tiny_model: Any, tiny_tokenizer: Any, text: Path, tmp_path: Path, architecture: str, scheme: str, engine: Any
) -> None:
    """Weights stored [in, out], experts, and inputs under a static second level."""
    loaded = from_memory(make_tiny_model(architecture), tiny_tokenizer, name=architecture)
    ends = ("embedding", "lm_head", "router")
    plan = planned(loaded, lambda site: "as_loaded" if site.role in ends else scheme)
    if scheme == "nvfp4":
        prompts = [torch.arange(24).unsqueeze(0)]
        plan = calibrate_static(uniform(loaded, "nvfp4_static"), loaded, prompts)
        engine = "transformers"
    export(plan, loaded, "compressed-tensors", tmp_path / "out", dtype="fp32", engine=engine)
    found = look(tmp_path / "out", loaded)
    raise_if_refused(found)
    again = plan_of(found, loaded, ProofText(evaluation=text, evaluation_tokens=64, sequence_length=16))
    assert {site.name: site.scheme for site in again.sites} == {
        site.name: "as_loaded" if site.role in ends else plan.site(site.name).scheme for site in again.sites
    }
    ours, theirs = apply(plan, loaded), apply(again, loaded)
    for site in find_sites(loaded.model):
        expected, back = ours.get_parameter(site.parameter), theirs.get_parameter(site.parameter)
        torch.testing.assert_close(back, expected, rtol=2e-7, atol=0)
    scales = {name: float(value) for name, value in again.tensors.items() if name.endswith("/input_scale")}
    assert scales == {name: pytest.approx(float(plan.tensors[name]), rel=2e-7) for name in scales}
    assert bool(scales) == (scheme == "nvfp4")


def test_a_checkpoint_that_is_not_there_is_told_before_the_reference_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["bitwright.models.load"]  # the package has a function of that name
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("the reference was loaded"))
    (tmp_path / "plain").mkdir()
    for folder in ("nowhere", "plain"):
        code, said = run(capsys, "import", tmp_path / folder, "--reference", "demo", "--out", tmp_path / "plan")
        assert code == 2 and folder in said


def test_text_that_is_not_there_is_told_before_a_model_is_loaded(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ("--evaluation", tmp_path / "nowhere.txt", "--out", tmp_path / "plan")
    for name in ("bitwright.models.load", "bitwright.search.subject"):
        __import__(name)
        monkeypatch.setattr(sys.modules[name], "load", lambda *_, **__: pytest.fail("a model was loaded"))
    for verb in (("import", checkpoint, "--reference", "demo"), ("optimize", "demo")):
        code, said = run(capsys, *verb, *missing)
        assert code == 2 and "nowhere.txt' does not exist" in said
