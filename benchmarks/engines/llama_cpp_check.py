"""Does the real llama.cpp run an exported plan as it was measured here?

    python benchmarks/engines/llama_cpp_check.py                     # every case below, on the built-in model
    python benchmarks/engines/llama_cpp_check.py int4_g32 mixed
    python benchmarks/engines/llama_cpp_check.py --plan PLAN         # a plan of your own, for the model that it names

Every case is exported to GGUF, loaded by llama.cpp on the CPU in an environment of its own (`environments.py`), and
held against `bitwright.inference.apply`, emulated in fp32, twice. The plan itself:

    perplexity  of both, on the same tokens: at most 1 % apart
    tokens      llama.cpp cuts the same texts into the same tokens

llama.cpp rounds the inputs of quantised weights as well, to 8 bits in groups of 32, which no plan asks for. (Under
k-quants it is groups of 256: those types are not looked at here.) So the file is read back, codes and all, as
`bitwright import` does, and run with inputs rounded so:

    logprobs    mean over prompt tokens of |log p of llama.cpp − log p of apply|: at most 0.02 nats, or within what
                `comparison.py` calls the resolution: rounded inputs fall to either side of an edge
    greedy      llama.cpp's greedy text is ours until the first place where our two best logits are closer than 0.05
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from comparison import (
    HERE,
    MAX_LOGPROB_DIFFERENCE,
    MAX_PERPLEXITY_RATIO,
    NEW_TOKENS,
    NUM_NUDGED,
    NUM_TEXTS,
    RESOLUTIONS,
    Case,
    greedy_agrees,
    last_error,
    logprobs,
    nudged,
    run_checks,
    texts,
)
from torch import Tensor, nn

from bitwright import formats
from bitwright.export import export
from bitwright.export.imported_plan import ProofText, plan_of
from bitwright.export.importer import Found, look, raise_if_refused
from bitwright.inference import apply
from bitwright.models.linear_calls import LinearCalls, Matrix, Operation
from bitwright.models.loaded import LoadedModel
from bitwright.plan import Plan
from bitwright.search.documents import CALIBRATION_SETS

#: Characters of each document that both tokenizers cut up.
TOKENISED = 2000

#: Role → scheme, of the case in which most types occur.
_MIXED = {
    "attn.q": "int4_g64",
    "attn.k": "int8_g64",
    "attn.v": "int8_w",
    "attn.out": "int4_g32_min",
    "mlp.gate": "int4_g64_zp",
    "mlp.up": "fp6_w",
    "mlp.down": "fp8_w",
}
CASES = {
    "as loaded": Case(scheme_of=lambda site: "as_loaded"),
    "f32": Case(scheme_of=lambda site: "fp32"),
    "bf16": Case(scheme_of=lambda site: "bf16"),
    "int4_g32": Case(scheme_of=lambda site: "int4_g32"),
    "int4_g64": Case(scheme_of=lambda site: "int4_g64"),
    "int8_g32": Case(scheme_of=lambda site: "int8_g32"),
    "mixed": Case(scheme_of=lambda site: _MIXED[site.role]),
}


def main() -> None:
    """Run the cases that were asked for, print a row each, and write the results."""
    assert __doc__ is not None
    packages = ("torch", "transformers", "gguf")
    run_checks(__doc__, "llama_cpp", CASES, check, spell, packages=packages, add_options=_add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp")


def check(plan: Plan, loaded: LoadedModel, python: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row: llama.cpp beside `apply`."""
    text, strings = texts(loaded), documents()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export"
        report = export(plan, loaded, "gguf", folder)
        request = {
            "model": str(folder / "model.gguf"),
            "texts": text.texts,
            "prompts": text.prompts,
            "strings": strings,
            "new_tokens": NEW_TOKENS,
            "threads": args.threads,
        }
        try:
            answer = ask_llama_cpp(python, request, Path(scratch))
        except subprocess.CalledProcessError as error:
            yield {"error": last_error(error.stderr)}
            return
        found = look(folder / "model.gguf", loaded)
    raise_if_refused(found)
    planned = apply(plan, loaded)
    ours = [logprobs(planned, ids) for ids in text.texts]
    in_file = apply(plan_of(found, loaded, ProofText(evaluation_tokens=64, sequence_length=16)), loaded)
    with inputs_rounded(in_file, found):
        same_inputs = [logprobs(in_file, ids) for ids in text.texts]
        again = nudged(in_file, text.texts[:NUM_NUDGED])
        agreed, compared = zip(
            *(greedy_agrees(in_file, p, new) for p, new in zip(text.prompts, answer["greedy"], strict=True)),
            strict=True,
        )
    theirs = [torch.tensor(row) for row in answer["logprobs"]]
    differences = torch.cat([(a - b).abs() for a, b in zip(same_inputs, theirs, strict=True)])
    resolution = torch.cat([(a - b).abs() for a, b in zip(same_inputs[:NUM_NUDGED], again, strict=True)])
    yield {
        "logprob_difference": float(differences.mean()),
        "resolution": float(resolution.mean()),
        "logprob_difference_max": float(differences.max()),
        "perplexity": math.exp(-float(torch.cat(ours).mean())),
        "perplexity_with_its_inputs": math.exp(-float(torch.cat(same_inputs).mean())),
        "perplexity_llama_cpp": math.exp(-float(torch.cat(theirs).mean())),
        "greedy_agrees": list(agreed),
        "greedy_tokens_compared": list(compared),
        "same_tokens": [
            loaded.tokenizer(string).input_ids == ids for string, ids in zip(strings, answer["tokens"], strict=True)
        ],
        "decode_tokens_per_s": answer["decode_tokens_per_s"],
        "file_bytes": report.files["model.gguf"],
        "system": answer["system"],
        "notes": list(report.notes),
    }


def spell(row: dict[str, Any]) -> str:
    """A row as people read it."""
    if "error" in row:
        return f"{row['case']:12} llama.cpp refuses: {row['error']}"
    apart = row["perplexity_llama_cpp"] / row["perplexity"] - 1
    holds = (
        abs(apart) <= MAX_PERPLEXITY_RATIO
        and row["logprob_difference"] <= max(MAX_LOGPROB_DIFFERENCE, RESOLUTIONS * row["resolution"])
        and all(row["greedy_agrees"])
        and all(row["same_tokens"])
    )
    return (
        f"{row['case']:12} perplexity {row['perplexity']:.3f}, with its inputs "
        f"{row['perplexity_with_its_inputs']:.3f}, llama.cpp {row['perplexity_llama_cpp']:.3f} ({100 * apart:+.2f} %)  "
        f"|Δ log p| {row['logprob_difference']:.4f} (resolution {row['resolution']:.4f})  "
        f"greedy {row['greedy_agrees']} over {row['greedy_tokens_compared']}  tokens "
        f"{sum(row['same_tokens'])} of {len(row['same_tokens'])}  {row['decode_tokens_per_s']:.1f} tokens/s  "
        f"{'ok' if holds else 'DIFFERS'}"
    )


@contextmanager
def inputs_rounded(model: nn.Module, found: Found) -> Iterator[None]:
    """Round the inputs of matrices with codes as ggml does, for the time of the block."""
    coded = {item.site.parameter for item in found.taken if item.matrix is not None}

    def handle(matrix: Matrix, x: Tensor, operation: Operation) -> Tensor:
        if matrix.parameter not in coded or not x.is_floating_point():
            return operation(x)
        rounded = formats.decode("q8_0", formats.encode("q8_0", x.numpy()))
        return operation(torch.from_numpy(rounded))

    with LinearCalls(model, found.sites, handle):
        yield


def documents() -> list[str]:
    """Openings of the built-in documents, as text."""
    read = CALIBRATION_SETS["docs"].documents
    assert read is not None
    return [document.text[:TOKENISED] for document in list(read())[:NUM_TEXTS]]


def ask_llama_cpp(python: Path, request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Have llama.cpp load a file and answer."""
    asked, answered = scratch / "request.json", scratch / "answer.json"
    asked.write_text(json.dumps(request), encoding="utf-8")
    subprocess.run(
        [python, HERE / "llama_cpp_runner.py", asked, answered], check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return answer


if __name__ == "__main__":
    main()
