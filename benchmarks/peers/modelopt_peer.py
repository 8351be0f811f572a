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
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import record
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

ALGORITHMS: dict[str, Any] = {
    "max": "max",
    "awq_lite": {"method": "awq_lite", "alpha_step": 0.1},
    "awq_full": {"method": "awq_full", "alpha_step": 0.1},
    "awq_clip": {"method": "awq_clip"},
    "mse": {"method": "mse"},
}


def config(bits: int, group_size: int, algorithm: str) -> dict[str, Any]:
    """Weight-only symmetric integers in groups along in_features."""
    return {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": bits, "block_sizes": {-1: group_size}}},
            {"quantizer_name": "*lm_head*", "enable": False},
        ],
        "algorithm": copy.deepcopy(ALGORITHMS[algorithm]),
    }


def forward_step(model: nn.Module, ids: Tensor) -> Any:
    """One sequence, with labels, so that the output has a loss."""
    return model(input_ids=ids, labels=ids, use_cache=False)


def search(model: nn.Module, bits: float, group_size: int, algorithm: str, steps: Iterable[Tensor]) -> nn.Module:
    """The model, quantised as ModelOpt chooses."""
    formats = [config(4, group_size, algorithm), config(8, group_size, "max")]
    num_steps = len(list(steps))
    found, _ = mtq.auto_quantize(
        model,
        # the head is in no tool's question, so its 16 bits do not count
        constraints={"effective_bits": bits, "cost": {"excluded_module_name_patterns": ["*lm_head*"]}},
        quantization_formats=formats,
        data_loader=steps,
        forward_step=forward_step,
        loss_func=lambda output, _: output.loss,
        disabled_layers=["*lm_head*"],
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


def uniform(model: nn.Module, bits: int, group_size: int, algorithm: str, steps: Iterable[Tensor]) -> nn.Module:
    """The model with every decoder linear alike."""

    def forward_loop(model: nn.Module) -> None:
        for ids in steps:
            forward_step(model, ids)

    return mtq.quantize(model, config(bits, group_size, algorithm), forward_loop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=float, required=True)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="max")
    arguments = parser.parse_args()
    facts = json.loads((arguments.folder / "facts.json").read_text(encoding="utf-8"))

    stopwatch = record.Stopwatch()
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
    steps = list(record.read_tokens(arguments.folder / "calibration.safetensors").split(1))
    ask = (arguments.group_size, arguments.algorithm, steps)
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
