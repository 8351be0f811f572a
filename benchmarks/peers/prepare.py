"""The same files for every tool: a model as a plain folder, calibration tokens, evaluation tokens of other documents.

A model folder holds config.json, one fp32 model.safetensors and the tokenizer. (transformers refuses to save a model
that came from GGUF, so its weights are moved into a fresh one.) The facts that scripts in other environments need,
without knowing bitwright, lie beside them in facts.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

CALIBRATION_SEQUENCES = 16
EVALUATION_SEQUENCES = 20
LENGTH = 512


def _plain(model: nn.Module) -> Any:
    """A model of the same class, config and weights that transformers does not take for a quantised one."""
    config = model.config  # type: ignore[union-attr]
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    fresh = type(model)(config)  # type: ignore[call-arg,arg-type]
    fresh.load_state_dict(model.state_dict())
    return fresh.float().eval()


def write_model(name: str, folder: Path) -> None:
    """Write model, tokenizer, tokens and facts of a model that `bitwright.models.load` knows."""
    from bitwright.models import find_sites
    from bitwright.models.load import load
    from bitwright.search.text import split_text

    loaded = load(name)
    model = _plain(loaded.model)
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    splits = split_text(
        loaded.tokenizer,
        task="text",
        calibration="docs",
        evaluation="docs",
        calibration_tokens=CALIBRATION_SEQUENCES * LENGTH,
        evaluation_tokens=EVALUATION_SEQUENCES * LENGTH,
        sequence_length=LENGTH,
        seed=0,
    )
    _write_tokens(folder / "calibration.safetensors", splits.calibrate.input_ids)
    _write_tokens(folder / "evaluation.safetensors", splits.final.input_ids[:EVALUATION_SEQUENCES])
    decoder = [site for site in find_sites(model) if site.role not in ("embedding", "lm_head")]
    facts = {
        "model": name,
        "what": f"{len(decoder)} decoder linears of {type(model).__name__}, "
        f"{sum(site.num_weights for site in decoder):,} weights",
        "layers": _module_list(model),
        "tied": ["q_proj k_proj v_proj", "gate_proj up_proj"],
        "text": {"calibrate": splits.calibrate.description, "evaluate": splits.final.description},
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _module_list(model: nn.Module) -> str:
    """Dotted name of the list of layers."""
    return next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))


def _write_tokens(path: Path, ids: torch.Tensor) -> None:
    save_file({"input_ids": ids.contiguous()}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_model(arguments.model, arguments.folder)


if __name__ == "__main__":
    main()
