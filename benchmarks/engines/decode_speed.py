"""How fast the same plan decodes in vLLM, in llama.cpp and here: tokens per second, one sequence at a time.

    python benchmarks/engines/decode_speed.py                 every plan below, on the built-in model
    python benchmarks/engines/decode_speed.py int4_g32

Each engine reads the plan's export in an environment of its own, in a process of its own, with all cores, and so does
`bitwright run`'s path (`inference.apply`, mode auto). All go on from the same openings for as many tokens; tokens after
the first of each count. Engines run one after the other, in ROUNDS rounds, and the best round of each is filed: what a
shared machine takes away is in none of them. Results go to benchmarks/results/engines-decode.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from comparison import HERE, NEW_TOKENS, Case, environments, last_error, machine, made_plan, texts
from llama_cpp_check import ask_llama_cpp
from vllm_check import ask_vllm

from bitwright.export import export
from bitwright.inference import apply
from bitwright.inference.generation.generate import generate
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Plan

RESULT = HERE.parent / "results" / "engines-decode.json"
ROUNDS = 3
CASES = {
    "as loaded": Case(scheme_of=lambda site: "as_loaded"),
    "int4_g32": Case(scheme_of=lambda site: "int4_g32"),
    "int8_g32": Case(scheme_of=lambda site: "int8_g32"),
}


def ours(plan: Plan, loaded: LoadedModel, prompts: list[list[int]]) -> float:
    """Tokens per second of `bitwright run`."""
    model = apply(plan, loaded, mode="auto", dtype=torch.bfloat16)
    generate(model, torch.tensor([prompts[0]]), max_new_tokens=NEW_TOKENS)
    found = [generate(model, torch.tensor([ids]), max_new_tokens=NEW_TOKENS) for ids in prompts]
    return sum(one.num_steps for one in found) / sum(one.decode_s for one in found)


def in_vllm(plan: Plan, loaded: LoadedModel, prompts: list[list[int]]) -> float:
    """Tokens per second of vLLM on the export to compressed-tensors."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export"
        export(plan, loaded, "compressed-tensors", folder, dtype="bf16")
        text = texts(loaded)
        answer = ask_vllm(environments.python_of("vllm", HERE), folder, "bf16", text, Path(scratch))
    return float(answer["decode_tokens_per_s"])


def in_llama_cpp(plan: Plan, loaded: LoadedModel, prompts: list[list[int]]) -> float:
    """Tokens per second of llama.cpp on the export to GGUF."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export"
        export(plan, loaded, "gguf", folder)
        request = {
            "model": str(folder / "model.gguf"),
            "texts": [],
            "prompts": prompts,
            "strings": [],
            "new_tokens": NEW_TOKENS,
            "threads": os.cpu_count(),
        }
        answer = ask_llama_cpp(environments.python_of("llama_cpp", HERE), request, Path(scratch))
    return float(answer["decode_tokens_per_s"])


PROGRAMS: dict[str, Callable[[Plan, LoadedModel, list[list[int]]], float]] = {
    "bitwright": ours,
    "vllm": in_vllm,
    "llama.cpp": in_llama_cpp,
}


def measure(name: str, loaded: LoadedModel) -> dict[str, Any]:
    """One plan's row: the best round of each program, or why one does not run it."""
    plan, prompts = made_plan(loaded, CASES[name]), texts(loaded).prompts
    speeds: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    refused: dict[str, str] = {}
    for _ in range(ROUNDS):
        for program, run in PROGRAMS.items():
            if program in refused:
                continue
            try:
                speeds[program].append(run(plan, loaded, prompts))
            except subprocess.CalledProcessError as error:
                refused[program] = last_error(error.stderr)
    best = {program: max(found) for program, found in speeds.items() if found}
    return {"plan": name, "decode_tokens_per_s": best, "rounds": speeds, "refused": refused}


def main() -> None:
    """Measure the plans that were asked for, print a row each, and write the results."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plans", nargs="*", metavar="PLAN", help=", ".join(CASES))
    arguments = parser.parse_args()
    load_average = machine.load_average()
    loaded, rows = load("demo"), []
    for name in arguments.plans or CASES:
        rows.append(measure(name, loaded))
        print(name, json.dumps(rows[-1]["decode_tokens_per_s"]), rows[-1]["refused"] or "", file=sys.stderr)
    content = {
        "machine": machine.machine(["torch", "transformers"]),
        "date": machine.now(),
        "threads": torch.get_num_threads(),
        "load_average": load_average,
        "new_tokens": NEW_TOKENS,
        "rows": rows,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
