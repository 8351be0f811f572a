"""AutoRound: `AutoScheme` over {W4A16, W8A16}, then its own rounding; runs in AutoRound's environment.

How it is called, and why:

* AutoScheme scores on the calibration tokens (16 sequences of 512: it would take 256 tokens of each by itself), counts
  nominal bits (`ignore_scale_zp_bits`), and ties q, k, v and gate, up (`shared_layers`).
* `--iters 0` is its optimised round-to-nearest (scales searched under the squared inputs), `--iters 200` its learned
  rounding, as it comes.
* The tokens are handed over as a dataset registered under a name of its own, since AutoScheme takes nothing but names.
* `amp` off: everything in fp32. With bf16, its default, the weights it computes with have lost 16 of 24 bits besides.
* The 576 columns that 128 does not divide it pads with zeros itself, so the last group spans 64 weights.
* Its cache of scores lies in the run's own folder, so that nothing is found there from before.
* `--bits 4` or `8`: no search, all layers alike.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import record

CALIBRATION = "bitwright_calibration"


def register_tokens(ids: list[list[int]], mask: list[list[int]]) -> None:
    """Make the calibration text a dataset of AutoRound's."""
    import datasets
    from auto_round.calib_dataset import register_dataset

    @register_dataset(CALIBRATION)
    def tokens(**_: Any) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": mask})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=float, required=True)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--iters", type=int, default=0)
    parser.add_argument("--amp", action="store_true", help="its default: bf16 where it sees fit")
    arguments = parser.parse_args()
    facts = record.read_facts(arguments.folder)
    os.environ["AR_AUTO_SCHEME_CACHE"] = str(arguments.out / "scheme-cache")
    os.environ["AR_WORK_SPACE"] = str(arguments.out / "work")

    from auto_round import AutoRound, AutoScheme
    from auto_round.schemes import preset_name_to_scheme
    from transformers import AutoTokenizer

    stopwatch = record.Stopwatch()
    model = record.read_model(arguments.folder)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    ids, mask = record.read_text(arguments.folder / "calibration.safetensors")
    register_tokens(ids.tolist(), mask.tolist())
    options = []
    for name in ("W4A16", "W8A16"):
        scheme = preset_name_to_scheme(name)
        scheme.group_size = arguments.group_size
        options.append(scheme)
    num_sequences, length = ids.shape
    if arguments.bits in (4, 8):
        scheme = options[0 if arguments.bits == 4 else 1]
    else:
        scheme = AutoScheme(
            avg_bits=arguments.bits,
            options=tuple(options),
            ignore_scale_zp_bits=True,
            shared_layers=[group.split() for group in facts["tied"]],
            nsamples=num_sequences,
            seqlen=length,
            dataset=CALIBRATION,
        )
    rounder = AutoRound(
        model,
        tokenizer=tokenizer,
        scheme=scheme,
        iters=arguments.iters,
        nsamples=num_sequences,
        seqlen=length,
        dataset=CALIBRATION,
        device_map="cpu",
        enable_torch_compile=False,
        amp=arguments.amp,
    )
    quantized, layer_config = rounder.quantize()
    times = stopwatch.stop()

    linears = record.decoder_linears(quantized, facts["layers"])
    record.write(
        arguments.out,
        bits={name: layer_config[name]["bits"] for name in linears},
        weights={f"{name}.weight": module.weight for name, module in linears.items()},
        times=times,
        packages=["auto-round", "torch", "transformers"],
        notes={"iters": arguments.iters, "amp": arguments.amp, "group_size": arguments.group_size},
    )


if __name__ == "__main__":
    main()
