"""Does the real torchao take the config, and run the plan's codes?

    python benchmarks/engines/torchao_check.py                     # every case below, on the built-in model
    python benchmarks/engines/torchao_check.py int4_g32 mixed

Every case is exported, loaded by torchao on the CPU in an environment of its own (`environments.py`) with the loader
that lies in the folder, and held against `bitwright.inference.apply`, all in fp32:

    weights    what torchao dequantises is the plan's weight, bit for bit, at every layer with codes
    logits     relative difference over a few texts; inputs in int8 are rounded otherwise by torchao (÷ 127.5)

FP8 inputs need a GPU: torchao refuses them elsewhere.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from comparison import HERE, Case, last_error, run_checks, texts
from safetensors.torch import load_file

from bitwright.export import export
from bitwright.inference import apply
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Plan

NUM_TEXTS = 4

_MIXED = {"attn.q": "int4_g32", "attn.k": "int8_w", "attn.v": "fp8_w", "mlp.down": "int3_g64"}
CASES = {
    "int4_g32": Case(scheme_of=lambda site: "int4_g32"),
    "int4_g64_zp": Case(scheme_of=lambda site: "int4_g64_zp"),
    "int8_g32": Case(scheme_of=lambda site: "int8_g32"),
    "fp8_w": Case(scheme_of=lambda site: "fp8_w"),
    "mixed": Case(scheme_of=lambda site: _MIXED.get(site.role, "int4_g64_zp")),
    "int8": Case(scheme_of=lambda site: "int8"),
}


def main() -> None:
    """Run the cases that were asked for, print a row each, and write the results."""
    assert __doc__ is not None
    run_checks(__doc__, "torchao", CASES, check, spell, packages=("torch", "transformers"))


@torch.no_grad()
def check(plan: Plan, loaded: LoadedModel, python: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row: torchao beside `apply`."""
    asked = texts(loaded).texts[:NUM_TEXTS]
    with tempfile.TemporaryDirectory() as scratch:
        folder, request, answered = (Path(scratch) / name for name in ("export", "request.json", "answer.safetensors"))
        notes = export(plan, loaded, "torchao", folder, dtype="fp32").notes
        request.write_text(json.dumps({"folder": str(folder), "texts": asked}), encoding="utf-8")
        try:
            subprocess.run(
                [python, HERE / "torchao_runner.py", request, answered], check=True, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            yield {"error": last_error(error.stderr)}
            return
        answer = load_file(answered)
    planned = apply(plan, loaded)
    ours = torch.cat([planned(torch.tensor([ids])).logits[0] for ids in asked])
    theirs = torch.cat([answer[f"logits.{i}"] for i in range(len(asked))])
    layers = [name for name in answer if name.endswith(".weight")]
    yield {
        "layers": len(layers),
        "equal_layers": sum(torch.equal(answer[name], planned.get_parameter(name)) for name in layers),
        "logit_difference": float((ours - theirs).norm() / ours.norm()),
        "notes": list(notes),
    }


def spell(row: dict[str, Any]) -> str:
    """A row as people read it."""
    if "error" in row:
        return f"{row['case']:12} torchao refuses: {row['error']}"
    return (
        f"{row['case']:12} weights equal at {row['equal_layers']} of {row['layers']} layers, logits "
        f"{row['logit_difference']:.1e} apart"
    )


if __name__ == "__main__":
    main()
