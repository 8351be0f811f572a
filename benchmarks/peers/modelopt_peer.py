"""NVIDIA ModelOpt: `auto_quantize` over {int4, int8} weight-only, symmetric, in groups; runs in ModelOpt's environment.

How it is called, and why:

* Scores by its default method, the gradient one, with the usual loss of a causal language model on the calibration
  tokens, every sequence a step.
* "Not quantised" is no choice (`allow_no_quant` false), as the comparison is between int4 and int8. q, k, v and gate,
  up are tied by its own rules. Its bits per weight are nominal: scales are not counted.
* Rounding is its own: round-to-nearest with the scale of the largest weight (`max`), or AWQ for the int4 layers
  (`awq_lite` or `awq_full`). The 576 columns that 128 does not divide it pads with zeros itself, so the last group
  spans 64 weights.
* The weight in effect is what a layer answers to the unit vectors, so that AWQ's column scales are in it.
* `--bits 4` or `8`: no search, all layers alike by `quantize`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import record
import torch
from modelopt.torch.quantization.algorithms import AutoQuantizeGradientSearcher
from torch import Tensor, nn

ALGORITHMS: dict[str, Any] = {
    "max": "max",
    "awq_lite": {"method": "awq_lite", "alpha_step": 0.1},
    "awq_full": {"method": "awq_full", "alpha_step": 0.1},
    "awq_clip": {"method": "awq_clip"},
    "mse": {"method": "mse"},
}
#: What is in no tool's question.
OUTSIDE = ["*lm_head*", "*pooler*"]


def config(bits: int, group_size: int, algorithm: str) -> dict[str, Any]:
    """Weight-only symmetric integers in groups along in_features."""
    return {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": bits, "block_sizes": {-1: group_size}}},
            *({"quantizer_name": name, "enable": False} for name in OUTSIDE),
        ],
        "algorithm": copy.deepcopy(ALGORITHMS[algorithm]),
    }


#: (ids, mask) of one step.
Step = tuple[Tensor, Tensor]


def language_step(model: nn.Module, step: Step) -> Any:
    """One sequence, with labels, so that the output has a loss."""
    return model(input_ids=step[0], labels=step[0], use_cache=False).loss


def vector_step(model: nn.Module, step: Step) -> Any:
    """Some texts; the loss has the Fisher information of their vectors, as bitwright's has."""
    vectors_SH = record.sentence_vectors(model, *step)
    return (vectors_SH * torch.randn(vectors_SH.shape)).sum()


@dataclass(frozen=True)
class Data:
    """What is run on, and how."""

    steps: list[Step]
    loss: Callable[[nn.Module, Step], Any]


def read_data(folder: Path, task: str) -> Data:
    """A sequence a step, or eight texts."""
    size, loss = (1, language_step) if task == "text" else (8, vector_step)
    parts = (part.split(size) for part in record.read_text(folder / "calibration.safetensors"))
    return Data(list(zip(*parts, strict=True)), loss)


def search(model: nn.Module, bits: float, group_size: int, algorithm: str, data: Data) -> nn.Module:
    """The model, quantised as ModelOpt chooses."""
    formats = [config(4, group_size, algorithm), config(8, group_size, "max")]
    num_steps = len(data.steps)
    found, _ = mtq.auto_quantize(
        model,
        # the 16 bits of what is not in question do not count
        constraints={"effective_bits": bits, "cost": {"excluded_module_name_patterns": OUTSIDE}},
        quantization_formats=formats,
        data_loader=data.steps,
        forward_step=data.loss,
        loss_func=lambda loss, _: loss,
        disabled_layers=OUTSIDE,
        num_calib_steps=_calibration_steps(num_steps, algorithm),
        num_score_steps=num_steps,
        module_search_spaces=[
            {"module_name_patterns": ["*"], "quantization_formats": formats, "allow_no_quant": False}
        ],
    )
    return found


def _calibration_steps(num_steps: int, algorithm: str) -> int:
    """Weights' largest values need no data: one step. For AWQ it takes a quarter of the steps that it is told."""
    return 4 * num_steps if "awq" in algorithm else 1


def uniform(model: nn.Module, bits: int, group_size: int, algorithm: str, data: Data) -> nn.Module:
    """The model with every linear layer in question alike."""

    def forward_loop(model: nn.Module) -> None:
        with torch.no_grad():
            for step in data.steps:
                data.loss(model, step)

    return mtq.quantize(model, config(bits, group_size, algorithm), forward_loop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=float, required=True)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="max")
    arguments = parser.parse_args()
    facts = record.read_facts(arguments.folder)
    torch.manual_seed(0)

    stopwatch = record.Stopwatch()
    model = record.read_model(arguments.folder)
    for names in facts["tied"]:  # its own rules know the decoders' names; a second rule for the same changes nothing
        AutoQuantizeGradientSearcher.quant_grouping_rules.append(rf"^(.*?)\.({names.replace(' ', '|')})$")
    ask = (arguments.group_size, arguments.algorithm, read_data(arguments.folder, facts["task"]))
    if arguments.bits in (4, 8):
        model = uniform(model, int(arguments.bits), *ask)
    else:
        model = search(model, arguments.bits, *ask)
    linears = record.decoder_linears(model, facts["layers"])
    weights = {f"{name}.weight": record.weight_in_effect(module) for name, module in linears.items()}
    times = stopwatch.stop()
    record.write(
        arguments.out,
        bits={name: _bits(module) for name, module in linears.items()},
        weights=weights,
        times=times,
        packages=["nvidia-modelopt", "torch", "transformers"],
        notes={"algorithm": arguments.algorithm, "method": "gradient", "group_size": arguments.group_size},
    )


def _bits(module: nn.Module) -> int:
    """Bits of the weights' codes; 32 where the layer is not quantised."""
    quantizer: Any = module.weight_quantizer
    return int(quantizer.num_bits) if quantizer.is_enabled else 32


if __name__ == "__main__":
    main()
