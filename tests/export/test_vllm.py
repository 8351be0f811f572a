"""The real vLLM on a CPU runs what is exported (`benchmarks/engines/vllm_check.py`: on the built-in model)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import for_model, planned, small_model, uniform
from small_plans import choice, plan_of

from bitwright.export import export, share_tensor_scales
from bitwright.inference import apply, calibrate_static
from bitwright.models.loaded import LoadedModel, from_memory
from bitwright.models.value_sites import find_value_sites
from bitwright.plan import Plan
from bitwright.quantize import VALUE_SCHEMES
from bitwright.quantize.value_rounding import round_values

#: A python with vLLM, as `benchmarks/engines/requirements-vllm.txt` makes it.
PYTHON = os.environ.get("BITWRIGHT_VLLM_PYTHON")
RUNNER = Path(__file__).parents[2] / "benchmarks" / "engines" / "vllm_runner.py"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
TEXTS = [torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(2)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="BITWRIGHT_VLLM_PYTHON names no python with vLLM: benchmarks/engines/python_of.py"
    ),
]


def prompts() -> list[torch.Tensor]:
    """Texts that static scales are found on."""
    return [torch.tensor([ids]) for ids in TEXTS]


def llama(tokenizer: Any) -> LoadedModel:
    """Two heads of 64, the least that vLLM's attention on CPUs keeps in FP8."""
    return small_model(tokenizer, num_attention_heads=2, num_key_value_heads=2, initializer_range=0.05)


def gpt2(tokenizer: Any) -> LoadedModel:
    """Weights stored [in, out]."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=260, n_embd=128, n_layer=2, n_head=2, n_positions=128, initializer_range=0.1,
        bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return from_memory(transformers.AutoModelForCausalLM.from_config(config).eval(), tokenizer, name="gpt2")


def mixtral(tokenizer: Any) -> LoadedModel:
    """Four experts, two of them at work."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=260, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
        initializer_range=0.1, bos_token_id=256, eos_token_id=256, pad_token_id=259,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
        return from_memory(model, tokenizer, name="mixtral")


def mixed(loaded: LoadedModel) -> Plan:
    """Two schemes of integers."""
    schemes = {"mlp": "int4_g32_zp", "attn": "int4_g64"}
    return planned(loaded, lambda site: schemes.get(site.role.partition(".")[0], "as_loaded"))


def cached(loaded: LoadedModel) -> Plan:
    """The cache as vLLM's kernels for CPUs cast it."""
    sites = [site for site in find_value_sites(loaded.model) if site.role == "kv_cache"]
    plan = for_model(plan_of([choice(site, "fp8_e4m3_tensor_truncated") for site in sites]), loaded)
    return calibrate_static(plan, loaded, prompts())


def fours(loaded: LoadedModel) -> Plan:
    """NVFP4 with tensor scales as vLLM has room for them."""
    return share_tensor_scales(calibrate_static(uniform(loaded, "nvfp4_static"), loaded, prompts()), loaded, "vllm")


def with_head(loaded: LoadedModel) -> Plan:
    """The head under codes too."""
    return planned(loaded, lambda site: "int4_g64" if site.role != "embedding" else "as_loaded")


def integers(loaded: LoadedModel) -> Plan:
    """One scheme of integers everywhere."""
    return uniform(loaded, "int4_g64")


CASES: dict[str, tuple[Callable[[Any], LoadedModel], Callable[[LoadedModel], Plan], str]] = {
    "integers mixed by layer": (llama, mixed, "fp16"),
    "an FP8 cache": (llama, cached, "fp32"),
    "NVFP4, on vLLM's own emulation": (llama, fours, "fp32"),
    "a head under codes": (llama, with_head, "fp16"),
    "weights stored [in, out]": (gpt2, integers, "fp16"),
    "int8 weights and inputs, stored [in, out]": (gpt2, lambda loaded: uniform(loaded, "int8"), "fp32"),
}


def answer_of_vllm(folder: Path, dtype: str) -> dict[str, Any]:
    """What vLLM says to a folder."""
    assert PYTHON
    request, answer = folder.with_suffix(".request.json"), folder.with_suffix(".answer.json")
    asked = {"model": str(folder), "dtype": {"fp16": "float16", "fp32": "float32"}[dtype], "texts": TEXTS}
    request.write_text(json.dumps({**asked, "prompts": [], "new_tokens": 1}), encoding="utf-8")
    done = subprocess.run([PYTHON, RUNNER, request, answer], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("case", CASES)
def test_vllm_predicts_what_the_plan_predicts(tiny_tokenizer: Any, tmp_path: Path, case: str) -> None:
    make_model, make_plan, dtype = CASES[case]
    loaded = make_model(tiny_tokenizer)
    plan = make_plan(loaded)
    export(plan, loaded, "compressed-tensors", tmp_path / "out", dtype=dtype)
    run = apply(plan, loaded)
    for ids, theirs in zip(TEXTS, answer_of_vllm(tmp_path / "out", dtype)["logprobs"], strict=True):
        ours, unplanned = logprobs(run, ids), logprobs(loaded.model, ids)
        apart = (ours - torch.tensor(theirs)).abs().mean()
        assert apart <= min(0.02, (ours - unplanned).abs().mean() / 4), f"{apart:.4f}"


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """log p of every token but the first."""
    predicted = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return predicted.gather(1, torch.tensor(ids)[1:, None])[:, 0]


_CAST = """
import sys, torch
from vllm import _custom_ops as ops
x, scale = torch.load(sys.argv[1])
cache = torch.zeros(1, 1, 2 * len(x), x.shape[1], dtype=torch.uint8)
keys, values = cache.chunk(2, dim=2)
rows = x.unsqueeze(1)
ops.cpu_attn_reshape_and_cache(rows, rows, keys, values, torch.arange(len(x)), "vec", scale, scale, "fp8")
torch.save(values[0, 0].clone(), sys.argv[1] + ".codes")
"""


def test_vllm_cuts_off_what_does_not_fit_a_cache_on_a_cpu(tmp_path: Path) -> None:
    assert PYTHON
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-14, 11, (32, 64), generator=generator)
    x, scale = torch.randn(32, 64, generator=generator) * 2.0**exponents, 0.125
    torch.save((x, scale), tmp_path / "x.pt")
    done = subprocess.run([PYTHON, "-c", _CAST, tmp_path / "x.pt"], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.load(f"{tmp_path / 'x.pt'}.codes").view(torch.float8_e4m3fn).float() * scale
    cut = round_values(x, VALUE_SCHEMES["fp8_e4m3_tensor_truncated"], torch.tensor([scale]))
    nearest = round_values(x, VALUE_SCHEMES["fp8_e4m3_tensor"], torch.tensor([scale]))
    assert torch.equal(theirs, cut)
    assert not torch.equal(theirs, nearest)


_EXPERTS = """
import json, sys, torch
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.models.mixtral import MixtralForCausalLM
settings = json.load(open(sys.argv[1] + "/config.json"))["quantization_config"]
config = CompressedTensorsConfig.from_config(settings)
config.apply_vllm_mapper(MixtralForCausalLM.hf_to_vllm_mapper)
config.packed_modules_mapping = MixtralForCausalLM.packed_modules_mapping
for name in sys.argv[2:]:
    found = config.get_scheme_dict(torch.nn.Linear(1, 1), name)
    print(name, "nothing" if found is None else f"{found['weights'].num_bits} {found['format']}")
"""


def test_vllm_finds_the_settings_of_experts(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Its kernels for experts on CPUs need AMX; which settings it would take it says everywhere."""
    assert PYTHON
    loaded = mixtral(tiny_tokenizer)
    plan = planned(
        loaded,
        lambda site: (
            "int4_g32"
            if site.role.startswith("expert") and "layers.1." in site.name
            else "int8_w"
            if "self_attn" in site.name
            else "as_loaded"
        ),
    )
    export(plan, loaded, "compressed-tensors", tmp_path / "out", dtype="fp16")
    expected = {f"model.layers.1.block_sparse_moe.experts.0.w{part}": "4 pack-quantized" for part in (1, 2, 3)}
    expected |= {f"model.layers.0.block_sparse_moe.experts.0.w{part}": "nothing" for part in (1, 2, 3)}
    expected |= {"model.layers.0.self_attn.qkv_proj": "8 pack-quantized", "lm_head": "nothing"}
    done = subprocess.run(
        [PYTHON, "-c", _EXPERTS, tmp_path / "out", *expected], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("model", "lm"))) == expected
