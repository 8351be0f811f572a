"""What is refused, when, and what is left of an export that fails."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from export_models import planned, small_model, stored_json, stored_tensors, uniform
from safetensors import SafetensorError

from bitwright.errors import ExportError, PlanError, UnknownName
from bitwright.export import examine, export, open_source, supported_schemes
from bitwright.export.source import choose_dtype
from bitwright.export.written_folder import ShardWriter
from bitwright.inference import apply
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.models.sites import find_sites
from bitwright.plan import SearchOptions, write_plan
from bitwright.quantize.catalogs import VALUE_SCHEMES


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer: Any) -> LoadedModel:
    return small_model(tiny_tokenizer)


def test_every_site_is_named_with_its_reason_and_nothing_is_left(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = planned(loaded, lambda site: "fp6_w" if "mlp" in site.name else "int4_g128_min")
    with pytest.raises(ExportError) as refused:
        export(plan, loaded, "compressed-tensors", tmp_path / "deep" / "out")
    said = str(refused.value)
    assert "16 of 16 sites" in said and "nothing was written" in said
    assert "has no fp6_e3m2 codes: model.layers.{0-1}.mlp.gate_proj, model.layers.{0-1}.mlp.up_proj" in said
    assert "no uint4 codes with a floating minimum: model.layers.{0-1}.self_attn.q_proj" in said
    assert "lm_head" in said
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_replaced(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ExportError, match="exists, and an export replaces nothing"):
        export(uniform(loaded, "fp8"), loaded, "compressed-tensors", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match="exists"):
        export(uniform(loaded, "fp8"), loaded, "compressed-tensors", tmp_path / "file")
    with pytest.raises(ExportError, match="no folder at"):
        export(uniform(loaded, "fp8"), loaded, "compressed-tensors", tmp_path / "file" / "out")


def test_an_empty_folder_is_taken(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    report = export(uniform(loaded, "fp8"), loaded, "compressed-tensors", tmp_path / "out")
    assert report.files.keys() == {path.name for path in (tmp_path / "out").iterdir()}
    assert report.files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_files_are_readable_by_whom_the_umask_lets(loaded: LoadedModel, tmp_path: Path) -> None:
    """Also those of libraries that write for their own user alone, as safetensors does."""
    plan = uniform(loaded, "int4_g128")
    before = os.umask(0o027)
    try:
        export(plan, loaded, "compressed-tensors", tmp_path / "out")
        write_plan(plan, tmp_path / "plan")
    finally:
        os.umask(before)
    files = [*(tmp_path / "out").iterdir(), *(tmp_path / "plan").iterdir()]
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: 0o640 for path in files}


@contextmanager
def small_files_only() -> Iterator[None]:
    """No file may grow beyond 60 kB: writing fails as on a full disk, in whatever library."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_disk_that_is_full_is_told_and_nothing_is_left(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = uniform(loaded, "int4_g64")
    apply(plan, loaded)  # compiled code is kept in files too
    said = "File too large; nothing was written: see to that or choose another"
    with small_files_only(), pytest.raises(ExportError, match=said):
        export(plan, loaded, "compressed-tensors", tmp_path / "made" / "out")
    assert list(tmp_path.iterdir()) == []


def test_errors_of_the_system_are_found_in_those_of_safetensors(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(ExportError, match="nothing was written: free some space or choose another --out") as error:
        export(uniform(loaded, "int4_g64"), loaded, "compressed-tensors", tmp_path / "out")
    assert isinstance(error.value.__cause__, OSError) and error.value.__cause__.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_plan_for_another_model_names_what_differs(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = uniform(loaded, "fp8")
    other = small_model(loaded.tokenizer, seed=1)
    with pytest.raises(PlanError, match="the shapes of all 14 tensors agree, their values do not"):
        export(plan, other, "compressed-tensors", tmp_path / "out")
    wider = small_model(loaded.tokenizer, intermediate_size=384)
    with pytest.raises(PlanError, match=r"model.layers.0.mlp.gate_proj is \[384, 128\] instead of \[256, 128\]"):
        export(plan, wider, "compressed-tensors", tmp_path / "out")
    shorter = small_model(loaded.tokenizer, num_hidden_layers=1)
    with pytest.raises(PlanError, match=r"model\.layers\.1\.self_attn\.q_proj is not in it"):
        export(plan, shorter, "compressed-tensors", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_and_engines(loaded: LoadedModel, tmp_path: Path) -> None:
    plan = uniform(loaded, "fp8")
    with pytest.raises(UnknownName, match="unknown exporter 'compressed'; did you mean 'compressed-tensors'"):
        export(plan, loaded, "compressed", tmp_path / "out")
    with pytest.raises(ExportError, match=r"llama\.cpp does not load what 'compressed-tensors' writes"):
        examine(plan, "compressed-tensors", engine="llama.cpp")
    with pytest.raises(PlanError, match="written in fp32, fp16, bf16, not in 'fp8'"):
        export(plan, loaded, "compressed-tensors", tmp_path / "out", dtype="fp8")


def test_the_engine_is_the_one_that_was_planned_for(loaded: LoadedModel) -> None:
    plan = uniform(loaded, "int3_g64")
    options = SearchOptions(
        schemes=("int3_g64",),
        engine="hf",
        include_head=False,
        sequence_length=1,
        calibration_tokens=1,
        evaluation_tokens=1,
    )
    for_transformers = examine(plan.replace(options=options), "compressed-tensors")
    assert (for_transformers.engine, for_transformers.refused) == ("transformers", ())
    assert for_transformers.engine_reason == "the engine that the plan was made for"
    assert examine(plan, "compressed-tensors").engine == "vllm"
    assert len(examine(plan, "compressed-tensors").refused[0].sites) == 14


def test_parts_that_one_kernel_computes_agree(loaded: LoadedModel) -> None:
    plan = planned(
        loaded, lambda site: "int8_w" if site.role == "attn.k" else "fp8_w" if "self_attn" in site.name else "bf16"
    )
    (refused,) = examine(plan, "compressed-tensors").refused
    assert refused.schemes == ("fp8_w", "int8_w") and len(refused.sites) == 6
    assert refused.reason == (
        "vllm computes attn.q, attn.k and attn.v at once, under one scheme, and the plan gives them several"
    )
    assert examine(plan, "compressed-tensors", engine="transformers").refused == ()


def test_blocks_end_where_a_part_of_a_fused_matrix_ends() -> None:
    grouped = small_model(num_key_value_heads=1)
    (refused,) = examine(uniform(grouped, "fp8_block"), "compressed-tensors").refused
    assert "blocks of 128 rows do not end with the 32 rows of attn.k" in refused.reason
    assert {name.rpartition(".")[2] for name in refused.sites} == {"q_proj", "k_proj", "v_proj"}


def test_odd_sizes(tmp_path: Path, tiny_tokenizer: Any) -> None:
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    odd = small_model(tiny_tokenizer, vocab_size=263, hidden_size=58, intermediate_size=127, **heads)
    with pytest.raises(ExportError, match=r"groups of 64 in 127 columns.*down_proj"):
        export(uniform(odd, "int4_g64"), odd, "compressed-tensors", tmp_path / "out")
    plan = uniform(odd, "int8")
    export(plan, odd, "compressed-tensors", tmp_path / "int8", dtype="fp32")
    stored = stored_tensors(tmp_path / "int8")
    name = "model.layers.0.mlp.down_proj"
    values = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]
    torch.testing.assert_close(values, apply(plan, odd).get_parameter(f"{name}.weight").data, rtol=2e-7, atol=0)
    assert stored["model.embed_tokens.weight"].shape == (263, 58)


def test_fused_matrices_are_one_module(make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    fused = from_memory(make_tiny_model("phi3"), tiny_tokenizer, name="phi3")
    plan = uniform(fused, "int8_w")
    export(plan, fused, "compressed-tensors", tmp_path / "out", dtype="fp32")
    stored, name = stored_tensors(tmp_path / "out"), "model.layers.1.self_attn.qkv_proj"
    codes = stored[f"{name}.weight_packed"].numpy().view("u1").astype("f4") - 128
    values = torch.from_numpy(codes) * stored[f"{name}.weight_scale"]
    torch.testing.assert_close(values, apply(plan, fused).get_parameter(f"{name}.weight").data, rtol=2e-7, atol=0)


def test_what_is_no_linear_module_of_a_checkpoint(make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    gpt2 = from_memory(make_tiny_model("gpt2"), tiny_tokenizer, name="gpt2")
    for to, engine in (("compressed-tensors", "transformers"), ("torchao", "torchao"), ("modelopt", None)):
        with pytest.raises(ExportError, match=r"stored \[in, out\], as that of no linear module"):
            export(uniform(gpt2, "int8_w"), gpt2, to, tmp_path / "out", engine=engine)
    mixtral = from_memory(make_tiny_model("mixtral"), tiny_tokenizer, name="mixtral")
    plan = planned(mixtral, lambda site: "int8_w" if site.role.startswith("expert") else "bf16")
    with pytest.raises(ExportError, match="one parameter of three dimensions, of which torchao takes no codes"):
        export(plan, mixtral, "torchao", tmp_path / "out")


def test_a_tied_head_has_no_codes(tiny_tokenizer: Any, tmp_path: Path) -> None:
    tied = small_model(tiny_tokenizer, tie_word_embeddings=True)
    plan = planned(tied, lambda site: "int8_w" if site.role == "lm_head" else "bf16")
    for engine in ("vllm", "transformers"):
        with pytest.raises(ExportError, match="are one weight, which is stored once and without codes"):
            export(plan, tied, "compressed-tensors", tmp_path / "out", engine=engine)


def test_experts_without_codes_get_the_names_of_their_checkpoint(
    make_tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    mixtral = from_memory(make_tiny_model("mixtral"), tiny_tokenizer, name="mixtral")
    plan = planned(mixtral, lambda site: "int8_w" if "self_attn" in site.name else "as_loaded")
    export(plan, mixtral, "compressed-tensors", tmp_path / "out", dtype="fp32")
    mixtral.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = stored_tensors(tmp_path / "out"), stored_tensors(tmp_path / "theirs")
    plain = {name for name in theirs if "self_attn" not in name}
    assert len(plain) > 20
    for name in plain:
        assert torch.equal(ours[name], theirs[name]), name


def test_shards_have_an_index_that_finds_every_tensor(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.full((4, index + 1), float(index)) for index in range(5)}
    with ShardWriter(tmp_path, shard_bytes=100) as shards:
        for name, tensor in tensors.items():
            shards.add(name, tensor)
    index = stored_json(tmp_path, "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in tensors.values())
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(safetensors.torch.load_file(tmp_path / file)[name], tensors[name])


def test_an_error_leaves_no_complete_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError), ShardWriter(tmp_path) as shards:
        shards.add("a", torch.zeros(2))
        raise ValueError("stop")
    assert not (tmp_path / "model.safetensors").exists()


def test_dtypes_are_those_of_the_checkpoint_or_asked_for(loaded: LoadedModel) -> None:
    names = [name for name, _ in loaded.model.named_parameters()]

    def stored_as(name: str) -> LoadedModel:
        return LoadedModel(
            model=loaded.model,
            tokenizer=None,
            name="small",
            hash=loaded.hash,
            num_parameters=0,
            loaded_format={parameter: name for parameter in names},
            loaded_bits={},
            notes=(),
        )

    assert choose_dtype(stored_as("bf16"), None)[0] == torch.bfloat16
    assert choose_dtype(stored_as("fp32"), None)[0] == torch.float32
    assert choose_dtype(stored_as("bf16"), "fp16")[0] == torch.float16
    assert choose_dtype(stored_as("q4_1"), None)[0] == torch.float16
    embedding = loaded.model.get_parameter("model.embed_tokens.weight")
    kept = embedding.data
    embedding.data = kept * 1e6
    assert choose_dtype(stored_as("q4_1"), None)[0] == torch.bfloat16
    embedding.data = kept


def test_what_runs_is_what_is_read(loaded: LoadedModel) -> None:
    plan = uniform(loaded, "int4_g32", "signs")
    source, run = open_source(plan, loaded), apply(plan, loaded)
    for site in source.sites:
        assert torch.equal(source.weight(site).values(), run.get_parameter(site.parameter).data), site.name
    assert {name for name, _ in source.rest()} == {
        name for name, _ in loaded.model.named_parameters() if "proj" not in name
    }
    assert len(source.coded_sites()) == 14 and len(find_sites(loaded.model)) == 16


def test_what_a_target_takes_is_listed() -> None:
    assert {"int4_g64", "fp8", "fp8_block", "fp8_e4m3_tensor"} <= set(supported_schemes("compressed-tensors", "vllm"))
    caches = {name for name in supported_schemes("gguf") if name in VALUE_SCHEMES}
    assert caches and not caches & set(supported_schemes("safetensors-dequantized"))
    assert {"nvfp4_w", "nvfp4_static", "mxfp4_w"} <= set(supported_schemes("compressed-tensors", "vllm"))
    assert {"nvfp4", "fp6_w", "int4_g32_min"}.isdisjoint(supported_schemes("compressed-tensors", "vllm"))
    assert {"fp8", "int4_g128"} <= set(supported_schemes("tensorrt-llm", "tensorrt-llm"))
