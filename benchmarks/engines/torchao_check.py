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
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bitwright.export import export
from bitwright.inference import apply
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site
from bitwright.plan import Plan

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "peers")]
import environments  # noqa: E402
import machine  # noqa: E402
from vllm_check import last_error, made_plan, texts  # noqa: E402

NUM_TEXTS = 4

_MIXED = {"attn.q": "int4_g32", "attn.k": "int8_w", "attn.v": "fp8_w", "mlp.down": "int3_g64"}
#: Case → site → scheme.
CASES: dict[str, Callable[[Site], str]] = {
    "int4_g32": lambda site: "int4_g32",
    "int4_g64_zp": lambda site: "int4_g64_zp",
    "int8_g32": lambda site: "int8_g32",
    "fp8_w": lambda site: "fp8_w",
    "mixed": lambda site: _MIXED.get(site.role, "int4_g64_zp"),
    "int8": lambda site: "int8",
}


def main() -> None:
    """Run the cases that were asked for, print a row each, and write the results."""
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    asked.add_argument("--results", type=Path, help="write the rows there as JSON")
    args = asked.parse_args()
    python = environments.python_of("torchao", HERE)
    loaded = load("demo")
    rows = []
    for name in args.cases or CASES:
        rows.append({"case": name, **check(made_plan(loaded, CASES[name]), loaded, python)})
        print(spell(rows[-1]), flush=True)
    if args.results is not None:
        content = {"machine": machine.machine(["torch", "transformers"]), "rows": rows}
        args.results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def check(plan: Plan, loaded: LoadedModel, python: Path) -> dict[str, Any]:
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
            return {"error": last_error(error.stderr)}
        answer = load_file(answered)
    planned = apply(plan, loaded)
    ours = torch.cat([planned(torch.tensor([ids])).logits[0] for ids in asked])
    theirs = torch.cat([answer[f"logits.{i}"] for i in range(len(asked))])
    layers = [name for name in answer if name.endswith(".weight")]
    return {
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
