"""What every tool's process hands over, in the same form, whichever environment it runs in (torch, safetensors).

    weights.safetensors   parameter name → the fp32 weight that the tool computes with [out, in]
    result.json           site → bits, seconds, memory and versions

Time runs from before the model is read to when the last weight has its codes; neither the import of packages before it
nor the writing of files after it counts. CPU seconds are user and system time of the process and of the children that
it waited for.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak_gib() -> float:
    """Largest resident memory of this process so far, or of its largest child."""
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(peaks) / 2**20


@dataclass(slots=True)
class Stopwatch:
    """Seconds since it was made."""

    _begin_wall: float = field(default_factory=time.perf_counter)
    _begin_cpu: float = field(default_factory=_cpu_s)

    def stop(self) -> dict[str, float]:
        """Wall and CPU seconds so far, and the peak memory."""
        return {
            "wall_s": time.perf_counter() - self._begin_wall,
            "cpu_s": _cpu_s() - self._begin_cpu,
            "peak_memory_gib": _peak_gib(),
            "threads": torch.get_num_threads(),
        }


def read_text(path: Path) -> tuple[Tensor, Tensor]:
    """Token ids and a mask that is 0 at padding, both int64 [sequences, length]."""
    found = load_file(path)
    return found["input_ids"], found["mask"]


def read_facts(folder: Path) -> dict[str, Any]:
    """What `prepare.py` says of a model."""
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return facts


def read_model(folder: Path) -> nn.Module:
    """The fp32 model of a folder: a causal language model, or an encoder without its head."""
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if read_facts(folder)["task"] == "text" else AutoModel
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def sentence_vectors(model: nn.Module, ids_SL: Tensor, mask_SL: Tensor) -> Tensor:
    """Unit vectors of texts [sequences, hidden]: the mean over tokens, as sentence encoders say it."""
    hidden_SLH = model(input_ids=ids_SL, attention_mask=mask_SL).last_hidden_state
    mean_SH = (hidden_SLH * mask_SL[..., None]).sum(1) / mask_SL.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean_SH, dim=-1)


def write(
    out: Path,
    *,
    bits: Mapping[str, float],
    weights: Mapping[str, Tensor],
    times: Mapping[str, float],
    packages: Iterable[str],
    notes: Mapping[str, Any],
) -> None:
    """Write both files; result.json last, so that its presence says that the run is complete."""
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: w.detach().float().contiguous() for name, w in weights.items()}, out / "weights.safetensors")
    result = {
        "bits": dict(bits),
        "times": dict(times),
        "versions": {package: version(package) for package in packages},
        "threads": torch.get_num_threads(),
        "notes": dict(notes),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def weight_in_effect(module: nn.Module) -> Tensor:
    """W [out, in] of a module that computes x Wᵀ by whatever means: its answer to the unit vectors."""
    num_inputs: int = module.in_features  # type: ignore[assignment]
    with torch.no_grad():
        response: Tensor = module(torch.eye(num_inputs))
        bias = getattr(module, "bias", None)
    return (response if bias is None else response - bias).T


def decoder_linears(model: nn.Module, layers: str) -> dict[str, nn.Module]:
    """Name → module of every linear layer below the module list `layers` (a dotted name)."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.startswith(layers + ".") and hasattr(module, "in_features") and hasattr(module, "weight")
    }
