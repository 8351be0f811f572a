"""Asks the real torchao; runs in its own environment, and knows nothing of bitwright.

    python torchao_runner.py request.json answer.safetensors

request: {"folder": what was exported, "texts": [[token id, …], …]}
answer: "logits.<i>" fp32 of each text; and of every layer that torchao holds, "<layer>.weight" dequantised
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@torch.no_grad()
def main() -> None:
    """Answer one request, with the loader that lies in the folder."""
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location("load_torchao", Path(request["folder"]) / "load_torchao.py")
    assert spec is not None and spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    model = loader.load().eval()
    answer = {f"logits.{i}": model(torch.tensor([ids])).logits[0].float() for i, ids in enumerate(request["texts"])}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "qdata"):
            answer[f"{name}.weight"] = weight.dequantize().float().contiguous()
    save_file(answer, sys.argv[2])


if __name__ == "__main__":
    main()
