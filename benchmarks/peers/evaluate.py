"""One evaluator for every tool: mean token KL of the weights that it computes with, to the fp32 model.

    KL = mean over predictions of Σ_v p_v (log p_v − log q_v),      p from the fp32 model, q with the tool's weights

in fp32, torch and transformers only; of a sentence encoder, the mean of 1 − cos between the vectors of a text. Whatever
a tool measures of itself is not used. Its weights must name every linear layer in question and nothing else; nominal
bits are counted here, from bits per layer and numbers of weights, the same way for all. As a check that a layer has the
bits that are claimed for it, the distinct values in its groups are counted: a group of b bits has at most 2^b of them
(not so after a scaling of columns, which moves every value).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import decoder_linears, read_facts, read_model, read_text, sentence_vectors
from safetensors.torch import load_file
from torch import Tensor, nn

_ROWS_PER_STEP = 256
#: What a group's scale is stored in by every tool here.
SCALE_BITS = 16


def evaluate(folder: Path, runs: list[Path], group_size: int = 128) -> list[dict[str, Any]]:
    """KL, its standard error over sequences, and bits of each run, in order."""
    torch.set_grad_enabled(False)
    facts = read_facts(folder)
    text = read_text(folder / "evaluation.safetensors")
    model = read_model(folder)
    compare = _Tokens(model, *text) if facts["task"] == "text" else _Vectors(model, *text)
    found = []
    for run in runs:
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        weights = load_file(run / "weights.safetensors")
        original = {name: model.get_parameter(name).clone() for name in weights}
        _put(model, weights, facts["layers"])
        found.append(
            {
                "nominal_bits": _mean_bits(result["bits"], weights, lambda bits, _: bits),
                "stored_bits_with_fp16_scales": _mean_bits(
                    result["bits"],
                    weights,
                    lambda bits, width: bits + SCALE_BITS * math.ceil(width / group_size) / width,
                ),
                "most_values_in_a_group": _most_values(result["bits"], weights, group_size),
                **compare(model),
            }
        )
        for name, weight in original.items():
            model.get_parameter(name).copy_(weight)
    return found


def _mean_bits(bits: dict[str, float], weights: dict[str, Tensor], of_layer: Callable[[float, int], float]) -> float:
    """Mean over weights of what a layer of so many bits and columns counts."""
    layers = [(weights[f"{name}.weight"], b) for name, b in bits.items()]
    total = sum(weight.numel() * of_layer(b, weight.shape[1]) for weight, b in layers)
    return total / sum(weight.numel() for weight, _ in layers)


def _put(model: nn.Module, weights: dict[str, Tensor], layers: str) -> None:
    expected = {f"{name}.weight" for name in decoder_linears(model, layers)}
    assert set(weights) == expected, f"weights of other layers than the decoder's: {set(weights) ^ expected}"
    for name, weight in weights.items():
        parameter = model.get_parameter(name)
        assert weight.shape == parameter.shape and bool(torch.isfinite(weight).all()), name
        parameter.copy_(weight)


class _Tokens:
    """Mean KL of predictions; the reference's are kept as what the output head reads, which is a hundredth of them."""

    def __init__(self, model: nn.Module, ids_SL: Tensor, _: Tensor) -> None:
        self._ids_SL = ids_SL
        self._head_VH = model.get_output_embeddings().weight.clone()
        self._reference_SLH = self._hidden(model)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        sequences = zip(self._ids_SL, self._reference_SLH, self._hidden(model), strict=True)
        sums_S3 = torch.stack([self._sequence(*sequence) for sequence in sequences])
        kl, loss, reference_loss = sums_S3.mean(0).tolist()
        return {
            "kl": kl,
            "kl_standard_error": _standard_error(sums_S3[:, 0]),
            "perplexity": math.exp(loss),
            "reference_perplexity": math.exp(reference_loss),
        }

    def _hidden(self, model: nn.Module) -> Tensor:
        base = model.get_decoder()
        return torch.cat([base(input_ids=ids[None], use_cache=False).last_hidden_state for ids in self._ids_SL])

    def _sequence(self, ids_L: Tensor, reference_LH: Tensor, other_LH: Tensor) -> Tensor:
        """Mean KL, loss and reference's loss of one sequence's predictions."""
        sums = torch.zeros(3, dtype=torch.float64)
        for start in range(0, len(ids_L) - 1, _ROWS_PER_STEP):
            rows = slice(start, min(start + _ROWS_PER_STEP, len(ids_L) - 1))
            log_p = (reference_LH[rows] @ self._head_VH.T).log_softmax(-1)
            log_q = (other_LH[rows] @ self._head_VH.T).log_softmax(-1)
            target = ids_L[rows.start + 1 : rows.stop + 1, None]
            sums[0] += (log_p.exp() * (log_p - log_q)).double().sum()
            sums[1] -= log_q.gather(-1, target).double().sum()
            sums[2] -= log_p.gather(-1, target).double().sum()
        return sums / (len(ids_L) - 1)


class _Vectors:
    """Mean of 1 − cos between a text's vectors: ½ ‖e − e′‖², where that difference would cancel."""

    def __init__(self, model: nn.Module, ids_SL: Tensor, mask_SL: Tensor) -> None:
        self._text = ids_SL, mask_SL
        self._reference_SH = sentence_vectors(model, *self._text)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        change_SH = sentence_vectors(model, *self._text) - self._reference_SH
        kl_S = change_SH.double().square().sum(-1) / 2
        return {"kl": float(kl_S.mean()), "kl_standard_error": _standard_error(kl_S)}


def _standard_error(values_S: Tensor) -> float:
    return float(values_S.std() / len(values_S) ** 0.5)


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
