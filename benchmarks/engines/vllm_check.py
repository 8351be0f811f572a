"""Does the real vLLM run an exported plan as it was measured here?

    python benchmarks/engines/vllm_check.py                          # every case below, on the built-in model
    python benchmarks/engines/vllm_check.py int4_g64 mixed --dtype bf16
    python benchmarks/engines/vllm_check.py --plan PLAN              # a plan of your own, for the model that it names

Every case is exported to compressed-tensors, loaded by vLLM on the CPU in an environment of its own
(`environments.py`), and held against `bitwright.inference.apply`, which runs the plan emulated in fp32:

    logprobs    mean over prompt tokens of |log p of vLLM − log p of apply|: at most 0.02 nats
    greedy      vLLM's greedy text is ours until the first place where our two best logits are closer than 0.05
    perplexity  of both, on the same tokens

Where inputs are rounded, no two programs agree so far: an input that lies on the edge between two codes falls to either
side, and the next layer's inputs have moved by a whole step. So `apply` is also held against itself with its embeddings
nudged by one part in ten million, the last bit of fp32: what that alone moves is the plan's own *resolution*, and vLLM
is expected within it.

vLLM computes in the dtype of the checkpoint: `--dtype` says which. Its rounding is part of the difference too: the row
"plain" is the model without any codes. Kernels that it lacks on a CPU are its own words in the row.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.export import export
from bitwright.inference import apply
from bitwright.models.load import load
from bitwright.models.loaded import LoadedModel
from bitwright.models.sites import Site, find_sites
from bitwright.plan import Budget, ModelInfo, Plan, SiteChoice, Summary, TextInfo, load_plan
from bitwright.search.documents import CALIBRATION_SETS

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "peers")]
import environments  # noqa: E402
import machine  # noqa: E402

MAX_LOGPROB_DIFFERENCE = 0.02
#: Our two best logits: closer than this, either may be first.
TIE = 0.05
#: Relative change of the embeddings that measures a plan's resolution, and on how many texts.
NUDGE, NUM_NUDGED = 1e-7, 4
#: What vLLM may differ by, in units of that resolution.
RESOLUTIONS = 1.25
NUM_TEXTS, TEXT_TOKENS = 12, 128
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 16, 32
RESULTS = HERE.parent / "results" / "vllm.json"

#: Case → site → scheme.
CASES: dict[str, Callable[[Site], str]] = {
    "plain": lambda site: "as_loaded",
    "int4_g64": lambda site: "int4_g64",
    "int4_g32_zp": lambda site: "int4_g32_zp",
    "int8_w": lambda site: "int8_w",
    "fp8_w": lambda site: "fp8_w",
    "fp8": lambda site: "fp8",
    "int8": lambda site: "int8",
    # blocks of 128 rows do not divide q and k of the built-in model, which vLLM computes in one matrix with v
    "fp8_block": lambda site: "fp8" if site.role in ("attn.q", "attn.k", "attn.v") else "fp8_block",
    "mixed": lambda site: "as_loaded" if ".0." in site.name else "int4_g32_zp" if "mlp" in site.name else "int4_g64",
    "mixed_w8a8": lambda site: "fp8" if ".0." in site.name else "int8" if site.role == "mlp.down" else "int4_g64",
    "mxfp4": lambda site: "mxfp4",
}


@dataclass(frozen=True, kw_only=True)
class Text:
    """What both sides are asked."""

    texts: list[list[int]]
    prompts: list[list[int]]


def main() -> None:
    """Run the cases that were asked for, print a row each, and write the results."""
    asked = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    asked.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    asked.add_argument("--plan", type=Path, action="append", default=[], help="a plan folder; may be repeated")
    asked.add_argument("--dtype", action="append", help="bf16, fp16 or fp32; may be repeated; default fp16")
    asked.add_argument("--results", type=Path, help="write the rows there as JSON")
    args = asked.parse_args()
    python = environments.python_of("vllm", HERE)
    loaded = load("demo")
    plans = {name: made_plan(loaded, CASES[name]) for name in args.cases or (() if args.plan else CASES)}
    plans |= {str(path): load_plan(path) for path in args.plan}
    rows = []
    for name, plan in plans.items():
        for dtype in args.dtype or ["fp16"]:
            row = {"case": name, "dtype": dtype, **check(plan, loaded, dtype, python)}
            rows.append(row)
            print(spell(row), flush=True)
    if args.results is not None:
        content = {"machine": machine.machine(["torch", "transformers"]), "rows": rows}
        args.results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def check(plan: Plan, loaded: LoadedModel, dtype: str, python: Path) -> dict[str, Any]:
    """One row: vLLM beside `apply`."""
    text = texts(loaded)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "export"
        notes = export(plan, loaded, "compressed-tensors", folder, dtype=dtype).notes
        try:
            answer = ask_vllm(python, folder, dtype, text, Path(scratch))
        except subprocess.CalledProcessError as error:
            return {"error": last_error(error.stderr)}
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
        "notes": list(notes),
    }


def spell(row: dict[str, Any]) -> str:
    """A row as people read it."""
    if "error" in row:
        return f"{row['case']:12} {row['dtype']:5} vLLM refuses: {row['error']}"
    as_close = row["logprob_difference"] <= MAX_LOGPROB_DIFFERENCE and all(row["greedy_agrees"])
    within = row["logprob_difference"] <= RESOLUTIONS * row["resolution"]
    verdict = "ok" if as_close else "ok, within the plan's own resolution" if within else "DIFFERS"
    return (
        f"{row['case']:12} {row['dtype']:5} |Δ log p| {row['logprob_difference']:.4f} (own resolution "
        f"{row['resolution']:.4f})  perplexity {row['perplexity']:.3f}, vLLM {row['perplexity_vllm']:.3f}  greedy "
        f"{sum(row['greedy_agrees'])} of {len(row['greedy_agrees'])} over {row['greedy_tokens_compared']}  {verdict}"
    )


def texts(loaded: LoadedModel) -> Text:
    """Passages of the built-in documents, and openings of others."""
    documents = CALIBRATION_SETS["docs"].documents
    assert documents is not None
    ids = [loaded.tokenizer(document.text).input_ids for document in documents()]
    long = [tokens for tokens in ids if len(tokens) >= TEXT_TOKENS]
    scored = [tokens[:TEXT_TOKENS] for tokens in long[:NUM_TEXTS]]
    return Text(texts=scored, prompts=[tokens[:PROMPT_TOKENS] for tokens in long[NUM_TEXTS : NUM_TEXTS + NUM_PROMPTS]])


@torch.no_grad()
def logprobs(model: nn.Module, ids: list[int]) -> Tensor:
    """log p of every token but the first, fp32."""
    tokens = torch.tensor([ids])
    logits = model(input_ids=tokens).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def nudged(model: nn.Module, texts: list[list[int]]) -> list[Tensor]:
    """`logprobs` of texts with every embedding changed by about the last bit of fp32."""
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    generator = torch.Generator().manual_seed(0)
    hook = embedding.register_forward_hook(
        lambda _, __, output: output * (1 + NUDGE * torch.randn(output.shape, generator=generator))
    )
    try:
        return [logprobs(model, ids) for ids in texts]
    finally:
        hook.remove()


@torch.no_grad()
def greedy_agrees(model: nn.Module, prompt: list[int], generated: list[int]) -> tuple[bool, int]:
    """Whether `generated` is our greedy text up to our first near-tie, and how many tokens that was."""
    tokens = torch.tensor([[*prompt, *generated]])
    best = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float().topk(2)
    for place, (values, choices) in enumerate(zip(best.values, best.indices, strict=True)):
        if values[0] - values[1] < TIE:
            return True, place
        if int(choices[0]) != generated[place]:
            return False, place
    return True, len(generated)


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


def last_error(stderr: str) -> str:
    """The last line of a traceback, and what its message goes on with."""
    lines = stderr.splitlines()
    places = [place for place, line in enumerate(lines) if "Error" in line and not line.startswith(" ")]
    return " ".join(line.strip() for line in lines[places[-1] : places[-1] + 3])[:400] if places else stderr[-300:]


def made_plan(loaded: LoadedModel, scheme_of: Callable[[Site], str]) -> Plan:
    """A plan without a search: round-to-nearest, the ends as loaded."""
    text = TextInfo(source="none", tokens=0, sequences=0, hash="0" * 64)
    return Plan(
        model=ModelInfo(name=loaded.name, hash=loaded.hash, params=loaded.num_parameters),
        hardware="cpu-generic",
        task="text",
        budget=Budget(effective_bits=16.0),
        objective="kl",
        seed=0,
        calibration=text,
        evaluation=text,
        sites=choices(find_sites(loaded.model), scheme_of),
        summary=Summary(effective_bits=0.0, nominal_bits=0.0, weight_bytes=0, predicted_kl=0.0),
        met=False,
    )


def choices(sites: Sequence[Site], scheme_of: Callable[[Site], str]) -> tuple[SiteChoice, ...]:
    """One choice a site of the decoder."""
    return tuple(
        SiteChoice(
            name=site.name,
            kind="weight",
            role=site.role,
            module=site.module,
            rows=site.rows,
            tied_group=site.tied_group,
            shape=site.shape,
            scheme=scheme_of(site),
            rounding="rtn",
            transform="none",
            reason="a case of the check",
            bytes=0,
            bits=0.0,
            predicted_kl=0.0,
        )
        for site in sites
        if site.role not in ("embedding", "lm_head")
    )


if __name__ == "__main__":
    main()
