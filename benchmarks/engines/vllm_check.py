"""Does the real vLLM run an exported plan as it was measured here?

    python benchmarks/engines/vllm_check.py                          # every case below, on the built-in model
    python benchmarks/engines/vllm_check.py int4_g64 mixed --dtype bf16
    python benchmarks/engines/vllm_check.py --plan PLAN              # a plan of your own, for the model that it names

Every case is exported to compressed-tensors, loaded by vLLM on the CPU in an environment of its own
(`environments.py`), and held against `bitwright.inference.apply`, which runs the plan emulated in fp32:

    logprobs    mean over prompt tokens of |log p of vLLM − log p of apply|: at most 0.02 nats, or within the plan's own
                resolution (`comparison.py`)
    greedy      vLLM's greedy text is ours until the first place where our two best logits are closer than 0.05
    perplexity  of both, on the same tokens: at most 1 % apart

vLLM computes in the dtype of the checkpoint: `--dtype` says which. Its rounding is part of the difference too: the row
"plain" is the model without any codes. Kernels that it lacks on a CPU are its own words in the row; NVFP4 runs on the
emulation that vLLM has for GPUs without that format, which is arithmetic of torch (`vllm_runner.py`).

An FP8 cache is the same checkpoint whichever way casts round. vLLM's kernels for CPUs cut the bits off, so that the
case "kv_fp8" differs there and "kv_fp8_truncated", which says so, does not.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from comparison import (
    HERE,
    MAX_LOGPROB_DIFFERENCE,
    MAX_PERPLEXITY_RATIO,
    NEW_TOKENS,
    NUM_NUDGED,
    RESOLUTIONS,
    Case,
    Text,
    greedy_agrees,
    last_error,
    logprobs,
    nudged,
    run_checks,
    texts,
)

from bitwright.export import export
from bitwright.inference import apply
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Plan


def _mixed(name: str, first: str, mlp: str, other: str) -> str:
    return first if ".0." in name else mlp if "mlp" in name else other


CASES = {
    "plain": Case(scheme_of=lambda site: "as_loaded"),
    "int4_g64": Case(scheme_of=lambda site: "int4_g64"),
    "int4_g32_zp": Case(scheme_of=lambda site: "int4_g32_zp"),
    "int8_w": Case(scheme_of=lambda site: "int8_w"),
    "fp8_w": Case(scheme_of=lambda site: "fp8_w"),
    "fp8": Case(scheme_of=lambda site: "fp8"),
    "int8": Case(scheme_of=lambda site: "int8"),
    # blocks of 128 rows do not divide q and k of the built-in model, which vLLM computes in one matrix with v
    "fp8_block": Case(
        scheme_of=lambda site: "fp8" if site.role in ("attn.q", "attn.k", "attn.v") else "fp8_block",
    ),
    "mixed": Case(scheme_of=lambda site: _mixed(site.name, "as_loaded", "int4_g32_zp", "int4_g64")),
    "mixed_w8a8": Case(
        scheme_of=lambda site: "fp8" if ".0." in site.name else "int8" if site.role == "mlp.down" else "int4_g64"
    ),
    "mxfp4": Case(scheme_of=lambda site: "mxfp4"),
    "nvfp4_static": Case(scheme_of=lambda site: "nvfp4_static", shared_for="vllm"),
    "kv_fp8": Case(scheme_of=lambda site: "as_loaded", cache="fp8_e4m3_tensor"),
    "kv_fp8_truncated": Case(scheme_of=lambda site: "as_loaded", cache="fp8_e4m3_tensor_truncated"),
}


def main() -> None:
    """Run the cases that were asked for, print a row each, and write the results."""
    assert __doc__ is not None
    run_checks(__doc__, "vllm", CASES, check, spell, packages=("torch", "transformers"), add_options=_add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", action="append", help="bf16, fp16 or fp32; may be repeated; default fp16")


def check(plan: Plan, loaded: LoadedModel, python: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each dtype: vLLM beside `apply`."""
    text = texts(loaded)
    for dtype in args.dtype or ["fp16"]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "export"
            notes = export(plan, loaded, "compressed-tensors", folder, dtype=dtype).notes
            try:
                answer = ask_vllm(python, folder, dtype, text, Path(scratch))
            except subprocess.CalledProcessError as error:
                yield {"dtype": dtype, "error": last_error(error.stderr)}
                continue
        yield {"dtype": dtype, **compared(plan, loaded, text, answer), "notes": list(notes)}


def compared(plan: Plan, loaded: LoadedModel, text: Text, answer: dict[str, Any]) -> dict[str, Any]:
    """What vLLM answered beside what the plan says."""
    planned = apply(plan, loaded)
    ours = [logprobs(planned, ids) for ids in text.texts]
    theirs = [torch.tensor(row) for row in answer["logprobs"]]
    differences = torch.cat([(a - b).abs() for a, b in zip(ours, theirs, strict=True)])
    agreed, first = zip(
        *(greedy_agrees(planned, p, new) for p, new in zip(text.prompts, answer["greedy"], strict=True)), strict=True
    )
    again = nudged(planned, text.texts[:NUM_NUDGED])
    resolution = torch.cat([(a - b).abs() for a, b in zip(ours[:NUM_NUDGED], again, strict=True)])
    return {
        "logprob_difference": float(differences.mean()),
        "resolution": float(resolution.mean()),
        "logprob_difference_max": float(differences.max()),
        "perplexity": math.exp(-float(torch.cat(ours).mean())),
        "perplexity_vllm": math.exp(-float(torch.cat(theirs).mean())),
        "greedy_agrees": list(agreed),
        "greedy_tokens_compared": list(first),
        "decode_tokens_per_s": answer["decode_tokens_per_s"],
    }


def spell(row: dict[str, Any]) -> str:
    """A row as people read it."""
    if "error" in row:
        return f"{row['case']:16} {row['dtype']:5} vLLM refuses: {row['error']}"
    apart = row["perplexity_vllm"] / row["perplexity"] - 1
    is_near = abs(apart) <= MAX_PERPLEXITY_RATIO
    as_close = row["logprob_difference"] <= MAX_LOGPROB_DIFFERENCE and all(row["greedy_agrees"])
    within = row["logprob_difference"] <= RESOLUTIONS * row["resolution"]
    verdict = "ok" if as_close and is_near else "ok, within the plan's own resolution" if within else "DIFFERS"
    return (
        f"{row['case']:16} {row['dtype']:5} |Δ log p| {row['logprob_difference']:.4f} (own resolution "
        f"{row['resolution']:.4f})  perplexity {row['perplexity']:.3f}, vLLM {row['perplexity_vllm']:.3f} "
        f"({100 * apart:+.2f} %)  greedy {sum(row['greedy_agrees'])} of {len(row['greedy_agrees'])} over "
        f"{row['greedy_tokens_compared']}  {verdict}"
    )


def ask_vllm(python: Path, folder: Path, dtype: str, text: Text, scratch: Path) -> dict[str, Any]:
    """Have vLLM load a folder and answer."""
    request = {
        "model": str(folder),
        "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype],
        "texts": text.texts,
        "prompts": text.prompts,
        "new_tokens": NEW_TOKENS,
    }
    asked, answered = scratch / "request.json", scratch / "answer.json"
    asked.write_text(json.dumps(request), encoding="utf-8")
    subprocess.run(
        [python, HERE / "vllm_runner.py", asked, answered], check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return answer


if __name__ == "__main__":
    main()
