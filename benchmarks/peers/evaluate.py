"""One evaluator for every tool: mean token KL of the weights that it computes with, to the fp32 model.

    KL = mean over predictions of Σ_v p_v (log p_v − log q_v),      p from the fp32 model, q with the tool's weights

in fp32, torch and transformers only. Whatever a tool measures of itself is not used. Its weights must name every linear
layer of the decoder and nothing else; nominal bits are counted here, from bits per layer and numbers of weights, the
same way for all. As a check that a layer has the bits that are claimed for it, the distinct values in its groups are
counted: a group of b bits has at most 2^b of them (not so after a scaling of columns, which moves every value).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from record import decoder_linears, read_tokens
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

_ROWS_PER_STEP = 256


def evaluate(folder: Path, runs: list[Path], group_size: int = 128) -> list[dict[str, Any]]:
    """KL, its standard error over sequences, perplexities and bits of each run, in order."""
    torch.set_grad_enabled(False)
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    ids = read_tokens(folder / "evaluation.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reference = _reference(model, ids, folder / "evaluation-reference.safetensors")
    head = model.get_output_embeddings().weight.clone()
    found = []
    for run in runs:
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        weights = load_file(run / "weights.safetensors")
        original = {name: model.get_parameter(name).clone() for name in weights}
        _put(model, weights, facts["layers"])
        found.append(
            {
                "nominal_bits": nominal_bits(result["bits"], weights),
                "most_values_in_a_group": _most_values(result["bits"], weights, group_size),
                **_compare(model, head, ids, reference),
            }
        )
        for name, weight in original.items():
            model.get_parameter(name).copy_(weight)
    return found


def nominal_bits(bits: dict[str, float], weights: dict[str, Tensor]) -> float:
    """Bits per weight without scales."""
    sizes = {name: weights[f"{name}.weight"].numel() for name in bits}
    return sum(bits[name] * size for name, size in sizes.items()) / sum(sizes.values())


def _put(model: nn.Module, weights: dict[str, Tensor], layers: str) -> None:
    expected = {f"{name}.weight" for name in decoder_linears(model, layers)}
    assert set(weights) == expected, f"weights of other layers than the decoder's: {set(weights) ^ expected}"
    for name, weight in weights.items():
        parameter = model.get_parameter(name)
        assert weight.shape == parameter.shape and bool(torch.isfinite(weight).all()), name
        parameter.copy_(weight)


def _reference(model: nn.Module, ids: Tensor, path: Path) -> Tensor:
    if not path.exists():
        save_file({"hidden": _full_hidden(model, ids)}, path)
    return load_file(path)["hidden"]


def _full_hidden(model: nn.Module, ids_SL: Tensor) -> Tensor:
    """Hidden states at every position; the head itself is applied later, some rows at a time."""
    base = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return torch.cat([base(input_ids=ids[None], use_cache=False).last_hidden_state for ids in ids_SL])


def _compare(model: nn.Module, head_VH: Tensor, ids_SL: Tensor, reference_SLH: Tensor) -> dict[str, float]:
    kls, losses, reference_losses = [], [], []
    for ids, hidden, other in zip(ids_SL, reference_SLH, _full_hidden(model, ids_SL), strict=True):
        kl, loss, reference_loss = [], [], []
        for start in range(0, len(ids) - 1, _ROWS_PER_STEP):
            rows = slice(start, min(start + _ROWS_PER_STEP, len(ids) - 1))
            log_p = (hidden[rows] @ head_VH.T).log_softmax(-1)
            log_q = (other[rows] @ head_VH.T).log_softmax(-1)
            kl.append((log_p.exp() * (log_p - log_q)).double().sum(-1))
            target = ids[rows.start + 1 : rows.stop + 1, None]
            loss.append(-log_q.gather(-1, target).double())
            reference_loss.append(-log_p.gather(-1, target).double())
        kls.append(torch.cat(kl).mean())
        losses.append(torch.cat(loss).mean())
        reference_losses.append(torch.cat(reference_loss).mean())
    per_sequence = torch.stack(kls)
    return {
        "kl": float(per_sequence.mean()),
        "kl_standard_error": float(per_sequence.std() / len(per_sequence) ** 0.5),
        "perplexity": float(torch.stack(losses).mean().exp()),
        "reference_perplexity": float(torch.stack(reference_losses).mean().exp()),
    }


def _most_values(bits: dict[str, float], weights: dict[str, Tensor], group_size: int) -> dict[str, int]:
    """Bits → most distinct values found in one group, over some rows of every layer of so many bits."""
    most: dict[str, int] = {}
    for name, b in bits.items():
        for row in weights[f"{name}.weight"][::97]:
            for group in row.split(group_size):
                key = f"{b:g}"
                most[key] = max(most.get(key, 0), int(group.unique().numel()))
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what prepare.py wrote")
    parser.add_argument("runs", type=Path, nargs="+", help="folders with weights.safetensors and result.json")
    parser.add_argument("--group-size", type=int, default=128)
    arguments = parser.parse_args()
    print(json.dumps(evaluate(arguments.folder, arguments.runs, arguments.group_size)))


if __name__ == "__main__":
    main()
