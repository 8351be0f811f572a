"""Bad input, by way of the command line: a sentence that says what to do, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import small_model, stored_tensors, uniform

from bitwright.cli import main
from bitwright.errors import ExportError
from bitwright.export import EXPORTERS, export, supported_schemes
from bitwright.inference import apply
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Run, load_plan, write_plan
from bitwright.quantize import SCHEMES

TARGETS = tuple(EXPORTERS)
NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer: Any) -> LoadedModel:
    return small_model(tiny_tokenizer)


@pytest.fixture(scope="module")
def made(loaded: LoadedModel, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, another one, and plans for the first: `int4_g64`, `fp6_w`."""
    folder = tmp_path_factory.mktemp("made")
    for name, model in (("model", loaded), ("other", small_model(seed=1)), ("wider", small_model(hidden_size=256))):
        model.model.save_pretrained(folder / name)
        tiny_tokenizer.save_pretrained(folder / name)
    for scheme in ("int4_g64", "int4_g32", "fp6_w", "fp8"):
        plan = uniform(loaded, scheme).attach(run=Run(paths={"model": str(folder / "model")}))
        write_plan(plan, folder / scheme)
    export(load_plan(folder / "int4_g64"), loaded, "compressed-tensors", folder / "exported")
    export(load_plan(folder / "int4_g32"), loaded, "gguf", folder / "exported-gguf")
    text = "\n\n".join(f"Paragraph {i} says {i * i}, no more than that." for i in range(400))
    (folder / "text.txt").write_text(text)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """``run(…)`` → (exit code, what was said, on one line)."""

    def said(*arguments: Any) -> tuple[int, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, " ".join((captured.out + captured.err).split())

    return said


def left(folder: Path) -> list[str]:
    """What lies in a folder, hidden or not."""
    return sorted(path.name for path in folder.iterdir())


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_another_model_is_told_by_its_tensors(made: Path, tmp_path: Path, run: Any) -> None:
    asked = ("export", made / "int4_g64", "--to", "compressed-tensors", "--out", tmp_path / "out", "--model")
    code, said = run(*asked, made / "other")
    assert code == 2 and "the shapes of all 14 tensors agree, their values do not" in said
    code, said = run(*asked, made / "wider")
    assert code == 2 and "model.layers.0.self_attn.q_proj is [256, 256] instead of [128, 128]" in said
    assert left(tmp_path) == []


def test_a_newer_schema_asks_for_a_newer_bitwright(made: Path, tmp_path: Path, run: Any) -> None:
    shutil.copytree(made / "int4_g64", tmp_path / "plan")
    content = json.loads((tmp_path / "plan" / "plan.json").read_text())
    (tmp_path / "plan" / "plan.json").write_text(json.dumps({**content, "schema_version": 99}))
    code, said = run("export", tmp_path / "plan", "--to", "gguf", "--out", tmp_path / "out")
    assert code == 2 and "has schema version 99, and this bitwright reads up to" in said and "upgrade" in said
    assert left(tmp_path) == ["plan"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda plan: (plan / "plan.json").unlink(), "no plan"),
        (lambda plan: (plan / "plan.json").write_bytes((plan / "plan.json").read_bytes()[:500]), "damaged"),
        (lambda plan: (plan / "plan.json").write_text("{}"), "is JSON but no plan"),
    ],
    ids=["no plan.json", "half of plan.json", "other JSON"],
)
def test_a_damaged_plan_is_told(made: Path, tmp_path: Path, run: Any, damage: Any, says: str) -> None:
    shutil.copytree(made / "int4_g64", tmp_path / "plan")
    damage(tmp_path / "plan")
    code, said = run("export", tmp_path / "plan", "--to", "compressed-tensors", "--out", tmp_path / "out")
    assert code == 2 and says in said, said
    assert left(tmp_path) == ["plan"]


def test_sites_that_an_engine_cannot_express_are_named(made: Path, tmp_path: Path, run: Any) -> None:
    for target in ("compressed-tensors", "torchao", "tensorrt-llm", "modelopt", "transformer-engine"):
        code, said = run("export", made / "fp6_w", "--to", target, "--out", tmp_path / "out")
        assert code == 2 and f"'{target}' cannot express 14 of 14 sites" in said
        assert "nothing was written" in said and "model.layers.{0-1}.mlp.up_proj" in said
    code, said = run("export", made / "int4_g64", "--to", "gguf", "--engine", "vllm", "--out", tmp_path / "out")
    assert code == 2 and "vllm does not load what 'gguf' writes" in said
    code, said = run(
        "export", made / "int4_g64", "--to", "compressed-tensors", "--engine", "vlm", "--out", tmp_path / "x"
    )
    assert code == 2 and "did you mean 'vllm'" in said
    assert left(tmp_path) == []


@pytest.mark.parametrize("out", ["file/out", "file", "locked/out"])
def test_a_place_that_cannot_be_written_is_told_before_a_model_is_loaded(
    made: Path, tmp_path: Path, run: Any, out: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "locked").mkdir(mode=0o500)
    asked = ("export", made / "int4_g64", "--to", "gguf", "--out", tmp_path / out, "--model", "/nowhere")
    code, said = run(*asked)
    assert code == 2
    if out == "locked/out" and "no permission" not in said:
        pytest.skip("permissions do not bind this user")
    assert "exists, and an export replaces nothing" in said or "cannot export to" in said
    assert left(tmp_path) == ["file", "locked"] and (tmp_path / "file").read_text() == "mine"


# --- the disk ---------------------------------------------------------------------------------------------------------


@contextmanager
def small_files_only(most: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: writing fails as on a full disk, in whatever library."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def scheme_of(target: str) -> str:
    """One with codes that a target takes."""
    engines = EXPORTERS[target].engines
    taken = supported_schemes(target, engines[0] if engines else None)
    coded = [name for name in taken if name in SCHEMES and getattr(SCHEMES[name].weights, "scaling", None)]
    return next(name for name in ("int4_g64", "int4_g32", "int4_g128", "fp8", *coded) if name in coded)


@pytest.mark.parametrize("most", [60_000, 1_000])
@pytest.mark.parametrize("target", TARGETS)
def test_a_full_disk_is_told_and_nothing_is_left(loaded: LoadedModel, tmp_path: Path, target: str, most: int) -> None:
    plan = uniform(loaded, scheme_of(target))
    export(plan, loaded, target, tmp_path / "warm")  # compiled code is kept in files too
    largest = max(path.stat().st_size for path in (tmp_path / "warm").iterdir())
    shutil.rmtree(tmp_path / "warm")
    if largest <= most:
        pytest.skip(f"{target} writes no file of {most} bytes")
    with (
        small_files_only(most),
        pytest.raises(ExportError, match=r"nothing was written: (see to that|free some space) or choose"),
    ):
        export(plan, loaded, target, tmp_path / "made" / "out")
    assert left(tmp_path) == []


def test_an_import_on_a_full_disk_leaves_nothing(made: Path, tmp_path: Path, run: Any) -> None:
    asked = (
        "import", made / "exported", "--reference", made / "model", "--out", tmp_path / "plan",
        "--evaluation", made / "text.txt", "--tokens", 64, "--sequence-length", 16,
    )  # fmt: skip
    with small_files_only(20_000):
        code, said = run(*asked)
    assert code == 2 and "nothing was written" in said, said
    assert left(tmp_path) == []


@pytest.mark.parametrize("target", TARGETS)
def test_an_interrupt_leaves_nothing(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    write = type(EXPORTERS[target]).write

    def interrupted(self: Any, source: Any, folder: Path) -> Any:
        write(self, source, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(EXPORTERS[target]), "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(uniform(loaded, scheme_of(target)), loaded, target, tmp_path / "out")
    assert left(tmp_path) == []


# --- an export that is damaged ----------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: _cut(folder / "model.safetensors"), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no .safetensors file"),
        (lambda folder: _cut(folder / "config.json"), "config.json is no valid JSON"),
        (lambda folder: (folder / "config.json").unlink(), "says nothing of quantisation"),
    ],
    ids=["half of the weights", "no weights", "half of the config", "no config"],
)
def test_a_truncated_export_is_named(made: Path, tmp_path: Path, run: Any, damage: Any, says: str) -> None:
    shutil.copytree(made / "exported", tmp_path / "exported")
    damage(tmp_path / "exported")
    code, said = run("import", tmp_path / "exported", "--reference", made / "model", "--out", tmp_path / "plan")
    assert code == 2 and says in said and "Traceback" not in said, said
    assert left(tmp_path) == ["exported"]


def test_a_truncated_gguf_is_named(made: Path, tmp_path: Path, run: Any) -> None:
    shutil.copytree(made / "exported-gguf", tmp_path / "exported")
    _cut(tmp_path / "exported" / "model.gguf")
    file = tmp_path / "exported" / "model.gguf"
    code, said = run("import", file, "--reference", made / "model", "--out", tmp_path / "plan")
    assert code == 2 and "model.gguf" in said and "Traceback" not in said, said
    assert left(tmp_path) == ["exported"]


def test_what_was_exported_for_another_model_is_refused(made: Path, tmp_path: Path, run: Any) -> None:
    code, said = run("import", made / "exported", "--reference", made / "wider", "--out", tmp_path / "plan")
    assert code == 2 and "give the model that it was quantised from with --reference" in said
    assert left(tmp_path) == []


# --- odd shapes -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd(tiny_tokenizer: Any) -> LoadedModel:
    """Prime widths, and the vocabulary that SmolLM2 has with one token more."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return small_model(tiny_tokenizer, vocab_size=49153, hidden_size=62, intermediate_size=127, **heads)


@pytest.mark.parametrize("target", TARGETS)
def test_odd_shapes_are_written_or_refused(odd: LoadedModel, tmp_path: Path, target: str) -> None:
    written = []
    for scheme in ("int8", "int8_w", "fp8", "fp8_w", "int4_g64", "nvfp4_w", "bf16"):
        plan, out = uniform(odd, scheme), tmp_path / scheme
        try:
            export(plan, odd, target, out)
        except ExportError as error:
            assert "nothing was written" in str(error) and not out.exists()
        else:
            assert list(out.iterdir())
            written.append(scheme)
        assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    assert "bf16" in written


@pytest.mark.parametrize("scheme", ["int8", "fp8", "fp8_w"])
def test_odd_shapes_keep_their_values(odd: LoadedModel, tmp_path: Path, scheme: str) -> None:
    plan = uniform(odd, scheme)
    export(plan, odd, "compressed-tensors", tmp_path / "out", dtype="fp32", engine="transformers")
    stored = stored_tensors(tmp_path / "out")
    values = stored[f"{NAME}.weight"].float() * stored[f"{NAME}.weight_scale"]
    torch.testing.assert_close(values, apply(plan, odd).get_parameter(f"{NAME}.weight").data, rtol=2e-7, atol=0)
    assert stored["model.embed_tokens.weight"].shape == (49153, 62) and values.shape == (62, 127)
