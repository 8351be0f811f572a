"""The real vLLM on a CPU runs what is exported (`benchmarks/engines/vllm_check.py`: on the built-in model)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import planned, small_model

from bitwright.export import export
from bitwright.inference import apply

#: A python with vLLM, as `benchmarks/engines/requirements-vllm.txt` makes it.
PYTHON = os.environ.get("BITWRIGHT_VLLM_PYTHON")
RUNNER = Path(__file__).parents[2] / "benchmarks" / "engines" / "vllm_runner.py"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="BITWRIGHT_VLLM_PYTHON names no python with vLLM")
def test_vllm_predicts_what_the_plan_predicts(tiny_tokenizer: Any, tmp_path: Path) -> None:
    assert PYTHON
    loaded = small_model(tiny_tokenizer, num_attention_heads=2, num_key_value_heads=2, initializer_range=0.05)
    schemes = {"mlp": "int4_g32_zp", "attn": "int4_g64"}
    plan = planned(loaded, lambda site: schemes.get(site.role.partition(".")[0], "as_loaded"))
    export(plan, loaded, "compressed-tensors", tmp_path / "out", dtype="fp16")
    texts = [torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(2)]
    asked = {"model": str(tmp_path / "out"), "dtype": "float16", "texts": texts, "prompts": [], "new_tokens": 1}
    (tmp_path / "request.json").write_text(json.dumps(asked), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, RUNNER, tmp_path / "request.json", tmp_path / "answer.json"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))
    run = apply(plan, loaded)
    for ids, theirs in zip(texts, answer["logprobs"], strict=True):
        with torch.no_grad():
            predicted = run(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        ours = predicted.gather(1, torch.tensor(ids)[1:, None])[:, 0]
        assert (ours - torch.tensor(theirs)).abs().mean() <= 0.02
